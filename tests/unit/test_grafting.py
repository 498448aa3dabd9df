"""A mechanism in the place of another: it does there what it does in its own program, whatever names meet."""

from __future__ import annotations

from typing import Any

import pytest

from forge.grafting import graft
from forge.program_source import check_convention

HOST = '''"""A host."""

FACTOR = 10
MECHANISMS = ("push",)


def helper(number):
    return -number


def push(session, layer):
    """Something else."""
    return helper(FACTOR)


def without_push(session, layer):
    return 0


def quantize(session):
    return push(session, 5)
'''
DONOR = """from __future__ import annotations

import math

FACTOR, SHIFT = 2, 1
MECHANISMS = ("boost",)


def helper(number):
    return number * FACTOR + SHIFT


def boost(first, second):
    return helper(first) + math.floor(second)


def without_boost(first, second):
    return first


def quantize(session):
    raise RuntimeError("the donor is never entered")
"""


def run(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(source, "program", "exec"), names)
    return names["quantize"](3)


def test_it_does_in_the_host_what_it_does_at_home() -> None:
    source = graft(HOST, "push", DONOR, "boost")
    assert source is not None
    assert check_convention(source) == ()
    assert run(HOST) == -10
    assert run(source) == (3 * 2 + 1) + 5


@pytest.mark.parametrize(
    ("host", "name", "donor", "donor_name"),
    [
        (HOST, "push", DONOR, "gone"),
        (HOST, "gone", DONOR, "boost"),
        (HOST, "push", DONOR.replace("boost(first, second)", "boost(first)"), "boost"),
        (HOST, "push", DONOR.replace("boost(first, second)", "boost(first, *second)"), "boost"),
        (HOST, "push", DONOR.replace("boost(first, second)", "boost(first, *, second)"), "boost"),
        (
            HOST,
            "push",
            DONOR.replace("    return helper(first)", "    global FACTOR\n    return helper(first)"),
            "boost",
        ),
        (HOST, "push", "def boost(", "boost"),
    ],
)
def test_what_cannot_stand_for_another_is_not_grafted(host: str, name: str, donor: str, donor_name: str) -> None:
    assert graft(host, name, donor, donor_name) is None


def test_names_of_keyword_parameters_count_and_others_do_not() -> None:
    keyword = HOST.replace("(session, layer)", "(session, *, layer)").replace(
        "push(session, 5)", "push(session, layer=5)"
    )
    donor = DONOR.replace("(first, second)", "(first, *, layer)").replace("floor(second)", "floor(layer)")
    source = graft(keyword, "push", donor, "boost")
    assert source is not None
    assert run(source) == 12
