"""Closed intervals of finite numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class Interval:
    """A closed interval of finite numbers; ValueError when reversed or not finite."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(f"interval [{self.low}, {self.high}] is not finite")
        if self.low > self.high:
            raise ValueError(f"interval [{self.low}, {self.high}] is reversed; the low end comes first")

    @property
    def width(self) -> float:
        return self.high - self.low

    def contains(self, other: float | Interval) -> bool:
        """Whether a number or a whole interval lies inside, ends included."""
        if isinstance(other, Interval):
            return self.low <= other.low and other.high <= self.high
        return self.low <= other <= self.high

    def gap(self, other: Interval) -> float:
        """Return the distance between the two nearest ends; 0 or less when they overlap."""
        return max(self.low - other.high, other.low - self.high)

    def overlaps(self, other: Interval) -> bool:
        return self.gap(other) <= 0

    def is_disjoint(self, other: Interval, margin: float = 0.0) -> bool:
        """Whether the gap between the two is more than `margin`."""
        return self.gap(other) > margin

    def widened(self, by: float) -> Interval:
        """Return the interval with `by` >= 0 added at both ends."""
        if by < 0:
            raise ValueError(f"an interval is widened by 0 or more, not by {by:g}")
        return Interval(low=self.low - by, high=self.high + by)

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"
