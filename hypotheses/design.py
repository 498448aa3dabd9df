"""The cheapest set of controls that tells every pair of rivals apart.

A control separates two rivals when their predicted intervals for it are disjoint by more than the width of the interval
that the measurement is expected to have. Choosing controls is then a weighted set cover: every separable pair covered, at
minimum cost in evaluator calls. It is solved exactly, as an integer program; among optima the set whose sorted content
hashes come first is taken, so the choice does not depend on the order in which controls were written down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from hypotheses.effects import Interval
from hypotheses.predictions import Prediction

Pair = tuple[str, str]
"""Two hypothesis keys in alphabetical order."""


@dataclass(frozen=True, kw_only=True)
class ControlOption:
    """A control that could be run: its cost in evaluator calls (at least 1) and the content hash of its program."""

    key: str
    cost: int
    content_hash: str

    def __post_init__(self) -> None:
        if self.cost < 1:
            raise ValueError(f"control {self.key!r} costs {self.cost} calls; a control costs at least 1")


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which controls to run, and why these.

    chosen: control keys, alphabetical; cost: their calls.
    separated: for each pair that the chosen controls separate, the chosen controls that do.
    unseparated: pairs that no control at all separates.
    unaffordable: pairs that only controls beyond the budget separate.
    not_chosen: reason by control key.
    cost_of_all: calls of running every control instead; cost_of_cover: of the cheapest set separating every separable pair.
    widths: expected measurement width by control key; infinite where nothing can be measured.
    feasible: whether running the chosen set is useful; `reason` says why or why not.
    """

    chosen: tuple[str, ...]
    cost: int
    separated: Mapping[Pair, tuple[str, ...]]
    unseparated: tuple[Pair, ...]
    unaffordable: tuple[Pair, ...]
    not_chosen: Mapping[str, str]
    cost_of_all: int
    cost_of_cover: int
    widths: Mapping[str, float]
    feasible: bool
    reason: str
