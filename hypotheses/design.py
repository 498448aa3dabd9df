"""The cheapest set of controls that tells every pair of rivals apart.

A control *separates* two rivals when their predicted intervals for it are disjoint by more than a share of the width of the
interval that the measurement is expected to have; it *puts them at odds* when the two are disjoint at all. One control that
separates a pair can be wrong about the cause, where the prediction that fails was merely a bad guess. So every pair that is
separated should be at odds over several controls, and several should run in all.

Choosing controls is then a weighted set cover with repetition, at minimum cost in evaluator calls. It is solved exactly, as an
integer program; among optima the set whose sorted content hashes come first is taken, so the choice does not depend on the order
in which controls were written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self

import numpy as np

from hypotheses.effects import Interval
from hypotheses.predictions import Prediction
from hypotheses.set_cover import Array, cheapest_cover

Pair = tuple[str, str]
"""Two hypothesis keys in alphabetical order."""
SHARE = 0.4
"""Of the expected width, by which two predictions must be apart for a control to separate them."""
AT_ODDS = 4
"""Controls, where so many are on offer, over which a separated pair should be at odds."""
LEAST = 4
"""Controls, where so many are on offer, that should run in all where any runs."""


@dataclass(frozen=True, kw_only=True)
class ControlOption:
    """A control that could be run: its cost in evaluator calls (at least 1) and the content hash of its program."""

    key: str
    cost: int
    content_hash: str

    def __post_init__(self) -> None:
        if self.cost < 1:
            raise ValueError(f"control {self.key!r} costs {self.cost} calls; a control costs at least 1")


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which controls to run, and why these.

    chosen: control keys, alphabetical; cost: their calls.
    separated: for each pair that the chosen controls separate, the chosen controls that do. at_odds: for each of these pairs, the
        chosen controls whose two predictions are disjoint at all.
    unseparated: pairs that no control at all separates.
    unaffordable: pairs that only controls beyond the budget separate.
    not_chosen: reason by control key.
    cost_of_all: calls of running every control instead; cost_of_cover: of the cheapest set separating every separable
        pair.
    widths: expected measurement width by control key; infinite where nothing can be measured.
    feasible: whether running the chosen set is useful; `reason` says why or why not.
    """

    chosen: tuple[str, ...]
    cost: int
    separated: Mapping[Pair, tuple[str, ...]]
    at_odds: Mapping[Pair, tuple[str, ...]]
    unseparated: tuple[Pair, ...]
    unaffordable: tuple[Pair, ...]
    not_chosen: Mapping[str, str]
    cost_of_all: int
    cost_of_cover: int
    widths: Mapping[str, float]
    feasible: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; an infinite width is null."""
        return {
            "chosen": list(self.chosen),
            "cost": self.cost,
            "separated": [{"pair": list(pair), "controls": list(keys)} for pair, keys in self.separated.items()],
            "at_odds": [{"pair": list(pair), "controls": list(keys)} for pair, keys in self.at_odds.items()],
            "unseparated": [list(pair) for pair in self.unseparated],
            "unaffordable": [list(pair) for pair in self.unaffordable],
            "not_chosen": dict(self.not_chosen),
            "cost_of_all": self.cost_of_all,
            "cost_of_cover": self.cost_of_cover,
            "widths": {key: width if math.isfinite(width) else None for key, width in self.widths.items()},
            "feasible": self.feasible,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            chosen=tuple(data["chosen"]),
            cost=data["cost"],
            separated={_pair(*row["pair"]): tuple(row["controls"]) for row in data["separated"]},
            at_odds={_pair(*row["pair"]): tuple(row["controls"]) for row in data.get("at_odds", ())},
            unseparated=tuple(_pair(*pair) for pair in data["unseparated"]),
            unaffordable=tuple(_pair(*pair) for pair in data["unaffordable"]),
            not_chosen=dict(data["not_chosen"]),
            cost_of_all=data["cost_of_all"],
            cost_of_cover=data["cost_of_cover"],
            widths={key: math.inf if width is None else width for key, width in data["widths"].items()},
            feasible=data["feasible"],
            reason=data["reason"],
        )


def plan_controls(
    predictions: Sequence[Prediction],
    controls: Sequence[ControlOption],
    *,
    width_of: Callable[[int], float],
    budget_calls: int,
    hypotheses: Collection[str] = (),
) -> Design:
    """Choose the controls to run, at the width that intervals have when as many run as are chosen.

    More controls are more tests, and at one error rate over all of them every interval is wider. So this is the design for the
    smallest number that is enough for it.

    Args:
        predictions: one for every hypothesis and control.
        controls: what could be run.
        width_of: expected width of a measured interval where so many controls run.
        budget_calls: evaluator calls that may be spent.
        hypotheses: keys of all rivals; where no control is left, no prediction names them.
    """
    design: Design | None = None
    for number in range(min(LEAST, len(controls)), len(controls) + 1):
        width = width_of(max(1, number))
        design = design_controls(
            predictions,
            controls,
            widths={option.key: width for option in controls},
            budget_calls=budget_calls,
            hypotheses=hypotheses,
        )
        if len(design.chosen) <= number:
            break
    assert design is not None
    return design


def design_controls(
    predictions: Sequence[Prediction],
    controls: Sequence[ControlOption],
    *,
    widths: Mapping[str, float],
    budget_calls: int,
    hypotheses: Collection[str] = (),
    share: float = SHARE,
    at_odds: int = AT_ODDS,
    least: int = LEAST,
) -> Design:
    """Choose the controls to run.

    Of all sets that separate every separable pair, put each of these at odds over `at_odds` controls and hold `least`, as far as
    those on offer can, the cheapest. Where that is beyond the budget, of all sets within it those that separate most pairs, of
    these those that come nearest to the rest, and of these the cheapest. Ties go to the set whose sorted content hashes come
    first.

    Args:
        predictions: one for every hypothesis and control.
        controls: what could be run; of several with one content hash only the first by cost and key is considered.
        widths: expected width of the measured interval, by control key (see `effects.expected_width`); may be infinite.
        budget_calls: evaluator calls that may be spent.
        hypotheses: keys of all rivals; where no control is left, no prediction names them.
        share: of the width, by which predictions must be apart to be separated.
        at_odds: controls over which each separated pair should be at odds.
        least: controls that should run where any do.

    Raises:
        ValueError: a prediction or width is missing, a key occurs twice, or a width is negative or NaN.
    """
    # In the order of the content hashes the first of two index sets is also the one whose sorted hashes come first.
    ranked = sorted(controls, key=lambda option: (option.content_hash, option.cost, option.key))
    _check_options(ranked, widths)
    options, twins = _set_twins_apart(ranked)
    margins = {option.key: share * widths[option.key] for option in options}
    separates = separating_controls(predictions, margins=margins, hypotheses=hypotheses)
    opposes = separating_controls(predictions, margins=dict.fromkeys(margins, 0.0), hypotheses=hypotheses)
    pairs = [pair for pair, keys in separates.items() if keys]

    def places(found: Mapping[Pair, tuple[str, ...]]) -> Array:
        rows = [[option.key in found[pair] for option in options] for pair in pairs]
        return np.array(rows, dtype=np.float64).reshape(len(pairs), len(options))

    costs = np.array([option.cost for option in options], dtype=float)
    chosen_indices, cost_of_cover = cheapest_cover(
        costs,
        places(separates),
        budget_calls,
        helps=places(opposes),
        wanted=np.full(len(pairs), float(at_odds)),
        least=least,
    )
    chosen = tuple(sorted(options[index].key for index in chosen_indices))
    cost = sum(options[index].cost for index in chosen_indices)
    separated = {pair: tuple(key for key in separates[pair] if key in chosen) for pair in pairs}
    separated = {pair: keys for pair, keys in separated.items() if keys}
    unaffordable = tuple(pair for pair in pairs if pair not in separated)
    return Design(
        chosen=chosen,
        cost=cost,
        separated=separated,
        at_odds={pair: tuple(key for key in opposes[pair] if key in chosen) for pair in separated},
        unseparated=tuple(pair for pair, keys in separates.items() if not keys),
        unaffordable=unaffordable,
        not_chosen={
            option.key: _why_not(option, chosen, separates, unaffordable, budget_calls - cost, _margin(share))
            for option in sorted(options, key=lambda option: option.key)
            if option.key not in chosen
        }
        | twins,
        cost_of_all=sum(option.cost for option in options),
        cost_of_cover=cost_of_cover,
        widths={option.key: float(widths[option.key]) for option in sorted(ranked, key=lambda option: option.key)},
        feasible=bool(chosen),
        reason=_reason(len(separates), len(pairs), len(separated), cost, cost_of_cover, budget_calls, _margin(share)),
    )


def separating_controls(
    predictions: Sequence[Prediction], *, margins: Mapping[str, float], hypotheses: Collection[str] = ()
) -> dict[Pair, tuple[str, ...]]:
    """Return, for every pair of rivals, the controls whose two predictions are disjoint by more than the margin.

    Raises:
        ValueError: some hypothesis has no prediction, or two, for a control in `margins`.
    """
    intervals: dict[tuple[str, str], Interval] = {}
    for prediction in predictions:
        place = (prediction.hypothesis, prediction.control)
        if place in intervals:
            raise ValueError(f"two predictions of {prediction.hypothesis!r} for {prediction.control!r}")
        intervals[place] = prediction.interval
    rivals = sorted({prediction.hypothesis for prediction in predictions} | set(hypotheses))
    for hypothesis in rivals:
        for control in margins:
            if (hypothesis, control) not in intervals:
                raise ValueError(f"no prediction of {hypothesis!r} for {control!r}")
    return {
        (a, b): tuple(key for key in sorted(margins) if intervals[a, key].is_disjoint(intervals[b, key], margins[key]))
        for a, b in combinations(rivals, 2)
    }


def control_problems(
    controls: Sequence[ControlOption], *, parent_hash: str, child_hash: str, earlier: Mapping[str, str] | None = None
) -> list[str]:
    """Return which controls are no experiment: they equal the parent, the child, each other or an earlier program.

    Args:
        controls: the candidate controls.
        parent_hash: content hash of the observation's parent, in the same terms as the controls'.
        child_hash: content hash of the child.
        earlier: key by content hash of the programs whose result is known already; such a result is shown, never
            evidence.
    """
    problems = []
    seen: dict[str, str] = {}
    for option in controls:
        if option.content_hash == parent_hash:
            problems.append(
                f"control {option.key!r} equals the observation's parent; its retained effect is 0 by definition"
            )
        elif option.content_hash == child_hash:
            problems.append(f"control {option.key!r} equals the child; its retained effect is 1 by definition")
        elif option.content_hash in seen:
            problems.append(f"controls {seen[option.content_hash]!r} and {option.key!r} are the same program")
        elif earlier and option.content_hash in earlier:
            problems.append(
                f"control {option.key!r} equals {earlier[option.content_hash]!r}, whose result is known; "
                "a prediction made afterwards is no prediction"
            )
        seen.setdefault(option.content_hash, option.key)
    return problems


def _check_options(options: Sequence[ControlOption], widths: Mapping[str, float]) -> None:
    if len({option.key for option in options}) < len(options):
        raise ValueError("a control key occurs twice")
    for option in options:
        if option.key not in widths:
            raise ValueError(f"no expected width for control {option.key!r}")
        if not widths[option.key] >= 0:
            raise ValueError(f"expected width of control {option.key!r} is {widths[option.key]}; it is at least 0")


def _set_twins_apart(ranked: Sequence[ControlOption]) -> tuple[list[ControlOption], dict[str, str]]:
    """Return the first control of each program, and for every other one the reason why it is not considered."""
    first: dict[str, str] = {}
    options, twins = [], {}
    for option in ranked:
        if option.content_hash in first:
            twins[option.key] = f"is the same program as {first[option.content_hash]}"
        else:
            first[option.content_hash] = option.key
            options.append(option)
    return options, twins


def _why_not(
    option: ControlOption,
    chosen: tuple[str, ...],
    separates: Mapping[Pair, tuple[str, ...]],
    unaffordable: tuple[Pair, ...],
    calls_left: int,
    margin: str,
) -> str:
    mine = [pair for pair, keys in separates.items() if option.key in keys]
    if not mine:
        return f"separates no pair of rivals by more than {margin}"
    missing = [pair for pair in mine if pair in unaffordable]
    if missing:
        return f"would separate {_show(missing)} but costs {option.cost} calls; {calls_left} are left"
    by = sorted({key for pair in mine for key in separates[pair] if key in chosen})
    return f"costs {option.cost} calls, and {_show(mine)} is separated already by {', '.join(by)}"


def _margin(share: float) -> str:
    return "the expected measurement width" if share == 1 else f"{share:.2f} of the expected measurement width"


def _reason(
    num_all: int, num_separable: int, num_separated: int, cost: int, cost_of_cover: int, budget: int, margin: str
) -> str:
    if num_separable == 0:
        return f"no control separates any of the {num_all} pairs of rivals by more than {margin.replace('the ', 'its ', 1)}"
    if num_separated == 0:
        return f"no control that separates a pair costs at most {budget} calls, which is what is left"
    if num_separated < num_separable:
        return (
            f"separating all {num_separable} separable pairs costs {cost_of_cover} calls and {budget} are left; "
            f"{cost} calls separate {num_separated} of them"
        )
    return (
        f"{cost} calls separate {num_separated} of {num_all} pairs, the least that separates every separable pair"
        + (f" and puts it at odds over several; separating alone costs {cost_of_cover}" if cost > cost_of_cover else "")
    )


def _show(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{a}/{b}" for a, b in pairs)


def _pair(a: str, b: str) -> Pair:
    return (a, b) if a <= b else (b, a)
