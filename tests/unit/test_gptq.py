"""GPTQ against a naive float64 loop over columns, and on the moments that break such solvers."""

from __future__ import annotations

import logging
import math
import time
from typing import Literal

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import choose_scales, encode
from forge_kernels.rules import Encoded, ScaleRule
from forge_kernels.solvers.gptq import gptq

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
GRID = torch.cat((-GRID.flip(0)[:-1], GRID))


def correlated(num_tokens: int, num_inputs: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(num_inputs, dtype=torch.float64)
    mixing += 0.5 * torch.randn(num_inputs, num_inputs, generator=generator, dtype=torch.float64) / num_inputs**0.5
    spread = torch.randn(num_inputs, generator=generator, dtype=torch.float64).mul(0.7).exp()
    return torch.randn(num_tokens, num_inputs, generator=generator, dtype=torch.float64) @ mixing * spread


def moment_of(x_TK: Tensor) -> Tensor:
    return x_TK.T @ x_TK / len(x_TK)


def random_weight(num_outputs: int, num_inputs: int, *, seed: int = 1) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


def weighted_error(encoded: Encoded, weight_NK: Tensor, moment_KK: Tensor) -> float:
    gap_NK = decode(encoded).double() - weight_NK.double()
    return float(((gap_NK @ moment_KK) * gap_NK).sum())


def naive_gptq(
    weight_NK: Tensor, moment_KK: Tensor, scales_NB: Tensor, damping: float, order: str
) -> tuple[Tensor, Tensor]:
    """Return decoded values and, per element, the distance of what was rounded to the nearest midpoint, in scales.

    Written as the elimination it is: after each column the inverse of the remaining moment is found afresh.
    """
    num_inputs = moment_KK.shape[0]
    h = moment_KK + damping * moment_KK.diagonal().mean() * torch.eye(num_inputs, dtype=torch.float64)
    channels = (
        sorted(range(num_inputs), key=lambda j: -float(moment_KK[j, j])) if order == "descending" else range(num_inputs)
    )
    left = list(channels)
    w = weight_NK.double().clone()
    out, margin = torch.empty_like(w), torch.empty_like(w)
    while left:
        j = left[0]
        inverse = torch.linalg.inv(h[left][:, left])
        scale_N = torch.exp2(scales_NB[:, j // 32].double() - 127)
        y_N = (w[:, j] / scale_N).clamp(-6, 6)
        distance = (y_N[:, None] - GRID).abs().sort(dim=1).values
        margin[:, j] = distance[:, 1] - distance[:, 0]
        out[:, j] = GRID[(y_N[:, None] - GRID).abs().argmin(1)] * scale_N
        error_N = (w[:, j] - out[:, j]) / inverse[0, 0]
        w[:, left] -= error_N[:, None] * inverse[0][None, :]
        left = left[1:]
    return out, margin


@pytest.mark.parametrize("order", ["natural", "descending"])
@pytest.mark.parametrize("rule", ["even", "search", "rceil"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (7, 96), (48, 160)])
def test_codes_equal_those_of_a_naive_loop_except_at_ties(
    order: Literal["natural", "descending"],
    rule: Literal["even", "search", "rceil"],
    num_outputs: int,
    num_inputs: int,
) -> None:
    moment_KK, weight_NK = moment_of(correlated(600, num_inputs)), random_weight(num_outputs, num_inputs)
    encoded = gptq(weight_NK, moment_KK, scale_rule=rule, order=order)
    importance_K = moment_KK.diagonal() if rule == "search" else None
    scales_NB = choose_scales(weight_NK, scale_rule=rule, importance_K=importance_K)
    assert torch.equal(encoded.scales_NB, scales_NB), "scales are those of the given weight"
    expected_NK, margin_NK = naive_gptq(weight_NK, moment_KK, scales_NB, 0.01, order)
    rows_with_ties = (margin_NK < 1e-5).any(1)
    assert rows_with_ties.sum() <= num_outputs // 8
    wrong = ((decode(encoded).double() != expected_NK) & ~rows_with_ties[:, None]).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} values differ, first at {wrong[0].tolist()}:"
        f" {float(decode(encoded)[tuple(wrong[0])])} instead of {float(expected_NK[tuple(wrong[0])])}"
    )


@pytest.mark.parametrize("rule", ["even", "floor", "rceil", "search"])
def test_lowers_the_weighted_error_and_descending_order_lowers_it_further(rule: ScaleRule) -> None:
    moment_KK, weight_NK = moment_of(correlated(2000, 256)), random_weight(64, 256)
    nearest = weighted_error(encode(weight_NK, scale_rule=rule), weight_NK, moment_KK)
    natural = weighted_error(gptq(weight_NK, moment_KK, scale_rule=rule, order="natural"), weight_NK, moment_KK)
    descending = weighted_error(gptq(weight_NK, moment_KK, scale_rule=rule), weight_NK, moment_KK)
    assert descending < natural < 0.9 * nearest


def test_without_correlation_it_is_nearest_rounding_in_natural_order() -> None:
    weight_NK = random_weight(20, 128)
    moment_KK = torch.diag(torch.rand(128, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1)
    encoded, nearest = gptq(weight_NK, moment_KK), encode(weight_NK)
    assert torch.equal(encoded.codes_NK, nearest.codes_NK)
    assert torch.equal(encoded.scales_NB, nearest.scales_NB)


def test_permuting_channels_within_blocks_permutes_the_codes() -> None:
    """Codes come back where their channels are: in descending order it does not matter how channels are listed."""
    moment_KK, weight_NK = moment_of(correlated(500, 96)), random_weight(12, 96)
    index_K = torch.cat([torch.randperm(32, generator=torch.Generator().manual_seed(b)) + 32 * b for b in range(3)])
    plain = gptq(weight_NK, moment_KK)
    permuted = gptq(weight_NK[:, index_K], moment_KK[index_K][:, index_K])
    assert torch.equal(permuted.scales_NB, plain.scales_NB)
    assert torch.equal(permuted.codes_NK, plain.codes_NK[:, index_K])


@pytest.mark.parametrize("order", ["natural", "descending"])
def test_dead_channels_get_their_nearest_codes_and_disturb_nothing(order: Literal["natural", "descending"]) -> None:
    x_TK, weight_NK = correlated(500, 96), random_weight(12, 96)
    dead_K = torch.zeros(96, dtype=torch.bool)
    dead_K[[0, 3, 40, 95]] = True
    x_TK[:, dead_K] = 0
    encoded = gptq(weight_NK, moment_of(x_TK), order=order)
    assert torch.equal(encoded.codes_NK[:, dead_K], encode(weight_NK).codes_NK[:, dead_K])
    other_NK = weight_NK.clone()
    other_NK[:, dead_K] *= 0.5
    assert torch.equal(choose_scales(other_NK), encoded.scales_NB)
    assert torch.equal(gptq(other_NK, moment_of(x_TK), order=order).codes_NK[:, ~dead_K], encoded.codes_NK[:, ~dead_K])


def test_a_moment_of_nothing_gives_nearest_rounding() -> None:
    weight_NK = random_weight(5, 64)
    encoded = gptq(weight_NK, torch.zeros(64, 64), scale_rule="search")
    assert torch.equal(encoded.codes_NK, encode(weight_NK, scale_rule="floor").codes_NK)


def hard_moments() -> dict[str, Tensor]:
    duplicated = correlated(400, 96)
    duplicated[:, 50] = duplicated[:, 7]
    duplicated[:, 51] = -3 * duplicated[:, 7]
    outlier = correlated(400, 96)
    outlier[:, 9] *= 1e4
    one_token = correlated(400, 96)
    one_token[17, 30] = 1e4
    return {
        "fewer tokens than channels": moment_of(correlated(20, 96)),
        "one token": moment_of(correlated(1, 96)),
        "duplicated channels": moment_of(duplicated),
        "outlier channel": moment_of(outlier),
        "outlier token": moment_of(one_token),
        "constant": torch.ones(96, 96, dtype=torch.float64),
        "tiny": moment_of(correlated(400, 96)) * 1e-30,
        "huge": moment_of(correlated(400, 96)) * 1e30,
    }


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("name", hard_moments())
def test_hard_moments_give_finite_codes_that_beat_nearest_rounding(name: str, damping: float) -> None:
    moment_KK, weight_NK = hard_moments()[name], random_weight(16, 96)
    encoded = gptq(weight_NK, moment_KK, damping=damping)
    assert encoded.codes_NK.le(15).all()
    assert encoded.codes_NK.ne(8).all()
    assert weighted_error(encoded, weight_NK, moment_KK) < weighted_error(encode(weight_NK), weight_NK, moment_KK)


def test_an_indefinite_moment_escalates_from_a_clean_copy_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    # One eigenvalue at -0.3 with a mean diagonal of 0.98: damping 0.01 and 0.1 fail, 1 works.
    indefinite_KK = torch.eye(64, dtype=torch.float64) - 1.3 / 64
    before = indefinite_KK.clone()
    weight_NK = random_weight(8, 64)
    with caplog.at_level(logging.WARNING):
        encoded = gptq(weight_NK, indefinite_KK)
    assert torch.equal(indefinite_KK, before)
    assert [record.getMessage() for record in caplog.records] == [
        "second moment is not positive definite: damping raised to 0.1",
        "second moment is not positive definite: damping raised to 1",
    ]
    assert torch.equal(encoded.codes_NK, gptq(weight_NK, indefinite_KK, damping=1.0).codes_NK)


def test_a_moment_that_no_damping_repairs_is_refused() -> None:
    moment_KK = torch.eye(64, dtype=torch.float64)
    moment_KK[0, 1] = moment_KK[1, 0] = 1e9
    with pytest.raises(ValueError, match="not positive definite even with damping 10000"):
        gptq(random_weight(4, 64), moment_KK)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_moments_and_weights_are_refused(bad: float) -> None:
    moment_KK, weight_NK = torch.eye(64, dtype=torch.float64), random_weight(4, 64)
    with pytest.raises(ValueError, match=r"weight has 1 non-finite entries, the first at \(2, 5\)"):
        gptq(weight_NK.index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(bad)), moment_KK)
    moment_KK[3, 3] = bad
    with pytest.raises(ValueError, match="second moment has 1 non-finite entries"):
        gptq(weight_NK, moment_KK)


def test_arguments_that_do_not_fit_are_refused() -> None:
    weight_NK, moment_KK = random_weight(4, 64), torch.eye(64)
    with pytest.raises(ValueError, match=r"second moment is \(32, 32\); 64 inputs need \(64, 64\)"):
        gptq(weight_NK, torch.eye(32))
    with pytest.raises(ValueError, match="-1.0 at diagonal entry 2"):
        gptq(weight_NK, moment_KK.index_put((torch.tensor(2), torch.tensor(2)), torch.tensor(-1.0)))
    with pytest.raises(ValueError, match="damping is -1"):
        gptq(weight_NK, moment_KK, damping=-1)
    with pytest.raises(ValueError, match="unknown order 'group'"):
        gptq(weight_NK, moment_KK, order="group")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 32"):
        gptq(random_weight(4, 40), torch.eye(40))


def test_inputs_are_left_alone_and_the_result_repeats() -> None:
    weight_NK, moment_KK = random_weight(16, 96).bfloat16(), moment_of(correlated(300, 96)).float()
    kept = weight_NK.clone(), moment_KK.clone()
    first, second = gptq(weight_NK, moment_KK), gptq(weight_NK, moment_KK)
    assert torch.equal(weight_NK, kept[0])
    assert torch.equal(moment_KK, kept[1])
    assert torch.equal(first.codes_NK, second.codes_NK)
    assert first.codes_NK.shape == (16, 96)
    assert first.codes_NK.is_contiguous()


def test_a_projection_of_a_small_model_takes_a_fraction_of_a_second() -> None:
    moment_KK, weight_NK = moment_of(correlated(1000, 512)), random_weight(192, 512)
    gptq(weight_NK, moment_KK)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        gptq(weight_NK, moment_KK)
        times.append(time.perf_counter() - start)
    # Measured 0.05 s on one idle core; passing every error on through the whole weight would take many times that.
    assert min(times) < 1.5
