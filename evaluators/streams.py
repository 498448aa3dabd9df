"""Measurements on calibration or gate text: exact as a fresh forward pass, cheap because unchanged prefixes are kept.

The hidden states that enter each block are kept per batch of chunks and stream. A change made at a place in the model
(an install in a group, a fold at a site) drops everything computed after that place and nothing before it, so a program
that walks the blocks in order pays one block per measurement. While no layer of a prefix is installed, the quantized
stream *is* the reference stream, and shares its states. Group inputs are kept for one block per stream.

Legend: C chunks, L tokens per chunk, T = C L tokens, H hidden size, K input features of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evaluators.meter import Meter
from evaluators.scorer import chunk_losses
from evaluators.session import Group, Site, Stream
from evaluators.two_streams import TwoStreamModel

BATCH_TOKENS = 2048
CACHE_BYTES = 2**30
STREAMS: tuple[Stream, ...] = ("quantized", "reference")


class Streams:
    """The two activation streams of one set of token chunks.

    Args:
        model: the model in its two states.
        chunks_CL: (C, L) int64.
        meter: charged for every block run.
        batch_tokens: tokens per forward pass (at least one chunk).
        cache_bytes: most bytes of hidden states kept per stream, and of group inputs kept per stream.
    """

    def __init__(
        self,
        model: TwoStreamModel,
        chunks_CL: Tensor,
        meter: Meter,
        *,
        batch_tokens: int = BATCH_TOKENS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.model = model
        self.chunks_CL = chunks_CL
        self.meter = meter
        self.cache_bytes = cache_bytes
        self._batches = torch.split(chunks_CL, max(1, batch_tokens // int(chunks_CL.shape[1])))
        self._hidden: dict[Stream, dict[tuple[int, int], Tensor]] = {stream: {} for stream in STREAMS}
        self._inputs: dict[Stream, dict[tuple[str, int], Tensor]] = {stream: {} for stream in STREAMS}
        self._losses: dict[Stream, dict[int, Tensor]] = {stream: {} for stream in STREAMS}
        self._first_installed: tuple[int, int] | None = None
        self._groups: list[list[Group]] = [[] for _ in range(model.num_blocks)]
        self._places: dict[str, tuple[int, int]] = {}
        for group in model.map.groups:
            self._places[group.name] = (group.block, len(self._groups[group.block]))
            self._groups[group.block].append(group)

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return int(self.chunks_CL.shape[0])

    @property
    def length(self) -> int:
        """Tokens per chunk."""
        return int(self.chunks_CL.shape[1])

    def batched_inputs(self, group: Group, stream: Stream, num_chunks: int | None = None) -> list[Tensor]:
        """Return the group's input on the first `num_chunks` chunks, as a list of (T_i, K) float32 in text order.

        The tensors are the kept ones: read them, never write to them.
        """
        wanted = self.num_chunks if num_chunks is None else num_chunks
        batches: list[Tensor] = []
        for batch, tokens_CL in enumerate(self._batches):
            if wanted <= 0:
                break
            inputs_CLK = self._group_input(batch, group, stream)[:wanted]
            batches.append(inputs_CLK.flatten(0, 1).to(torch.float32))
            wanted -= int(tokens_CL.shape[0])
        return batches

    def losses(self, stream: Stream = "quantized") -> Tensor:
        """Return the loss of each chunk in nats per token: (C,) float64."""
        return torch.cat([self._batch_losses(batch, stream) for batch in range(len(self._batches))])

    def forget_after_install(self, group: Group) -> None:
        """Drop what the quantized stream computed after `group`: one of its layers was installed."""
        place = self._places[group.name]
        if self._first_installed is None or place < self._first_installed:
            self._first_installed = place
        self._forget("quantized", group.block, place[1])

    def forget_after_fold(self, site: Site) -> None:
        """Drop what both streams computed from the site's block on; everything for a fold without a block."""
        for stream in STREAMS:
            self._forget(stream, -1 if site.block is None else site.block, -1)

    def _forget(self, stream: Stream, block: int, index: int) -> None:
        """Drop hidden states that enter later blocks, and inputs of later groups than (block, index)."""
        hidden, inputs = self._hidden[stream], self._inputs[stream]
        self._hidden[stream] = {key: value for key, value in hidden.items() if key[1] <= block}
        self._inputs[stream] = {key: value for key, value in inputs.items() if self._places[key[0]] <= (block, index)}
        self._losses[stream].clear()

    def _effective(self, stream: Stream, block: int, index: int = 0) -> Stream:
        """The reference stream wherever nothing is installed before the place (block, index)."""
        if self._first_installed is None or self._first_installed >= (block, index):
            return "reference"
        return stream

    def _group_input(self, batch: int, group: Group, stream: Stream) -> Tensor:
        block, index = self._places[group.name]
        stream = self._effective(stream, block, index)
        kept = self._inputs[stream].get((group.name, batch))
        if kept is not None:
            return kept
        groups = self._groups[block]
        # The reference stream changes only by folds, so one run of the block serves all its groups.
        all_bytes = 4 * self.num_chunks * self.length * sum(member.num_inputs for member in groups)
        takes_all = stream == "reference" and all_bytes <= self.cache_bytes
        entering = self._entering(batch, block, stream)
        leaving, inputs = self._run(
            batch, block, entering, stream, groups=groups if takes_all else [group], stop=not takes_all
        )
        if leaving is not None:
            self._keep(batch, block + 1, self._effective(stream, block + 1), leaving)
        store = self._inputs[stream]
        names = {member.name for member in groups}
        for key in [key for key in store if key[0] not in names]:
            del store[key]
        for name, inputs_CLK in inputs.items():
            if takes_all or self.num_chunks * self.length * group.num_inputs * 4 <= self.cache_bytes:
                store[name, batch] = inputs_CLK
        return inputs[group.name]

    def _batch_losses(self, batch: int, stream: Stream) -> Tensor:
        num_blocks = self.model.num_blocks
        stream = self._effective(stream, num_blocks)
        kept = self._losses[stream].get(batch)
        if kept is None:
            tokens_CL = self._batches[batch]
            final_CLH = self.model.finish(tokens_CL, self._entering(batch, num_blocks, stream))
            with torch.no_grad():
                kept = self._losses[stream][batch] = chunk_losses(self.model.model, final_CLH, tokens_CL)
        return kept

    def _entering(self, batch: int, block: int, stream: Stream) -> Tensor:
        """Return the hidden state (C, L, H) that enters `block`, from the nearest kept state before it."""
        start = block
        while start > 0 and (batch, start) not in self._hidden[self._effective(stream, start)]:
            start -= 1
        hidden_CLH = self._hidden[self._effective(stream, start)].get((batch, start))
        if hidden_CLH is None:
            hidden_CLH = self.model.embed(self._batches[batch])
            self._keep(batch, 0, self._effective(stream, 0), hidden_CLH)
        for index in range(start, block):
            leaving, _ = self._run(batch, index, hidden_CLH, stream)
            assert leaving is not None
            hidden_CLH = leaving
            self._keep(batch, index + 1, self._effective(stream, index + 1), hidden_CLH)
        return hidden_CLH

    def _run(
        self,
        batch: int,
        block: int,
        hidden_CLH: Tensor,
        stream: Stream,
        *,
        groups: list[Group] | None = None,
        stop: bool = False,
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        self.meter.charge(self._batches[batch].numel())
        return self.model.run_block(block, hidden_CLH, stream, groups=groups or [], stop=stop)

    def _keep(self, batch: int, block: int, stream: Stream, hidden_CLH: Tensor) -> None:
        """Keep a state; over the byte limit, states of the earliest other blocks make room, then it is not kept."""
        store = self._hidden[stream]
        size = hidden_CLH.numel() * hidden_CLH.element_size()
        used = sum(kept.numel() * kept.element_size() for kept in store.values())
        for key in sorted((key for key in store if key[1] != block), key=lambda key: key[1]):
            if used + size <= self.cache_bytes:
                break
            used -= store[key].numel() * store[key].element_size()
            del store[key]
        if used + size <= self.cache_bytes:
            store[batch, block] = hidden_CLH
