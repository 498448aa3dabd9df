"""Programs that take too much, or too long, in real workers: each ends within its limit with all that it started."""

from __future__ import annotations

import os
import socket
import time
from typing import IO

import pytest

from evaluators.bubblewrap import BubblewrapIsolation
from evaluators.errors import HostError
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox import NoIsolation
from evaluators.sandbox_process import Sandbox
from evaluators.template import Template
from evaluators.worker_host import WorkerHost
from evaluators.worker_process import OutputBuffer
from tests.worker_runs import LIMITS, WALL_S, command_lines, quick_first, run

pytestmark = pytest.mark.usefixtures("no_survivors")


LOOPS = {
    "python": "while True: pass",
    "sleep in C": "time.sleep(1000)",
    "ignored signals": (
        "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    ),
    "a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execv(sys.executable, ['survivor', '-ISc', 'import time; time.sleep(1000)'])\n    os._exit(0)\n"
        "time.sleep(1000)"
    ),
}


@pytest.mark.parametrize("case", quick_first(LOOPS, ("ignored signals", "a daemon")))
def test_endless_programs_end_on_time_with_all_they_started(case: str) -> None:
    limits = Limits(wall_s=1.0)
    with WorkerHost(BubblewrapIsolation(), limits) as host:
        report, _ = run(host, LOOPS[case])
        assert report.outcome is Outcome.TIMED_OUT, report
        assert report.wall_s < 1.0 + 5.0
        assert not [line for line in command_lines() if line.startswith(b"survivor")]


def test_a_daemon_does_not_outlive_a_program_that_finishes(host: WorkerHost) -> None:
    report, _ = run(host, DAEMON)
    assert report.is_finished, report
    assert not [line for line in command_lines() if b"survivor" in line]


DAEMON = "import subprocess\nsubprocess.Popen([sys.executable, '-ISc', {code!r}, 'survivor'], start_new_session=True)\n"
DAEMON = DAEMON.format(code="import time; time.sleep(1000)")
MEMORY = {
    "private": "kept = []\nwhile True: kept.append(bytearray(b'x') * 50_000_000)",
    "torch": "import torch\nkept = []\nwhile True: kept.append(torch.ones(10_000_000))",
    "children": (
        "for _ in range(5):\n    if os.fork() == 0:\n        data = bytearray(b'x') * 250_000_000\n"
        "        time.sleep(60)\ntime.sleep(60)"
    ),
    "messages": (
        "import mmap\nfor arena in (session._channel.incoming, session._channel.outgoing):\n"
        "    m = mmap.mmap(arena.fd, arena.num_bytes)\n"
        "    for k in range(0, 1 << 30, 4096): m[k] = 1\n    m.close()\ntime.sleep(60)"
    ),
}


@pytest.mark.parametrize("case", quick_first(MEMORY, ("torch", "messages")))
def test_memory_is_limited(host: WorkerHost, case: str) -> None:
    report, _ = run(host, MEMORY[case])
    assert report.outcome is Outcome.OUT_OF_MEMORY, report


def test_memory_that_hides_from_a_watchdog_cannot_be_had() -> None:
    with WorkerHost(BubblewrapIsolation(gpu=False), LIMITS) as host:
        report, server = run(host, HIDING)
    assert report.is_finished, report
    assert server.logged() == ["memfd", "anonymous", "zero", "shm", "tmp", "shmget"]


HIDING = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
for name, attempt in {
    "memfd": lambda: os.memfd_create("x"),
    "anonymous": lambda: mmap.mmap(-1, 4096),
    "zero": lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096),
    "shm": lambda: open("/dev/shm/x", "wb").write(bytes(1 << 26)) and open("/dev/shm/y", "wb").write(bytes(1 << 26)),
    "tmp": lambda: [open(f"/tmp/{k}", "wb").write(bytes(1 << 25)) for k in range(5)],
}.items():
    try:
        attempt()
    except OSError:
        session.log(name)
if libc.shmget(0, 4096, 0o1600) == -1:
    session.log("shmget")
"""


def test_a_fork_bomb_is_bounded(host: WorkerHost) -> None:
    begin = time.monotonic()
    report, _ = run(host, "while True:\n    try: os.fork()\n    except OSError: pass")
    assert report.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT), report
    assert time.monotonic() - begin < WALL_S + 15


def test_output_is_limited_and_kept_at_both_ends(host: WorkerHost) -> None:
    report, _ = run(host, "print('first')\nwhile True: print('x' * 1000)")
    assert report.outcome is Outcome.OUTPUT_LIMIT, report
    assert report.log_tail.startswith("first\n")
    assert "bytes left out" in report.log_tail
    assert len(report.log_tail) < 1 << 17


def test_a_program_that_takes_its_output_back_does_not_stop_the_watch() -> None:
    class Emptied:
        """A pipe whose content is gone once it has been announced."""

        def __init__(self, output: IO[bytes]) -> None:
            self.output, self.reader = output, os.open(f"/proc/self/fd/{output.fileno()}", os.O_RDONLY | os.O_NONBLOCK)

        def fileno(self) -> int:
            return self.output.fileno()

        def read(self, size: int) -> bytes | None:
            os.read(self.reader, size)
            return self.output.read(size)

        def close(self) -> None:
            os.close(self.reader)
            self.output.close()

    class Stealing(BubblewrapIsolation):
        def start(
            self, connection: socket.socket, *, limits: Limits, threads: int, template: Template | None = None
        ) -> Sandbox:
            sandbox = super().start(connection, limits=limits, threads=threads, template=template)
            sandbox.output = Emptied(sandbox.output)  # type: ignore[assignment]
            return sandbox

    with WorkerHost(Stealing(), Limits(wall_s=1.5)) as host:
        report, _ = run(host, "print('x', flush=True)\nwhile True: time.sleep(1)")
    assert report.outcome is Outcome.TIMED_OUT, report
    assert report.log_tail == ""


def test_output_of_a_program_cannot_drive_a_terminal(host: WorkerHost) -> None:
    report, _ = run(host, "print('\\x1b[2J\\x07tail')\nraise ValueError('\\x1b]0;title\\x07')")
    assert "\x1b" not in report.log_tail + report.reason
    assert "tail" in report.log_tail


@pytest.mark.parametrize("look", ["_look", "_look_at_memory"])
def test_a_watch_that_fails_ends_the_run_as_the_hosts_failure(look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerHost(BubblewrapIsolation(), LIMITS) as host:
        host.prestart()
        assert host._waiting is not None
        worker = host._waiting.result()

        def fail() -> None:
            raise RuntimeError("the watch has a fault")

        monkeypatch.setattr(worker, look, fail)
        with pytest.raises(HostError, match="the watch on a worker failed: the watch has a fault"):
            run(host, "time.sleep(100)")
        assert run(host, "pass")[0].is_finished


def test_calls_are_limited() -> None:
    with WorkerHost(BubblewrapIsolation(), Limits(calls=50)) as host:
        report, server = run(host, "while True: session.log('x')")
    assert report.outcome is Outcome.CONTRACT
    assert len(server.calls) == 50


def test_without_isolation_the_label_says_so_and_limits_hold() -> None:
    assert NoIsolation().name == "none"
    assert BubblewrapIsolation().name == "bubblewrap"
    with WorkerHost(NoIsolation(), Limits(wall_s=1.5, memory_bytes=1 << 30)) as host:
        report, server = run(host, "session.log(str(os.getpid() > 2) + str('OPENAI_API_KEY' in os.environ))")
        assert report.is_finished, report
        assert server.logged() == ["TrueFalse"]
        report, _ = run(host, DAEMON + "time.sleep(100)")
        assert report.outcome is Outcome.TIMED_OUT, report
        assert not [line for line in command_lines() if b"survivor" in line]
    with WorkerHost(NoIsolation(), Limits(wall_s=60, memory_bytes=1 << 30)) as host:
        report, _ = run(host, MEMORY["private"])
        assert report.outcome is Outcome.OUT_OF_MEMORY, report


def test_a_host_without_groups_of_its_own_still_counts_memory_and_processes(
    host: WorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("evaluators.cgroup.ControlGroup.add", refuse)
    with WorkerHost(BubblewrapIsolation(), LIMITS) as other:
        report, _ = run(
            other,
            "import threading\n"
            "for _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()\n"
            "time.sleep(9)",
        )
    assert report.outcome is Outcome.CRASHED, report
    assert "processes and threads" in report.reason or "can't start new thread" in report.reason


def test_output_buffer_keeps_both_ends() -> None:
    buffer = OutputBuffer(keep_bytes=4)
    for piece in (b"ab", b"cdef", b"gh", b"ijkl" * 10):
        buffer.add(piece)
    assert buffer.num_bytes == 48
    assert buffer.text() == "abcd\n... 40 bytes left out ...\nijkl"
