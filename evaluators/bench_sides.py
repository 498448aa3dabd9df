"""The sides that `evaluators.bench` compares: evaluators that differ only in where a program runs, with stopwatches."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from evaluators import evaluator as evaluator_module
from evaluators.artifact_store import ArtifactStore
from evaluators.bubblewrap import BubblewrapIsolation
from evaluators.contract import Contract
from evaluators.corpora import Corpus
from evaluators.evaluator import Evaluator
from evaluators.isolation import NoIsolation
from evaluators.limits import GIB, Limits
from evaluators.local_session import LocalSession
from evaluators.results import EvaluationResult
from evaluators.sandbox_process import NamespaceSandbox, read_cpu_seconds
from evaluators.session_server import SessionServer
from evaluators.subjects import Subject
from evaluators.transport import Arena
from evaluators.worker_host import Dispatcher, WorkerHost, WorkerReport
from evaluators.worker_process import Worker

IN_PROCESS: Final = "in process"
TEMPLATE: Final = "template"
DIRECT: Final = "direct"
SIDES: Final = (IN_PROCESS, TEMPLATE, DIRECT)
LIMITS: Final = Limits(wall_s=3600.0, memory_bytes=8 * GIB)

STAGES: Final[dict[str, tuple[tuple[Any, str], ...]]] = {
    "copying the subject": ((SessionServer, "__init__"),),
    "waiting for a worker": ((WorkerHost, "_take_worker"),),
    "beside the rest: starting workers": ((Worker, "__init__"),),
    "session calls": tuple(
        (SessionServer, name)
        for name in ("weight", "inputs", "second_moment", "output_error", "gate_loss", "fold", "install", "log")
    ),
    "copying tensors, on this side": ((Arena, "write"), (Arena, "read")),
    "ending workers": ((Worker, "end"),),
    "artifact: making and writing": ((SessionServer, "finish"), (ArtifactStore, "keep")),
    "artifact: checks": ((evaluator_module, "check_artifact"),),
    "artifact: evidence": ((evaluator_module, "collect_evidence"),),
    "scoring": ((Evaluator, "_score_artifact"),),
}
"""The functions that are a stage of an evaluation; what remains is the programs' own work and the messages."""


class Side:
    """An evaluator with its stopwatches; `stages_s` holds seconds by stage."""

    def __init__(self, name: str, evaluator: Evaluator) -> None:
        self.name = name
        self.stages_s: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._evaluator = evaluator
        self._ended_workers_s = 0.0

    def evaluate(self, source: str) -> EvaluationResult:
        """Evaluate a program on the search split."""
        with self._stopwatches():
            return self._evaluator.evaluate(source, split="search")

    def settle(self) -> None:
        """Wait until the next worker is ready."""
        waiting = self._evaluator._host._waiting
        if waiting is not None:
            waiting.result().wait_ready()

    def cpu_seconds(self) -> float:
        """Return the CPU time used so far; a difference is that of this side while the others rest."""
        total = self._ended_workers_s
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += usage.ru_utime + usage.ru_stime
        host = self._evaluator._host
        if host._waiting is not None:
            total += _worker_cpu_seconds(host._waiting.result())
        if host._template is not None and host._template.pid is not None:
            total += read_cpu_seconds(f"/proc/{host._template.pid}")
        return total

    @contextmanager
    def _stopwatches(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage, functions in STAGES.items():
                for owner, name in functions:
                    timed = self._timed(stage, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            if function is _END:
                self._ended_workers_s += _worker_cpu_seconds(arguments[0])
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.stages_s[stage] += time.perf_counter() - start

        return timed


class InProcessHost(WorkerHost):
    """Runs trusted programs in this process, as a worker would run them: one thread for the program itself."""

    def __init__(self) -> None:
        super().__init__(NoIsolation(), LIMITS)

    def prestart(self) -> None:
        """There is nothing to start."""

    def run(self, source: str, server: Dispatcher, *, seed: int = 0, count_lines: bool = False) -> WorkerReport:
        """See `WorkerHost.run`."""
        assert isinstance(server, SessionServer)
        start = time.monotonic()
        before = torch.get_num_threads()
        torch.manual_seed(seed)
        torch.set_num_threads(self.threads)
        try:
            namespace: dict[str, Any] = {"__name__": "program"}
            exec(compile(source, "program.py", "exec", dont_inherit=True), namespace)
            namespace["quantize"](LocalSession(_WithThreads(server, outside=before, inside=self.threads)))  # type: ignore[arg-type]
        finally:
            torch.set_num_threads(before)
        return WorkerReport(outcome=None, reason="", log_tail="", wall_s=time.monotonic() - start)


class _WithThreads:
    """A server whose methods use the threads of the evaluator, called from a program that has those of a worker."""

    def __init__(self, server: SessionServer, *, outside: int, inside: int) -> None:
        self._server = server
        self._outside = outside
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._server, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            torch.set_num_threads(self._outside)
            try:
                return value(*arguments, **options)
            finally:
                torch.set_num_threads(self._inside)

        return call


class _WithoutTemplate(BubblewrapIsolation):
    def acquire_template(self, *, threads: int) -> Any:
        """Return nothing: every worker starts for itself."""
        return None


@contextmanager
def open_side(
    name: str, subject: Subject, corpus: Corpus, contract: Contract, folder: Path, calibration_chunks: int
) -> Iterator[Side]:
    """Yield a side by its name; nothing is started before its first evaluation."""
    isolation = _WithoutTemplate() if name == DIRECT else BubblewrapIsolation()
    evaluator = Evaluator(subject, corpus, contract, isolation, LIMITS, folder, calibration_chunks=calibration_chunks)
    if name == IN_PROCESS:
        evaluator._host = InProcessHost()
    try:
        yield Side(name, evaluator)
    finally:
        evaluator.close()


_END: Final = Worker.end


def _worker_cpu_seconds(worker: Worker) -> float:
    sandbox = worker.sandbox
    return sandbox.cpu_seconds() if isinstance(sandbox, NamespaceSandbox) else 0.0
