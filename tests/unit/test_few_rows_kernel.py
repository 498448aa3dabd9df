"""The products of few rows with packed weights against float64, on shapes that fill no tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.few_rows_kernel import matrix_rows_triton, one_row_triton
from forge_kernels.ops.hadamard import hadamard_butterflies
from forge_kernels.ops.lift_kernel import encode_lifted_triton
from forge_kernels.ops.pack import pack
from forge_kernels.rules import Encoded, ScaleRule
from tests.kernel_cases import DEVICE, assert_equal, relative_error

BOUND = 3e-4


def random(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * (spread * torch.randn(*shape[:-1], 1, generator=generator)).exp()


def on_device(weight: Encoded) -> tuple[Tensor, Tensor]:
    return pack(weight.codes_NK).to(DEVICE), weight.scales_NB.to(DEVICE)


def matrix_rows(x: Tensor, weight: Encoded) -> Tensor:
    packed, scales = on_device(weight)
    is_used = (weight.codes_NK.view(len(packed), -1, 32) != 0).any(dim=-1).to(DEVICE)
    references_N = torch.where(is_used, scales, 0).amax(dim=1)
    counters = torch.zeros(len(packed), dtype=torch.int32, device=DEVICE)
    lifted = encode_lifted_triton(x.to(DEVICE), "even", in_halves=True)
    y = matrix_rows_triton(lifted, packed, scales, references_N, counters)
    assert not counters.any(), "counters are left as they were"
    again = matrix_rows_triton(lifted, packed, scales, references_N, counters)
    assert_equal(y, again, "parts are added in one order, so that the result repeats, but not")
    return y


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


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (70, 96), (130, 1056)])
def test_up_to_sixteen_rows(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    x, weight = random(num_rows, num_inputs, seed=6), encode(random(num_outputs, num_inputs, seed=7))
    wanted = decode(encode(x)).double() @ decode(weight).double().T
    assert relative_error(matrix_rows(x, weight), wanted) < BOUND


def test_weights_over_27_octaves_are_exact_and_beyond_that_bounded() -> None:
    generator = torch.Generator().manual_seed(8)
    octave = torch.arange(64) % 40
    weight = encode((torch.randn(9, 64, 32, generator=generator) * 2.0 ** -octave[:, None]).flatten(1))
    x = torch.zeros(16, 64, 32)
    for row in range(16):
        x[row, 4 * row : 4 * row + 4] = torch.randn(4, 32, generator=generator)
    x = x.flatten(1)
    wanted = decode(encode(x)).double() @ decode(weight).double().T
    error = (matrix_rows(x, weight).cpu().double() - wanted).abs()
    largest_M1 = decode(encode(x)).abs().double().sum(dim=1, keepdim=True)
    slack = largest_M1 * decode(weight).abs().amax(dim=1).double() * 3 * 2.0**-26
    bad = (error > slack + 3e-4 * wanted.abs() + 1e-12).nonzero()
    assert not len(bad), f"at {bad[0].tolist()}: off by {float(error[tuple(bad[0])])}"


def test_rows_that_are_not_finite_and_zero_operands() -> None:
    x, weight = random(3, 96, seed=9), encode(random(8, 96, seed=10))
    x[1, 4] = torch.nan
    assert matrix_rows(x, weight).isnan().all(dim=1).tolist() == [False, True, False]
    assert one_row_triton(x[1:2].to(DEVICE), *on_device(weight), "even").isnan().all()
    assert not matrix_rows(torch.zeros(2, 96), weight).any()
    assert not one_row_triton(torch.ones(1, 96, device=DEVICE), *on_device(encode(torch.zeros(4, 96))), "even").any()


def test_other_numbers_of_rows_are_refused() -> None:
    weight = on_device(encode(torch.ones(4, 32)))
    with pytest.raises(ValueError, match="2 rows of 1 blocks; this product takes one row"):
        one_row_triton(torch.ones(2, 32, device=DEVICE), *weight, "even")
    lifted = encode_lifted_triton(torch.ones(17, 32, device=DEVICE), "even", in_halves=True)
    with pytest.raises(ValueError, match="17 rows; this product takes 1 to 16"):
        matrix_rows_triton(lifted, *weight, weight[1][:, 0], torch.zeros(4, dtype=torch.int32, device=DEVICE))
