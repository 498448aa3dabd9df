"""Workers forked from a template: confined like those that bubblewrap starts, sharing nothing, leaving nothing."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluators.bubblewrap import BubblewrapIsolation
from evaluators.limits import Limits
from evaluators.python_runtime import package_folder
from evaluators.results import Outcome
from evaluators.template import POOL, Template, TemplateRefusedError
from evaluators.warm_start import check_confined
from evaluators.worker_host import WorkerHost, WorkerReport

LIMITS = Limits(
    wall_s=20.0, memory_bytes=1 << 30, processes=60, output_bytes=1 << 20, file_bytes=1 << 26, open_files=256
)
GONE_WITHIN_S = 3.0
CHECKOUT = package_folder("evaluators").parent


class Server:
    """Serves a session without layers."""

    def dispatch(self, op: str, args: dict[str, Any], tensors: Any) -> tuple[dict[str, Any], list[Any]]:
        if op == "hello":
            return {"layers": [], "groups": [], "sites": [], "device": "cpu", "seed": 11}, []
        return {}, []


class ColdIsolation(BubblewrapIsolation):
    """Has every worker import for itself."""

    def acquire_template(self, *, threads: int) -> Template:
        return None  # type: ignore[return-value]


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(BubblewrapIsolation(), LIMITS) as host:
        host.prestart()
        yield host


def run(host: WorkerHost, body: str) -> WorkerReport:
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return host.run(f"import os, sys, time\ndef quantize(session):\n{indented}\n", Server(), seed=3)


def printed(host: WorkerHost, body: str) -> str:
    report = run(host, body)
    assert report.is_finished, report
    return report.log_tail


def template_pid(host: WorkerHost) -> int:
    """Return the pid of the template that the waiting worker was forked from."""
    host.prestart()
    assert host._waiting is not None
    host._waiting.result().wait_ready()
    assert host._template is not None
    assert host._template.refusal is None, f"workers are not forked here: {host._template.refusal}"
    pid = host._template.pid
    assert pid is not None, "the template of a waiting worker does not run"
    return pid


STATE = """
import json, resource, signal, torch, forge_kernels, evaluators.wire
status = dict(line.rstrip("\\n").split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
keys = ["Umask", "Uid", "Gid", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
        "Seccomp", "Seccomp_filters", "Threads", "CoreDumping"]
state = {key: status[key] for key in keys if key in status}
state["environment"] = dict(os.environ)
state["path"] = sys.path
state["flags"] = str(sys.flags)
state["argv"] = sys.argv
state["cwd"] = os.getcwd()
state["nice"] = os.nice(0)
state["limits"] = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
state["handlers"] = [str(signal.getsignal(number)) for number in range(1, 32)]
state["threads"] = [torch.get_num_threads(), torch.get_num_interop_threads(), torch.initial_seed()]
state["files"] = sorted(str(getattr(module, "__file__", None)) for name, module in sys.modules.items()
                        if name.split(".")[0] in ("evaluators", "forge_kernels"))
state["specs"] = sorted(str([module.__spec__.origin, list(module.__path__ or ()) if hasattr(module, "__path__") else None])
                        for name, module in sys.modules.items() if name.split(".")[0] in ("evaluators", "forge_kernels"))
state["main"] = sys.modules["__main__"].__file__
state["code"] = evaluators.wire.check_request.__code__.co_filename
state["temporary"] = __import__("tempfile").gettempdir()
state["node"] = __import__("platform").uname().node
state["namespaces"] = sorted(os.listdir("/proc/self/ns"))
print(json.dumps(state))
"""


def test_a_forked_worker_finds_what_a_started_one_finds(host: WorkerHost) -> None:
    template_pid(host)
    forked = json.loads(printed(host, STATE))
    with WorkerHost(ColdIsolation(), LIMITS) as cold:
        started = json.loads(printed(cold, STATE))
    differing = {key: (forked[key], started[key]) for key in started if forked[key] != started[key]}
    assert differing == {}, "forked and started workers differ"
    # The environment may lie inside the checkout, and its site-packages are mounted where they are.
    beside_the_environment = json.dumps(forked).replace(sys.prefix, "")
    assert str(CHECKOUT) not in beside_the_environment, "a forked worker sees where the host has our packages"
    assert {key: forked[key] for key in forked if key.startswith("Cap")} == dict.fromkeys(
        ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16
    )
    assert (forked["NoNewPrivs"], forked["Seccomp"]) == ("1", "2")


def test_no_namespace_can_be_made(host: WorkerHost) -> None:
    body = """
import ctypes, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
def attempt(*arguments):
    pid = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if pid == 0:
        os._exit(0)
    return pid
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000, 0x10020000):
    arguments = ctypes.create_string_buffer(struct.pack("=11Q", flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))
    print(hex(flag), attempt(clone, flag | 17, 0, 0, 0, 0), attempt(435, arguments, 88), libc.unshare(flag))
"""
    for line in printed(host, body).splitlines():
        assert line.split()[1:] == ["-1", "-1", "-1"], f"a namespace was made: {line}"


def test_only_standard_streams_and_the_channel_are_open(host: WorkerHost) -> None:
    template_pid(host)
    found = printed(
        host,
        "for fd in sorted(os.listdir('/proc/self/fd'), key=int):\n"
        "    if os.path.lexists(f'/proc/self/fd/{fd}'): print(fd, os.readlink(f'/proc/self/fd/{fd}').split(':[')[0])",
    )
    arena = "/memfd:quantforge-arena (deleted)"
    assert found.splitlines() == ["0 /dev/null", "1 pipe", "2 pipe", "3 socket", f"4 {arena}", f"5 {arena}"]


def test_the_interpreter_cannot_be_written(host: WorkerHost) -> None:
    template_pid(host)
    body = """
for path in ("/proc/self/exe", sys.executable):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        print("opened", end=" ")
    except OSError:
        print("refused", end=" ")
    print(bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY))
"""
    # That it is busy refuses too, but only for as long as somebody executes it; the mount refuses for good.
    assert printed(host, body).splitlines() == ["refused True"] * 2, "the mount of the interpreter can be written"


def test_a_worker_leads_a_session_of_its_own(host: WorkerHost) -> None:
    template_pid(host)
    assert printed(host, "print(os.getsid(0) == os.getpgrp() == os.getpid(), os.getppid())") == "True 0\n"


SCRIBBLE = """
import builtins, ctypes, mmap, torch, forge_kernels, evaluators.session_client
torch.ones = forge_kernels.encode = builtins.sorted = lambda *a, **k: "patched"
evaluators.session_client.RemoteSession.weight = lambda self, layer: "patched"
torch.left_behind = sys.modules["json"].left_behind = True
libc = ctypes.CDLL(None, use_errno=True)
for line in open("/proc/self/maps"):
    fields = line.split()
    if line.rstrip().endswith("libtorch_cpu.so") and fields[1].startswith("r-"):
        start = int(fields[0].split("-")[0], 16)
        assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(4096), 3) == 0, ctypes.get_errno()
        ctypes.memset(start, 0xEE, 4096)
        print("scribbled")
        break
ctypes.memset(id(evaluators.session_client.STREAMS), 0xEE, 16)
"""
INSPECT = """
import builtins, ctypes, torch, forge_kernels, evaluators.session_client
assert torch.ones(2).tolist() == [1.0, 1.0] and builtins.sorted([2, 1]) == [1, 2]
assert forge_kernels.encode.__module__.startswith("forge_kernels"), forge_kernels.encode
assert evaluators.session_client.RemoteSession.weight.__module__ == "evaluators.session_client"
assert not hasattr(torch, "left_behind") and not hasattr(sys.modules["json"], "left_behind")
assert "quantized" in evaluators.session_client.STREAMS
for line in open("/proc/self/maps"):
    fields = line.split()
    if line.rstrip().endswith("libtorch_cpu.so") and fields[1].startswith("r-"):
        start = int(fields[0].split("-")[0], 16)
        with open(fields[5], "rb") as file:
            file.seek(int(fields[2], 16))
            assert ctypes.string_at(start, 4096) == file.read(4096), "a page of torch was changed"
        print("compared")
        break
"""


def test_workers_of_one_template_share_no_writes(host: WorkerHost) -> None:
    pid = template_pid(host)
    assert run(host, SCRIBBLE).log_tail == "scribbled\n"
    assert template_pid(host) == pid, "the template did not survive"
    assert printed(host, INSPECT) == "compared\n"


def test_random_numbers_are_not_those_of_the_worker_before(host: WorkerHost) -> None:
    body = """
import random, secrets, uuid, torch, numpy
print(random.random(), numpy.random.rand(), secrets.token_hex(8), uuid.uuid4(), torch.rand(1).item())
"""
    first, second = (printed(host, body).split() for _ in range(2))
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, False, False, False, True], (first, second)


def test_modules_that_were_not_imported_yet_come_from_the_sandbox(host: WorkerHost) -> None:
    body = """
assert "forge_kernels.bench" not in sys.modules
import inspect, forge_kernels.bench, forge_kernels.rules
print(forge_kernels.bench.__file__, len(inspect.getsource(forge_kernels.rules.LowRank)) > 0)
"""
    assert printed(host, body) == "/quantforge/forge_kernels/bench/__init__.py True\n"


HOSTILE = {
    "kills all it sees": "os.kill(-1, 9); time.sleep(9)",
    "kills every number": (
        "[os.kill(int(n), 9) for n in os.listdir('/proc') if n.isdigit() and int(n) != os.getpid()]\ntime.sleep(9)"
    ),
    "kills its group": "os.killpg(0, 9)",
    "kills number 0": "os.kill(0, 9)",
    "stops what waits for it": "import signal; os.kill(2, signal.SIGSTOP); os._exit(7)",
    "a segmentation fault": "import ctypes; ctypes.string_at(0)",
    "uses up memory": "kept = []\nwhile True: kept.append(bytearray(b'x') * 50_000_000)",
    "asks who its parent is": "assert os.getppid() == 0; os._exit(1)",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if "all" in c or "group" in c else pytest.mark.slow) for c in HOSTILE]
)
def test_a_template_survives_hostile_programs(host: WorkerHost, case: str) -> None:
    pid = template_pid(host)
    report = run(host, HOSTILE[case])
    assert report.outcome in (Outcome.CRASHED, Outcome.OUT_OF_MEMORY, Outcome.CONTRACT), report
    assert template_pid(host) == pid, "the template did not survive"
    assert run(host, "pass").is_finished


def test_memory_that_is_shared_with_the_template_counts_once(host: WorkerHost) -> None:
    children = 12
    body = f"""
import mmap
for _ in range({children}):
    if os.fork() == 0:
        time.sleep(1.5)
        os._exit(0)
resident = int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE
time.sleep(1)
print(resident)
"""
    resident = int(printed(host, body))
    assert (children + 1) * resident > LIMITS.memory_bytes, f"{resident} bytes do not tempt a sum over processes"


def test_a_template_that_dies_is_replaced(host: WorkerHost) -> None:
    pid = template_pid(host)
    os.kill(pid, signal.SIGKILL)
    # The first is a worker that was forked before.
    assert [run(host, "pass").outcome for _ in range(3)] == [None, None, None]
    assert template_pid(host) != pid


def test_a_template_that_dies_during_a_run_does_not_disturb_it(host: WorkerHost) -> None:
    pid = template_pid(host)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    assert printed(host, "time.sleep(1.0)\nprint('to the end')") == "to the end\n"
    assert run(host, "os._exit(3)").reason == "the process exited with status 3 before quantize returned"


def test_hosts_share_a_template_until_the_last_is_closed(host: WorkerHost) -> None:
    pid = template_pid(host)
    with WorkerHost(BubblewrapIsolation(), Limits(wall_s=5)) as other:
        assert template_pid(other) == pid
    assert template_pid(host) == pid
    with WorkerHost(BubblewrapIsolation(), LIMITS, threads=2) as other:
        own = template_pid(other)
        assert own != pid, "the number of threads is part of a template"
        assert printed(other, "import torch\nprint(torch.get_num_threads())") == "2\n"
    assert is_gone(own)


def test_nothing_is_left_of_a_closed_host() -> None:
    host = WorkerHost(BubblewrapIsolation(hide=(Path("/nowhere"),)), LIMITS, threads=3)
    pid = template_pid(host)
    family = descendants(os.getpid())
    assert pid in family
    mine = {pid, *descendants(pid)}
    assert len(mine) >= 3, f"template, keeper and worker are {mine}"
    host.close()
    assert wait_until(lambda: all(map(is_gone, mine))), f"left of {mine}: {[p for p in mine if not is_gone(p)]}"


ORPHANS = """
import os, sys, threading, time
sys.path[:0] = {paths!r}
from evaluators.bubblewrap import BubblewrapIsolation
from evaluators.limits import Limits
from evaluators.worker_host import WorkerHost

class Server:
    def dispatch(self, op, args, tensors):
        print("running", flush=True)
        return {{"layers": [], "groups": [], "sites": [], "device": "cpu", "seed": 11}}, []

host = WorkerHost(BubblewrapIsolation(), Limits())
host.run("import time\\ndef quantize(session): time.sleep(1000)", Server())
"""


def test_nothing_is_left_of_an_evaluator_that_is_killed() -> None:
    script = ORPHANS.format(paths=[str(CHECKOUT), str(package_folder("forge_kernels").parent)])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        family = descendants(process.pid)
        assert len(family) >= 6, f"bubblewrap twice, the waiting command, template, keeper and worker are {family}"
        process.kill()
    assert wait_until(lambda: all(map(is_gone, family))), [p for p in family if not is_gone(p)]


def test_without_the_right_to_enter_a_namespace_workers_start_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own_pidfd = os.pidfd_open(os.getpid())
    request = Template.request

    def refused(self: Template, body: dict[str, Any], fds: Sequence[int], *, view: str) -> None:
        # A process cannot enter the user namespace in which it is.
        request(self, body, [own_pidfd, *fds[1:]], view=view)

    monkeypatch.setattr(Template, "request", refused)
    with WorkerHost(BubblewrapIsolation(), LIMITS, threads=4) as host:
        with caplog.at_level(logging.WARNING):
            reports = [run(host, "print(os.getpid())") for _ in range(2)]
        assert [report.log_tail for report in reports] == ["2\n", "2\n"], "these are no workers that bubblewrap started"
        assert host._template is not None
        refusal = str(host._template.refusal)
        assert "cannot enter a sandbox" in refusal, refusal
        assert "setns" in refusal, refusal
    os.close(own_pidfd)
    assert len([record for record in caplog.records if "without a template" in record.message]) == 1


def test_a_host_that_is_closed_while_its_template_imports_does_not_wait_for_ever() -> None:
    for delay_s in (0.0, 0.2, 0.5, 0.8):
        host = WorkerHost(BubblewrapIsolation(), LIMITS)
        host.prestart()
        time.sleep(delay_s)
        closing = threading.Thread(target=host.close, daemon=True)
        closing.start()
        closing.join(timeout=30)
        assert not closing.is_alive(), f"closing {delay_s} s after the start of a template does not end"


def test_a_template_with_threads_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(wanted: dict[str, str]) -> tuple[tuple[str, str], ...]:
        # numpy's linear algebra, which torch imports, starts its threads when it is loaded.
        return tuple({**wanted, "OPENBLAS_NUM_THREADS": "4"}.items())

    monkeypatch.setattr("evaluators.bubblewrap.template_environment", environment)
    with WorkerHost(BubblewrapIsolation(), LIMITS) as host:
        assert printed(host, "print(os.getpid())") == "2\n"
        assert host._template is not None
        assert "starts threads" in str(host._template.refusal)


def test_a_process_that_is_not_confined_is_seen() -> None:
    with pytest.raises(TemplateRefusedError, match=r"not confined.*NoNewPrivs.*Seccomp"):
        check_confined(os.getpid(), os.getpid(), has_filter=True)
    with WorkerHost(BubblewrapIsolation(), LIMITS) as host:
        host.prestart()
        assert host._waiting is not None
        inside = max(descendants(host._waiting.result().sandbox.process.pid))
        with pytest.raises(TemplateRefusedError, match="uts, ipc, user, pid, net, mnt"):
            check_confined(os.getpid(), inside, has_filter=True)


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    pending = [pid]
    while pending:
        for thread in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            try:
                children = {int(word) for word in thread.read_text().split()}
            except OSError:
                continue
            pending.extend(children - found)
            found |= children
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody has waited for yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + GONE_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_pool_counts_users() -> None:
    isolation = BubblewrapIsolation()
    first, second = isolation.acquire_template(threads=7), isolation.acquire_template(threads=7)
    assert first is second
    POOL.release(first)
    third = isolation.acquire_template(threads=7)
    assert third is second
    for template in (second, third):
        POOL.release(template)
    again = isolation.acquire_template(threads=7)
    assert again is not first
    POOL.release(again)
