"""From a gain to a verdict: confirm it, let rivals predict, run the cheapest controls that separate them, decide by rule.

The order is what makes it evidence. The confirmation (other text, another calibration draw) supplies the denominator, so that
luck at the trigger does not inflate it. Hypotheses, controls, predictions and the design are registered in one transaction
before any of the controls runs. A control counts only when trusted evidence shows that its change executed. The verdict is
computed; the proposer has no say in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from forge.confirming import CONFIRMATION_SPLIT, Confirmation, Confirmer
from forge.controls import BITS_TOLERANCE, ControlProblem, build_control
from forge.desk import Call, Desk, probe_evidence
from forge.interview import Interview
from forge.known_results import KnownResults
from forge.measured_controls import measure_control
from forge.measured_effects import effect_on, planned_width
from forge.noise import NoiseModel
from forge.progress import Progress
from forge.recipe import Statistics
from forge.replies import ExplanationReply
from forge.required import EditBoard
from forge.scored import Scored
from forge.screening import Screener
from hypotheses.design import ControlOption, Design, design_controls
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
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.required_edits import check_required_edit
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

    def explain(self, turn: int, parent: Scored, child: Scored, claims: tuple[tuple[str, str], ...]) -> None:
        """Confirm the child's effect, and when it holds turn it into verdicts and required edits."""
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
        width = self._width(confirmed, parent, num_hypotheses=2, num_controls=2)
        reply = self._interview.explanation(turn, observation, parent, child, claims, search, confirmed, width)
        if reply is not None:
            self._test(turn, observation, parent, child, claims, reply, confirmation, search, confirmed)

    def _width(self, confirmed: PairedEffect, parent: Scored, *, num_hypotheses: int, num_controls: int) -> float:
        """Return the width to expect of a measured retained effect, at the level of a verdict over so many tests."""
        level = family_level(num_hypotheses, num_controls, alpha=self._statistics.error_rate)
        return planned_width(confirmed, parent.result, self._noise, level=level)

    def _test(
        self,
        turn: int,
        observation: Observation,
        parent: Scored,
        child: Scored,
        claims: tuple[tuple[str, str], ...],
        reply: ExplanationReply,
        confirmation: Confirmation,
        search: PairedEffect,
        confirmed: PairedEffect,
    ) -> None:
        explanation = reply.explanation
        programs, set_aside = self._prepare(turn, explanation, parent, child)
        usable = explanation.restricted_to(programs)
        design = self._design(usable, programs, parent, confirmed)
        registration = self._register(
            observation, usable.hypotheses, usable.controls, usable.predictions, design, programs, set_aside
        )
        inseparable = design.unseparated if self._can_be_separated(design, programs, parent, confirmed) else ()
        if inseparable:
            ids = {hypothesis.name: hypothesis.id for hypothesis in registration.hypotheses}
            width = self._width(confirmed, parent, num_hypotheses=2, num_controls=2)
            asked = self._interview.extension(
                turn, observation, parent, child, claims, search, confirmed, width, usable, ids, inseparable
            )
            if asked is not None:
                extension, second = asked
                new = extension.explanation.restricted_to([control.key for control in extension.controls])
                more, aside = self._prepare(turn, new, parent, child, beside=programs)
                if more:
                    extension = extension.restricted_to(set(more))
                    programs |= more
                    usable = extension.explanation
                    design = self._design(usable, programs, parent, confirmed)
                    registration = _together(
                        registration,
                        self._register(
                            observation,
                            extension.hypotheses,
                            extension.controls,
                            extension.predictions,
                            design,
                            programs,
                            aside,
                            round=1,
                        ),
                    )
                    reply = replace(reply, required_edits=(*reply.required_edits, *second.required_edits))
        if design.feasible:
            self._announce(usable, design)
        else:
            self._note(turn, "design", f"no useful set of controls: {design.reason}")
            self._progress.milestone(f"{observation.id}: no useful set of controls ({design.reason})")
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

    def _prepare(
        self,
        turn: int,
        explanation: Explanation,
        parent: Scored,
        child: Scored,
        *,
        beside: dict[str, Program] | None = None,
    ) -> tuple[dict[str, Program], list[dict[str, object]]]:
        """Return the program of each control that may be evidence, and what is set aside, with the reasons noted.

        beside: programs of controls that are registered already; the same one again is no other control.
        """
        programs, problems, known = self._control_programs(explanation, parent, child)
        for key, program in list(programs.items()):
            twin = next((name for name, other in (beside or {}).items() if other.ast_hash == program.ast_hash), None)
            if twin is not None:
                problems[key] = f"it is the same program as control {twin!r}"
                del programs[key]
        for key, reason in problems.items():
            self._note(turn, "control", f"control {key!r} cannot be used: {reason}")
        for key, reason in known.items():
            self._note(
                turn,
                "control",
                f"control {key!r} was evaluated before these predictions, so it is shown and never evidence: {reason}",
            )
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
        return {key: program for key, program in programs.items() if key not in known}, set_aside

    def _design(
        self, explanation: Explanation, programs: dict[str, Program], parent: Scored, confirmed: PairedEffect
    ) -> Design:
        """Return the plan for everything that stands and can be run."""
        options = [
            ControlOption(key=control.key, cost=control.cost, content_hash=programs[control.key].id)
            for control in explanation.controls
        ]
        width = self._width(
            confirmed, parent, num_hypotheses=len(explanation.hypotheses), num_controls=max(1, len(options))
        )
        return design_controls(
            explanation.predictions,
            options,
            widths={option.key: width for option in options},
            budget_calls=self._confirmer.spendable(),
            hypotheses=[hypothesis.key for hypothesis in explanation.hypotheses],
        )

    def _can_be_separated(
        self, design: Design, programs: dict[str, Program], parent: Scored, confirmed: PairedEffect
    ) -> bool:
        """Whether asking for another control makes sense: a call is left, and the noise leaves something to measure."""
        width = self._width(confirmed, parent, num_hypotheses=2, num_controls=len(programs) + 1)
        return bool(design.unseparated) and self._confirmer.spendable() > design.cost and math.isfinite(width)

    def _control_programs(
        self, explanation: Explanation, parent: Scored, child: Scored
    ) -> tuple[dict[str, Program], dict[str, str], dict[str, str]]:
        """Return the stored program of each control that can run, why the others cannot, and why results are known already."""
        programs: dict[str, Program] = {}
        problems: dict[str, str] = {}
        made: dict[str, str] = {}
        known: dict[str, str] = {}
        results = KnownResults.of(self._ledger, child.program.id)
        _, _, child_evidence = self._screener.smoke(child.program, allowed_class="corrected")
        _, _, parent_evidence = self._screener.smoke(parent.program, allowed_class="corrected")
        for control in explanation.controls:
            try:
                source = build_control(control, parent=parent.program.source, child=child.program.source)
            except ControlProblem as problem:
                problems[control.key] = str(problem)
                continue
            twin = made.setdefault(source, control.key)
            if twin != control.key:
                problems[control.key] = f"it is the same program as control {twin!r}"
                continue
            program = self._screener.store(source, origin="control", title=control.key, parent=child.program)
            passed, failure, evidence = self._screener.smoke(program, allowed_class="corrected")
            if not passed:
                problems[control.key] = f"its smoke run ended so: {failure}"
            elif evidence["smoke_digest"] == parent_evidence["smoke_digest"]:
                problems[control.key] = "it installs exactly what the parent installs, on the truncated subject"
            elif control.kind == "substitute" and not _same_bits(evidence, child_evidence):
                problems[control.key] = (
                    f"a substitute spends the same bits: {evidence['effective_bits']:.3f} here, "
                    f"{child_evidence['effective_bits']:.3f} in the child, on the truncated subject"
                )
            else:
                programs[control.key] = program
                reason = results.of_program(program, str(evidence["smoke_digest"]))
                if reason is not None:
                    known[control.key] = reason
        return programs, problems, known

    def _register(
        self,
        observation: Observation,
        hypotheses: Sequence[Hypothesis],
        controls: Sequence[Control],
        predictions: Sequence[Prediction],
        design: Design,
        programs: dict[str, Program],
        set_aside: list[dict[str, object]],
        *,
        round: int = 0,
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
                    predecessor_id=h.predecessor,
                )
                for h in hypotheses
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
                for c in controls
            ],
            predictions=[
                NewPrediction(hypothesis=p.hypothesis, control=p.control, low=p.low, high=p.high) for p in predictions
            ],
            design=NewDesign(
                chosen=design.chosen,
                unseparated=design.unseparated,
                cost=design.cost,
                body=design.to_json() | {"set_aside": set_aside},
            ),
            round=round,
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
                    round=registration.round,
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
        incumbent = self._ledger.incumbent()
        if incumbent is None or incumbent.program_id != child.program.id:
            self._note(
                turn,
                "required edit",
                "the explained program is not the incumbent: its claims are judged, nothing is required",
            )
            return
        evidence = probe_evidence(child.result.evidence, child.program.source)
        wanted = []
        for wish in reply.required_edits:
            verdict = by_key.get(wish.hypothesis)
            if verdict is None or verdict.status.value != wish.verdict:
                continue
            problems = check_required_edit(wish.edit, verdict, mechanisms=child.program.mechanisms, incumbent=evidence)
            if problems:
                self._note(turn, "required edit", f"not taken: {'; '.join(problems)}")
            else:
                wanted.append((wish.edit, by_name[wish.hypothesis]))
        for record in self._board.require(wanted, observation_id=observation.id, turn=turn):
            how = "blocking" if record.blocks else "open"
            self._progress.milestone(
                f"  required edit {record.key} ({how}): {record.edit.kind} {record.edit.mechanism}: {record.edit.wording}"
            )
        refuted = [v for v in verdicts if v.status is VerdictStatus.REFUTED]
        for verdict in refuted:
            self._progress.milestone(f"  barred from now on: {verdict.mechanism} through {verdict.cause}")

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


def _together(first: Registration, second: Registration) -> Registration:
    """Return what stands after two rounds, under the later one: hypotheses that were revised are left out."""
    revised = {hypothesis.predecessor_id for hypothesis in second.hypotheses}
    return replace(
        second,
        hypotheses=(*(h for h in first.hypotheses if h.id not in revised), *second.hypotheses),
        controls=(*first.controls, *second.controls),
        predictions=(*first.predictions, *second.predictions),
    )


def _same_bits(a: dict[str, object], b: dict[str, object]) -> bool:
    first, second = a.get("effective_bits"), b.get("effective_bits")
    return isinstance(first, float) and isinstance(second, float) and abs(first - second) <= BITS_TOLERANCE
