"""Encoding and decoding against values written out by hand, exhaustively where the domain is small."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.decode import decode, decode_codes
from forge_kernels.ops.encode import choose_scales, encode, encode_with_scales
from forge_kernels.rules import SCALE_RULES, Encoded, ScaleRule
from tests.mxfp4_oracle import ALL_CODES, MAGNITUDES, assert_same_bits, assert_same_codes

ULP = 2.0**-23
MAX_FLOAT = torch.finfo(torch.float32).max


def block_with_max(largest: float) -> Tensor:
    block = torch.zeros(32)
    block[5] = -largest
    block[6] = largest / 3
    return block


# Largest magnitude m * 2^3, so f = 3 and the floor exponent is 1 (byte 128).
@pytest.mark.parametrize(
    ("m", "floor", "even", "rceil"),
    [
        (1.0, 128, 128, 128),
        (1.5, 128, 128, 128),
        (1.5 + ULP, 128, 128, 129),
        (1.75 - ULP, 128, 128, 129),
        (1.75, 128, 129, 129),
        (1.99, 128, 129, 129),
    ],
)
@pytest.mark.parametrize("k", [-100, 0, 100])
def test_scale_bytes_computed_by_hand(m: float, floor: int, even: int, rceil: int, k: int) -> None:
    x_K = block_with_max(m * 8 * 2.0**k)
    chosen = {rule: int(choose_scales(x_K, scale_rule=rule)) - k for rule in ("floor", "even", "rceil")}  # type: ignore[arg-type]
    assert chosen == {"floor": floor, "even": even, "rceil": rceil}


def test_block_whose_largest_value_is_six_has_scale_one() -> None:
    encoded = encode(torch.tensor(MAGNITUDES * 4, dtype=torch.float32))
    assert int(encoded.scales_NB) == 127
    assert encoded.codes_NK.tolist() == list(range(8)) * 4


# (tie, code it rounds to, code below, code above), all for scale one.
TIES = [
    (0.25, 0, 0, 1),
    (0.75, 2, 1, 2),
    (1.25, 2, 2, 3),
    (1.75, 4, 3, 4),
    (2.5, 4, 4, 5),
    (3.5, 6, 5, 6),
    (5.0, 6, 6, 7),
]


@pytest.mark.parametrize("byte", [0, 1, 2, 64, 126, 127, 128, 200, 251, 252])
@pytest.mark.parametrize(("tie", "at", "below", "above"), TIES)
def test_ties_go_to_the_even_code_and_their_neighbours_do_not(
    byte: int, tie: float, at: int, below: int, above: int
) -> None:
    value = torch.tensor(tie * 2.0 ** (byte - 127), dtype=torch.float32)
    assert float(value) == tie * 2.0 ** (byte - 127)
    infinity = torch.tensor(math.inf)
    x_K = torch.zeros(32)
    x_K[0], x_K[1], x_K[2] = value, torch.nextafter(value, -infinity), torch.nextafter(value, infinity)
    x_K[3:6] = -x_K[0:3]
    codes_K = encode_with_scales(x_K, torch.tensor([byte], dtype=torch.uint8))
    assert codes_K[:3].tolist() == [at, below, above]
    assert codes_K[3:6].tolist() == [code + 8 if code else 0 for code in (at, below, above)]


def test_values_reported_wrong_elsewhere() -> None:
    x_K = torch.zeros(32)
    x_K[0] = -0.625  # over 0.5 it is -1.25, a tie between -1 and -1.5
    x_K[1] = torch.nextafter(torch.tensor(0.125), torch.tensor(1.0))  # over 0.5 it is just above 0.25
    codes_K = encode_with_scales(x_K, torch.tensor([126], dtype=torch.uint8))
    assert codes_K[:2].tolist() == [0b1010, 0b0001]


@pytest.mark.parametrize("byte", [0, 1, 127, 252, 253, 254])
def test_everything_beyond_six_saturates(byte: int) -> None:
    scale = 2.0 ** (byte - 127)
    x_K = torch.tensor([5.5, 6.0, 7.0, 8.0, 1e6, 1e30] * 5 + [0.0, 0.0], dtype=torch.float64) * scale
    x_K = x_K.clamp(max=MAX_FLOAT).float()
    codes_K = encode_with_scales(torch.cat((x_K, -x_K)), torch.tensor([byte] * 2, dtype=torch.uint8))
    reachable = x_K >= 5.5 * scale  # under bytes 253 and 254 float32 ends before 6 scales
    assert codes_K[:32][reachable].eq(7).all()
    assert codes_K[32:][reachable].eq(15).all()


def test_every_code_under_every_scale_byte_survives_decoding_and_encoding() -> None:
    codes = torch.tensor(ALL_CODES + ALL_CODES + (1, 15), dtype=torch.uint8)
    scales_NB = torch.arange(255, dtype=torch.int32).to(torch.uint8).unsqueeze(1)
    codes_NK = codes.expand(255, 32).contiguous()
    values_NK = decode_codes(codes_NK, scales_NB)
    for byte, value in ((0, 6 * 2.0**-127), (127, 6.0), (252, 6 * 2.0**125)):
        assert float(values_NK[byte, 7]) == value
    finite = torch.isfinite(values_NK)
    assert finite[:253].all()
    assert finite[253].sum() == (codes % 8 < 6).sum(), "under byte 253 float32 holds magnitudes up to 3"
    assert finite[254].sum() == (codes % 8 < 4).sum(), "under byte 254 float32 holds magnitudes up to 1.5"
    held_NK = values_NK.where(finite, 0.0)
    assert_same_codes(encode_with_scales(held_NK, scales_NB), codes_NK.where(finite, 0), source=held_NK)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_encoding_a_decoded_tensor_keeps_every_value(rule: ScaleRule) -> None:
    # Blocks whose largest code is each of 1..7, with all smaller codes of both signs, under every byte.
    rows = []
    for largest in range(1, 8):
        smaller = [c for c in range(largest + 1)] + [c + 8 for c in range(1, largest + 1)]
        rows.append((smaller * 32)[:32])
    codes_NK = torch.tensor(rows, dtype=torch.uint8).repeat(253, 1)
    scales_NB = torch.arange(253).to(torch.uint8).repeat_interleave(7).unsqueeze(1)
    values_NK = decode_codes(codes_NK, scales_NB)
    assert_same_bits(decode(encode(values_NK, scale_rule=rule)), values_NK, source=values_NK)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_zero_block_has_byte_and_codes_zero(rule: ScaleRule) -> None:
    x_NK = torch.zeros(2, 64)
    x_NK[1] = -0.0
    encoded = encode(x_NK, scale_rule=rule)
    assert encoded.scales_NB.eq(0).all()
    assert encoded.codes_NK.eq(0).all()
    assert_same_bits(decode(encoded), torch.zeros(2, 64))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_minus_zero_is_never_written(rule: ScaleRule) -> None:
    x_K = torch.zeros(32)
    x_K[0], x_K[1], x_K[2], x_K[3] = 6.0, -0.0, -1e-30, -0.25
    encoded = encode(x_K, scale_rule=rule)
    assert encoded.codes_NK[1:4].tolist() == [0, 0, 0]
    assert not torch.signbit(decode(encoded)[1:4]).any()


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("largest", [3e38, MAX_FLOAT, 1.5 * 2.0**127, 1.75 * 2.0**127, 2.0**127])
def test_huge_blocks_decode_to_finite_values(rule: ScaleRule, largest: float) -> None:
    x_K = torch.linspace(-1, 1, 32) * largest
    encoded = encode(x_K, scale_rule=rule)
    assert int(encoded.scales_NB) <= 252
    decoded = decode(encoded)
    assert torch.isfinite(decoded).all()
    assert float(decoded[-1]) == pytest.approx(largest, rel=0.26)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("largest", [1e-36, 1e-37, 2.0**-125, 2.0**-126, 1e-40, 2.0**-149])
def test_tiny_blocks_are_within_half_a_step(rule: ScaleRule, largest: float) -> None:
    x_K = torch.linspace(-1, 1, 32) * largest
    encoded = encode(x_K, scale_rule=rule)
    step_at_top = 2 * 2.0 ** (int(encoded.scales_NB) - 127)
    worst = float((decode(encoded).double() - x_K.double()).abs().max())
    assert worst <= (2 if rule in ("floor", "search") else 1) * step_at_top
    if largest < 2.0**-125:
        assert int(encoded.scales_NB) == 0
        assert worst <= 0.5 * 2.0**-127 * (1 if largest * 2.0**127 <= 2 else 2)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_first(rule: ScaleRule, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x_NK = (torch.randn(64, 96, generator=generator) * 2.0 ** torch.randint(-20, 12, (64, 1), generator=generator)).to(
        dtype
    )
    x_NK[0, 0] = torch.finfo(dtype).max
    x_NK[1, :32] = torch.finfo(dtype).smallest_normal / 2
    half, full = encode(x_NK, scale_rule=rule), encode(x_NK.float(), scale_rule=rule)
    assert torch.equal(half.scales_NB, full.scales_NB)
    assert_same_codes(half.codes_NK, full.codes_NK, source=x_NK)
    assert half.codes_NK[1, :32].ne(0).all(), "a subnormal block is not flushed"


@pytest.mark.parametrize("shape", [(32,), (1, 32), (3, 64), (2, 5, 96), (0, 64), (7, 0, 32)])
def test_shapes(shape: tuple[int, ...]) -> None:
    encoded = encode(torch.ones(shape))
    assert tuple(encoded.codes_NK.shape) == shape
    assert tuple(encoded.scales_NB.shape) == (*shape[:-1], shape[-1] // 32)
    assert encoded.codes_NK.dtype == encoded.scales_NB.dtype == torch.uint8
    assert tuple(decode(encoded).shape) == shape


def test_strided_input_gives_the_same_codes_and_is_left_alone() -> None:
    x_KN = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = x_KN.detach().clone()
    encoded = encode(x_KN.T)
    assert_same_codes(encoded.codes_NK, encode(before.T.contiguous()).codes_NK)
    assert torch.equal(x_KN.detach(), before)


def test_search_takes_the_scale_with_the_lower_error_and_the_lower_scale_on_a_tie() -> None:
    # Largest 7 = 1.75 * 4: exponent 0 clips it to 6 (error 1); exponent 1 rounds 3.5 to 4, so 8 (error 1). A tie.
    x_K = torch.zeros(32)
    x_K[0] = 7.0
    assert int(choose_scales(x_K, scale_rule="search")) == 127
    x_K[1:] = 1.0 / 2  # halves cost nothing under exponent 0, and are ties to 0 under exponent 1
    assert int(choose_scales(x_K, scale_rule="search")) == 127
    x_K[1:] = 1.0  # exact under both
    x_K[0] = 7.5  # clipped by 1.5, or rounded to 8: exponent 1
    assert int(choose_scales(x_K, scale_rule="search")) == 128


def test_importance_moves_the_search() -> None:
    x_K = torch.full((32,), 0.5)
    x_K[0] = 7.5
    assert int(choose_scales(x_K, scale_rule="search")) == 127
    importance_K = torch.full((32,), 1e-6)
    importance_K[0] = 1.0
    assert int(choose_scales(x_K, scale_rule="search", importance_K=importance_K)) == 128
    assert int(choose_scales(x_K, scale_rule="search", importance_K=importance_K.double() * 1e300)) == 128
    assert int(choose_scales(x_K, scale_rule="search", importance_K=torch.zeros(32))) == 127


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused_by_index(bad: float) -> None:
    x_NK = torch.zeros(3, 64)
    x_NK[1, 40] = x_NK[2, 3] = bad
    for call in (encode, choose_scales):
        with pytest.raises(ValueError, match=r"element \(1, 40\) is -?(nan|inf) \(2 of 192 are not finite\)"):
            call(x_NK)
    with pytest.raises(ValueError, match=r"element \(1, 40\)"):
        encode_with_scales(x_NK, torch.zeros(3, 2, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 48), r"shape \(2, 48\).* multiple of 32"),
        (torch.zeros(2, 0), "multiple of 32"),
        (torch.tensor(1.0), "multiple of 32"),
        (torch.zeros(32, dtype=torch.float64), r"cannot encode torch.float64; give .* \(x\.float\(\)"),
        (torch.zeros(32, dtype=torch.int32), "cannot encode torch.int32"),
    ],
)
def test_what_cannot_be_encoded_is_said(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(x)


def test_bad_rules_scales_and_importances_are_said() -> None:
    x_K = torch.ones(64)
    with pytest.raises(ValueError, match=r"unknown scale rule 'ceil'; known: even, floor, rceil, search"):
        encode(x_K, scale_rule="ceil")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scales are torch.uint8 \(3,\).* need torch.uint8 \(2,\)"):
        encode_with_scales(x_K, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"scales are torch.int32"):
        encode_with_scales(x_K, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"block \(1,\) is 255"):
        encode_with_scales(x_K, torch.tensor([0, 255], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"importance has shape \(32,\).* need \(64,\)"):
        encode(x_K, scale_rule="search", importance_K=torch.ones(32))
    with pytest.raises(ValueError, match="negative or non-finite"):
        encode(x_K, scale_rule="search", importance_K=torch.full((64,), math.nan))


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (torch.zeros(2, 48, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), "do not belong together"),
        (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), "do not belong together"),
        (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2), "do not belong together"),
        (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.uint8), "codes are torch.float32"),
        (torch.full((2, 32), 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), r"code at \(0, 0\) is 16"),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.full((2, 1), 255, dtype=torch.uint8), "255"),
    ],
)
def test_what_cannot_be_decoded_is_said(codes: Tensor, scales: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Encoded(codes_NK=codes, scales_NB=scales))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_chunks_of_rows_do_not_show(rule: ScaleRule, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(3, 7, 160, generator=generator) * torch.randn(3, 7, 1, generator=generator).exp()
    importance_K = torch.rand(160, generator=generator)
    whole = encode(x_MK, scale_rule=rule, importance_K=importance_K)
    values = decode(whole)
    monkeypatch.setattr("forge_kernels.ops._arithmetic.CHUNK_BLOCKS", 11)
    pieces = encode(x_MK, scale_rule=rule, importance_K=importance_K)
    assert torch.equal(pieces.codes_NK, whole.codes_NK)
    assert torch.equal(pieces.scales_NB, whole.scales_NB)
    assert torch.equal(decode(pieces), values)
