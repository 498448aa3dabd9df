"""What a campaign found, as plain data: the one source for the terminal, the report and ``--json``.

Built from the ledger alone, so it works on a finished run, a running one and a copy on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forge.confirming import Confirmer, Declaration
from forge.explanation_tables import ObservationRow, observation_row
from forge.honesty import Honesty, account
from hypotheses.ledger import Budget, Evaluation, Ledger


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One program's score.

    damage = ln(ppl / ppl of full precision), nats per token; recovery = share of the seed's damage that is gone.
    """

    name: str
    program_id: str
    split: str
    nll: float
    perplexity: float
    damage: float | None
    recovery: float | None
    effective_bits: float | None
    contract_class: str | None


@dataclass(frozen=True, kw_only=True)
class DeclaredRow:
    """The program that the campaign stands for, and how it did when it was measured again.

    nll, parent_nll: on the confirm split, with another calibration draw, nats per token; the parent's stored artifact was scored
    beside it. effect: parent_nll - nll, with its standard error. All are None for the seed, which nothing chose.
    passed_over: titles of later incumbents that are not declared, each with the reason.
    """

    program: str
    program_id: str
    is_final: bool
    nll: float | None
    parent_nll: float | None
    effect: float | None
    standard_error: float | None
    passed_over: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class EditRow:
    """One required edit, where it stands and what its probes saw."""

    id: str
    kind: str
    mechanism: str
    cause: str
    wording: str
    blocking: bool
    state: str
    turn: int
    closed_turn: int | None
    program_id: str | None
    probes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RefusalRow:
    """A reply that was refused before any call."""

    turn: int
    attempt: int
    kind: str
    stage: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CallRow:
    """One evaluator call."""

    id: str
    turn: int | None
    kind: str
    program: str
    program_id: str
    split: str
    draw: int
    outcome: str
    nll: float | None
    effective_bits: float | None
    contract_class: str | None
    promoted: bool
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything that the surfaces show."""

    subject: str
    corpus_protocol: str
    contract: str
    proposer: str
    sandbox: str
    seed: int
    verdict_rules: tuple[str, ...]
    budget: Budget
    noise_floor: float | None
    draw_variance: float | None
    figures: tuple[Figure, ...]
    best_by_class: tuple[Figure, ...]
    declared: DeclaredRow | None
    observations: tuple[ObservationRow, ...]
    required_edits: tuple[EditRow, ...]
    refusals: tuple[RefusalRow, ...]
    calls: tuple[CallRow, ...]
    notes: tuple[tuple[int, str, str], ...]
    honesty: Honesty
    llm_calls: int
    llm_tokens: int
    llm_cost: float | None
    violations: tuple[str, ...]
    content_hash: str

    @property
    def best(self) -> Figure:
        """The figure of the best program on the search split: the declared one, or the incumbent of a running campaign."""
        return self.figures[-1]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["budget"]["free"] = self.budget.free
        return data


def summarize(ledger: Ledger) -> Summary:
    """Read a ledger into a `Summary`."""
    campaign = ledger.campaign()
    noise = ledger.noise()
    is_final = any(note.topic == "declared" for note in ledger.notes())
    confirmer = Confirmer.of(ledger)
    declaration = confirmer.declare() if confirmer is not None else None
    best = declaration.best.evaluation if declaration is not None and is_final else None
    spend = ledger.llm_spend()
    evaluations = ledger.evaluations()  # once: their evidence is long
    observations = tuple(observation_row(ledger, observation) for observation in ledger.observations())
    return Summary(
        subject=campaign.subject_name,
        corpus_protocol=campaign.corpus_protocol,
        contract=campaign.contract,
        proposer=campaign.proposer,
        sandbox=campaign.sandbox,
        seed=campaign.seed,
        verdict_rules=tuple(sorted({verdict.rule for verdict in ledger.verdicts()})),
        budget=ledger.budget(),
        noise_floor=noise[0].floor if noise else None,
        draw_variance=noise[0].draw_variance if noise else None,
        figures=tuple(_figures(ledger, evaluations, best)),
        best_by_class=tuple(_best_by_class(ledger, evaluations)),
        declared=_declared(declaration, is_final) if declaration else None,
        observations=observations,
        required_edits=tuple(_edits(ledger)),
        refusals=tuple(
            RefusalRow(turn=p.turn, attempt=p.attempt, kind=p.kind, stage=p.stage, reason=p.reason)
            for p in ledger.proposals(status="refused")
        ),
        calls=tuple(_calls(ledger, evaluations)),
        notes=tuple((note.turn, note.topic, note.text) for note in ledger.notes()),
        honesty=account(ledger),
        llm_calls=spend.num_calls,
        llm_tokens=spend.tokens_in + spend.tokens_out,
        llm_cost=spend.cost,
        violations=tuple(ledger.check_invariants()),
        content_hash=ledger.content_hash(),
    )


def _declared(declaration: Declaration, is_final: bool) -> DeclaredRow:
    confirmation = declaration.confirmation
    result = confirmation.evaluation.result if confirmation else None
    effect = confirmation.effect if confirmation else None
    reference = result.reference_chunk_nll if result else ()
    return DeclaredRow(
        program=declaration.best.program.title,
        program_id=declaration.best.program.id,
        is_final=is_final,
        nll=result.nll if result else None,
        parent_nll=math.fsum(reference) / len(reference) if reference else None,
        effect=effect.mean if effect else None,
        standard_error=effect.standard_error if effect else None,
        passed_over=declaration.passed_over,
    )


def _figures(ledger: Ledger, evaluations: Sequence[Evaluation], declared: Evaluation | None) -> list[Figure]:
    """Return full precision, the seed, an incumbent that is not declared, and last the best, on the search split."""
    full = next((e for e in evaluations if e.program_id is None and e.split == "search" and e.nll is not None), None)
    history = ledger.incumbents()
    if not history:
        return []
    figures = []
    if full is not None and full.nll is not None:
        figures.append(_figure("full precision", "", full, None, None))
    seed = ledger.evaluation(history[0].evaluation_id)
    incumbent = ledger.evaluation(history[-1].evaluation_id)
    best = declared or incumbent
    base = full.nll if full is not None else None

    def row(name: str, evaluation: Evaluation) -> Figure:
        program = ledger.program(evaluation.program_id or "")
        return _figure(name.format(program.title), program.id, evaluation, base, seed.nll)

    figures.append(row("{} (seed)", seed))
    if incumbent.id != best.id:
        figures.append(row("{} (not declared)", incumbent))
    figures.append(row("best: {}" if declared else "best so far: {}", best))
    return figures


def _best_by_class(ledger: Ledger, evaluations: Sequence[Evaluation]) -> list[Figure]:
    """Return the best candidate of each contract class other than the incumbent's, as it scored on the search split."""
    history = ledger.incumbents()
    if not history:
        return []
    seed, best = ledger.evaluation(history[0].evaluation_id), ledger.evaluation(history[-1].evaluation_id)
    found: dict[str, Evaluation] = {}
    full = None
    for evaluation in evaluations:
        result = evaluation.result
        if evaluation.split != "search" or result is None or evaluation.nll is None:
            continue
        if evaluation.program_id is None:
            full = evaluation.nll
        elif evaluation.kind == "candidate" and result.contract_class not in (None, _class_of(best)):
            other = found.get(str(result.contract_class))
            if other is None or other.nll is None or evaluation.nll < other.nll:
                found[str(result.contract_class)] = evaluation
    return [
        _figure(
            f"best {name}: {ledger.program(found[name].program_id or '').title}",
            found[name].program_id or "",
            found[name],
            full,
            seed.nll,
        )
        for name in ("folded", "online", "corrected")
        if name in found
    ]


def _class_of(evaluation: Evaluation) -> str | None:
    return evaluation.result.contract_class if evaluation.result else None


def _figure(name: str, program_id: str, evaluation: Evaluation, base: float | None, seed: float | None) -> Figure:
    nll = evaluation.nll
    assert nll is not None
    result = evaluation.result
    damage = nll - base if base is not None else None
    lost = seed - base if seed is not None and base is not None else None
    return Figure(
        name=name,
        program_id=program_id,
        split=evaluation.split,
        nll=nll,
        perplexity=math.exp(nll),
        damage=damage,
        recovery=1 - damage / lost if damage is not None and lost else None,
        effective_bits=result.effective_bits if result else None,
        contract_class=result.contract_class if result else None,
    )


def _edits(ledger: Ledger) -> list[EditRow]:
    rows = []
    for edit in ledger.required_edits():
        last = edit.history[-1]
        probes = [
            f"{'smoke run' if result.provisional else 'paid run'} of {result.program_id}: {result.status}, {result.detail}"
            for result in ledger.probe_results(target_id=edit.id)
        ]
        is_open = last.state in ("open", "attempted", "refused")
        rows.append(
            EditRow(
                id=edit.id,
                kind=edit.kind,
                mechanism=edit.mechanism,
                cause=edit.cause,
                wording=edit.text,
                blocking=edit.blocking,
                state="open" if is_open else last.state,
                turn=edit.turn,
                closed_turn=None if is_open else last.turn,
                program_id=last.program_id,
                probes=tuple(probes),
            )
        )
    return rows


def _calls(ledger: Ledger, evaluations: Sequence[Evaluation]) -> list[CallRow]:
    promoted = {incumbent.evaluation_id for incumbent in ledger.incumbents()}
    rows = []
    for evaluation in evaluations:
        result = evaluation.result
        program = ledger.program(evaluation.program_id) if evaluation.program_id else None
        rows.append(
            CallRow(
                id=evaluation.id,
                turn=evaluation.turn,
                kind=evaluation.kind,
                program=program.title if program else "full precision",
                program_id=program.id if program else "",
                split=evaluation.split,
                draw=evaluation.draw,
                outcome=result.outcome if result else evaluation.state,
                nll=evaluation.nll,
                effective_bits=result.effective_bits if result else None,
                contract_class=result.contract_class if result else None,
                promoted=evaluation.id in promoted,
                wall_s=result.wall_s if result else 0.0,
            )
        )
    return rows
