"""Whole campaigns on a shipped subject with few tokens: real workers in the real sandbox, a real ledger."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluators.subjects import Subject
from forge import launch as launching
from forge.edits import EditBlock
from forge.errors import ProposerError
from forge.launch import Outcome, launch, relaunch
from forge.progress import QuietProgress
from forge.proposers.base import ProposalRequest, Reply
from forge.recipe import dump
from forge.replies import MechanismClaim, ProposalReply
from forge.reply_writing import write_proposal
from hypotheses.ledger import Ledger
from tests.campaign_builders import tiny_recipe
from tests.scripted_proposer import ScriptedProposer

CRASHES = "    raise RuntimeError('of its own')"
LOOPS = "    while True:\n        pass"
NAN = "    steps += (Diagonal(scale_K=torch.full((group.num_inputs,), float('nan'))),)"
TOO_MANY_BITS = (
    "    steps += (BlockMatrix(matrix_Bij=torch.eye(32).expand(group.num_inputs // 32, 32, 32).contiguous()),)"
)
HOARDS = "    hoard = [torch.ones(2**28) for _ in range(100)]"


def proposal(statement: str) -> str:
    """Return a reply that puts one statement into the coordinates stage of the seed."""
    return write_proposal(
        ProposalReply(
            analysis="A change of the coordinates.",
            mechanisms=(),
            edits=(
                EditBlock(search="    return steps", replace=f"{statement}\n    return steps"),
                EditBlock(
                    search="from forge_kernels import ActivationRule, encode, transform_weight",
                    replace=(
                        "import torch\n"
                        "from forge_kernels import ActivationRule, BlockMatrix, Diagonal, encode, transform_weight"
                    ),
                ),
            ),
        )
    )


class Unreachable(ScriptedProposer):
    def propose(self, request: ProposalRequest) -> Reply:
        raise ProposerError("the server is down")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a campaign that was set up, and stopped before its first proposal."""
    folder = tmp_path_factory.mktemp("begun")
    recipe = tiny_recipe(folder)
    proposer = Unreachable([])
    # The label is in the ledger, and `finished` goes on with the catalogue.
    proposer.label = launching.make_proposer(recipe).label
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "make_proposer", lambda recipe: proposer)
        outcome = launch(recipe, folder / "run", QuietProgress())
    assert outcome.ending.failed
    return outcome.folder.root


def run_scripted(
    replies: list[str], begun: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome, ScriptedProposer]:
    """Go on with a copy of a campaign that was set up, so that not every test measures its noise."""
    proposer = ScriptedProposer(list(replies))
    monkeypatch.setattr(launching, "make_proposer", lambda recipe: proposer)
    shutil.copytree(begun, folder / "run")
    return relaunch(folder / "run", QuietProgress()), proposer


@pytest.fixture(scope="module")
def finished(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A campaign of the catalogue, four calls, which went on from a copy of `begun`; one without a stop is held to it below."""
    root = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(begun, root)
    return relaunch(root, QuietProgress())


def test_a_campaign_leaves_ledger_report_best_program_and_recipe(finished: Outcome) -> None:
    folder = finished.folder
    for path in (folder.ledger, folder.report, folder.best, folder.recipe, folder.environment):
        assert path.stat().st_size > 0, path
    budget = finished.summary.budget
    assert budget.used + budget.reserved + budget.free == budget.total == 4
    assert budget.used == 4
    assert finished.summary.violations == ()
    assert "full precision" in folder.report.read_text()
    assert not finished.ending.failed


def test_every_program_was_scored_in_the_sandbox_from_its_artifact(finished: Outcome) -> None:
    assert finished.summary.sandbox == "bubblewrap"
    with Ledger.open(finished.folder.ledger, read_only=True) as ledger:
        for evaluation in ledger.evaluations():
            if evaluation.program_id is None:
                continue
            result = evaluation.result
            assert result is not None
            assert result.is_scored, result.reason
            assert result.artifact_hash is not None
            assert (finished.folder.artifacts / f"{result.artifact_hash}.safetensors").is_file()
            assert len(result.evidence["layers"]) == 56
            assert result.effective_bits is not None
            assert 4.25 <= result.effective_bits <= 6.0


def test_the_budget_holds_by_sql(finished: Outcome) -> None:
    with sqlite3.connect(finished.folder.ledger) as connection:
        (row,) = connection.execute("SELECT total, used, reserved, free FROM budget").fetchall()
    assert row[1] + row[2] + row[3] == row[0]


def test_a_finished_campaign_is_over_and_one_without_its_best_artifact_is_walked_again(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    shutil.copytree(finished.folder.root, root)
    loaded: list[str] = []
    load_subject = launching.load_subject

    def counted(reference: str, **options: object) -> Subject:
        loaded.append(reference)
        return load_subject(reference, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(launching, "load_subject", counted)
    over = relaunch(root, QuietProgress())
    assert loaded == []
    with Ledger.open(finished.folder.ledger, read_only=True) as ledger:
        incumbent = ledger.incumbent()
        assert incumbent is not None
        result = ledger.evaluation(incumbent.evaluation_id).result
    assert result is not None
    artifact = root / "artifacts" / f"{result.artifact_hash}.safetensors"
    artifact.unlink()
    walked = relaunch(root, QuietProgress())
    assert loaded == ["nano-llama"]
    assert artifact.is_file()
    for again in (over, walked):
        assert again.summary == finished.summary
        assert again.ending == finished.ending


@pytest.mark.slow
def test_the_same_seed_gives_the_same_ledger(finished: Outcome, tmp_path: Path) -> None:
    again = launch(tiny_recipe(tmp_path), tmp_path / "run", QuietProgress())
    assert again.summary.content_hash == finished.summary.content_hash


@pytest.mark.slow
def test_a_killed_campaign_goes_on_and_ends_as_if_nothing_had_happened(finished: Outcome, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump(tiny_recipe(tmp_path)))
    run = tmp_path / "run"
    for seconds in (3, 8, 12):
        command = ["run", str(recipe), "--out", str(run)] if not run.exists() else ["resume", str(run)]
        process = subprocess.Popen(
            [sys.executable, "-m", "forge", *command],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while not (run / "ledger.sqlite").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert run.exists(), "the campaign never made its folder"
    outcome = relaunch(run, QuietProgress())
    assert outcome.summary.content_hash == finished.summary.content_hash
    assert outcome.summary.budget == finished.summary.budget
    assert outcome.summary.violations == ()


def test_failures_of_programs_cost_no_call_and_the_campaign_goes_on(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [
        proposal(CRASHES),
        proposal(NAN),
        proposal(TOO_MANY_BITS),
        "no program at all",
        proposal("    steps += ()"),
    ]
    outcome, proposer = run_scripted(replies, begun, tmp_path, monkeypatch)
    stages = [(row.stage, row.reason) for row in outcome.summary.refusals]
    assert [stage for stage, _ in stages] == ["smoke", "smoke", "smoke", "format", "duplicate"]
    assert "of its own" in stages[0][1]
    assert "non-finite" in stages[1][1]
    assert "5.5" in stages[2][1]
    assert outcome.summary.budget.used == 0
    assert proposer.requests[1].attempt == 1
    assert proposer.requests[1].problems


def test_a_failure_that_only_the_whole_subject_shows_is_a_recorded_outcome(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tripled = "    steps += (Diagonal(scale_K=torch.full((group.num_inputs,), 3.0)),)"
    late = f"{tripled}\n    if group.block == 5:\n        raise RuntimeError('late')"
    outcome, _ = run_scripted([proposal(late)], begun, tmp_path, monkeypatch)
    (call,) = [call for call in outcome.summary.calls if call.kind == "candidate"]
    assert call.outcome == "crashed"
    assert call.nll is None
    assert outcome.summary.budget.used == 1
    assert outcome.summary.best.name.endswith("rtn")


@pytest.mark.slow
def test_hanging_and_hoarding_programs_end(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluators.evaluator.SMOKE_WALL_S", 10.0)
    outcome, _ = run_scripted([proposal(LOOPS), proposal(HOARDS)], begun, tmp_path, monkeypatch)
    assert [refusal.stage for refusal in outcome.summary.refusals] == ["smoke", "smoke"]
    for outcome_name, refusal in zip(("timed_out", "out_of_memory"), outcome.summary.refusals, strict=True):
        assert outcome_name in refusal.reason


def test_a_mechanism_that_does_not_execute_is_refused_before_any_call(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = write_proposal(
        ProposalReply(
            analysis="Its result is thrown away.",
            mechanisms=(MechanismClaim(name="idle", cause="nothing", statement="it does nothing"),),
            edits=(
                EditBlock(search="MECHANISMS = ()", replace='MECHANISMS = ("idle",)'),
                EditBlock(
                    search="def coordinates(session, group):",
                    replace=(
                        "def idle(session, group):\n    return session.weight(group.layers[0]) * 2\n\n\n"
                        "def without_idle(session, group):\n    return None\n\n\ndef coordinates(session, group):"
                    ),
                ),
                EditBlock(search="    steps = ()", replace="    steps = ()\n    idle(session, group)"),
                EditBlock(
                    search="from forge_kernels import ActivationRule, encode, transform_weight",
                    replace="from forge_kernels import ActivationRule, Hadamard, encode, transform_weight",
                ),
            ),
        )
    )
    outcome, _ = run_scripted([idle], begun, tmp_path, monkeypatch)
    (refusal,) = outcome.summary.refusals
    assert refusal.stage == "execution"
    assert "'idle'" in refusal.reason
    assert refusal.reason.endswith("In the smoke run its lines ran (advisory).")
    assert outcome.summary.budget.used == 0


def test_a_campaign_of_refusals_ends_with_its_cause(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, _ = run_scripted(["prose"] * 40, begun, tmp_path, monkeypatch)
    assert outcome.ending.failed
    assert "5 turns in a row" in outcome.ending.reason
    assert outcome.summary.budget.used == 0
    assert "No improvement" in outcome.folder.report.read_text()
