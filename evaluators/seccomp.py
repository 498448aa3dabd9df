"""The system calls that a sandboxed program is refused, as a seccomp filter.

Namespaces leave open: sockets outside network namespaces (vsock reaches the host of a virtual machine), kernel
keyrings of the user, memory that can outlive its mapping and so escapes a watchdog (memfd, System V shared memory,
anonymous shared mappings, huge pages, the buffers of sockets), the host's handler of core files, and rarely used
interfaces with a record of faults (bpf, io_uring, userfaultfd, perf events, module loading). A program needs none of
them. Refused calls return EPERM; nothing is killed, so that libraries can fall back.

Sockets of every kind are refused, not only those that reach something: a connection of a program to itself, sent to
the evaluator as a descriptor, would keep the evaluator closing it for as long as its linger time says. CUDA makes
Unix sockets and shared mappings, so beside a GPU these two are left.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
import sys
from typing import Final, NamedTuple

from evaluators.errors import HostError

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_ALLOW: Final = 0x7FFF0000
_ERROR: Final = 0x00050000
_KILL: Final = 0x80000000
_NUMBER: Final = 0  # offsets in struct seccomp_data
_ARCHITECTURE: Final = 4
_ARGUMENT_0: Final = 16  # low half of a 64-bit argument; the next one is 8 further
_MMAP_FLAGS: Final = _ARGUMENT_0 + 3 * 8
_SHARED_ANONYMOUS: Final = 0x21  # MAP_SHARED | MAP_ANONYMOUS
_X32_BIT: Final = 0x40000000
_GPU_FAMILIES: Final = (1, 16)
"""AF_UNIX and AF_NETLINK: these obey the network namespace, and no socket of theirs lingers when it is closed."""
_HUGE_PAGES: Final = 0x40000  # MAP_HUGETLB
_CORE_SIZE: Final = 4  # RLIMIT_CORE; 1, as the host sets it, keeps the kernel from calling a handler, 0 does not


class Machine(NamedTuple):
    """Audit number of an architecture, numbers of the calls judged by an argument, and the refused calls by name.

    unshared: refused where no GPU needs them.
    """

    audit: int
    socket: int
    mmap: int
    prlimit: int
    setrlimit: int
    has_x32: bool
    refused: dict[str, int]
    unshared: dict[str, int]


_X86_64: Final = Machine(
    audit=0xC000003E,
    socket=41,
    mmap=9,
    prlimit=302,
    setrlimit=160,
    has_x32=True,
    unshared={"sendmsg": 46, "socketpair": 53, "sendmmsg": 307},
    refused={
        "shmget": 29, "ptrace": 101, "syslog": 103, "semget": 64, "msgget": 68, "personality": 135, "pivot_root": 155,
        "chroot": 161, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "init_module": 175, "delete_module": 176, "quotactl": 179, "mq_open": 240, "kexec_load": 246, "add_key": 248,
        "request_key": 249, "keyctl": 250, "unshare": 272, "vmsplice": 278, "perf_event_open": 298,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320,
        "bpf": 321, "userfaultfd": 323,
    },
)  # fmt: skip
_AARCH64: Final = Machine(
    audit=0xC00000B7,
    socket=198,
    mmap=222,
    prlimit=261,
    setrlimit=164,
    has_x32=False,
    unshared={"socketpair": 199, "sendmsg": 211, "sendmmsg": 269},
    refused={
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "vmsplice": 75, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116,
        "ptrace": 117, "reboot": 142, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "add_key": 217,
        "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "perf_event_open": 241,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294,
    },
)  # fmt: skip
_SHARED: Final = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
"""Calls from 424 on have the same number on every architecture."""
MACHINES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}


def build_filter(machine: Machine, *, allow_shared: bool = False) -> bytes:
    """Return the filter program as an array of ``struct sock_filter``.

    allow_shared: let anonymous shared mappings and Unix sockets pass, which CUDA cannot do without.
    """
    refused = sorted({*machine.refused.values(), *_SHARED.values()})
    families = _GPU_FAMILIES if allow_shared else ()
    if not allow_shared:
        refused = sorted({*refused, *machine.unshared.values()})
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, machine.audit, when_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine.has_x32:
        code += [
            _instruction(_JUMP_AT_LEAST, _X32_BIT, when_false=1),
            _instruction(_RETURN, _ERROR | errno.ENOSYS),
        ]
    for number in refused:
        code += [
            _instruction(_JUMP_EQUAL, number, when_false=1),
            _instruction(_RETURN, _ERROR | errno.EPERM),
        ]
    if not allow_shared:
        code += [
            _instruction(_JUMP_EQUAL, machine.mmap, when_false=8),
            _instruction(_LOAD, _MMAP_FLAGS),
            _instruction(_AND, _HUGE_PAGES),
            _instruction(_JUMP_EQUAL, _HUGE_PAGES, when_true=3),
            _instruction(_LOAD, _MMAP_FLAGS),
            _instruction(_AND, _SHARED_ANONYMOUS),
            _instruction(_JUMP_EQUAL, _SHARED_ANONYMOUS, when_false=1),
            _instruction(_RETURN, _ERROR | errno.EPERM),
            _instruction(_RETURN, _ALLOW),
        ]
    code += [
        _instruction(_JUMP_EQUAL, machine.setrlimit, when_false=4),
        _instruction(_LOAD, _ARGUMENT_0),
        _instruction(_JUMP_EQUAL, _CORE_SIZE, when_false=1),
        _instruction(_RETURN, _ERROR | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_JUMP_EQUAL, machine.prlimit, when_false=8),
        _instruction(_LOAD, _ARGUMENT_0 + 8),
        _instruction(_JUMP_EQUAL, _CORE_SIZE, when_false=5),
        # Asking is allowed: then the new limit is a null pointer, in both halves.
        _instruction(_LOAD, _ARGUMENT_0 + 16),
        _instruction(_JUMP_EQUAL, 0, when_false=2),
        _instruction(_LOAD, _ARGUMENT_0 + 20),
        _instruction(_JUMP_EQUAL, 0, when_true=1),
        _instruction(_RETURN, _ERROR | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_JUMP_EQUAL, machine.socket, when_true=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD, _ARGUMENT_0),
    ]
    code += [
        _instruction(_JUMP_EQUAL, family, when_true=len(families) - index) for index, family in enumerate(families)
    ]
    code += [_instruction(_RETURN, _ERROR | errno.EAFNOSUPPORT), _instruction(_RETURN, _ALLOW)]
    return b"".join(code)


def filter_program(*, allow_shared: bool = False) -> bytes | None:
    """Return the filter of this machine, None where its architecture is not known."""
    machine = MACHINES.get(platform.machine())
    if machine is None or sys.byteorder != "little":
        return None
    return build_filter(machine, allow_shared=allow_shared)


def filter_file(*, allow_shared: bool = False) -> int | None:
    """Return a descriptor from which bubblewrap reads the filter of this machine, None where it is not known."""
    program = filter_program(allow_shared=allow_shared)
    if program is None:
        return None
    fd = os.memfd_create("quantforge-seccomp", os.MFD_CLOEXEC)
    if os.write(fd, program) != len(program):
        os.close(fd)
        raise HostError("the seccomp filter cannot be written")
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _instruction(code: int, value: int, *, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, when_true, when_false, value)
