"""Coordinate changes that a program may put in front of a quantized layer, as data.

A layer computes ``y = Q(T x) What^T`` with ``What ~ W T^-1``: the transform T acts online on the activation, its
inverse is merged into the weight before encoding. T is a tuple of steps, applied left to right; every step comes from
one of the four listed families, so that the evaluator can check and count it without running the program.

Legend: T tokens, N output features, K input features, B = K / 32 blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_kernels.ops._arithmetic import split_runs
from forge_kernels.ops.hadamard import MAX_SIZE, hadamard

BLOCK = 32
"""Side of a block matrix: the block length of MXFP4, so that a block transform never mixes two scales."""


@dataclass(frozen=True, kw_only=True)
class Diagonal:
    """``x'_j = x_j * scale_K[j]``; every entry finite and non-zero."""

    scale_K: Tensor

    def apply(self, x_TK: Tensor) -> Tensor:
        """Return ``x * scale`` in the dtype of `x_TK`."""
        return x_TK * self.scale_K.to(x_TK.dtype)

    def apply_inverse_to_weight(self, weight_NK: Tensor) -> Tensor:
        """Return ``W T^-1``."""
        return weight_NK / self.scale_K.to(weight_NK.dtype)


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """``x'_j = x_index_K[j]``; `index_K` is a permutation of 0..K-1, int64."""

    index_K: Tensor

    def apply(self, x_TK: Tensor) -> Tensor:
        """Return ``x[..., index]``."""
        return x_TK[..., self.index_K]

    def apply_inverse_to_weight(self, weight_NK: Tensor) -> Tensor:
        """Return ``W T^-1``: the columns move as the channels do."""
        return weight_NK[..., self.index_K]


@dataclass(frozen=True, kw_only=True)
class Hadamard:
    """``x'_k = H x_k / sqrt(size)`` for each run of `size` channels; `size` a power of two from 2 to 512 dividing K."""

    size: int

    def apply(self, x_TK: Tensor) -> Tensor:
        """Return the rotated runs in the dtype of `x_TK`."""
        return hadamard(x_TK, self.size)

    def apply_inverse_to_weight(self, weight_NK: Tensor) -> Tensor:
        """Return ``W T^-1 = W H^T / sqrt(size)``; the Sylvester matrix H is symmetric."""
        return hadamard(weight_NK, self.size)


@dataclass(frozen=True, kw_only=True)
class BlockMatrix:
    """``x'_b = matrix_Bij[b] x_b`` for each block of 32 channels; (B, 32, 32), or (1, 32, 32) shared by all blocks."""

    matrix_Bij: Tensor

    def apply(self, x_TK: Tensor) -> Tensor:
        """Return ``matrix[b] x_b`` block by block, in the dtype of `x_TK`."""
        matrix_Bij = self.matrix_Bij.to(x_TK.dtype)
        x_TBj = split_runs(x_TK, BLOCK)
        if matrix_Bij.shape[0] == 1:
            return torch.matmul(x_TBj, matrix_Bij[0].T).flatten(-2)
        return torch.einsum("...bj,bij->...bi", x_TBj, matrix_Bij).flatten(-2)

    def apply_inverse_to_weight(self, weight_NK: Tensor) -> Tensor:
        """Return ``W_b T_b^-1``, solved in float64 and returned in the weight's dtype."""
        weight_NBj = split_runs(weight_NK.double(), BLOCK)
        matrix_Bij = self.matrix_Bij.double().expand(weight_NBj.shape[-2], BLOCK, BLOCK)
        # W' T = W  <=>  T^T W'^T = W^T, one solve per block.
        solved_BjN: Tensor = torch.linalg.solve(matrix_Bij.mT, weight_NBj.permute(1, 2, 0))
        return solved_BjN.permute(2, 0, 1).flatten(-2).to(weight_NK.dtype)


Step = Diagonal | Permutation | Hadamard | BlockMatrix
Transform = tuple[Step, ...]

IDENTITY: Transform = ()


def apply_transform(transform: Transform, x_TK: Tensor) -> Tensor:
    """Return ``T x`` row by row, in the dtype of `x_TK`."""
    for step in transform:
        x_TK = step.apply(x_TK)
    return x_TK


def transform_weight(transform: Transform, weight_NK: Tensor) -> Tensor:
    """Return ``W T^-1``: with the transformed activation it gives the original product.

    For T = S_n ... S_1 (steps left to right) the inverses act on W in the same order: ``W S_1^-1 ... S_n^-1``.
    """
    for step in transform:
        weight_NK = step.apply_inverse_to_weight(weight_NK)
    return weight_NK


def require_fitting(transform: Transform, num_inputs: int) -> None:
    """Raise where a step cannot act on inputs of `num_inputs` channels.

    Raises:
        ValueError: names the step, what it has and what it needs.
    """
    for index, step in enumerate(transform):
        if isinstance(step, Diagonal):
            has, fits = tuple(step.scale_K.shape), tuple(step.scale_K.shape) == (num_inputs,)
            needs = f"({num_inputs},)"
        elif isinstance(step, Permutation):
            has, fits = tuple(step.index_K.shape), tuple(step.index_K.shape) == (num_inputs,)
            needs = f"({num_inputs},)"
        elif isinstance(step, Hadamard):
            is_size = 2 <= step.size <= MAX_SIZE and step.size & (step.size - 1) == 0
            has, fits = (step.size,), is_size and num_inputs % step.size == 0
            needs = f"a power of two from 2 to {MAX_SIZE} that divides {num_inputs}"
        else:
            has = tuple(step.matrix_Bij.shape)
            fits = num_inputs % BLOCK == 0 and has in ((1, BLOCK, BLOCK), (num_inputs // BLOCK, BLOCK, BLOCK))
            needs = f"({num_inputs // BLOCK}, {BLOCK}, {BLOCK}) or (1, {BLOCK}, {BLOCK})"
        if not fits:
            raise ValueError(f"step {index} of the transform, {type(step).__name__}, has {has}; it needs {needs}")


def multiply_adds_per_element(transform: Transform) -> float:
    """Return the online cost of T per activation element: diagonal 1, permutation 0, Hadamard log2(size), block 32."""
    total = 0.0
    for step in transform:
        if isinstance(step, Diagonal):
            total += 1
        elif isinstance(step, Hadamard):
            total += math.log2(step.size)
        elif isinstance(step, BlockMatrix):
            total += BLOCK
    return total
