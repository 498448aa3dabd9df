"""The trusted side of a session: serves every call of a program, and keeps the only log of them that counts.

A plain object without transport or processes. It owns a pristine copy of the subject, the calibration and gate tokens,
the meter and the event log. What a call is given is hostile until checked; a bad call raises `ContractError`, which the
program may catch. Errors that end the run (too many tokens or calls) are remembered and raised again by every later
call, so that catching them gains nothing.

Legend: C chunks, L tokens per chunk, T tokens, N output features, K input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from evaluators.apply import changed_parameters
from evaluators.artifact import Artifact
from evaluators.contract import Contract, check_install, measure_contract
from evaluators.empty_steps import branch_rank, essence
from evaluators.errors import ContractError, ProgramError
from evaluators.fold_guard import FoldGuard, touched_layers
from evaluators.installs import Install, step_names
from evaluators.meter import Meter
from evaluators.quantized_linear import QuantizedLinear
from evaluators.results import Outcome
from evaluators.session import Group, Layer, Site, Stream
from evaluators.session_dispatch import serve_call
from evaluators.streams import STREAMS, Streams
from evaluators.subjects import Subject
from evaluators.two_streams import TwoStreamModel
from evaluators.wire import Hello, check_request
from forge_kernels.rules import ActivationRule, Encoded, LowRank
from forge_kernels.transforms import IDENTITY, Transform

MAX_LOG_CHARACTERS = 65_536

T = TypeVar("T")


class SessionServer:
    """Serves one run of one program.

    Args:
        subject: the full-precision model; a pristine copy of it is made and never leaves this object.
        calibration_CL: (C, L) int64 tokens for measurements.
        gate_CL: (C', L') int64 tokens for `gate_loss`.
        contract: the rules of installs, and the caps on metered tokens and calls.
        seed: seed of the evaluation, from which a program's generators are derived.
    """

    def __init__(
        self, subject: Subject, *, calibration_CL: Tensor, gate_CL: Tensor, contract: Contract, seed: int = 0
    ) -> None:
        self.subject = subject
        self.contract = contract
        self.seed = seed
        self.model = TwoStreamModel(subject.pristine().map)
        self.meter = Meter(
            num_blocks=self.model.num_blocks,
            max_tokens=contract.max_forward_passes * calibration_CL.numel(),
        )
        self.installs: dict[str, Install] = {}
        self.events: list[dict[str, Any]] = []
        self.program_log = ""
        self._device = subject.device
        self._calibration = Streams(self.model, calibration_CL.to(self._device), self.meter)
        self._gate = Streams(self.model, gate_CL.to(self._device), self.meter)
        self._fold_guard = FoldGuard(self.model.map, calibration_CL[:1].to(self._device))
        self._folds: list[tuple[str, Tensor]] = []
        self._num_calls = 0
        self._fatal: ProgramError | None = None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer to install, in execution order."""
        return self.model.map.layers

    @property
    def groups(self) -> tuple[Group, ...]:
        """Layers by shared input, in execution order."""
        return self.model.map.groups

    @property
    def sites(self) -> tuple[Site, ...]:
        """Places where folds are sound."""
        return self.model.map.sites

    def hello(self) -> Hello:
        """Return what a client must know first."""
        return Hello(self.layers, self.groups, self.sites, str(self._device), self.seed)

    def dispatch(self, op: str, args: dict[str, Any], tensors: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """Serve one call that came over the wire: reply as JSON, and the tensors that go with it.

        A `ContractError` becomes the reply ``{"error": {"kind": "contract", "message": ...}}``.

        Raises:
            ProtocolError: a message that no honest client sends.
            ProgramError: the run is over (tokens or calls beyond the cap).
        """
        check_request({"op": op, "args": args}, len(tensors))
        try:
            return serve_call(self, op, args, tensors)
        except ContractError as error:
            return {"error": {"kind": "contract", "message": str(error)}}, []

    def count_call(self) -> None:
        """Count one call, refused or not.

        Raises:
            ProgramError: the run is over, or this call is one too many.
        """
        if self._fatal is not None:
            raise self._fatal
        self._num_calls += 1
        if self._num_calls > self.contract.max_calls:
            self._fatal = ProgramError(
                f"the program made more than {self.contract.max_calls} session calls", Outcome.CONTRACT
            )
            raise self._fatal

    def weight(self, layer: str) -> Tensor:
        """See `Session.weight`."""
        self.count_call()
        found = self._layer(layer)
        self._record("weight", layer=found)
        return self.reference_weight(found.name).detach().to("cpu", torch.float32).clone()

    def inputs(self, group: str, *, stream: Stream = "quantized", max_tokens: int | None = None) -> Tensor:
        """See `Session.inputs`."""
        found, batches = self._measure(group, stream, max_tokens)
        inputs_TK = torch.cat(batches)
        _require_finite(found, inputs_TK)
        self._record("inputs", group=found, stream=stream)
        return inputs_TK.cpu()

    def second_moment(self, group: str, *, stream: Stream = "quantized", max_tokens: int | None = None) -> Tensor:
        """See `Session.second_moment`. Products in float32 within a batch of sequences, their sum in float64."""
        found, batches = self._measure(group, stream, max_tokens)
        moment_KK = torch.zeros(found.num_inputs, found.num_inputs, dtype=torch.float64, device=self._device)
        for inputs_TK in batches:
            moment_KK += (inputs_TK.T @ inputs_TK).double()
        moment_KK /= sum(len(inputs_TK) for inputs_TK in batches)
        _require_finite(found, moment_KK)
        self._record("second_moment", group=found, stream=stream)
        return ((moment_KK + moment_KK.T) / 2).cpu()

    def output_error(
        self,
        layer: str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> float:
        """See `Session.output_error`. The bias is on both sides and cancels."""
        self.count_call()
        found = self._layer(layer)
        install = check_install(
            self.contract, found, weight, transform=transform, activation=activation, low_rank=low_rank
        )
        batches = self._guarded(lambda: self._calibration.batched_inputs(self._group(found.group), "quantized"))
        module = QuantizedLinear(install, None, device=self._device)
        weight_NK = self.reference_weight(found.name)
        error = power = 0.0
        with torch.no_grad():
            for inputs_TK in batches:
                expected_TN = functional.linear(inputs_TK, weight_NK)
                error += float((expected_TN - module(inputs_TK)).square().sum(dtype=torch.float64))
                power += float(expected_TN.square().sum(dtype=torch.float64))
        if not math.isfinite(error) or not math.isfinite(power):
            raise ContractError(f"layer {layer!r}: the output error is not finite; use smaller scales or transforms")
        self._record("output_error", layer=found, install=install)
        return error / power if power > 0 else (0.0 if error == 0 else math.inf)

    def gate_loss(self) -> float:
        """See `Session.gate_loss`."""
        self.count_call()
        loss = float(self._guarded(self._gate.losses).mean())
        if not math.isfinite(loss):
            raise ContractError("the model's loss on the gate split is not finite; replace the layer installed last")
        self._record("gate_loss")
        return loss

    def fold(self, site: str, matrix: Tensor) -> None:
        """See `Session.fold`."""
        self.count_call()
        found = self._site(site)
        installed = [layer.name for layer in touched_layers(self.model.map, found) if layer.name in self.installs]
        if installed:
            raise ContractError(
                f"fold at {found.name!r} would change {installed[0]!r}, which is installed; fold before installing"
            )
        if sum(name == found.name for name, _ in self._folds) >= self.contract.max_folds_per_site:
            raise ContractError(
                f"{self.contract.max_folds_per_site} folds were made already at {found.name!r}; multiply matrices first"
            )
        # Refused folds too: else a program could try any number of them, and learn from the logits that it is told of.
        self._guarded(lambda: self.meter.charge(self._fold_guard.num_tokens, self.model.num_blocks))
        checked = self._fold_guard.fold(found, matrix)
        self._folds.append((found.name, checked))
        for streams in (self._calibration, self._gate):
            streams.forget_after_fold(found)
        self._record("fold", site=found)

    def install(
        self,
        layer: str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> None:
        """See `Session.install`."""
        self.count_call()
        found = self._layer(layer)
        install = check_install(
            self.contract, found, weight, transform=transform, activation=activation, low_rank=low_rank
        )
        bias_N = self.model.map.linear(found).bias
        self.model.install(found.name, QuantizedLinear(install, bias_N, device=self._device))
        self.installs[found.name] = install
        for streams in (self._calibration, self._gate):
            streams.forget_after_install(self._group(found.group))
        self._record("install", layer=found, install=install)

    def log(self, message: str) -> None:
        """See `Session.log`; kept up to 64 Ki characters in all, without control characters."""
        self.count_call()
        room = MAX_LOG_CHARACTERS - len(self.program_log)
        # A program must not speak to the terminal that shows its log.
        text = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in message[:room])
        self.program_log += f"{text}\n"[:room]

    def reference_weight(self, layer: str) -> Tensor:
        """Return the full-precision weight (N, K) of a layer, folds included; the weight itself, not a copy."""
        return self.model.map.linear(layer).weight.detach()

    def finish(self) -> Artifact:
        """Return what was installed as an artifact.

        Raises:
            ProgramError: the run went over a cap.
            ContractError: a layer was never installed, the layers of a group disagree, or too many bits.
        """
        if self._fatal is not None:
            raise self._fatal
        measure_contract(self.contract, self.groups, self.installs)
        return Artifact(
            contract=self.contract.name,
            subject_name=self.subject.name,
            subject_hash=self.subject.hash,
            groups={
                group.name: {layer.name: self.installs[layer.name] for layer in group.layers} for group in self.groups
            },
            folds=tuple(self._folds),
            changed=changed_parameters(self.subject.map, self.model.map) if self._folds else {},
        )

    def _measure(self, group: str, stream: Stream, max_tokens: int | None) -> tuple[Group, list[Tensor]]:
        self.count_call()
        found = self._group(group)
        if stream not in STREAMS:
            raise ContractError(f"unknown stream {stream!r}; known: {', '.join(STREAMS)}")
        num_chunks = None
        if max_tokens is not None:
            if type(max_tokens) is not int or max_tokens < self._calibration.length:
                raise ContractError(
                    f"max_tokens={max_tokens!r}; a calibration sequence has {self._calibration.length} tokens, "
                    "so give at least that many"
                )
            num_chunks = max_tokens // self._calibration.length
        return found, self._guarded(lambda: self._calibration.batched_inputs(found, stream, num_chunks))

    def _guarded(self, measure: Callable[[], T]) -> T:
        """Run a measurement; going over the meter ends the run for good."""
        try:
            return measure()
        except ProgramError as error:
            self._fatal = error
            raise

    def _layer(self, name: str) -> Layer:
        return self.model.map.layer(name)

    def _group(self, name: str) -> Group:
        return self.model.map.group(name)

    def _site(self, name: str) -> Site:
        return self.model.map.site(name)

    def _record(
        self,
        op: str,
        *,
        layer: Layer | None = None,
        group: Group | None = None,
        site: Site | None = None,
        stream: Stream | None = None,
        install: Install | None = None,
    ) -> None:
        event: dict[str, Any] = {"index": len(self.events), "op": op}
        place = layer or group
        if place is not None:
            event |= {"block": place.block, "role": place.role}
        if layer is not None:
            event |= {"layer": layer.name, "group": layer.group}
        if group is not None:
            event["group"] = group.name
        if site is not None:
            event |= {"site": site.name, "block": site.block}
        if stream is not None:
            event["stream"] = stream
        if install is not None:
            acting = essence(install.transform, install.activation)
            event |= {"rank": branch_rank(install.low_rank), "transform": step_names(acting.steps)}
        self.events.append(event)


def _require_finite(group: Group, measured: Tensor) -> None:
    if not bool(measured.isfinite().all()):
        raise ContractError(f"the input of group {group.name!r} is not finite; replace what is installed before it")


def draw_chunks(chunks_CL: Tensor, num_chunks: int, draw: int) -> Tensor:
    """Return `num_chunks` of the chunks, or all there are, in text order; a generator seeded with `draw` chooses."""
    if num_chunks >= len(chunks_CL):
        return chunks_CL
    generator = torch.Generator().manual_seed(draw)
    chosen = torch.randperm(len(chunks_CL), generator=generator)[:num_chunks]
    return chunks_CL[chosen.sort().values]
