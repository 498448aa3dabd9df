"""Any block format: MXFP4 has the bits of the ops on the scoring path, scales follow their definitions, codes are nearest."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_kernels.formats import FORMATS, MXFP4, BlockFormat, FloatElement, FloatScale, PowerOfTwoScale
from forge_kernels.ops.block_encode import BlockEncoded, decode_blocks, encode_blocks
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.pack import pack, unpack
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.mxfp4_oracle import assert_same_bits

POWER_OF_TWO = [known for known in FORMATS.values() if isinstance(known.scale, PowerOfTwoScale)]
FLOAT_SCALED = [known for known in FORMATS.values() if isinstance(known.scale, FloatScale)]


def wild(*shape: int, seed: int = 0) -> Tensor:
    """Values of many magnitudes, with zero blocks, subnormals and one huge value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp(8 * torch.randn(*shape[:-1], 1, generator=generator))
    x[..., :128] *= torch.exp(torch.randn(*shape[:-1], 128, generator=generator))
    x.view(-1, shape[-1])[0] = 0.0
    x.view(-1, shape[-1])[1] *= 1e-38
    x.view(-1, shape[-1])[2, 7] = 3.1e38
    return x.clamp(-3.2e38, 3.2e38)


def scale_values(encoded: BlockEncoded) -> list[Fraction]:
    assert encoded.scales_MB is not None
    scale = encoded.format.scale
    bits = encoded.scales_MB.flatten().tolist()
    if isinstance(scale, PowerOfTwoScale):
        return [Fraction(2) ** (byte - scale.bias) for byte in bits]
    assert isinstance(scale, FloatScale)
    return [Fraction(scale.element.codebook[code]) for code in bits]


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
def test_mxfp4_has_the_bits_of_the_scoring_path(scale_rule: ScaleRule) -> None:
    x = wild(40, 256)
    ours, theirs = encode_blocks(x, MXFP4, scale_rule=scale_rule), encode(x, scale_rule=scale_rule)
    assert ours.scales_MB is not None
    assert torch.equal(ours.scales_MB, theirs.scales_NB.to(torch.int32))
    assert torch.equal(ours.codes_MK, theirs.codes_NK.to(torch.int32))
    assert_same_bits(decode_blocks(ours), decode(theirs))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(POWER_OF_TWO),
    st.floats(1.0, 2.0, exclude_max=True, width=32),
    st.integers(-100, 100),
    st.sampled_from(("floor", "even", "rceil")),
)
def test_powers_of_two_follow_their_rule(known: BlockFormat, m: float, f: int, rule: ScaleRule) -> None:
    element = known.element
    assert isinstance(element, FloatElement)
    x = torch.zeros(known.block)
    x[3] = -math.ldexp(m, f)
    (scale,) = scale_values(encode_blocks(x, known, scale_rule=rule))
    largest = Fraction(element.max_value)
    floor = Fraction(2) ** (f - element.max_exponent)
    amax = Fraction(m) * Fraction(2) ** f
    half_unit = Fraction(1, 2 ** (element.mantissa_bits + 1))
    expected = {"floor": floor, "rceil": floor if amax <= largest * floor else 2 * floor,
                "even": 2 * floor if Fraction(m) >= Fraction(element.max_significand) + half_unit else floor}  # fmt: skip
    assert scale == expected[rule], f"{known.name} {rule}: m {m}, f {f}"


@pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
def test_every_code_is_the_nearest_under_its_scale(known: BlockFormat) -> None:
    x = wild(12, 256, seed=3)
    encoded = encode_blocks(x, known)
    assert int(encoded.codes_MK.min()) >= 0
    assert int(encoded.codes_MK.max()) < 2**known.element.bits
    blocks = x.view(-1, known.block)
    scale = torch.ones(len(blocks), dtype=torch.float64)
    if encoded.scales_MB is not None:
        scale = torch.tensor([float(value) for value in scale_values(encoded)], dtype=torch.float64)
        scale *= encoded.tensor_scale.double()
    values = torch.tensor(sorted({v for v in known.element.codebook if math.isfinite(v)}), dtype=torch.float64)
    values = values[values.abs() <= known.element.max_value]
    y = blocks.double() / torch.where(scale > 0, scale, torch.inf).unsqueeze(1)
    above = torch.searchsorted(values, y).clamp(1, len(values) - 1)
    nearest = torch.minimum((values[above] - y).abs(), (values[above - 1] - y).abs())
    chosen = torch.tensor(known.element.codebook, dtype=torch.float64)[encoded.codes_MK.view(-1, known.block)]
    # One rounding of x / scale to float32 may decide a tie the other way.
    slack = (y.abs() * 2**-23).clamp(max=known.element.max_value)
    worst = ((chosen - y).abs() - nearest - slack).amax()
    assert worst <= 0, f"{known.name}: {worst} beyond the nearest value"


@pytest.mark.parametrize("known", FLOAT_SCALED, ids=lambda known: known.name)
def test_float_scales_map_the_largest_value_to_the_largest_element(known: BlockFormat) -> None:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(5))
    encoded = encode_blocks(x, known)
    assert isinstance(known.scale, FloatScale)
    amax = x.view(-1, known.block).abs().amax(dim=1).double()
    scale = torch.tensor([float(value) for value in scale_values(encoded)], dtype=torch.float64) * encoded.tensor_scale
    ratio = amax / (scale * known.element.max_value)
    half_unit = 2.0 ** -(known.scale.element.mantissa_bits + 1)
    assert float((ratio - 1).abs().max()) <= half_unit * 1.001
    if known.scale.has_tensor_scale:
        largest = max(scale_values(encoded))
        assert largest == Fraction(known.scale.element.max_value), "the largest block does not use the largest scale"


@pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
def test_decoded_values_survive_encoding_and_packing(known: BlockFormat) -> None:
    encoded = encode_blocks(wild(8, 256, seed=9)[3:], known)
    codes = unpack(pack(encoded.codes_MK, bits=known.element.bits), bits=known.element.bits)
    assert torch.equal(codes.to(torch.int32), encoded.codes_MK)
    decoded = decode_blocks(encoded)
    assert bool(decoded.isfinite().all())
    again = decode_blocks(encode_blocks(decoded, known))
    # A float scale is computed anew from the decoded maximum, so it may move by a rounding.
    tolerance = 0.0 if not isinstance(known.scale, FloatScale) else 2.0**-(known.scale.element.mantissa_bits)
    error = ((again - decoded).abs() - tolerance * decoded.abs()).amax()
    assert error <= 0, f"{known.name}: {error}"


@pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
def test_zero_is_zero_and_bad_input_is_named(known: BlockFormat) -> None:
    encoded = encode_blocks(torch.zeros(2, 128), known)
    assert not encoded.codes_MK.any()
    assert encoded.scales_MB is None or not encoded.scales_MB.any()
    assert_same_bits(decode_blocks(encoded), torch.zeros(2, 128))
    assert encode_blocks(torch.zeros(0, 128), known).codes_MK.shape == (0, 128)
    with pytest.raises(ValueError, match=r"element \(1, 5\) is nan"):
        encode_blocks(torch.zeros(2, 128).index_put((torch.tensor(1), torch.tensor(5)), torch.tensor(math.nan)), known)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        encode_blocks(torch.zeros(2, 128, dtype=torch.float64), known)
    if known.block > 1:
        with pytest.raises(ValueError, match=f"no whole blocks of {known.block}"):
            encode_blocks(torch.zeros(2, known.block + 1), known)
    with pytest.raises(ValueError, match="unknown scale rule 'best'"):
        encode_blocks(torch.zeros(2, 128), known, scale_rule="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("known", FORMATS.values(), ids=FORMATS)
def test_the_largest_values_stay_finite(known: BlockFormat, scale_rule: ScaleRule) -> None:
    for share in (0.9, 0.97, 0.999, 1.0):
        x = torch.full((1, 128), share * torch.finfo(torch.float32).max)
        decoded = decode_blocks(encode_blocks(x, known, scale_rule=scale_rule))
        assert bool(decoded.isfinite().all()), f"{share} of the largest float32 becomes {float(decoded[0, 0])}"
        assert float((decoded / x)[0, 0]) == pytest.approx(1.0, abs=0.3)


def test_a_scale_keeps_to_its_own_bytes() -> None:
    narrow = PowerOfTwoScale(name="e5m0", bits=5, bias=15, max_byte=30)
    known = BlockFormat(name="narrow", element=MXFP4.element, scale=narrow, block=32)
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(4))
    wide, own = encode_blocks(x, MXFP4), encode_blocks(x, known)
    assert wide.scales_MB is not None
    assert own.scales_MB is not None
    assert torch.equal(own.scales_MB, wide.scales_MB - 127 + 15)
    assert_same_bits(decode_blocks(own), decode_blocks(wide))
    assert int(encode_blocks(x * 1e30, known).scales_MB.max()) == 30  # type: ignore[union-attr]


def test_finer_formats_lose_less() -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    lost = {
        name: float((decode_blocks(encode_blocks(x, known)) - x).square().sum() / x.square().sum())
        for name, known in FORMATS.items()
    }
    assert lost["bf16"] < lost["int8_g128"] < lost["mxfp8_e4m3"] < lost["mxfp6_e3m2"] < lost["nvfp4"] < lost["mxfp4"]
    assert lost["mxfp6_e2m3"] < lost["mxfp6_e3m2"]
    assert lost["int4_g64"] < lost["int4_g128"] < lost["int3_g64"] < lost["int3_g128"]
    assert lost["mxfp4"] == pytest.approx(1.265e-2, rel=0.15)
