"""What predictions were worth, where calls went, and what verdicts changed: counted, and shown everywhere."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from forge import interview
from forge.cli.app import app
from forge.cli.campaigns import print_summary
from forge.edits import EditBlock
from forge.honesty import Share, account, followed
from forge.proposers.base import ProposalRequest
from forge.recomputing import recompute
from forge.replies import ConditionalEdit, MechanismClaim, ProposalReply
from forge.reply_writing import write_proposal
from forge.report import render_report
from forge.summary import Summary, summarize
from hypotheses.ledger import Ledger, NewLlmCall, NewProposal, NewVerdict
from hypotheses.predictions import Control
from hypotheses.probe_kinds import KnockoutProbe
from hypotheses.required_edits import RequiredEdit
from tests.ledger_builders import (
    control_evaluation,
    new_campaign,
    new_program,
    observe,
    register,
    scored,
)
from tests.played_campaigns import (
    HALF,
    RIVALS,
    PlayedProposer,
    adding,
    explaining,
    play_campaign,
    substituting,
)

REFINE = ConditionalEdit(
    hypothesis="evenly",
    verdict="supported",
    edit=RequiredEdit(
        kind="refine",
        mechanism="boost",
        cause="evenly",
        part="finer",
        wording="more of it",
        probe=KnockoutProbe(mechanism="finer"),
        blocking=True,
    ),
)
BREAKS = substituting("boost", "    return 0.2", "    return 0.2 / (layer.block - layer.block)", "breaks")
SAME = Control(key="again", kind="knockout", removes=("boost",))


def open_edits(request: ProposalRequest) -> tuple[str, ...]:
    return tuple(record.key for record in request.open_edits)


def boosting_again(request: ProposalRequest) -> str:
    """The refuted claim once more, as part of carrying out the required edit."""
    return write_proposal(
        ProposalReply(
            mechanisms=(MechanismClaim(name="boost", cause="attention", statement="still"),),
            discharges=open_edits(request),
            edits=(EditBlock(search="    return 0.2", replace="    return 0.3"),),
        )
    )


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A claim that is refuted, comes back and is refused; a required edit that is neglected, then carried out.

    Of its controls two cannot be used. A proposer is told so before anything is registered; here it is not, as in ledgers of
    earlier versions, which set such controls aside.
    """
    folder = tmp_path_factory.mktemp("honest")
    rows = {cause: cells | {"breaks": cells["half"], "again": cells["half"]} for cause, cells in RIVALS.items()}
    for cells in rows.values():
        del cells["quarter"]
    proposer = PlayedProposer(
        proposals=(
            adding("boost", "attention", "0.2"),
            adding("lift", "height", "0.1", beside="boost"),
            boosting_again,
            lambda request: adding("finer", "grain", "0.05", beside="boost", discharges=open_edits(request)),
        ),
        explanations=(explaining("boost", (HALF, BREAKS, SAME), rows, (REFINE,)),),
    )
    (folder / "recipe.toml").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interview, "_problems", lambda *_, **__: ())
        return play_campaign(folder, proposer)


@pytest.fixture(scope="module")
def summary(ledger: Path) -> Summary:
    with Ledger.open(ledger, read_only=True) as reader:
        return summarize(reader)


def test_each_verdict_tells_what_followed_from_it(summary: Summary) -> None:
    by_cause = {row.cause: row for row in summary.honesty.consequences}
    (edit,) = summary.required_edits
    assert followed(by_cause["attention"]) == ["barred", "refused because of it: turn 2.1"]
    assert followed(by_cause["mlp"]) == ["barred"]
    assert followed(by_cause["evenly"]) == [
        f"refine {edit.id} discharged",
        "refused because of it: turn 2.0",
        "promoted because of it: finer",
    ]


def test_calls_are_counted_when_they_are_settled(summary: Summary) -> None:
    calls = summary.honesty.calls
    assert (calls.candidates, calls.confirmations, calls.controls) == (2, 2, 1)
    assert calls.candidates + calls.confirmations + calls.controls + calls.other == summary.budget.used
    assert [observation.calls_for_controls for observation in summary.observations] == [1, 0]


def test_predictions_are_counted_by_author_and_group(summary: Summary) -> None:
    (author,) = summary.honesty.authors
    assert (author.name, author.observations) == ("played", 1)
    assert author.hypotheses == {"refuted": 2, "supported": 1}
    counted = {c.group: (c.inside.count, c.undecided, c.refuted, c.inside.of) for c in author.coverage}
    assert counted == {"all": (1, 0, 2, 3), "surviving": (1, 0, 0, 1), "claimed": (0, 0, 1, 1)}
    everything = author.coverage[0].bins
    assert [(row.over, row.up_to, row.inside.count, row.inside.of) for row in everything] == [
        (0.0, 0.2, 1, 1),
        (0.2, 0.4, 0, 2),
    ]
    assert everything[0].mean_half_width == pytest.approx(0.1)
    assert everything[0].mean_distance < 0.05
    assert everything[1].mean_distance == pytest.approx(0.5, abs=0.05)


def test_outside_but_not_beyond_the_noise_is_neither_held_nor_refuted(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        observation = observe(ledger)
        registration = register(ledger, observation)  # 0.0 to 0.2, and 0.4 to 0.6
        check = {"control": "without-rotation", "estimate": 0.25, "measured": {"low": 0.1, "high": 0.4}}
        ledger.record_verdicts(
            [
                NewVerdict(
                    hypothesis_id=hypothesis.id,
                    status=status,
                    rule="verdict/2",
                    reason="r",
                    evidence={"verdict": {"checks": [check | {"failed": status == "refuted"}]}},
                )
                for hypothesis, status in zip(registration.hypotheses, ("inconclusive", "refuted"), strict=True)
            ]
        )
        (author,) = account(ledger).authors
    assert author.name == "catalogue", "without a recorded reply the campaign's proposer is the author"
    coverage = author.coverage[0]
    assert (coverage.inside.count, coverage.undecided, coverage.refuted) == (0, 1, 1)


def test_two_models_are_two_authors(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        for number, model in enumerate(("small", "large"), start=1):
            register(ledger, observe(ledger, number=number))
            call = ledger.record_llm_call(
                NewLlmCall(purpose=f"turn-{number}/explain/0", prompt="why", reply="because", model=model)
            )
            ledger.record_proposal(
                NewProposal(turn=number, attempt=0, kind="explanation", status="accepted", llm_call_id=call.id)
            )
        authors = account(ledger).authors
    assert [(author.name, author.hypotheses) for author in authors] == [
        ("small", {"no verdict": 2}),
        ("large", {"no verdict": 2}),
    ]


def test_a_control_that_is_only_reserved_has_cost_nothing_yet(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        observation = observe(ledger)
        registration = register(ledger, observation)
        program = ledger.add_program(new_program(9, origin="control"))
        ledger.reserve_evaluation(control_evaluation(registration, program))
        assert summarize(ledger).observations[0].calls_for_controls == 0
        assert account(ledger).calls.controls == 0
        ledger.settle_evaluation(ledger.evaluations(kind="control")[0].id, scored(2.9, 3.4))
        assert summarize(ledger).observations[0].calls_for_controls == 1


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [(0, 10, 0.0, 0.3085), (5, 10, 0.1871, 0.8129), (10, 10, 0.6915, 1.0), (1, 1, 0.025, 1.0)],
)
def test_shares_have_the_exact_binomial_interval(count: int, of: int, low: float, high: float) -> None:
    """Table values of Clopper and Pearson's interval at 95%."""
    share = Share.counted(count, of)
    assert (share.low, share.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_nothing_measured_has_no_interval() -> None:
    assert Share.counted(0, 0) == Share(count=0, of=0, low=None, high=None)


def test_the_plan_tells_what_each_control_separates_and_why_others_were_not_run(summary: Summary) -> None:
    (plan,) = summary.observations[0].plans
    rows = {row.control: row for row in plan.controls}
    assert (plan.cost, plan.cost_of_all, plan.cost_of_cover) == (1, 1, 1)
    assert rows["half"].standing == "chosen"
    assert rows["half"].separates == (("attention", "evenly"), ("attention", "mlp"), ("evenly", "mlp"))
    assert rows["half"].width == pytest.approx(0.04, abs=0.01)
    assert rows["breaks"].standing == rows["again"].standing == "unusable"
    assert "ZeroDivisionError" in rows["breaks"].reason
    assert "exactly what the parent installs" in rows["again"].reason


TWO = """MECHANISMS = ("boost", "lift")


def boost(session, layer):
    return 0.2


def without_boost(session, layer):
    return 0.0


def lift(session, layer):
    return 0.008


def without_lift(session, layer):
    return 0.0"""


def test_a_control_that_is_known_stands_in_the_plan(tmp_path: Path) -> None:
    """`lift` alone was a candidate that was not kept; later it comes with `boost`, and what it does alone is known."""
    both = ProposalReply(
        mechanisms=(
            MechanismClaim(name="boost", cause="attention", statement="s"),
            MechanismClaim(name="lift", cause="height", statement="s"),
        ),
        edits=(
            EditBlock(search="MECHANISMS = ()", replace=TWO),
            EditBlock(
                search="    return total",
                replace="    total += boost(session, layer)\n    total += lift(session, layer)\n    return total",
            ),
        ),
    )
    rows = {cause: {"half": cells["half"], "alone": (0.0, 0.1)} for cause, cells in RIVALS.items()}
    proposer = PlayedProposer(
        proposals=(adding("lift", "height", "0.008"), write_proposal(both)),
        explanations=(
            "I cannot say.",
            "I still cannot say.",
            explaining("boost", (HALF, Control(key="alone", kind="knockin", keeps=("lift",))), rows),
        ),
    )
    with Ledger.open(play_campaign(tmp_path, proposer), read_only=True) as reader:
        (_, observation) = summarize(reader).observations
        earlier = reader.evaluations(kind="candidate")[0]
        assert recompute(reader).holds
    rows_of = {row.control: row for row in observation.plans[0].controls}
    assert {name: row.standing for name, row in rows_of.items()} == {"half": "chosen", "alone": "known"}
    assert rows_of["alone"].reason == (
        f"{earlier.program_id} installs the same on the whole subject, and {earlier.id} (candidate, search split) "
        "measured it"
    )
    assert observation.plans[0].cost_of_all == 1


def interacting() -> dict[str, Any]:
    interaction = {"knockout": "out", "knockin": "in", "excess": 0.7, "p_value": 1e-9, "significant": True}
    return {"verdict": {"checks": [], "interactions": [interaction], "void": ["x: its change did not execute"]}}


def test_interactions_and_void_controls_are_told(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        registration = register(ledger, observe(ledger))
        ledger.record_verdicts(
            [
                NewVerdict(
                    hypothesis_id=hypothesis.id,
                    status="inconclusive",
                    rule="verdict/2",
                    reason="they disagree",
                    evidence=interacting(),
                )
                for hypothesis in registration.hypotheses
            ]
        )
        summary = summarize(ledger)
    (row,) = summary.observations[0].interactions
    assert (row.knockout, row.knockin, row.excess, row.significant) == ("out", "in", 0.7, True)
    report, shown = render_report(summary), printed(summary)
    assert "| out | in | +0.70 | 1e-09 | clear of the noise |" in report
    assert "interaction of out and in: +0.70 of the effect is left by both (p = 1e-09, clear of the noise)" in shown
    for text in (report, shown):
        assert "o evidence: x: its change did not execute" in text
    assert "why: they disagree" in shown


def printed(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_is_in_the_terminal_and_in_the_report(summary: Summary) -> None:
    shown, report = printed(summary), render_report(summary)
    for words in (
        "settled calls: 2 candidates, 2 confirmations, 1 controls",
        "refuted boost through attention: barred; refused because of it: turn 2.1",
        "why: every rival is refuted, and the retained effect of 'half'",
        "chosen: half (separates attention/evenly, attention/mlp, evenly/mlp, expected width ",
        "unusable: breaks: its smoke run ended so",
        "plan: 1 call; running every usable control costs 1 (2 more could not be used)",
        "1 of 3 (33%, 1 to 91%)",
    ):
        assert words in shown, words
    for words in (
        "Settled calls: 2 candidates, 2 confirmations, 1 controls.",
        "| refuted | boost through attention | barred; refused because of it: turn 2.1 |",
        "| all | any | 1 of 3 (33%, 1 to 91%) | 0 | 2 | - | - |",
        "| breaks (substitute) | unusable | - | - | 1 |",
        "| half (substitute) | chosen | attention / evenly, attention / mlp, evenly / mlp | 0.0",
    ):
        assert words in report, words


def test_show_prints_the_account_alone_and_as_json(ledger: Path) -> None:
    run = CliRunner()
    told = run.invoke(app, ["show", str(ledger.parent), "honesty"])
    assert told.exit_code == 0, told.output
    assert "1 supported" in told.stdout
    data = json.loads(run.invoke(app, ["show", str(ledger.parent), "honesty", "--json"]).stdout)
    assert data["calls"]["controls"] == 1
    assert {row["cause"]: row["barred"] for row in data["consequences"]} == {
        "attention": True,
        "evenly": False,
        "mlp": True,
    }
