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


_LONGEST_FIRST = (
    "test_quickstart.py",
    "test_no_isolation.py",
    "test_crash_points.py",
    "test_other_subject.py",
    "test_sandbox_attacks.py",
    "test_interruptions.py",  # begins with what test_crash_points has made, and would wait for it
    "test_ledger_properties.py",
    "test_ledger_load.py",
    "test_ledger_kills.py",
    "test_storage_failures.py",
    "test_campaign.py",
    "test_promotion.py",
    "test_bad_input.py",
    "test_isolation_bench.py",
)
"""Files that take long: begun last they would leave one test process with nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # the order of all others stays
