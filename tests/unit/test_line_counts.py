"""Counting of a program's lines, and what of it is believed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from evaluators.line_counts import MAX_FUNCTIONS, MAX_LINES, MAX_NAME, LineCounter, check_line_hits

SOURCE = """
def used(number):
    total = 0
    for index in range(number):
        total += index
    return total

def dead():
    return 1

def caught():
    try:
        raise ValueError
    except ValueError:
        return None

def closing(number):
    def inner():
        return number
    return inner()

def quantize(number):
    if False:
        dead()
    caught()
    closing(number)
    return used(number)
"""


def counted(path: Path, number: int, *, in_thread: bool = False) -> dict[str, int]:
    names: dict[str, object] = {}
    exec(compile(SOURCE, str(path), "exec"), names)
    quantize = names["quantize"]
    assert callable(quantize)
    counter = LineCounter(str(path))
    with counter:
        if in_thread:
            thread = threading.Thread(target=quantize, args=(number,))
            thread.start()
            thread.join()
        else:
            quantize(number)
    assert sys.gettrace() is None
    quantize(number)
    return counter.hits


@pytest.mark.parametrize("in_thread", [False, True])
def test_lines_are_counted_by_function_of_the_top_level(tmp_path: Path, in_thread: bool) -> None:
    hits = counted(tmp_path / "program.py", 3, in_thread=in_thread)
    # total = 0, three times the loop and its body, the loop's end, return; `inner` counts for `closing`.
    assert hits == {"quantize": 4, "caught": 4, "closing": 3, "used": 9}


def test_a_long_loop_is_counted_to_the_limit(tmp_path: Path) -> None:
    assert counted(tmp_path / "program.py", 10 * MAX_LINES)["used"] == MAX_LINES


def test_what_a_worker_sends_comes_back_as_it_is(tmp_path: Path) -> None:
    hits = counted(tmp_path / "program.py", 3)
    assert check_line_hits(hits) == hits
    assert check_line_hits({}) == {}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"quantize": True},
        {"quantize": 1.0},
        {"quantize": "1"},
        {"quantize": -1},
        {"quantize": 0},
        {"quantize": MAX_LINES + 1},
        {"two words": 1},
        {"": 1},
        {"\x1b[31m": 1},
        {"a" * (MAX_NAME + 1): 1},
        {f"f{index}": 1 for index in range(MAX_FUNCTIONS + 1)},
        {1: 1},
    ],
)
def test_anything_else_is_no_count(value: object) -> None:
    assert check_line_hits(value) is None
