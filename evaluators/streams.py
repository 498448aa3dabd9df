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
        sizes = [int(tokens_CL.shape[0]) for tokens_CL in self._batches]
        needed = [batch for batch in range(len(sizes)) if sum(sizes[:batch]) < wanted]
        kept = self._group_inputs(needed, group, stream)
        batches: list[Tensor] = []
        for batch in needed:
            inputs_CLK = kept[batch][: wanted - sum(sizes[:batch])]
            batches.append(inputs_CLK.flatten(0, 1).to(torch.float32))
        return batches

    def losses(self, stream: Stream = "quantized") -> Tensor:
        """Return the loss of each chunk in nats per token: (C,) float64."""
        stream = self._effective(stream, self.model.num_blocks)
        kept = self._losses[stream]
        missing = [batch for batch in range(len(self._batches)) if batch not in kept]
        for batch, hidden_CLH in self._entering(missing, self.model.num_blocks, stream).items():
            tokens_CL = self._batches[batch]
            final_CLH = self.model.finish(tokens_CL, hidden_CLH)
            with torch.no_grad():
                kept[batch] = chunk_losses(self.model.model, final_CLH, tokens_CL)
        return torch.cat([kept[batch] for batch in range(len(self._batches))])

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

    def _group_inputs(self, batches: list[int], group: Group, stream: Stream) -> dict[int, Tensor]:
        """Return the group's input (C, L, K) of each batch, measuring what is not kept."""
        block, index = self._places[group.name]
        stream = self._effective(stream, block, index)
        store = self._inputs[stream]
        found = {batch: store[group.name, batch] for batch in batches if (group.name, batch) in store}
        missing = [batch for batch in batches if batch not in found]
        if not missing:
            return found
        groups = self._groups[block]
        # The reference stream changes only by folds, so one run of the block serves all its groups.
        all_bytes = 4 * self.num_chunks * self.length * sum(member.num_inputs for member in groups)
        takes_all = stream == "reference" and all_bytes <= self.cache_bytes
        runs = self._run(
            self._entering(missing, block, stream),
            block,
            stream,
            groups=groups if takes_all else [group],
            stop=not takes_all,
        )
        names = {member.name for member in groups}
        for key in [key for key in store if key[0] not in names]:
            del store[key]
        keeps = takes_all or self.num_chunks * self.length * group.num_inputs * 4 <= self.cache_bytes
        for batch, (leaving, inputs) in runs.items():
            if leaving is not None:
                self._keep(batch, block + 1, self._effective(stream, block + 1), leaving)
            if keeps:
                store.update({(name, batch): inputs_CLK for name, inputs_CLK in inputs.items()})
            found[batch] = inputs[group.name]
        return found

    def _entering(self, batches: list[int], block: int, stream: Stream) -> dict[int, Tensor]:
        """Return the hidden state (C, L, H) of each batch that enters `block`, from the nearest kept state before it."""
        starts: dict[int, int] = {}
        states: dict[int, Tensor] = {}
        for batch in batches:
            start = block
            while start > 0 and (batch, start) not in self._hidden[self._effective(stream, start)]:
                start -= 1
            hidden_CLH = self._hidden[self._effective(stream, start)].get((batch, start))
            if hidden_CLH is None:
                hidden_CLH = self.model.embed(self._batches[batch])
                self._keep(batch, 0, self._effective(stream, 0), hidden_CLH)
            starts[batch], states[batch] = start, hidden_CLH
        for index in range(min(starts.values(), default=block), block):
            running = {batch: states[batch] for batch in batches if starts[batch] <= index}
            for batch, (leaving, _) in self._run(running, index, stream).items():
                assert leaving is not None
                states[batch] = leaving
                self._keep(batch, index + 1, self._effective(stream, index + 1), leaving)
        return states

    def _run(
        self,
        states: dict[int, Tensor],
        block: int,
        stream: Stream,
        *,
        groups: list[Group] | None = None,
        stop: bool = False,
    ) -> dict[int, tuple[Tensor | None, dict[str, Tensor]]]:
        """Run a block on the states of several batches, charged before anything runs."""
        self.meter.charge(sum(self._batches[batch].numel() for batch in states))
        results = self.model.run_block(block, list(states.values()), stream, groups=groups or [], stop=stop)
        return dict(zip(states, results, strict=True))

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
