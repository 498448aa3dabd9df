from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.static_checks import MAX_SOURCE_BYTES, static_problems

SOUND = '''"""Mentions __class__ and open() in a docstring, which is harmless."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from forge_kernels import encode
from forge_kernels.transforms import Hadamard

MECHANISMS = ()
SIZE: int = 2 ** 5


class Plan:
    """Holds a rank."""

    def __init__(self, rank):
        self.rank = rank


def quantize(session):
    plan = Plan(int(math.log2(SIZE)))
    rank = getattr(plan, "rank")
    for layer in session.layers:
        session.install(layer, encode(F.relu(session.weight(layer)) + torch.zeros(1)))
'''


def test_sound_programs_pass() -> None:
    assert static_problems(SOUND) == ()


@pytest.mark.parametrize("path", sorted(Path("forge/programs").glob("*.py")), ids=lambda path: path.stem)
def test_shipped_programs_pass(path: Path) -> None:
    assert static_problems(path.read_text(encoding="utf-8")) == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import os", "import of os; a program may import torch, math, forge_kernels"),
        ("import os.path as torch", "import of os.path"),
        ("from evaluators.session import Session", "import of evaluators.session"),
        ("from . import secrets", "import of .;"),
        ("from torch import *", "name what is imported"),
        ("import torch.utils.cpp_extension", "may not be used"),
        ("from torch import load", "import of torch.load"),
        ("from torch.hub import download_url_to_file", "import of torch.hub"),
        ("from math import __loader__", "may not be used"),
        ("X = torch.load('x')", "torch.load may not"),
        ("X = torch.ops.load_library", "torch.ops may not"),
        ("X = eval('1')", "the name eval"),
        ("X = [open][0]", "the name open"),
        ("X = __import__('os')", "the name __import__"),
        ("X = __builtins__", "the name __builtins__"),
        ("X = ().__class__", "the attribute .__class__"),
        ("X = getattr(math, '__loader__')", "double-underscore name"),
        ("X = getattr(math, 'a' + 'b')", "written out in quotes"),
        ("X = '{0.__class__}'.format(1)", "double-underscore name"),
        ("X = f'{1}__class__'", "double-underscore name"),
        ("X = b'__class__'", "double-underscore name"),
        ("if SIZE:\n    pass", "a top-level If statement"),
        ("for X in (1,):\n    pass", "a top-level For statement"),
        ("print(1)", "a top-level Expr statement"),
        ("def quantize(session):\n    pass", "quantize is defined 2 times"),
        ("encode = None", "encode is defined 2 times"),
        ("async def f():\n    pass", "asynchronous"),
        ("def f(:", "does not parse"),
        ("X = '\ud800'", "no Unicode text"),
        ("X = 1  #" + "x" * MAX_SOURCE_BYTES, "at most 65536"),
    ],
)
def test_what_a_program_may_not_hold_is_told(line: str, words: str) -> None:
    problems = static_problems(SOUND + line + "\n")
    assert any(words in problem for problem in problems), problems


def test_a_foreign_source_encoding_is_refused() -> None:
    assert "utf-7" in " ".join(static_problems("# -*- coding: utf-7 -*-\n" + SOUND))
    assert static_problems("# coding: utf-8\n" + SOUND) == ()


@given(st.text(max_size=300))
def test_any_text_is_checked_without_a_crash(source: str) -> None:
    assert isinstance(static_problems(source), tuple)
