"""A started worker as the host sees it: what it uses, how it ended, and how to end it with everything it started.

Memory is judged by two measures. The quick one, taken at every look, is an upper bound: resident sizes, page tables and
swapped pages summed over all processes (pages shared after a fork count more than once), plus temporary files with
what the kernel keeps for each. Only when that exceeds the limit the slow one decides: proportional sizes, file pages left
out, shared memory counted once. Not seen without a cgroup: small objects of the kernel that are neither mapped nor in a
file of the sandbox, such as descriptors, file locks and the descriptions of mappings.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Protocol

from evaluators.cgroup import ControlGroup
from evaluators.errors import HostError

END_TIMEOUT_S: Final = 60.0
"""Long, because memory and page tables of many processes are given back in that time, and giving up blames the host."""
KEEPER_TIMEOUT_S: Final = 2.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_KIBIBYTES: Final = re.compile(r"^(Pss(?:_Anon|_Shmem)?):\s+(\d+) kB", re.MULTILINE)
_UNMAPPED: Final = re.compile(r"^Vm(?:PTE|Swap):\s+(\d+) kB", re.MULTILINE)
INODE_BYTES: Final = 1024
"""What the kernel keeps for an empty file or a link: neither is part of any process, and a file system limits only blocks."""


class Sandbox(Protocol):
    """One started worker."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    """The read end of its stdout and stderr."""

    def num_tasks(self) -> int:
        """Return the number of its threads, over all processes; 0 once they are gone."""

    def memory_bound(self) -> int:
        """Return an upper bound of the bytes of memory in use; quick."""

    def memory_bytes(self) -> int:
        """Return the bytes of memory in use, shared pages counted once; waits for locks of the processes."""

    def is_memory_exceeded(self) -> bool:
        """Whether the kernel enforced the memory limit by killing."""

    def is_process_limit_hit(self) -> bool:
        """Whether the kernel refused a process or thread beyond the limit."""

    def end(self) -> None:
        """Kill every process of the worker and wait until none is left; repeating it does nothing.

        Raises:
            HostError: a process does not die.
        """

    def close(self) -> None:
        """Release descriptors and folders; after `end`."""


class NamespaceSandbox:
    """A worker inside its own pid namespace, whose first process takes all others with it when it dies."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        init_pid: int,
        temporary: tuple[str, ...],
        group: ControlGroup | None = None,
    ) -> None:
        assert process.stdout is not None
        self.process = process
        self.output: IO[bytes] = process.stdout
        self._init_pid = init_pid
        self._init_fd = os.pidfd_open(init_pid)
        self._temporary = temporary
        self._root: str | None = None
        self.group = group
        self.keeper: socket.socket | None = None
        """Of a forked worker: ends with the process that passes on its exit status, which is outside of the sandbox."""

    def adopt(self, pid: int) -> None:
        """Take a process that was forked into the sandbox under its limits; what it starts later is born there."""
        if self.group is not None:
            self.group.add(pid)

    def num_tasks(self) -> int:
        """See `Sandbox.num_tasks`."""
        root = self._find_root()
        return 0 if root is None else sum(_read_stat(folder)[1] for folder in _process_folders(f"{root}/proc"))

    def memory_bound(self) -> int:
        """See `Sandbox.memory_bound`."""
        root = self._find_root()
        if root is None:
            return 0
        folders = _process_folders(f"{root}/proc")
        return sum(_read_stat(folder)[0] + _read_unmapped(folder) for folder in folders) + self._temporary_bytes(root)

    def memory_bytes(self) -> int:
        """See `Sandbox.memory_bytes`."""
        root = self._find_root()
        if root is None:
            return 0
        private, shared = 0, 0
        for folder in _process_folders(f"{root}/proc"):
            anonymous, shmem = _read_proportional(folder)
            private += anonymous + _read_unmapped(folder)
            shared += shmem
        return private + max(shared, self._temporary_bytes(root))

    def cpu_seconds(self) -> float:
        """Return the CPU time that the processes now inside have used."""
        root = self._find_root()
        return 0.0 if root is None else sum(read_cpu_seconds(folder) for folder in _process_folders(f"{root}/proc"))

    def is_memory_exceeded(self) -> bool:
        """See `Sandbox.is_memory_exceeded`."""
        return self.group is not None and self.group.is_memory_exceeded()

    def is_process_limit_hit(self) -> bool:
        """See `Sandbox.is_process_limit_hit`."""
        return self.group is not None and self.group.is_process_limit_hit()

    def end(self) -> None:
        """See `Sandbox.end`."""
        if self._init_fd >= 0:
            try:
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            # The first process of a namespace is reported dead only after every other one is.
            poller = select.poll()
            poller.register(self._init_fd, select.POLLIN)
            if not poller.poll(END_TIMEOUT_S * 1000):
                raise HostError(f"process {self._init_pid} of a worker does not die {END_TIMEOUT_S:g} s after SIGKILL")
        # The outer process ends by itself once the first inner one is gone, and then knows the exit status.
        _reap(self.process)

    def close(self) -> None:
        """See `Sandbox.close`."""
        self.output.close()
        if self._init_fd >= 0:
            os.close(self._init_fd)
            self._init_fd = -1
        if self.keeper is not None:
            select.select([self.keeper], [], [], KEEPER_TIMEOUT_S)
            self.keeper.close()
            self.keeper = None
        if self.group is not None:
            self.group.remove()

    def _find_root(self) -> str | None:
        """Return a path to the sandbox's own root, through a process inside whose links this user may follow."""
        if self._root is not None and os.path.isdir(f"{self._root}/proc/1"):
            return self._root
        self._root = None
        for pid in (*_children(self._init_pid), self._init_pid):
            root = f"/proc/{pid}/root"
            if os.path.isdir(f"{root}/proc/1"):
                self._root = root
                break
        return self._root

    def _temporary_bytes(self, root: str) -> int:
        total = 0
        for folder in self._temporary:
            try:
                status = os.statvfs(root + folder)
            except OSError:
                continue
            total += (status.f_blocks - status.f_bfree) * status.f_frsize
            total += (status.f_files - status.f_ffree) * INODE_BYTES
        return total


class PlainSandbox:
    """A worker without isolation: an ordinary child, found again by a mark in its environment.

    A process that clears its environment and leaves the session escapes; that is one of the things isolation is for.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, mark: str, scratch: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.output: IO[bytes] = process.stdout
        self._mark = mark.encode()
        self._scratch = scratch

    def num_tasks(self) -> int:
        """See `Sandbox.num_tasks`."""
        return sum(_read_stat(f"/proc/{pid}")[1] for pid in self._pids())

    def memory_bound(self) -> int:
        """See `Sandbox.memory_bound`."""
        return sum(_read_stat(f"/proc/{pid}")[0] + _read_unmapped(f"/proc/{pid}") for pid in self._pids())

    def memory_bytes(self) -> int:
        """See `Sandbox.memory_bytes`."""
        return sum(sum(_read_proportional(f"/proc/{pid}")) + _read_unmapped(f"/proc/{pid}") for pid in self._pids())

    def is_memory_exceeded(self) -> bool:
        """See `Sandbox.is_memory_exceeded`."""
        return False

    def is_process_limit_hit(self) -> bool:
        """See `Sandbox.is_process_limit_hit`."""
        return False

    def end(self) -> None:
        """See `Sandbox.end`."""
        deadline = time.monotonic() + END_TIMEOUT_S
        if self.process.poll() is None:
            self.process.kill()
        _reap(self.process)
        while pids := list(self._marked_pids()):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise HostError(f"processes {pids} of a worker do not die {END_TIMEOUT_S:g} s after SIGKILL")
            time.sleep(0.005)

    def close(self) -> None:
        """See `Sandbox.close`."""
        self.output.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _pids(self) -> set[int]:
        """The worker and its descendants, without a search of all processes of the host."""
        found: set[int] = set()
        pending = [self.process.pid]
        while pending:
            pid = pending.pop()
            if pid not in found:
                found.add(pid)
                pending.extend(_children(pid))
        return found

    def _marked_pids(self) -> Iterator[int]:
        for name in _numeric_names("/proc"):
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if self._mark in environment.split(b"\0"):
                yield int(name)


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired as err:
            raise HostError(f"process {process.pid} does not die {END_TIMEOUT_S:g} s after SIGKILL") from err


def _numeric_names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def _process_folders(proc: str) -> list[str]:
    return [f"{proc}/{name}" for name in _numeric_names(proc)]


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for thread in _numeric_names(f"/proc/{pid}/task"):
        try:
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
        except OSError:
            continue
        children.extend(int(word) for word in text.split())
    return children


def read_cpu_seconds(folder: str) -> float:
    """Return the CPU time of a process, without its children; zero when it is gone."""
    fields = _stat_fields(folder)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _read_stat(folder: str) -> tuple[int, int]:
    """Return resident bytes and number of threads of a process, zeros when it is gone."""
    fields = _stat_fields(folder)
    return (int(fields[21]) * _PAGE, int(fields[17])) if fields else (0, 0)


def _stat_fields(folder: str) -> list[bytes]:
    """Return the fields of a process's ``stat`` from the third on, none when it is gone."""
    try:
        with open(f"{folder}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return []
    # The second field is the command in parentheses, and may hold spaces and parentheses itself.
    return text[text.rfind(b")") + 2 :].split()


def _read_unmapped(folder: str) -> int:
    """Return the bytes that a process costs beside its resident pages: page tables, and pages that it sent to swap."""
    try:
        text = Path(f"{folder}/status").read_text(errors="replace")
    except OSError:
        return 0
    return sum(int(value) * 1024 for value in _UNMAPPED.findall(text))


def _read_proportional(folder: str) -> tuple[int, int]:
    """Return anonymous and shared-memory bytes of a process, pages shared with others counted in parts."""
    try:
        text = Path(f"{folder}/smaps_rollup").read_text()
    except OSError:
        return _read_stat(folder)[0], 0
    sizes = {key: int(value) * 1024 for key, value in _KIBIBYTES.findall(text)}
    if "Pss_Anon" not in sizes:
        return sizes.get("Pss", 0), 0
    return sizes["Pss_Anon"], sizes.get("Pss_Shmem", 0)
