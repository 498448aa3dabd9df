"""Limits that the kernel enforces on all processes of a worker together, where this user may make control groups.

Version 2 (memory and processes) where a group above ours is writable and passes the controllers down: for the
superuser, and for users whose session manager delegates. Version 1 only for the number of processes, where its
hierarchy is writable: the superuser is exempt from RLIMIT_NPROC, and a watchdog that looks twenty times a second
loses against a fork bomb. Elsewhere `ControlGroup.create` returns None and the watchdog stands alone.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evaluators.limits import Limits

REMOVE_TIMEOUT_S: Final = 2.0
SYSTEM: Final = Path("/")
PREFIX: Final = "quantforge-"
OWN_PROCESSES: Final = 4
"""Processes of bubblewrap that count beside the program's."""


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """A control group for one worker: the folder, and which limits it enforces."""

    folder: Path
    limits_memory: bool

    @classmethod
    def create(cls, limits: Limits, *, system: Path = SYSTEM) -> ControlGroup | None:
        """Make a group with these limits, or return None where this user cannot."""
        for parent in _unified_parents(system):
            settings = {
                "pids.max": str(limits.processes + OWN_PROCESSES),
                "memory.max": str(limits.memory_bytes),
                "memory.oom.group": "1",
            }
            # Absent where the kernel has no swap accounting.
            optional = {"memory.swap.max": "0"}
            if folder := _make(parent, settings, optional):
                return cls(folder=folder, limits_memory=True)
        for parent in _pids_parents(system):
            if folder := _make(parent, {"pids.max": str(limits.processes + OWN_PROCESSES)}, {}):
                return cls(folder=folder, limits_memory=False)
        return None

    def add(self, pid: int) -> None:
        """Move a process into the group; what it starts later is born there."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def is_memory_exceeded(self) -> bool:
        """Whether the kernel killed a process of the group because its memory was used up."""
        return self.limits_memory and _event(self.folder / "memory.events", "oom_kill") > 0

    def is_process_limit_hit(self) -> bool:
        """Whether the kernel refused to start a process or thread."""
        return _event(self.folder / "pids.events", "max") > 0

    def remove(self) -> None:
        """Remove the group; its processes must be gone. A folder that stays is empty and harmless."""
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        while True:
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                # Processes that were just reaped may be counted for a moment longer.
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)


def _unified_parents(system: Path) -> list[Path]:
    """Groups of version 2 that may hold a new one: our own and those above it, nearest first."""
    parents = []
    for root, own in _hierarchies(system, "cgroup2", ""):
        path = own
        while True:
            enabled = _read(path / "cgroup.subtree_control").split()
            if {"memory", "pids"} <= set(enabled) and os.access(path, os.W_OK):
                parents.append(path)
            if path == root or root not in path.parents:
                break
            path = path.parent
    return parents


def _pids_parents(system: Path) -> list[Path]:
    return [own for _, own in _hierarchies(system, "cgroup", "pids") if os.access(own, os.W_OK)]


def _hierarchies(system: Path, file_system: str, controller: str) -> list[tuple[Path, Path]]:
    """Return mount point and our own group of each mounted hierarchy of that kind."""
    groups = {}
    for line in _read(system / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            groups[name] = path
    found = []
    for line in _read(system / "proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        kind, _, options = after.split(" ", 2)
        if kind != file_system or (controller and controller not in options.split(",")) or controller not in groups:
            continue
        point = system / before.split(" ")[4].lstrip("/")
        own = point / groups[controller].lstrip("/")
        # Inside a container the path may be that of another view of the hierarchy.
        found.append((point, own if own.is_dir() else point))
    return found


def _make(parent: Path, settings: dict[str, str], optional: dict[str, str]) -> Path | None:
    _remove_abandoned(parent)
    folder = parent / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        for name, value in settings.items():
            (folder / name).write_text(value)
    except OSError:
        folder.rmdir()
        return None
    for name, value in optional.items():
        if (folder / name).exists():
            (folder / name).write_text(value)
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove groups whose host was killed; only empty ones can be removed."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            try:
                folder.rmdir()
            except OSError:
                continue


def _event(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, count = line.partition(" ")
        if name == key and count.isdigit():
            return int(count)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
