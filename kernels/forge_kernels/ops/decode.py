"""Decode MXFP4 to float32: the value of a code times the power of two of its block.

Exact for every code and every byte from 0 to 252. Under bytes 253 and 254, which `encode` never writes, codes of 4 and
more, or 2 and more, stand for values beyond float32 and decode to infinity.

Legend: M rows (all leading axes), K elements per row, B = K / 32 blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.formats import E2M1
from forge_kernels.ops._arithmetic import BLOCK, row_chunks, scale_of_bytes
from forge_kernels.ops.encode import require_no_nan_scale
from forge_kernels.rules import Encoded


def decode(encoded: Encoded) -> Tensor:
    """Return the values of `encoded`, (..., K) float32. Errors as `decode_codes`."""
    return decode_codes(encoded.codes_NK, encoded.scales_NB)


def decode_codes(codes_MK: Tensor, scales_MB: Tensor) -> Tensor:
    """Return ``value(code) * 2^(byte - 127)``.

    Args:
        codes_MK: (..., K) uint8 in 0..15.
        scales_MB: (..., K / 32) uint8 in 0..254.

    Returns:
        (..., K) float32. Code 8, which `encode` never writes, decodes to minus zero.

    Raises:
        ValueError: other dtypes, shapes that do not belong together, a code above 15, a scale byte 255.
    """
    require_codes(codes_MK)
    expected = (*codes_MK.shape[:-1], codes_MK.shape[-1] // BLOCK)
    if codes_MK.shape[-1] % BLOCK or tuple(scales_MB.shape) != expected or scales_MB.dtype != torch.uint8:
        raise ValueError(
            f"codes {tuple(codes_MK.shape)} and scales {scales_MB.dtype} {tuple(scales_MB.shape)} do not belong"
            f" together; use torch.uint8 scales, one per {BLOCK} codes"
        )
    require_no_nan_scale(scales_MB)
    codebook = torch.tensor(E2M1.codebook, dtype=torch.float32, device=codes_MK.device)
    values_MK = torch.empty(codes_MK.shape, dtype=torch.float32, device=codes_MK.device)
    blocks_per_row = expected[-1]
    if not values_MK.numel():
        return values_MK
    codes_RK, scales_RB = codes_MK.reshape(-1, codes_MK.shape[-1]), scales_MB.reshape(-1, blocks_per_row)
    values_RBJ = values_MK.view(-1, blocks_per_row, BLOCK)
    for rows in row_chunks(len(codes_RK), blocks_per_row, codes_MK.device):
        torch.index_select(codebook, 0, codes_RK[rows].to(torch.int32).reshape(-1), out=values_RBJ[rows].view(-1))
        values_RBJ[rows].mul_(scale_of_bytes(scales_RB[rows].to(torch.int32)).unsqueeze(-1))
    return values_MK


def require_codes(codes_MK: Tensor) -> None:
    """Raise where `codes_MK` does not hold E2M1 codes.

    Raises:
        ValueError: not uint8, no axis, or a code above 15.
    """
    if codes_MK.dtype != torch.uint8 or codes_MK.dim() == 0:
        raise ValueError(f"codes are {codes_MK.dtype} {tuple(codes_MK.shape)}; use torch.uint8 with at least one axis")
    bad = (codes_MK > 15).nonzero()
    if len(bad):
        index = tuple(int(i) for i in bad[0])
        raise ValueError(f"code at {index} is {int(codes_MK[index])}; E2M1 codes are 0..15")
