"""Records of claims: observations, rivals with their controls and predictions, verdicts, required edits, probe results.

As in `records`: `New*` is what a writer hands over, the other class is the same plus what the ledger adds. Hypotheses
and controls are given by the names they have in the reply and come back with ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypotheses.ledger.records import Json, Stored


@dataclass(frozen=True, kw_only=True)
class NewObservation:
    """A confirmed difference between a program and its parent: effect = NLL(parent) - NLL(program)."""

    turn: int
    program_id: str
    parent_id: str
    search_effect: float
    search_se: float
    confirmed_effect: float
    confirmed_se: float
    confirmation_id: str
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Observation(NewObservation, Stored):
    """A stored observation."""


@dataclass(frozen=True, kw_only=True)
class NewHypothesis:
    """One claimed cause. `name` is its label in the reply, unique within the observation (``H1``).

    predecessor_id: the registered hypothesis that this one revises; it stands no longer from this round on.
    """

    name: str
    mechanism: str
    cause: str
    statement: str = ""
    body: Json = field(default_factory=dict)
    predecessor_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Hypothesis(NewHypothesis, Stored):
    """A registered hypothesis; immutable."""

    observation_id: str
    round: int


@dataclass(frozen=True, kw_only=True)
class NewControl:
    """One candidate control. `name` is its label in the reply; kind is ``knockout``, ``knockin`` or ``substitute``."""

    name: str
    kind: str
    mechanism: str = ""
    statement: str = ""
    program_id: str | None = None
    cost: int = 1
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Control(NewControl, Stored):
    """A registered control; immutable."""

    observation_id: str
    round: int


@dataclass(frozen=True, kw_only=True)
class NewPrediction:
    """The interval of retained effect that one hypothesis expects of one control, both given by name."""

    hypothesis: str
    control: str
    low: float
    high: float
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction(Stored):
    """A registered prediction; immutable. `seq` is the column ``registered_seq``."""

    observation_id: str
    hypothesis_id: str
    control_id: str
    low: float
    high: float
    body: Json


@dataclass(frozen=True, kw_only=True)
class NewDesign:
    """The controls chosen (by name), the pairs of hypotheses that nothing separates, and the calls it costs."""

    chosen: tuple[str, ...]
    unseparated: tuple[tuple[str, str], ...] = ()
    cost: int = 0
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Design(Stored):
    """A registered design; names are replaced by ids. `unseparated` holds pairs of hypothesis ids."""

    observation_id: str
    round: int
    chosen: tuple[str, ...]
    unseparated: tuple[tuple[str, str], ...]
    cost: int
    body: Json


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What one call of `Ledger.register_explanation` stored, in the order given."""

    observation_id: str
    round: int
    hypotheses: tuple[Hypothesis, ...]
    controls: tuple[Control, ...]
    predictions: tuple[Prediction, ...]
    design: Design


@dataclass(frozen=True, kw_only=True)
class NewVerdict:
    """The verdict of a rule on one hypothesis. A later round adds a verdict; none is ever changed."""

    hypothesis_id: str
    status: str
    rule: str
    reason: str
    round: int = 0
    evidence: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict(NewVerdict, Stored):
    """A stored verdict."""

    observation_id: str


@dataclass(frozen=True, kw_only=True)
class NewRequiredEdit:
    """What the next programs must do, or must not claim, because of a verdict.

    kind: ``remove``, ``replace``, ``extend``, ``refine`` or ``retest``. lineage: the programs it binds, by their root.
    """

    observation_id: str
    kind: str
    mechanism: str
    cause: str
    text: str
    turn: int
    blocking: bool = False
    lineage: str = "main"
    hypothesis_id: str | None = None
    probe: Json = field(default_factory=dict)
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequiredEditState(Stored):
    """One entry of the history of a required edit; the first is ``open``."""

    edit_id: str
    turn: int
    state: str
    reason: str
    program_id: str | None
    body: Json


@dataclass(frozen=True, kw_only=True)
class RequiredEdit(NewRequiredEdit, Stored):
    """A stored required edit with its history so far."""

    history: tuple[RequiredEditState, ...]

    @property
    def state(self) -> str:
        """The state now."""
        return self.history[-1].state


@dataclass(frozen=True, kw_only=True)
class NewProbeResult:
    """What a probe found. `target_id` is a required edit or a control; a smoke run has no evaluation id."""

    target_id: str
    program_id: str
    kind: str
    status: str
    provisional: bool
    name: str = ""
    detail: str = ""
    evaluation_id: str | None = None
    body: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProbeResult(NewProbeResult, Stored):
    """A stored probe result."""
