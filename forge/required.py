"""The board of required edits: the ledger's rows on one side, the rules of `hypotheses.required_edits` on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypotheses.ledger import Ledger, NewNote, NewRequiredEdit
from hypotheses.ledger import RequiredEdit as StoredEdit
from hypotheses.probes import ProbeEvidence, ProbeResult, with_fingerprint
from hypotheses.required_edits import (
    MAX_REFUSED_TURNS,
    EditRecord,
    EditState,
    RequiredEdit,
    attempt,
    contradict,
    refuse,
    settle,
    supersede,
)
from hypotheses.verdicts import Verdict

LINEAGE = "main"
"""A campaign with one incumbent has one line of programs."""

IN_VAIN = "attempted"
"""State that the ledger notes for a paid attempt that did not execute; the edit stays open."""

REFUSED = "refused"
"""State that the ledger notes for a turn that ended without a program while the edit blocked; it stays open."""


class EditBoard:
    """Required edits of one campaign."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def records(self) -> tuple[EditRecord, ...]:
        """Return every required edit as it stands, oldest first."""
        return tuple(_record(stored) for stored in self._ledger.required_edits())

    def open(self, mechanisms: Sequence[str] | None = None) -> tuple[EditRecord, ...]:
        """Return the open ones, the blocking one first.

        Args:
            mechanisms: what the incumbent declares: an edit of what it lacks is set aside, because no change of this
                incumbent could carry it out. None sets nothing aside.
        """
        records = [
            replace(
                record,
                set_aside=mechanisms is not None
                and record.edit.kind != "retest"
                and record.edit.mechanism not in mechanisms,
            )
            for record in self.records()
            if record.is_open
        ]
        return tuple(sorted(records, key=lambda record: (not record.blocks, record.order)))

    def require(
        self,
        edits: Sequence[tuple[RequiredEdit, str]],
        *,
        observation_id: str,
        turn: int,
        incumbent: ProbeEvidence | None = None,
    ) -> tuple[EditRecord, ...]:
        """Add edits that verdicts ask for, each with the id of its hypothesis; the first one may block.

        A probe of absence is told what must be gone, by the run of the incumbent, so that another name or another constant does
        not pass for absence. Against older edits the newer verdict wins; of two from one observation that
        contradict each other, or ask for the same kind of change for one claim, the first stays.

        Returns:
            The records of the new edits.
        """
        taken: list[RequiredEdit] = []
        added: list[str] = []
        for edit, hypothesis_id in edits:
            if any(contradict(edit, other) or _claim(edit) == _claim(other) for other in taken):
                continue
            if incumbent is not None:
                probe = with_fingerprint(edit.probe, incumbent.fingerprints, incumbent.shapes)
                edit = edit.model_copy(update={"probe": probe})
            edit = edit.model_copy(update={"blocking": edit.blocking and not taken})
            before = self.records()
            order = max((record.order for record in before), default=0) + 1
            after = supersede(before, EditRecord(key="new", edit=edit, lineage=LINEAGE, order=order))
            closed = [new.key for old, new in zip(before, after[:-1], strict=True) if old.state is not new.state]
            stored = self._ledger.add_required_edit(
                NewRequiredEdit(
                    observation_id=observation_id,
                    hypothesis_id=hypothesis_id,
                    kind=edit.kind,
                    mechanism=edit.mechanism,
                    cause=edit.cause,
                    text=edit.wording,
                    turn=turn,
                    blocking=edit.blocking,
                    lineage=LINEAGE,
                    probe=edit.probe.model_dump(mode="json"),
                    body=edit.model_dump(mode="json"),
                ),
                supersedes=closed,
            )
            taken.append(edit)
            added.append(stored.id)
        return tuple(record for record in self.records() if record.key in added)

    def attempted(
        self, record: EditRecord, result: ProbeResult, *, worse: bool, turn: int, program_id: str
    ) -> EditRecord:
        """Return the record after a paid run of a program that addresses it, with its change stored."""
        after = attempt(record, result, paid=True, worse=worse)
        self.store(after, before=record, turn=turn, program_id=program_id)
        return after

    def refused(self, record: EditRecord, *, turn: int) -> EditRecord:
        """Return the record after a turn that ended without a program while it blocked; note when it blocks no more."""
        after = refuse(record)
        self._ledger.change_required_edit(record.key, REFUSED, turn=turn, reason=after.note)
        if after.refused_turns == MAX_REFUSED_TURNS:
            text = f"{record.key} blocks no more and stays open: {after.note}"
            self._ledger.add_note(NewNote(turn=turn, topic="required edit", text=text))
        return after

    def settled(self, verdict: Verdict) -> tuple[tuple[EditRecord, EditRecord], ...]:
        """Return the open records that a new verdict closes, each as it is and as it is then."""
        pairs = ((record, settle(record, verdict)) for record in self.open())
        return tuple((before, after) for before, after in pairs if after != before)

    def store(self, record: EditRecord, *, before: EditRecord, turn: int, program_id: str | None = None) -> None:
        """Keep a changed record."""
        if record == before:
            return
        state = record.state.value if record.state is not before.state else IN_VAIN
        self._ledger.change_required_edit(record.key, state, turn=turn, reason=record.note, program_id=program_id)


def _claim(edit: RequiredEdit) -> tuple[str, str, str]:
    """What the ledger knows an edit of one observation by."""
    return edit.kind, edit.mechanism, edit.cause


def _record(stored: StoredEdit) -> EditRecord:
    last = stored.history[-1]
    state = EditState.OPEN if last.state in (IN_VAIN, REFUSED) else EditState(last.state)
    attempts = sum(entry.state in (IN_VAIN, "discharged", "expired", "costly") for entry in stored.history)
    return EditRecord(
        key=stored.id,
        edit=RequiredEdit.model_validate(stored.body),
        lineage=stored.lineage,
        order=stored.seq,
        state=state,
        paid_attempts=attempts,
        refused_turns=sum(entry.state == REFUSED for entry in stored.history),
        note=last.reason,
    )
