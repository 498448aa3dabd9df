"""Every verdict once more, from what the ledger measured: do the stored ones follow from it?

Chunk losses give the noise, the effects and their covariances; evidence of the runs gives the answers of the controls'
probes; both, with the predictions and the design as registered, give the verdicts, by the rule that each verdict names.
Nothing that was concluded is an input: what was stored of effects, probe answers, designs and verdicts is compared with
what comes out, and each difference is named.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forge.confirming import Confirmer
from forge.controls import build_control
from forge.errors import ForgeError
from forge.measured_controls import measure_control
from forge.measured_effects import effect_on, effect_on_reference
from forge.noise import NoiseFigures, NoiseModel
from forge.program_identity import ast_hash
from forge.recipe import Statistics
from forge.scored import Scored
from forge.verdict_rules import VERDICT_RULES, VerdictRule
from hypotheses.design import ControlOption, Design
from hypotheses.effects import PairedEffect, family_level
from hypotheses.errors import HypothesesError
from hypotheses.ledger import Control as StoredControl
from hypotheses.ledger import Design as StoredDesign
from hypotheses.ledger import Ledger, LedgerReader, Observation, Settlement
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.verdicts import ControlMeasurement

TOLERANCE = 1e-9
"""Relative difference of two numbers that is the arithmetic of another library and no difference."""
SHOWN_CHARACTERS = 300

_IMPOSSIBLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ForgeError,
    HypothesesError,
    LookupError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What a record that was tampered with can raise on the way."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A stored value that does not follow. record: id of its row; field: where in it."""

    record: str
    field: str
    stored: Any
    recomputed: Any

    def __str__(self) -> str:
        return f"{self.record}: {self.field}: stored {_shown(self.stored)}, recomputed {_shown(self.recomputed)}"


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What came out. verdicts: how many are stored; agreeing: how many of them follow whole from what was measured.

    waiting: observations whose controls are not all judged yet.
    """

    verdicts: int
    agreeing: int
    rules: tuple[str, ...]
    waiting: tuple[str, ...]
    differences: tuple[Difference, ...]
    violations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether everything stored follows from what was measured."""
        return not self.differences and not self.violations

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


def recompute(ledger: Ledger) -> Recomputation:
    """Return every difference between what a ledger concluded and what follows from what it measured."""
    differences = list(_noise(ledger))
    noise, missing = None, "none measured"
    try:
        noise = NoiseModel.of(ledger)
    except _IMPOSSIBLE as err:
        missing = f"none: {err}"
    waiting = []
    for observation in ledger.observations():
        if noise is None:
            differences.append(Difference(record=observation.id, field="noise", stored=None, recomputed=missing))
            continue
        try:
            differences += _Observed(ledger, observation, noise).differences()
        except (*_IMPOSSIBLE, RuntimeError) as err:  # StopIteration comes out of a generator as a RuntimeError
            differences.append(_impossible(observation.id, "records", err))
        if ledger.designs(observation.id) and not ledger.verdicts(observation.id):
            waiting.append(observation.id)
    verdicts = ledger.verdicts()
    wrong = {difference.record for difference in differences}
    return Recomputation(
        verdicts=len(verdicts),
        agreeing=sum(verdict.id not in wrong and verdict.observation_id not in wrong for verdict in verdicts),
        rules=tuple(sorted({verdict.rule for verdict in verdicts})),
        waiting=tuple(waiting),
        differences=tuple(differences),
        violations=tuple(ledger.check_invariants()),
    )


def _noise(ledger: Ledger) -> Iterator[Difference]:
    for stored in ledger.noise():
        try:
            if "paired_with" not in stored.body:
                raise ValueError("this ledger does not tell with which run the draws were paired")
            seed = _result(ledger, str(stored.body["paired_with"]))
            draws = [_result(ledger, evaluation_id) for evaluation_id in stored.evaluation_ids]
            figures = asdict(NoiseFigures.measured(seed, draws))
        except _IMPOSSIBLE as err:
            yield _impossible(stored.id, "noise", err)
            continue
        means = {"draw_means": list(figures.pop("draw_means"))}
        yield from compare(stored.id, {name: getattr(stored, name) for name in figures}, figures)
        yield from compare(stored.id, {"draw_means": stored.body.get("draw_means")}, means)


class _Observed:
    """One observation, measured again."""

    def __init__(self, ledger: Ledger, observation: Observation, noise: NoiseModel) -> None:
        self._ledger = ledger
        self._observation = observation
        self._noise = noise
        campaign = ledger.campaign()
        self._alpha = Statistics.model_validate(campaign.recipe.get("statistics", {})).error_rate
        self._hypotheses = {row.id: row for row in ledger.hypotheses(observation.id)}
        self._controls = {row.id: row for row in ledger.controls(observation.id)}

    def differences(self) -> Iterator[Difference]:
        """Yield what does not follow: effects, registration, designs, measurements, verdicts."""
        observation = self._observation
        try:
            parent, child, confirmation = self._runs()
            search = effect_on(parent.result, child.result, self._noise)
            confirmed = effect_on_reference(confirmation, parent.result, self._noise)
        except _IMPOSSIBLE as err:
            yield _impossible(observation.id, "effect", err)
            return
        stored = {
            "search_effect": observation.search_effect,
            "search_se": observation.search_se,
            "confirmed_effect": observation.confirmed_effect,
            "confirmed_se": observation.confirmed_se,
            "body": observation.body,
        }
        effects = {
            "search_effect": search.mean,
            "search_se": search.standard_error,
            "confirmed_effect": confirmed.mean,
            "confirmed_se": confirmed.standard_error,
            "body": {"search": search.to_json(), "confirmed": confirmed.to_json()},
        }
        yield from compare(observation.id, stored, effects)
        yield from self._registered(parent, child)
        designs = self._ledger.designs(observation.id)
        rounds = {design.round for design in designs}
        for verdict in self._ledger.verdicts(observation.id):
            if verdict.round not in rounds:
                yield Difference(record=verdict.id, field="design", stored=f"round {verdict.round}", recomputed=None)
        if self._hypotheses and not rounds:
            yield Difference(record=observation.id, field="design", stored=None, recomputed="one with its hypotheses")
        for design in designs:
            yield from self._judged(design, parent, child, confirmation, confirmed)

    def _runs(self) -> tuple[Scored, Scored, Settlement]:
        """Return parent and child as they were compared on the search split, and the child's confirmation."""
        ledger, observation = self._ledger, self._observation
        promoted = {row.program_id: row.evaluation_id for row in ledger.incumbents()}
        confirmation = ledger.evaluation(observation.confirmation_id)
        (child,) = (
            evaluation
            for evaluation in ledger.evaluations(program_id=observation.program_id, kind="candidate")
            if evaluation.split == "search"
        )
        if confirmation.result is None or not confirmation.result.is_scored:
            raise ValueError(f"{confirmation.id} carries no score")
        return (
            Scored(
                program=ledger.program(observation.parent_id),
                evaluation=ledger.evaluation(promoted[observation.parent_id]),
            ),
            Scored(program=ledger.program(observation.program_id), evaluation=child),
            confirmation.result,
        )

    def _registered(self, parent: Scored, child: Scored) -> Iterator[Difference]:
        """Yield where the columns that people ask in SQL differ from the whole object that the rule reads.

        A control's program is also what its edits make of parent and child.
        """
        for row in self._hypotheses.values():
            columns = {"name": row.name, "mechanism": row.mechanism, "cause": row.cause, "statement": row.statement}
            body = {name: row.body.get("key" if name == "name" else name) for name in columns}
            yield from compare(row.id, columns, body)
            yield from compare(
                row.id, {"predecessor": row.predecessor_id}, {"predecessor": row.body.get("predecessor")}
            )
        for stored in self._controls.values():
            try:
                control = _control(stored)
                whole = {
                    "name": control.key,
                    "kind": control.kind,
                    "mechanism": ", ".join(control.removes or control.keeps),
                    "statement": control.description,
                    "cost": control.cost,
                    "program": ast_hash(
                        build_control(control, parent=parent.program.source, child=child.program.source)
                    ),
                }
            except _IMPOSSIBLE as err:
                yield _impossible(stored.id, "control", err)
                continue
            columns = {name: getattr(stored, name) for name in whole if name != "program"}
            run = self._ledger.program(stored.program_id or "")
            yield from compare(stored.id, columns | {"program": ast_hash(run.source)}, whole)

    def _explanation(self, design: StoredDesign) -> Explanation:
        """Return what was registered up to the round of a design. It was checked then, by the rules of then."""
        registered = _of_round(self._hypotheses, design.round)
        revised = {row.predecessor_id for row in registered.values()}
        hypotheses = {key: row for key, row in registered.items() if key not in revised}
        controls = _of_round(self._controls, design.round)
        return Explanation.model_construct(
            hypotheses=tuple(Hypothesis.model_construct(**row.body) for row in hypotheses.values()),
            controls=tuple(_control(row) for row in controls.values()),
            predictions=tuple(
                Prediction(
                    hypothesis=hypotheses[row.hypothesis_id].name,
                    control=controls[row.control_id].name,
                    low=row.low,
                    high=row.high,
                )
                for row in self._ledger.predictions(self._observation.id)
                if row.hypothesis_id in hypotheses and row.control_id in controls
            ),
        )

    def _judged(
        self, stored: StoredDesign, parent: Scored, child: Scored, confirmation: Settlement, confirmed: PairedEffect
    ) -> Iterator[Difference]:
        verdicts = [row for row in self._ledger.verdicts(self._observation.id) if row.round >= stored.round]
        for version in sorted({verdict.rule for verdict in verdicts}):
            given = {
                self._hypotheses[row.hypothesis_id].name: row
                for row in verdicts
                if row.rule == version and row.round == stored.round
            }
            rule = VERDICT_RULES.get(version)
            if rule is None:
                known = ", ".join(VERDICT_RULES)
                for row in [row for row in verdicts if row.rule == version and row.round == stored.round]:
                    yield Difference(record=row.id, field="rule", stored=version, recomputed=f"known: {known}")
                continue
            try:
                explanation = self._explanation(stored)
                design = Design.from_json(stored.body)
                yield from compare(
                    stored.id,
                    {"chosen": sorted(self._controls[key].name for key in stored.chosen), "cost": stored.cost},
                    {"chosen": list(design.chosen), "cost": design.cost},
                )
                planned = self._plan(rule, stored, explanation, parent, confirmed)
                # What a later version adds to a design is no difference; what was set aside was so before there was one.
                body = {key: value for key, value in stored.body.items() if key != "set_aside"}
                yield from compare(stored.id, body, {key: planned.to_json().get(key) for key in body})
                if not given:  # a later round was judged
                    continue
                measurements = []
                for key in design.chosen:
                    measurement = yield from self._measured(
                        explanation.control(key), parent, child, confirmation, stored
                    )
                    measurements.append(measurement)
                again = rule.verdicts(explanation, confirmed, measurements, design, self._alpha)
            except _IMPOSSIBLE as err:
                for record in [row.id for row in given.values()] or [stored.id]:
                    yield _impossible(record, "verdict", err)
                continue
            for name in sorted(again.keys() - given.keys()):
                yield Difference(record=stored.id, field=f"verdict on {name!r}", stored=None, recomputed=again[name])
            for name, row in given.items():
                if name not in again:
                    yield Difference(record=row.id, field="verdict", stored=row.status, recomputed=None)
                    continue
                whole = again[name]
                yield from compare(
                    row.id,
                    {"status": row.status, "reason": row.reason, "evidence": row.evidence},
                    {
                        "status": str(whole["status"]),
                        "reason": whole["reason"],
                        "evidence": {
                            "child_effect": confirmed.to_json(),
                            "measurements": [measurement.to_json() for measurement in measurements],
                            "alpha": self._alpha,
                            "verdict": whole,
                        },
                    },
                )

    def _plan(
        self,
        rule: VerdictRule,
        stored: StoredDesign,
        explanation: Explanation,
        parent: Scored,
        confirmed: PairedEffect,
    ) -> Design:
        """Return the design as it follows from what was registered and from the calls that were free then."""
        controls = _of_round(self._controls, stored.round)
        first = min(row.seq for row in (*_of_round(self._hypotheses, stored.round).values(), *controls.values()))
        confirmer = Confirmer.of(self._ledger.as_of(first - 1))
        if confirmer is None:
            raise ValueError("the noise floor was measured after this design")

        def width_of(num_controls: int) -> float:
            level = family_level(len(explanation.hypotheses), num_controls, alpha=self._alpha)
            return rule.width(confirmed, parent.result, self._noise, level)

        return rule.plan(
            explanation.predictions,
            [
                ControlOption(key=row.name, cost=row.cost, content_hash=row.program_id or "")
                for row in controls.values()
            ],
            width_of,
            confirmer.spendable(),
            # Designs that tell nothing of what was set aside knew no rivals but those of a usable control.
            [row.key for row in explanation.hypotheses] if "set_aside" in stored.body else (),
        )

    def _measured(
        self, control: Control, parent: Scored, child: Scored, confirmation: Settlement, design: StoredDesign
    ) -> Generator[Difference, None, ControlMeasurement]:
        """Yield differences of one control's probe; return its measurement."""
        (row,) = (row for row in _of_round(self._controls, design.round).values() if row.name == control.key)
        (evaluation,) = (e for e in self._ledger.evaluations(control_id=row.id) if e.is_settled)
        measurement, answer = measure_control(
            control,
            self._ledger.program(evaluation.program_id or ""),
            evaluation,
            parent=parent,
            child=child,
            confirmation=confirmation,
            noise=self._noise,
        )
        told = [r for r in self._ledger.probe_results(target_id=row.id) if r.evaluation_id == evaluation.id]
        expected = [] if answer is None else [{"status": answer.status.value, "detail": answer.detail}]
        yield from compare(
            told[0].id if told else row.id,
            {"probe": [{"status": result.status, "detail": result.detail} for result in told]},
            {"probe": expected},
        )
        return measurement


def compare(record: str, stored: Any, recomputed: Any, field: str = "") -> Iterator[Difference]:
    """Yield every place where two values of plain data differ; numbers may differ by `TOLERANCE`."""
    stored, recomputed = _plain(stored), _plain(recomputed)
    if isinstance(stored, dict) and isinstance(recomputed, dict):
        for key in sorted(stored.keys() | recomputed.keys()):
            yield from compare(record, stored.get(key), recomputed.get(key), f"{field}.{key}".lstrip("."))
    elif isinstance(stored, list) and isinstance(recomputed, list) and len(stored) == len(recomputed):
        for index, (one, other) in enumerate(zip(stored, recomputed, strict=True)):
            yield from compare(record, one, other, f"{field}[{index}]")
    elif not _same(stored, recomputed):
        yield Difference(record=record, field=field, stored=stored, recomputed=recomputed)


def _same(stored: Any, recomputed: Any) -> bool:
    numbers = (int, float)
    if isinstance(stored, numbers) and isinstance(recomputed, numbers) and type(stored) is not bool:
        return math.isclose(stored, recomputed, rel_tol=TOLERANCE, abs_tol=TOLERANCE**2)
    return bool(stored == recomputed)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, list | tuple) else value


def _impossible(record: str, field: str, err: BaseException) -> Difference:
    return Difference(record=record, field=field, stored="a value", recomputed=f"none: {err or type(err).__name__}")


def _control(row: StoredControl) -> Control:
    return Control.model_construct(**{name: _tuple(value) for name, value in row.body.items()})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _of_round(rows: Mapping[str, Any], round: int) -> dict[str, Any]:
    return {key: row for key, row in rows.items() if row.round <= round}


def _result(ledger: LedgerReader, evaluation_id: str) -> Settlement:
    result = ledger.evaluation(evaluation_id).result
    if result is None or not result.is_scored:
        raise ValueError(f"{evaluation_id} carries no score")
    return result


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
