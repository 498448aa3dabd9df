"""What programs leave on a GPU: nothing."""

from __future__ import annotations

import time

import pytest
import torch

from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox import BubblewrapIsolation
from evaluators.worker_host import WorkerHost
from tests.integration.test_sandbox import FakeServer

pytestmark = pytest.mark.gpu

HOLD = """
import os, sys, time, torch
def quantize(session):
    kept = [torch.ones(1 << 28, device="cuda") for _ in range(4)]
    {ending}
"""
ENDINGS = {
    "endless": ("while True: time.sleep(1)", (Outcome.TIMED_OUT,)),
    "killed": ("os.kill(os.getpid(), 9)", (Outcome.CRASHED,)),
    "finished": ("pass", (None,)),
    "a child that stays": ("os.fork() or (os.setsid(), time.sleep(1000))", (None,)),
}


@pytest.mark.parametrize("case", list(ENDINGS))
def test_no_gpu_memory_is_left(case: str) -> None:
    ending, outcomes = ENDINGS[case]
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    with WorkerHost(BubblewrapIsolation(gpu=True), Limits(wall_s=30.0)) as host:
        report = host.run(HOLD.format(ending=ending), FakeServer())
        assert report.outcome in outcomes, report
        deadline = time.monotonic() + 10
        while free - torch.cuda.mem_get_info()[0] > 1 << 28:
            assert time.monotonic() < deadline, f"{free - torch.cuda.mem_get_info()[0]} bytes of the GPU are still held"
            time.sleep(0.1)
