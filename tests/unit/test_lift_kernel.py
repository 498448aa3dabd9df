"""The Triton kernels that lift activations and packed codes against their reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.encode import encode
from forge_kernels.ops.hadamard import hadamard_butterflies
from forge_kernels.ops.lift import Lifted, LiftElement, lift
from forge_kernels.ops.lift_kernel import MAX_COLUMNS, encode_lifted_triton, lift_packed_triton
from forge_kernels.ops.pack import pack
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.kernel_cases import DEVICE, assert_equal


def rows_of_many_octaves(rows: int, columns: int, octaves: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns // 32, 32, generator=generator)
    x *= 2 ** (octaves * torch.rand(rows, columns // 32, 1, generator=generator) - octaves / 2)
    x[0] = 0.0
    return x.flatten(1).to(dtype)


def assert_same_lift(got: Lifted, wanted: Lifted) -> None:
    assert_equal(got.scales_M, wanted.scales_M, "row scale")
    assert_equal(got.is_exact_M, wanted.is_exact_M, "whether a row is exact")
    # Minus zero, where a negative value is rounded away, is as good as zero in a product.
    assert_equal(got.values_MK.cpu().float(), wanted.values_MK.float(), "value")


def assert_same(x: Tensor, scale_rule: ScaleRule, element: LiftElement, *, hadamard_size: int = 1) -> None:
    transformed = x.float() if hadamard_size == 1 else hadamard_butterflies(x, hadamard_size)
    encoded = encode(transformed, scale_rule=scale_rule)
    wanted = lift(encoded, element=element)
    assert_same_lift(encode_lifted_triton(x.to(DEVICE), scale_rule, element, hadamard_size=hadamard_size), wanted)
    packed = pack(encoded.codes_NK).to(DEVICE), encoded.scales_NB.to(DEVICE)
    assert_same_lift(lift_packed_triton(*packed, element), wanted)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_has_the_bits_of_the_reference(scale_rule: ScaleRule, element: LiftElement, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 32), (5, 96), (7, 576), (3, 2048)):
        assert_same(rows_of_many_octaves(rows, columns, 8.0, dtype), scale_rule, element)


@pytest.mark.parametrize("size", [16, 32, 64, 512])
def test_after_a_hadamard_transform(size: int) -> None:
    assert_same(rows_of_many_octaves(5, 1536, 8.0, torch.bfloat16), "even", "e4m3", hadamard_size=size)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_rows_beyond_the_range_are_flagged_and_rounded_alike(element: LiftElement) -> None:
    x = rows_of_many_octaves(9, 1024, 44.0, torch.float32)
    assert not encode_lifted_triton(x.to(DEVICE), "even", element).is_exact_M[1:].any()
    assert_same(x, "even", element)


@pytest.mark.parametrize("magnitude", [1e-38, 3e-45, 1e38])
def test_rows_at_the_ends_of_float32(magnitude: float) -> None:
    x = rows_of_many_octaves(6, 128, 2.0, torch.float32).clamp(-3, 3) * magnitude
    assert_same(x, "even", "e4m3")
    assert_same(x, "even", "e5m2")


@pytest.mark.parametrize("num_blocks", [1, 5, 8, 19])
def test_for_few_rows_blocks_lie_side_by_side_and_rows_are_padded(num_blocks: int) -> None:
    x = rows_of_many_octaves(4, 32 * num_blocks, 4.0, torch.float32).to(DEVICE)
    plain = encode_lifted_triton(x, "even", "e5m2")
    got = encode_lifted_triton(x, "even", "e5m2", for_few_rows=True)
    spans = -(-num_blocks // 8)
    wanted = torch.zeros(4, spans * 256, device=DEVICE)
    wanted[:, : 32 * num_blocks] = plain.values_MK.float()
    # Axes of a span: pair of blocks, block of the pair, eighth of a block, value.
    wanted = wanted.view(4, spans, 4, 2, 8, 4).permute(0, 1, 3, 4, 2, 5).reshape(4, spans * 256)
    assert_equal(got.values_MK.float(), wanted, "value")
    assert_equal(got.scales_M, plain.scales_M, "row scale")


def test_rows_that_are_not_finite_get_a_scale_that_is_none() -> None:
    x = rows_of_many_octaves(4, 96, 2.0, torch.float32)
    x[1, 5], x[3, 95] = torch.nan, torch.inf
    assert encode_lifted_triton(x.to(DEVICE), "even").scales_M.isnan().tolist() == [False, True, False, True]
    encoded = encode(torch.ones(2, 64))
    encoded.scales_NB[1, 1] = 255
    lifted = lift_packed_triton(pack(encoded.codes_NK).to(DEVICE), encoded.scales_NB.to(DEVICE))
    assert lifted.scales_M.isnan().tolist() == [False, True]


def test_strided_rows_empty_tensors_and_long_rows() -> None:
    x = rows_of_many_octaves(8, 256, 6.0, torch.bfloat16)
    assert_same(x[::2], "even", "e4m3")
    assert_same(x[:, 64:192], "even", "e4m3")
    assert encode_lifted_triton(x[:0].to(DEVICE), "even").values_MK.shape == (0, 256)
    with pytest.raises(ValueError, match="cannot lift rows of 65536 elements at once"):
        encode_lifted_triton(torch.zeros(1, 2 * MAX_COLUMNS, device=DEVICE), "even")
