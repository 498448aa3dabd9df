"""Transforms as data: what they do to activations, to weights, and to the product of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.hadamard import hadamard
from forge_kernels.transforms import (
    IDENTITY,
    BlockMatrix,
    Diagonal,
    Hadamard,
    Permutation,
    Transform,
    apply_transform,
    multiply_adds_per_element,
    transform_weight,
)

K = 128


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STEPS: dict[str, Any] = {
    "diagonal": Diagonal(scale_K=random(K).exp()),
    "negative diagonal": Diagonal(scale_K=-random(K, seed=1).exp()),
    "permutation": Permutation(index_K=torch.randperm(K, generator=torch.Generator().manual_seed(0))),
    "hadamard": Hadamard(size=64),
    "block": BlockMatrix(matrix_Bij=random(K // 32, 32, 32) + 4 * torch.eye(32, dtype=torch.float64)),
    "shared block": BlockMatrix(matrix_Bij=random(1, 32, 32) + 4 * torch.eye(32, dtype=torch.float64)),
}
MIXED: Transform = (STEPS["diagonal"], STEPS["hadamard"], STEPS["permutation"], STEPS["block"])


@pytest.mark.parametrize("transform", [IDENTITY, *[(step,) for step in STEPS.values()], MIXED, MIXED[::-1]])
def test_the_product_of_activation_and_weight_is_preserved(transform: Transform) -> None:
    x_TK, weight_NK = random(2, 9, K, seed=2), random(7, K, seed=3)
    product = apply_transform(transform, x_TK) @ transform_weight(transform, weight_NK).T
    torch.testing.assert_close(product, x_TK @ weight_NK.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_shape_are_kept(name: str, dtype: torch.dtype) -> None:
    x_TK = random(5, K).to(dtype)
    assert STEPS[name].apply(x_TK).dtype == dtype
    assert STEPS[name].apply_inverse_to_weight(x_TK).dtype == dtype
    assert STEPS[name].apply(x_TK[:0]).shape == (0, K)


def test_each_step_does_what_it_says() -> None:
    x_TK = random(3, K, seed=4)
    for j in (0, 40, 127):
        assert torch.equal(STEPS["diagonal"].apply(x_TK)[:, j], x_TK[:, j] * STEPS["diagonal"].scale_K[j])
        assert torch.equal(STEPS["permutation"].apply(x_TK)[:, j], x_TK[:, STEPS["permutation"].index_K[j]])
    assert torch.equal(STEPS["hadamard"].apply(x_TK), hadamard(x_TK, 64))
    for b in range(K // 32):
        run = slice(32 * b, 32 * b + 32)
        for name, matrix in (
            ("block", STEPS["block"].matrix_Bij[b]),
            ("shared block", STEPS["shared block"].matrix_Bij[0]),
        ):
            expected = torch.stack([matrix @ x_K[run] for x_K in x_TK])
            torch.testing.assert_close(STEPS[name].apply(x_TK)[:, run], expected)


def test_bfloat16_matrices_are_used_as_stored() -> None:
    step = BlockMatrix(matrix_Bij=STEPS["block"].matrix_Bij.to(torch.bfloat16))
    x_TK, weight_NK = random(9, K, seed=2), random(7, K, seed=3)
    product = step.apply(x_TK) @ step.apply_inverse_to_weight(weight_NK).T
    torch.testing.assert_close(product, x_TK @ weight_NK.T, rtol=1e-9, atol=1e-9)


def test_cost_counts_multiply_adds() -> None:
    assert multiply_adds_per_element(IDENTITY) == 0
    assert multiply_adds_per_element(MIXED) == 1 + 6 + 0 + 32
