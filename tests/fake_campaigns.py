"""Whole campaigns over a real ledger in a second or two: a subject of four layers a block, and an evaluator that computes.

A program of this world installs one number for each layer, through `value(session, layer)`; the loss falls by the mean of what
it installs, with a little luck of the chunks. Eight blocks are paid for, two are smoked. Everything else is the real thing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluators.pool import EvaluatorPool
from evaluators.results import EvaluationResult, Evidence, LayerError, Outcome, Split
from forge.asking import Asker
from forge.assembling import assemble
from forge.campaign import Ending
from forge.desk import Desk
from forge.edits import EditBlock, render_blocks
from forge.program_files import read_program
from forge.progress import QuietProgress
from forge.proposers.base import ExplanationRequest, ProposalRequest, ProposerExhausted, Reply
from forge.replies import ConditionalEdit, ExplanationReply, MechanismClaim, ProposalReply
from forge.reply_writing import write_explanation, write_proposal
from forge.required import EditBoard
from forge.screening import Screener
from forge.set_up import NOISE_PROGRAM, set_up
from hypotheses.ledger import Ledger
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.probe_kinds import KnockoutProbe
from hypotheses.required_edits import EditRecord, RequiredEdit
from tests.campaign_builders import tiny_recipe
from tests.eight_blocks import BLOCKS, SEED, SMOKE_BLOCKS, InProcess, Session
from tests.ledger_builders import new_campaign


def evidence_of(session: Session) -> Evidence:
    plain = {"rank": 0, "transform": [], "bits": 4.25, "weight_error": 0.01, "scale_rule": "even"}
    layers = {name: plain | {"digest": repr(number)} for name, number in session.installed.items()}
    return Evidence(events=tuple(session.events), layers=layers)


class FakeEvaluator(InProcess):
    """Runs a program in this process and scores it by the numbers it installed."""

    def __init__(self, luck: float, error_map: tuple[LayerError, ...]) -> None:
        self._luck = luck
        self._error_map = error_map
        self._sources: dict[str, str] = {}

    def evaluate(
        self, source: str, *, split: Split, draw: int = 0, seed: int = 0, reference_artifact: str | None = None
    ) -> EvaluationResult:
        if source == read_program(NOISE_PROGRAM):
            luck = random.Random(f"noise {draw}").gauss(0, self._luck)
            losses = tuple(loss + luck for loss in self.full_precision_nll(split))
            return EvaluationResult(outcome=Outcome.SCORED, split=split, draw=draw, seed=seed, chunk_nll=losses)
        result = self._run(source, BLOCKS, split=split, draw=draw, seed=seed)
        if not result.outcome.is_scored:
            return result
        artifact = hashlib.sha256(source.encode()).hexdigest()
        self._sources[artifact] = source
        reference: tuple[float, ...] = ()
        if reference_artifact is not None:
            reference = self._losses(self._sources[reference_artifact], split, 0)
        return dataclasses.replace(
            result,
            chunk_nll=self._losses(source, split, draw),
            reference_chunk_nll=reference,
            artifact_hash=artifact,
        )

    def smoke(self, source: str, *, seed: int = 0) -> EvaluationResult:
        return self._run(source, SMOKE_BLOCKS, split="search", draw=0, seed=seed)

    def trace(self, source: str, *, draw: int = 0, seed: int = 0) -> EvaluationResult:
        return self._run(source, BLOCKS, split="search", draw=draw, seed=seed)

    def error_map(self, artifact_hash: str) -> tuple[LayerError, ...]:
        return self._error_map

    def full_precision_nll(self, split: Split) -> tuple[float, ...]:
        texts = random.Random(split)
        return tuple(3 + 0.3 * texts.gauss(0, 1) for _ in range(24))

    def _run(self, source: str, num_blocks: int, *, split: Split, draw: int, seed: int) -> EvaluationResult:
        names: dict[str, Any] = {}
        session = Session(num_blocks)
        try:
            exec(compile(source, "program", "exec"), names)
            names["quantize"](session)
        except Exception as error:
            return EvaluationResult(outcome=Outcome.CRASHED, reason=repr(error), split=split, draw=draw, seed=seed)
        return EvaluationResult(
            outcome=Outcome.SCORED,
            split=split,
            draw=draw,
            seed=seed,
            contract_class="online",
            effective_bits=4.25,
            evidence=evidence_of(session),
        )

    def _losses(self, source: str, split: Split, draw: int) -> tuple[float, ...]:
        names: dict[str, Any] = {}
        session = Session(BLOCKS)
        exec(compile(source, "program", "exec"), names)
        names["quantize"](session)
        gain = sum(session.installed.values()) / len(session.installed)
        luck = random.Random(f"{source} {split} {draw}")
        return tuple(loss + 0.5 - gain + luck.gauss(0, self._luck) for loss in self.full_precision_nll(split))


@dataclass
class FakeProposer:
    """Answers by two functions of the request; a proposal of None means that it has nothing left."""

    proposals: Callable[[ProposalRequest], str | None]
    explanations: Callable[[ExplanationRequest], str] = lambda request: "I cannot say."
    name: str = "fake"
    label: str = "functions of a test"
    asked: list[ProposalRequest] = field(default_factory=list)
    asked_why: list[ExplanationRequest] = field(default_factory=list)

    def propose(self, request: ProposalRequest) -> Reply:
        self.asked.append(request)
        text = self.proposals(request)
        if text is None:
            raise ProposerExhausted("over")
        return Reply(text=text, model="fake")

    def explain(self, request: ExplanationRequest) -> Reply:
        self.asked_why.append(request)
        return Reply(text=self.explanations(request), model="fake")


@dataclass(frozen=True, kw_only=True)
class Played:
    """A campaign that was walked to its end."""

    ending: Ending
    ledger: Ledger
    proposer: FakeProposer

    def edits(self) -> tuple[EditRecord, ...]:
        return EditBoard(self.ledger).records()

    def refusals(self, kind: str = "candidate") -> list[tuple[int, str, str]]:
        """Return (turn, stage, reason) of everything that was refused."""
        rows = self.ledger.proposals(status="refused")
        return [(row.turn, row.stage, row.reason) for row in rows if row.kind == kind]

    def candidates(self) -> list[str]:
        """Return the titles of the candidates that were paid for."""
        return [
            self.ledger.program(evaluation.program_id).title
            for evaluation in self.ledger.evaluations(kind="candidate")
            if evaluation.program_id is not None
        ]


def play(
    folder: Path,
    proposer: FakeProposer,
    *,
    budget: int = 12,
    max_turns: int = 12,
    max_consecutive_refusals: int = 5,
    workers: int = 1,
    luck: float = 0.004,
    floor: float | None = None,
    error_map: Sequence[LayerError] = (),
) -> Played:
    """Walk a campaign of this world to its end.

    Args:
        folder: for its files.
        proposer: who answers.
        budget: evaluator calls.
        max_turns: of the recipe.
        max_consecutive_refusals: of the recipe.
        workers: evaluations side by side.
        luck: standard deviation of a chunk's loss.
        floor: noise floor of the campaign instead of the measured one.
        error_map: what is said of every artifact.
    """
    recipe = tiny_recipe(folder, budget=budget)
    limits = {"max_turns": max_turns, "max_consecutive_refusals": max_consecutive_refusals}
    recipe = recipe.model_copy(
        update={
            "campaign": recipe.campaign.model_copy(update=limits),
            "evaluation": recipe.evaluation.model_copy(update={"workers": workers}),
        }
    )
    ledger = Ledger.create(folder / "ledger.sqlite", new_campaign(budget=budget))
    progress = QuietProgress()
    evaluator = FakeEvaluator(luck, tuple(error_map))
    pool = EvaluatorPool(lambda: evaluator, size=workers)  # type: ignore[arg-type,return-value]
    with pool:
        desk = Desk(ledger, pool, progress)
        screener = Screener(ledger, desk, recipe.campaign.seed)
        noise = set_up(recipe, ledger, desk, screener, SEED, progress)
        if floor is not None:
            noise = dataclasses.replace(noise, floor=floor)
        asker = Asker(proposer, ledger, progress)
        campaign = assemble(recipe, ledger, desk, screener, asker, noise, progress)
        ending = campaign.run()
    return Played(ending=ending, ledger=ledger, proposer=proposer)


def proposal(
    edits: Iterable[tuple[str, str]],
    *,
    claims: Iterable[tuple[str, str]] = (),
    discharges: Iterable[str] = (),
    controls: Iterable[Control] = (),
) -> str:
    """Return a proposal of (search, replace) blocks that claims (mechanism, cause) pairs."""
    return write_proposal(
        ProposalReply(
            analysis="a",
            mechanisms=tuple(MechanismClaim(name=name, cause=cause, statement="s") for name, cause in claims),
            discharges=tuple(discharges),
            edits=tuple(EditBlock(search=search, replace=replace) for search, replace in edits),
            controls=tuple(controls),
        )
    )


def add(name: str, body: str, *, present: Sequence[str] = (), neutral: str = "    return 0.0") -> list[tuple[str, str]]:
    """Return the blocks that add a mechanism with this body to a program with those present."""
    code = f"def {name}(session, layer):\n{body}\n\n\ndef without_{name}(session, layer):\n{neutral}"
    names = (*present, name)
    return [
        (listed(present), f"{listed(names)}\n\n\n{code}"),
        ("    return total", f"    total += {name}(session, layer)\n    return total"),
    ]


def blocks_of(*edits: tuple[str, str]) -> str:
    """Return (search, replace) pairs as the text of blocks."""
    return render_blocks([EditBlock(search=search, replace=replace) for search, replace in edits])


def listed(names: Sequence[str]) -> str:
    """Return the line that declares mechanisms."""
    return f"MECHANISMS = ({', '.join(map(repr, names))}{',' if len(names) == 1 else ''})".replace("'", '"')


BOOST = proposal(add("boost", "    return 0.2"), claims=[("boost", "small")])
"""A first candidate: mechanism `boost` gains 0.2 nats through cause `small`."""


def explain_boost(
    *wishes: ConditionalEdit,
    small: tuple[float, float] = (0.0, 0.4),
    big: tuple[float, float] = (0.8, 1.2),
    **others: tuple[float, float],
) -> str:
    """Return an explanation of `BOOST`: rivals small and big, and a control that keeps a quarter of the gain.

    By default small is supported and big refuted; `others` are more rivals by what they predict.
    """
    names = {"small": small, "big": big} | others
    explanation = Explanation(
        hypotheses=tuple(Hypothesis(key=name, cause=name, mechanism="boost", statement="s") for name in names),
        controls=(keep_one_role("0.2"),),
        predictions=tuple(
            Prediction(hypothesis=name, control="quarter", low=low, high=high) for name, (low, high) in names.items()
        ),
    )
    return write_explanation(ExplanationReply(analysis="a", explanation=explanation, required_edits=wishes))


def keep_one_role(gain: str, role: str = "q", key: str = "quarter") -> Control:
    """Return the control of a program in which a line returns `gain`: it keeps that for the layers of one role."""
    edits = blocks_of((f"    return {gain}", f'    return {gain} if layer.role == "{role}" else 0.0'))
    return Control(key=key, kind="substitute", removes=("boost",), edits=edits)


def wish(kind: str = "refine", verdict: str = "supported", cause: str = "small", **changes: Any) -> ConditionalEdit:
    """Return a required edit of `boost` that waits for a verdict; by default to refine it with a part `finer`."""
    fields: dict[str, Any] = {"kind": kind, "mechanism": "boost", "cause": cause, "wording": "do it"}
    if kind == "refine" and "probe" not in changes:
        fields |= {"part": "finer", "probe": KnockoutProbe(mechanism="finer")}
    return ConditionalEdit(
        hypothesis=cause,
        verdict=verdict,  # type: ignore[arg-type]
        edit=RequiredEdit(**(fields | changes)),
    )
