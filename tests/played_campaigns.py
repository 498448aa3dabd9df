"""Whole campaigns in a second: real ledger, screening, explaining and verdicts, around an evaluator that plays the sandbox.

A program here gives every layer a number, and its loss falls by the mean of them; chunks and programs have noise of their own.
The truncated subject has two blocks, the whole one eight.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluators.pool import EvaluatorPool
from evaluators.results import EvaluationResult, Evidence, Outcome, Split
from forge.asking import Asker
from forge.assembling import assemble
from forge.desk import Desk
from forge.edits import EditBlock, render_blocks
from forge.program_files import read_program
from forge.progress import QuietProgress
from forge.proposers.base import ExplanationRequest, ProposalRequest, ProposerExhausted, Reply
from forge.replies import ConditionalEdit, ExplanationReply, MechanismClaim, ProposalReply
from forge.reply_writing import write_explanation, write_proposal
from forge.screening import Screener
from forge.set_up import NOISE_PROGRAM, set_up
from hypotheses.ledger import Ledger
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from tests.campaign_builders import tiny_recipe
from tests.eight_blocks import SEED as SEED_SOURCE
from tests.eight_blocks import InProcess, Session
from tests.ledger_builders import new_campaign

SEED = 12
NUM_CHUNKS = 24
NOISE = 0.004
BITS = 4.25


class PlayedEvaluator(InProcess):
    """Runs the program in this process, and makes its losses up."""

    sources: dict[str, str] = {}

    def full_precision_nll(self, split: Split) -> tuple[float, ...]:
        return _chunks(split, 0.5, ())

    def smoke(self, source: str, *, seed: int = 0) -> EvaluationResult:
        return self._run(source, 2, split="search", draw=0)

    def trace(self, source: str, *, draw: int = 0, seed: int = 0) -> EvaluationResult:
        return self._run(source, 8, split="search", draw=draw)

    def evaluate(
        self, source: str, *, split: Split, draw: int = 0, seed: int = 0, reference_artifact: str | None = None
    ) -> EvaluationResult:
        return self._run(source, 8, split=split, draw=draw, scores=True, reference_artifact=reference_artifact)

    def _run(
        self,
        source: str,
        num_blocks: int,
        *,
        split: Split,
        draw: int,
        scores: bool = False,
        reference_artifact: str | None = None,
    ) -> EvaluationResult:
        session = Session(num_blocks)
        try:
            if source == read_program(NOISE_PROGRAM):
                gain = 0.1 + NOISE * random.Random(f"draw {draw}").gauss(0, 1)
            else:
                names: dict[str, Any] = {}
                exec(compile(source, "program", "exec"), names)
                names["quantize"](session)
                gain = sum(session.installed.values()) / len(session.installed)
        except Exception as err:
            return EvaluationResult(outcome=Outcome.CRASHED, reason=repr(err), split=split, draw=draw, seed=SEED)
        artifact = hashlib.sha256(source.encode()).hexdigest()
        self.sources[artifact] = source
        reference = (
            self._run(self.sources[reference_artifact], 8, split=split, draw=0, scores=True).chunk_nll
            if reference_artifact
            else ()
        )
        return EvaluationResult(
            outcome=Outcome.SCORED,
            split=split,
            draw=draw,
            seed=SEED,
            chunk_nll=_chunks(split, gain, (source, draw)) if scores else (),
            reference_chunk_nll=reference,
            contract_class="online",
            effective_bits=BITS,
            artifact_hash=artifact if scores else None,
            evidence=Evidence(
                events=tuple(session.events),
                layers={name: {"digest": repr(number), "bits": BITS} for name, number in session.installed.items()},
            ),
        )


def _chunks(split: str, gain: float, noise_of: tuple[object, ...]) -> tuple[float, ...]:
    """Return losses of the chunks of a split, less a gain, with the program's own noise."""
    chunks, own = random.Random(split), random.Random(repr((split, noise_of)))
    size = NOISE if noise_of else 0.0
    return tuple(3 + 0.3 * chunks.gauss(0, 1) - gain + size * own.gauss(0, 1) for _ in range(NUM_CHUNKS))


@dataclass
class PlayedProposer:
    """Answers with what the test gives: texts, functions of the request, and nothing more when they are used up."""

    proposals: Sequence[str | Callable[[ProposalRequest], str]]
    explanations: Sequence[str | Callable[[ExplanationRequest], str]] = ()
    name: str = "played"
    label: str = "played replies"
    asked: list[ProposalRequest] = field(default_factory=list)
    asked_why: list[ExplanationRequest] = field(default_factory=list)

    def propose(self, request: ProposalRequest) -> Reply:
        self.asked.append(request)
        if len(self.asked) > len(self.proposals):
            raise ProposerExhausted("the played replies are over")
        return self._reply(self.proposals[len(self.asked) - 1], request)

    def explain(self, request: ExplanationRequest) -> Reply:
        self.asked_why.append(request)
        if len(self.asked_why) > len(self.explanations):
            return self._reply("I cannot say.", request)
        return self._reply(self.explanations[len(self.asked_why) - 1], request)

    @staticmethod
    def _reply(answer: Any, request: object) -> Reply:
        return Reply(text=answer(request) if callable(answer) else answer, model="played")


def play_campaign(folder: Path, proposer: PlayedProposer, *, budget: int = 12, path: str = "ledger.sqlite") -> Path:
    """Play a whole campaign; return its ledger."""
    recipe = tiny_recipe(folder, budget=budget)
    progress = QuietProgress()
    with (
        Ledger.create(folder / path, new_campaign(budget=budget, recipe={"statistics": {}}, seed=SEED)) as ledger,
        EvaluatorPool(PlayedEvaluator) as pool,  # type: ignore[arg-type]
    ):
        desk = Desk(ledger, pool, progress)
        screener = Screener(ledger, desk, SEED)
        noise = set_up(recipe, ledger, desk, screener, SEED_SOURCE, progress)
        assemble(recipe, ledger, desk, screener, Asker(proposer, ledger, progress), noise, progress).run()
    return folder / path


def adding(name: str, cause: str, gain: str, *, beside: str = "", discharges: Sequence[str] = ()) -> str:
    """Return the proposal of one mechanism that adds a number to every layer; `beside` is one that is there already."""
    before = f'MECHANISMS = ("{beside}",)' if beside else "MECHANISMS = ()"
    after = f'MECHANISMS = ("{beside}", "{name}")' if beside else f'MECHANISMS = ("{name}",)'
    functions = (
        f"def {name}(session, layer):\n    return {gain}\n\n\ndef without_{name}(session, layer):\n    return 0.0"
    )
    return write_proposal(
        ProposalReply(
            analysis="more",
            mechanisms=(MechanismClaim(name=name, cause=cause, statement=f"{name} helps through {cause}"),),
            discharges=tuple(discharges),
            edits=(
                EditBlock(search=before, replace=f"{after}\n\n\n{functions}"),
                EditBlock(search="    return total", replace=f"    total += {name}(session, layer)\n    return total"),
            ),
        )
    )


Rows = dict[str, dict[str, tuple[float, float]]]


def substituting(mechanism: str, line: str, other: str, key: str = "half") -> Control:
    """Return a control that replaces one line of the child."""
    edits = render_blocks([EditBlock(search=line, replace=other)])
    return Control(key=key, kind="substitute", removes=(mechanism,), edits=edits, description=key)


def explaining(
    mechanism: str, controls: Sequence[Control], rivals: Rows, required: Sequence[ConditionalEdit] = ()
) -> str:
    """Return the explanation with one rival for each row of intervals by control."""
    return write_explanation(
        ExplanationReply(
            analysis="either",
            explanation=Explanation(
                hypotheses=tuple(
                    Hypothesis(key=cause, cause=cause, mechanism=mechanism, statement=f"it is {cause}")
                    for cause in rivals
                ),
                controls=tuple(controls),
                predictions=tuple(
                    Prediction(hypothesis=cause, control=key, low=low, high=high)
                    for cause, cells in rivals.items()
                    for key, (low, high) in cells.items()
                ),
            ),
            required_edits=tuple(required),
        )
    )


HALF = substituting("boost", "    return 0.2", '    return 0.2 if layer.role in ("q", "o") else 0.0')
QUARTER = substituting("boost", "    return 0.2", '    return 0.2 if layer.role == "q" else 0.0', "quarter")
RIVALS: Rows = {
    "evenly": {"half": (0.4, 0.6), "quarter": (0.15, 0.35)},
    "attention": {"half": (0.85, 1.15), "quarter": (0.35, 0.75)},
    "mlp": {"half": (-0.15, 0.15), "quarter": (-0.15, 0.05)},
}
"""`boost` gives as much to every layer, so half of them keep half of the gain."""


def two_turns(folder: Path, **options: Any) -> Path:
    """Play a gain with three rivals and two controls, and a second gain that nobody can explain; return the ledger."""
    proposer = PlayedProposer(
        proposals=(adding("boost", "attention", "0.2"), adding("lift", "evenly", "0.1", beside="boost")),
        explanations=(explaining("boost", (HALF, QUARTER), RIVALS),),
    )
    return play_campaign(folder, proposer, **options)
