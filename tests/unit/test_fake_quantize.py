"""The hot path: the same bits as encoding and decoding, for every dtype, layout and chunking."""

from __future__ import annotations

import math

import pytest
import torch

from forge_kernels.ops import fake_quantize as module
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.mxfp4_oracle import assert_same_bits


def many_magnitudes(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    exponent = torch.randint(-130, 127, (rows, columns // 32, 1), generator=generator)
    x = torch.randn(rows, columns // 32, 32, generator=generator, dtype=torch.float64) * 2.0**exponent
    x[0] = 0
    return x.clamp(-3.4e38, 3.4e38).float().view(rows, columns)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_as_decoding_the_codes(rule: ScaleRule, dtype: torch.dtype) -> None:
    x_MK = many_magnitudes(257, 192)
    if dtype == torch.float16:
        x_MK = x_MK.clamp(-65504, 65504)
    x_MK = x_MK.to(dtype).nan_to_num(posinf=1.0, neginf=-1.0)
    before = x_MK.clone()
    assert_same_bits(fake_quantize(x_MK, scale_rule=rule), decode(encode(x_MK, scale_rule=rule)), source=x_MK)
    assert torch.equal(x_MK, before), "the input was changed"


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_chunks_do_not_show(rule: ScaleRule, monkeypatch: pytest.MonkeyPatch) -> None:
    x_MK = many_magnitudes(101, 96)
    whole = fake_quantize(x_MK, scale_rule=rule)
    monkeypatch.setattr(module, "CHUNK_BLOCKS", 7)
    assert_same_bits(fake_quantize(x_MK, scale_rule=rule), whole, source=x_MK)
    rows = torch.cat([fake_quantize(row, scale_rule=rule) for row in x_MK.split(1)])
    assert_same_bits(rows, whole, source=x_MK)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_makes_its_block_nan_and_no_other(rule: ScaleRule, bad: float) -> None:
    x_MK = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    expected = decode(encode(x_MK, scale_rule=rule))
    x_MK[1, 40] = bad
    result = fake_quantize(x_MK, scale_rule=rule)
    assert result[1, 32:64].isnan().all()
    result[1, 32:64] = expected[1, 32:64]
    assert_same_bits(result, expected)


def test_awkward_layouts() -> None:
    base = torch.randn(64, 2, 5, generator=torch.Generator().manual_seed(0))
    strided = base.permute(2, 1, 0)
    assert_same_bits(fake_quantize(strided), decode(encode(strided.contiguous())))
    assert fake_quantize(torch.ones(0, 64)).shape == (0, 64)
    assert fake_quantize(torch.ones(32, requires_grad=True)).requires_grad is False


def test_refusals() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        fake_quantize(torch.ones(2, 40))
    with pytest.raises(ValueError, match="unknown scale rule 'nearest'"):
        fake_quantize(torch.ones(2, 32), scale_rule="nearest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch\.float64"):
        fake_quantize(torch.ones(2, 32, dtype=torch.float64))
