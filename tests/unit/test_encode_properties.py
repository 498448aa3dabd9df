"""Properties of the encoder on generated blocks, against exact rational arithmetic."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_kernels.ops.decode import decode, decode_codes
from forge_kernels.ops.encode import choose_scales, encode, encode_with_scales
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.mxfp4_oracle import (
    assert_same_bits,
    assert_same_codes,
    byte_of_block,
    code_of_value,
    squared_error,
)

FIXED_RULES: tuple[ScaleRule, ...] = ("even", "floor", "rceil")

any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Mantissas on a coarse grid hit ties and thresholds of the rules often.
coarse = st.integers(-64, 64).map(lambda n: n / 16)


@st.composite
def blocks(draw: st.DrawFn, *, lowest: int = -149, highest: int = 124) -> Tensor:
    """Draw a block of 32 float32 values around one power of two, some of them coarse."""
    unit = 2.0 ** draw(st.integers(lowest, highest))
    mantissas = draw(st.lists(st.one_of(coarse, st.floats(-8, 8, width=32)), min_size=32, max_size=32))
    return torch.tensor([m * unit for m in mantissas], dtype=torch.float64).float()


wild_blocks = st.lists(any_float, min_size=32, max_size=32).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)
all_blocks = st.one_of(blocks(), wild_blocks)


@given(x_K=all_blocks)
@settings(max_examples=120, deadline=None)
def test_scales_and_codes_equal_exact_arithmetic(x_K: Tensor) -> None:
    values = x_K.tolist()
    for rule in FIXED_RULES:
        encoded = encode(x_K, scale_rule=rule)
        byte = byte_of_block(values, rule)
        assert int(encoded.scales_NB) == byte, f"{rule}: byte {int(encoded.scales_NB)} instead of {byte} for {values}"
        expected = torch.tensor([code_of_value(value, byte) for value in values], dtype=torch.uint8)
        assert_same_codes(encoded.codes_NK, expected, source=x_K)


@given(x_K=all_blocks)
@settings(max_examples=60, deadline=None)
def test_search_picks_one_of_two_scales_and_is_never_worse_than_floor_or_even(x_K: Tensor) -> None:
    values = x_K.tolist()
    low = byte_of_block(values, "floor")
    chosen = int(choose_scales(x_K, scale_rule="search"))
    assert chosen in (low, low + 1)
    error = squared_error(values, chosen)
    for rule in ("floor", "even"):
        other = squared_error(values, byte_of_block(values, rule))
        # The comparison runs in float32: errors that agree to a millionth count as equal.
        assert float(error) <= float(other) * (1 + 1e-6), f"search {float(error)} > {rule} {float(other)} for {values}"


@given(x_K=all_blocks, rule=st.sampled_from(SCALE_RULES))
@settings(max_examples=150, deadline=None)
def test_odd(x_K: Tensor, rule: ScaleRule) -> None:
    plus, minus = encode(x_K, scale_rule=rule), encode(-x_K, scale_rule=rule)
    assert torch.equal(plus.scales_NB, minus.scales_NB)
    assert_same_bits(decode(minus), -decode(plus) + 0.0, source=x_K)


@given(x_K=all_blocks, byte=st.integers(0, 254))
@settings(max_examples=150, deadline=None)
def test_monotone_under_a_fixed_scale(x_K: Tensor, byte: int) -> None:
    scales = torch.tensor([byte], dtype=torch.uint8)
    decoded = decode_codes(encode_with_scales(x_K.sort().values, scales), scales)
    assert (decoded[1:] >= decoded[:-1]).all()


@given(x_K=blocks(lowest=-40, highest=40), k=st.integers(-60, 60), rule=st.sampled_from(SCALE_RULES))
@settings(max_examples=150, deadline=None)
def test_scaling_by_a_power_of_two_moves_only_the_scale(x_K: Tensor, k: int, rule: ScaleRule) -> None:
    if not x_K.any() or float(x_K.abs().amax()) < 2.0**-60:
        return
    plain, scaled = encode(x_K, scale_rule=rule), encode(x_K * 2.0**k, scale_rule=rule)
    assert int(scaled.scales_NB) - int(plain.scales_NB) == k
    assert_same_codes(scaled.codes_NK, plain.codes_NK, source=x_K)


@given(x_K=all_blocks, rule=st.sampled_from(SCALE_RULES))
@settings(max_examples=150, deadline=None)
def test_quantizing_twice_equals_once(x_K: Tensor, rule: ScaleRule) -> None:
    once = fake_quantize(x_K, scale_rule=rule)
    assert_same_bits(fake_quantize(once, scale_rule=rule), once, source=x_K)


@given(x_K=all_blocks, rule=st.sampled_from(SCALE_RULES))
@settings(max_examples=150, deadline=None)
def test_error_is_at_most_half_a_step_or_what_was_clipped(x_K: Tensor, rule: ScaleRule) -> None:
    encoded = encode(x_K, scale_rule=rule)
    scale = 2.0 ** (int(encoded.scales_NB) - 127)
    y = x_K.double().abs() / scale
    half_step = torch.where(y <= 2, 0.25, torch.where(y <= 4, 0.5, 1.0))
    bound = scale * torch.where(y > 6, y - 6, half_step)
    error = (decode(encoded).double() - x_K.double()).abs()
    worst = int((error - bound).argmax())
    assert (error <= bound).all(), (
        f"{rule}: |{float(x_K[worst])} - {float(decode(encoded)[worst])}| > {float(bound[worst])}"
    )


@given(x_K=all_blocks, rule=st.sampled_from(SCALE_RULES))
@settings(max_examples=150, deadline=None)
def test_fake_quantize_equals_decoding_the_codes(x_K: Tensor, rule: ScaleRule) -> None:
    assert_same_bits(fake_quantize(x_K, scale_rule=rule), decode(encode(x_K, scale_rule=rule)), source=x_K)


def test_rules_rank_on_gaussian_blocks_as_known() -> None:
    x_NK = torch.randn(4000, 32, generator=torch.Generator().manual_seed(1)).double()
    phase_N1 = 2.0 ** torch.rand(4000, 1, generator=torch.Generator().manual_seed(2)).double()
    x_NK = (x_NK * phase_N1).float()
    error = {
        rule: float(
            (fake_quantize(x_NK, scale_rule=rule) - x_NK).double().square().sum() / x_NK.double().square().sum()
        )
        for rule in SCALE_RULES
    }
    assert error["search"] < error["even"] < error["floor"] < error["rceil"]
    assert math.isclose(error["even"], 1.265e-2, rel_tol=0.02)
