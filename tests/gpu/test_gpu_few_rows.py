"""The product of up to 16 rows with a packed weight, on a Hopper GPU: against float64, on shapes that fill no tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.few_rows_kernel import EXACT_OCTAVES, few_rows_triton
from forge_kernels.ops.lift_kernel import encode_lifted_triton
from forge_kernels.ops.mxfp4_linear import mxfp4_linear, prepare_weight
from forge_kernels.ops.pack import pack
from forge_kernels.ops.routes import most_packed_rows
from forge_kernels.rules import Encoded
from tests.kernel_cases import assert_equal, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or most_packed_rows(torch.device("cuda")) < 16, reason="the kernel is for Hopper"
    ),
]


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.randn(*shape[:-1], 1, generator=generator).exp()


def few_rows(x: Tensor, weight: Encoded, dtype: torch.dtype = torch.float32) -> Tensor:
    packed, scales = pack(weight.codes_NK).cuda(), weight.scales_NB.cuda()
    is_used = (weight.codes_NK.view(len(packed), -1, 32) & 7 != 0).any(dim=-1).cuda()
    references_N = torch.where(is_used, scales, 0).amax(dim=1)
    counters = torch.zeros(len(packed) // 64 + 1, dtype=torch.int32, device="cuda")
    lifted = encode_lifted_triton(x.cuda(), "even", "e5m2", for_few_rows=True)
    y = few_rows_triton(lifted, packed, scales, references_N, counters, dtype=dtype)
    again = few_rows_triton(lifted, packed, scales, references_N, counters, dtype=dtype)
    assert_equal(y, again, "parts are added in one order, so that the result repeats, but not")
    assert not counters.any(), "counters are left as they were"
    return y


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(1, 32), (70, 96), (64, 256), (130, 1056), (128, 4096), (257, 2048), (1536, 576), (2560, 9728)],
)
def test_against_float64(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    x, weight = random(num_rows, num_inputs, seed=6), encode(random(num_outputs, num_inputs, seed=7))
    wanted = decode(encode(x)).double() @ decode(weight).double().T
    assert relative_error(few_rows(x, weight), wanted) < 3e-4
    assert relative_error(few_rows(x, weight, torch.bfloat16), wanted) < 3e-3


def test_every_code_in_every_place_times_one_element_at_a_time() -> None:
    codes_NK = torch.stack([torch.arange(512).add(shift).remainder(16) for shift in range(16)]).to(torch.uint8)
    weight = Encoded(codes_NK=codes_NK, scales_NB=torch.arange(100, 116, dtype=torch.uint8).repeat(16, 1))
    for first in range(0, 512, 16):
        x = torch.zeros(16, 512)
        x[torch.arange(16), first + torch.arange(16)] = 1.5
        assert_equal(few_rows(x, weight), x @ decode(weight).T, f"product of elements from {first} on")


def test_27_octaves_are_exact_and_blocks_of_zeros_may_have_any_scale() -> None:
    generator = torch.Generator().manual_seed(8)
    codes_NK = torch.randint(0, 16, (9, 64 * 32), generator=generator, dtype=torch.uint8)
    codes_NK[:, :64] &= 8
    scales_NB = 127 + (torch.arange(64) % (EXACT_OCTAVES + 1)).repeat(9, 1).to(torch.uint8)
    scales_NB[:, 0], scales_NB[:, 1] = 0, 254
    weight = Encoded(codes_NK=codes_NK, scales_NB=scales_NB)
    x = torch.zeros(16, 64, 32)
    for row in range(16):
        x[row, 4 * row] = torch.randn(32, generator=generator)
    x = x.flatten(1)
    wanted = decode(encode(x)).double() @ decode(weight).double().T
    gap = (few_rows(x, weight).cpu().double() - wanted).abs()
    bad = (gap > 3e-4 * wanted.abs().amax(dim=1, keepdim=True) * 2.0**-20 + 1e-3 * wanted.abs()).nonzero()
    assert not len(bad), f"at {bad[0].tolist()}: off by {float(gap[tuple(bad[0])])}"


def test_rows_that_are_not_finite_and_zero_operands() -> None:
    x, weight = random(3, 96, seed=9), encode(random(8, 96, seed=10))
    x[1, 4] = torch.nan
    assert few_rows(x, weight).isnan().all(dim=1).tolist() == [False, True, False]
    assert not few_rows(torch.zeros(2, 96), weight).any()
    assert not few_rows(torch.ones(2, 96), encode(torch.zeros(4, 96))).any()


def test_a_weight_prepared_for_few_rows_takes_them_right_after_it_was_prepared() -> None:
    for seed in range(5):
        weight = encode(random(4096, 4096, seed=seed).cuda())
        x = random(16, 4096, seed=9)
        prepared = prepare_weight(weight, route="fp8_lift", few_rows_only=True)
        y = mxfp4_linear(x.cuda(), prepared)
        assert relative_error(y, decode(encode(x)).double() @ decode(weight).cpu().double().T) < 3e-4
        with pytest.raises(ValueError, match=r"prepared for 1 to 16 rows under nearest codes .* and got 17"):
            mxfp4_linear(torch.ones(17, 4096, device="cuda"), prepared)


def test_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="17 rows; this product takes 1 to 16"):
        few_rows(torch.ones(17, 32), encode(torch.ones(4, 32)))
