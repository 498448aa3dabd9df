"""From a gain to a verdict: confirm it, let rivals predict, run the cheapest controls that separate them, decide by rule.

The order is what makes it evidence. The confirmation (other text, another calibration draw) supplies the denominator, so that
luck at the trigger does not inflate it. Hypotheses, controls, predictions and the design are registered in one transaction
before any of the controls runs. A control counts only when trusted evidence shows that its change executed. The verdict is
computed; the proposer has no say in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from forge.confirming import CONFIRMATION_SPLIT, Confirmation, Confirmer
from forge.consequences import Consequences
from forge.control_programs import ControlMaker, ControlPrograms
from forge.desk import Call, Desk
from forge.interview import Interview
from forge.measured_controls import measure_control
from forge.measured_effects import effect_on, planned_width
from forge.noise import NoiseModel
from forge.progress import Progress
from forge.recipe import Statistics
from forge.replies import ExplanationReply
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
    Observation,
    Program,
    Registration,
)
from hypotheses.predictions import Control, Explanation
from hypotheses.verdicts import ControlMeasurement, Verdict, decide


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
            trial=lambda controls: self._controls.make(controls, parent, child).problems,
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
        made = self._controls.make(explanation.controls, parent, child)
        programs = made.usable()
        design = plan_controls(
            [p for p in explanation.predictions if p.control in programs],
            [
                ControlOption(key=key, cost=explanation.control(key).cost, content_hash=program.id)
                for key, program in programs.items()
            ],
            width_of=partial(self._width, confirmed, parent, len(explanation.hypotheses)),
            budget_calls=self._confirmer.spendable(),
            hypotheses=[hypothesis.key for hypothesis in explanation.hypotheses],
        )
        set_aside = self._set_aside(turn, explanation, made)
        if not design.feasible:
            self._note(turn, "design", f"no useful set of controls: {design.reason}")
            self._progress.milestone(f"{observation.id}: no useful set of controls ({design.reason})")
        usable = explanation.restricted_to(design.widths)
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
        self._consequences.draw(turn, observation, registration, verdicts, reply, child)

    def _set_aside(self, turn: int, explanation: Explanation, made: ControlPrograms) -> list[dict[str, object]]:
        """Note which controls are not tested, and return what the ledger keeps of them."""
        for key, reason in made.problems.items():
            self._note(turn, "control", f"control {key!r} cannot be used: {reason}")
        for key, reason in made.known.items():
            text = (
                f"control {key!r} was evaluated before these predictions, so it is shown and never evidence: {reason}"
            )
            self._note(turn, "control", text)
        return [
            {
                "control": control.key,
                "kind": control.kind,
                "cost": control.cost,
                "standing": "unusable" if control.key in made.problems else "known",
                "reason": made.problems.get(control.key) or made.known[control.key],
            }
            for control in explanation.controls
            if control.key in made.problems or control.key in made.known
        ]

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
