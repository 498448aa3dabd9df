"""What an attack is: a whole program, the property that it attacks, and what must be true afterwards.

Sources are texts that hold marks such as ``@HOME@``; `tests.attacks.world` fills in places and ports of the host. What
must be true is asserted on what trusted code saw: the result, the artifact, the host's processes, files, listeners and
descriptors. What a program says of itself is searched for secrets and otherwise believed in nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evaluators.results import EvaluationResult, Outcome

if TYPE_CHECKING:
    from evaluators.evaluator import Evaluator
    from tests.attacks.world import World

Check = Callable[["World", "Evaluator", EvaluationResult], list[str]]
"""Looks at what is left after an attack, and names what should not be."""

Pace = Literal["patient", "hasty"]
"""The evaluator whose limits an attack meets: programs without an end go to the one with little time."""

PRELUDE = """
import os, sys, time
import torch
from forge_kernels import *

MECHANISMS = ()


def honest(session):
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer)))


def tried(action):
    try:
        return action()
    except Exception as error:
        return error


"""
HONEST = PRELUDE + "def quantize(session):\n    honest(session)\n"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One program against one property.

    name: unique, a Python identifier.
    theme: the module that it is from.
    property: what holds although the program tries otherwise; one sentence.
    source: the whole text of the program.
    outcomes: how its evaluation may end.
    reason: what the recorded reason contains.
    scores_as_honest: the losses are those of `HONEST`, bit for bit.
    check: looks for what is left.
    then: a program that is evaluated next; it logs what it found of the first, and its log must stay empty.
    pace: which evaluator.
    quick: in the default suite.
    needs_isolation: without isolation the property does not hold.
    harm: why it is never run without isolation; empty where it is harmless.
    """

    name: str
    theme: str
    property: str
    source: str
    outcomes: tuple[Outcome, ...]
    reason: str = ""
    scores_as_honest: bool = False
    check: Check | None = None
    then: str = ""
    pace: Pace = "patient"
    quick: bool = False
    needs_isolation: bool = False
    harm: str = ""


def program(body: str, *, head: str = "") -> str:
    """Return the source of a program with this body of ``quantize(session)``."""
    return (
        PRELUDE
        + textwrap.dedent(head)
        + "\n\ndef quantize(session):\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
    )


def log_is_empty(world: World, evaluator: Evaluator, result: EvaluationResult) -> list[str]:
    """A check for programs that log every success."""
    return [f"it succeeded in: {result.program_log[:300]}"] if result.program_log else []
