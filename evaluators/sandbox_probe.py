"""Trial runs in a real sandbox: what a program of the standard library can do there, and what the host sees of it.

Two runs. The first tries to reach, write and gain things, and prints what it was refused. The second takes memory and
starts processes until something stops it, while the host looks at it as it looks at a worker.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evaluators import seccomp
from evaluators.bubblewrap import BubblewrapIsolation, find_bubblewrap, rlimit_of_processes
from evaluators.bubblewrap_process import start_bubblewrap
from evaluators.cgroup import ControlGroup
from evaluators.errors import SandboxUnavailableError
from evaluators.limits import Limits
from evaluators.python_runtime import find_runtime
from evaluators.sandbox_process import NamespaceSandbox

PROBE_TIMEOUT_S: Final = 20.0
NAMESPACES: Final = ("user", "pid", "net", "ipc", "uts", "mnt", "cgroup")
GREEDY_LIMITS: Final = Limits(memory_bytes=96 << 20, processes=24)
GREEDY_BYTES: Final = 192 << 20
GREEDY_PROCESSES: Final = 60

_REACHING: Final = """
import ctypes, errno, os, resource, socket, sys
home, executable, *way = sys.argv[1:]
def attempt(action):
    try:
        action()
    except OSError:
        return "refused"
    return "allowed"
def connect():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        probe.connect(("192.0.2.1", 80))
def write(path):
    with open(path, "w") as file:
        file.write("x")
def call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError
def trace():
    ctypes.CDLL(None, use_errno=True).ptrace(16, 4_000_000, None, None)
    return ctypes.get_errno()
status = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
for name in ("user", "pid", "net", "ipc", "uts", "mnt", "cgroup"):
    print("namespace-" + name, os.readlink("/proc/self/ns/" + name))
folders = ("", "/usr/bin", os.path.dirname(executable), "/dev", "/quantforge")
written = [folder for folder in folders if attempt(lambda: write(folder + "/written")) == "allowed"]
print("system", "allowed" if written else "refused")
print("temporary", attempt(lambda: write("/tmp/written")))
print("kernel-settings", attempt(lambda: write("/proc/sys/kernel/hostname")))
print("nested-namespaces", attempt(lambda: call("unshare", 0x10000000)))
print("interfaces", ",".join(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line) or "none")
print("connection", attempt(connect))
print("socket", attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)))
print("vsock", attempt(lambda: socket.socket(40, socket.SOCK_STREAM)))
print("shared-memory", attempt(lambda: os.memfd_create("probe")))
# Of a process that is not there: what is let through finds nothing, what is refused does not look.
print("ptrace", "refused" if trace() == errno.EPERM else "allowed")
print("seccomp", status.get("Seccomp", "0").strip())
print("no-new-privileges", status.get("NoNewPrivs", "0").strip())
print("capabilities", ",".join(status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")))
print("identity", f"{os.getuid()}:{os.getgid()}")
print("core-limit", resource.getrlimit(resource.RLIMIT_CORE)[1])
print("home", "refused" if set(os.listdir(home) if os.path.isdir(home) else []) <= set(way) else "allowed")
print("processes", sum(name.isdigit() for name in os.listdir("/proc")))
print("environment", ",".join(sorted(os.environ)) or "none")
print("gpu-nodes", ",".join(sorted(name for name in os.listdir("/dev") if name.startswith("nvidia"))) or "none")
"""

_GREEDY: Final = """
import os, resource, sys, time
num_bytes, num_processes, limit = map(int, sys.argv[1:])
if limit > 0:
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
started = 0
for _ in range(num_processes):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        break
    started += 1
print(started, flush=True)
kept = bytearray(b"x") * num_bytes
time.sleep(60)
"""


@dataclass(frozen=True, kw_only=True)
class Greed:
    """What became of a run that takes more than it may.

    num_started: processes that it could start; None if it said nothing.
    seen_processes: most processes and threads that the host counted.
    seen_bytes: most memory that the host saw, or 0.
    killed_for_memory: whether the kernel ended it.
    group: its control group, None where this user cannot make one.
    """

    num_started: int | None
    seen_processes: int
    seen_bytes: int
    killed_for_memory: bool
    group: ControlGroup | None


def probe_reach(bwrap: Path, isolation: BubblewrapIsolation | None = None) -> dict[str, str]:
    """Return what a trial run was refused and what it saw, by name.

    Raises:
        SandboxUnavailableError: it did not start, or not end as it should.
    """
    isolation = BubblewrapIsolation() if isolation is None else isolation
    runtime = find_runtime()
    home = Path.home().resolve()
    needed = [*runtime.prefix_folders, *runtime.package_folders, runtime.executable]
    # An interpreter below the home folder leaves the way to it, and nothing beside it.
    way = [path.relative_to(home).parts[0] for path in needed if home in path.parents]
    arguments = [str(home), str(runtime.executable), *way]
    sandbox = _start(bwrap, isolation, _REACHING, arguments, Limits(), None)
    try:
        output, _ = sandbox.process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired as err:
        raise SandboxUnavailableError(f"a trial run in the sandbox did not end within {PROBE_TIMEOUT_S:g} s") from err
    finally:
        sandbox.end()
        sandbox.close()
    text = output.decode("utf-8", "replace")
    answers = dict(line.split(" ", 1) for line in text.splitlines() if line.count(" ") == 1)
    if answers.get("temporary") != "allowed":
        raise SandboxUnavailableError(f"a trial run in the sandbox failed: {text.strip()[-500:]}")
    return answers


def probe_greed(bwrap: Path) -> Greed:
    """Let a trial run take memory and processes, and look at it as the watch on a worker does.

    Raises:
        SandboxUnavailableError: it did not start.
    """
    group = ControlGroup.create(GREEDY_LIMITS)
    limit = rlimit_of_processes(GREEDY_LIMITS) or 0
    arguments = [str(GREEDY_BYTES), str(GREEDY_PROCESSES), str(limit)]
    sandbox = _start(bwrap, BubblewrapIsolation(), _GREEDY, arguments, GREEDY_LIMITS, group)
    processes = memory = 0
    try:
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        while time.monotonic() < deadline and sandbox.process.poll() is None:
            processes = max(processes, sandbox.num_tasks())
            memory = max(memory, sandbox.memory_bytes())
            if memory > GREEDY_LIMITS.memory_bytes or sandbox.is_memory_exceeded():
                break
            time.sleep(0.02)
        is_killed = sandbox.is_memory_exceeded()
    finally:
        sandbox.end()
        os.set_blocking(sandbox.output.fileno(), False)
        text = sandbox.output.read(1 << 16) or b""
        sandbox.close()
    words = text.split()
    return Greed(
        num_started=int(words[0]) if words and words[0].isdigit() else None,
        seen_processes=processes,
        seen_bytes=memory,
        killed_for_memory=is_killed,
        group=sandbox.group,
    )


def require_probe() -> None:
    """Run the first trial run.

    Raises:
        SandboxUnavailableError: no bubblewrap, no namespaces, or the run did not end as it should.
    """
    probe_reach(find_bubblewrap())


def _start(
    bwrap: Path,
    isolation: BubblewrapIsolation,
    script: str,
    arguments: list[str],
    limits: Limits,
    group: ControlGroup | None,
) -> NamespaceSandbox:
    runtime = find_runtime()
    return start_bubblewrap(
        bwrap,
        isolation.profile(runtime, limits=limits),
        [str(runtime.executable), "-I", "-S", "-B", "-c", script, *arguments],
        group=group,
        filter_fd=seccomp.filter_file(allow_shared=isolation.has_gpu()),
    )
