"""From a gain to a verdict: confirm it, let rivals predict, run the cheapest controls that separate them, decide by rule.

The order is what makes it evidence. The confirmation (other text, another calibration draw) supplies the denominator, so that
luck at the trigger does not inflate it. Hypotheses, controls, predictions and the design are registered in one transaction
before any of the controls runs. A control counts only when trusted evidence shows that its change executed. The verdict is
computed; the proposer has no say in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from forge.confirming import CONFIRMATION_SPLIT, Confirmation, Confirmer
from forge.consequences import Consequences
from forge.control_programs import ControlMaker, ControlPrograms
from forge.desk import Call, Desk
from forge.interview import Finding, Interview
from forge.measured_controls import measure_control
from forge.measured_effects import effect_on, planned_width
from forge.noise import NoiseModel
from forge.progress import Progress
from forge.recipe import Statistics
from forge.replies import ConditionalEdit, ExplanationReply
from forge.required import EditBoard
from forge.scored import Scored
from forge.screening import Screener
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
    Program,
    Registration,
)
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.verdicts import ControlMeasurement, Verdict, decide


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is going to be tested: all that stands, and can be run, after the last round of registration.

    programs: of its controls, by key. registration: of everything in it. wishes: required edits of all rounds.
    """

    explanation: Explanation
    programs: Mapping[str, Program]
    design: Design
    registration: Registration
    wishes: tuple[ConditionalEdit, ...]


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
        self._interview = interview
        self._confirmer = confirmer
        self._noise = noise
        self._statistics = statistics
        self._progress = progress
        self._seed = seed
        self._controls = ControlMaker(ledger, desk, screener)
        self._consequences = Consequences(ledger, desk, screener, board, progress)

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
        finding = Finding(
            turn=turn,
            observation=observation,
            parent=parent,
            child=child,
            claims=claims,
            search=search,
            confirmed=confirmed,
            width=self._width(confirmed, parent, 2, LEAST),
            idle=idle or {},
            trial=lambda controls: self._controls.make(controls, parent, child).problems,
        )
        reply = self._interview.explanation(finding)
        if reply is not None:
            self._test(finding, self._extended(finding, self._planned(finding, reply)), confirmation)

    def _width(self, confirmed: PairedEffect, parent: Scored, num_hypotheses: int, num_controls: int) -> float:
        """Return the width to expect of a measured retained effect, at the level of a verdict over so many tests."""
        level = family_level(num_hypotheses, num_controls, alpha=self._statistics.error_rate)
        return planned_width(confirmed, parent.result, self._noise, level=level)

    def _planned(self, finding: Finding, reply: ExplanationReply) -> _Plan:
        """Register a first answer with the controls to run."""
        made = self._controls.make(reply.explanation.controls, finding.parent, finding.child)
        set_aside = self._set_aside(finding.turn, reply.explanation.controls, made)
        programs = made.usable()
        standing = reply.explanation.restricted_to(programs)
        design = self._design(finding, standing, programs)
        registration = self._register(
            finding, standing.hypotheses, standing.controls, standing.predictions, design, programs, set_aside
        )
        return _Plan(
            explanation=standing,
            programs=programs,
            design=design,
            registration=registration,
            wishes=reply.required_edits,
        )

    def _extended(self, finding: Finding, plan: _Plan) -> _Plan:
        """Ask once for a control where nothing separates rivals, before any control has run; register what the answer adds."""
        if not self._can_be_extended(finding, plan):
            return plan
        ids = {hypothesis.name: hypothesis.id for hypothesis in plan.registration.hypotheses}
        asked = self._interview.extension(finding, plan.explanation, ids, plan.design.unseparated)
        if asked is None:
            return plan
        extension, reply = asked
        made = self._controls.make(extension.explanation.controls, finding.parent, finding.child)
        set_aside = self._set_aside(finding.turn, extension.controls, made)
        programs = made.usable()
        extension = extension.restricted_to(set(programs))
        if not extension.controls:
            return plan
        design = self._design(finding, extension.explanation, programs)
        registration = self._register(
            finding,
            extension.hypotheses,
            extension.controls,
            extension.predictions,
            design,
            programs,
            set_aside,
            round=1,
        )
        return _Plan(
            explanation=extension.explanation,
            programs=programs,
            design=design,
            registration=_together(plan.registration, registration),
            wishes=(*plan.wishes, *(wish for wish in reply.required_edits if wish not in plan.wishes)),
        )

    def _can_be_extended(self, finding: Finding, plan: _Plan) -> bool:
        """Whether asking for another control makes sense: a call is left, and the noise leaves something to measure."""
        width = self._width(finding.confirmed, finding.parent, 2, max(LEAST, len(plan.programs) + 1))
        return bool(plan.design.unseparated) and self._confirmer.spendable() > plan.design.cost and math.isfinite(width)

    def _design(self, finding: Finding, explanation: Explanation, programs: Mapping[str, Program]) -> Design:
        """Return the plan for everything that stands and can be run."""
        return plan_controls(
            explanation.predictions,
            [
                ControlOption(key=control.key, cost=control.cost, content_hash=programs[control.key].id)
                for control in explanation.controls
            ],
            width_of=partial(self._width, finding.confirmed, finding.parent, len(explanation.hypotheses)),
            budget_calls=self._confirmer.spendable(),
            hypotheses=[hypothesis.key for hypothesis in explanation.hypotheses],
        )

    def _test(self, finding: Finding, plan: _Plan, confirmation: Confirmation) -> None:
        """Run the controls of a plan, judge, and draw the consequences."""
        turn, observation, parent, child = finding.turn, finding.observation, finding.parent, finding.child
        explanation, design = plan.explanation, plan.design
        if design.feasible:
            self._announce(explanation, design)
        else:
            self._note(turn, "design", f"no useful set of controls: {design.reason}")
            self._progress.milestone(f"{observation.id}: no useful set of controls ({design.reason})")
        stored = {control.name: control for control in plan.registration.controls}
        runs = self._desk.evaluate_all(
            Call(
                program=plan.programs[key],
                kind="control",
                split=CONFIRMATION_SPLIT,
                seed=self._seed,
                turn=turn,
                control_id=stored[key].id,
                observation_id=observation.id,
                why=explanation.control(key).description,
            )
            for key in design.chosen
        )
        measurements = [
            self._measure(
                explanation.control(key), stored[key].id, plan.programs[key], evaluation, parent, child, confirmation
            )
            for key, evaluation in zip(design.chosen, runs, strict=True)
        ]
        verdicts = decide(explanation, finding.confirmed, measurements, design, alpha=self._statistics.error_rate)
        self._record(plan.registration, verdicts, measurements, finding.confirmed)
        self._consequences.draw(turn, observation, plan.registration, verdicts, explanation, plan.wishes, child)

    def _set_aside(self, turn: int, controls: Sequence[Control], made: ControlPrograms) -> list[dict[str, object]]:
        """Note which controls are not tested, and return what the ledger keeps of them."""
        for key in [control.key for control in controls]:
            if key in made.problems:
                self._note(turn, "control", f"control {key!r} cannot be used: {made.problems[key]}")
            elif key in made.known:
                text = f"control {key!r} was evaluated before these predictions, so it is shown and never evidence: "
                self._note(turn, "control", text + made.known[key])
        return [
            {
                "control": control.key,
                "kind": control.kind,
                "cost": control.cost,
                "standing": "unusable" if control.key in made.problems else "known",
                "reason": made.problems.get(control.key) or made.known[control.key],
            }
            for control in controls
            if control.key in made.problems or control.key in made.known
        ]

    def _register(
        self,
        finding: Finding,
        hypotheses: Sequence[Hypothesis],
        controls: Sequence[Control],
        predictions: Sequence[Prediction],
        design: Design,
        programs: Mapping[str, Program],
        set_aside: list[dict[str, object]],
        *,
        round: int = 0,
    ) -> Registration:
        """Register what is to be tested; `set_aside` tells of the controls that are not, and why."""
        return self._ledger.register_explanation(
            finding.observation.id,
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
