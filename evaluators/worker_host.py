"""Starts workers, serves one program in each, and sorts how it ended.

A worker is used once. The next one is started while a program's artifact is being scored, so that importing torch
costs no waiting time. The thread of `run` serves the calls; a supervisor thread drains the output and watches time
and number of processes; another watches memory; the kernel ends everything in the pid namespace with its first
process.

What decides the outcome, in this order: the limit that was seen exceeded; an error of the server; an offence
against the protocol; what the worker said; how its process ended. A run counts as finished only when the worker said
``done`` after `quantize` returned; nothing is read from it afterwards, and it is killed at once.

A worker that never becomes ready is the host's failure, raised as an exception, and no program's outcome: programs
reach a worker only after that.
"""

from __future__ import annotations

import logging
import math
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from torch import Tensor

from evaluators.errors import ContractError, HostError, ProgramError, SandboxUnavailableError
from evaluators.isolation import Isolation
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox_process import Sandbox
from evaluators.transport import Channel, ChannelClosedError, MessageTooLargeError, ProtocolError, open_channel
from evaluators.wire import check_request

LOGGER = logging.getLogger(__name__)
READY_TIMEOUT_S: Final = 120.0
LOOK_INTERVAL_S: Final = 0.05
SILENCE_TIMEOUT_S: Final = 2.0
KEEP_OUTPUT_BYTES: Final = 32 << 10
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
    """

    outcome: Outcome | None
    reason: str
    log_tail: str
    wall_s: float

    @property
    def is_finished(self) -> bool:
        return self.outcome is None


class Verdict(NamedTuple):
    """An outcome with its reason."""

    outcome: Outcome
    reason: str


class OutputBuffer:
    """Beginning and end of a stream, and how long it was."""

    def __init__(self, keep_bytes: int = KEEP_OUTPUT_BYTES) -> None:
        self._keep = keep_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        """Append bytes of the stream."""
        self.num_bytes += len(data)
        room = self._keep - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._keep:
            del self._tail[: -self._keep]

    def text(self) -> str:
        """Return what was kept, with a mark where something is missing."""
        tail = self._tail[-self._keep :]
        missing = self.num_bytes - len(self._head) - len(tail)
        gap = f"\n... {missing} bytes left out ...\n".encode() if missing > 0 else b""
        return (bytes(self._head) + gap + bytes(tail)).decode("utf-8", "replace")


class Worker:
    """One started worker with its channel and its supervisor thread."""

    def __init__(self, isolation: Isolation, limits: Limits, threads: int) -> None:
        self._limits = limits
        self.output = OutputBuffer()
        self.verdict: Verdict | None = None
        self.ready = False
        self._deadline = math.inf
        self._watched = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.channel, inherited = open_channel()
        try:
            with inherited:
                self.sandbox: Sandbox = isolation.start(inherited, limits=limits, threads=threads)
        except BaseException:
            self.channel.close()
            raise
        self._threads = [threading.Thread(target=self._supervise, name="worker-supervisor", daemon=True)]
        self._threads[0].start()

    def wait_ready(self) -> None:
        """Wait until the worker has imported everything.

        Raises:
            HostError: it ended or took too long before any program was involved.
        """
        if self.ready:
            return
        self._deadline = time.monotonic() + READY_TIMEOUT_S
        try:
            body = self.channel.receive().body
        except (ChannelClosedError, ProtocolError) as err:
            self.end()
            text = self.output.text().strip()[-1500:]
            message = f"a worker did not start: {text or 'it printed nothing'}"
            if "bwrap:" in text:
                raise SandboxUnavailableError(f"{message}; `quantforge doctor` says what is missing") from err
            raise HostError(message) from err
        if body.get("op") != "ready":
            self.end()
            raise HostError(f"a worker started with {str(body)[:80]!r}")
        self.ready = True
        self._deadline = math.inf

    def is_alive(self) -> bool:
        return self.sandbox.process.poll() is None

    def begin(self) -> None:
        """Start the clock and the watch on memory and processes."""
        self._deadline = time.monotonic() + self._limits.wall_s
        self._watched = True
        self._threads.append(threading.Thread(target=self._watch_memory, name="worker-memory", daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        """Kill the worker with all it started, and release what it held."""
        if self._ended.is_set():
            return
        self._ended.set()
        self.channel.shutdown()
        try:
            self.sandbox.end()
        finally:
            for thread in self._threads:
                thread.join()
            self._drain_rest()
            self.channel.close()
            self.sandbox.close()

    def explain_silence(self) -> Verdict:
        """Return why the worker's end of the channel closed without a word; waits a moment for its process to end."""
        try:
            status = self.sandbox.process.wait(timeout=SILENCE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self.verdict or Verdict(Outcome.CONTRACT, "the program closed its session and went on running")
        # The kernel may have enforced a limit between two looks of the supervisor.
        verdict = self.verdict or self._look() or self._look_at_memory()
        if verdict is not None:
            return verdict
        number = -status if status < 0 else status - 128
        if number in {s.value for s in signal.Signals}:
            name = signal.Signals(number).name
            by = " (by itself, or by the system when memory ran out)" if name == "SIGKILL" else ""
            return Verdict(Outcome.CRASHED, f"killed by {name}{by}")
        if status:
            return Verdict(Outcome.CRASHED, f"the process exited with status {status} before quantize returned")
        return Verdict(Outcome.CONTRACT, "the process exited before quantize returned")

    def output_verdict(self) -> Verdict:
        limit = self._limits.output_bytes
        return Verdict(Outcome.OUTPUT_LIMIT, f"wrote more than {limit} bytes to stdout and stderr")

    def _supervise(self) -> None:
        output = self.sandbox.output.fileno()
        is_open = True
        while not self._ended.is_set():
            if is_open:
                readable, _, _ = select.select([output], [], [], LOOK_INTERVAL_S)
                is_open = not readable or self._drain()
            else:
                self._ended.wait(LOOK_INTERVAL_S)
            verdict = self._look()
            if verdict is not None:
                self._convict(verdict)
                return

    def _watch_memory(self) -> None:
        # Apart from the supervisor: reading exact sizes waits for locks that a busy program can hold for long.
        while not self._ended.wait(LOOK_INTERVAL_S):
            verdict = self._look_at_memory()
            if verdict is not None:
                self._convict(verdict)
                return

    def _convict(self, verdict: Verdict) -> None:
        """Kill the worker for a limit; the first verdict stands."""
        with self._lock:
            if self.verdict is None and not self._ended.is_set():
                self.verdict = verdict
        self.sandbox.process.kill()
        self.channel.shutdown()

    def _look(self) -> Verdict | None:
        limits = self._limits
        if self.output.num_bytes > limits.output_bytes:
            return self.output_verdict()
        if time.monotonic() > self._deadline:
            return Verdict(Outcome.TIMED_OUT, f"not finished after {limits.wall_s:g} s")
        if not self._watched:
            return None
        if self.sandbox.is_process_limit_hit() or self.sandbox.num_tasks() > limits.processes:
            return Verdict(Outcome.CRASHED, f"ran more than {limits.processes} processes and threads")
        return None

    def _look_at_memory(self) -> Verdict | None:
        limit = self._limits.memory_bytes
        verdict = Verdict(Outcome.OUT_OF_MEMORY, f"used more than {limit} bytes of memory")
        if self.sandbox.is_memory_exceeded():
            return verdict
        in_flight = self.channel.used_bytes()
        if self.sandbox.memory_bound() + in_flight <= limit:
            return None
        return verdict if self.sandbox.memory_bytes() + in_flight > limit else None

    def _drain(self) -> bool:
        """Take what is in the pipe, waiting for something; False when its other end is closed."""
        data = self.sandbox.output.read(1 << 16)
        self.output.add(data)
        return bool(data)

    def _drain_rest(self) -> None:
        # Bounded, because without isolation a process that escaped may go on writing.
        for _ in range(64):
            if not select.select([self.sandbox.output], [], [], 0)[0] or not self._drain():
                return


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
            self._waiting = self._starter.submit(Worker, self.isolation, self.limits, self.threads)

    def run(self, source: str, server: Dispatcher, *, seed: int = 0) -> WorkerReport:
        """Run one program against a server; the next worker is started before this returns.

        Args:
            source: the program's text.
            server: serves its calls, in this thread.
            seed: of torch's global generator in the worker; `Session.rng` has the server's own seed.

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
        try:
            worker.begin()
            verdict = self._serve(worker, source, server, seed)
            wall_s = time.monotonic() - start
        finally:
            worker.end()
            if not self._closed:
                self.prestart()
        if verdict is None and worker.output.num_bytes > self.limits.output_bytes:
            # Whether the supervisor saw it in time must not depend on chance.
            verdict = worker.output_verdict()
        outcome, reason = (None, "") if verdict is None else verdict
        return WorkerReport(
            outcome=outcome, reason=_printable(reason), log_tail=_printable(worker.output.text()), wall_s=wall_s
        )

    def close(self) -> None:
        """Kill the waiting worker; afterwards no process, thread or descriptor of this host is left."""
        self._closed = True
        waiting, self._waiting = self._waiting, None
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

    def _serve(self, worker: Worker, source: str, server: Dispatcher, seed: int) -> Verdict | None:
        """Serve calls until the end; None means finished."""
        channel = worker.channel
        calls = 0
        try:
            channel.send({"source": source.encode("utf-8", "replace").decode(), "seed": seed})
            while True:
                body, tensors = channel.receive()
                if worker.verdict is not None:
                    return worker.verdict
                if body.get("op") in ("done", "failed"):
                    return _end_verdict(body)
                op, args = check_request(body, len(tensors))
                calls += 1
                if calls > self.limits.calls:
                    return Verdict(Outcome.CONTRACT, f"made more than {self.limits.calls} session calls")
                self._reply(channel, server, op, args, tensors)
        except ChannelClosedError:
            return worker.explain_silence()
        except ProgramError as err:
            return worker.verdict or Verdict(err.outcome, str(err))

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


def _end_verdict(body: dict[str, Any]) -> Verdict | None:
    args = body.get("args")
    if body == {"op": "done", "args": {}}:
        return None
    if isinstance(args, dict) and args.keys() == {"kind", "reason"}:
        kind, reason = args["kind"], args["reason"]
        if isinstance(kind, str) and kind in _FAILURES and isinstance(reason, str):
            return Verdict(_FAILURES[kind], reason[:4000])
    raise ProtocolError("the worker announced its end in a malformed message")
