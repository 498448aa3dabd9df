"""Controls of an explanation as programs: each is made, tried on the truncated subject, and refused with its reason."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from evaluators.pool import EvaluatorPool
from evaluators.results import EvaluationResult, Evidence, Outcome
from forge.control_programs import ControlMaker
from forge.desk import Desk
from forge.known_results import KnownResults
from forge.program_source import knock_out
from forge.progress import QuietProgress
from forge.scored import Scored
from forge.screening import Screener
from hypotheses.ledger import Ledger, NewControl, Settlement
from hypotheses.predictions import Control
from tests.ledger_builders import candidate, control_evaluation, evaluate, new_campaign, observe, register, scored
from tests.program_builders import CHILD, PARENT, blocks


class TruncatedRuns:
    """Smoke runs that install what their source says: one digest for each text, nothing for a program that breaks."""

    bits = 4.25
    alike: ClassVar[dict[str, str]] = {}

    def smoke(self, source: str, *, seed: int = 0) -> EvaluationResult:
        if "1 / 0" in source:
            return EvaluationResult(outcome=Outcome.CRASHED, reason="ZeroDivisionError", split="search", draw=0, seed=0)
        twin = next((other for mark, other in self.alike.items() if mark in source), source)
        digest = hashlib.sha256((PARENT if "the parent again" in source else twin).encode()).hexdigest()
        return EvaluationResult(
            outcome=Outcome.SCORED,
            split="search",
            draw=0,
            seed=0,
            contract_class="folded",
            effective_bits=self.bits + ("heavy" in source),
            evidence=Evidence(layers={"blocks.0.q": {"digest": digest}}),
        )


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        yield ledger


def programs_of(ledger: Ledger, *controls: Control) -> tuple[set[str], dict[str, str], dict[str, str]]:
    """Return which controls can run, why the others cannot, and why results are known already."""
    desk = Desk(ledger, EvaluatorPool(TruncatedRuns), QuietProgress())  # type: ignore[arg-type]
    screener = Screener(ledger, desk, 7)
    seed = screener.store(PARENT, origin="seed", title="seed", parent=None)
    child = screener.store(CHILD, origin="candidate", title="child", parent=seed)
    parent_scored, child_scored = (
        Scored(program=program, evaluation=evaluate(ledger, candidate(program, turn=turn), scored(loss, loss)))
        for turn, (program, loss) in enumerate(((seed, 3.0), (child, 2.0)))
    )
    made = ControlMaker(ledger, desk, screener).make(controls, parent_scored, child_scored)
    return set(made.programs), made.problems, made.known


def substitute(key: str, line: str) -> Control:
    return Control(key=key, kind="substitute", removes=("shrink",), edits=blocks("    return weight * 0.5", line))


def test_two_names_for_one_program_make_one_control(ledger: Ledger) -> None:
    made, problems, _ = programs_of(
        ledger,
        Control(key="without", kind="knockout", removes=("shrink",)),
        Control(key="alone", kind="knockin", keeps=("flip",)),
    )
    assert made == {"without"}
    assert problems == {"alone": "it is the same program as control 'without'"}
    assert len(ledger.programs(origin="control")) == 1


def test_a_comment_makes_no_second_control(ledger: Ledger) -> None:
    made, problems, _ = programs_of(
        ledger, substitute("one", "    return weight * 2"), substitute("same", "    return weight * 2  # twice")
    )
    assert made == {"one"}
    assert problems == {"same": "it is the same program as control 'one'"}


def test_controls_that_cannot_run_are_told_apart(ledger: Ledger) -> None:
    made, problems, known = programs_of(
        ledger,
        Control(key="without", kind="knockout", removes=("shrink",)),
        substitute("breaks", "    return weight * (1 / 0)"),
        substitute("idle", "    return weight * 2  # the parent again"),
        substitute("bits", "    heavy = 2\n    return weight * heavy"),
        Control(key="unknown", kind="knockout", removes=("swirl",)),
    )
    assert made == {"without"}
    assert problems["breaks"] == "its smoke run ended so: crashed: ZeroDivisionError"
    assert problems["idle"] == "it installs exactly what the parent installs, on the truncated subject"
    assert problems["bits"] == (
        "a substitute spends the same bits: 5.250 here, 4.250 in the child, on the truncated subject"
    )
    assert "'swirl' is no mechanism of the program" in problems["unknown"]
    assert known == {}


def test_two_ways_to_write_what_installs_the_same_make_one_control(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in ("weight * 3", "weight * (1 + 2)"):
        monkeypatch.setitem(TruncatedRuns.alike, line, "three")
    made, problems, _ = programs_of(
        ledger, substitute("one", "    return weight * 3"), substitute("same", "    return weight * (1 + 2)")
    )
    assert made == {"one"}
    assert problems == {"same": "it installs exactly what control 'one' installs"}


WITHOUT = Control(key="without", kind="knockout", removes=("shrink",))


def screener_of(ledger: Ledger) -> Screener:
    return Screener(ledger, Desk(ledger, EvaluatorPool(TruncatedRuns), QuietProgress()), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", ["search", "confirm"])
@pytest.mark.parametrize("kind", ["candidate", "confirmation", "final"])
def test_a_control_that_was_evaluated_before_is_known(ledger: Ledger, kind: str, split: str) -> None:
    earlier = screener_of(ledger).store(knock_out(CHILD, ["shrink"]), origin="candidate", title="earlier", parent=None)
    run = evaluate(ledger, candidate(earlier, kind=kind, split=split, turn=1), scored(2.5, 2.5))
    made, _, known = programs_of(ledger, WITHOUT)
    assert made == known.keys() == {"without"}
    assert known["without"] == f"{earlier.id} is the same program, and {run.id} ({kind}, {split} split) measured it"


def test_a_control_of_another_observation_is_known(ledger: Ledger) -> None:
    screener = screener_of(ledger)
    earlier = screener.store(knock_out(CHILD, ["shrink"]), origin="control", title="earlier", parent=None)
    registration = register(
        ledger,
        observe(ledger),
        controls=(NewControl(name="without-rotation", kind="knockout", program_id=earlier.id),),
    )
    new = replace(control_evaluation(registration, earlier), split="confirm")
    ledger.reserve_evaluation(new)
    assert programs_of(ledger, WITHOUT)[2] == {}  # nothing is known of a run that is not over
    evaluate(ledger, replace(new, draw=1), scored(2.5, 2.5))
    assert programs_of(ledger, WITHOUT)[2].keys() == {"without"}


def test_a_failed_run_is_known_too(ledger: Ledger) -> None:
    earlier = screener_of(ledger).store(knock_out(CHILD, ["shrink"]), origin="candidate", title="earlier", parent=None)
    evaluate(ledger, candidate(earlier, turn=1), Settlement(outcome="crashed", reason="ZeroDivisionError"))
    assert programs_of(ledger, WITHOUT)[2].keys() == {"without"}


def test_a_control_is_known_again_under_other_names(ledger: Ledger) -> None:
    renamed = (
        knock_out(CHILD, ["shrink"])
        .replace("weight", "w")
        .replace("w_", "weight_")
        .replace("session.w(", "session.weight(")
    )
    earlier = screener_of(ledger).store(renamed, origin="candidate", title="earlier", parent=None)
    evaluate(ledger, candidate(earlier, turn=1), scored(2.5, 2.5))
    known = programs_of(ledger, WITHOUT)[2]
    assert "is the same program under other names" in known["without"]


def test_a_control_that_installs_what_an_earlier_program_installs_is_known(ledger: Ledger) -> None:
    screener = screener_of(ledger)
    other = "# installs as shrink does\n" + CHILD.replace("weight * 0.5", "weight * 3")
    earlier = screener.store(other, origin="candidate", title="earlier", parent=None)
    screener.smoke(earlier, allowed_class="corrected")
    evaluate(ledger, candidate(earlier, turn=1), scored(2.5, 2.5))
    same = substitute("threefold", "    return weight * 3.0  # like the earlier one")
    TruncatedRuns.alike = {"# like the earlier one": other}
    try:
        known = programs_of(ledger, same)[2]
    finally:
        TruncatedRuns.alike = {}
    assert "installs the same on the truncated subject" in known["threefold"]


def test_the_childs_own_confirmation_makes_nothing_known(ledger: Ledger) -> None:
    child = screener_of(ledger).store(CHILD, origin="candidate", title="child", parent=None)
    evaluate(ledger, candidate(child, kind="confirmation", split="confirm", draw=1, turn=1), scored(2.0, 2.0))
    assert KnownResults.of(ledger, child.id).of_program(child, "", installs_as=lambda paid: "") is None
    assert KnownResults.of(ledger, "prog-other").of_program(child, "", installs_as=lambda paid: "") is not None
