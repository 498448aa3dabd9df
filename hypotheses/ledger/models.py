"""Tables of the ledger as SQLAlchemy typed mappings. Only this package sees them.

Every row that matters has a place in the one order of events (`events.seq`); order between tables is a comparison of
these numbers, for example ``predictions.registered_seq < evaluations.reserved_seq``. JSON is stored as canonical text
(SQL users have `json_extract`), texts in `blobs` by sha256. `info={"hashed": False}` marks columns and tables that
tell about the host or the clock rather than about the search; they are left out of the content hash.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from hypotheses.ledger.columns import (
    HASHED_WHEN_SET,
    NOT_HASHED,
    Base,
    blob_column,
    json_column,
    ref_column,
    seq_column,
)


class SchemaVersion(Base):
    """Schema versions this file has gone through."""

    __tablename__ = "schema_versions"
    __table_args__ = {"info": NOT_HASHED}
    version: Mapped[int] = mapped_column(primary_key=True)
    applied_at: Mapped[datetime]


class Event(Base):
    """The order of the whole run."""

    __tablename__ = "events"
    __table_args__ = {"info": NOT_HASHED, "sqlite_autoincrement": True}
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    kind: Mapped[str]
    ref: Mapped[str]
    at: Mapped[datetime]


class Blob(Base):
    """Texts by the sha256 of their UTF-8; NULL where the text is too long for a row and lies in its file (`blob_files`).

    Rows hold the hash, so the table itself is not hashed: it does not matter where a text lies.
    """

    __tablename__ = "blobs"
    __table_args__ = {"info": NOT_HASHED}
    hash: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str | None]


class Environment(Base):
    """Processes that wrote to this ledger."""

    __tablename__ = "environment"
    __table_args__ = {"info": NOT_HASHED}
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    pid: Mapped[int]
    boot_id: Mapped[str]
    device: Mapped[str]
    versions: Mapped[Any] = json_column()
    details: Mapped[Any] = json_column()
    at: Mapped[datetime]


class Row(Base):
    """A table whose rows have an id made from their natural key."""

    __abstract__ = True
    id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = seq_column()


class Campaign(Row):
    """One row: what is fixed for the run."""

    __tablename__ = "campaign"
    __table_args__ = (CheckConstraint("budget >= 0"),)
    recipe: Mapped[Any] = json_column()
    seed: Mapped[int]
    budget: Mapped[int]
    contract: Mapped[str]
    subject_name: Mapped[str]
    subject_hash: Mapped[str]
    corpus_hash: Mapped[str]
    corpus_protocol: Mapped[str]
    proposer: Mapped[str]
    sandbox: Mapped[str]


class Program(Row):
    """Programs by source, origin and parent."""

    __tablename__ = "programs"
    __table_args__ = (CheckConstraint("origin IN ('seed','candidate','control','knockout')"),)
    source_hash: Mapped[str] = blob_column()
    origin: Mapped[str]
    title: Mapped[str]
    parent_id: Mapped[str | None] = ref_column("programs")
    mechanisms: Mapped[Any] = json_column()
    ast_hash: Mapped[str] = mapped_column(index=True)
    normalized_ast_hash: Mapped[str] = mapped_column(index=True)


class LlmCall(Row):
    """Replies of the proposer, one for each purpose."""

    __tablename__ = "llm_calls"
    purpose: Mapped[str] = mapped_column(unique=True)
    prompt_hash: Mapped[str] = blob_column()
    reply_hash: Mapped[str] = blob_column()
    model: Mapped[str]
    tokens_in: Mapped[int | None]
    tokens_out: Mapped[int | None]
    cost: Mapped[float | None]
    body: Mapped[Any] = json_column()


class LlmFailure(Base):
    """Calls without a reply: outages and refusals of the endpoint. They cost money, but are no part of the search."""

    __tablename__ = "llm_failures"
    __table_args__ = {"info": NOT_HASHED}
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    purpose: Mapped[str]
    model: Mapped[str]
    error: Mapped[str]
    tokens_in: Mapped[int | None]
    tokens_out: Mapped[int | None]
    cost: Mapped[float | None]
    at: Mapped[datetime]


class Proposal(Row):
    """Replies read as proposals, refused ones included."""

    __tablename__ = "proposals"
    __table_args__ = (
        CheckConstraint("status IN ('accepted','refused')"),
        CheckConstraint("(status = 'refused') = (reason <> '')", name="refusal_has_a_reason"),
    )
    turn: Mapped[int]
    kind: Mapped[str]
    attempt: Mapped[int]
    llm_call_id: Mapped[str | None] = ref_column("llm_calls")
    program_id: Mapped[str | None] = ref_column("programs")
    status: Mapped[str]
    stage: Mapped[str]
    reason: Mapped[str]
    claims: Mapped[Any] = json_column()
    discharges: Mapped[Any] = json_column()
    body: Mapped[Any] = json_column()


class Screening(Row):
    """Smoke runs and static checks."""

    __tablename__ = "screenings"
    program_id: Mapped[str] = ref_column("programs")
    proposal_id: Mapped[str | None] = ref_column("proposals")
    passed: Mapped[bool]
    smoke_outcome: Mapped[str]
    reason: Mapped[str]
    evidence_hash: Mapped[str] = blob_column()
    checks: Mapped[Any] = json_column()


class Evaluation(Base):
    """Evaluator calls: inserted as reserved, updated once to settled, never after."""

    __tablename__ = "evaluations"
    __table_args__ = (
        CheckConstraint("kind IN ('candidate','control','confirmation','setup','final')"),
        CheckConstraint("state IN ('reserved','settled')"),
        CheckConstraint("(kind = 'control') = (control_id IS NOT NULL)", name="control_has_its_control"),
        CheckConstraint("kind = 'setup' OR program_id IS NOT NULL", name="program_unless_setup"),
        CheckConstraint("(state = 'settled') = (outcome IS NOT NULL)", name="settled_has_outcome"),
        CheckConstraint("(state = 'settled') = (settled_seq IS NOT NULL)", name="settled_has_its_event"),
        CheckConstraint("(nll IS NOT NULL) = (outcome IS NOT NULL AND outcome = 'scored')", name="only_scored_has_nll"),
        CheckConstraint("settled_seq IS NULL OR settled_seq > reserved_seq", name="settled_after_reserved"),
        Index("evaluations_by_control", "control_id"),
        Index("evaluations_by_program", "program_id"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = seq_column("reserved_seq")
    settled_seq: Mapped[int | None] = seq_column("settled_seq")
    kind: Mapped[str]
    state: Mapped[str]
    program_id: Mapped[str | None] = ref_column("programs")
    split: Mapped[str]
    draw: Mapped[int]
    seed: Mapped[int]
    control_id: Mapped[str | None] = ref_column("controls")
    observation_id: Mapped[str | None] = ref_column("observations")
    reference_artifact: Mapped[str | None]
    turn: Mapped[int | None]
    outcome: Mapped[str | None]
    reason: Mapped[str | None]
    nll: Mapped[float | None]
    chunk_nll: Mapped[Any] = json_column(nullable=True)
    reference_chunk_nll: Mapped[Any] = json_column(nullable=True)
    tokens_per_chunk: Mapped[int | None]
    contract: Mapped[str | None]
    contract_class: Mapped[str | None]
    effective_bits: Mapped[float | None]
    artifact_hash: Mapped[str | None]
    evidence_hash: Mapped[str | None] = blob_column(nullable=True)
    metered_tokens: Mapped[int | None]
    route: Mapped[str | None]
    log_tail_hash: Mapped[str | None] = blob_column(nullable=True, info=NOT_HASHED)
    wall_s: Mapped[float | None] = mapped_column(info=NOT_HASHED)
    device: Mapped[str | None] = mapped_column(info=NOT_HASHED)
    versions: Mapped[Any] = json_column(nullable=True, info=NOT_HASHED)


class Lease(Base):
    """Which process started an evaluation or gave it back. `owner` is unique to one opening of the ledger."""

    __tablename__ = "leases"
    __table_args__ = (CheckConstraint("action IN ('taken','released')"), {"info": NOT_HASHED})
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    evaluation_id: Mapped[str] = ref_column("evaluations", index=True)
    attempt: Mapped[int]
    action: Mapped[str]
    owner: Mapped[str]
    pid: Mapped[int]
    boot_id: Mapped[str]
    reason: Mapped[str]
    at: Mapped[datetime]


class Noise(Row):
    """The noise floor."""

    __tablename__ = "noise"
    program_id: Mapped[str] = ref_column("programs")
    split: Mapped[str]
    floor: Mapped[float]
    chunk_variance: Mapped[float]
    draw_variance: Mapped[float]
    num_chunks: Mapped[int]
    evaluation_ids: Mapped[Any] = json_column()
    body: Mapped[Any] = json_column()


class ErrorMap(Row):
    """Errors per layer, by artifact."""

    __tablename__ = "error_maps"
    artifact_hash: Mapped[str] = mapped_column(unique=True)
    rows: Mapped[Any] = json_column()


class Incumbent(Row):
    """Promotions."""

    __tablename__ = "incumbents"
    turn: Mapped[int]
    program_id: Mapped[str] = ref_column("programs")
    evaluation_id: Mapped[str] = ref_column("evaluations", unique=True)
    reason: Mapped[str]


class Observation(Row):
    """Confirmed differences, nats per token."""

    __tablename__ = "observations"
    turn: Mapped[int]
    program_id: Mapped[str] = ref_column("programs")
    parent_id: Mapped[str] = ref_column("programs")
    search_effect: Mapped[float]
    search_se: Mapped[float]
    confirmed_effect: Mapped[float]
    confirmed_se: Mapped[float]
    confirmation_id: Mapped[str] = ref_column("evaluations")
    body: Mapped[Any] = json_column()


class Hypothesis(Base):
    """Claimed causes."""

    __tablename__ = "hypotheses"
    id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = seq_column("registered_seq")
    observation_id: Mapped[str] = ref_column("observations", index=True)
    round: Mapped[int]
    name: Mapped[str]
    mechanism: Mapped[str]
    cause: Mapped[str]
    statement: Mapped[str]
    body: Mapped[Any] = json_column()
    predecessor_id: Mapped[str | None] = ref_column("hypotheses", info=HASHED_WHEN_SET)


class Control(Base):
    """Candidate controls, run or not."""

    __tablename__ = "controls"
    id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = seq_column("registered_seq")
    observation_id: Mapped[str] = ref_column("observations", index=True)
    round: Mapped[int]
    name: Mapped[str]
    kind: Mapped[str]
    mechanism: Mapped[str]
    statement: Mapped[str]
    program_id: Mapped[str | None] = ref_column("programs")
    cost: Mapped[int]
    body: Mapped[Any] = json_column()


class Prediction(Base):
    """Predicted intervals of retained effect."""

    __tablename__ = "predictions"
    __table_args__ = (
        CheckConstraint("low <= high", name="low_not_above_high"),
        CheckConstraint("low > -1e300 AND high < 1e300", name="finite"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = seq_column("registered_seq")
    observation_id: Mapped[str] = ref_column("observations")
    hypothesis_id: Mapped[str] = ref_column("hypotheses")
    control_id: Mapped[str] = ref_column("controls", index=True)
    low: Mapped[float]
    high: Mapped[float]
    body: Mapped[Any] = json_column()


class Design(Base):
    """Chosen sets of controls."""

    __tablename__ = "designs"
    id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = seq_column("registered_seq")
    observation_id: Mapped[str] = ref_column("observations", index=True)
    round: Mapped[int]
    chosen: Mapped[Any] = json_column()
    unseparated: Mapped[Any] = json_column()
    cost: Mapped[int]
    body: Mapped[Any] = json_column()


class Verdict(Row):
    """Verdicts by rule."""

    __tablename__ = "verdicts"
    observation_id: Mapped[str] = ref_column("observations", index=True)
    hypothesis_id: Mapped[str] = ref_column("hypotheses")
    round: Mapped[int]
    status: Mapped[str]
    rule: Mapped[str]
    reason: Mapped[str]
    evidence: Mapped[Any] = json_column()


class RequiredEdit(Row):
    """Required edits as worded; their state is the last row of `required_edit_states`."""

    __tablename__ = "required_edits"
    observation_id: Mapped[str] = ref_column("observations", index=True)
    hypothesis_id: Mapped[str | None] = ref_column("hypotheses")
    turn: Mapped[int]
    kind: Mapped[str]
    mechanism: Mapped[str]
    cause: Mapped[str]
    text: Mapped[str]
    blocking: Mapped[bool]
    lineage: Mapped[str]
    probe: Mapped[Any] = json_column()
    body: Mapped[Any] = json_column()


class RequiredEditState(Row):
    """History of the states of required edits."""

    __tablename__ = "required_edit_states"
    edit_id: Mapped[str] = ref_column("required_edits", index=True)
    turn: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str]
    program_id: Mapped[str | None] = ref_column("programs")
    body: Mapped[Any] = json_column()


class ProbeResult(Row):
    """Findings of probes, on a smoke run (provisional) or a paid one."""

    __tablename__ = "probe_results"
    __table_args__ = (CheckConstraint("provisional OR evaluation_id IS NOT NULL", name="paid_has_evaluation"),)
    target_id: Mapped[str] = mapped_column(index=True)
    program_id: Mapped[str] = ref_column("programs")
    evaluation_id: Mapped[str | None] = ref_column("evaluations")
    kind: Mapped[str]
    name: Mapped[str]
    status: Mapped[str]
    detail: Mapped[str]
    provisional: Mapped[bool]
    body: Mapped[Any] = json_column()


class Note(Row):
    """Sentences for readers."""

    __tablename__ = "notes"
    turn: Mapped[int]
    topic: Mapped[str]
    text: Mapped[str]
