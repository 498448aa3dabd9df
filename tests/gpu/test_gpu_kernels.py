"""The ops and solvers on a GPU against the CPU: bitwise for encoding and rounding, by error for matrix products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels import (
    BlockMatrix,
    apply_transform,
    decode,
    encode,
    fake_quantize,
    fit_low_rank,
    gptq,
    hadamard,
    pack,
    smooth_scales,
    transform_weight,
    unpack,
    wush_matrices,
)
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.mxfp4_oracle import assert_same_bits, assert_same_codes

pytestmark = pytest.mark.gpu


def many_magnitudes(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    exponent = torch.randint(-149, 127, (rows, columns // 32, 1), generator=generator)
    x = torch.randn(rows, columns // 32, 32, generator=generator, dtype=torch.float64) * 2.0**exponent
    x[0] = 0
    return x.clamp(-3.4e38, 3.4e38).float().view(rows, columns)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_gives_the_bits_of_the_cpu(rule: ScaleRule, dtype: torch.dtype) -> None:
    x_MK = many_magnitudes(3000, 192).to(dtype).nan_to_num(posinf=1.0, neginf=-1.0)
    on_cpu, on_gpu = encode(x_MK, scale_rule=rule), encode(x_MK.cuda(), scale_rule=rule)
    assert torch.equal(on_gpu.scales_NB.cpu(), on_cpu.scales_NB)
    assert_same_codes(on_gpu.codes_NK.cpu(), on_cpu.codes_NK, source=x_MK)
    assert_same_bits(decode(on_gpu).cpu(), decode(on_cpu), source=x_MK)
    assert_same_bits(fake_quantize(x_MK.cuda(), scale_rule=rule).cpu(), decode(on_cpu), source=x_MK)
    assert torch.equal(unpack(pack(on_gpu.codes_NK)).cpu(), on_cpu.codes_NK)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_rounding_never_waits_for_the_device(rule: ScaleRule) -> None:
    x_MK = many_magnitudes(64, 192).cuda()
    fake_quantize(x_MK, scale_rule=rule)
    hadamard(x_MK, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fake_quantize(x_MK, scale_rule=rule)
        hadamard(x_MK, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_layer_goes_through_every_solver() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TK = (torch.randn(2000, 256, generator=generator) * torch.randn(256, generator=generator).exp()).cuda()
    weight_NK = torch.randn(96, 256, generator=generator).cuda()
    wanted_TN = x_TK @ weight_NK.T
    moment_KK = x_TK.double().T @ x_TK.double() / len(x_TK)
    transform = (BlockMatrix(matrix_Bij=wush_matrices(moment_KK, [weight_NK])),)
    moved_TK, moved_NK = apply_transform(transform, x_TK), transform_weight(transform, weight_NK)
    moved_moment_KK = moved_TK.double().T @ moved_TK.double() / len(x_TK)
    encoded = gptq(moved_NK, moved_moment_KK, scale_rule="search")
    assert encoded.codes_NK.device.type == encoded.scales_NB.device.type == "cuda"
    on_cpu = gptq(moved_NK.cpu(), moved_moment_KK.cpu(), scale_rule="search")
    assert torch.equal(on_cpu.scales_NB, encoded.scales_NB.cpu())
    assert (on_cpu.codes_NK != encoded.codes_NK.cpu()).float().mean() < 0.01, "only ties may fall otherwise"
    output_TN = fake_quantize(moved_TK) @ decode(encoded).T
    plain_TN = fake_quantize(x_TK) @ fake_quantize(weight_NK).T
    assert (output_TN - wanted_TN).norm() < 0.8 * (plain_TN - wanted_TN).norm()
    low_rank = fit_low_rank(x_TK, wanted_TN - output_TN, 8)
    corrected_TN = output_TN + x_TK @ low_rank.a_RK.float().T @ low_rank.b_NR.float().T
    assert (corrected_TN - wanted_TN).norm() < (output_TN - wanted_TN).norm()
    drawn = fit_low_rank(x_TK, wanted_TN, 8, directions="random", generator=torch.Generator().manual_seed(0))
    assert drawn.a_RK.device.type == "cuda"
    assert smooth_scales(x_TK.abs().amax(0), weight_NK.abs().amax(0)).device.type == "cuda"
