"""What the ledger takes and gives: frozen records, never rows. Records of claims are in `claims`.

`New*` is what a writer hands over; the class without the prefix is the same plus what the ledger adds (`Stored`).
Columns exist for what people ask in SQL; `body` keeps the whole object of the layer above as JSON. Effects and standard
errors are in nats per token. Every float must be finite; an unknown number is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

Json = dict[str, Any]

ProgramOrigin = Literal["seed", "candidate", "control", "knockout"]
ProposalStatus = Literal["accepted", "refused"]
EvaluationKind = Literal["candidate", "control", "confirmation", "setup", "final"]
EvaluationState = Literal["reserved", "settled"]

ENDED = "end"
"""Topic of the note that a campaign is over: calls, turns or ideas are spent."""

STOPPED = "stopped"
"""Topic of a note that a campaign could not go on for now: an outage, which is no part of the search and is not hashed."""

SCORED = "scored"
"""The one outcome that carries a score; all others are failures of the program, with a reason."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What the ledger adds to a record: its id, its place in the order of events, and when (UTC) it was written."""

    id: str
    seq: int
    at: datetime


@dataclass(frozen=True, kw_only=True)
class NewCampaign:
    """What is fixed for the run. `budget` counts evaluator calls; `sandbox` is the isolation in force, or ``none``."""

    recipe: Json
    seed: int
    budget: int
    contract: str
    subject_name: str
    subject_hash: str
    corpus_hash: str
    corpus_protocol: str
    proposer: str
    sandbox: str


@dataclass(frozen=True, kw_only=True)
class Campaign(NewCampaign, Stored):
    """The one campaign of a ledger."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One process that wrote to the ledger: where it ran and with what. Left out of the content hash."""

    pid: int
    boot_id: str
    device: str
    versions: Json
    details: Json
    at: datetime


@dataclass(frozen=True, kw_only=True)
class NewProgram:
    """One program. The same source under another origin or parent is another record, with the same `ast_hash`."""

    source: str
    origin: ProgramOrigin
    ast_hash: str
    normalized_ast_hash: str
    title: str = ""
    parent_id: str | None = None
    mechanisms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program(NewProgram, Stored):
    """A stored program; immutable."""


@dataclass(frozen=True, kw_only=True)
class NewLlmCall:
    """A reply of the proposer. `purpose` is the key by which a replay finds it, for example ``turn-3/propose/1``."""

    purpose: str
    prompt: str
    reply: str
    model: str
    tokens_in: int | None = None
    tokens_out: int | None = None
    cost: float | None = None
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LlmCall(NewLlmCall, Stored):
    """A stored reply."""


@dataclass(frozen=True, kw_only=True)
class LlmSpend:
    """Second budget: what replies and failed calls cost together. `cost` is None as soon as one price is unknown."""

    num_calls: int
    num_failures: int
    tokens_in: int
    tokens_out: int
    cost: float | None
    num_unknown_costs: int


@dataclass(frozen=True, kw_only=True)
class NewProposal:
    """One reply of the proposer for one turn, accepted or refused before an evaluator call was spent.

    kind: what the reply is for (``candidate``, ``explanation``, ``control``). attempt: 0, then 1 for the repair turn.
    stage and reason: where and exactly why it was refused; empty when accepted.
    claims: ``{"mechanism": ..., "cause": ...}`` for each mechanism it relies on. discharges: ids of required edits.
    """

    turn: int
    attempt: int
    status: ProposalStatus
    kind: str = "candidate"
    llm_call_id: str | None = None
    program_id: str | None = None
    stage: str = ""
    reason: str = ""
    claims: tuple[Json, ...] = ()
    discharges: tuple[str, ...] = ()
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Proposal(NewProposal, Stored):
    """A stored proposal."""


@dataclass(frozen=True, kw_only=True)
class NewScreening:
    """A smoke run and the static checks of one program; costs no evaluator call. `checks` are provisional.

    With `proposal_id`: the run on the whole subject that a probe of that proposal compared with, `checks` saying how it was run.
    """

    program_id: str
    passed: bool
    smoke_outcome: str
    proposal_id: str | None = None
    reason: str = ""
    evidence: Json = field(default_factory=dict)
    checks: tuple[Json, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Screening(NewScreening, Stored):
    """A stored screening."""


@dataclass(frozen=True, kw_only=True)
class NewEvaluation:
    """What one evaluator call will measure; all fields but `turn` together are its key.

    program_id None means the full-precision subject, which only a ``setup`` evaluation may measure.
    reference_artifact: hash of an earlier artifact scored beside it on the same split.
    """

    kind: EvaluationKind
    split: str
    program_id: str | None
    draw: int = 0
    seed: int = 0
    control_id: str | None = None
    observation_id: str | None = None
    reference_artifact: str | None = None
    turn: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """How an evaluation ended. `chunk_nll`, in nats per token, is empty unless the outcome is ``scored``."""

    outcome: str
    reason: str = ""
    chunk_nll: tuple[float, ...] = ()
    reference_chunk_nll: tuple[float, ...] = ()
    tokens_per_chunk: int = 0
    contract: str = ""
    contract_class: str | None = None
    effective_bits: float | None = None
    artifact_hash: str | None = None
    evidence: Json = field(default_factory=dict)
    metered_tokens: int = 0
    route: str = ""
    log_tail: str = ""
    wall_s: float = 0.0
    device: str = ""
    versions: Json = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        """Whether there is a score."""
        return self.outcome == SCORED

    @property
    def nll(self) -> float | None:
        """Mean over chunks, nats per token; None unless scored."""
        return math.fsum(self.chunk_nll) / len(self.chunk_nll) if self.chunk_nll else None


@dataclass(frozen=True, kw_only=True)
class Evaluation(NewEvaluation, Stored):
    """An evaluation: reserved, or settled with `result`. `attempt` counts the processes that started it, from 1."""

    state: EvaluationState
    attempt: int
    settled_seq: int | None
    result: Settlement | None

    @property
    def is_settled(self) -> bool:
        """Whether the result is there."""
        return self.result is not None

    @property
    def nll(self) -> float | None:
        """Mean NLL in nats per token; None unless settled and scored."""
        return self.result.nll if self.result is not None else None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Evaluator calls: ``used + reserved + free == total``, always. Setup evaluations are counted apart."""

    total: int
    used: int
    reserved: int
    num_setup: int

    @property
    def free(self) -> int:
        """Calls that can still be reserved."""
        return self.total - self.used - self.reserved


@dataclass(frozen=True, kw_only=True)
class NewNoise:
    """The noise floor of the campaign, measured on one program before the first turn."""

    program_id: str
    split: str
    floor: float
    chunk_variance: float
    draw_variance: float
    num_chunks: int
    evaluation_ids: tuple[str, ...]
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Noise(NewNoise, Stored):
    """A stored noise floor."""


@dataclass(frozen=True, kw_only=True)
class NewErrorMap:
    """Errors per layer of one artifact; one JSON object per layer."""

    artifact_hash: str
    rows: tuple[Json, ...]


@dataclass(frozen=True, kw_only=True)
class ErrorMap(NewErrorMap, Stored):
    """A stored error map."""


@dataclass(frozen=True, kw_only=True)
class NewIncumbent:
    """A promotion. The history is append-only; the incumbent is its last row."""

    turn: int
    program_id: str
    evaluation_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Incumbent(NewIncumbent, Stored):
    """A stored promotion."""


@dataclass(frozen=True, kw_only=True)
class NewNote:
    """A sentence for readers, for example that no useful set of controls fits the remaining budget."""

    turn: int
    topic: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Note(NewNote, Stored):
    """A stored note."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step in the order of the whole run: what was written (`kind`), the id of the record (`ref`), and when."""

    seq: int
    kind: str
    ref: str
    at: datetime
