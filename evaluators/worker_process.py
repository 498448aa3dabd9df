"""One started worker: its channel, its output, and the watch on its limits.

The supervisor thread drains the output and looks at time and number of processes; another looks at memory, because
reading exact sizes waits for locks that a busy program can hold for long. Whoever sees a limit exceeded kills the
worker and closes the channel, which wakes the thread that serves its calls.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from evaluators.errors import HostError, SandboxUnavailableError
from evaluators.isolation import Isolation
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox_process import Sandbox
from evaluators.template import Template
from evaluators.transport import ChannelClosedError, ProtocolError, open_channel

READY_TIMEOUT_S: Final = 120.0
LOOK_INTERVAL_S: Final = 0.05
SILENCE_TIMEOUT_S: Final = 2.0
KEEP_OUTPUT_BYTES: Final = 32 << 10


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

    def __init__(self, isolation: Isolation, limits: Limits, threads: int, template: Template | None = None) -> None:
        self._limits = limits
        self.output = OutputBuffer()
        self.verdict: Verdict | None = None
        self.fault: Exception | None = None
        self.ready = False
        self._deadline = math.inf
        self._watched = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.channel, inherited = open_channel()
        try:
            with inherited:
                self.sandbox: Sandbox = isolation.start(inherited, limits=limits, threads=threads, template=template)
        except BaseException:
            self.channel.close()
            raise
        # A program can read its own output back, between our learning that there is some and our reading it.
        os.set_blocking(self.sandbox.output.fileno(), False)
        self._threads = [threading.Thread(target=self._guarded, args=(self._supervise,), name="worker-supervisor")]
        self._threads[0].daemon = True
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
        self._threads.append(
            threading.Thread(target=self._guarded, args=(self._watch_memory,), name="worker-memory", daemon=True)
        )
        self._threads[-1].start()

    def kill(self) -> None:
        """Kill the worker and wake the thread that serves it, which goes on to `end`; from any thread."""
        self.sandbox.process.kill()
        self.channel.shutdown()

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
        if self.fault is not None:
            return Verdict(Outcome.CRASHED, "the watch on the worker failed")
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

    def _guarded(self, watch: Callable[[], None]) -> None:
        """Keep a watch; a fault of its own ends the worker, so that nothing runs unwatched."""
        try:
            watch()
        except Exception as error:
            if not self._ended.is_set():
                self.fault = error
                self.kill()

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
        self.kill()

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
        """Take what is in the pipe; False when its other end is closed."""
        data: bytes | None = self.sandbox.output.read(1 << 16)
        if data is None:
            return True
        self.output.add(data)
        return bool(data)

    def _drain_rest(self) -> None:
        # Bounded, because without isolation a process that escaped may go on writing.
        for _ in range(64):
            if not select.select([self.sandbox.output], [], [], 0)[0] or not self._drain():
                return
