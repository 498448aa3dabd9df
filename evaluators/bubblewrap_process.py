"""Runs bubblewrap: starts a command in a sandbox whose options are given, inside its control group from the first moment."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from evaluators.cgroup import ControlGroup
from evaluators.errors import SandboxUnavailableError
from evaluators.sandbox_process import NamespaceSandbox

START_TIMEOUT_S: Final = 30.0


def start_bubblewrap(
    bwrap: Path,
    profile: Sequence[str],
    command: Sequence[str],
    *,
    keep_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    group: ControlGroup | None = None,
    filter_fd: int | None = None,
) -> NamespaceSandbox:
    """Start a command under bubblewrap and wait until its namespaces exist.

    The command begins only after bubblewrap's processes are in the control group, so that it is born there. `filter_fd`
    holds a seccomp filter and is closed here.

    Raises:
        SandboxUnavailableError: bubblewrap ended before; the message holds what it printed.
    """
    info_read, info_write = os.pipe()
    block_read, block_write = os.pipe()
    passed = [info_write, block_read, *([] if filter_fd is None else [filter_fd])]
    options = ["--info-fd", str(info_write), "--block-fd", str(block_read)]
    if filter_fd is not None:
        options += ["--seccomp", str(filter_fd)]
    process = None
    try:
        process = subprocess.Popen(
            [str(bwrap), *profile, *options, "--", *command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd="/",
            env={},
            pass_fds=[*passed, *keep_fds],
        )
        while passed:
            os.close(passed.pop())
        init_pid = int(_read_info(info_read)["child-pid"])
        # One byte: with 0 the kernel would still call the host's handler of core files, which runs as the superuser.
        _limit_core(init_pid)
        group = _join(group, (process.pid, init_pid))
        sandbox = NamespaceSandbox(process, init_pid=init_pid, temporary=("/tmp", "/dev/shm"), group=group)
        os.write(block_write, b"1")
        return sandbox
    except (ValueError, KeyError, OSError) as err:
        text = str(err)
        if process is not None:
            process.kill()
            text = process.communicate()[0].decode("utf-8", "replace").strip()[-500:] or text
        if group is not None:
            group.remove()
        raise SandboxUnavailableError(
            f"bubblewrap cannot make a sandbox: {text}; "
            "`quantforge doctor` says what is missing, `--sandbox none` runs programs without isolation"
        ) from err
    finally:
        for fd in (info_read, block_write, *passed):
            os.close(fd)


def _limit_core(pid: int) -> None:
    # A bubblewrap that is installed set-user-id is another user's process until it has dropped that.
    with contextlib.suppress(PermissionError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
        size = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
        resource.prlimit(pid, resource.RLIMIT_CORE, (size, size))


def _join(group: ControlGroup | None, pids: Sequence[int]) -> ControlGroup | None:
    """Move processes into the group; None where this user may make groups but not move processes into them."""
    if group is None:
        return None
    try:
        for pid in pids:
            group.add(pid)
    except PermissionError:
        group.remove()
        return None
    return group


def _read_info(fd: int) -> dict[str, Any]:
    """Read bubblewrap's description of the sandbox; it ends with the closing brace or the end of the pipe."""
    data = b""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not data.rstrip().endswith(b"}"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(fd, 4096) if ready else b""
        if not chunk:
            break
        data += chunk
    info: dict[str, Any] = json.loads(data)
    return info
