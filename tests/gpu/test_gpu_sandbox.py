"""Hostile programs beside a GPU: ended on time, with nothing of theirs left on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evaluators.contract import MXFP4_W4A4
from evaluators.evaluator import Evaluator
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox import BubblewrapIsolation
from evaluators.subjects import subject_from_model
from tests.tiny_models import make_tiny_corpus, make_tiny_model

pytestmark = pytest.mark.gpu

WALL_S = 20.0
"""Enough for a CUDA context in the sandbox."""
COMPILING_S = 150.0
"""Enough to compile GPTQ's kernels there, too."""
HOARD = 8 << 30
SLACK = 1 << 30
"""Bytes by which free memory may differ while nothing of a program is left."""

HONEST = """
from forge_kernels import encode
MECHANISMS = ()
def quantize(session):
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer)))
"""
START = """
import os, signal, time, torch
MECHANISMS = ()
def quantize(session):
    hoard = torch.full(({HOARD} // 4,), 1.5, device="cuda")
    torch.cuda.synchronize()
"""
ENDLESS = {
    "holds memory and sleeps": "    time.sleep(1000)",
    "never stops launching": "    while True: hoard.mul_(1.0)",
    "one kernel that runs for minutes": "    torch.cuda._sleep(10**12)\n    torch.cuda.synchronize()",
    "ignores SIGTERM": "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000)",
    "a daemon with a context of its own": """
    del hoard
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import subprocess, sys
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            time.sleep(1000)
        os._exit(0)
    hoard = torch.ones(2**28, device="cuda")
    time.sleep(1000)""",
}
ENDED = {
    "killed": ("    os.kill(os.getpid(), 9)", Outcome.CRASHED),
    "an exception": ("    1 / 0", Outcome.CRASHED),
    "a child that stays": ("    os.fork() or (os.setsid(), time.sleep(1000))", Outcome.CONTRACT),
}
"""Programs that end by themselves; the last one installs nothing, which the contract does not allow."""


def tiny_evaluator(artifacts: Path, wall_s: float) -> Evaluator:
    subject = subject_from_model(make_tiny_model("llama").cuda(), name="tiny-llama")
    corpus = make_tiny_corpus(subject)
    return Evaluator(subject, corpus, MXFP4_W4A4, BubblewrapIsolation(), Limits(wall_s=wall_s), artifacts)


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    with tiny_evaluator(tmp_path_factory.mktemp("artifacts"), WALL_S) as evaluator:
        yield evaluator


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def assert_given_back(free: int) -> None:
    """Wait until the device has as much free memory as before, to within `SLACK`."""
    deadline = time.monotonic() + 5
    while free_bytes() < free - SLACK and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free_bytes() >= free - SLACK, f"{(free - free_bytes()) / 2**30:.2f} GiB of the device are not given back"


@pytest.mark.parametrize("name", ENDED)
def test_nothing_is_left_of_programs_that_end(evaluator: Evaluator, name: str) -> None:
    body, outcome = ENDED[name]
    free = free_bytes()
    result = evaluator.evaluate(START.replace("{HOARD}", str(HOARD)) + body, split="search")
    assert result.outcome is outcome, (result.outcome, result.reason, result.program_log)
    assert_given_back(free)


@pytest.mark.parametrize("name", ENDLESS)
def test_nothing_is_left_on_the_device(evaluator: Evaluator, name: str) -> None:
    before = evaluator.evaluate(HONEST, split="search")
    assert before.outcome is Outcome.SCORED, before.reason
    free = free_bytes()
    start = time.monotonic()
    result = evaluator.evaluate(START.replace("{HOARD}", str(HOARD)) + ENDLESS[name], split="search")
    took = time.monotonic() - start
    assert result.outcome is Outcome.TIMED_OUT, (result.outcome, result.reason, result.program_log)
    assert took < WALL_S + 5, f"ended after {took:.1f} s"
    assert_given_back(free)
    after = evaluator.evaluate(HONEST, split="search")
    assert after.chunk_nll == before.chunk_nll


def test_a_program_quantizes_on_the_gpu_inside_the_sandbox(evaluator: Evaluator) -> None:
    program = HONEST.replace(
        "    for layer", "    assert session.device.type == 'cuda', session.device\n    for layer"
    ).replace("session.weight(layer)", "session.weight(layer).cuda()")
    result = evaluator.evaluate(program, split="search")
    assert result.outcome is Outcome.SCORED, (result.reason, result.program_log)
    assert result.sandbox == "bubblewrap"
    assert result.device.startswith("cuda")


def test_gptq_runs_in_the_sandbox_and_says_how(tmp_path: Path) -> None:
    program = """
from forge_kernels import gptq
from forge_kernels.solvers.gptq import choose_panel_encoder
MECHANISMS = ()
def quantize(session):
    for group in session.groups:
        moment = session.second_moment(group)
        for layer in group.layers:
            session.install(layer, gptq(session.weight(layer), moment))
    device = session.weight(session.layers[0]).device
    print("panels by", choose_panel_encoder(device).__name__)
"""
    with tiny_evaluator(tmp_path, COMPILING_S) as evaluator:
        result = evaluator.evaluate(program, split="search")
    assert result.outcome is Outcome.SCORED, (result.reason, result.program_log)
    says_eager = "GPTQ runs as eager operations" in result.program_log
    assert ("panels by encode_panel_triton" in result.program_log) != says_eager, result.program_log
    print(result.program_log)


def test_out_of_device_memory_is_the_programs_outcome(evaluator: Evaluator) -> None:
    program = "import torch\nMECHANISMS = ()\ndef quantize(session):\n    torch.empty(2**42, device='cuda')\n"
    result = evaluator.evaluate(program, split="search")
    assert result.outcome is Outcome.OUT_OF_MEMORY, (result.outcome, result.reason)


def test_artifacts_are_the_same_bytes_on_another_evaluation(evaluator: Evaluator) -> None:
    first, second = (evaluator.evaluate(HONEST, split="search") for _ in range(2))
    assert first.artifact_hash == second.artifact_hash
    assert first.chunk_nll == second.chunk_nll
