"""Observations as tables: rivals with their predictions, the plan of controls, interactions, verdicts with their reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from forge.honesty import calls_for_controls
from hypotheses.interval import Interval
from hypotheses.ledger import Design, LedgerReader, Observation, Verdict


@dataclass(frozen=True, kw_only=True)
class PredictionRow:
    """One rival's interval for one control, and what was measured (None where the control did not run).

    failed: the two are apart beyond chance. fits: the estimate lies in the prediction, and the interval not far beyond. Neither
    holds where nothing can be said.
    """

    control: str
    kind: str
    low: float
    high: float
    measured: float | None
    measured_low: float | None
    measured_high: float | None
    failed: bool
    fits: bool
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class RivalRow:
    """One hypothesis with its predictions and its verdict. revises: cause of the earlier hypothesis that it stands for."""

    id: str
    cause: str
    mechanism: str
    statement: str
    round: int
    revises: str | None
    status: str
    reason: str
    predictions: tuple[PredictionRow, ...]


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Why one control was run, or not. separates: pairs of rivals that it tells apart by more than the expected width.

    standing: chosen, not chosen, known (its result stood already), unusable; `reason` says why it was not chosen.
    width: expected of its measured retained effect; None when nothing could be measured, or it was not considered.
    """

    control: str
    kind: str
    cost: int
    standing: str
    reason: str
    width: float | None
    separates: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """The design of one round: what was to be run, what it was to tell apart, and what everything would have cost.

    cost_of_all: calls of every control that could have been run as evidence; known and unusable ones are not in it.
    cost_of_cover: calls of the cheapest set that separates every separable pair, whatever was left to spend.
    """

    round: int
    controls: tuple[PlanRow, ...]
    unseparated: tuple[tuple[str, str], ...]
    unaffordable: tuple[tuple[str, str], ...]
    cost: int
    cost_of_all: int | None
    cost_of_cover: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class InteractionRow:
    """A knockout and a knockin that disagree, or not: excess = 1 - r(knockout) - r(knockin)."""

    knockout: str
    knockin: str
    excess: float
    p_value: float
    significant: bool


@dataclass(frozen=True, kw_only=True)
class ObservationRow:
    """One confirmed difference and its explanation.

    parent_nll, child_nll: their losses in the confirmation, nats per token; the parent as installed with calibration draw 0, the
        child with `child_draw`. registered, first_control: places in the order of events at which the last prediction was
        registered and the first control's call reserved; None where there were none.
    """

    id: str
    turn: int
    program: str
    program_id: str
    parent_id: str
    search_effect: float
    search_se: float
    confirmed_effect: float
    confirmed_se: float
    parent_nll: float | None
    child_nll: float | None
    child_draw: int
    registered: int | None
    first_control: int | None
    rivals: tuple[RivalRow, ...]
    plans: tuple[PlanTable, ...]
    interactions: tuple[InteractionRow, ...]
    void: tuple[str, ...]
    unseparated: tuple[tuple[str, str], ...]
    calls_for_controls: int
    rules: tuple[str, ...]


def observation_row(ledger: LedgerReader, observation: Observation) -> ObservationRow:
    """Read one observation with all that was registered for it and decided."""
    verdicts = {verdict.hypothesis_id: verdict for verdict in ledger.verdicts(observation.id)}
    controls = {control.id: control for control in ledger.controls(observation.id)}
    predictions = ledger.predictions(observation.id)
    designs = ledger.designs(observation.id)
    chosen = {key for design in designs for key in design.chosen}
    names = {hypothesis.id: hypothesis.name for hypothesis in ledger.hypotheses(observation.id)}
    causes = {hypothesis.id: hypothesis.cause for hypothesis in ledger.hypotheses(observation.id)}
    revised = {hypothesis.predecessor_id for hypothesis in ledger.hypotheses(observation.id)}
    rivals = []
    for hypothesis in ledger.hypotheses(observation.id):
        verdict = verdicts.get(hypothesis.id)
        judged = verdict.evidence.get("verdict", {}) if verdict else {}
        checks = {check["control"]: check for check in judged.get("checks", ())}
        rows = []
        for prediction in predictions:
            if prediction.hypothesis_id != hypothesis.id:
                continue
            control = controls[prediction.control_id]
            check = checks.get(control.name)
            measured = _interval(check.get("measured")) if check else None
            rows.append(
                PredictionRow(
                    control=control.name,
                    kind=control.kind,
                    low=prediction.low,
                    high=prediction.high,
                    measured=check["estimate"] if check else None,
                    measured_low=measured.low if measured else None,
                    measured_high=measured.high if measured else None,
                    failed=bool(check and check["failed"]),
                    fits=bool(check and check.get("fits")),
                    chosen=control.id in chosen,
                )
            )
        rivals.append(
            RivalRow(
                id=hypothesis.id,
                cause=hypothesis.cause,
                mechanism=hypothesis.mechanism,
                statement=hypothesis.statement,
                round=hypothesis.round,
                revises=causes.get(hypothesis.predecessor_id or ""),
                status=verdict.status if verdict else "revised" if hypothesis.id in revised else "no verdict",
                reason=verdict.reason if verdict else "",
                predictions=tuple(rows),
            )
        )
    confirmation = ledger.evaluation(observation.confirmation_id)
    references = confirmation.result.reference_chunk_nll if confirmation.result else ()
    reserved = [
        run.seq for control in ledger.controls(observation.id) for run in ledger.evaluations(control_id=control.id)
    ]
    return ObservationRow(
        id=observation.id,
        turn=observation.turn,
        program=ledger.program(observation.program_id).title,
        program_id=observation.program_id,
        parent_id=observation.parent_id,
        search_effect=observation.search_effect,
        search_se=observation.search_se,
        confirmed_effect=observation.confirmed_effect,
        confirmed_se=observation.confirmed_se,
        parent_nll=fmean(references) if references else None,
        child_nll=confirmation.result.nll if confirmation.result else None,
        child_draw=confirmation.draw,
        registered=max((row.seq for row in ledger.predictions(observation.id)), default=None),
        first_control=min(reserved, default=None),
        rivals=tuple(rivals),
        plans=tuple(_plan(ledger, design) for design in designs),
        interactions=tuple(_interactions(verdicts.values())),
        void=tuple(dict.fromkeys(text for verdict in verdicts.values() for text in _told(verdict).get("void", ()))),
        unseparated=tuple((names[a], names[b]) for design in designs for a, b in design.unseparated),
        calls_for_controls=calls_for_controls(ledger, observation.id),
        rules=tuple(sorted({verdict.rule for verdict in verdicts.values()})),
    )


def _separated(ledger: LedgerReader, design: Design) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return, by control, the pairs of rivals whose intervals for it are disjoint by more than the expected width."""
    hypotheses = {row.id: row.name for row in ledger.hypotheses(design.observation_id) if row.round <= design.round}
    intervals: dict[str, dict[str, Interval]] = {}
    names = {control.id: control.name for control in ledger.controls(design.observation_id)}
    for row in ledger.predictions(design.observation_id):
        if row.hypothesis_id in hypotheses:
            cells = intervals.setdefault(names[row.control_id], {})
            cells[hypotheses[row.hypothesis_id]] = Interval(low=row.low, high=row.high)
    return {
        name: tuple((a, b) for a, b in combinations(sorted(cells), 2) if cells[a].is_disjoint(cells[b], float(width)))
        for name, cells in intervals.items()
        if (width := design.body.get("widths", {}).get(name)) is not None
    }


def _told(verdict: Verdict) -> dict[str, Any]:
    told: dict[str, Any] = verdict.evidence.get("verdict", {})
    return told


def _interactions(verdicts: Iterable[Verdict]) -> Iterable[InteractionRow]:
    """Every verdict of an observation tells the same interactions; the first one is read."""
    first = next(iter(verdicts), None)
    for row in _told(first).get("interactions", ()) if first is not None else ():
        yield InteractionRow(**row)


def _plan(ledger: LedgerReader, design: Design) -> PlanTable:
    body = design.body
    controls = {control.name: control for control in ledger.controls(design.observation_id)}
    chosen = {control.name for control in controls.values() if control.id in design.chosen}
    separated = _separated(ledger, design)
    rows = [
        PlanRow(
            control=name,
            kind=control.kind,
            cost=control.cost,
            standing="chosen" if name in chosen else "not chosen",
            reason=str(body.get("not_chosen", {}).get(name, "")),
            width=body.get("widths", {}).get(name),
            separates=separated.get(name, ()),
        )
        for name, control in controls.items()
        if control.round <= design.round
    ]
    rows += [
        PlanRow(
            control=row["control"],
            kind=row["kind"],
            cost=row["cost"],
            standing=row["standing"],
            reason=row["reason"],
            width=None,
            separates=(),
        )
        for row in body.get("set_aside", ())
    ]
    names = {hypothesis.id: hypothesis.name for hypothesis in ledger.hypotheses(design.observation_id)}
    return PlanTable(
        round=design.round,
        controls=tuple(rows),
        unseparated=tuple((names[a], names[b]) for a, b in design.unseparated),
        unaffordable=tuple((a, b) for a, b in body.get("unaffordable", ())),
        cost=design.cost,
        cost_of_all=body.get("cost_of_all"),
        cost_of_cover=body.get("cost_of_cover"),
        reason=str(body.get("reason", "")),
    )


def _interval(data: dict[str, float] | None) -> Interval | None:
    return Interval(low=data["low"], high=data["high"]) if data else None
