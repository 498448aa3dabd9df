"""The Triton kernel that moves one code per block against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kernels.ops.block_swap import block_gram, encode_with_swap
from forge_kernels.ops.block_swap_kernel import encode_with_swap_triton
from forge_kernels.ops.hadamard import hadamard_butterflies
from forge_kernels.ops.pack import pack
from forge_kernels.rules import SCALE_RULES, ScaleRule
from tests.kernel_cases import DEVICE, assert_equal, wild


def gram_of(num_inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_inputs)
    return block_gram((torch.randn(40, num_inputs, generator=generator) + 1.5,))


def assert_same(x: Tensor, scale_rule: ScaleRule, hadamard_size: int = 1) -> None:
    gram_Bij = gram_of(x.shape[1])
    transformed = x if hadamard_size == 1 else hadamard_butterflies(x, hadamard_size)
    wanted = encode_with_swap(transformed, gram_Bij, scale_rule=scale_rule)
    packed, scales = encode_with_swap_triton(x.to(DEVICE), gram_Bij.to(DEVICE), scale_rule, hadamard_size=hadamard_size)
    assert_equal(scales, wanted.scales_NB, "scale")
    assert_equal(packed, pack(wanted.codes_NK), "packed code")


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_has_the_bits_of_the_reference(dtype: torch.dtype, scale_rule: ScaleRule) -> None:
    assert_same(wild(150, 96, dtype), scale_rule)
    assert_same(wild(7, 64, dtype)[::2], scale_rule)


def test_after_a_hadamard_transform_within_blocks() -> None:
    assert_same(wild(9, 96, torch.bfloat16)[3:], "even", hadamard_size=32)
    x = torch.zeros(1, 128, device=DEVICE)
    with pytest.raises(ValueError, match="a Hadamard transform of size 64 crosses blocks"):
        encode_with_swap_triton(x, gram_of(128).to(DEVICE), "even", hadamard_size=64)


def test_codes_do_move_and_what_is_not_finite_shows() -> None:
    x = wild(200, 96)[4:]
    gram_Bij = gram_of(96).to(DEVICE)
    moved, _ = encode_with_swap_triton(x.to(DEVICE), gram_Bij, "even")
    still, _ = encode_with_swap_triton(x.to(DEVICE), torch.zeros_like(gram_Bij), "even")
    assert 0.2 < float((moved != still).any(dim=1).float().mean())
    x[5, 70] = torch.inf
    _, scales = encode_with_swap_triton(x.to(DEVICE), gram_Bij, "even")
    assert (scales == 255).nonzero().tolist() == [[5, 2]]
