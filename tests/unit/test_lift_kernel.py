"""The Triton kernel that lifts activations against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.encode import encode
from forge_kernels.ops.lift import LiftElement, lift
from forge_kernels.ops.lift_kernel import MAX_COLUMNS, encode_lifted_triton
from forge_kernels.rules import SCALE_RULES, ScaleRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_of_many_octaves(rows: int, columns: int, octaves: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns // 32, 32, generator=generator)
    x *= 2 ** (octaves * torch.rand(rows, columns // 32, 1, generator=generator) - octaves / 2)
    x[0] = 0.0
    return x.flatten(1).to(dtype)


def assert_same(x: Tensor, scale_rule: ScaleRule, element: LiftElement) -> None:
    got = encode_lifted_triton(x.to(DEVICE), scale_rule, element)
    wanted = lift(encode(x, scale_rule=scale_rule), element=element)
    assert torch.equal(got.exponents_M.cpu(), wanted.exponents_M)
    assert torch.equal(got.is_exact_M.cpu(), wanted.is_exact_M)
    # Minus zero, where a negative value is rounded away, is as good as zero in a product.
    ours, theirs = got.values_MK.cpu().float(), wanted.values_MK.float()
    bad = (ours != theirs).nonzero()
    where = tuple(bad[0].tolist()) if len(bad) else ()
    assert not len(bad), (
        f"value at {where}: {float(ours[where])} in place of {float(theirs[where])} ({len(bad)} differ)"
    )


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_has_the_bits_of_the_reference(scale_rule: ScaleRule, element: LiftElement, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 32), (5, 96), (7, 576), (3, 2048)):
        assert_same(rows_of_many_octaves(rows, columns, 8.0, dtype), scale_rule, element)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_rows_beyond_the_range_are_flagged_and_rounded_alike(element: LiftElement) -> None:
    x = rows_of_many_octaves(9, 1024, 44.0, torch.float32)
    assert not encode_lifted_triton(x.to(DEVICE), "even", element).is_exact_M[1:].any()
    assert_same(x, "even", element)


def test_strided_rows_empty_tensors_and_long_rows() -> None:
    x = rows_of_many_octaves(8, 256, 6.0, torch.bfloat16)
    assert_same(x[::2], "even", "e4m3")
    assert_same(x[:, 64:192], "even", "e4m3")
    assert encode_lifted_triton(x[:0].to(DEVICE), "even").values_MK.shape == (0, 256)
    with pytest.raises(ValueError, match="cannot lift rows of 65536 elements at once"):
        encode_lifted_triton(torch.zeros(1, 2 * MAX_COLUMNS, device=DEVICE), "even")
