"""Move the one code of each activation block whose move lowers the block's output error most.

Nearest codes minimize the error of each element alone. What a layer's output sees of a block's error e is ``e^T G e`` with
``G = What_b^T What_b``, the 32 x 32 Gram matrix of the installed weight's columns of that block (summed over the layers that
read the input): static data, known before any token comes. Moving element i by d, to the next code up or down, changes it by

    d (2 (G e)_i + d G_ii)

The move with the lowest change is made where that is below zero; of equal ones the first, downward moves before upward ones.
Scales stay as they are, and a code never leaves the range of E2M1. A function of the token's own vector and of static data only.

Legend: M rows (all leading axes), K elements per row, B = K / 32 blocks, J = i = j = 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.formats import E2M1, MXFP4
from forge_kernels.ops._arithmetic import inverse_scale_of_bytes, split_runs
from forge_kernels.ops.encode import encode, widen
from forge_kernels.rules import Encoded, ScaleRule

_LARGEST_RANK = len(E2M1.magnitudes) - 1


def encode_with_swap(x_MK: Tensor, gram_Bij: Tensor, *, scale_rule: ScaleRule = "even") -> Encoded:
    """Encode `x_MK` with nearest codes, then move one code per block.

    Args:
        x_MK: (..., K) float32, bfloat16 or float16, finite; K divisible by 32.
        gram_Bij: (B, 32, 32) symmetric positive semidefinite, see `block_gram`.
        scale_rule: see `forge_kernels.encode`.

    Raises:
        ValueError: as `encode`, or a Gram matrix of another shape.
    """
    return encode_with_swap_reference(x_MK, gram_Bij, scale_rule=scale_rule)


def encode_with_swap_reference(x_MK: Tensor, gram_Bij: Tensor, *, scale_rule: ScaleRule = "even") -> Encoded:
    """Do what `encode_with_swap` says in plain torch operations."""
    encoded = encode(x_MK, scale_rule=scale_rule)
    x_MBJ = split_runs(widen(x_MK))
    gram_Bij = _checked(gram_Bij, x_MBJ)
    inverse_MB1 = inverse_scale_of_bytes(encoded.scales_NB.to(torch.int32).unsqueeze(-1))
    rank_MBJ = _ranks(split_runs(encoded.codes_NK))
    moved_MBJ = _moved(x_MBJ * inverse_MB1, rank_MBJ, gram_Bij)
    return Encoded(codes_NK=_codes(moved_MBJ).flatten(-2), scales_NB=encoded.scales_NB)


def block_gram(weights: tuple[Tensor, ...]) -> Tensor:
    """Return ``sum over weights of W_b^T W_b``, (B, 32, 32) float32, from (N, K) decoded weights that share an input.

    Products in float64, scaled so that the largest entry is 1: a comparison needs no more, and nothing can overflow.

    Raises:
        ValueError: no weight, or weights of different or indivisible K.
    """
    if not weights or any(weight.shape[-1] != weights[0].shape[-1] for weight in weights):
        raise ValueError(f"weights {[tuple(weight.shape) for weight in weights]} do not read one input")
    if weights[0].shape[-1] % MXFP4.block:
        raise ValueError(f"{weights[0].shape[-1]} inputs are no whole blocks of {MXFP4.block}")
    blocks = [split_runs(weight.double()) for weight in weights]
    gram_Bij = torch.stack([torch.einsum("nbi,nbj->bij", block, block) for block in blocks]).sum(dim=0)
    largest = gram_Bij.abs().amax()
    return (gram_Bij / torch.where(largest > 0, largest, torch.ones_like(largest))).to(torch.float32)


def _moved(y_MBJ: Tensor, rank_MBJ: Tensor, gram_Bij: Tensor) -> Tensor:
    """Return the ranks after the best move of each block; `y_MBJ` is in units of the scales."""
    values = torch.tensor(_VALUE_OF_RANK, dtype=torch.float32, device=y_MBJ.device)
    value_MBJ = values[(rank_MBJ + _LARGEST_RANK).long()]
    pull_MBJ = 2 * torch.einsum("...bj,bij->...bi", value_MBJ - y_MBJ, gram_Bij)
    curvature_BJ = gram_Bij.diagonal(dim1=-2, dim2=-1)
    changes, targets = [], []
    for step in (-1, 1):
        target_MBJ = (rank_MBJ + step).clamp(-_LARGEST_RANK, _LARGEST_RANK)
        move_MBJ = values[(target_MBJ + _LARGEST_RANK).long()] - value_MBJ
        changes.append(move_MBJ * (pull_MBJ + move_MBJ * curvature_BJ))
        targets.append(target_MBJ)
    change_MB2J = torch.cat(changes, dim=-1)
    best_MB1 = change_MB2J.argmin(dim=-1, keepdim=True)
    gains_MB1 = change_MB2J.gather(-1, best_MB1) < 0
    place_MB1 = best_MB1 % MXFP4.block
    target_MB1 = torch.cat(targets, dim=-1).gather(-1, best_MB1)
    return rank_MBJ.scatter(-1, place_MB1, torch.where(gains_MB1, target_MB1, rank_MBJ.gather(-1, place_MB1)))


def _ranks(codes: Tensor) -> Tensor:
    """Return the place of each code among the ascending values: -7..7, int32; codes of zero are 0."""
    magnitude = (codes & _LARGEST_RANK).to(torch.int32)
    return torch.where(codes > _LARGEST_RANK, -magnitude, magnitude)


def _codes(ranks: Tensor) -> Tensor:
    return torch.where(ranks < 0, _LARGEST_RANK + 1 - ranks, ranks).to(torch.uint8)


def _checked(gram_Bij: Tensor, x_MBJ: Tensor) -> Tensor:
    expected = (x_MBJ.shape[-2], MXFP4.block, MXFP4.block)
    if tuple(gram_Bij.shape) != expected:
        raise ValueError(
            f"Gram matrices are {tuple(gram_Bij.shape)}; an input of {x_MBJ.shape[-2]} blocks needs {expected}"
        )
    return gram_Bij.to(x_MBJ.device, torch.float32)


_VALUE_OF_RANK = tuple(-value for value in reversed(E2M1.magnitudes[1:])) + E2M1.magnitudes
