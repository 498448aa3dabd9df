"""Control groups against a made-up system folder: where one is made, and what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluators.cgroup import OWN_PROCESSES, ControlGroup
from evaluators.limits import Limits

LIMITS = Limits(processes=50, memory_bytes=1000)


def make_system(folder: Path, groups: str, mounts: list[tuple[str, str, str]]) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    lines = [f"30 20 0:26 / {point} rw,relatime - {kind} cgroup {options}" for point, kind, options in mounts]
    (folder / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    system = make_system(tmp_path, "0::/user.slice/mine.scope\n", [("/sys/fs/cgroup", "cgroup2", "rw")])
    own = system / "sys/fs/cgroup/user.slice/mine.scope"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("\n")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (own.parent.parent / "cgroup.subtree_control").write_text("memory pids\n")
    return system


def test_unified_group_is_made_at_the_nearest_group_that_passes_controllers_down(unified: Path) -> None:
    group = ControlGroup.create(LIMITS, system=unified)
    assert group is not None
    assert group.limits_memory
    assert group.folder.parent == unified / "sys/fs/cgroup/user.slice"
    assert (group.folder / "memory.max").read_text() == "1000"
    assert (group.folder / "memory.oom.group").read_text() == "1"
    assert (group.folder / "pids.max").read_text() == str(50 + OWN_PROCESSES)
    assert not (group.folder / "memory.swap.max").exists()


def test_events_are_read(unified: Path) -> None:
    group = ControlGroup.create(LIMITS, system=unified)
    assert group is not None
    assert not group.is_memory_exceeded()
    assert not group.is_process_limit_hit()
    (group.folder / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    (group.folder / "pids.events").write_text("max 3\n")
    assert group.is_memory_exceeded()
    assert group.is_process_limit_hit()
    group.add(77)
    assert (group.folder / "cgroup.procs").read_text() == "77"


def test_first_version_limits_processes_only(tmp_path: Path) -> None:
    mounts = [("/sys/fs/cgroup/pids", "cgroup", "rw,pids"), ("/sys/fs/cgroup/memory", "cgroup", "rw,memory")]
    system = make_system(tmp_path, "4:memory:/a\n8:pids:/\n0::/\n", mounts)
    (system / "sys/fs/cgroup/pids").mkdir(parents=True)
    (system / "sys/fs/cgroup/memory/a").mkdir(parents=True)
    group = ControlGroup.create(LIMITS, system=system)
    assert group is not None
    assert group.folder.parent == system / "sys/fs/cgroup/pids"
    assert not group.limits_memory
    assert [path.name for path in group.folder.iterdir()] == ["pids.max"]


def test_no_hierarchy_means_no_group(tmp_path: Path) -> None:
    assert ControlGroup.create(LIMITS, system=make_system(tmp_path, "0::/\n", [])) is None
    assert ControlGroup.create(LIMITS, system=tmp_path / "nothing") is None


def test_groups_of_hosts_that_were_killed_are_removed(unified: Path) -> None:
    parent = unified / "sys/fs/cgroup/user.slice"
    (parent / "quantforge-999999999-abc").mkdir()
    (parent / "quantforge-1-abc").mkdir()
    ControlGroup.create(LIMITS, system=unified)
    assert not (parent / "quantforge-999999999-abc").exists()
    assert (parent / "quantforge-1-abc").exists()


def test_removing_twice_is_allowed(tmp_path: Path) -> None:
    group = ControlGroup(folder=tmp_path / "group", limits_memory=False)
    group.folder.mkdir()
    group.remove()
    group.remove()
    assert not group.folder.exists()


@pytest.mark.parametrize("name", ["wall_s", "memory_bytes", "processes", "output_bytes", "file_bytes", "calls"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})
