"""The campaign that is killed in tests: real workers in the real sandbox, fixed replies, and everything happens in it.

The subject is a random model of two blocks, and the text is sampled from it, so that it predicts that text well and whatever
harms it shows. The seed program shrinks every weight; the first candidate undoes that, which is a gain beyond any doubt. The
replies are fixed, so that two campaigns differ by nothing but the moment at which they were killed. What happens, in order:
set-up, a reply that is refused and its repair, a promotion, its confirmation, three rivals and two controls, verdicts, a
required edit, and a second candidate that discharges it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from forge.edits import EditBlock, render_blocks
from forge.errors import ProposerError, ProposerExhausted
from forge.proposers.base import ExplanationRequest, ProposalRequest, Reply
from forge.replies import ConditionalEdit, ExplanationReply, MechanismClaim, ProposalReply
from forge.reply_writing import write_explanation, write_proposal
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.probe_kinds import KnockoutProbe
from hypotheses.required_edits import RequiredEdit
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

CHUNKS = {"calibration": (0, 4), "gate": (4, 5), "search": (5, 85), "confirm": (85, 165), "sealed": (165, 166)}
LENGTH = 32
FIRST_PRINTABLE, NUM_PRINTABLE = 4, 96

RECIPE = """
[campaign]
name = "crash"
seed = {seed}
budget_calls = {budget}
seed_program = "{folder}/seed.py"
contract_class = "online"
max_turns = 6

[subject]
reference = "{folder}/model"

[corpus]
kind = "text"
path = "{folder}/text.txt"
sequence_length = {length}
{ranges}

[evaluation]
calibration_chunks = 2

[limits]
wall_s = 120.0
memory_gb = 4.0

[statistics]
explain_losses = false
"""

SEED = '''"""Round to nearest after every weight was shrunk, which no one should do."""

from forge_kernels import ActivationRule, encode, transform_weight

MECHANISMS = ()


def coordinates(session, group):
    steps = ()
    return steps


def quantize(session):
    for group in session.groups:
        steps = coordinates(session, group)
        for layer in group.layers:
            weight_NK = session.weight(layer) * 0.25
            code = encode(transform_weight(steps, weight_NK), scale_rule="even")
            session.install(layer, code, transform=steps, activation=ActivationRule(scale_rule="even"))
'''

RESTORE = "    return weight_NK * 4.0"
REPAIRED = write_proposal(
    ProposalReply(
        analysis="Every weight is a quarter of what it was.",
        mechanisms=(
            MechanismClaim(name="restore", cause="one_half_suffices", statement="shrunk weights answer too quietly"),
        ),
        edits=(
            EditBlock(
                search="MECHANISMS = ()",
                replace=(
                    'MECHANISMS = ("restore",)\n\n\ndef restore(layer, weight_NK):\n'
                    f"{RESTORE}\n\n\ndef without_restore(layer, weight_NK):\n    return weight_NK"
                ),
            ),
            EditBlock(
                search="            weight_NK = session.weight(layer) * 0.25",
                replace="            weight_NK = restore(layer, session.weight(layer) * 0.25)",
            ),
        ),
    )
)


def only(roles: str) -> str:
    """Return the edits of a control that restores the layers of some roles alone."""
    return render_blocks(
        [EditBlock(search=RESTORE, replace=f"    return weight_NK * (4.0 if layer.role in {roles} else 1.0)")]
    )


HALVES = {"attention_alone": only('("q", "k", "v", "o")'), "mlp_alone": only('("gate", "up", "down")')}
LITTLE, PART, MUCH = (-1.0, 0.3), (-0.2, 0.8), (1.25, 1.75)
RIVALS = {
    "attention_suffices": {"attention_alone": MUCH, "mlp_alone": LITTLE},
    "mlp_suffices": {"attention_alone": LITTLE, "mlp_alone": MUCH},
    "both_needed": {"attention_alone": PART, "mlp_alone": PART},
}
EXPLAINED = write_explanation(
    ExplanationReply(
        analysis="Is it one half of the block, or both?",
        explanation=Explanation(
            hypotheses=tuple(
                Hypothesis(key=cause, cause=cause, mechanism="restore", statement=f"{cause}, and nothing else matters")
                for cause in RIVALS
            ),
            controls=tuple(
                Control(key=key, kind="substitute", removes=("restore",), edits=edits, description=key)
                for key, edits in HALVES.items()
            ),
            predictions=tuple(
                Prediction(hypothesis=cause, control=control, low=low, high=high)
                for cause, intervals in RIVALS.items()
                for control, (low, high) in intervals.items()
            ),
        ),
        required_edits=(
            ConditionalEdit(
                hypothesis="both_needed",
                verdict="supported",
                edit=RequiredEdit(
                    kind="refine",
                    mechanism="restore",
                    cause="both_needed",
                    part="rotation",
                    wording="rotate the blocks that were restored",
                    probe=KnockoutProbe(mechanism="rotation", share=0.5),
                ),
            ),
        ),
    )
)


def rotating(discharges: tuple[str, ...]) -> str:
    """Return the reply that carries out the required edit."""
    return write_proposal(
        ProposalReply(
            analysis="The required edit, as worded.",
            mechanisms=(MechanismClaim(name="rotation", cause="spreading", statement="outliers are shared out"),),
            discharges=discharges,
            edits=(
                EditBlock(search='MECHANISMS = ("restore",)', replace='MECHANISMS = ("restore", "rotation")'),
                EditBlock(
                    search="def coordinates(session, group):",
                    replace=(
                        "def rotation(session, group):\n    return (Hadamard(size=32),)\n\n\n"
                        "def without_rotation(session, group):\n    return ()\n\n\ndef coordinates(session, group):"
                    ),
                ),
                EditBlock(search="    steps = ()", replace="    steps = rotation(session, group)"),
                EditBlock(
                    search="from forge_kernels import ActivationRule, encode, transform_weight",
                    replace="from forge_kernels import ActivationRule, Hadamard, encode, transform_weight",
                ),
            ),
        )
    )


class FixedProposer:
    """Answers by what the campaign has come to, and never by what was asked before: a restarted one goes on the same way.

    outage_turn: from this turn on it cannot be reached, as a server that is down.
    """

    name = "fixed"
    label = "fixed replies (no language model)"

    def __init__(self, outage_turn: int | None = None) -> None:
        self._outage_turn = outage_turn

    def propose(self, request: ProposalRequest) -> Reply:
        if self._outage_turn is not None and request.turn >= self._outage_turn:
            raise ProposerError("the server is down")
        if request.turn == 1:
            return _reply("I would shrink less.") if request.attempt == 0 else _reply(REPAIRED)
        if request.turn == 2:
            return _reply(rotating(tuple(record.key for record in request.open_edits)))
        raise ProposerExhausted("the fixed replies are over")

    def explain(self, request: ExplanationRequest) -> Reply:
        return _reply(EXPLAINED) if request.turn == 1 else _reply("I cannot say.")


def write_campaign(folder: Path, *, budget: int = 8, seed: int = 5) -> Path:
    """Write subject, text, seed program and recipe into a folder; return the recipe's path."""
    model = make_tiny_model(seed=1, mlp_bias=False, attention_bias=False)
    model.lm_head.weight.mul_(4.0)  # type: ignore[union-attr,operator]
    model.save_pretrained(folder / "model")  # type: ignore[operator]
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(tokenizer.decode(_sample(model).flatten().tolist()))
    (folder / "seed.py").write_text(SEED)
    recipe = folder / "recipe.toml"
    ranges = "\n".join(f"{split} = [{start}, {stop}]" for split, (start, stop) in CHUNKS.items())
    recipe.write_text(RECIPE.format(folder=folder, budget=budget, seed=seed, length=LENGTH, ranges=ranges))
    return recipe


def _sample(model: torch.nn.Module) -> torch.Tensor:
    """Return tokens (chunks, LENGTH) that the model itself continues each chunk with, printable ones only."""
    generator = torch.Generator().manual_seed(0)
    num_chunks = max(stop for _, stop in CHUNKS.values())
    tokens = torch.randint(NUM_PRINTABLE, (num_chunks, 1), generator=generator) + FIRST_PRINTABLE
    for _ in range(LENGTH - 1):
        logits = model(tokens).logits[:, -1, FIRST_PRINTABLE : FIRST_PRINTABLE + NUM_PRINTABLE]
        following = torch.multinomial(logits.softmax(-1), 1, generator=generator) + FIRST_PRINTABLE
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


def _reply(text: str) -> Reply:
    return Reply(text=text, model="fixed", prompt_tokens=10, completion_tokens=10, cost=0.0)
