"""What an evaluation returns: a score or a recorded failure, and the evidence that trusted code saw.

A failure of the program is data here, never an exception; a failure of the host is an exception (`errors.HostError`) and
never appears as an outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Split = Literal["search", "confirm", "sealed"]
SPLITS: tuple[Split, ...] = ("search", "confirm", "sealed")
ContractClass = Literal["folded", "online", "corrected"]


class Outcome(StrEnum):
    """How an evaluation of a program ended. Only `SCORED` carries a score."""

    SCORED = "scored"
    CONTRACT = "contract"  # broke the contract, or left a layer without an install
    CRASHED = "crashed"  # raised, or its process died
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    NON_FINITE = "non_finite"  # the quantized model returns NaN or infinity
    OVER_METERED = "over_metered"  # spent more subject-forward tokens than the contract allows

    @property
    def is_scored(self) -> bool:
        return self is Outcome.SCORED


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the evaluator saw of one run of a program; plain JSON, so that the ledger can keep it.

    events: the Session calls in order. Each has ``index``, ``op`` (``weight``, ``inputs``, ``second_moment``,
        ``output_error``, ``gate_loss``, ``fold``, ``install``), and where it applies ``layer``, ``group``, ``site``,
        ``block``, ``role``, ``stream``, ``rank``, ``transform`` (list of step kinds).
    layers: by layer name, what was decoded from the artifact: ``digest`` (sha256 of decoded weight, transform, activation
        rule and branch), ``transform`` (list of step kinds, ``hadamard:32`` with its size; none that changes nothing),
        ``scale_rule``, ``code_rule``, ``rank`` (of the matrix that the branch adds), ``bits`` (effective bits of this layer),
        ``weight_error`` (relative squared error of the decoded weight against ``W T^-1``), and once the artifact was scored
        ``route`` (how the layer's product was computed).
    line_hits: of a smoke run, lines that ran by function of the program (`evaluators.line_counts`). Advisory: the program could
        have written them.
    """

    events: tuple[dict[str, Any], ...] = ()
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    line_hits: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        counted = {"line_hits": dict(self.line_hits)} if self.line_hits else {}
        return {"events": list(self.events), "layers": self.layers} | counted


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """One run of one program on one subject.

    chunk_nll: mean negative log-likelihood of each chunk of the scored split, nats per token; empty unless scored.
    route: how the products of the scored model were computed (`forge_kernels.ops.routes`), with the number of layers of each.
    reference_chunk_nll: the same for an artifact scored beside it (see `Evaluator.evaluate`), else empty.
    """

    outcome: Outcome
    reason: str = ""
    split: Split
    draw: int
    seed: int
    chunk_nll: tuple[float, ...] = ()
    reference_chunk_nll: tuple[float, ...] = ()
    tokens_per_chunk: int = 0
    contract: str = ""
    contract_class: ContractClass | None = None
    effective_bits: float | None = None
    artifact_hash: str | None = None
    evidence: Evidence = field(default_factory=Evidence)
    metered_tokens: int = 0
    route: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    sandbox: str = ""
    program_log: str = ""
    wall_s: float = 0.0

    @property
    def nll(self) -> float | None:
        """Mean over chunks, nats per token; None unless scored."""
        return math.fsum(self.chunk_nll) / len(self.chunk_nll) if self.chunk_nll else None


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """One row of an error map: relative squared output error of one layer, ``|| y - y_q ||^2 / || y ||^2``.

    weight: only the weight quantized; activation: only the activation quantized; joint: both (with the branch, if any).
    clip_rate: share of transformed activation values beyond the largest code of their block.
    """

    layer: str
    block: int
    role: str
    weight: float
    activation: float
    joint: float
    clip_rate: float
