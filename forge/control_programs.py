"""The programs of an observation's controls: made, tried on the truncated subject, and looked up among results that stand.

Nothing here takes an evaluator call. What a control cannot do (run, change something, spend the bits it must) is found before any
prediction about it is registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from forge.controls import BITS_TOLERANCE, ControlProblem, build_control
from forge.desk import Desk, probe_evidence
from forge.known_results import KnownResults
from forge.program_identity import ast_hash
from forge.scored import Scored, scored
from forge.screening import Screener, is_deeper
from hypotheses.ledger import Evaluation, Ledger, Program
from hypotheses.predictions import Control
from hypotheses.probes import ProbeEvidence, installs_the_same


@dataclass(frozen=True, kw_only=True)
class ControlPrograms:
    """What came of some controls, by key.

    programs: stored, of those that can run. problems: why the others cannot. known: of those that can, where the result is known
    from already; they are shown and never evidence.
    """

    programs: dict[str, Program] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)

    def usable(self) -> dict[str, Program]:
        """Return the programs whose result nobody knows."""
        return {key: program for key, program in self.programs.items() if key not in self.known}


class ControlMaker:
    """Makes the controls of one campaign."""

    def __init__(self, ledger: Ledger, desk: Desk, screener: Screener) -> None:
        self._ledger = ledger
        self._desk = desk
        self._screener = screener

    def make(self, controls: Sequence[Control], parent: Scored, child: Scored) -> ControlPrograms:
        """Make and try the controls of one explanation.

        Args:
            controls: of two that make one program the first is used.
            parent: what the effect is measured against.
            child: the explained program.
        """
        found = ControlPrograms()
        made: dict[str, str] = {}
        tried: dict[str, dict[str, object]] = {}
        results = KnownResults.of(self._ledger, child.program.id)
        _, _, child_evidence = self._screener.smoke(child.program, allowed_class="corrected")
        _, _, parent_evidence = self._screener.smoke(parent.program, allowed_class="corrected")
        for control in controls:
            try:
                source = build_control(control, parent=parent.program.source, child=child.program.source)
            except ControlProblem as problem:
                found.problems[control.key] = str(problem)
                continue
            twin = made.setdefault(ast_hash(source), control.key)
            if twin != control.key:
                found.problems[control.key] = f"it is the same program as control {twin!r}"
                continue
            program = self._store(source, control.key, child.program)
            passed, failure, evidence = self._screener.smoke(program, allowed_class="corrected")
            if not passed:
                found.problems[control.key] = f"its smoke run ended so: {failure}"
            elif where := self._same_install(program, evidence, parent, parent_evidence):
                found.problems[control.key] = f"it installs exactly what the parent installs, on the {where} subject"
            elif where := self._same_install(program, evidence, child, child_evidence):
                found.problems[control.key] = f"it installs exactly what the child installs, on the {where} subject"
            elif control.kind == "substitute" and not _same_bits(evidence, child_evidence):
                found.problems[control.key] = (
                    f"a substitute spends the same bits: {evidence['effective_bits']:.3f} here, "
                    f"{child_evidence['effective_bits']:.3f} in the child, on the truncated subject"
                )
            elif alike := self._installing_alike(program, evidence, found.programs, tried, parent):
                found.problems[control.key] = f"it installs exactly what control {alike!r} installs"
            else:
                found.programs[control.key] = program
                tried[control.key] = evidence
                reason = results.of_program(
                    program,
                    str(evidence["smoke_digest"]),
                    installs_as=partial(self._installs_as, program, evidence),
                )
                if reason is not None:
                    found.known[control.key] = reason
        return found

    def _store(self, source: str, key: str, child: Program) -> Program:
        """Return the stored program of a control; one that was tried under another key keeps that as its title."""
        known = (p for p in self._ledger.programs(origin="control") if p.source == source and p.parent_id == child.id)
        tried = next(known, None)
        return tried or self._screener.store(source, origin="control", title=key, parent=child)

    def _same_install(
        self, program: Program, smoked: dict[str, object], other: Scored, other_smoked: dict[str, object]
    ) -> str:
        """Return on which subject a program installs what `other` installs; empty where the two differ.

        The truncated subject does not show what a mechanism does in later blocks, so the whole one is asked before a control is
        lost for that; it is not scored, and takes no evaluator call.
        """
        if smoked["smoke_digest"] != other_smoked["smoke_digest"]:
            return ""
        return self._installs_as(program, smoked, other.evaluation)

    def _installing_alike(
        self,
        program: Program,
        smoked: dict[str, object],
        others: Mapping[str, Program],
        seen: Mapping[str, dict[str, object]],
        parent: Scored,
    ) -> str:
        """Return the key of the first other control that installs the same; empty where none does."""
        for key, other in others.items():
            if seen[key]["smoke_digest"] != smoked["smoke_digest"]:
                continue
            if not is_deeper(parent.result.evidence, smoked):
                return key
            if installs_the_same(self._whole(other, parent.evaluation), self._whole(program, parent.evaluation)):
                return key
        return ""

    def _installs_as(self, program: Program, smoked: dict[str, object], paid: Evaluation) -> str:
        """Return on which subject a program installs what a run of another did, which is like it on the truncated subject."""
        result = scored(paid)
        if result is not None and not is_deeper(result.evidence, smoked):
            return "truncated"
        if result is None:
            is_the_same = not self._desk.look(program, draw=paid.draw, seed=paid.seed).outcome.is_scored
        else:
            is_the_same = installs_the_same(self._whole(program, paid), probe_evidence(result.evidence, program.source))
        return "whole" if is_the_same else ""

    def _whole(self, program: Program, paid: Evaluation) -> ProbeEvidence:
        """Return the evidence of a program on the whole subject, run as a paid run of another was."""
        run = self._desk.look(program, draw=paid.draw, seed=paid.seed)
        return probe_evidence(run.evidence.to_json(), program.source)


def _same_bits(a: dict[str, object], b: dict[str, object]) -> bool:
    first, second = a.get("effective_bits"), b.get("effective_bits")
    return isinstance(first, float) and isinstance(second, float) and abs(first - second) <= BITS_TOLERANCE
