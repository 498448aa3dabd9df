"""What verdicts ask of later programs: required edits, as the proposer worded them or by default.

An edit is taken where its grammar fits the verdict and its probe would not be satisfied by the explained program as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forge.desk import Desk, probe_evidence
from forge.discharging import Discharger
from forge.progress import Progress
from forge.replies import ConditionalEdit
from forge.required import EditBoard
from forge.scored import Scored
from forge.screening import Screener
from hypotheses.ledger import Ledger, NewNote, Observation, Registration
from hypotheses.predictions import Explanation
from hypotheses.probe_kinds import EVERYWHERE, Place
from hypotheses.required_edits import RequiredEdit, check_required_edit, default_edits, refine_instead
from hypotheses.verdicts import Verdict, VerdictStatus


class Consequences:
    """Draws them for one campaign."""

    def __init__(self, ledger: Ledger, desk: Desk, screener: Screener, board: EditBoard, progress: Progress) -> None:
        self._ledger = ledger
        self._desk = desk
        self._board = board
        self._progress = progress
        self._discharger = Discharger(ledger, desk, screener, board, progress)

    def draw(
        self,
        turn: int,
        observation: Observation,
        registration: Registration,
        verdicts: tuple[Verdict, ...],
        explanation: Explanation,
        wishes: Sequence[ConditionalEdit],
        child: Scored,
    ) -> None:
        """Turn verdicts into required edits: as the proposer worded them, where grammar and probe hold."""
        by_name = {hypothesis.name: hypothesis.id for hypothesis in registration.hypotheses}
        by_key = {verdict.hypothesis: verdict for verdict in verdicts}
        self._discharger.settle(turn, verdicts, child)
        incumbent = self._ledger.incumbent()
        if incumbent is None or incumbent.program_id != child.program.id:
            self._note(
                turn,
                "required edit",
                "the explained program is not the incumbent: its claims are judged, nothing is required",
            )
            return
        wanted: list[tuple[RequiredEdit, str]] = []
        worded = set()
        for wish in wishes:
            verdict = by_key.get(wish.hypothesis)
            if verdict is None or verdict.status.value != wish.verdict:
                continue
            problems = self._edit_problems(turn, wish.edit, verdict, child)
            if problems:
                self._note(turn, "required edit", f"not taken: {'; '.join(problems)}")
            else:
                wanted.append((wish.edit, by_name[wish.hypothesis]))
                worded.add(wish.hypothesis)
        silent = [verdict for verdict in verdicts if verdict.hypothesis not in worded]
        wanted += [
            (edit, by_name[verdict.hypothesis])
            for edit, verdict in self._default_edits(turn, verdicts, silent, explanation, child)
        ]
        own = probe_evidence(child.result.evidence, child.program.source)
        for record in self._board.require(wanted, observation_id=observation.id, turn=turn, incumbent=own):
            how = "blocking" if record.blocks else "open"
            self._progress.milestone(
                f"  required edit {record.key} ({how}): {record.edit.kind} {record.edit.mechanism}: {record.edit.wording}"
            )
        refuted = [v for v in verdicts if v.status is VerdictStatus.REFUTED]
        for verdict in refuted:
            self._progress.milestone(f"  barred from now on: {verdict.mechanism} through {verdict.cause}")

    def _default_edits(
        self,
        turn: int,
        verdicts: Sequence[Verdict],
        silent: Sequence[Verdict],
        explanation: Explanation,
        child: Scored,
    ) -> Iterator[tuple[RequiredEdit, Verdict]]:
        """Yield what the verdicts call for that the proposer worded no edit for, each with its verdict."""
        if all(verdict.status not in (VerdictStatus.SUPPORTED, VerdictStatus.REFUTED) for verdict in silent):
            return
        for edit in default_edits(verdicts, explanation, worst=self._worst_place(child)):
            verdict = next(v for v in verdicts if v.claim == (edit.mechanism, edit.cause))
            if verdict not in silent:
                continue
            problems = self._edit_problems(turn, edit, verdict, child)
            if problems and edit.kind == "extend":
                edit = refine_instead(edit)
                problems = self._edit_problems(turn, edit, verdict, child)
            if problems:
                text = f"nothing follows from {verdict.cause} ({verdict.mechanism}): {'; '.join(problems)}"
                self._note(turn, "required edit", text)
            else:
                yield edit, verdict

    def _edit_problems(self, turn: int, edit: RequiredEdit, verdict: Verdict, child: Scored) -> list[str]:
        """Return why an edit cannot be required of the child's children; its probe is asked of the child first."""
        own = probe_evidence(child.result.evidence, child.program.source)
        mechanisms = child.program.mechanisms
        problems = check_required_edit(edit, verdict, mechanisms=mechanisms, incumbent=own)
        if problems:
            return problems
        twin = self._discharger.twin(turn, child.program, child.evaluation, edit)
        return check_required_edit(edit, verdict, mechanisms=mechanisms, incumbent=own, incumbent_knocked_out=twin)

    def _worst_place(self, child: Scored) -> Place:
        """Return the role whose layers err most in the child, by its error map."""
        artifact = child.result.artifact_hash
        joint: dict[str, list[float]] = {}
        for row in self._desk.error_map(artifact) if artifact else ():
            joint.setdefault(row.role, []).append(row.joint)
        if not joint:
            return EVERYWHERE
        worst = max(joint, key=lambda role: (sum(joint[role]) / len(joint[role]), role))
        return Place.model_validate({"roles": (worst,)})

    def _note(self, turn: int, topic: str, text: str) -> None:
        self._ledger.add_note(NewNote(turn=turn, topic=topic, text=text))
        self._progress.say(text)
