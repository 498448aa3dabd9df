"""Weighted set cover, solved exactly as an integer program, with a stated choice among optima."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def cheapest_cover(costs: Array, covers: Array, budget: int) -> tuple[tuple[int, ...], int]:
    """Return the chosen columns and the cost of the cheapest cover of all rows.

    Where that cost is beyond the budget, the chosen columns cover as many rows as the budget allows, at the least cost.
    Of several optima, the one whose sorted columns come first.

    Args:
        costs: (C,) whole numbers, at least 1 (so that no optimum is part of another).
        covers: (P, C) 1 where the control separates the pair; every row has one.
        budget: the most the chosen ones may cost together.
    """
    # Imported here: slow to load, and most commands design nothing.
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_pairs, num_controls = covers.shape
    if num_pairs == 0:
        return (), 0
    free_low, free_high = np.zeros(num_controls), np.ones(num_controls)
    by_cost, by_pairs = np.r_[costs, np.zeros(num_pairs)], np.r_[np.zeros(num_controls), -np.ones(num_pairs)]

    def solve(
        objective: Array,
        max_cost: float,
        min_pairs: int,
        low: Array = free_low,
        high: Array = free_high,
    ) -> Array | None:
        """Variables: x (C,) control chosen, y (P,) pair separated, with y_p <= sum of the x that separate p."""
        result = milp(
            objective,
            integrality=np.ones(num_controls + num_pairs),
            bounds=Bounds(np.r_[low, np.zeros(num_pairs)], np.r_[high, np.ones(num_pairs)]),
            constraints=[
                LinearConstraint(np.hstack([covers, -np.eye(num_pairs)]), 0, np.inf),
                LinearConstraint(by_cost[None, :], -np.inf, max_cost),
                LinearConstraint(-by_pairs[None, :], min_pairs, np.inf),
            ],
            options={"mip_rel_gap": 0.0},
        )
        if result.status == 2:
            return None
        if result.status != 0:
            raise RuntimeError(f"the control design could not be solved: {result.message}")
        return np.asarray(np.round(result.x), dtype=np.float64)

    everything = solve(by_cost, float(costs.sum()), num_pairs)
    assert everything is not None  # all controls together cover every pair
    cost_of_cover = best_cost = round(float(by_cost @ everything))
    num_covered = num_pairs
    if cost_of_cover > budget:
        most = solve(by_pairs, max(budget, 0), 0)
        assert most is not None  # the empty set costs nothing
        num_covered = round(float(-by_pairs @ most))
        if num_covered == 0:
            return (), cost_of_cover
        cheapest = solve(by_cost, budget, num_covered)
        assert cheapest is not None
        best_cost = round(float(by_cost @ cheapest))
    low, high = free_low.copy(), free_high.copy()
    for index in range(num_controls):
        low[index] = 1.0
        if solve(by_cost, best_cost, num_covered, low, high) is None:
            low[index] = high[index] = 0.0
    return tuple(int(index) for index in np.flatnonzero(low)), cost_of_cover
