"""Evaluations side by side: several evaluators of one subject, each with workers of its own.

The subject and the corpus are shared, because nothing changes them; what an evaluation changes is a copy. Jobs are
handed in and their results taken by one thread, which is also the only one that speaks with the ledger. With one
evaluator a job runs in the thread that hands it in.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from evaluators.results import EvaluationResult, Split

if TYPE_CHECKING:  # with torch, which whoever only reads a ledger need not load
    from evaluators.evaluator import Evaluator


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of `Evaluator.evaluate`."""

    source: str
    split: Split
    draw: int = 0
    seed: int = 0
    reference_artifact: str | None = None


class EvaluatorPool:
    """`size` evaluators; a context manager, used by one thread.

    Args:
        make: returns a new evaluator; called in the thread that made the pool, for the second and later ones when they
            are first needed.
        size: evaluations that run at a time, at least 1.
    """

    def __init__(self, make: Callable[[], Evaluator], size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} evaluators; it needs at least 1")
        self.size = size
        self.first = make()
        self._make = make
        self._evaluators = [self.first]
        self._free: queue.SimpleQueue[Evaluator] = queue.SimpleQueue()
        self._free.put(self.first)
        self._resources = contextlib.ExitStack()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._resources.enter_context(self.first)
        if self.size > 1:
            from evaluators.parallel import one_thread_per_operation

            # Scoring would otherwise split its operations over all cores in every thread at once.
            self._resources.enter_context(one_thread_per_operation())
            self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="evaluation")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for evaluator in self._evaluators:
            evaluator.abort()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._resources.close()

    def submit(self, job: Job) -> Future[EvaluationResult]:
        """Start an evaluation. At most `size` may be running; the caller keeps count.

        The future holds the result, or the error of the host. With one evaluator it is done when this returns.
        """
        if self._threads is None:
            future: Future[EvaluationResult] = Future()
            try:
                future.set_result(_run(self.first, job))
            except Exception as error:
                future.set_exception(error)
            return future
        if self._free.empty() and len(self._evaluators) < self.size:
            self._free.put(self._another())
        evaluator = self._free.get_nowait()
        return self._threads.submit(self._run_and_free, evaluator, job)

    def _another(self) -> Evaluator:
        evaluator = self._resources.enter_context(self._make())
        self._evaluators.append(evaluator)
        return evaluator

    def _run_and_free(self, evaluator: Evaluator, job: Job) -> EvaluationResult:
        try:
            return _run(evaluator, job)
        finally:
            self._free.put(evaluator)


def _run(evaluator: Evaluator, job: Job) -> EvaluationResult:
    return evaluator.evaluate(
        job.source, split=job.split, draw=job.draw, seed=job.seed, reference_artifact=job.reference_artifact
    )
