"""The Triton kernel that multiplies blocks by matrices and encodes: right for values within its stated error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.block_matrix_kernel import PRODUCT_ERROR, encode_block_matrix_triton
from forge_kernels.ops.encode import encode
from forge_kernels.ops.pack import unpack
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.kernel_cases import DEVICE, assert_equal, wild


def assert_right_within_error(
    x: Tensor, matrix: Tensor, scale_rule: ScaleRule, diagonal_K: Tensor | None = None
) -> None:
    """Every scale and code lies between those of the exact values moved down and up by the error."""
    wide = x.double() if diagonal_K is None else x.double() * diagonal_K.double()
    blocks = wide.view(len(x), -1, 32)
    matrices = matrix.double().expand(blocks.shape[1], 32, 32)
    exact = torch.einsum("mbj,bij->mbi", blocks, matrices).flatten(1)
    slack = PRODUCT_ERROR * torch.einsum("mbj,bij->mbi", blocks.abs(), matrices.abs()).flatten(1)
    packed, scales = encode_block_matrix_triton(
        x.to(DEVICE),
        matrix.to(DEVICE),
        scale_rule,
        diagonal_K=None if diagonal_K is None else diagonal_K.to(DEVICE),
    )
    codes, scales = unpack(packed.cpu()), scales.cpu()
    small, large = exact.abs() - slack, exact.abs() + slack
    if scale_rule != "search":  # which compares two sums that may lie as close as they like
        lowest = encode(small.clamp(min=0).float(), scale_rule=scale_rule).scales_NB
        highest = encode(large.float(), scale_rule=scale_rule).scales_NB
        bad = ((scales < lowest) | (scales > highest)).nonzero()
        assert not len(bad), f"scale of block {bad[0].tolist()} is {int(scales[tuple(bad[0])])}"
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    scale = 2.0 ** (scales.double() - 127).repeat_interleave(32, dim=1)
    magnitude = values[(codes & 7).long()] * scale
    nearest = (large.unsqueeze(-1) / scale.unsqueeze(-1) - values).abs().argmin(-1)
    ceiling = values[nearest] * scale
    nearest = (small.clamp(min=0).unsqueeze(-1) / scale.unsqueeze(-1) - values).abs().argmin(-1)
    floor = values[nearest] * scale
    # A tie goes to the even code, which `argmin` does not know: one code to either side is allowed only where it is one.
    bad = ((magnitude < floor) | (magnitude > ceiling)).nonzero()
    at_tie = [abs(float((exact.abs() / scale)[tuple(i)]) * 4 % 1) < 1e-3 for i in bad]
    assert all(at_tie), f"{len(bad)} codes, the first at {bad[0].tolist()}: {float(magnitude[tuple(bad[0])])}"
    is_negative = (codes & 8) > 0
    assert not (is_negative & (exact > slack)).any()
    assert not (codes == 8).any()


@pytest.mark.parametrize("scale_rule", SCALE_RULES if DEVICE == "cuda" else ["even", "search"])  # interpreting is slow
@pytest.mark.parametrize("num_matrices", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_are_right_within_the_error(dtype: torch.dtype, num_matrices: int, scale_rule: ScaleRule) -> None:
    x = wild(70, 192, dtype)
    x[1:3] = 0.5
    matrix = torch.randn(num_matrices, 32, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert_right_within_error(x, matrix, scale_rule)
    assert_right_within_error(x, matrix.float() * 1.001, scale_rule)


def test_after_a_diagonal_on_strided_rows_and_on_other_numbers_of_blocks() -> None:
    generator = torch.Generator().manual_seed(2)
    for blocks in (1, 3, 5):
        x = torch.randn(5, 32 * blocks, generator=generator)
        matrix = torch.randn(blocks, 32, 32, generator=generator)
        assert_right_within_error(x, matrix, "even", torch.randn(32 * blocks, generator=generator).exp())
    wide = torch.randn(6, 192, generator=generator)
    assert_right_within_error(wide[::2, 32:128], torch.randn(3, 32, 32, generator=generator), "even")


def test_empty_and_not_finite() -> None:
    matrix = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    packed, scales = encode_block_matrix_triton(torch.zeros(0, 64, device=DEVICE), matrix, "even")
    assert (tuple(packed.shape), tuple(scales.shape)) == ((0, 32), (0, 2))
    x = torch.ones(2, 64, device=DEVICE)
    x[1, 33] = torch.nan
    _, scales = encode_block_matrix_triton(x, matrix, "even")
    assert_equal(scales == 255, torch.tensor([[False, False], [False, True]]), "whether a block is none")
