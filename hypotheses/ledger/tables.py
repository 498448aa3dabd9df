"""How records map to tables: one `Table` for each kind of record that has an id made from its natural key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from hypotheses.ledger import claims, models, records

R = TypeVar("R", bound=records.Stored)


@dataclass(frozen=True, kw_only=True)
class Table(Generic[R]):
    """One kind of record.

    tag: first part of the id. key: fields that make the natural key, in order. texts and jsons: fields kept in `blobs`,
    whose columns are named ``<field>_hash``.
    """

    tag: str
    event: str
    model: type[Any]
    record: type[R]
    key: tuple[str, ...]
    texts: tuple[str, ...] = ()
    jsons: tuple[str, ...] = ()


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record by name, not copied."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def without(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return `content` without some fields."""
    return {name: value for name, value in content.items() if name not in names}


CAMPAIGN = Table(
    tag="camp", event="campaign", model=models.Campaign, record=records.Campaign, key=("seed", "subject_hash")
)
PROGRAMS = Table(
    tag="prog",
    event="program",
    model=models.Program,
    record=records.Program,
    key=("source", "origin", "parent_id"),
    texts=("source",),
)
LLM_CALLS = Table(
    tag="llm",
    event="llm_call",
    model=models.LlmCall,
    record=records.LlmCall,
    key=("purpose",),
    texts=("prompt", "reply"),
)
PROPOSALS = Table(
    tag="prop",
    event="proposal",
    model=models.Proposal,
    record=records.Proposal,
    key=("turn", "kind", "attempt"),
)
SCREENINGS = Table(
    tag="screen",
    event="screening",
    model=models.Screening,
    record=records.Screening,
    key=("program_id", "proposal_id"),
    jsons=("evidence",),
)
EVALUATIONS = Table(
    tag="eval",
    event="evaluation_reserved",
    model=models.Evaluation,
    record=records.Evaluation,
    key=("kind", "program_id", "split", "draw", "seed", "control_id", "observation_id", "reference_artifact"),
    texts=("log_tail",),
    jsons=("evidence",),
)
NOISE = Table(tag="noise", event="noise", model=models.Noise, record=records.Noise, key=("program_id", "split"))
ERROR_MAPS = Table(tag="map", event="error_map", model=models.ErrorMap, record=records.ErrorMap, key=("artifact_hash",))
INCUMBENTS = Table(
    tag="inc", event="incumbent", model=models.Incumbent, record=records.Incumbent, key=("evaluation_id",)
)
OBSERVATIONS = Table(
    tag="obs",
    event="observation",
    model=models.Observation,
    record=claims.Observation,
    key=("program_id", "parent_id"),
)
HYPOTHESES = Table(
    tag="hyp",
    event="hypothesis",
    model=models.Hypothesis,
    record=claims.Hypothesis,
    key=("observation_id", "name"),
)
CONTROLS = Table(
    tag="ctl", event="control", model=models.Control, record=claims.Control, key=("observation_id", "name")
)
PREDICTIONS = Table(
    tag="pred",
    event="prediction",
    model=models.Prediction,
    record=claims.Prediction,
    key=("hypothesis_id", "control_id"),
)
DESIGNS = Table(
    tag="design", event="design", model=models.Design, record=claims.Design, key=("observation_id", "round")
)
VERDICTS = Table(
    tag="verdict", event="verdict", model=models.Verdict, record=claims.Verdict, key=("hypothesis_id", "round")
)
REQUIRED_EDITS = Table(
    tag="edit",
    event="required_edit",
    model=models.RequiredEdit,
    record=claims.RequiredEdit,
    key=("observation_id", "kind", "mechanism", "cause", "turn"),
)
REQUIRED_EDIT_STATES = Table(
    tag="state",
    event="required_edit_state",
    model=models.RequiredEditState,
    record=claims.RequiredEditState,
    key=("edit_id", "turn", "state", "program_id"),
)
PROBE_RESULTS = Table(
    tag="probe",
    event="probe_result",
    model=models.ProbeResult,
    record=claims.ProbeResult,
    key=("target_id", "program_id", "evaluation_id", "kind", "name"),
)
NOTES = Table(tag="note", event="note", model=models.Note, record=records.Note, key=("turn", "topic", "text"))

ALL: tuple[Table[Any], ...] = (
    CAMPAIGN,
    PROGRAMS,
    LLM_CALLS,
    PROPOSALS,
    SCREENINGS,
    EVALUATIONS,
    NOISE,
    ERROR_MAPS,
    INCUMBENTS,
    OBSERVATIONS,
    HYPOTHESES,
    CONTROLS,
    PREDICTIONS,
    DESIGNS,
    VERDICTS,
    REQUIRED_EDITS,
    REQUIRED_EDIT_STATES,
    PROBE_RESULTS,
    NOTES,
)
