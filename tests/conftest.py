"""What every test runs under: one thread per operation, no network to a language model, no colours."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: with several test processes on few cores, barriers inside operations cost an order of magnitude.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NO_COLOR"] = "1"
for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
    os.environ.pop(name, None)

import torch  # noqa: E402  (after the number of threads is set)

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # kernels are run by Triton's interpreter; read when triton is imported

# A busy machine draws examples slowly; that says nothing about the code.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sandbox",
        choices=("bubblewrap", "none"),
        default="bubblewrap",
        help="isolation of the attack suite; with none one sees which properties need it",
    )


_LONGEST_FIRST = ("test_other_subject.py", "test_quickstart.py", "test_ledger_load.py")
"""Files that take minutes for few tests: begun last they would leave one test process with nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONGEST_FIRST)  # the order of all others stays
