"""Starts workers, serves one program in each, and sorts how it ended.

A worker is used once. The next one is started while a program's artifact is being scored, so that it costs no waiting
time, and as a fork of a template where the isolation has one, so that torch is imported once and not in each. The thread
of `run` serves the calls; a supervisor thread drains the output and watches time and number of processes; another watches
memory; the kernel ends everything in the pid namespace with its first process.

What decides the outcome, in this order: the limit that was seen exceeded; an error of the server; an offence
against the protocol; what the worker said; how its process ended. A run counts as finished only when the worker said
``done`` after `quantize` returned; nothing is read from it afterwards, and it is killed at once.

A worker that never becomes ready is the host's failure, raised as an exception, and no program's outcome: programs
reach a worker only after that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

from torch import Tensor

from evaluators.errors import ContractError, HostError, ProgramError, SandboxUnavailableError
from evaluators.isolation import Isolation
from evaluators.limits import Limits
from evaluators.line_counts import check_line_hits
from evaluators.results import Outcome
from evaluators.template import POOL, Template
from evaluators.transport import Channel, ChannelClosedError, MessageTooLargeError, ProtocolError
from evaluators.wire import check_request
from evaluators.worker_process import Verdict, Worker

LOGGER = logging.getLogger(__name__)
MAX_SOURCE_BYTES: Final = 1 << 20
_FAILURES: Final = {
    "contract": Outcome.CONTRACT,
    "crashed": Outcome.CRASHED,
    "out_of_memory": Outcome.OUT_OF_MEMORY,
}


class Dispatcher(Protocol):
    """What serves the calls of a program: a `SessionServer`."""

    def dispatch(
        self, op: str, args: dict[str, Any], tensors: Sequence[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]: ...


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """How a run of a program ended.

    outcome: None when the program finished; scoring decides the rest. Otherwise the outcome to record.
    reason: for people; holds text of the program, so never evidence.
    log_tail: beginning and end of its stdout and stderr.
    wall_s: seconds from handing over the job to the end.
    line_hits: lines that ran by function, where they were counted; what the worker says, so never evidence.
    """

    outcome: Outcome | None
    reason: str
    log_tail: str
    wall_s: float
    line_hits: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        return self.outcome is None


class WorkerHost:
    """Runs programs in single-use workers; a context manager, used by one thread at a time.

    isolation: how workers are kept apart from the host.
    limits: of every run.
    threads: CPU threads of torch in a worker.
    """

    def __init__(self, isolation: Isolation, limits: Limits, *, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads} is not positive")
        self.isolation = isolation
        self.limits = limits
        self.threads = threads
        # One thread starts all workers: a worker dies with the thread that started it.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker-starter")
        self._waiting: Future[Worker] | None = None
        self._running: Worker | None = None
        self._template: Template | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prestart(self) -> None:
        """Start the next worker in the background, unless one is waiting."""
        if self._closed:
            raise HostError("this worker host is closed")
        if self._waiting is None:
            if self._template is None:
                self._template = self.isolation.acquire_template(threads=self.threads)
            self._waiting = self._starter.submit(Worker, self.isolation, self.limits, self.threads, self._template)

    def run(self, source: str, server: Dispatcher, *, seed: int = 0, count_lines: bool = False) -> WorkerReport:
        """Run one program against a server; the next worker is started before this returns.

        Args:
            source: the program's text.
            server: serves its calls, in this thread.
            seed: of torch's global generator in the worker; `Session.rng` has the server's own seed.
            count_lines: let the worker count the lines of the program that run, which slows it down.

        Raises:
            SandboxUnavailableError: this host cannot isolate.
            HostError: a worker does not start or does not die.
            Exception: what the server raises beyond `ProgramError` is an error of ours, and is raised as it is.
        """
        if len(source.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
            reason = f"the program is longer than {MAX_SOURCE_BYTES} bytes"
            return WorkerReport(outcome=Outcome.CRASHED, reason=reason, log_tail="", wall_s=0.0)
        worker = self._take_worker()
        start = time.monotonic()
        self._running = worker
        try:
            worker.begin()
            verdict, line_hits = self._serve(worker, source, server, seed, count_lines)
            wall_s = time.monotonic() - start
        finally:
            self._running = None
            worker.end()
            if not self._closed:
                self.prestart()
        if worker.fault is not None:
            raise HostError(f"the watch on a worker failed: {worker.fault}") from worker.fault
        if verdict is None and worker.output.num_bytes > self.limits.output_bytes:
            # Whether the supervisor saw it in time must not depend on chance.
            verdict = worker.output_verdict()
        outcome, reason = (None, "") if verdict is None else verdict
        return WorkerReport(
            outcome=outcome,
            reason=_printable(reason),
            log_tail=_printable(worker.output.text()),
            wall_s=wall_s,
            line_hits=line_hits,
        )

    def abort(self) -> None:
        """Kill the worker that runs a program now, from any thread; `run` returns soon, with a report that means nothing."""
        running = self._running
        if running is not None:
            running.kill()

    def close(self) -> None:
        """Kill the waiting worker; afterwards no process, thread or descriptor of this host is left."""
        self._closed = True
        waiting, self._waiting = self._waiting, None
        template, self._template = self._template, None
        if template is not None:
            # First, so that a worker that waits for its imports is given up.
            POOL.release(template)
        try:
            if waiting is not None and waiting.exception() is None:
                waiting.result().end()
        finally:
            self._starter.shutdown()

    def _take_worker(self) -> Worker:
        for attempt in (1, 2):
            self.prestart()
            waiting, self._waiting = self._waiting, None
            assert waiting is not None
            worker = waiting.result()
            try:
                if worker.is_alive():
                    worker.wait_ready()
                    return worker
            except (HostError, SandboxUnavailableError):
                if attempt == 2:
                    raise
            # A waiting worker that something else killed is replaced once; no program has been involved yet.
            LOGGER.warning("a waiting worker had died; starting another")
            worker.end()
        raise HostError("workers die before they are used")

    def _serve(
        self, worker: Worker, source: str, server: Dispatcher, seed: int, count_lines: bool
    ) -> tuple[Verdict | None, dict[str, int]]:
        """Serve calls until the end; return how it ended, None if the program finished, and its count of lines."""
        channel = worker.channel
        calls = 0
        try:
            text = source.encode("utf-8", "replace").decode()
            channel.send({"source": text, "seed": seed, "count_lines": count_lines})
            while True:
                body, tensors = channel.receive()
                if worker.verdict is not None:
                    return worker.verdict, {}
                if body.get("op") in ("done", "failed"):
                    return _end_verdict(body)
                op, args = check_request(body, len(tensors))
                calls += 1
                if calls > self.limits.calls:
                    return Verdict(Outcome.CONTRACT, f"made more than {self.limits.calls} session calls"), {}
                self._reply(channel, server, op, args, tensors)
        except ChannelClosedError:
            return worker.explain_silence(), {}
        except ProgramError as err:
            return worker.verdict or Verdict(err.outcome, str(err)), {}

    def _reply(
        self, channel: Channel, server: Dispatcher, op: str, args: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        try:
            reply, reply_tensors = server.dispatch(op, args, tensors)
            channel.send(reply, reply_tensors)
        except ContractError as err:
            channel.send({"error": {"kind": "contract", "message": str(err)}})
        except MessageTooLargeError as err:
            channel.send({"error": {"kind": "contract", "message": f"{op}: {err}; ask for fewer tokens"}})


def _printable(text: str) -> str:
    """Replace control characters, so that a program cannot speak to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _end_verdict(body: dict[str, Any]) -> tuple[Verdict | None, dict[str, int]]:
    args = body.get("args")
    if body.keys() == {"op", "args"} and isinstance(args, dict):
        if body["op"] == "done" and args.keys() <= {"line_hits"}:
            line_hits = check_line_hits(args.get("line_hits", {}))
            if line_hits is not None:
                return None, line_hits
        if body["op"] == "failed" and args.keys() == {"kind", "reason"}:
            kind, reason = args["kind"], args["reason"]
            if isinstance(kind, str) and kind in _FAILURES and isinstance(reason, str):
                return Verdict(_FAILURES[kind], reason[:4000]), {}
    raise ProtocolError("the worker announced its end in a malformed message")
