"""The system call filter, run through a small interpreter of its instructions."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from evaluators.seccomp import MACHINES, Machine, build_filter, filter_file, filter_program

ALLOW = 0x7FFF0000
KILL = 0x80000000


def judge(
    machine: Machine, number: int, *arguments: int, audit: int | None = None, allow_shared: bool = False
) -> int | str:
    """Return what the filter says to a call: "allowed", "killed" or an errno."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, machine.audit if audit is None else audit, 0, *words)
    program = list(struct.iter_unpack("<HBBI", build_filter(machine, allow_shared=allow_shared)))
    accumulator, position = 0, 0
    while True:
        code, when_true, when_false, value = program[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x15:
            position += when_true if accumulator == value else when_false
        elif code == 0x35:
            position += when_true if accumulator >= value else when_false
        elif code == 0x06:
            return "allowed" if value == ALLOW else "killed" if value == KILL else value & 0xFFFF
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize("name", list(MACHINES))
def test_refused_calls_are_refused_and_others_pass(name: str) -> None:
    machine = MACHINES[name]
    for call, number in machine.refused.items():
        assert judge(machine, number) == errno.EPERM, call
    refused = {*machine.refused.values(), 424 + 1, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 443, 447}
    for call, number in machine.unshared.items():
        assert judge(machine, number) == errno.EPERM, call
        assert judge(machine, number, allow_shared=True) == "allowed", call
    refused |= set(machine.unshared.values())
    passing = set(range(460)) - refused - {machine.socket, machine.mmap}
    assert all(judge(machine, number) == "allowed" for number in passing)


@pytest.mark.parametrize("name", list(MACHINES))
def test_no_socket_is_made_and_beside_a_gpu_only_local_ones(name: str) -> None:
    machine = MACHINES[name]
    assert {judge(machine, machine.socket, family) for family in range(46)} == {errno.EAFNOSUPPORT}
    beside_gpu = [
        family for family in range(46) if judge(machine, machine.socket, family, allow_shared=True) == "allowed"
    ]
    assert beside_gpu == [1, 16], "AF_UNIX and AF_NETLINK"


@pytest.mark.parametrize("name", list(MACHINES))
def test_the_limit_of_core_files_can_be_asked_for_and_not_set(name: str) -> None:
    machine = MACHINES[name]
    core, files, pointer, high_pointer = 4, 7, 0x7FFF_1234_5678, 0x7FFF_0000_0000
    assert judge(machine, machine.setrlimit, core, pointer) == errno.EPERM
    assert judge(machine, machine.setrlimit, files, pointer) == "allowed"
    assert judge(machine, machine.prlimit, 0, core, 0, pointer) == "allowed"
    assert judge(machine, machine.prlimit, 0, core, pointer, 0) == errno.EPERM
    assert judge(machine, machine.prlimit, 0, core, high_pointer, 0) == errno.EPERM
    assert judge(machine, machine.prlimit, 0, files, pointer, 0) == "allowed"


@pytest.mark.parametrize("name", list(MACHINES))
def test_only_shared_anonymous_mappings_are_refused(name: str) -> None:
    machine = MACHINES[name]
    assert judge(machine, machine.mmap, 0, 4096, 3, 0x21) == errno.EPERM
    assert judge(machine, machine.mmap, 0, 4096, 3, 0x8021) == errno.EPERM
    assert judge(machine, machine.mmap, 0, 4096, 3, 0x40022) == errno.EPERM, "huge pages"
    assert judge(machine, machine.mmap, 0, 4096, 3, 0x22) == "allowed"
    assert judge(machine, machine.mmap, 0, 4096, 3, 0x01) == "allowed"
    assert judge(machine, machine.mmap, 0, 4096, 3, 0x21, allow_shared=True) == "allowed"


def test_other_architectures_on_the_same_kernel_are_killed() -> None:
    assert judge(MACHINES["x86_64"], 1, audit=0x40000003) == "killed"
    assert judge(MACHINES["x86_64"], 0x40000000 + 1) == errno.ENOSYS


def test_the_file_starts_at_its_beginning() -> None:
    fd = filter_file()
    assert fd is not None
    try:
        content = os.read(fd, 1 << 16)
        assert content in [build_filter(machine) for machine in MACHINES.values()]
        assert content == filter_program(), "a forked worker would install another filter than a started one"
    finally:
        os.close(fd)
