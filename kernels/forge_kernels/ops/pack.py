"""Two E2M1 codes per byte: code 2j in the low nibble, code 2j + 1 in the high one."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.ops.decode import require_codes


def pack(codes_NK: Tensor) -> Tensor:
    """Return (..., K / 2) uint8 from (..., K) uint8 codes in 0..15.

    Raises:
        ValueError: not uint8, a code above 15, or an odd K.
    """
    require_codes(codes_NK)
    if codes_NK.shape[-1] % 2:
        raise ValueError(f"cannot pack {codes_NK.shape[-1]} codes per row two by two; their number must be even")
    return codes_NK[..., 0::2] | (codes_NK[..., 1::2] << 4)


def unpack(packed_NK: Tensor) -> Tensor:
    """Return the (..., 2 P) uint8 codes of (..., P) packed bytes.

    Raises:
        ValueError: not uint8.
    """
    if packed_NK.dtype != torch.uint8 or packed_NK.dim() == 0:
        raise ValueError(f"packed codes are {packed_NK.dtype} {tuple(packed_NK.shape)}; use torch.uint8")
    return torch.stack((packed_NK & 15, packed_NK >> 4), dim=-1).flatten(-2)
