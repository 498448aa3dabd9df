"""Normalized Sylvester Hadamard transform over runs of the last axis.

``x'_k = H x_k / sqrt(size)`` with ``H[i, j] = (-1)^popcount(i & j)``: symmetric, orthogonal, its own inverse. Done as a
product with a cached matrix; sizes above 64 as two smaller products, since H of size a b is the Kronecker product of
H of size a and H of size b.

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
    if not 2 <= size <= MAX_SIZE or size & (size - 1):
        raise ValueError(f"Hadamard size {size} is not a power of two from 2 to {MAX_SIZE}")
    if x_MK.dim() == 0 or x_MK.shape[-1] % size:
        raise ValueError(f"Hadamard size {size} does not divide the last axis of {tuple(x_MK.shape)}")
    if not x_MK.is_floating_point():
        raise ValueError(f"cannot rotate {x_MK.dtype}; give a floating-point tensor")
    dtype = torch.float64 if x_MK.dtype == torch.float64 else torch.float32
    inner = size if size <= _LARGEST_SINGLE else _INNER
    runs = torch.matmul(split_runs(x_MK.to(dtype), inner), hadamard_matrix(inner, dtype, x_MK.device))
    if size > inner:
        runs = runs.reshape(*x_MK.shape[:-1], x_MK.shape[-1] // size, size // inner, inner)
        runs = torch.matmul(hadamard_matrix(size // inner, dtype, x_MK.device), runs)
    return runs.reshape(x_MK.shape).to(x_MK.dtype)


@lru_cache(maxsize=64)
def hadamard_matrix(size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """Return the (size, size) normalized Sylvester matrix, `size` a power of two; shared, so never change it."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.div_(math.sqrt(size)).to(device=device, dtype=dtype)
