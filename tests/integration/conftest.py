"""One host of workers for each file of tests, and nothing that outlives a test."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from evaluators.bubblewrap import BubblewrapIsolation
from evaluators.worker_host import WorkerHost
from tests.worker_runs import LIMITS, command_lines


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(BubblewrapIsolation(), LIMITS) as host:
        host.prestart()
        yield host


@pytest.fixture
def no_survivors() -> Iterator[None]:
    """No test leaves a process behind but the worker that waits for the next one."""
    yield
    deadline = time.monotonic() + 5
    while leftovers := [name for name in command_lines() if b"survivor" in name]:
        assert time.monotonic() < deadline, leftovers
        time.sleep(0.05)
