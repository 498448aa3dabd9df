"""Block transforms: the covariances they promise, their conditioning, and blocks with nothing in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.ops.hadamard import hadamard_matrix
from forge_kernels.solvers.wush import wush_matrices
from forge_kernels.transforms import BlockMatrix, apply_transform, transform_weight


def data(seed: int, num_inputs: int = 96, *, tokens: int = 400, spread: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    scale_K = (torch.randn(num_inputs, generator=generator, dtype=torch.float64) * spread).exp()
    mixing = torch.randn(num_inputs, num_inputs, generator=generator, dtype=torch.float64) / num_inputs**0.5
    x_TK = (
        torch.randn(tokens, num_inputs, generator=generator, dtype=torch.float64)
        @ (mixing + torch.eye(num_inputs))
        * scale_K
    )
    weights = [torch.randn(n, num_inputs, generator=generator, dtype=torch.float64) / scale_K for n in (64, 40)]
    return x_TK, weights


def moment_of(x_TK: Tensor) -> Tensor:
    return x_TK.T @ x_TK / len(x_TK)


@pytest.mark.parametrize("seed", range(4))
def test_activations_and_weights_end_with_one_covariance_flat_on_the_diagonal(seed: int) -> None:
    x_TK, weights = data(seed)
    # With hardly any damping the formula is exact.
    matrix_Bij = wush_matrices(moment_of(x_TK), weights, damping=1e-10, dtype=torch.float64)
    transform = (BlockMatrix(matrix_Bij=matrix_Bij),)
    moved_TK = apply_transform(transform, x_TK)
    moved_NK = torch.cat([transform_weight(transform, weight) for weight in weights])
    for b in range(3):
        run = slice(32 * b, 32 * b + 32)
        activation_jj = moment_of(moved_TK[:, run])
        weight_jj = moment_of(moved_NK[:, run])
        torch.testing.assert_close(activation_jj, weight_jj, rtol=1e-5, atol=1e-5 * float(weight_jj.abs().max()))
        diagonal_j = activation_jj.diagonal()
        assert float(diagonal_j.max() / diagonal_j.min()) < 1 + 1e-5, "all channels of a block carry the same variance"
        spectrum_jj = hadamard_matrix(32, torch.float64) @ activation_jj @ hadamard_matrix(32, torch.float64)
        off = spectrum_jj - torch.diag(spectrum_jj.diagonal())
        assert float(off.abs().max()) < 1e-5 * float(spectrum_jj.max()), "H S H with S diagonal"


@given(
    seed=st.integers(0, 10**6),
    tokens=st.sampled_from([1, 5, 40, 300]),
    spread=st.floats(0, 6),
    magnitude=st.sampled_from([1e-12, 1.0, 1e12]),
)
@settings(max_examples=40, deadline=None)
def test_matrices_are_invertible_within_the_contract_and_preserve_the_product(
    seed: int, tokens: int, spread: float, magnitude: float
) -> None:
    x_TK, weights = data(seed, tokens=tokens, spread=spread)
    matrix_Bij = wush_matrices(moment_of(x_TK) * magnitude, weights)
    assert matrix_Bij.dtype == torch.bfloat16
    assert matrix_Bij.shape == (3, 32, 32)
    assert torch.isfinite(matrix_Bij).all()
    condition = float(torch.linalg.cond(matrix_Bij.double()).max())
    assert condition < 1e4, f"condition number {condition}"
    transform = (BlockMatrix(matrix_Bij=matrix_Bij),)
    for weight_NK in weights:
        product = apply_transform(transform, x_TK) @ transform_weight(transform, weight_NK).T
        torch.testing.assert_close(
            product, x_TK @ weight_NK.T, rtol=1e-9, atol=1e-9 * float(x_TK.norm() * weight_NK.norm())
        )


def test_it_lowers_the_error_of_a_layer_that_is_quantized_on_both_sides() -> None:
    x_TK, weights = data(0, 256, tokens=1000)
    x_TK, weight_NK = x_TK.float(), weights[0].float()
    wanted = x_TK @ weight_NK.T
    transform = (BlockMatrix(matrix_Bij=wush_matrices(moment_of(x_TK), [weight_NK])),)

    def error(moved_TK: Tensor, moved_NK: Tensor) -> float:
        return float((fake_quantize(moved_TK) @ fake_quantize(moved_NK).T - wanted).norm() / wanted.norm())

    plain = error(x_TK, weight_NK)
    balanced = error(apply_transform(transform, x_TK), transform_weight(transform, weight_NK))
    assert balanced < 0.8 * plain


def test_blocks_with_nothing_in_them_get_the_plain_hadamard_matrix() -> None:
    x_TK, weights = data(0)
    x_TK[:, :32] = 0
    for weight_NK in weights:
        weight_NK[:, 64:] = 0
    matrix_Bij = wush_matrices(moment_of(x_TK), weights, dtype=torch.float32)
    assert torch.equal(matrix_Bij[0], hadamard_matrix(32))
    assert torch.equal(matrix_Bij[2], hadamard_matrix(32))
    assert not torch.equal(matrix_Bij[1], hadamard_matrix(32))


def test_rows_of_all_weights_count_alike() -> None:
    x_TK, weights = data(0)
    together = wush_matrices(moment_of(x_TK), [torch.cat(weights)], dtype=torch.float64)
    # Eigenvectors are found up to sign, so compare what does not depend on it.
    apart = wush_matrices(moment_of(x_TK), weights, dtype=torch.float64)
    torch.testing.assert_close(apart.mT @ apart, together.mT @ together, rtol=1e-8, atol=1e-10)


def test_refusals() -> None:
    x_TK, weights = data(0)
    moment_KK = moment_of(x_TK)
    with pytest.raises(ValueError, match="no weight given"):
        wush_matrices(moment_KK, [])
    with pytest.raises(ValueError, match="multiple of 32"):
        wush_matrices(moment_KK, [weights[0], weights[1][:, :64]])
    with pytest.raises(ValueError, match=r"second moment is \(96, 96\)"):
        wush_matrices(moment_KK, [weights[0][:, :64]])
    with pytest.raises(ValueError, match="damping is 0"):
        wush_matrices(moment_KK, weights, damping=0)
    with pytest.raises(ValueError, match="non-finite"):
        wush_matrices(moment_KK * torch.nan, weights)
    with pytest.raises(ValueError, match="weight has 1 non-finite"):
        wush_matrices(
            moment_KK,
            [weights[0].index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(torch.inf, dtype=torch.float64))],
        )
