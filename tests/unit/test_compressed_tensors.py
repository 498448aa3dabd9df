"""Our "even" rule against compressed-tensors, whose files and whose run time it shares.

Bitwise equal wherever that package gives a number. It deviates, and we do not follow it, in three places: a block whose
largest magnitude is 1.75 * 2^127 or more becomes NaN there; in float16 a zero block has scale one; float16 blocks above
57344 become NaN and subnormal ones vanish. The last two are why float16 is compared on ordinary values only.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as foreign_fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from torch import Tensor

from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.ops.pack import pack, unpack
from tests.mxfp4_oracle import assert_same_bits

MXFP4_ARGS = QuantizationArgs(
    num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, dynamic=True, scale_dtype=torch.uint8
)


def foreign_encode(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return that package's scales (as float32) and its fake-quantized values in the dtype of `x_MK`."""
    scale_MB, zero_MB = compute_dynamic_scales_and_zp(x_MK, MXFP4_ARGS, module=torch.nn.Identity())
    return scale_MB.float(), foreign_fake_quantize(x_MK, scale_MB, zero_MB, MXFP4_ARGS)


def assert_agrees(x_MK: Tensor) -> None:
    scale_MB, values_MK = foreign_encode(x_MK)
    encoded = encode(x_MK)
    ours_MB = torch.exp2(encoded.scales_NB.double() - 127).float()
    assert_same_bits(ours_MB, scale_MB)
    # E2M1 values times powers of two are exact in either dtype; adding zero drops the sign of minus zero.
    assert_same_bits(fake_quantize(x_MK), values_MK.float() + 0.0, source=x_MK)
    assert_same_bits(decode(encoded), values_MK.float() + 0.0, source=x_MK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0, 3, 30])
def test_random_blocks_of_many_magnitudes(dtype: torch.dtype, spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    exponent = torch.randint(-115, 120, (400, 8, 1), generator=generator)
    inside = torch.randn(400, 8, 32, generator=generator, dtype=torch.float64) * spread
    x = torch.randn(400, 8, 32, generator=generator, dtype=torch.float64) * 2.0 ** (exponent + inside.clamp(max=0))
    assert_agrees(x.view(400, 256).to(dtype))


def test_ordinary_float16_blocks() -> None:
    x_MK = torch.randn(400, 256, generator=torch.Generator().manual_seed(0)).half()
    assert_agrees(x_MK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thresholds_ties_and_zero_blocks(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps
    rows = []
    for m in (1.0, 1.5, 1.5 + ulp, 1.75 - ulp, 1.75, 2.0 - ulp):
        for k in (-110, -3, 0, 5, 110):
            ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * 2.0 ** (k - 2)
            row = torch.zeros(32)
            row[0] = m * 2.0**k
            row[1:8], row[8:15] = ties, -ties
            row = row.where(row.abs() <= m * 2.0**k, 0.0)
            rows.append(row)
    rows.append(torch.zeros(32))
    rows.append(torch.full((32,), -0.0))
    assert_agrees(torch.stack(rows).to(dtype))


def test_huge_blocks_are_nan_there_and_finite_here() -> None:
    x_MK = torch.full((1, 32), 3e38)
    _, values_MK = foreign_encode(x_MK)
    assert not torch.isfinite(values_MK).any()
    assert torch.isfinite(fake_quantize(x_MK)).all()


def test_packed_bytes_are_read_and_written_alike() -> None:
    x_NK = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    codes_NK = encode(x_NK).codes_NK
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    grid_NK = values[codes_NK.int()]
    assert torch.equal(pack_fp4_to_uint8(grid_NK), pack(codes_NK))
    assert_same_bits(unpack_fp4_from_uint8(pack(codes_NK), 16, 64, dtype=torch.float32) + 0.0, grid_NK)
    assert torch.equal(unpack(pack_fp4_to_uint8(grid_NK)), codes_NK)
