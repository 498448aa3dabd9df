"""The desk where evaluator calls are bought: reserve in the ledger, run, settle, in that order and nowhere else.

An evaluation that the ledger holds already is returned as it stands and costs nothing: that is how a resumed campaign walks
again over what it did before. A host error leaves the call reserved; the next process takes it over at no charge.

Several calls may run side by side, but one thread reserves and settles all of them, so that a call is never started twice
nor beyond the budget, and the record of a campaign with one worker has one order.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import lru_cache

from evaluators.pool import EvaluatorPool, Job
from evaluators.results import EvaluationResult, LayerError, Split
from forge import program_source
from forge.program_identity import mechanism_fingerprint, mechanism_shape
from forge.program_syntax import parse
from forge.progress import Progress
from hypotheses.ledger import (
    Evaluation,
    Ledger,
    NewErrorMap,
    NewEvaluation,
    NewScreening,
    Program,
    Settlement,
)
from hypotheses.ledger.records import EvaluationKind
from hypotheses.probes import ProbeEvidence

MAX_TRACES = 32
"""Runs on the whole subject that a desk remembers; a turn needs a handful, and their evidence is large."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one evaluator call is for. `why` is shown to the person who watches, and is not stored."""

    program: Program
    kind: EvaluationKind
    split: Split = "search"
    draw: int = 0
    seed: int = 0
    turn: int | None = None
    control_id: str | None = None
    observation_id: str | None = None
    reference_artifact: str | None = None
    why: str = ""


@dataclass
class _Running:
    """A reserved call. run: its future; None once `evaluation` is the settled one, or when it was found in the ledger."""

    call: Call
    evaluation: Evaluation
    run: Future[EvaluationResult] | None = None


class Desk:
    """Runs programs for one campaign and keeps the ledger in step."""

    def __init__(self, ledger: Ledger, evaluators: EvaluatorPool, progress: Progress) -> None:
        self._ledger = ledger
        self._evaluators = evaluators
        self._evaluator = evaluators.first
        self._progress = progress
        self._traces: dict[tuple[str, int, int], EvaluationResult] = {}

    def evaluate(self, call: Call) -> Evaluation:
        """Return the settled evaluation of a call, running it if the ledger does not hold it yet.

        Raises:
            BudgetExhausted: no call is left.
        """
        (evaluation,) = self.evaluate_all([call])
        return evaluation

    def evaluate_all(self, calls: Iterable[Call]) -> Iterator[Evaluation]:
        """Yield the settled evaluations of calls, in order; as many run at a time as there are evaluators.

        The next call is reserved only when the caller asks for more and an evaluator is free. Take all of them before another
        call is bought here.

        Raises:
            BudgetExhausted: no call is left for the next one; those before it were yielded.
            HostError: the host failed in one of the calls. Those that ran beside it are settled, so nothing paid for is lost.
        """
        waiting = iter(calls)
        window: deque[_Running] = deque()
        failure: Exception | None = None
        while True:
            while failure is None and len(window) < self._evaluators.size:
                call = next(waiting, None)
                if call is None:
                    break
                try:
                    window.append(self._start(call))
                except Exception as error:
                    failure = error
            while window and window[0].run is not None:
                failed = self._settle_finished(window)
                failure = failure or failed
            if not window:
                break
            yield window.popleft().evaluation
        if failure is not None:
            raise failure

    def _start(self, call: Call) -> _Running:
        evaluation = self._ledger.reserve_evaluation(
            NewEvaluation(
                kind=call.kind,
                split=call.split,
                program_id=call.program.id,
                draw=call.draw,
                seed=call.seed,
                turn=call.turn,
                control_id=call.control_id,
                observation_id=call.observation_id,
                reference_artifact=call.reference_artifact,
            )
        )
        if evaluation.is_settled and self._has_artifacts(evaluation):
            self._progress.replayed(evaluation)
            return _Running(call, evaluation)
        self._progress.evaluating(call.program, call.kind, call.split, call.draw, call.why)
        job = Job(
            source=call.program.source,
            split=call.split,
            draw=call.draw,
            seed=call.seed,
            reference_artifact=call.reference_artifact,
        )
        return _Running(call, evaluation, self._evaluators.submit(job))

    def _settle_finished(self, window: deque[_Running]) -> Exception | None:
        """Wait for at least one run and settle those that have ended; drop those in which the host failed."""
        wait([running.run for running in window if running.run is not None], return_when=FIRST_COMPLETED)
        failure: Exception | None = None
        for running in [running for running in window if running.run is not None and running.run.done()]:
            assert running.run is not None
            try:
                result = running.run.result()
            except Exception as error:
                failure = failure or error
                window.remove(running)
                continue
            running.run = None
            if not running.evaluation.is_settled:
                running.evaluation = self._ledger.settle_evaluation(running.evaluation.id, settlement(result))
            self._progress.spent(self._ledger.budget())
            self._progress.evaluated(running.call.program, running.evaluation)
        return failure

    def full_precision(self, split: Split) -> Evaluation:
        """Return the setup evaluation of the full-precision subject on `split`."""
        evaluation = self._ledger.reserve_evaluation(NewEvaluation(kind="setup", split=split, program_id=None))
        if not evaluation.is_settled:
            self._progress.spent(self._ledger.budget())
            self._progress.say(f"measuring the full-precision subject on the {split} split")
            chunk_nll = self._evaluator.full_precision_nll(split)
            evaluation = self._ledger.settle_evaluation(
                evaluation.id, Settlement(outcome="scored", chunk_nll=chunk_nll)
            )
        return evaluation

    def error_map(self, artifact_hash: str) -> tuple[LayerError, ...]:
        """Return the error map of an artifact, measured on gate text once and kept in the ledger."""
        stored = self._ledger.find_error_map(artifact_hash)
        if stored is None:
            self._progress.say("measuring the incumbent's error map on the gate split")
            rows = tuple(vars(row) for row in self._evaluator.error_map(artifact_hash))
            stored = self._ledger.record_error_map(NewErrorMap(artifact_hash=artifact_hash, rows=rows))
        return tuple(LayerError(**row) for row in stored.rows)

    def trace(self, program: Program, *, draw: int, seed: int, turn: int) -> dict[str, object] | None:
        """Run a program on the whole subject without scoring it: evidence for a probe, no evaluator call.

        It is run once for the proposal that was accepted in `turn`, and kept in the ledger beside that proposal. None when it
        does not run to its end.
        """
        accepted = self._ledger.proposals(turn=turn, status="accepted")
        proposal = next(proposal for proposal in accepted if proposal.kind == "candidate")
        stored = self._ledger.find_screening(program.id, proposal.id)
        if stored is None:
            result = self.look(program, draw=draw, seed=seed)
            stored = self._ledger.record_screening(
                NewScreening(
                    program_id=program.id,
                    proposal_id=proposal.id,
                    passed=result.outcome.is_scored,
                    smoke_outcome=result.outcome.value,
                    reason=result.reason,
                    evidence=result.evidence.to_json(),
                    checks=({"run": "trace", "draw": draw, "seed": seed},),
                )
            )
        return stored.evidence if stored.passed else None

    def look(self, program: Program, *, draw: int, seed: int) -> EvaluationResult:
        """Run a program on the whole subject without scoring it; the last few are remembered. No evaluator call.

        Nothing is kept in the ledger: a draft that waits for its screening has no accepted proposal yet to keep it beside.
        """
        key = (program.source, draw, seed)
        if key not in self._traces:
            self._progress.say(f"tracing {program.title} for a probe")
            while len(self._traces) >= MAX_TRACES:
                del self._traces[next(iter(self._traces))]
            self._traces[key] = self._evaluator.trace(program.source, draw=draw, seed=seed)
        return self._traces[key]

    def smoke(self, source: str, *, seed: int = 0) -> EvaluationResult:
        """Run a program on the truncated subject: no score, no evaluator call."""
        return self._evaluator.smoke(source, seed=seed)

    def _has_artifacts(self, evaluation: Evaluation) -> bool:
        """Whether the artifact of a stored evaluation is still on disk; a deleted one is made again at no charge."""
        assert evaluation.result is not None
        artifact = evaluation.result.artifact_hash
        return artifact is None or self._evaluator.has_artifact(artifact)


def settlement(result: EvaluationResult) -> Settlement:
    """Return what the ledger keeps of a result."""
    return Settlement(
        outcome=result.outcome.value,
        reason=result.reason,
        chunk_nll=result.chunk_nll,
        reference_chunk_nll=result.reference_chunk_nll,
        tokens_per_chunk=result.tokens_per_chunk,
        contract=result.contract,
        contract_class=result.contract_class,
        effective_bits=result.effective_bits,
        artifact_hash=result.artifact_hash,
        evidence=result.evidence.to_json(),
        metered_tokens=result.metered_tokens,
        route=result.route,
        log_tail=result.program_log,
        wall_s=result.wall_s,
        device=result.device,
        versions=result.versions,
    )


def probe_evidence(evidence: dict[str, object], source: str) -> ProbeEvidence:
    """Return what a probe may look at: trusted evidence of a run, and names defined in its source."""
    events = evidence.get("events", ())
    layers = evidence.get("layers", {})
    left_out = evidence.get("events_left_out", 0)
    line_hits = evidence.get("line_hits", {})
    assert isinstance(events, list | tuple)
    assert isinstance(layers, dict)
    assert isinstance(line_hits, dict)
    names = function_names(source)
    return ProbeEvidence(
        events=tuple(events),
        layers=layers,
        mechanisms=program_source.mechanisms(source),
        source_names=frozenset(names),
        fingerprints={name: mechanism_fingerprint(source, name) for name in names},
        shapes={name: mechanism_shape(source, name) for name in names},
        line_hits=line_hits,
        events_left_out=left_out if isinstance(left_out, int) else 0,
    )


@lru_cache(maxsize=1024)
def function_names(source: str) -> tuple[str, ...]:
    """Return the names of the functions defined at the top level of a program."""
    return tuple(node.name for node in parse(source).body if isinstance(node, ast.FunctionDef))
