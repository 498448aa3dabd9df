"""What luck does not buy: a program that differs from its parent by a seed alone stays where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge import launch as launching
from forge.edits import EditBlock
from forge.launch import launch
from forge.progress import QuietProgress
from forge.recipe import Recipe
from forge.replies import ProposalReply
from forge.reply_writing import write_proposal
from hypotheses.ledger import Ledger
from tests.campaign_builders import tiny_recipe
from tests.scripted_proposer import ScriptedProposer

RANDOM_SIGNS = '''"""Random signs, block Hadamard, round to nearest: luck decides a little."""

import torch
from forge_kernels import ActivationRule, Diagonal, Hadamard, encode, transform_weight

MECHANISMS = ()


def quantize(session):
    for group in session.groups:
        generator = session.rng(group, "signs")
        signs_K = torch.randint(0, 2, (group.num_inputs,), generator=generator).float() * 2 - 1
        steps = (Diagonal(scale_K=signs_K), Hadamard(size=32))
        for layer in group.layers:
            encoded = encode(transform_weight(steps, session.weight(layer)), scale_rule="even")
            session.install(layer, encoded, transform=steps, activation=ActivationRule(scale_rule="even"))
'''


SIGNS = '        generator = session.rng(group, "signs")'


def other_seed(number: int) -> str:
    return write_proposal(
        ProposalReply(
            analysis="Another draw of the signs.",
            mechanisms=(),
            edits=(EditBlock(search=SIGNS, replace=SIGNS.replace("signs", f"signs, draw {number}")),),
        )
    )


def with_seed_program(recipe: Recipe, path: Path) -> Recipe:
    return recipe.model_copy(update={"campaign": recipe.campaign.model_copy(update={"seed_program": str(path)})})


@pytest.mark.slow
def test_another_seed_is_not_promoted_and_not_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = tmp_path / "signs.py"
    seed.write_text(RANDOM_SIGNS)
    proposer = ScriptedProposer([other_seed(number) for number in range(4)])
    monkeypatch.setattr(launching, "make_proposer", lambda recipe: proposer)
    outcome = launch(with_seed_program(tiny_recipe(tmp_path, budget=4), seed), tmp_path / "run", QuietProgress())
    assert outcome.summary.budget.used == 4, outcome.summary.refusals
    with Ledger.open(outcome.folder.ledger, read_only=True) as ledger:
        losses = {evaluation.nll for evaluation in ledger.evaluations(kind="candidate")}
        assert len(losses) == 4, f"four draws of the signs gave the losses {losses}: nothing was drawn"
        assert [entry.turn for entry in ledger.incumbents()] == [0]
        assert ledger.observations() == ()
    assert outcome.summary.declared is not None
    assert outcome.summary.declared.program == "signs"
    assert outcome.folder.best.read_text() == RANDOM_SIGNS


@pytest.mark.slow
def test_eight_workers_spend_ten_calls_on_ten_evaluations(tmp_path: Path) -> None:
    outcome = launch(tiny_recipe(tmp_path, budget=10, workers=8), tmp_path / "run", QuietProgress())
    budget = outcome.summary.budget
    assert (budget.used, budget.reserved, budget.free) == (10, 0, 0)
    assert outcome.summary.violations == ()
    with Ledger.open(outcome.folder.ledger, read_only=True) as ledger:
        paid = [evaluation for evaluation in ledger.evaluations() if evaluation.kind != "setup"]
        assert [evaluation.is_settled for evaluation in paid] == [True] * 10
        assert [evaluation.attempt for evaluation in paid] == [1] * 10
        assert {evaluation.result.outcome for evaluation in paid if evaluation.result} == {"scored"}
        turns = [evaluation.turn for evaluation in paid if evaluation.kind == "candidate"]
        assert len(turns) == len(set(turns))
        assert len(turns) >= 3
    for evaluation in paid:
        assert evaluation.result is not None
        assert (outcome.folder.artifacts / f"{evaluation.result.artifact_hash}.safetensors").is_file()
