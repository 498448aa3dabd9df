"""Weighted set cover with repetition, solved exactly as an integer program, with a stated choice among optima."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def cheapest_cover(
    costs: Array, covers: Array, budget: int, *, helps: Array | None = None, wanted: Array | None = None, least: int = 0
) -> tuple[tuple[int, ...], int]:
    """Return the chosen columns, and the cost of the cheapest cover of all rows whatever the budget.

    Within the budget, as many rows as can be are covered; then as much of the help that is wanted for the covered rows is given,
    and as many columns up to `least` taken, as can be, each unit worth the same; then at the least cost. Of several optima, the
    one whose sorted columns come first.

    Args:
        costs: (C,) whole numbers, at least 1.
        covers: (P, C) 1 where the control separates the pair; every row has one.
        budget: the most the chosen ones may cost together.
        helps: (P, C) 1 where the control helps with the pair; none does by default.
        wanted: (P,) how many helping columns each row should have.
        least: how many columns there should be in all, if any row is covered.
    """
    # Imported here: slow to load, and most commands design nothing.
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_pairs, num_controls = covers.shape
    if num_pairs == 0:
        return (), 0
    helps = np.zeros_like(covers) if helps is None else helps
    wanted = np.zeros(num_pairs) if wanted is None else np.minimum(wanted, helps.sum(axis=1))
    least = min(least, num_controls)
    # Variables: x (C,) control chosen, y (P,) pair separated, z (P,) help counted, t columns counted.
    size = num_controls + 2 * num_pairs + 1
    x, y = np.arange(num_controls), num_controls + np.arange(num_pairs)
    z, t = y + num_pairs, size - 1

    def weights(*parts: tuple[Any, Any]) -> Array:
        found = np.zeros(size)
        for places, values in parts:
            found[places] = values
        return found

    links = np.zeros((3 * num_pairs + 1, size))
    rows = np.arange(num_pairs)
    links[np.ix_(rows, x)], links[rows, y] = covers, -1.0
    links[np.ix_(num_pairs + rows, x)], links[num_pairs + rows, z] = helps, -1.0
    links[2 * num_pairs + rows, y], links[2 * num_pairs + rows, z] = wanted, -1.0
    links[-1, x], links[-1, t] = 1.0, -1.0
    upper = weights((x, 1.0), (y, 1.0), (z, wanted), (t, least))
    cost, separated, helped = weights((x, costs)), weights((y, 1.0)), weights((z, 1.0), (t, 1.0))

    def solve(objective: Array, *bounds: tuple[Array, float, float], low: Array, high: Array) -> Array | None:
        result = milp(
            objective,
            integrality=np.ones(size),
            bounds=Bounds(low, high),
            constraints=[
                LinearConstraint(links, 0, np.inf),
                *(LinearConstraint(row[None, :], fewest, most) for row, fewest, most in bounds),
            ],
            options={"mip_rel_gap": 0.0},
        )
        if result.status == 2:
            return None
        if result.status != 0:
            raise RuntimeError(f"the control design could not be solved: {result.message}")
        return np.asarray(np.round(result.x), dtype=np.float64)

    def best(objective: Array, *bounds: tuple[Array, float, float]) -> int:
        found = solve(objective, *bounds, low=np.zeros(size), high=upper)
        assert found is not None  # the empty set costs nothing
        return round(float(objective @ found))

    cost_of_cover = best(cost, (separated, num_pairs, np.inf))
    within = (cost, -np.inf, float(max(budget, 0)))
    num_covered = num_pairs if cost_of_cover <= budget else -best(-separated, within)
    if num_covered == 0:
        return (), cost_of_cover
    covered = (separated, float(num_covered), np.inf)
    with_help = (helped, float(-best(-helped, within, covered)), np.inf)
    cheapest = (cost, -np.inf, float(best(cost, within, covered, with_help)))
    low, high = np.zeros(size), upper.copy()
    for index in range(num_controls):
        low[index] = 1.0
        if solve(cost, covered, with_help, cheapest, low=low, high=high) is None:
            low[index] = high[index] = 0.0
    return tuple(int(index) for index in np.flatnonzero(low[:num_controls])), cost_of_cover
