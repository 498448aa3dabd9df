"""The product of one row with a packed weight against float64, on shapes that fill no tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.hadamard import hadamard_butterflies
from forge_kernels.ops.one_row_kernel import one_row_triton
from forge_kernels.ops.pack import pack
from forge_kernels.rules import Encoded, ScaleRule
from tests.kernel_cases import DEVICE, relative_error

BOUND = 3e-4


def random(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * (spread * torch.randn(*shape[:-1], 1, generator=generator)).exp()


def on_device(weight: Encoded) -> tuple[Tensor, Tensor]:
    return pack(weight.codes_NK).to(DEVICE), weight.scales_NB.to(DEVICE)


@pytest.mark.parametrize("scale_rule", ["even", "search"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (70, 96), (33, 2080)])
def test_one_row(num_outputs: int, num_inputs: int, scale_rule: ScaleRule) -> None:
    x, weight = random(1, num_inputs, seed=1), encode(random(num_outputs, num_inputs, seed=2))
    for dtype in (torch.float32, torch.bfloat16):
        y = one_row_triton(x.to(DEVICE, dtype), *on_device(weight), scale_rule)
        wanted = decode(encode(x.to(dtype), scale_rule=scale_rule)).double() @ decode(weight).double().T
        assert relative_error(y, wanted) < BOUND / 100


def test_one_row_transformed_on_the_way() -> None:
    x, weight = random(1, 256, seed=3), encode(random(20, 256, seed=4))
    diagonal_K = random(256, seed=5).exp()
    y = one_row_triton(x.to(DEVICE), *on_device(weight), "even", diagonal_K=diagonal_K.to(DEVICE), hadamard_size=64)
    wanted = decode(encode(hadamard_butterflies(x * diagonal_K, 64))).double() @ decode(weight).double().T
    assert relative_error(y, wanted) < BOUND / 100


def test_a_row_that_is_not_finite_and_zero_operands() -> None:
    x, weight = random(1, 96, seed=9), encode(random(8, 96, seed=10))
    x[0, 4] = torch.nan
    assert one_row_triton(x.to(DEVICE), *on_device(weight), "even").isnan().all()
    assert not one_row_triton(torch.ones(1, 96, device=DEVICE), *on_device(encode(torch.zeros(4, 96))), "even").any()


def test_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of 1 blocks; this product takes one row"):
        one_row_triton(torch.ones(2, 32, device=DEVICE), *on_device(encode(torch.ones(4, 32))), "even")
