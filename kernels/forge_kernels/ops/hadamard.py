"""Normalized Sylvester Hadamard transform over runs of the last axis.

``x'_k = H x_k / sqrt(size)`` with ``H[i, j] = (-1)^popcount(i & j)``: symmetric, orthogonal, its own inverse. Done as a
product with a cached matrix; sizes above 64 as two smaller products, since H of size a b is the Kronecker product of
H of size a and H of size b. `hadamard_butterflies` computes the same by additions in a stated order, the same bits on every
device: what the kernels do, where additions within a thread are cheap. On a CPU it takes twelve times as long.

Legend: M rows (all leading axes), K elements per row.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from forge_kernels.ops._arithmetic import split_runs

_LARGEST_SINGLE = 64
_INNER = 32
"""Up to 64 one product; above it two, of 32 and size / 32: ``a + b`` instead of ``a b`` multiply-adds per element."""
MAX_SIZE = 512


def hadamard(x_MK: Tensor, size: int) -> Tensor:
    """Return the transform of each run of `size` elements, in the shape and dtype of `x_MK`.

    Args:
        x_MK: (..., K) floating point; float16 and bfloat16 are computed in float32 and rounded once.
        size: a power of two from 2 to 512 that divides K.

    Raises:
        ValueError: a size that is no such power of two or does not divide K.
    """
    return hadamard_reference(x_MK, size)


def hadamard_reference(x_MK: Tensor, size: int) -> Tensor:
    """Do what `hadamard` says in plain torch operations."""
    _check(x_MK, size)
    dtype = torch.float64 if x_MK.dtype == torch.float64 else torch.float32
    inner = size if size <= _LARGEST_SINGLE else _INNER
    runs = torch.matmul(split_runs(x_MK.to(dtype), inner), hadamard_matrix(inner, dtype, x_MK.device))
    if size > inner:
        runs = runs.reshape(*x_MK.shape[:-1], x_MK.shape[-1] // size, size // inner, inner)
        runs = torch.matmul(hadamard_matrix(size // inner, dtype, x_MK.device), runs)
    return runs.reshape(x_MK.shape).to(x_MK.dtype)


def hadamard_butterflies(x_MK: Tensor, size: int) -> Tensor:
    """Return the transform in float32, added up in one order on every device: neighbours, then pairs of two, and so on.

    For h = 1, 2, 4, ... below `size`, elements i and i + h of each run of 2 h become their sum and their difference; the
    result is multiplied once by ``1 / sqrt(size)``. Each output has log2(size) rounded additions behind it, so it is within
    ``(log2(size) + 1) 2^-24 sum |x| / sqrt(size)`` of the exact one.

    Raises:
        ValueError: as `hadamard`.
    """
    _check(x_MK, size)
    x = x_MK.to(torch.float32)
    half = 1
    while half < size:
        pairs = x.reshape(-1, 2, half)
        x = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        half *= 2
    return x.reshape(x_MK.shape).mul(1 / math.sqrt(size))


def _check(x_MK: Tensor, size: int) -> None:
    if not 2 <= size <= MAX_SIZE or size & (size - 1):
        raise ValueError(f"Hadamard size {size} is not a power of two from 2 to {MAX_SIZE}")
    if x_MK.dim() == 0 or x_MK.shape[-1] % size:
        raise ValueError(f"Hadamard size {size} does not divide the last axis of {tuple(x_MK.shape)}")
    if not x_MK.is_floating_point():
        raise ValueError(f"cannot rotate {x_MK.dtype}; give a floating-point tensor")


@lru_cache(maxsize=64)
def hadamard_matrix(size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """Return the (size, size) normalized Sylvester matrix, `size` a power of two; shared, so never change it."""
    with torch.inference_mode(False):  # it is kept, and others may want gradients through it
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        return matrix.div_(math.sqrt(size)).to(device=device, dtype=dtype)
