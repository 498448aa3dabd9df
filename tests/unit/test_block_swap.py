"""The block swap: the best of all single moves, found by trying every one in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_kernels.formats import E2M1
from forge_kernels.ops.block_swap import block_gram, encode_with_swap, fake_quantize_with_swap
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.mxfp4_oracle import assert_same_bits

GRID = sorted({value + 0.0 for value in E2M1.codebook})


def case(seed: int, *, num_blocks: int = 3, rows: int = 5, correlated: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32 * num_blocks, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))
    weight = torch.randn(48, 32 * num_blocks, generator=generator)
    if correlated:
        weight = weight + 2 * torch.randn(48, 1, generator=generator)
    return x, block_gram((weight,))


def errors(x: Tensor, decoded: Tensor, gram: Tensor) -> Tensor:
    e = (decoded.double() - x.double()).view(len(x), -1, 32)
    return torch.einsum("mbi,bij,mbj->mb", e, gram.double(), e)


def best_single_move(x: Tensor, gram: Tensor) -> Tensor:
    """Return the lowest output error (M, B) that moving at most one code to a neighbour reaches."""
    encoded = encode(x)
    scale = 2.0 ** (encoded.scales_NB.double() - 127)
    start = decode(encoded)
    best = errors(x, start, gram)
    for row in range(len(x)):
        for block in range(gram.shape[0]):
            for place in range(32 * block, 32 * block + 32):
                unit = float(scale[row, block])
                at = GRID.index(float(start[row, place]) / unit + 0.0)
                for neighbour in (at - 1, at + 1):
                    if 0 <= neighbour < len(GRID):
                        moved = start[row : row + 1].clone()
                        moved[0, place] = GRID[neighbour] * unit
                        best[row, block] = min(best[row, block], errors(x[row : row + 1], moved, gram)[0, block])
    return best


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_no_other_single_move_is_better(seed: int, correlated: bool) -> None:
    x, gram = case(seed, num_blocks=2, rows=2, correlated=correlated)
    reached = errors(x, decode(encode_with_swap(x, gram)), gram)
    best = best_single_move(x, gram)
    torch.testing.assert_close(reached, best, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
def test_at_most_one_neighbouring_code_of_a_block_moves_and_scales_stay(scale_rule: ScaleRule) -> None:
    x, gram = case(3, rows=200)
    nearest = encode(x, scale_rule=scale_rule)
    swapped = encode_with_swap(x, gram, scale_rule=scale_rule)
    assert torch.equal(swapped.scales_NB, nearest.scales_NB)
    codes = torch.stack([nearest.codes_NK, swapped.codes_NK]).view(2, 200, 3, 32)
    assert 8 not in swapped.codes_NK, "minus zero is written"
    moves = codes[0] != codes[1]
    assert int(moves.sum(dim=-1).max()) == 1
    assert float(moves.any(dim=-1).float().mean()) > 0.5, "hardly any block moves a code"
    rank = torch.where(codes > 7, 8 - codes.int(), codes.int())
    assert int((rank[0] - rank[1]).abs().max()) == 1


def test_the_output_error_never_grows_and_falls_on_average() -> None:
    x, gram = case(11, rows=300)
    before, after = errors(x, decode(encode(x)), gram), errors(x, decode(encode_with_swap(x, gram)), gram)
    worst = ((after - before) / before).amax()
    assert worst <= 1e-5, f"a block's error grew by {worst:.2e} of itself"
    assert float(after.sum() / before.sum()) < 0.9


def test_uncorrelated_columns_keep_nearest_codes() -> None:
    x, _ = case(5)
    gram = torch.eye(32).expand(3, 32, 32)
    assert torch.equal(encode_with_swap(x, gram).codes_NK, encode(x).codes_NK)


def test_zero_rows_and_huge_and_tiny_values() -> None:
    x, gram = case(8, rows=4)
    x[0] = 0.0
    x[1] *= 1e-37
    x[2] *= 1e36
    swapped = encode_with_swap(x, gram)
    assert not swapped.codes_NK[0].any()
    scaled = encode_with_swap(x[3:] * 2.0**20, gram)
    assert torch.equal(scaled.codes_NK, swapped.codes_NK[3:]), "a power of two changes what is moved"
    assert bool(decode(swapped).isfinite().all())
    assert encode_with_swap(x[:0], gram).codes_NK.shape == (0, 96)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
def test_what_a_layer_sees_is_what_the_codes_say(scale_rule: ScaleRule) -> None:
    x, gram = case(21, rows=50)
    x[0] = 0.0
    x[1] *= 1e-38
    seen = fake_quantize_with_swap(x, gram, scale_rule=scale_rule)
    assert_same_bits(seen + 0.0, decode(encode_with_swap(x, gram, scale_rule=scale_rule)) + 0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_becomes_nan_and_no_other(bad: float) -> None:
    x, gram = case(22)
    clean = fake_quantize_with_swap(x, gram)
    x[2, 40] = bad
    seen = fake_quantize_with_swap(x, gram)
    assert bool(seen[2, 32:64].isnan().all())
    seen[2, 32:64] = clean[2, 32:64]
    assert_same_bits(seen, clean)


def test_layers_of_one_input_add_their_gram_matrices() -> None:
    weights = tuple(torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (8, 16))
    together = block_gram(weights)
    assert bool(((together.abs().amax(dim=(1, 2)) >= 0.5) & (together.abs().amax(dim=(1, 2)) < 1)).all())
    assert torch.allclose(together, block_gram((torch.cat(weights),)))
    assert torch.equal(block_gram((torch.zeros(4, 32),)), torch.zeros(1, 32, 32))


def test_a_row_is_encoded_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    gram = block_gram((torch.randint(-2, 3, (8, 32), generator=generator).float(),))
    x = torch.randint(-24, 25, (1500, 32), generator=generator) / 8  # with many exact ties
    together = encode_with_swap(x, gram).codes_NK
    alone = torch.cat([encode_with_swap(row, gram).codes_NK for row in x.split(1)])
    bad = (together != alone).any(dim=1).nonzero().flatten().tolist()
    assert not bad, (
        f"row {bad[0]}: {alone[bad[0]].tolist()} alone, {together[bad[0]].tolist()} among others ({len(bad)} differ)"
    )


def test_faint_blocks_are_not_forgotten() -> None:
    x, _ = case(31, num_blocks=2)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    faint = weight.clone()
    faint[:, 32:] *= 2.0**-76
    assert torch.equal(
        encode_with_swap(x, block_gram((faint,))).codes_NK, encode_with_swap(x, block_gram((weight,))).codes_NK
    )


def test_refusals() -> None:
    x, gram = case(1)
    with pytest.raises(ValueError, match=r"Gram matrices are \(2, 32, 32\); an input of 3 blocks needs \(3, 32, 32\)"):
        encode_with_swap(x, gram[:2])
    with pytest.raises(ValueError, match="do not read one input"):
        block_gram((torch.zeros(2, 32), torch.zeros(2, 64)))
    with pytest.raises(ValueError, match="no whole blocks"):
        block_gram((torch.zeros(2, 33),))
