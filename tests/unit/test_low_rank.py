"""Low-rank corrections against a dense optimum, and the random control of the same size."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from forge_kernels.rules import LowRank
from forge_kernels.solvers.low_rank import fit_low_rank


def data(num_inputs: int, num_outputs: int, *, tokens: int = 200, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_inputs + num_outputs)
    spread_K = torch.randn(num_inputs, generator=generator, dtype=torch.float64).exp()
    z_TK = torch.randn(tokens, num_inputs, generator=generator, dtype=torch.float64) * spread_K
    true_NK = torch.randn(num_outputs, 6, generator=generator, dtype=torch.float64) @ torch.randn(
        6, num_inputs, generator=generator, dtype=torch.float64
    )
    e_TN = z_TK @ true_NK.T + noise * torch.randn(tokens, num_outputs, generator=generator, dtype=torch.float64)
    return z_TK, e_TN


def left_over(low_rank: LowRank, z_TK: Tensor, e_TN: Tensor) -> float:
    return float((e_TN - z_TK @ low_rank.a_RK.double().T @ low_rank.b_NR.double().T).square().sum())


def dense_optimum(z_TK: Tensor, e_TN: Tensor, rank: int) -> float:
    """Return the least squared error of any map of this rank: the least-squares fit, cut to its leading directions."""
    fit_TN = z_TK @ torch.linalg.lstsq(z_TK, e_TN, driver="gelsd").solution
    values = torch.linalg.svdvals(fit_TN)
    return float((e_TN - fit_TN).square().sum() + values[rank:].square().sum())


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(24, 10), (10, 24), (16, 16)])
@pytest.mark.parametrize("rank", [1, 3, 10])
def test_reaches_the_dense_optimum_of_its_rank(num_inputs: int, num_outputs: int, rank: int) -> None:
    z_TK, e_TN = data(num_inputs, num_outputs)
    low_rank = fit_low_rank(z_TK, e_TN, rank, damping=0.0)
    assert low_rank.rank == rank
    assert low_rank.a_RK.shape == (rank, num_inputs)
    assert low_rank.b_NR.shape == (num_outputs, rank)
    assert low_rank.a_RK.dtype == low_rank.b_NR.dtype == torch.bfloat16
    optimum = dense_optimum(z_TK, e_TN, rank)
    reached = left_over(low_rank, z_TK, e_TN)
    # bfloat16 keeps 8 bits, so the part that is explained can be off by 2^-9 of itself per factor.
    explained = float(e_TN.square().sum()) - optimum
    assert optimum <= reached * (1 + 1e-9)
    assert reached <= optimum + 2e-5 * explained + 1e-3 * optimum


def test_damping_is_a_ridge_on_the_correction() -> None:
    z_TK, e_TN = data(12, 12)
    full = fit_low_rank(z_TK, e_TN, 12, damping=0.5)
    gram_KK = z_TK.T @ z_TK
    ridge_KK = gram_KK + 0.5 * gram_KK.diagonal().mean() * torch.eye(12)
    expected_KN = torch.linalg.solve(ridge_KK, z_TK.T @ e_TN)
    actual_KN = full.a_RK.double().T @ full.b_NR.double().T
    assert float((actual_KN - expected_KN).norm() / expected_KN.norm()) < 0.01


def test_principal_directions_beat_random_ones_of_the_same_size_and_random_ones_beat_nothing() -> None:
    z_TK, e_TN = data(40, 30, tokens=400)
    generator = torch.Generator().manual_seed(0)
    principal = left_over(fit_low_rank(z_TK, e_TN, 4), z_TK, e_TN)
    chance = left_over(fit_low_rank(z_TK, e_TN, 4, directions="random", generator=generator), z_TK, e_TN)
    assert principal < 0.7 * chance
    assert chance < float(e_TN.square().sum())


def test_random_directions_are_fitted_by_least_squares() -> None:
    z_TK, e_TN = data(20, 15)
    low_rank = fit_low_rank(z_TK, e_TN, 5, damping=0.0, directions="random", generator=torch.Generator().manual_seed(3))
    branch_TR = z_TK @ low_rank.a_RK.double().T
    best_RN = torch.linalg.lstsq(branch_TR, e_TN).solution
    torch.testing.assert_close(low_rank.b_NR.double().T, best_RN, rtol=5e-3, atol=1e-3)


def test_random_directions_repeat_with_their_seed() -> None:
    z_TK, e_TN = data(20, 15)

    def draw(seed: int) -> Tensor:
        return fit_low_rank(z_TK, e_TN, 5, directions="random", generator=torch.Generator().manual_seed(seed)).a_RK

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("directions", ["principal", "random"])
def test_degenerate_data(directions: Literal["principal", "random"]) -> None:
    z_TK, e_TN = data(40, 30, tokens=8)

    def fit(inputs_TK: Tensor, residual_TN: Tensor) -> LowRank:
        return fit_low_rank(
            inputs_TK, residual_TN, 12, directions=directions, generator=torch.Generator().manual_seed(0)
        )

    few = fit(z_TK, e_TN)
    assert left_over(few, z_TK, e_TN) < float(e_TN.square().sum())
    nothing_left = fit(z_TK, torch.zeros_like(e_TN))
    nothing_there = fit(torch.zeros_like(z_TK), e_TN)
    for low_rank in (few, nothing_left, nothing_there):
        assert torch.isfinite(low_rank.a_RK).all()
        assert torch.isfinite(low_rank.b_NR).all()
    assert nothing_left.b_NR.eq(0).all()
    assert nothing_there.b_NR.eq(0).all()


def test_refusals() -> None:
    z_TK, e_TN = data(20, 15)
    with pytest.raises(ValueError, match=r"inputs \(200, 20\) and residual \(199, 15\)"):
        fit_low_rank(z_TK, e_TN[1:], 2)
    for rank in (0, 16):
        with pytest.raises(ValueError, match=rf"rank is {rank}; for 20 inputs and 15 outputs use 1 to 15"):
            fit_low_rank(z_TK, e_TN, rank)
    with pytest.raises(ValueError, match="needs a generator"):
        fit_low_rank(z_TK, e_TN, 2, directions="random")
    with pytest.raises(ValueError, match="unknown directions 'best'"):
        fit_low_rank(z_TK, e_TN, 2, directions="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual has 3000 non-finite"):
        fit_low_rank(z_TK, e_TN * torch.nan, 2)
