"""Starts a worker that has imported everything: bubblewrap makes the sandbox, a fork of the template moves in.

    1  bubblewrap makes namespaces, mounts and control group as for any worker, and starts a command in them that only waits
    2  a fork of the template enters the namespaces of that command, and confines itself as bubblewrap confines a command
    3  this process looks from outside whether it did: namespaces, capabilities, privileges, filter, user
    4  it is put into the control group, and may go on
    5  when it ends, the waiting command ends with the same status, and the sandbox with that

The pid of whoever speaks is taken from the kernel (SCM_CREDENTIALS), never from what is said.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaluators.bubblewrap_process import start_bubblewrap
from evaluators.cgroup import ControlGroup
from evaluators.joining import NAMESPACES
from evaluators.sandbox_process import NamespaceSandbox
from evaluators.template import Template, TemplateError, TemplateRefusedError

JOIN_TIMEOUT_S: Final = 60.0
WAITING: Final = "import os; os.write(0, b'1'); os._exit(int(os.read(0, 8) or 137))"
"""The first command of the sandbox: says that it is there, waits for the worker's exit status, and ends with it."""
_ESSENTIAL: Final = ("user", "mnt", "pid", "net", "ipc", "uts")
_CREDENTIALS: Final = struct.Struct("3i")
_CAPABILITIES: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_NO_CAPABILITIES: Final = "0" * 16


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What a forked worker is told: see `evaluators.template_process`."""

    environment: dict[str, str]
    scratch: str
    limits: dict[str, Any]
    threads: int
    filter_program: bytes | None

    def request(self, inside: str, namespaces: Sequence[str]) -> dict[str, Any]:
        """Return the request of a template for this worker."""
        return {
            "inside": inside,
            "namespaces": list(namespaces),
            "environment": self.environment,
            "scratch": self.scratch,
            "limits": self.limits,
            "threads": self.threads,
            "filter": None if self.filter_program is None else self.filter_program.hex(),
        }


def start_forked(
    bwrap: Path,
    profile: Sequence[str],
    template: Template,
    plan: WorkerPlan,
    connection: socket.socket,
    *,
    group: ControlGroup | None,
    filter_fd: int | None,
) -> NamespaceSandbox:
    """Start a sandbox and have a fork of the template move in.

    Raises:
        TemplateError: the template died; TemplateRefusedError: it never works here. Nothing is left of the sandbox.
        SandboxUnavailableError: bubblewrap cannot make a sandbox.
    """
    waiting, theirs = _credential_pair()
    command = [str(template.plan.runtime.executable), "-I", "-S", "-B", "-c", WAITING]
    with waiting, theirs:
        started = start_bubblewrap(bwrap, profile, command, stdin=theirs.fileno(), group=group, filter_fd=filter_fd)
        theirs.close()
        try:
            _, waiting_pid = _receive(waiting, "the waiting command of a sandbox")
            started.keeper = _move_in(started, waiting_pid, waiting, template, plan, connection)
        except BaseException as err:
            started.end()
            started.close()
            if isinstance(err, OSError | subprocess.SubprocessError):
                raise TemplateRefusedError(f"a worker cannot be forked into a sandbox: {err}") from err
            raise
    return started


def _move_in(
    sandbox: NamespaceSandbox,
    waiting_pid: int,
    waiting: socket.socket,
    template: Template,
    plan: WorkerPlan,
    connection: socket.socket,
) -> socket.socket:
    """Have a worker forked into a sandbox, look at it, and let it go on; return the socket that ends with its keeper."""
    request = plan.request(template.plan.inside, _own_namespaces(waiting_pid))
    control, theirs = _credential_pair()
    fds = [os.pidfd_open(waiting_pid)]
    try:
        # The pipe of the sandbox's output, opened for writing: what bubblewrap has as its own output.
        fds.append(os.open(f"/proc/self/fd/{sandbox.output.fileno()}", os.O_WRONLY | os.O_CLOEXEC))
        pidfd, output = fds
        view = f"/proc/{waiting_pid}/root"
        template.request(request, [pidfd, connection.fileno(), output, theirs.fileno(), waiting.fileno()], view=view)
        theirs.close()
        # The keeper's is the only other one, so that the sandbox ends with it.
        waiting.close()
        message, pid = _receive(control, "a forked worker")
        if "error" in message:
            raise TemplateRefusedError(f"a fork cannot enter a sandbox: {message['error']}")
        check_confined(pid, waiting_pid, has_filter=plan.filter_program is not None)
        sandbox.adopt(pid)
        control.send(b"1")
        return control
    except BaseException:
        control.close()
        raise
    finally:
        theirs.close()
        for fd in fds:
            os.close(fd)


def check_confined(pid: int, beside: int, *, has_filter: bool) -> None:
    """Check that a process is confined like the command that bubblewrap started.

    Raises:
        TemplateRefusedError: it is not.
    """
    wrong = [name for name in NAMESPACES if _namespace(pid, name) != _namespace(beside, name)]
    status = _status(pid)
    wrong += [key for key in _CAPABILITIES if status[key] != _NO_CAPABILITIES]
    expected = {"NoNewPrivs": "1", "Seccomp": "2" if has_filter else "0", "Threads": "1"}
    other = _status(beside)
    expected |= {key: other[key] for key in ("Uid", "Gid")}
    wrong += [key for key, value in expected.items() if status[key] != value]
    if wrong:
        raise TemplateRefusedError(f"a forked worker is not confined as it should be: {', '.join(wrong)}")


def _own_namespaces(pid: int) -> list[str]:
    """Return the namespaces that a sandbox has of its own.

    Raises:
        TemplateRefusedError: it shares one with this process that it must not share.
    """
    names = [name for name in NAMESPACES if _namespace(pid, name) != _namespace(os.getpid(), name)]
    shared = [name for name in _ESSENTIAL if name not in names]
    if shared:
        raise TemplateRefusedError(f"the sandbox has no {' and '.join(shared)} namespace of its own")
    return names


def _namespace(pid: int, name: str) -> int | None:
    path = f"/proc/{pid}/ns/{name}"
    return os.stat(path).st_ino if os.path.lexists(path) else None


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}


def _credential_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def _receive(connection: socket.socket, sender: str) -> tuple[dict[str, Any], int]:
    """Return a message, and the pid of the process that sent it.

    Raises:
        TemplateError: it ended or says nothing.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    if not select.select([connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TemplateError(f"{sender} says nothing for {JOIN_TIMEOUT_S:g} s")
    data, ancillary, _, _ = connection.recvmsg(1 << 12, socket.CMSG_SPACE(_CREDENTIALS.size))
    if not data:
        raise TemplateError(f"{sender} ended before it said anything")
    (pid,) = [_CREDENTIALS.unpack(content)[0] for _, kind, content in ancillary if kind == socket.SCM_CREDENTIALS]
    body = json.loads(data)
    return (body if isinstance(body, dict) else {}), pid
