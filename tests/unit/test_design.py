from __future__ import annotations

import math
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypotheses.design import (
    AT_ODDS,
    LEAST,
    SHARE,
    ControlOption,
    Design,
    control_problems,
    design_controls,
    plan_controls,
)
from hypotheses.predictions import Prediction


def subsets(keys: list[str]) -> chain[tuple[str, ...]]:
    return chain.from_iterable(combinations(keys, n) for n in range(len(keys) + 1))


def disjoint(predictions: list[Prediction], margin: dict[str, float]) -> dict[tuple[str, str], set[str]]:
    """The definition, written again: gap between the two intervals greater than the margin."""
    ends = {(p.hypothesis, p.control): (p.low, p.high) for p in predictions}
    keys = sorted({p.hypothesis for p in predictions})
    found: dict[tuple[str, str], set[str]] = {}
    for a, b in combinations(keys, 2):
        gaps = {c: max(ends[a, c][0] - ends[b, c][1], ends[b, c][0] - ends[a, c][1]) for c in margin}
        found[a, b] = {c for c, gap in gaps.items() if gap > margin[c]}
    return found


def brute_force(
    pairs: dict[tuple[str, str], set[str]],
    odds: dict[tuple[str, str], set[str]],
    options: list[ControlOption],
    budget: int,
    at_odds: int,
    least: int,
) -> tuple[tuple[str, ...], int, int]:
    """Return the best chosen set, the number of pairs it separates, and the cost of the cheapest full cover."""
    cost = {o.key: o.cost for o in options}
    content = {o.key: o.content_hash for o in options}
    scored = []
    for chosen in subsets(list(cost)):
        covered = [pair for pair, keys in pairs.items() if keys & set(chosen)]
        help_given = sum(min(len(odds[pair] & set(chosen)), at_odds) for pair in covered)
        help_given += min(len(chosen), least) if covered else 0
        scored.append(
            (-len(covered), -help_given, sum(cost[k] for k in chosen), sorted(content[k] for k in chosen), chosen)
        )
    most = min(row[0] for row in scored)
    full = min(row[2] for row in scored if row[0] == most)
    best = min(row for row in scored if row[2] <= max(budget, 0))
    return tuple(sorted(best[4])), -best[0], full


@st.composite
def problems(
    draw: st.DrawFn, max_controls: int, min_controls: int = 1
) -> tuple[list[Prediction], list[ControlOption], dict[str, float], int]:
    num_hypotheses = draw(st.integers(2, 4))
    num_controls = draw(st.integers(min_controls, max_controls))
    hashes = draw(st.permutations([f"{n:02x}" for n in range(num_controls)]))
    options = [
        ControlOption(key=f"c{n}", cost=draw(st.integers(1, 3)), content_hash=hashes[n]) for n in range(num_controls)
    ]
    # Coarse positions make ties frequent.
    predictions = [
        Prediction(hypothesis=f"h{h}", control=f"c{c}", low=low / 4, high=low / 4 + 0.2)
        for h in range(num_hypotheses)
        for c in range(num_controls)
        for low in [draw(st.integers(0, 4))]
    ]
    widths = {option.key: draw(st.sampled_from([0.0, 0.1, 0.4, math.inf])) for option in options}
    return predictions, options, widths, draw(st.integers(0, 8))


RULES = st.sampled_from([(1.0, 0, 0), (SHARE, AT_ODDS, LEAST), (0.3, 2, 0), (0.0, 3, 5)])
"""Share of the width, controls at odds, controls in all: separating alone, the rule in force, others."""


@settings(max_examples=60, deadline=None)
@given(problems(max_controls=6), RULES)
def test_design_is_the_first_optimum_by_brute_force(
    problem: tuple[list[Prediction], list[ControlOption], dict[str, float], int], rule: tuple[float, int, int]
) -> None:
    check_against_brute_force(*problem, *rule)


@settings(max_examples=30, deadline=None)
@given(problems(max_controls=12, min_controls=7), RULES)
def test_design_is_optimal_up_to_twelve_controls(
    problem: tuple[list[Prediction], list[ControlOption], dict[str, float], int], rule: tuple[float, int, int]
) -> None:
    check_against_brute_force(*problem, *rule)


def check_against_brute_force(
    predictions: list[Prediction],
    options: list[ControlOption],
    widths: dict[str, float],
    budget: int,
    share: float,
    at_odds: int,
    least: int,
) -> None:
    design = design_controls(
        predictions, options, widths=widths, budget_calls=budget, share=share, at_odds=at_odds, least=least
    )
    # An infinite width leaves nothing to separate, whatever the share.
    pairs = disjoint(predictions, {key: share * width if width < math.inf else width for key, width in widths.items()})
    odds = disjoint(predictions, dict.fromkeys(widths, 0.0))
    chosen, covered, full = brute_force({p: k for p, k in pairs.items() if k}, odds, options, budget, at_odds, least)
    assert design.chosen == chosen
    assert design.cost == sum(o.cost for o in options if o.key in chosen) <= max(budget, 0)
    assert len(design.separated) == covered
    assert design.cost_of_cover == full
    assert design.feasible == bool(chosen)
    assert set(design.unseparated) == {pair for pair, keys in pairs.items() if not keys}
    assert all(set(keys) == pairs[pair] & set(chosen) for pair, keys in design.separated.items())
    assert design.at_odds.keys() == design.separated.keys()
    assert all(set(keys) == odds[pair] & set(chosen) for pair, keys in design.at_odds.items())
    parts = [*design.separated, *design.unseparated, *design.unaffordable]
    assert sorted(parts) == sorted(pairs)  # every pair is accounted for exactly once
    if full <= budget:
        assert not design.unaffordable  # every separable pair is separated
    assert set(design.not_chosen) | set(chosen) == set(widths)
    assert Design.from_json(design.to_json()) == design


@settings(max_examples=25, deadline=None)
@given(problems(max_controls=5), st.randoms())
def test_design_does_not_depend_on_order(problem: tuple[list, list, dict, int], rng: object) -> None:  # type: ignore[type-arg]
    predictions, options, widths, budget = problem
    before = design_controls(predictions, options, widths=widths, budget_calls=budget)
    rng.shuffle(predictions)  # type: ignore[attr-defined]
    rng.shuffle(options)  # type: ignore[attr-defined]
    after = design_controls(predictions, options, widths=dict(reversed(widths.items())), budget_calls=budget)
    assert before == after


ALONE = {"share": 1.0, "at_odds": 0, "least": 0}
"""Nothing but the cheapest set that separates by the whole width."""


def two_rivals(*controls: tuple[str, float]) -> list[Prediction]:
    """'a' expects 0.0 to 0.1 everywhere, 'b' an interval of the same length that begins `gap` above."""
    return [
        Prediction(hypothesis=h, control=key, low=low, high=low + 0.1)
        for key, gap in controls
        for h, low in (("a", 0.0), ("b", 0.1 + gap))
    ]


def options(**cost: int) -> list[ControlOption]:
    return [ControlOption(key=key, cost=calls, content_hash=f"hash-{key}") for key, calls in cost.items()]


def test_a_pair_needs_more_than_the_width() -> None:
    predictions = two_rivals(("x", 0.25))
    near = design_controls(predictions, options(x=1), widths={"x": 0.3}, budget_calls=5, **ALONE)
    assert not near.feasible
    assert near.unseparated == (("a", "b"),)
    assert near.not_chosen == {"x": "separates no pair of rivals by more than the expected measurement width"}
    assert (
        near.reason == "no control separates any of the 1 pairs of rivals by more than its expected measurement width"
    )
    assert design_controls(predictions, options(x=1), widths={"x": 0.2}, budget_calls=5, **ALONE).chosen == ("x",)


def test_the_plan_says_what_was_left_out_and_why() -> None:
    predictions = two_rivals(("x", 0.5), ("y", 0.5), ("z", 0.0))
    plan = design_controls(
        predictions, options(x=3, y=1, z=1), widths=dict.fromkeys("xyz", 0.2), budget_calls=5, **ALONE
    )
    assert plan.chosen == ("y",)
    assert plan.not_chosen == {
        "x": "costs 3 calls, and a/b is separated already by y",
        "z": "separates no pair of rivals by more than the expected measurement width",
    }
    assert plan.cost_of_all == 5
    assert plan.reason == "1 calls separate 1 of 1 pairs, the least that separates every separable pair"


def test_no_useful_set_fits_the_budget() -> None:
    plan = design_controls(two_rivals(("x", 0.5)), options(x=3), widths={"x": 0.1}, budget_calls=2, **ALONE)
    assert not plan.feasible
    assert plan.cost_of_cover == 3
    assert plan.unaffordable == (("a", "b"),)
    assert plan.not_chosen == {"x": "would separate a/b but costs 3 calls; 2 are left"}
    assert plan.reason == "no control that separates a pair costs at most 2 calls, which is what is left"


def test_part_of_the_cover_where_all_of_it_is_too_dear() -> None:
    rows = {"a": (0.0, 0.0), "b": (1.0, 0.0), "c": (1.0, 1.0)}
    predictions = [
        Prediction(hypothesis=h, control=key, low=low, high=low + 0.1)
        for h, lows in rows.items()
        for key, low in zip("xy", lows, strict=True)
    ]
    plan = design_controls(predictions, options(x=2, y=2), widths={"x": 0.1, "y": 0.1}, budget_calls=3, **ALONE)
    assert plan.chosen == ("x",)
    assert plan.separated == {("a", "b"): ("x",), ("a", "c"): ("x",)}
    assert plan.unaffordable == (("b", "c"),)
    assert plan.feasible
    assert plan.reason == "separating all 3 separable pairs costs 4 calls and 3 are left; 2 calls separate 2 of them"


def test_large_costs_are_solved_exactly() -> None:
    predictions = two_rivals(("x", 0.5), ("y", 0.5))
    plan = design_controls(
        predictions, options(x=100_000, y=99_999), widths={"x": 0, "y": 0}, budget_calls=10**6, **ALONE
    )
    assert plan.chosen == ("y",)


def test_ties_go_to_the_first_content_hash() -> None:
    predictions = two_rivals(("x", 0.5), ("y", 0.5))
    for first in "xy":
        tied = [ControlOption(key=key, cost=1, content_hash="0" if key == first else "1") for key in "xy"]
        assert design_controls(predictions, tied, widths={"x": 0, "y": 0}, budget_calls=5, **ALONE).chosen == (first,)


def test_twins_are_run_once_at_most() -> None:
    same = [ControlOption(key=key, cost=cost, content_hash="h") for key, cost in (("x", 2), ("y", 1))]
    plan = design_controls(two_rivals(("x", 0.5), ("y", 0.5)), same, widths={"x": 0, "y": 0}, budget_calls=5, **ALONE)
    assert plan.chosen == ("y",)
    assert plan.not_chosen == {"x": "is the same program as y"}
    assert plan.cost_of_all == 1
    assert set(plan.widths) == {"x", "y"}


def test_separated_pairs_are_put_at_odds_over_several_controls() -> None:
    """x separates; y and z put the two at odds, z for three calls; u does neither."""
    predictions = two_rivals(("x", 0.5), ("y", 0.05), ("z", 0.05), ("u", 0.0))
    widths = dict.fromkeys("xyzu", 0.9)
    offered = options(x=1, y=1, z=3, u=1)
    plan = design_controls(predictions, offered, widths=widths, budget_calls=9, least=3)
    assert plan.chosen == ("x", "y", "z")
    assert plan.separated == {("a", "b"): ("x",)}
    assert plan.at_odds == {("a", "b"): ("x", "y", "z")}
    assert plan.not_chosen == {"u": "separates no pair of rivals by more than 0.40 of the expected measurement width"}
    assert plan.reason == (
        "5 calls separate 1 of 1 pairs, the least that separates every separable pair and puts it at odds over several;"
        " separating alone costs 1"
    )
    assert design_controls(predictions, offered, widths=widths, budget_calls=9, least=4).chosen == ("u", "x", "y", "z")
    # What the budget does not allow is left out; how many run in all still counts.
    assert design_controls(predictions, offered, widths=widths, budget_calls=3).chosen == ("u", "x", "y")
    # Where nothing is separated nothing runs, however many are at odds.
    assert not design_controls(predictions, offered, widths=dict.fromkeys("xyzu", 9.0), budget_calls=9).feasible


def test_the_plan_is_made_at_the_width_that_as_many_controls_have() -> None:
    """Each of three pairs has two controls of its own, so that six run."""
    lows = {"a": (0, 0, 0, 0, 0, 0), "b": (1, 1, 0, 0, 2, 2), "c": (0, 0, 1, 1, 2, 2)}
    predictions = [
        Prediction(hypothesis=h, control=key, low=low, high=low + 0.1)
        for h, row in lows.items()
        for key, low in zip("uvwxyz", row, strict=True)
    ]
    asked = []

    def width_of(number: int) -> float:
        asked.append(number)
        return 0.1 * number

    offered = options(**dict.fromkeys("uvwxyz", 1))
    plan = plan_controls(predictions, offered, width_of=width_of, budget_calls=9)
    assert asked == [4, 5, 6]  # four are not enough for the design at the width of four
    assert plan.chosen == tuple("uvwxyz")
    assert plan.widths["u"] == pytest.approx(0.6)
    assert plan_controls([], [], width_of=width_of, budget_calls=9).chosen == ()
    # With fewer on offer than should run, all of them.
    two = plan_controls(
        [p for p in predictions if p.control in "uw"], offered[:1] + offered[2:3], width_of=width_of, budget_calls=9
    )
    assert two.chosen == ("u", "w")


def test_bad_arguments() -> None:
    predictions = two_rivals(("x", 0.5), ("y", 0.5))
    with pytest.raises(ValueError, match="no expected width for control 'y'"):
        design_controls(predictions, options(x=1, y=1), widths={"x": 0}, budget_calls=5)
    with pytest.raises(ValueError, match="is nan; it is at least 0"):
        design_controls(predictions, options(x=1, y=1), widths={"x": 0, "y": math.nan}, budget_calls=5)
    with pytest.raises(ValueError, match="no prediction of 'a' for 'z'"):
        design_controls(predictions, options(z=1), widths={"z": 0}, budget_calls=5)
    with pytest.raises(ValueError, match="a control key occurs twice"):
        design_controls(predictions, options(x=1) * 2, widths={"x": 0}, budget_calls=5)
    with pytest.raises(ValueError, match="costs at least 1"):
        ControlOption(key="x", cost=0, content_hash="h")


def test_controls_that_are_no_experiment() -> None:
    four = [ControlOption(key=k, cost=1, content_hash=h) for k, h in (("a", "P"), ("b", "C"), ("c", "E"), ("d", "E"))]
    assert control_problems(four, parent_hash="P", child_hash="C", earlier={"E": "cand-7"}) == [
        "control 'a' equals the observation's parent; its retained effect is 0 by definition",
        "control 'b' equals the child; its retained effect is 1 by definition",
        "control 'c' equals 'cand-7', whose result is known; a prediction made afterwards is no prediction",
        "controls 'c' and 'd' are the same program",
    ]
    assert control_problems(options(x=1, y=1), parent_hash="P", child_hash="C") == []
