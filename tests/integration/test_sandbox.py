"""Programs in real workers: how they end, what they cannot reach, and that nothing is left of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from evaluators.bubblewrap import BubblewrapIsolation
from evaluators.bubblewrap_process import start_bubblewrap
from evaluators.errors import HostError, SandboxUnavailableError
from evaluators.limits import Limits
from evaluators.python_runtime import find_runtime, package_folder
from evaluators.random_streams import keyed_generator
from evaluators.results import Outcome
from evaluators.sandbox import NoIsolation
from evaluators.sandbox_process import Sandbox
from evaluators.template import Template
from evaluators.worker_host import WorkerHost
from tests.worker_runs import LIMITS, FakeServer, quick_first, run

pytestmark = pytest.mark.usefixtures("no_survivors")


def test_a_program_reaches_the_session_and_finishes(host: WorkerHost) -> None:
    report, server = run(
        host,
        """
import torch
from forge_kernels import Encoded, Hadamard
assert [layer.name for layer in session.layers] == ["blocks.0.q"]
assert session.groups[0].layers[0] is session.layers[0]
weight = session.weight(session.layers[0])
codes = (weight % 8).to(torch.uint8)
scales = torch.full((8, 1), 127, dtype=torch.uint8)
session.install("blocks.0.q", Encoded(codes_NK=codes, scales_NB=scales), transform=(Hadamard(size=32),))
session.log(f"{session.gate_loss()} {torch.get_num_threads()}")
session.log(str(torch.randint(0, 2**62, (1,), generator=session.rng("blocks.0.q", "order")).item()))
session.log("\\ud800")
print("to stdout")
""",
    )
    assert report.is_finished, report
    assert report.log_tail == "to stdout\n"
    op, args, (codes, scales) = server.calls[2]
    assert (op, args["layer"], args["transform"]) == ("install", "blocks.0.q", [{"kind": "hadamard", "size": 32}])
    assert torch.equal(codes, (torch.arange(256).reshape(8, 32) % 8).to(torch.uint8))
    assert scales.unique().tolist() == [127]
    draw = torch.randint(0, 2**62, (1,), generator=keyed_generator(11, "blocks.0.q", "order")).item()
    assert server.logged() == ["2.5 1", str(draw), "?"]


def test_a_program_may_catch_a_contract_error_and_go_on(host: WorkerHost) -> None:
    report, server = run(
        host,
        """
from evaluators.errors import ContractError
for attempt in (lambda: session.weight("nowhere"), lambda: session.weight(3), lambda: session.fold("x", [1])):
    try:
        attempt()
    except ContractError as err:
        session.log(str(err))
""",
    )
    assert report.is_finished, report
    assert len(server.logged()) == 3
    assert server.logged()[0] == "unknown layer 'nowhere'"


CRASHES = {
    "an exception": ("1 / 0", Outcome.CRASHED, "ZeroDivisionError: division by zero\n  line 3 in quantize: 1 / 0"),
    "a contract error": ("session.weight('nowhere')", Outcome.CONTRACT, "unknown layer 'nowhere'"),
    "too many tokens": (
        "try:\n    session.inputs('blocks.0.qkv')\nexcept BaseException:\n    pass",
        Outcome.OVER_METERED,
        "spent 10 tokens",
    ),
    "os._exit(0)": ("os._exit(0)", Outcome.CONTRACT, "before quantize returned"),
    "os._exit(3)": ("os._exit(3)", Outcome.CRASHED, "status 3"),
    "sys.exit": ("sys.exit(0)", Outcome.CONTRACT, "SystemExit"),
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", Outcome.CRASHED, "SIGSEGV"),
    "killing itself": ("os.kill(os.getpid(), 9)", Outcome.CRASHED, "SIGKILL"),
    "closing the socket": ("os.closerange(3, 64); time.sleep(60)", Outcome.CONTRACT, "closed its session"),
    "memory error": ("raise MemoryError", Outcome.OUT_OF_MEMORY, "MemoryError"),
    "a hostile exception": (
        "class E(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise E",
        Outcome.CRASHED,
        "E\n",
    ),
    "a forged op": (
        "session._channel.send({'op': 'exec', 'args': {}})\ntime.sleep(60)",
        Outcome.CONTRACT,
        "unknown op",
    ),
    "a forged end": (
        "session._channel.send({'op': 'failed', 'args': {'kind': 'scored', 'reason': ''}})\ntime.sleep(60)",
        Outcome.CONTRACT,
        "malformed",
    ),
    "a raw flood": (
        "s = session._channel._socket\nwhile True:\n    s.sendall(b'x' * 65536)",
        Outcome.CONTRACT,
        "bytes announced",
    ),
    "a file too long": ("open('big', 'wb').write(bytes(1 << 27))", Outcome.CRASHED, "OSError"),
}
QUICK = ("an exception", "a contract error", "too many tokens", "os._exit(0)", "a segmentation fault", "a forged op")


@pytest.mark.parametrize("case", quick_first(CRASHES, QUICK))
def test_failures_are_outcomes_of_the_program(host: WorkerHost, case: str) -> None:
    body, outcome, reason = CRASHES[case]
    report, _ = run(host, body)
    assert report.outcome is outcome, report
    assert reason in report.reason
    assert str(package_folder("evaluators").parent) not in report.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [("def quantize(session:", "SyntaxError"), ("x = 1", "no function quantize"), ("import torchh", "torchh")],
)
def test_programs_that_do_not_load(host: WorkerHost, source: str, reason: str) -> None:
    report = host.run(source, FakeServer())
    assert report.outcome is Outcome.CRASHED
    assert reason in report.reason


def test_a_program_that_is_too_long_never_starts(host: WorkerHost) -> None:
    assert host.run("#" * (2 << 20), FakeServer()).outcome is Outcome.CRASHED


def test_what_runs_after_the_end_changes_nothing(host: WorkerHost) -> None:
    report, server = run(
        host,
        """
import atexit, threading
atexit.register(lambda: session.log("late"))
def later():
    time.sleep(0.2)
    session.log("late")
threading.Thread(target=later, daemon=True).start()
""",
    )
    assert report.is_finished, report
    time.sleep(0.3)
    assert server.logged() == []


def test_the_host_is_out_of_reach(host: WorkerHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-value")
    secret = tmp_path / "ledger.sqlite"
    secret.write_text("secret-value")
    checkout = package_folder("evaluators").parent
    with WorkerHost(BubblewrapIsolation(), LIMITS) as fresh:
        report, server = run(
            fresh,
            f"""
def refused(action):
    try:
        return repr(action())
    except Exception as err:
        return "refused"
import socket, subprocess
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(1)
        s.connect(address)
session.log(str([k for k in os.environ if "KEY" in k or "TOKEN" in k]))
session.log(str("secret-value" in str(os.environ)))
session.log(refused(lambda: open({str(secret)!r}).read()))
session.log(refused(lambda: os.listdir({str(checkout / "forge")!r})))
session.log(refused(lambda: os.listdir({str(checkout / "evaluators" / "nano")!r})))
session.log(refused(lambda: os.listdir("/quantforge/evaluators/nano")))
session.log(refused(lambda: os.listdir("/home")))
session.log(refused(lambda: open("/etc/passwd").read()))
session.log(refused(lambda: connect(socket.AF_INET, ("127.0.0.1", 22))))
session.log(refused(lambda: connect(socket.AF_INET, ("1.1.1.1", 53))))
session.log(refused(lambda: socket.getaddrinfo("example.com", 80)))
session.log(refused(lambda: connect(socket.AF_UNIX, "\\0quantforge-test")))
session.log(refused(lambda: connect(40, (2, 1))))
session.log(refused(lambda: open("/proc/sys/kernel/core_pattern", "w").write("x")))
session.log(refused(lambda: open("/quantforge/evaluators/wire.py", "a").write("x")))
session.log(refused(lambda: open("/dev/x", "w").write("x")))
session.log(refused(lambda: open("/x", "w").write("x")))
session.log(refused(lambda: os.unshare(0x10000000)) if hasattr(os, "unshare") else "refused")
session.log(refused(lambda: subprocess.run(["unshare", "-Ur", "true"], check=True, capture_output=True)))
session.log(refused(lambda: __import__("evaluators.scorer")))
session.log(refused(lambda: __import__("forge")))
session.log(str(sorted(n for n in os.listdir("/proc") if n.isdigit())))
session.log(str(os.getuid()) + " " + open("/proc/self/status").read().split("CapEff:")[1].split()[0])
""",
        )
    assert report.is_finished, report
    keys, in_environment, *refusals, pids, identity = server.logged()
    assert (keys, in_environment) == ("[]", "False")
    assert refusals == ["refused"] * len(refusals)
    # bubblewrap's first process, the command that waits for the worker's end, the worker.
    assert pids == "['1', '2', '3']"
    assert identity == "65534 0000000000000000"


def test_an_abstract_socket_of_the_host_is_out_of_reach(host: WorkerHost) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0quantforge-test")
        listener.listen()
        report, _ = run(
            host, "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect('\\0quantforge-test')"
        )
    assert report.outcome is Outcome.CRASHED
    # Beside a GPU such sockets can be made, because CUDA needs them, but lead nowhere.
    assert "Address family not supported" in report.reason or "ConnectionRefusedError" in report.reason


def test_only_standard_streams_and_the_channel_are_open(host: WorkerHost) -> None:
    report, _ = run(
        host,
        "for fd in sorted(os.listdir('/proc/self/fd'), key=int):\n"
        "    if os.path.lexists(f'/proc/self/fd/{fd}'): print(os.readlink(f'/proc/self/fd/{fd}').split(':')[0])",
    )
    assert sorted(report.log_tail.split("\n")) == [
        "", "/dev/null", "/memfd", "/memfd", "pipe", "pipe", "socket",
    ]  # fmt: skip


def test_folders_of_the_system_where_text_may_lie_are_not_there() -> None:
    options = BubblewrapIsolation().profile(find_runtime(), limits=LIMITS)
    bound = [Path(options[index + 2]) for index, word in enumerate(options) if word.startswith("--ro-bind")]
    for folder in map(
        Path, ("/usr/share/dict", "/usr/src/app", "/usr/local/share", "/usr/local/src", "/opt", "/srv", "/home")
    ):
        above = [path for path in bound if path == folder or path in folder.parents]
        assert above == [], f"{folder} is visible through {above}"


def test_files_in_the_working_folder_are_not_imported(host: WorkerHost) -> None:
    report, server = run(
        host,
        "for name in ('json', 'torch', 'antigravity'):\n    open(name + '.py', 'w').write('raise SystemError(1)')\n"
        "import importlib\nfor name in ('json', 'torch'):\n"
        "    for key in [k for k in sys.modules if k == 'json' or k.startswith('json.')]: del sys.modules[key]\n"
        "import json\nsession.log(json.dumps(os.path.dirname(json.__file__) != os.getcwd()))",
    )
    assert report.is_finished, report
    assert server.logged() == ["true"]


def test_workers_share_nothing(host: WorkerHost) -> None:
    first, _ = run(host, "open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')")
    second, server = run(host, "session.log(str(os.path.exists('/tmp/left') or os.path.exists('/dev/shm/left')))")
    assert first.is_finished, first
    assert second.is_finished, second
    assert server.logged() == ["False"]


def test_a_fault_of_the_server_is_raised_and_the_next_run_works(host: WorkerHost) -> None:
    with pytest.raises(ValueError, match="fault of the server"):
        run(host, "session.second_moment('blocks.0.qkv')")
    assert run(host, "pass")[0].is_finished


def test_a_waiting_worker_that_died_is_replaced(host: WorkerHost) -> None:
    host.prestart()
    assert host._waiting is not None
    host._waiting.result().sandbox.process.kill()
    host._waiting.result().sandbox.process.wait()
    assert run(host, "pass")[0].is_finished


def test_nothing_is_leaked(host: WorkerHost) -> None:
    def count() -> tuple[int, int, int]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)

    host.prestart()
    assert host._waiting is not None
    host._waiting.result().wait_ready()
    before = count()
    with WorkerHost(BubblewrapIsolation(), LIMITS) as other:
        for body in ("pass", "1 / 0", "os._exit(0)", "print('x' * (2 << 20))", "os.fork(); os.fork()"):
            run(other, body)
    assert count() == before


def test_a_sandbox_that_cannot_start_is_the_hosts_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: no namespaces here'; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("evaluators.bubblewrap.find_bubblewrap", lambda: broken)
    with WorkerHost(BubblewrapIsolation(), LIMITS) as host:
        with pytest.raises(SandboxUnavailableError, match="no namespaces here"):
            run(host, "pass")
    with pytest.raises(SandboxUnavailableError, match="cannot make a sandbox"):
        start_bubblewrap(tmp_path / "nothing", [], ["true"])


class BrokenWorkers(NoIsolation):
    """Starts workers that cannot find their packages."""

    def start(
        self, connection: socket.socket, *, limits: Limits, threads: int, template: Template | None = None
    ) -> Sandbox:
        return super().start(connection, limits=limits, threads=-1, template=template)


def test_a_worker_that_does_not_start_is_the_hosts_failure() -> None:
    with WorkerHost(BrokenWorkers(), LIMITS) as host, pytest.raises(HostError, match="did not start"):
        run(host, "pass")


def test_kernel_settings_are_out_of_reach_beside_a_gpu_too() -> None:
    body = """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/proc/x"):
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
"""
    with WorkerHost(BubblewrapIsolation(gpu=True), LIMITS) as host:
        report, _ = run(host, body)
    assert report.is_finished, report
    assert report.log_tail == ""


INSTALLED = """
import sys
from evaluators.limits import Limits
from evaluators.sandbox import BubblewrapIsolation
from evaluators.session import Group, Layer
from evaluators.template import Template
from evaluators.wire import Hello, encode_hello
from evaluators.worker_host import WorkerHost

class Server:
    def dispatch(self, op, args, tensors):
        return encode_hello(Hello((), (), (), "cpu", 0)), []

with WorkerHost(BubblewrapIsolation(), Limits()) as host:
    report = host.run(sys.argv[1], Server())
assert report.is_finished, report
print(report.log_tail)
"""


def test_installed_beside_torch_our_packages_and_data_are_masked(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    ignore = shutil.ignore_patterns("__pycache__", "nano")
    for name in ("evaluators", "forge_kernels"):
        shutil.copytree(package_folder(name), site / name, ignore=ignore)
    for name in ("forge", "hypotheses", "evaluators/nano/nano-llama"):
        (site / name).mkdir(parents=True)
        (site / name / "secret").write_text("secret")
    program = f"""
import os, evaluators.wire, forge_kernels
def quantize(session):
    found = [os.path.join(folder, name) for folder, _, names in os.walk({str(tmp_path)!r}) for name in names]
    found += [os.path.join(folder, name) for folder, _, names in os.walk("/quantforge") for name in names]
    print(evaluators.wire.__file__.startswith("/quantforge"), [name for name in found if name.endswith("secret")])
"""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", INSTALLED, program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.stdout.strip() == "True []", result.stderr + result.stdout


def test_hidden_paths_are_masked() -> None:
    folder = package_folder("torch") / "testing"
    file = package_folder("torch") / "version.py"
    with WorkerHost(BubblewrapIsolation(hide=(folder, file)), LIMITS) as host:
        report, _ = run(host, f"print(os.listdir({str(folder)!r}), os.path.getsize({str(file)!r}))")
        assert report.log_tail == "[] 0\n", report
    with WorkerHost(BubblewrapIsolation(hide=(folder / "_internal" / "data",)), LIMITS) as host:
        report, _ = run(host, f"print(os.listdir({str(folder / '_internal' / 'data')!r}))")
        assert report.log_tail == "[]\n"
