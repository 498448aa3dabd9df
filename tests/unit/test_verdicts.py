from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from hypotheses.design import ControlOption, Design, design_controls
from hypotheses.effects import PairedEffect, expected_width, family_level, paired_effect
from hypotheses.predictions import NONE_OF_THESE, Explanation
from hypotheses.verdicts import RULE, ControlMeasurement, Verdict, VerdictStatus, decide

CHILD = PairedEffect(mean=0.4, standard_error=0.008, num_chunks=32, chunk_variance=0.002, program_variance=0.0)
Rows = dict[str, dict[str, tuple[float, float]]]

SELECTION: Rows = {
    "capacity": {"random": (0.8, 1.1), "shuffled": (0.0, 0.3)},
    "selection": {"random": (0.0, 0.3), "shuffled": (0.8, 1.1)},
}


def effect(mean: float, error: float = 0.008, num_chunks: int = 96) -> PairedEffect:
    return PairedEffect(
        mean=mean,
        standard_error=error,
        num_chunks=num_chunks,
        chunk_variance=error**2 * num_chunks,
        program_variance=0.0,
    )


def explain(rows: Rows, kinds: dict[str, dict[str, Any]] | None = None) -> Explanation:
    controls = list(next(iter(rows.values())))
    default = {"kind": "substitute", "removes": ["branch"], "edits": "text"}
    return Explanation.model_validate(
        {
            "hypotheses": [{"key": h, "cause": h, "mechanism": "branch", "statement": h} for h in rows],
            "controls": [{"key": c} | (kinds or {}).get(c, default) for c in controls],
            "predictions": [
                {"hypothesis": h, "control": c, "low": low, "high": high}
                for h, cells in rows.items()
                for c, (low, high) in cells.items()
            ],
        }
    )


def plan(explanation: Explanation, width: float = 0.12) -> Design:
    return design_controls(
        explanation.predictions,
        [ControlOption(key=c.key, cost=c.cost, content_hash=c.key) for c in explanation.controls],
        widths={c.key: width for c in explanation.controls},
        budget_calls=10,
    )


def ran(control: str, ratio: float, **changes: Any) -> ControlMeasurement:
    return ControlMeasurement(control=control, effect=effect(ratio * CHILD.mean), executed=True, **changes)


def statuses(verdicts: tuple[Verdict, ...]) -> dict[str, str]:
    return {verdict.hypothesis: verdict.status.value for verdict in verdicts}


def judge(
    rows: Rows, *measurements: ControlMeasurement, child: PairedEffect = CHILD, **kinds: Any
) -> tuple[Verdict, ...]:
    explanation = explain(rows, kinds or None)
    return decide(explanation, child, measurements, plan(explanation))


def test_one_control_decides_between_two_rivals() -> None:
    verdicts = judge(SELECTION, ran("random", 0.95))
    assert statuses(verdicts) == {"capacity": "supported", "selection": "refuted"}
    supported, refuted = verdicts
    assert supported.rule == RULE == "verdict/3"
    assert supported.survivors == refuted.survivors == ("capacity",)
    assert refuted.claim == ("branch", "selection")
    check = refuted.checks[0]
    assert check.failed
    assert check.counts
    assert check.estimate == pytest.approx(0.95)
    assert check.p_value < 1e-10
    assert check.measured is not None
    assert check.measured.is_disjoint(check.predicted)
    assert refuted.reason == (
        "the retained effect of 'random' is 0.950 "
        f"{check.measured}, and its prediction [0.000, 0.300] fails with p = {check.p_value:.2g} "
        "(Holm over 2 predictions at 2%), while capacity fits every measurement; survivors: capacity"
    )


def test_swapping_the_measured_effects_flips_the_verdicts() -> None:
    one = judge(SELECTION, ran("random", 0.95), ran("shuffled", 0.1))
    other = judge(SELECTION, ran("random", 0.1), ran("shuffled", 0.95))
    assert statuses(one) == {"capacity": "supported", "selection": "refuted"}
    assert statuses(other) == {"capacity": "refuted", "selection": "supported"}


def test_where_every_prediction_fails_nobody_is_refuted_and_none_of_these_remains() -> None:
    """The cause may be none of them, or theirs with another number; the control cannot say which."""
    verdicts = judge(SELECTION, ran("random", 0.55))
    assert statuses(verdicts) == {"capacity": "inconclusive", "selection": "inconclusive"}
    assert {verdict.survivors for verdict in verdicts} == {(NONE_OF_THESE,)}
    assert all(check.counts for verdict in verdicts for check in verdict.checks)
    assert all("cause or number is wrong" in verdict.reason for verdict in verdicts)


def test_a_wide_measurement_is_inconclusive_and_names_the_survivors() -> None:
    noisy = ControlMeasurement(control="random", effect=effect(0.22, error=0.06), executed=True)
    verdicts = judge(SELECTION, noisy)
    assert statuses(verdicts) == {"capacity": "inconclusive", "selection": "inconclusive"}
    assert verdicts[0].survivors == ("capacity", "selection", NONE_OF_THESE)
    assert "not refuted, and neither is selection" in verdicts[0].reason


def test_outside_its_own_prediction_nothing_is_supported() -> None:
    """Capacity is not refuted at 0.76, but the interval leaves the widened prediction, so the rival does not fall, either."""
    verdicts = judge(SELECTION, ran("random", 0.76))
    assert statuses(verdicts) == {"capacity": "inconclusive", "selection": "inconclusive"}
    assert "not refuted, but" in verdicts[0].reason
    assert "no rival that was to be separated from it fits" in verdicts[1].reason
    assert verdicts[0].survivors == ("capacity", NONE_OF_THESE)


def test_support_needs_separation_by_design() -> None:
    """The rival is refuted by luck on a control whose predictions were not far enough apart."""
    rows: Rows = {
        "a": {"near": (0.5, 0.7), "far": (0.8, 1.0)},
        "b": {"near": (0.3, 0.48), "far": (0.0, 0.2)},
    }
    explanation = explain(rows)
    design = plan(explanation)
    verdicts = decide(explanation, CHILD, [ran("near", 0.6)], design)
    assert statuses(verdicts) == {"a": "inconclusive", "b": "inconclusive"}
    assert "no control that ran was to separate it from b" in verdicts[0].reason
    assert verdicts[1].checks[0].failed
    both = decide(explanation, CHILD, [ran("near", 0.6), ran("far", 0.9)], design)
    assert statuses(both) == {"a": "supported", "b": "refuted"}


def test_support_needs_every_rival_refuted() -> None:
    rows: Rows = {"a": {"x": (0.8, 1.0)}, "b": {"x": (0.0, 0.2)}, "c": {"x": (0.85, 1.05)}}
    verdicts = judge(rows, ran("x", 0.93))
    assert statuses(verdicts) == {"a": "inconclusive", "b": "refuted", "c": "inconclusive"}


@pytest.mark.parametrize(
    ("measurements", "status", "words"),
    [
        ([], "inconclusive", "no control was run"),
        ([ControlMeasurement(control="random", effect=effect(0.4), executed=False, reason="0 of 14 layers")],
         "not_executed", "random: its change did not execute: 0 of 14 layers"),
        ([ControlMeasurement(control="random", effect=effect(0.4), executed=None)],
         "not_executed", "random: whether its change executed is undetermined"),
        ([ControlMeasurement(control="random", effect=None, executed=None, outcome="crashed", reason="ValueError")],
         "invalid", "random: crashed: ValueError"),
        ([ControlMeasurement(control="random", effect=effect(0.4), executed=True, outcome="unequal_bits")],
         "invalid", "random: unequal_bits"),
        ([ControlMeasurement(control="random", effect=effect(0.4), executed=True, known_at_registration=True)],
         "inconclusive", "random: its result was known when the predictions were registered"),
        ([ControlMeasurement(control="random", effect=None, executed=None, outcome="timed_out"),
          ControlMeasurement(control="shuffled", effect=effect(0.4), executed=False)],
         "not_executed", "random: timed_out"),
    ],
)  # fmt: skip
def test_what_is_no_evidence_never_refutes(measurements: list[ControlMeasurement], status: str, words: str) -> None:
    verdicts = judge(SELECTION, *measurements)
    assert set(statuses(verdicts).values()) == {status}
    assert all(words in verdict.reason for verdict in verdicts)
    assert all(verdict.survivors == ("capacity", "selection", NONE_OF_THESE) for verdict in verdicts)


def test_void_controls_are_named_beside_the_evidence() -> None:
    void = ControlMeasurement(control="shuffled", effect=effect(0.4), executed=False)
    verdicts = judge(SELECTION, ran("random", 0.95), void)
    assert verdicts == judge(SELECTION, void, ran("random", 0.95))
    assert statuses(verdicts)["capacity"] == "supported"
    assert verdicts[0].void == ("shuffled: its change did not execute",)
    assert [check.control for check in verdicts[0].checks] == ["random"]


def test_an_uncertain_child_refutes_nothing() -> None:
    verdicts = judge(SELECTION, ran("random", 0.95), child=effect(0.02, 0.01, 32))
    assert set(statuses(verdicts).values()) == {"inconclusive"}
    assert verdicts[0].checks[0].measured is None


def test_a_surprising_loss_is_judged_like_a_gain() -> None:
    child = effect(-0.4, 0.008, 32)
    loss = ControlMeasurement(control="random", effect=effect(-0.38), executed=True)
    assert statuses(judge(SELECTION, loss, child=child)) == {"capacity": "supported", "selection": "refuted"}


KNOCKOUT = {"kind": "knockout", "removes": ["branch"]}
KNOCKIN = {"kind": "knockin", "keeps": ["branch"], "against": "parent", "edits": "text"}
INTERPLAY: Rows = {
    "alone": {"out": (-0.1, 0.2), "in": (0.8, 1.1)},
    "rest": {"out": (0.8, 1.1), "in": (-0.1, 0.2)},
}


def test_interaction_is_reported_and_does_not_refute_by_itself() -> None:
    """Without the branch nothing is left, and alone it does half: the branch needs the rest."""
    verdicts = judge(INTERPLAY, ran("out", 0.0), ran("in", 0.5), **{"out": KNOCKOUT, "in": KNOCKIN})
    assert statuses(verdicts) == {"alone": "inconclusive", "rest": "inconclusive"}
    alone = verdicts[0]
    assert "does not refute by itself" in alone.reason
    (interaction,) = alone.interactions
    assert (interaction.knockout, interaction.knockin, interaction.significant) == ("out", "in", True)
    assert interaction.excess == pytest.approx(0.5)
    failed = {check.control: (check.failed, check.counts) for check in alone.checks}
    assert failed == {"in": (True, False), "out": (False, False)}
    rest = {check.control: (check.failed, check.counts) for check in verdicts[1].checks}
    assert rest == {"in": (True, True), "out": (True, True)}  # wrong about both, which interaction does not excuse


def test_knockout_and_knockin_that_agree_refute_as_usual() -> None:
    verdicts = judge(INTERPLAY, ran("out", 0.05), ran("in", 0.95), **{"out": KNOCKOUT, "in": KNOCKIN})
    assert statuses(verdicts) == {"alone": "supported", "rest": "refuted"}
    assert not verdicts[0].interactions[0].significant


def test_knockout_and_knockin_of_different_mechanisms_are_no_pair() -> None:
    other = KNOCKIN | {"keeps": ["rotation"]}
    assert judge(INTERPLAY, ran("out", 0.0), ran("in", 0.5), **{"out": KNOCKOUT, "in": other})[0].interactions == ()


def test_bad_measurements() -> None:
    with pytest.raises(ValueError, match="measurement of 'luck', which is no control"):
        judge(SELECTION, ran("luck", 0.5))
    with pytest.raises(ValueError, match="two measurements of control 'random'"):
        judge(SELECTION, ran("random", 0.5), ran("random", 0.5))


def test_verdicts_are_recomputed_from_stored_json() -> None:
    """Everything that goes in survives JSON, and so does the verdict to the last digit."""
    explanation = explain(SELECTION)
    design, measurements = plan(explanation), [ran("random", 0.93), ran("shuffled", 0.14)]
    stored = json.dumps(
        {
            "explanation": explanation.model_dump(mode="json"),
            "child": CHILD.to_json(),
            "design": design.to_json(),
            "measurements": [measurement.to_json() for measurement in measurements],
            "verdicts": [verdict.to_json() for verdict in decide(explanation, CHILD, measurements, design)],
        },
        allow_nan=False,
    )
    data = json.loads(stored)
    again = decide(
        Explanation.parse(data["explanation"]),
        PairedEffect.from_json(data["child"]),
        [ControlMeasurement.from_json(row) for row in data["measurements"]],
        Design.from_json(data["design"]),
    )
    assert json.loads(json.dumps([verdict.to_json() for verdict in again])) == data["verdicts"]


def test_invariant_under_order_of_hypotheses_controls_and_chunks() -> None:
    rng = np.random.default_rng(5)
    shuffle = random.Random(5)
    for _ in range(20):
        rows: Rows = {
            h: {c: (low, low + 0.2) for c in ("x", "y", "z") for low in [float(rng.uniform(-0.2, 1))]}
            for h in ("a", "b", "c")
        }
        parent = rng.normal(3, 0.3, 24)
        losses = {c: parent - rng.uniform(0, 0.4) + 0.03 * rng.normal(size=24) for c in ("x", "y", "z", "child")}
        seen = []
        for _ in range(3):
            order = shuffle.sample(range(24), 24)
            effects = {
                key: paired_effect(list(parent[order]), list(loss[order]), program_variance=1e-5)
                for key, loss in losses.items()
            }
            child = effects.pop("child")
            names = shuffle.sample(list(rows), 3)
            explanation = explain({h: dict(shuffle.sample(list(rows[h].items()), 3)) for h in names})
            measurements = [ControlMeasurement(control=c, effect=e, executed=True) for c, e in effects.items()]
            shuffle.shuffle(measurements)
            verdicts = decide(explanation, child, measurements, plan(explanation, 0.05))
            seen.append([verdict.to_json() for verdict in verdicts])
        assert seen[0] == seen[1] == seen[2]


def test_error_rates_in_simulated_observations() -> None:
    """Where the truth lies in one rival's predictions: rarely refuted, hardly ever a wrong one supported, often found.

    Three rivals that two controls together tell apart by design; the child's effect is about 25 standard errors.
    """
    rng = np.random.default_rng(20)
    worlds, false_refutation, false_support, found = 200, 0, 0, 0
    centres = {"a": (0.1, 0.1), "b": (0.9, 0.1), "c": (0.9, 0.9)}
    rows: Rows = {
        h: {c: (m - 0.12, m + 0.12) for c, m in zip(("x", "y"), centre, strict=True)} for h, centre in centres.items()
    }
    explanation = explain(rows)
    options = [ControlOption(key=c, cost=1, content_hash=c) for c in ("x", "y")]
    for _ in range(worlds):
        truth = str(rng.choice(list(rows)))
        child = paired_effect(0.36 + 0.08 * rng.standard_normal(32), np.zeros(32), program_variance=0.0)
        width = expected_width(child, 0.1 / math.sqrt(96), level=family_level(3, 2, alpha=0.02))
        design = design_controls(explanation.predictions, options, widths={"x": width, "y": width}, budget_calls=4)
        assert design.chosen == ("x", "y")
        measurements = [
            ControlMeasurement(
                control=c,
                effect=paired_effect(
                    0.36 * rng.uniform(*rows[truth][c]) + 0.1 * rng.standard_normal(96),
                    np.zeros(96),
                    program_variance=0,
                ),
                executed=True,
            )
            for c in design.chosen
        ]
        status = {v.hypothesis: v.status for v in decide(explanation, child, measurements, design)}
        false_refutation += status[truth] is VerdictStatus.REFUTED
        found += status[truth] is VerdictStatus.SUPPORTED
        false_support += any(s is VerdictStatus.SUPPORTED for h, s in status.items() if h != truth)
    assert false_refutation / worlds <= 0.02
    assert false_support / worlds <= 0.01
    assert found / worlds >= 0.7
