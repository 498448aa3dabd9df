"""Required edits: what later programs must do, or must not claim, because of a verdict.

What a verdict refutes is a claim, the pair (mechanism, cause), not code: inherited code stays legal. An edit is worded
by the proposer; code checks that it follows from its verdict and has a probe that can show that it executes. It is
open until a paid run discharges it, until three paid attempts were in vain, until it turns out to cost quality, or
until a newer verdict settles or supersedes it: so it can always be closed. While it blocks, a lineage may have no way
on that pays for an attempt; so it stops blocking after `MAX_REFUSED_TURNS` turns that ended without a program, and
never holds a lineage for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from hypotheses.barred_claims import same_cause
from hypotheses.errors import HypothesesError
from hypotheses.predictions import MechanismName, Slug
from hypotheses.probe_kinds import EVERYWHERE, Place, Probe
from hypotheses.probe_results import ProbeResult
from hypotheses.verdict_records import Verdict, VerdictStatus

EditKind = Literal["remove", "replace", "extend", "refine", "retest"]
MAX_PAID_ATTEMPTS = 3
MAX_REFUSED_TURNS = 3

_RESTS_ON: dict[EditKind, VerdictStatus] = {
    "remove": VerdictStatus.REFUTED,
    "replace": VerdictStatus.REFUTED,
    "extend": VerdictStatus.SUPPORTED,
    "refine": VerdictStatus.SUPPORTED,
}
_DECIDED = (VerdictStatus.SUPPORTED, VerdictStatus.REFUTED)


class EditStateError(HypothesesError):
    """A transition that the state of a required edit does not allow."""


class RequiredEdit(BaseModel):
    """One demand on later programs.

    kind: remove (take the mechanism out), replace (put something in its stead), extend (carry a supported mechanism to
        more places), refine (improve it where it is), retest (bring a sharper control for the claim).
    cause: of the claim that the verdict was about.
    part: name of a mechanism that is to come with the change; the probe may name it.
    blocking: programs of the lineage must address it; at most one per lineage.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: EditKind
    mechanism: MechanismName
    cause: Slug
    part: MechanismName | None = None
    place: Place = EVERYWHERE
    wording: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
    probe: Probe
    blocking: bool = True


class EditState(StrEnum):
    """Where a required edit stands. Only `OPEN` can change."""

    OPEN = "open"
    DISCHARGED = "discharged"
    EXPIRED = "expired"
    COSTLY = "costly"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, kw_only=True)
class EditRecord:
    """A required edit with its history.

    key: identity in the ledger. lineage: name of the line of programs that it binds.
    order: position of its verdict among all verdicts; the larger is the newer.
    refused_turns: turns that ended without a program while it blocked.
    set_aside: whether the incumbent of the moment lacks the mechanism, so that it cannot be carried out now.
    note: why it stands where it stands.
    """

    key: str
    edit: RequiredEdit
    lineage: str
    order: int
    state: EditState = EditState.OPEN
    paid_attempts: int = 0
    refused_turns: int = 0
    set_aside: bool = False
    note: str = ""

    @property
    def is_open(self) -> bool:
        return self.state is EditState.OPEN

    @property
    def blocks(self) -> bool:
        """Whether programs of its lineage must address it now."""
        return self.is_open and self.edit.blocking and not self.set_aside and self.refused_turns < MAX_REFUSED_TURNS


def attempt(record: EditRecord, result: ProbeResult, *, paid: bool, worse: bool = False) -> EditRecord:
    """Return the record after a program that addresses the edit has run.

    A smoke run (not paid) is provisional and changes nothing. On a paid run an executed change discharges the edit, or
    closes it as costly when it made the program worse beyond the noise floor; anything else is an attempt in vain, and
    the last of `MAX_PAID_ATTEMPTS` lets the edit expire.

    Raises:
        EditStateError: the edit is closed.
    """
    _require_open(record, "attempted")
    if not paid:
        return record
    if result.is_decisive:
        return close_costly(record, result) if worse else discharge(record, result)
    record = replace(record, paid_attempts=record.paid_attempts + 1, note=f"{result.status}: {result.detail}")
    return expire(record) if record.paid_attempts >= MAX_PAID_ATTEMPTS else record


def discharge(record: EditRecord, result: ProbeResult) -> EditRecord:
    """Close the edit by the evidence of a paid run.

    Raises:
        EditStateError: the edit is closed, or the probe does not prove execution.
    """
    _require_open(record, "discharged")
    if not result.is_decisive:
        raise EditStateError(f"edit {record.key!r} cannot be discharged by a probe that reads {result.status.value!r}")
    return replace(
        record, state=EditState.DISCHARGED, paid_attempts=record.paid_attempts + 1, note=f"executed: {result.detail}"
    )


def close_costly(record: EditRecord, result: ProbeResult) -> EditRecord:
    """Close an edit that a paid run executed and that made the program worse; the incumbent stays as it is.

    Raises:
        EditStateError: the edit is closed, or the probe does not prove execution.
    """
    _require_open(record, "closed as costly")
    if not result.is_decisive:
        raise EditStateError(f"edit {record.key!r} did not execute, so what it costs is not known")
    return replace(
        record, state=EditState.COSTLY, paid_attempts=record.paid_attempts + 1, note=f"costs quality: {result.detail}"
    )


def expire(record: EditRecord) -> EditRecord:
    """Close an edit after `MAX_PAID_ATTEMPTS` paid attempts in vain; its claim stays barred.

    Raises:
        EditStateError: the edit is closed, or fewer attempts were paid for.
    """
    _require_open(record, "expired")
    if record.paid_attempts < MAX_PAID_ATTEMPTS:
        raise EditStateError(
            f"edit {record.key!r} has {record.paid_attempts} paid attempts; it expires after {MAX_PAID_ATTEMPTS}"
        )
    return replace(record, state=EditState.EXPIRED, note=f"{record.paid_attempts} paid attempts in vain; {record.note}")


def refuse(record: EditRecord) -> EditRecord:
    """Count a turn that ended without a program while the edit blocked; after `MAX_REFUSED_TURNS` it blocks no more.

    Raises:
        EditStateError: the edit is closed.
    """
    _require_open(record, "refused")
    turns = record.refused_turns + 1
    note = f"{turns} turns ended without a program while it blocked"
    return replace(record, refused_turns=turns, note=note)


def settle(record: EditRecord, verdict: Verdict) -> EditRecord:
    """Return the record after a newer verdict on its claim, whichever way it was reached.

    A verdict that decides discharges a `retest`, which asks for nothing else. It supersedes an edit that rests on the
    opposite. Every other verdict, and one on another claim, leaves the record as it is.
    """
    edit = record.edit
    same = (edit.mechanism, same_cause(edit.cause)) == (verdict.mechanism, same_cause(verdict.cause))
    if not (record.is_open and same and verdict.status in _DECIDED):
        return record
    if edit.kind == "retest":
        note = f"judged again: {verdict.status.value}"
        return replace(record, state=EditState.DISCHARGED, paid_attempts=record.paid_attempts + 1, note=note)
    if verdict.status is _RESTS_ON[edit.kind]:
        return record
    note = f"the claim that it rests on is {verdict.status.value} by a newer verdict"
    return replace(record, state=EditState.SUPERSEDED, note=note)


def supersede(records: Sequence[EditRecord], new: EditRecord) -> tuple[EditRecord, ...]:
    """Add an edit to those there are; of two open ones in conflict the one with the newer verdict stands.

    In conflict are, within one lineage: two blocking edits, and two that `contradict` each other. The result has at
        most one
    blocking open edit per lineage, whatever the order in which edits are added.

    Raises:
        EditStateError: the key is taken.
    """
    if any(record.key == new.key for record in records):
        raise EditStateError(f"required edit {new.key!r} is there already")
    rivals = [
        record
        for record in records
        if record.is_open
        and record.lineage == new.lineage
        and ((record.edit.blocking and new.edit.blocking) or contradict(record.edit, new.edit))
    ]
    newer = [record for record in rivals if (record.order, record.key) > (new.order, new.key)]
    if newer and new.is_open:
        by = max(newer, key=lambda record: (record.order, record.key))
        return (*records, replace(new, state=EditState.SUPERSEDED, note=f"superseded by {by.key}"))
    if not new.is_open:
        return (*records, new)
    gone = {record.key for record in rivals}
    closed = (
        replace(record, state=EditState.SUPERSEDED, note=f"superseded by {new.key}") if record.key in gone else record
        for record in records
    )
    return (*closed, new)


def contradict(a: RequiredEdit, b: RequiredEdit) -> bool:
    """Whether no program could satisfy both: different kinds for one claim, or removing what the other builds on.

    Only where their places overlap. A `retest` asks for knowledge, not for code, and contradicts nothing.
    """
    if a.mechanism != b.mechanism or a.kind == b.kind or "retest" in (a.kind, b.kind) or not a.place.overlaps(b.place):
        return False
    return same_cause(a.cause) == same_cause(b.cause) or "remove" in (a.kind, b.kind)


def _require_open(record: EditRecord, what: str) -> None:
    if not record.is_open:
        raise EditStateError(f"required edit {record.key!r} is {record.state.value} and cannot be {what}")
