"""Drivers of `tests.crash_driver`, forked from a process that has imported what they need: imports take longer than a short run.

A fork ends as a process of its own does, through the end of the interpreter. What all forks of one process have in common is the
seed of string hashes, so there are two such processes, which take turns: runs that are compared differ in it.

    python -m tests.driver_forks FD
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from tests import crash_driver

ROOT = Path(__file__).resolve().parents[1]
MAX_REQUEST = 1 << 16
MAX_DESCRIPTORS = 1 << 12
LATE_IMPORTS = (
    "forge.cli.campaigns",
    "transformers.models.llama.modeling_llama",
)
"""What a driver would import on its way."""


class Nursery:
    """A process that forks drivers, until `end` or with this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.driver_forks", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
            )

    def fork(self, arguments: list[str]) -> Driver:
        """See `fork_driver`."""
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = [out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(self._connection, [json.dumps(arguments).encode()], fds)
        data, fds, _, _ = socket.recv_fds(ours, MAX_REQUEST, 1)
        assert data, "the process that forks drivers has died"
        (pidfd,) = fds
        return Driver(arguments, int(data), pidfd, ours, out, err)

    def end(self) -> None:
        """End the process; drivers that were forked live on."""
        self._connection.close()
        self.process.wait(timeout=60)


_nurseries: list[Nursery] = []


def start_nurseries() -> None:
    """Start the processes that fork drivers, unless they run."""
    if not _nurseries:
        _nurseries.extend((Nursery(), Nursery()))


def fork_driver(arguments: list[str]) -> Driver:
    """Start a driver in a session of its own, from the process whose turn it is."""
    start_nurseries()
    _nurseries.reverse()
    return _nurseries[0].fork(arguments)


def end_nurseries() -> None:
    """End the processes that fork drivers, so that whoever looks for what others have left finds nothing."""
    while _nurseries:
        _nurseries.pop().end()


class Driver:
    """A forked driver, with what of `subprocess.Popen` its callers need."""

    def __init__(self, arguments: list[str], pid: int, pidfd: int, status: socket.socket, *output: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._arguments = arguments
        self._pidfd = pidfd
        self._status = status
        self._output = output

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end, once; return what it printed to standard output and error."""
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._arguments, timeout)
        self.returncode = int(self._status.recv(MAX_REQUEST))
        self._status.close()
        os.close(self._pidfd)
        texts = []
        for file in self._output:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        out, err = texts
        return out, err

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def serve(connection: socket.socket) -> list[str] | None:
    """Fork a driver for each request; return its arguments in the fork, and None here when no more requests can come."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for fd, _ in poller.poll():
            if fd in running:
                pid, status = running.pop(fd)
                poller.unregister(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                status.send(str(code).encode())
                status.close()
                os.close(fd)
                continue
            data, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
            if not data:
                return None
            out, err, status_fd = fds
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.dup2(out, 1)
                os.dup2(err, 2)
                for held in (connection, *(status for _, status in running.values())):
                    held.detach()
                os.closerange(3, MAX_DESCRIPTORS)
                return list(json.loads(data))
            os.close(out)
            os.close(err)
            status = socket.socket(fileno=status_fd)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(status, [str(pid).encode()], [pidfd])
            running[pidfd] = (pid, status)
            poller.register(pidfd, select.POLLIN)


if __name__ == "__main__":
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    given = serve(socket.socket(fileno=int(sys.argv[1])))
    if given is not None:
        crash_driver.main(given)
