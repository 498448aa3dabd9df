"""What a quantized layer sees of its input: `decode(encode(x))` in one go, for the scorer's hot path.

The same bits as encoding and decoding, without codes: values are rounded to the E2M1 grid by one addition and one
subtraction. On the CPU the blocks are cut into chunks that stay in the cache through all passes, which is where the
time goes. On other devices the chunk is the whole tensor, and nothing synchronizes.

Legend: M rows (all leading axes), K elements per row, R blocks of all rows, J = 32 elements of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.ops._arithmetic import BLOCK, CHUNK_BLOCKS, inverse_scale_of_bytes, round_to_e2m1_, scale_of_bytes
from forge_kernels.ops.encode import block_amax, require_known_rule, scale_bytes, widen
from forge_kernels.rules import ScaleRule


def fake_quantize(x_MK: Tensor, *, scale_rule: ScaleRule = "even") -> Tensor:
    """Return ``decode(encode(x_MK, scale_rule=scale_rule))`` bit for bit, (..., K) float32.

    A block with a NaN or an infinity becomes NaN as a whole, where `encode` would raise.

    Raises:
        ValueError: wrong dtype, K not divisible by 32, unknown rule.
    """
    require_known_rule(scale_rule)
    return fake_quantize_reference(x_MK, scale_rule=scale_rule)


def fake_quantize_reference(x_MK: Tensor, *, scale_rule: ScaleRule = "even") -> Tensor:
    """Do what `fake_quantize` says in plain torch operations."""
    x_RJ = widen(x_MK).view(-1, BLOCK) if x_MK.numel() else widen(x_MK).reshape(0, BLOCK)
    out_RJ = torch.empty_like(x_RJ)
    num_blocks = len(x_RJ)
    chunk = min(num_blocks, CHUNK_BLOCKS * torch.get_num_threads()) if x_RJ.device.type == "cpu" else num_blocks
    scratch_RJ = torch.empty(chunk, BLOCK, dtype=torch.int32, device=x_RJ.device)
    for start in range(0, num_blocks, max(chunk, 1)):
        stop = min(start + chunk, num_blocks)
        _round_chunk(x_RJ[start:stop], out_RJ[start:stop], scratch_RJ[: stop - start], scale_rule)
    return out_RJ.view(x_MK.shape)


def _round_chunk(x_RJ: Tensor, out_RJ: Tensor, scratch_RJ: Tensor, scale_rule: ScaleRule) -> None:
    amax_R1 = block_amax(x_RJ, scratch_RJ.view(torch.float32))
    scales_R1 = scale_bytes(x_RJ, amax_R1, scale_rule)
    # amax - amax is 0, or NaN where the block is not finite.
    scale_R1 = scale_of_bytes(scales_R1).add_(amax_R1.sub_(amax_R1))
    torch.mul(x_RJ, inverse_scale_of_bytes(scales_R1), out=out_RJ)
    round_to_e2m1_(out_RJ, scratch_RJ).mul_(scale_R1)
