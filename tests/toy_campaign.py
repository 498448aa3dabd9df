"""Whole campaigns over a toy subject: eight blocks of four layers, truncated to two, programs run in this process.

The loss falls by the mean of what a program installs, so a test knows what each of its programs is worth. The ledger, the loop
and everything that judges are the real ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
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
from forge.set_up import set_up
from hypotheses.ledger import Ledger
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from tests.campaign_builders import tiny_recipe
from tests.eight_blocks import BLOCKS, SEED, SMOKE_BLOCKS, InProcess, Session
from tests.ledger_builders import new_campaign

NOISE = read_program("gptq")


class ToyEvaluator(InProcess):
    """What an `Evaluator` does, on the toy subject."""

    sources: dict[str, str] = {}

    def __init__(self) -> None:
        self.traced: list[str] = []

    def evaluate(
        self, source: str, *, split: Split, draw: int = 0, seed: int = 0, reference_artifact: str | None = None
    ) -> EvaluationResult:
        reference = ()
        if reference_artifact is not None:
            reference = _losses(self.sources[reference_artifact], split, 0)
        name = str(hash(source))
        self.sources[name] = source
        result = _run(source, BLOCKS, draw=draw, seed=seed)
        if not result.outcome.is_scored:
            return result
        fields = {"split": split, "chunk_nll": _losses(source, split, draw), "reference_chunk_nll": reference}
        return EvaluationResult(**(vars(result) | fields | {"artifact_hash": name}))

    def smoke(self, source: str, *, seed: int = 0) -> EvaluationResult:
        return _run(source, SMOKE_BLOCKS, seed=seed)

    def trace(self, source: str, *, draw: int = 0, seed: int = 0) -> EvaluationResult:
        self.traced.append(source)
        return _run(source, BLOCKS, draw=draw, seed=seed)

    def full_precision_nll(self, split: Split) -> tuple[float, ...]:
        return tuple(loss - 0.5 for loss in _text(split))


def _text(split: str) -> list[float]:
    luck = random.Random(split)
    return [3 + 0.3 * luck.gauss(0, 1) for _ in range(24)]


def _session(source: str, num_blocks: int) -> Session:
    session = Session(num_blocks)
    if source == NOISE:
        session.installed = {layer.name: 0.1 for layer in session.layers}
        return session
    program: dict[str, Any] = {}
    exec(compile(source, "program", "exec"), program)
    program["quantize"](session)
    return session


def _losses(source: str, split: str, draw: int) -> tuple[float, ...]:
    installed = _session(source, BLOCKS).installed.values()
    luck = random.Random(f"{source}{split}{draw}")
    gain = sum(installed) / len(installed) + (0.002 * luck.gauss(0, 1) if source == NOISE else 0.0)
    return tuple(loss - gain + 0.002 * luck.gauss(0, 1) for loss in _text(split))


def _run(source: str, num_blocks: int, *, draw: int = 0, seed: int = 0) -> EvaluationResult:
    try:
        session = _session(source, num_blocks)
    except Exception as error:
        return EvaluationResult(outcome=Outcome.CRASHED, reason=repr(error), split="search", draw=draw, seed=seed)
    row = {"rank": 0, "transform": [], "bits": 4.25, "weight_error": 0.01, "scale_rule": "even", "code_rule": "nearest"}
    layers = {name: row | {"digest": repr(value)} for name, value in session.installed.items()}
    return EvaluationResult(
        outcome=Outcome.SCORED,
        split="search",
        draw=draw,
        seed=seed,
        contract_class="online",
        effective_bits=4.25,
        evidence=Evidence(events=tuple(session.events), layers=layers),
    )


class ToyProposer:
    """Answers with functions of the request; what they return None for is the end."""

    name = label = "toy"

    def __init__(
        self,
        propose: Callable[[ProposalRequest], str | None],
        explain: Callable[[ExplanationRequest], str] = lambda request: "I cannot say.",
    ) -> None:
        self._propose, self._explain = propose, explain
        self.asked: list[ProposalRequest] = []
        self.asked_why: list[ExplanationRequest] = []

    def propose(self, request: ProposalRequest) -> Reply:
        self.asked.append(request)
        text = self._propose(request)
        if text is None:
            raise ProposerExhausted("the script is over")
        return Reply(text=text, model="toy")

    def explain(self, request: ExplanationRequest) -> Reply:
        self.asked_why.append(request)
        return Reply(text=self._explain(request), model="toy")


def run_toy(folder: Path, proposer: ToyProposer, *, budget: int = 12) -> Ledger:
    """Run a campaign to its end and return its ledger, open; what was not needed of it stays unspent."""
    recipe = tiny_recipe(folder, budget=budget)
    progress = QuietProgress()
    ledger = Ledger.create(folder / "ledger.sqlite", new_campaign(budget=budget))
    desk = Desk(ledger, EvaluatorPool(ToyEvaluator), progress)  # type: ignore[arg-type]
    screener = Screener(ledger, desk, recipe.campaign.seed)
    noise = set_up(recipe, ledger, desk, screener, SEED, progress)
    assemble(recipe, ledger, desk, screener, Asker(proposer, ledger, progress), noise, progress).run()
    return ledger


def proposal(
    *edits: tuple[str, str], claims: tuple[tuple[str, str], ...] = (), discharges: tuple[str, ...] = ()
) -> str:
    """Return a reply with these edits."""
    return write_proposal(
        ProposalReply(
            analysis="a",
            mechanisms=tuple(MechanismClaim(name=name, cause=cause, statement="s") for name, cause in claims),
            discharges=discharges,
            edits=tuple(EditBlock(search=search, replace=replace) for search, replace in edits),
        )
    )


def add(
    name: str, body: str, *, neutral: str = "    return 0.0", before: tuple[str, ...] = (), call: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return edits that add a mechanism, whose value is added to what is installed."""

    def declared(names: tuple[str, ...]) -> str:
        return f"MECHANISMS = ({''.join(f'{one!r}, ' for one in names).strip()})".replace("'", '"')

    functions = f"def {name}(session, layer):\n{body}\n\n\ndef without_{name}(session, layer):\n{neutral}"
    return (
        (declared(before), f"{declared((*before, name))}\n\n\n{functions}"),
        ("    return total", f"    total += {call or f'{name}(session, layer)'}\n    return total"),
    )


def substitute(key: str, name: str, search: str, replace: str) -> Control:
    """Return a control that puts something else in the place of a mechanism."""
    edits = render_blocks([EditBlock(search=search, replace=replace)])
    return Control(key=key, kind="substitute", removes=(name,), edits=edits, description="d")


def explanation(
    *controls: Control, mechanisms: tuple[str, str] = ("boost", "boost"), wishes: tuple[ConditionalEdit, ...] = ()
) -> str:
    """Return a reply with two rivals: ``small`` expects every control to keep little, ``big`` to keep nearly all."""
    keys = ("small", "big")
    ranges = {"small": (-0.2, 0.45), "big": (0.8, 1.2)}
    return write_explanation(
        ExplanationReply(
            analysis="a",
            explanation=Explanation(
                hypotheses=tuple(
                    Hypothesis(key=key, cause=key, mechanism=name, statement="s")
                    for key, name in zip(keys, mechanisms, strict=True)
                ),
                controls=controls,
                predictions=tuple(
                    Prediction(hypothesis=key, control=control.key, low=ranges[key][0], high=ranges[key][1])
                    for key in keys
                    for control in controls
                ),
            ),
            required_edits=wishes,
        )
    )
