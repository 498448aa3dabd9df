"""The system calls by which a process enters a sandbox that bubblewrap made, and gives up what it may do.

bubblewrap confines a command and then executes it; a process that is forked and not executed has to do the same to itself.
The kernel checks every step, and `evaluators.warm_start` looks from outside whether they were taken.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any, Final

NAMESPACES: Final = {
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "mnt": 0x00020000,
}
"""Names below /proc/<pid>/ns, and their flags in setns."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_SECCOMP_MODE_FILTER: Final = 2
_CAPABILITY_VERSION_3: Final = 0x20080522
_MAX_CAPABILITIES: Final = 64
_FILTER_INSTRUCTION: Final = 8

_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def join_namespaces(pidfd: int, names: list[str]) -> None:
    """Enter namespaces of a process, all or none; the pid namespace is that of children that are forked later.

    In one call, because entering the mount namespace needs a privilege over the user namespace that made it, which a
    process has from outside and no longer has once it is inside the nested one.

    Raises:
        OSError: refused; a kernel before 5.8 does not know pidfds here (EINVAL).
    """
    flags = 0
    for name in names:
        flags |= NAMESPACES[name]
    _check("setns", _libc.setns(ctypes.c_int(pidfd), ctypes.c_int(flags)))


def drop_privileges() -> None:
    """Empty every set of capabilities, the bounding set first, and rule out that executing a file brings one back.

    Entering a user namespace has filled them.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_MAX_CAPABILITIES):
        if _libc.prctl(*_longs(_PR_CAPBSET_DROP, capability, 0, 0, 0)) == -1:
            break  # one more than this kernel has
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check("capset", _libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))))


def install_filter(program: bytes) -> None:
    """Install a seccomp filter, an array of ``struct sock_filter``, for this process and all it starts."""
    buffer = ctypes.create_string_buffer(program, len(program))
    instructions = ctypes.cast(buffer, ctypes.c_void_p)
    described = _FilterProgram(length=len(program) // _FILTER_INSTRUCTION, instructions=instructions)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described))


def set_dumpable(value: bool) -> None:
    """Say whether a process of the same user may look into this one; off after a change of credentials."""
    _prctl(_PR_SET_DUMPABLE, int(value))


def die_with_parent(signal_number: int, parent: int) -> None:
    """Have the kernel send a signal when the thread that started this process ends; end now if it is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(0)


def _prctl(option: int, *arguments: int) -> None:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _check(f"prctl({option})", _libc.prctl(*_longs(option, *padded)))


def _longs(*values: int) -> list[Any]:
    return [ctypes.c_ulong(value) for value in values]


def _check(name: str, result: int) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
