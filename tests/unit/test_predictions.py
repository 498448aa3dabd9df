from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hypotheses.interval import Interval
from hypotheses.predictions import (
    PLAUSIBLE,
    Explanation,
    ExplanationProblem,
    Hypothesis,
    Prediction,
    same_problems,
    same_rivals,
    vacuous_problems,
)


def good() -> dict[str, Any]:
    return {
        "hypotheses": [
            {"key": "cap", "cause": "capacity", "mechanism": "outlier_branch", "statement": "More bits help anywhere."},
            {"key": "sel", "cause": "selection", "mechanism": "outlier_branch", "statement": "Those weights matter."},
        ],
        "controls": [
            {"key": "random", "kind": "substitute", "removes": ["outlier_branch"], "edits": "random_branch"},
            {"key": "without", "kind": "knockout", "removes": ["outlier_branch"]},
        ],
        "predictions": [
            {"hypothesis": "cap", "control": "random", "low": 0.7, "high": 1.1},
            {"hypothesis": "sel", "control": "random", "low": -0.2, "high": 0.3},
            {"hypothesis": "cap", "control": "without", "low": -0.1, "high": 0.1},
            {"hypothesis": "sel", "control": "without", "low": -0.1, "high": 0.1},
        ],
    }


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ExplanationProblem) as caught:
        Explanation.parse(data)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


def test_a_good_explanation_is_kept_whole() -> None:
    found = Explanation.parse(good())
    assert found.prediction("sel", "random").interval.high == 0.3
    assert found.hypothesis("cap").claim == ("outlier_branch", "capacity")
    assert found.control("without").cost == 1
    assert Explanation.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(KeyError):
        found.prediction("sel", "nothing")


def test_restriction_to_the_controls_that_run() -> None:
    whole = Explanation.parse(good())
    less = whole.restricted_to({"without"})  # where both rivals predict the same
    assert [control.key for control in less.controls] == ["without"]
    assert {prediction.control for prediction in less.predictions} == {"without"}
    assert less.hypotheses == whole.hypotheses
    with pytest.raises(KeyError, match="no control 'luck'"):
        whole.restricted_to(["luck"])


def test_predictions_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Explanation.parse(good()).predictions[0].low = 0.0  # type: ignore[misc]


def test_one_hypothesis_is_no_explanation() -> None:
    data = good()
    data["hypotheses"].pop()
    data["predictions"] = [row for row in data["predictions"] if row["hypothesis"] == "cap"]
    assert problems(data) == ["an explanation needs at least two rival hypotheses; given 1 ('cap')"]


def test_no_control() -> None:
    data = good() | {"controls": [], "predictions": []}
    assert problems(data) == ["an explanation needs at least one control; given none"]


def test_unknown_keys() -> None:
    data = good()
    data["predictions"].append({"hypothesis": "luck", "control": "shuffled", "low": 0, "high": 1})
    assert problems(data) == [
        "prediction for unknown hypothesis 'luck'; known: 'cap', 'sel'",
        "prediction for unknown control 'shuffled'; known: 'random', 'without'",
    ]


def test_duplicate_keys_and_causes() -> None:
    data = good()
    data["hypotheses"].append(data["hypotheses"][0] | {"statement": "Again."})
    data["controls"].append(data["controls"][1])
    assert problems(data) == [
        "2 hypotheses go by the name 'cap'; the slug of a cause is its hypothesis's name, give each its own",
        "control key 'without' is used 2 times",
        "2 hypotheses claim the same cause 'capacity' for 'outlier_branch'; rivals claim different causes",
    ]


def test_missing_and_doubled_predictions() -> None:
    data = good()
    data["predictions"][3] = copy.copy(data["predictions"][2])
    assert problems(data) == [
        "2 predictions of 'cap' for 'without'; give one",
        "hypothesis 'sel' makes no prediction for control 'without'",
    ]


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (0.5, 0.1, "prediction of 'cap' for 'random': [0.5, 0.1] is reversed; the low end comes first"),
        (math.nan, 0.1, "prediction of 'cap' for 'random': [nan, 0.1] is not finite; give two numbers"),
        (0.0, math.inf, "prediction of 'cap' for 'random': [0, inf] is not finite; give two numbers"),
        (
            5.0,
            7.1,
            "prediction of 'cap' for 'random': [5, 7.1] is vacuous, nothing could refute it; "
            "at most 2 wide and not covering [-0.25, 1.25]",
        ),
        (
            -0.5,
            1.5,
            "prediction of 'cap' for 'random': [-0.5, 1.5] is vacuous, nothing could refute it; "
            "at most 2 wide and not covering [-0.25, 1.25]",
        ),
        *(
            (
                low,
                high,
                f"prediction of 'cap' for 'random': [{low}, {high}] is vacuous, nothing could refute it; "
                "at most 2 wide and not covering [-0.25, 1.25]",
            )
            for low, high in ((-0.49, 1.49), (-0.4, 1.4), (-0.25, 1.25))
        ),
        *(
            (
                low,
                high,
                f"prediction of 'cap' for 'random': [{low}, {high}] lies where no control could; retained effects lie in "
                "[-2, 3], 0 is the parent and 1 the child",
            )
            for low, high in ((-5, -4), (3.1, 3.5))
        ),
    ],
)
def test_intervals_that_cannot_be_tested(low: float, high: float, message: str) -> None:
    data = good()
    data["predictions"][0] |= {"low": low, "high": high}
    assert problems(data) == [message]


def test_rivals_that_predict_the_same_everywhere() -> None:
    data = good()
    data["predictions"][1] |= {"low": 0.7, "high": 1.1}
    assert problems(data) == [
        "rivals 'cap' and 'sel' predict the same for every control; nothing could tell them apart",
        "no control separates any pair of rivals; at least one must have two predictions that do not overlap",
    ]


def test_rivals_that_always_overlap() -> None:
    data = good()
    data["predictions"][1] |= {"low": 0.2, "high": 0.71}
    assert problems(data) == [
        "no control separates any pair of rivals; at least one must have two predictions that do not overlap"
    ]


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ({"kind": "knockout"}, "control 'x' is a knockout but removes no mechanism; name one in `removes`"),
        ({"kind": "knockin"}, "control 'x' is a knockin but keeps no mechanism; name one in `keeps`"),
        (
            {"kind": "substitute", "edits": "e"},
            "control 'x' is a substitute but replaces no mechanism; name one in `removes`",
        ),
        (
            {"kind": "substitute", "removes": ["m"]},
            "control 'x' is a substitute without edits; give the edits that put something else there",
        ),
        (
            {"kind": "knockout", "removes": ["m"], "against": "parent", "edits": "e"},
            "control 'x' is a knockout against the parent; a knockout starts from the child",
        ),
        (
            {"kind": "knockin", "keeps": ["m"], "against": "parent"},
            "control 'x' starts from the parent without edits, so it is the parent; give its edits",
        ),
        (
            {"kind": "knockin", "keeps": ["m"], "removes": ["m"]},
            "control 'x' both removes and keeps 'm'",
        ),
    ],
)  # fmt: skip
def test_controls_that_are_none_of_their_kind(control: dict[str, Any], message: str) -> None:
    data = good()
    data["controls"].append({"key": "x"} | control)
    data["predictions"] += [
        {"hypothesis": key, "control": "x", "low": low, "high": low + 0.1} for key, low in (("cap", 0), ("sel", 1))
    ]
    assert problems(data) == [message]


def test_all_problems_are_told_together() -> None:
    data = good()
    data["hypotheses"][1]["cause"] = "capacity"
    data["controls"][1]["removes"] = []
    data["predictions"][0] |= {"low": 2, "high": 1}
    data["predictions"].pop()
    assert len(problems(data)) == 4


def test_malformed_fields_are_problems_too() -> None:
    data = good()
    data["hypotheses"][0]["key"] = "Not A Slug"
    data["controls"][0]["price"] = 3
    data["predictions"][0]["low"] = "low"
    found = problems(data)
    assert [line.split(":")[0] for line in found] == ["hypotheses.0.key", "controls.0.price", "predictions.0.low"]


def test_too_many_rivals_are_refused() -> None:
    data = good()
    data["hypotheses"] = [{"key": f"h{n}", "cause": f"c{n}", "mechanism": "m", "statement": "."} for n in range(9)]
    data["predictions"] = [
        {"hypothesis": f"h{n}", "control": control, "low": n / 10, "high": n / 10 + 0.01}
        for n in range(9)
        for control in ("random", "without")
    ]
    assert problems(data) == ["9 hypotheses are too many to tell apart; at most 8"]


def test_names_of_predecessors_and_loose_predictions() -> None:
    again = Hypothesis(key="sel2", cause="selection", mechanism="m", statement="Sharper.", predecessor="sel")
    assert again.predecessor == "sel"
    with pytest.raises(ValueError, match="reversed"):
        _ = Prediction(hypothesis="a", control="b", low=1, high=0).interval


NOISE_WIDTHS = st.floats(0.001, 1.4)


@given(st.floats(-2, 1.5), st.floats(0.01, 1.9), NOISE_WIDTHS, st.floats(-0.25, 1.25))
def test_a_vacuous_prediction_is_one_that_no_plausible_measurement_refutes(
    low: float, length: float, width: float, estimate: float
) -> None:
    """Whatever is refused as vacuous cannot be refuted, and whatever is not can be, at one end of the range at least."""
    prediction = Prediction(hypothesis="a", control="x", low=low, high=low + length)

    def refutes(centre: float) -> bool:
        return Interval(low=centre - width / 2, high=centre + width / 2).is_disjoint(prediction.interval)

    if prediction.is_vacuous(width):
        assert not refutes(estimate)
    else:
        assert any(refutes(end) for end in (PLAUSIBLE.low, PLAUSIBLE.high))


def test_what_the_noise_swallows_is_told_with_the_reason() -> None:
    data = good()
    data["predictions"][0] |= {"low": -0.1, "high": 1.12}
    data["predictions"][1] |= {"low": 1.6, "high": 1.8}
    explanation = Explanation.parse(data)
    assert vacuous_problems(explanation, 0.1) == []
    assert vacuous_problems(explanation, 0.3) == [
        "prediction of 'cap' for 'random': [-0.1, 1.12] is vacuous: a measurement will be about 0.3 wide, and none with an "
        "estimate in [-0.25, 1.25] could lie outside it; begin it above -0.10 or end it below 1.10"
    ]
    assert vacuous_problems(explanation, math.inf) == []


def test_rivals_are_the_same_when_no_gap_is_beyond_the_noise() -> None:
    explanation = Explanation.parse(good())
    gap = max(
        explanation.prediction("cap", c.key).interval.gap(explanation.prediction("sel", c.key).interval)
        for c in explanation.controls
    )
    assert same_rivals(explanation, gap * 0.99) == ()
    assert same_rivals(explanation, gap) == (("cap", "sel"),)
    (problem,) = same_problems(explanation, gap)
    assert problem.startswith("rivals 'cap' and 'sel' predict the same within the noise: for no control")
    assert same_problems(explanation, math.inf) == []


def test_rivals_are_the_same_where_the_control_that_parts_them_is_gone() -> None:
    """`random` parts them and `without` does not."""
    data = good()
    for row in data["predictions"]:
        if row["control"] == "without":
            row |= {"low": 0.0, "high": 0.2}
    explanation = Explanation.parse(data)
    assert same_rivals(explanation, 0.05) == ()
    assert same_rivals(explanation.restricted_to(["without"]), 0.05) == (("cap", "sel"),)
    assert same_rivals(explanation.restricted_to([]), 0.05) == (("cap", "sel"),)
