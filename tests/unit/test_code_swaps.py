"""Weight code swaps: no move raises the error, and where they stop no single move lowers it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from forge_kernels.formats import E2M1
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.rules import Encoded
from forge_kernels.solvers.code_swaps import swap_codes
from forge_kernels.solvers.gptq import gptq


def case(num_outputs: int, num_inputs: int, *, tokens: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(num_inputs) + 0.3 * torch.randn(num_inputs, num_inputs, generator=generator) / num_inputs**0.5
    spread = (0.7 * torch.randn(num_inputs, generator=generator)).exp()
    x_TK = (torch.randn(tokens, num_inputs, generator=generator) @ mixing * spread).double()
    return 0.05 * torch.randn(num_outputs, num_inputs, generator=generator), x_TK.T @ x_TK / tokens


def errors_of(encoded: Encoded, weight_NK: Tensor, moment_KK: Tensor) -> Tensor:
    gap_NK = decode(encoded).double() - weight_NK.double()
    return ((gap_NK @ moment_KK) * gap_NK).sum(dim=1)


@pytest.mark.parametrize("first", ["nearest", "gptq"])
def test_every_sweep_lowers_the_error_of_every_row_or_leaves_it(first: str) -> None:
    weight_NK, moment_KK = case(24, 160)
    encoded = encode(weight_NK) if first == "nearest" else gptq(weight_NK, moment_KK)
    errors = [errors_of(encoded, weight_NK, moment_KK)]
    for sweeps in (1, 2, 4):
        swapped = swap_codes(encoded, weight_NK, moment_KK, max_sweeps=sweeps)
        assert torch.equal(swapped.scales_NB, encoded.scales_NB)
        errors.append(errors_of(swapped, weight_NK, moment_KK))
    for before, after in itertools.pairwise(errors):
        worst = int((after - before).argmax())
        assert float(after[worst] - before[worst]) <= 1e-12, f"row {worst}: {before[worst]} to {after[worst]}"
    assert float(errors[-1].sum()) < {"nearest": 0.75, "gptq": 0.995}[first] * float(errors[0].sum())


def test_where_it_stops_no_single_move_lowers_the_error() -> None:
    weight_NK, moment_KK = case(5, 64)
    swapped = swap_codes(encode(weight_NK), weight_NK, moment_KK, max_sweeps=200)
    assert torch.equal(swap_codes(swapped, weight_NK, moment_KK).codes_NK, swapped.codes_NK)
    reached = errors_of(swapped, weight_NK, moment_KK)
    ladder = sorted((value, code) for code, value in enumerate(E2M1.codebook) if code != 8)
    order = [code for _, code in ladder]
    for row, channel in itertools.product(range(5), range(64)):
        place = order.index(int(swapped.codes_NK[row, channel]))
        for neighbour in (place - 1, place + 1):
            if 0 <= neighbour < len(order):
                moved = Encoded(codes_NK=swapped.codes_NK.clone(), scales_NB=swapped.scales_NB)
                moved.codes_NK[row, channel] = order[neighbour]
                error = errors_of(moved, weight_NK, moment_KK)[row]
                assert error >= reached[row] - 1e-12, (
                    f"code {row}, {channel} to {order[neighbour]}: {error} < {reached[row]}"
                )


def test_without_correlation_nearest_codes_stay() -> None:
    weight_NK, _ = case(9, 96)
    moment_KK = torch.diag(torch.rand(96, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1)
    encoded = encode(weight_NK)
    assert torch.equal(swap_codes(encoded, weight_NK, moment_KK).codes_NK, encoded.codes_NK)


def test_dead_channels_and_moments_of_nothing_move_nothing() -> None:
    weight_NK, moment_KK = case(9, 96)
    moment_KK[5], moment_KK[:, 5] = 0, 0
    encoded = encode(weight_NK)
    assert torch.equal(swap_codes(encoded, weight_NK, moment_KK).codes_NK[:, 5], encoded.codes_NK[:, 5])
    nothing = torch.zeros(96, 96)
    assert torch.equal(swap_codes(encoded, weight_NK, nothing).codes_NK, encoded.codes_NK)


def test_fewer_tokens_than_channels() -> None:
    weight_NK, moment_KK = case(9, 96, tokens=20)
    encoded = gptq(weight_NK, moment_KK)
    swapped = swap_codes(encoded, weight_NK, moment_KK)
    assert bool((errors_of(swapped, weight_NK, moment_KK) <= errors_of(encoded, weight_NK, moment_KK) + 1e-12).all())
    assert not (swapped.codes_NK == 8).any()


def test_arguments_that_do_not_fit_are_refused() -> None:
    weight_NK, moment_KK = case(4, 64)
    with pytest.raises(ValueError, match="max_sweeps is 0; give at least 1"):
        swap_codes(encode(weight_NK), weight_NK, moment_KK, max_sweeps=0)
    with pytest.raises(ValueError, match=r"codes are \(4, 32\); the weight they stand for is \(4, 64\)"):
        swap_codes(encode(weight_NK[:, :32]), weight_NK, moment_KK)
    with pytest.raises(ValueError, match=r"second moment is \(32, 32\)"):
        swap_codes(encode(weight_NK), weight_NK, moment_KK[:32, :32])
