"""Codes of any width w as a stream of bits: code i of a row takes bits ``i w`` to ``i w + w - 1``, the lowest of a byte first.

For four bits that is code 2j in the low nibble of byte j and code 2j + 1 in the high one, as `mxfp4-pack-quantized` has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.ops._arithmetic import split_runs

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def pack(codes_NK: Tensor, *, bits: int = 4) -> Tensor:
    """Return (..., K bits / 8) uint8 from (..., K) integer codes in 0..2^bits - 1.

    Raises:
        ValueError: no integers, a width that is not 1 to 16, a code that does not fit, or rows that do not fill whole bytes.
    """
    _require_width(bits)
    if codes_NK.dtype not in _INTEGERS or codes_NK.dim() == 0:
        raise ValueError(f"codes are {codes_NK.dtype} {tuple(codes_NK.shape)}; use integers with at least one axis")
    wide_NK = codes_NK.to(torch.int32 if codes_NK.dtype != torch.int64 else torch.int64)
    bad = ((wide_NK < 0) | (wide_NK >= 2**bits)).nonzero()
    if len(bad):
        index = tuple(int(i) for i in bad[0])
        raise ValueError(f"code at {index} is {int(codes_NK[index])}; codes of {bits} bits are 0..{2**bits - 1}")
    if codes_NK.shape[-1] * bits % 8:
        raise ValueError(f"cannot pack {codes_NK.shape[-1]} codes of {bits} bits per row: they do not fill whole bytes")
    if bits == 4:
        codes_NK = codes_NK.to(torch.uint8)
        return codes_NK[..., 0::2] | (codes_NK[..., 1::2] << 4)
    places = torch.arange(bits, dtype=torch.int32, device=codes_NK.device)
    stream = ((codes_NK.to(torch.int32).unsqueeze(-1) >> places) & 1).flatten(-2)
    return _sum_bits(split_runs(stream, 8)).to(torch.uint8)


def unpack(packed_NK: Tensor, *, bits: int = 4) -> Tensor:
    """Return the (..., 8 P / bits) codes of (..., P) packed bytes: uint8 up to 8 bits, int32 above.

    Raises:
        ValueError: not uint8, a width that is not 1 to 16, or bytes that do not hold whole codes.
    """
    _require_width(bits)
    if packed_NK.dtype != torch.uint8 or packed_NK.dim() == 0:
        raise ValueError(f"packed codes are {packed_NK.dtype} {tuple(packed_NK.shape)}; use torch.uint8")
    if packed_NK.shape[-1] * 8 % bits:
        raise ValueError(f"{packed_NK.shape[-1]} bytes per row do not hold whole codes of {bits} bits")
    if bits == 4:
        return torch.stack((packed_NK & 15, packed_NK >> 4), dim=-1).flatten(-2)
    places = torch.arange(8, dtype=torch.int32, device=packed_NK.device)
    stream = ((packed_NK.to(torch.int32).unsqueeze(-1) >> places) & 1).flatten(-2)
    return _sum_bits(split_runs(stream, bits)).to(torch.uint8 if bits <= 8 else torch.int32)


def _sum_bits(bits: Tensor) -> Tensor:
    """Return the int32 numbers whose binary digits, lowest first, are the last axis."""
    places = torch.arange(bits.shape[-1], dtype=torch.int32, device=bits.device)
    return (bits << places).sum(dim=-1, dtype=torch.int32)


def _require_width(bits: int) -> None:
    if not 1 <= bits <= 16:
        raise ValueError(f"codes of {bits} bits are not known; use 1 to 16")
