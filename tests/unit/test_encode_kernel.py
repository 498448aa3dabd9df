"""The Triton kernel against its reference, bit for bit, in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.formats import E2M1
from forge_kernels.ops.encode import encode
from forge_kernels.ops.encode_kernel import encode_packed_triton
from forge_kernels.ops.pack import pack, unpack
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.mxfp4_oracle import ALL_CODES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 32), (7, 96), (5, 544), (13, 1024), (3, 2080)]


def wild(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values of many magnitudes: zero rows, subnormals, the largest finite values, exact ties."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(2 * torch.randn(rows, columns, generator=generator))
    x = x.clamp(-3e4, 3e4).to(dtype)
    if rows > 4:
        x[0] = 0.0
        x[1] = (x[1].float() * torch.finfo(dtype).tiny).to(dtype)
        x[2, :32] = torch.finfo(dtype).max
        x[3] = (torch.randint(-24, 25, (columns,), generator=generator) / 4).to(dtype)
    return x


def assert_same(x: Tensor, scale_rule: ScaleRule) -> None:
    packed, scales = encode_packed_triton(x.to(DEVICE), scale_rule)
    expected = encode(x, scale_rule=scale_rule)
    for name, got, wanted in (("scales", scales, expected.scales_NB), ("codes", packed, pack(expected.codes_NK))):
        bad = (got.cpu() != wanted).nonzero()
        where = tuple(bad[0].tolist()) if len(bad) else ()
        assert not len(bad), (
            f"{name} at {where}: {int(got[where])} in place of {int(wanted[where])} ({len(bad)} differ)"
        )


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_has_the_bits_of_the_reference(shape: tuple[int, int], dtype: torch.dtype, scale_rule: ScaleRule) -> None:
    assert_same(wild(*shape, dtype), scale_rule)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
def test_every_bfloat16_as_the_largest_of_its_block(scale_rule: ScaleRule) -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    blocks = values[:, None].float() * torch.linspace(-1, 1, 32)
    assert_same(blocks.reshape(-1, 512)[:: 8 if DEVICE == "cpu" else 1], scale_rule)


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
