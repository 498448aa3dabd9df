"""One model in two states: full precision with folds, and quantized as far as installs go. Runs block by block.

The model at rest is the full-precision one. A block of the quantized stream is run by putting its installed layers in
place for that one call. Blocks are replayed with the keyword arguments that the model itself passes to them, captured
once per batch shape from a forward pass whose blocks do nothing. There is never a key-value cache: a cache object
captured among those arguments would grow with every replay and make attention read stale keys.

Legend: C chunks, L tokens per chunk, H hidden size, K input features of a group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from evaluators.architecture import DecoderMap
from evaluators.errors import HostError
from evaluators.parallel import run_side_by_side
from evaluators.quantized_linear import QuantizedLinear, share_activations
from evaluators.session import Group, Stream
from forge_kernels.ops.routes import Route

CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "use_cache")

BlockArguments = list[dict[str, Any]]


class _StopForward(Exception):
    """Leaves a forward pass once what it was run for has been seen."""


class _Captured(threading.local):
    """Group inputs that the run of one thread has seen."""

    inputs: dict[str, Tensor] = {}


class TwoStreamModel:
    """A mapped model and the quantized layers installed in it so far.

    Attributes:
        map: the decoder map; its model holds full-precision weights whenever no block is running.
        installed: quantized layers by layer name.
    """

    def __init__(self, decoder_map: DecoderMap) -> None:
        self.map = decoder_map
        self.installed: dict[str, QuantizedLinear] = {}
        self._names: list[list[str]] = [[] for _ in decoder_map.block_modules]
        for layer in decoder_map.layers:
            self._names[layer.block].append(layer.name)
        self._arguments: dict[tuple[int, ...], BlockArguments] = {}

    @property
    def model(self) -> nn.Module:
        """The transformers model."""
        return self.map.model

    @property
    def num_blocks(self) -> int:
        """Number of decoder blocks."""
        return len(self.map.block_modules)

    @property
    def routes(self) -> dict[str, Route]:
        """How each installed layer's product is computed, by layer name."""
        return {name: module.route for name, module in self.installed.items()}

    def install(self, layer_name: str, module: QuantizedLinear) -> None:
        """Put a quantized layer into the quantized stream."""
        self.installed[layer_name] = module
        group = self.map.group(self.map.layer(layer_name).group)
        share_activations(self.installed[layer.name] for layer in group.layers if layer.name in self.installed)

    def embed(self, tokens_CL: Tensor) -> Tensor:
        """Return the hidden state that enters the first block, (C, L, H); learns the blocks' arguments on the way."""
        captured: BlockArguments = []
        first: list[Tensor] = []

        def skip(hidden_CLH: Tensor, **arguments: Any) -> Tensor:
            if not captured:
                first.append(hidden_CLH)
            captured.append(_without_cache(arguments))
            if len(captured) == self.num_blocks:
                raise _StopForward
            return hidden_CLH

        with self._blocks_replaced([skip] * self.num_blocks), torch.no_grad():
            try:
                self._run_body(tokens_CL)
            except _StopForward:
                pass
        self._arguments[tuple(tokens_CL.shape)] = captured
        return first[0]

    def finish(self, tokens_CL: Tensor, hidden_CLH: Tensor) -> Tensor:
        """Return the final norm's output (C, L, H) for the hidden state that left the last block."""

        def give(_: Tensor, **arguments: Any) -> Tensor:
            return hidden_CLH

        with self._blocks_replaced([give] * self.num_blocks), torch.no_grad():
            return cast(Tensor, self._run_body(tokens_CL).last_hidden_state)

    def run_block(
        self,
        block: int,
        hidden_states: Sequence[Tensor],
        stream: Stream,
        *,
        groups: Sequence[Group] = (),
        stop: bool = False,
    ) -> list[tuple[Tensor | None, dict[str, Tensor]]]:
        """Run one block on the hidden states of several batches, side by side on a CPU.

        Args:
            block: index of the block.
            hidden_states: one (C, L, H) for each batch, from `embed` or the block before.
            stream: ``quantized`` puts the installed layers of this block in place.
            groups: groups of this block, in execution order, whose inputs are wanted.
            stop: leave the block as soon as the last of `groups` has been reached.

        Returns:
            For each batch the hidden state that leaves the block (None if stopped), and the inputs (C, L, K) by group.
        """
        captured = _Captured()

        def run(hidden_CLH: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
            arguments = self._arguments[tuple(hidden_CLH.shape[:2])][block]
            inputs = captured.inputs = {}
            with torch.no_grad():
                try:
                    output = self.map.block_modules[block](hidden_CLH, **arguments)
                except _StopForward:
                    return None, inputs
            return (output[0] if isinstance(output, tuple) else output), inputs

        with self._stream_in_place(block, stream), self._captured(groups, captured, stop):
            return run_side_by_side(run, hidden_states)

    @contextmanager
    def fully_quantized(self) -> Iterator[nn.Module]:
        """Put every installed layer in place for a forward pass through the whole model."""
        names = list(self.installed)
        try:
            for name in names:
                self.map.replace(name, self.installed[name])
            yield self.model
        finally:
            for name in names:
                self.map.restore(name)

    def _run_body(self, tokens_CL: Tensor) -> Any:
        return cast(Any, self.model).model(input_ids=tokens_CL, use_cache=False)

    @contextmanager
    def _blocks_replaced(self, forwards: Sequence[Any]) -> Iterator[None]:
        blocks = self.map.block_modules
        try:
            for block, forward in zip(blocks, forwards, strict=True):
                block.forward = forward
            yield
        finally:
            for block in blocks:
                block.__dict__.pop("forward", None)

    @contextmanager
    def _stream_in_place(self, block: int, stream: Stream) -> Iterator[None]:
        names: list[str] = []
        if stream == "quantized":
            names = [name for name in self._names[block] if name in self.installed]
        try:
            for name in names:
                self.map.replace(name, self.installed[name])
            yield
        finally:
            for name in names:
                self.map.restore(name)
                self.installed[name].group_activation.clear()

    @contextmanager
    def _captured(self, groups: Sequence[Group], captured: _Captured, stop: bool) -> Iterator[None]:
        def hook_for(group: Group, is_last: bool) -> Any:
            def hook(_: nn.Module, positional: tuple[Tensor, ...]) -> None:
                captured.inputs[group.name] = positional[0]
                if is_last:
                    raise _StopForward

            return hook

        handles = [
            self.map.group_hook_module(group).register_forward_pre_hook(hook_for(group, stop and group is groups[-1]))
            for group in groups
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    kept = dict(arguments)
    for name in CACHE_ARGUMENTS:
        value = kept.pop(name, None)
        if value is not None and value is not False:
            raise HostError(f"the model passes a key-value cache ({name}) to its blocks although use_cache is False")
    return kept
