"""Required edits held against paid runs: what a program that says it discharges them really did.

A difference to the program without a mechanism shows the mechanism only where its neutral is one and it acts, so every answer
also takes what the paid run showed of that (`forge.execution`). A paid run that was not scored is an attempt all the same: it
leaves nothing to look at, so every probe is undetermined. A `retest` asks for knowledge, not for code: no probe settles it,
only a newer verdict on its claim.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.desk import Desk, probe_evidence
from forge.execution import Execution, touched_mechanisms
from forge.progress import Progress
from forge.required import EditBoard
from forge.scored import Scored, scored
from forge.screening import Screener
from hypotheses.ledger import Evaluation, Ledger, NewProbeResult, Program
from hypotheses.probes import ProbeEvidence, ProbeResult, ProbeStatus, Removal, probe_mechanism
from hypotheses.required_edits import EditRecord, RequiredEdit, check_carried_out
from hypotheses.verdicts import Verdict

SETTLED_BY_VERDICT = "verdict"
"""Kind of the stored probe result of a retest: what it asked for is a verdict."""


class Discharger:
    """Closes required edits by evidence, for one campaign."""

    def __init__(self, ledger: Ledger, desk: Desk, screener: Screener, board: EditBoard, progress: Progress) -> None:
        self._ledger = ledger
        self._desk = desk
        self._screener = screener
        self._board = board
        self._progress = progress

    def check(
        self,
        turn: int,
        program: Program,
        evaluation: Evaluation,
        parent: Scored,
        addressed: Sequence[EditRecord],
        *,
        shown: Execution | None = None,
        worse: bool = False,
    ) -> list[EditRecord]:
        """Hold a paid run to the required edits that it says it discharges; return those that it carried out.

        Args:
            turn: of the run.
            program: that ran.
            evaluation: its paid run, scored or not.
            parent: the incumbent that the program was made from.
            addressed: the open edits that it says it discharges.
            shown: what the paid run showed of its mechanisms; None when it was not scored.
            worse: whether it lost to its parent beyond the noise.
        """
        result = scored(evaluation)
        own = probe_evidence(result.evidence if result else {}, program.source)
        before = self._incumbent(turn, evaluation, parent) if result and addressed else ProbeEvidence()
        altered = touched_mechanisms(parent.program.source, program.source).altered
        shown = shown or Execution()
        executed = []
        for record in addressed:
            if record.edit.kind == "retest":
                continue
            answer = check_carried_out(
                record.edit,
                own,
                incumbent=before,
                altered=altered,
                knocked_out=self.twin(turn, program, evaluation, record.edit) if result else None,
                not_neutral=shown.not_neutral,
                idle=shown.idle,
                removal=self._removal(turn, record.edit, evaluation, parent.program, before) if result else None,
            )
            if result is None:
                assert evaluation.result is not None
                answer = ProbeResult(status=answer.status, detail=f"{evaluation.result.outcome}: {answer.detail}")
            self._keep(record, record.edit.probe.kind, answer, program, evaluation)
            after = self._board.attempted(record, answer, worse=worse, turn=turn, program_id=program.id)
            self._progress.milestone(f"required edit {record.key}: {after.state.value}. {answer.detail}")
            if answer.is_decisive:
                executed.append(record)
        return executed

    def twin(self, turn: int, program: Program, evaluation: Evaluation, edit: RequiredEdit) -> ProbeEvidence | None:
        """Return the run of the program without the mechanism of the edit's probe, traced like the paid one.

        None when the probe needs none or the program has no such mechanism; without layers when the run did not end.
        """
        return self._without(turn, program, evaluation, probe_mechanism(edit.probe))

    def settle(self, turn: int, verdicts: Sequence[Verdict], child: Scored) -> None:
        """Let new verdicts on a program settle retests and close the edits that rest on the opposite."""
        for verdict in verdicts:
            for before, after in self._board.settled(verdict):
                if after.edit.kind == "retest":
                    answer = ProbeResult(status=ProbeStatus.EXECUTED, detail=after.note)
                    self._keep(before, SETTLED_BY_VERDICT, answer, child.program, child.evaluation)
                self._board.store(after, before=before, turn=turn, program_id=child.program.id)
                self._progress.milestone(f"required edit {after.key}: {after.state.value}. {after.note}")

    def count_untested(
        self, turn: int, program: Program, evaluation: Evaluation, addressed: Sequence[EditRecord]
    ) -> None:
        """Count a paid run as an attempt in vain at the retests that it addressed and no verdict has settled."""
        still_open = {record.key for record in self._board.open()}
        answer = ProbeResult(status=ProbeStatus.UNDETERMINED, detail="no verdict on its claim came of it")
        for record in addressed:
            if record.edit.kind == "retest" and record.key in still_open:
                self._keep(record, SETTLED_BY_VERDICT, answer, program, evaluation)
                after = self._board.attempted(record, answer, worse=False, turn=turn, program_id=program.id)
                self._progress.milestone(f"required edit {record.key}: {after.state.value}. {answer.detail}")

    def _incumbent(self, turn: int, evaluation: Evaluation, parent: Scored) -> ProbeEvidence:
        """Return the run of the incumbent like the paid one; without layers when it did not end."""
        evidence = self._screener.paid_evidence(parent.program, evaluation, parent, turn=turn)
        return ProbeEvidence() if isinstance(evidence, str) else evidence

    def _removal(
        self, turn: int, edit: RequiredEdit, evaluation: Evaluation, parent: Program, before: ProbeEvidence
    ) -> Removal | None:
        """Return what a removal starts from. What replaces a mechanism may install as it did, so there only code counts."""
        if edit.kind != "remove":
            return None
        without = self._without(turn, parent, evaluation, edit.mechanism)
        return Removal(before=before, without=without) if without is not None else None

    def _without(
        self, turn: int, program: Program, evaluation: Evaluation, mechanism: str | None
    ) -> ProbeEvidence | None:
        twin = self._screener.twin_program(program, (mechanism,)) if mechanism else None
        if twin is None:
            return None
        traced = self._desk.trace(twin, draw=evaluation.draw, seed=evaluation.seed, turn=turn)
        return probe_evidence(traced or {}, twin.source)

    def _keep(
        self, record: EditRecord, kind: str, answer: ProbeResult, program: Program, evaluation: Evaluation
    ) -> None:
        self._ledger.record_probe_result(
            NewProbeResult(
                target_id=record.key,
                program_id=program.id,
                evaluation_id=evaluation.id,
                kind=kind,
                status=answer.status.value,
                detail=answer.detail,
                provisional=False,
            )
        )
