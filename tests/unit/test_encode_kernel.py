"""The Triton kernels that encode against their reference, bit for bit, in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.formats import E2M1
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.encode_kernel import encode_packed_triton, fake_quantize_triton
from forge_kernels.ops.hadamard import hadamard_butterflies
from forge_kernels.ops.pack import pack, unpack
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.kernel_cases import DEVICE, assert_equal, wild
from tests.mxfp4_oracle import ALL_CODES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_same(x: Tensor, scale_rule: ScaleRule, *, diagonal_K: Tensor | None = None, hadamard_size: int = 1) -> None:
    transformed = x.float() if diagonal_K is None else x.float() * diagonal_K
    if hadamard_size > 1:
        transformed = hadamard_butterflies(transformed, hadamard_size)
    wanted = encode(transformed, scale_rule=scale_rule)
    on_device = x.to(DEVICE)
    diagonal_K = None if diagonal_K is None else diagonal_K.to(DEVICE)
    packed, scales = encode_packed_triton(on_device, scale_rule, diagonal_K=diagonal_K, hadamard_size=hadamard_size)
    assert_equal(scales, wanted.scales_NB, "scale")
    assert_equal(packed, pack(wanted.codes_NK), "packed code")
    values = fake_quantize_triton(on_device, scale_rule, diagonal_K=diagonal_K, hadamard_size=hadamard_size)
    assert_equal(values, decode(wanted), "value")
    assert not torch.signbit(values[values == 0]).any(), "a minus zero"


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (13, 1024)], ids=str)
def test_it_has_the_bits_of_the_reference(shape: tuple[int, int], dtype: torch.dtype, scale_rule: ScaleRule) -> None:
    assert_same(wild(*shape, dtype), scale_rule)


@pytest.mark.parametrize("scale_rule", SCALE_RULES if DEVICE == "cuda" else ["even", "search"])
@pytest.mark.parametrize("size", [2, 16, 32, 64, 128, 512])
def test_hadamard_transforms_on_the_way_have_the_bits_of_the_butterflies(size: int, scale_rule: ScaleRule) -> None:
    x = wild(6, 1536)
    x[2] *= 1e-4  # so that no sum overflows
    assert_same(x, scale_rule, hadamard_size=size)
    assert_same(wild(5, 1024, torch.float16)[3:].bfloat16(), scale_rule, hadamard_size=size)


@pytest.mark.parametrize("size", [1, 32])
def test_a_diagonal_on_the_way(size: int) -> None:
    x = wild(5, 192, torch.bfloat16)
    x[2] = 1.0
    diagonal_K = torch.randn(192, generator=torch.Generator().manual_seed(3)).exp()
    assert_same(x, "even", diagonal_K=diagonal_K, hadamard_size=size)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
def test_every_bfloat16_as_the_largest_of_its_block(scale_rule: ScaleRule) -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    blocks = values[:, None].float() * torch.linspace(-1, 1, 32)
    assert_same(blocks.reshape(-1, 512)[:: 32 if DEVICE == "cpu" else 1], scale_rule)


def test_every_code_comes_back() -> None:
    values = torch.tensor([E2M1.codebook[code] for code in ALL_CODES] + [0.0]).repeat(2)
    x = torch.stack([values * 2.0**exponent for exponent in range(-120, 121)])
    assert_same(x, "even")
    packed, _ = encode_packed_triton(x.to(DEVICE), "even")
    assert unpack(packed.cpu())[0].tolist() == [*ALL_CODES, 0] * 2


def test_strided_rows_and_empty_tensors() -> None:
    x = wild(9, 256, torch.bfloat16)
    assert_same(x[::2], "even")
    assert_same(x[:, 32:160], "even")
    packed, scales = encode_packed_triton(x[:0].to(DEVICE), "even")
    assert (tuple(packed.shape), tuple(scales.shape)) == ((0, 128), (0, 8))
    assert fake_quantize_triton(x[:0].to(DEVICE), "even").shape == (0, 256)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_blocks_that_are_not_finite_become_nan(bad: float) -> None:
    x = wild(3, 96)
    x[1, 40] = bad
    _, scales = encode_packed_triton(x.to(DEVICE), "even")
    assert (scales.cpu() == 255).nonzero().tolist() == [[1, 1]]
    values = fake_quantize_triton(x.to(DEVICE), "even").cpu()
    assert values.isnan().nonzero().tolist() == [[1, j] for j in range(32, 64)]


def test_values_as_bfloat16_are_the_same_values() -> None:
    x = wild(7, 96) * 1e-3
    x[1:3] = 1.0
    wide = fake_quantize_triton(x.to(DEVICE), "even")
    assert_equal(fake_quantize_triton(x.to(DEVICE), "even", dtype=torch.bfloat16).float(), wide, "value")
