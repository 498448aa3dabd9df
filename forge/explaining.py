"""From a gain to a verdict: confirm it, let rivals predict, run the cheapest controls that separate them, decide by rule.

The order is what makes it evidence. The confirmation (other text, another calibration draw) supplies the denominator, so that
luck at the trigger does not inflate it. Hypotheses, controls, predictions and the design are registered in one transaction
before any of the controls runs. A control counts only when trusted evidence shows that its change executed. The verdict is
computed; the proposer has no say in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from forge.confirming import CONFIRMATION_SPLIT, Confirmation, Confirmer
from forge.controls import BITS_TOLERANCE, ControlProblem, build_control
from forge.desk import Call, Desk, probe_evidence
from forge.discharging import Discharger
from forge.interview import Interview
from forge.known_results import KnownResults
from forge.measured_controls import measure_control
from forge.measured_effects import effect_on, planned_width
from forge.noise import NoiseModel
from forge.program_identity import ast_hash
from forge.progress import Progress
from forge.recipe import Statistics
from forge.replies import ExplanationReply
from forge.required import EditBoard
from forge.scored import Scored, scored
from forge.screening import Screener, is_deeper
from hypotheses.design import LEAST, ControlOption, Design, plan_controls
from hypotheses.effects import PairedEffect, family_level
from hypotheses.ledger import (
    Evaluation,
    Ledger,
    NewControl,
    NewDesign,
    NewHypothesis,
    NewNote,
    NewObservation,
    NewPrediction,
    NewProbeResult,
    NewVerdict,
    Observation,
    Program,
    Registration,
)
from hypotheses.predictions import Control, Explanation
from hypotheses.probe_kinds import EVERYWHERE, Place
from hypotheses.probes import installs_the_same
from hypotheses.required_edits import RequiredEdit, check_required_edit, default_edits, refine_instead
from hypotheses.verdicts import ControlMeasurement, Verdict, VerdictStatus, decide


class Explainer:
    """Explains one difference at a time."""

    def __init__(
        self,
        ledger: Ledger,
        desk: Desk,
        screener: Screener,
        interview: Interview,
        board: EditBoard,
        confirmer: Confirmer,
        noise: NoiseModel,
        statistics: Statistics,
        progress: Progress,
        seed: int,
    ) -> None:
        self._ledger = ledger
        self._desk = desk
        self._screener = screener
        self._interview = interview
        self._board = board
        self._confirmer = confirmer
        self._noise = noise
        self._statistics = statistics
        self._progress = progress
        self._seed = seed
        self._discharger = Discharger(ledger, desk, screener, board, progress)

    def explain(
        self,
        turn: int,
        parent: Scored,
        child: Scored,
        claims: tuple[tuple[str, str], ...],
        *,
        idle: Mapping[str, str] | None = None,
    ) -> None:
        """Confirm the child's effect, and when it holds turn it into verdicts and required edits.

        Args:
            turn: of the campaign.
            parent: what the effect is measured against.
            child: the program to explain.
            claims: what its proposer said of it, as pairs of mechanism and cause.
            idle: mechanisms that do not execute, with what showed it; no hypothesis may be about them.
        """
        search = effect_on(parent.result, child.result, self._noise)
        incumbent = self._ledger.incumbent()
        is_incumbent = incumbent is not None and incumbent.program_id == child.program.id
        # The call that is kept to measure the incumbent again is the confirmation of that very program.
        if (self._ledger.budget().free if is_incumbent else self._confirmer.spendable()) < 1:
            self._note(turn, "budget", "no call is left to confirm the effect of this turn")
            return
        confirmation = self._confirmer.confirm(self._desk, turn, parent, child)
        confirmed = confirmation.effect
        if confirmed is None:
            self._note(turn, "confirmation", f"the confirmation was not scored: {confirmation.failure}")
            return
        if confirmed.mean * search.mean <= 0 or abs(confirmed.z) < self._statistics.confirm_sigma:
            self._note(
                turn,
                "confirmation",
                f"the effect did not hold: search {search.mean:+.4f} +- {search.standard_error:.4f}, "
                f"confirm {confirmed.mean:+.4f} +- {confirmed.standard_error:.4f}",
            )
            return
        observation = self._ledger.add_observation(
            NewObservation(
                turn=turn,
                program_id=child.program.id,
                parent_id=parent.program.id,
                search_effect=search.mean,
                search_se=search.standard_error,
                confirmed_effect=confirmed.mean,
                confirmed_se=confirmed.standard_error,
                confirmation_id=confirmation.evaluation.id,
                body={"search": search.to_json(), "confirmed": confirmed.to_json()},
            )
        )
        self._progress.milestone(
            f"observation {observation.id}: {child.program.title} {confirmed.mean:+.4f} nats/token, confirmed"
        )
        width = self._width(confirmed, parent, 2, LEAST)
        reply = self._interview.explanation(
            turn,
            observation,
            parent,
            child,
            claims,
            search,
            confirmed,
            width,
            idle=idle or {},
            trial=lambda controls: self._control_programs(controls, parent, child)[1],
        )
        if reply is not None:
            self._test(turn, observation, parent, child, reply, confirmation, confirmed)

    def _width(self, confirmed: PairedEffect, parent: Scored, num_hypotheses: int, num_controls: int) -> float:
        """Return the width to expect of a measured retained effect, at the level of a verdict over so many tests."""
        level = family_level(num_hypotheses, num_controls, alpha=self._statistics.error_rate)
        return planned_width(confirmed, parent.result, self._noise, level=level)

    def _test(
        self,
        turn: int,
        observation: Observation,
        parent: Scored,
        child: Scored,
        reply: ExplanationReply,
        confirmation: Confirmation,
        confirmed: PairedEffect,
    ) -> None:
        explanation = reply.explanation
        programs, problems, known = self._control_programs(explanation.controls, parent, child)
        options = [
            ControlOption(key=key, cost=explanation.control(key).cost, content_hash=program.id)
            for key, program in programs.items()
            if key not in known
        ]
        design = plan_controls(
            [p for p in explanation.predictions if p.control in {option.key for option in options}],
            options,
            width_of=partial(self._width, confirmed, parent, len(explanation.hypotheses)),
            budget_calls=self._confirmer.spendable(),
            hypotheses=[hypothesis.key for hypothesis in explanation.hypotheses],
        )
        for key, reason in problems.items():
            self._note(turn, "control", f"control {key!r} cannot be used: {reason}")
        for key, reason in known.items():
            self._note(
                turn,
                "control",
                f"control {key!r} was evaluated before these predictions, so it is shown and never evidence: {reason}",
            )
        if not design.feasible:
            self._note(turn, "design", f"no useful set of controls: {design.reason}")
            self._progress.milestone(f"{observation.id}: no useful set of controls ({design.reason})")
        usable = explanation.restricted_to(design.widths)
        set_aside: list[dict[str, object]] = [
            {
                "control": control.key,
                "kind": control.kind,
                "cost": control.cost,
                "standing": "unusable" if control.key in problems else "known",
                "reason": problems.get(control.key) or known[control.key],
            }
            for control in explanation.controls
            if control.key in problems or control.key in known
        ]
        registration = self._register(observation, usable, design, programs, set_aside)
        if design.feasible:
            self._announce(usable, design)
        stored = {control.name: control for control in registration.controls}
        runs = self._desk.evaluate_all(
            Call(
                program=programs[key],
                kind="control",
                split=CONFIRMATION_SPLIT,
                seed=self._seed,
                turn=turn,
                control_id=stored[key].id,
                observation_id=observation.id,
                why=usable.control(key).description,
            )
            for key in design.chosen
        )
        measurements = [
            self._measure(usable.control(key), stored[key].id, programs[key], evaluation, parent, child, confirmation)
            for key, evaluation in zip(design.chosen, runs, strict=True)
        ]
        verdicts = decide(usable, confirmed, measurements, design, alpha=self._statistics.error_rate)
        self._record(registration, verdicts, measurements, confirmed)
        self._require(turn, observation, registration, verdicts, reply, child)

    def _control_programs(
        self, controls: Sequence[Control], parent: Scored, child: Scored
    ) -> tuple[dict[str, Program], dict[str, str], dict[str, str]]:
        """Return the stored program of each control that can run, why the others cannot, and why results are known already."""
        programs: dict[str, Program] = {}
        problems: dict[str, str] = {}
        made: dict[str, str] = {}
        known: dict[str, str] = {}
        results = KnownResults.of(self._ledger, child.program.id)
        _, _, child_evidence = self._screener.smoke(child.program, allowed_class="corrected")
        _, _, parent_evidence = self._screener.smoke(parent.program, allowed_class="corrected")
        for control in controls:
            try:
                source = build_control(control, parent=parent.program.source, child=child.program.source)
            except ControlProblem as problem:
                problems[control.key] = str(problem)
                continue
            twin = made.setdefault(ast_hash(source), control.key)
            if twin != control.key:
                problems[control.key] = f"it is the same program as control {twin!r}"
                continue
            program = self._control_program(source, control.key, child.program)
            passed, failure, evidence = self._screener.smoke(program, allowed_class="corrected")
            if not passed:
                problems[control.key] = f"its smoke run ended so: {failure}"
            elif where := self._same_install(program, evidence, parent, parent_evidence):
                problems[control.key] = f"it installs exactly what the parent installs, on the {where} subject"
            elif where := self._same_install(program, evidence, child, child_evidence):
                problems[control.key] = f"it installs exactly what the child installs, on the {where} subject"
            elif control.kind == "substitute" and not _same_bits(evidence, child_evidence):
                problems[control.key] = (
                    f"a substitute spends the same bits: {evidence['effective_bits']:.3f} here, "
                    f"{child_evidence['effective_bits']:.3f} in the child, on the truncated subject"
                )
            else:
                programs[control.key] = program
                reason = results.of_program(
                    program,
                    str(evidence["smoke_digest"]),
                    installs_as=partial(self._installs_as, program, evidence),
                )
                if reason is not None:
                    known[control.key] = reason
        return programs, problems, known

    def _control_program(self, source: str, key: str, child: Program) -> Program:
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

    def _installs_as(self, program: Program, smoked: dict[str, object], paid: Evaluation) -> str:
        """Return on which subject a program installs what a run of another did, which is like it on the truncated subject."""
        result = scored(paid)
        if result is not None and not is_deeper(result.evidence, smoked):
            return "truncated"
        run = self._desk.look(program, draw=paid.draw, seed=paid.seed)
        own = probe_evidence(run.evidence.to_json(), program.source)
        if result is None:
            is_the_same = not run.outcome.is_scored
        else:
            is_the_same = installs_the_same(own, probe_evidence(result.evidence, program.source))
        return "whole" if is_the_same else ""

    def _register(
        self,
        observation: Observation,
        explanation: Explanation,
        design: Design,
        programs: dict[str, Program],
        set_aside: list[dict[str, object]],
    ) -> Registration:
        """Register what is to be tested; `set_aside` tells of the controls that are not, and why."""
        return self._ledger.register_explanation(
            observation.id,
            hypotheses=[
                NewHypothesis(
                    name=h.key,
                    mechanism=h.mechanism,
                    cause=h.cause,
                    statement=h.statement,
                    body=h.model_dump(mode="json"),
                )
                for h in explanation.hypotheses
            ],
            controls=[
                NewControl(
                    name=c.key,
                    kind=c.kind,
                    mechanism=", ".join(c.removes or c.keeps),
                    statement=c.description,
                    program_id=programs[c.key].id,
                    cost=c.cost,
                    body=c.model_dump(mode="json"),
                )
                for c in explanation.controls
            ],
            predictions=[
                NewPrediction(hypothesis=p.hypothesis, control=p.control, low=p.low, high=p.high)
                for p in explanation.predictions
            ],
            design=NewDesign(
                chosen=design.chosen,
                unseparated=design.unseparated,
                cost=design.cost,
                body=design.to_json() | {"set_aside": set_aside},
            ),
        )

    def _measure(
        self,
        control: Control,
        control_id: str,
        program: Program,
        evaluation: Evaluation,
        parent: Scored,
        child: Scored,
        confirmation: Confirmation,
    ) -> ControlMeasurement:
        """Return what the paid run of a control showed, and keep what its probe said."""
        confirmed = confirmation.evaluation.result
        assert confirmed is not None
        measurement, answer = measure_control(
            control, program, evaluation, parent=parent, child=child, confirmation=confirmed, noise=self._noise
        )
        if answer is not None:
            self._ledger.record_probe_result(
                NewProbeResult(
                    target_id=control_id,
                    program_id=program.id,
                    evaluation_id=evaluation.id,
                    kind="artifact",
                    status=answer.status.value,
                    detail=answer.detail,
                    provisional=False,
                )
            )
        return measurement

    def _record(
        self,
        registration: Registration,
        verdicts: tuple[Verdict, ...],
        measurements: list[ControlMeasurement],
        confirmed: PairedEffect,
    ) -> None:
        by_name = {hypothesis.name: hypothesis.id for hypothesis in registration.hypotheses}
        evidence = {
            "child_effect": confirmed.to_json(),
            "measurements": [measurement.to_json() for measurement in measurements],
            "alpha": self._statistics.error_rate,
        }
        self._ledger.record_verdicts(
            [
                NewVerdict(
                    hypothesis_id=by_name[verdict.hypothesis],
                    status=verdict.status.value,
                    rule=verdict.rule,
                    reason=verdict.reason,
                    evidence=evidence | {"verdict": verdict.to_json()},
                )
                for verdict in verdicts
            ]
        )
        for verdict in verdicts:
            self._progress.milestone(
                f"  {verdict.cause} ({verdict.mechanism}): {verdict.status.value}. {verdict.reason}"
            )

    def _require(
        self,
        turn: int,
        observation: Observation,
        registration: Registration,
        verdicts: tuple[Verdict, ...],
        reply: ExplanationReply,
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
        for wish in reply.required_edits:
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
            for edit, verdict in self._default_edits(turn, verdicts, silent, reply.explanation, child)
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

    def _announce(self, explanation: Explanation, design: Design) -> None:
        for hypothesis in explanation.hypotheses:
            self._progress.milestone(f"  rival {hypothesis.cause} ({hypothesis.mechanism}): {hypothesis.statement}")
        self._progress.milestone(
            f"  controls: {', '.join(design.chosen)} ({design.cost} of {design.cost_of_all} calls for all); "
            f"predictions registered"
        )

    def _note(self, turn: int, topic: str, text: str) -> None:
        self._ledger.add_note(NewNote(turn=turn, topic=topic, text=text))
        self._progress.say(text)


def _same_bits(a: dict[str, object], b: dict[str, object]) -> bool:
    first, second = a.get("effective_bits"), b.get("effective_bits")
    return isinstance(first, float) and isinstance(second, float) and abs(first - second) <= BITS_TOLERANCE
