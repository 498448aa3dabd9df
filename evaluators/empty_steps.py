"""What of an install changes nothing: steps that are the identity, and branches that add nothing.

A permutation in order, a diagonal of ones or a branch of zeros costs a program one line and computes nothing; evidence that
counted it would call a change made that never was. Each rule drops what provably leaves the layer's function alone, and
nothing that is merely small: how much a change is worth is for the score to say.

- A permutation in order, a diagonal of ones, identity blocks; two neighbours that undo each other.
- A last permutation that keeps blocks together. Nearest codes and scales do not depend on where in the input a block lies, or
  on the order inside it, so moving the weight's columns back gives the same function.
- A diagonal that is one power of two on each block, where no later step mixes blocks: the block's scale absorbs it. Of a last
  diagonal the signs do not count either: nearest codes of opposite numbers are opposite.

Legend: N output features, K input features, B = K / 32 blocks, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forge_kernels.rules import ActivationRule, LowRank
from forge_kernels.transforms import BLOCK, BlockMatrix, Diagonal, Hadamard, Permutation, Step, Transform


@dataclass(frozen=True, kw_only=True)
class Essence:
    """A transform without its empty steps.

    steps: those that are left.
    moves: what the decoded weight goes through for it, in order: int64 the order of its columns, float32 their factors.
    """

    steps: Transform
    moves: tuple[Tensor, ...] = ()

    def weight(self, decoded_NK: Tensor) -> Tensor:
        """Return the decoded weight that gives the same layer with `steps` alone."""
        for move_K in self.moves:
            decoded_NK = decoded_NK * move_K if move_K.is_floating_point() else decoded_NK[:, move_K]
        return decoded_NK


def essence(transform: Transform, activation: ActivationRule) -> Essence:
    """Return what of a transform acts, given how its output is encoded."""
    moves: list[Tensor] = []
    steps = _without_identities(transform)
    while (found := _empty_step(steps, activation)) is not None:
        step = steps[found]
        if isinstance(step, Permutation):
            moves.append(step.index_K.detach().cpu().argsort())
        elif isinstance(step, Diagonal):
            moves.append(step.scale_K.detach().cpu().to(torch.float32))
        steps = _without_identities((*steps[:found], *steps[found + 1 :]))
    return Essence(steps=steps, moves=tuple(moves))


def _empty_step(steps: Transform, activation: ActivationRule) -> int | None:
    """Return where a step stands that the encoding makes empty."""
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        # The block swap weighs a block's codes against each other, so there neither order nor signs are taken for empty.
        is_seen_by_nearest_only = index == len(steps) - 1 and activation.code_rule == "nearest"
        if isinstance(step, Diagonal) and _is_absorbed(step.scale_K, with_signs=is_seen_by_nearest_only):
            return index
        if is_seen_by_nearest_only and isinstance(step, Permutation) and _keeps_blocks(step.index_K.cpu()):
            return index
        if _mixes_blocks(step):
            return None
    return None


def branch_rank(low_rank: LowRank | None) -> int:
    """Return the rank of the matrix that a branch adds, 0 for none and for zeros, whatever the rank it is stored at."""
    if low_rank is None or low_rank.rank == 0:
        return 0
    a_KR = low_rank.a_RK.detach().cpu().to(torch.float64).T
    b_NR = low_rank.b_NR.detach().cpu().to(torch.float64)
    # b a = Q_b (R_b R_a^T) Q_a^T: the rank of a small matrix is that of the large one.
    core = torch.linalg.qr(b_NR).R @ torch.linalg.qr(a_KR).R.T
    return int(torch.linalg.matrix_rank(core))


def _without_identities(steps: Transform) -> Transform:
    """Drop identities and neighbours that undo each other, until nothing more can be dropped."""
    kept: list[Step] = []
    for step in steps:
        if _is_identity(step):
            continue
        if kept and _is_inverse(kept[-1], step):
            kept.pop()
        else:
            kept.append(step)
    return tuple(kept)


def _is_identity(step: Step) -> bool:
    if isinstance(step, Permutation):
        index_K = step.index_K.cpu()
        return bool(torch.equal(index_K, torch.arange(len(index_K), dtype=index_K.dtype)))
    if isinstance(step, Diagonal):
        return bool((step.scale_K == 1).all())
    if isinstance(step, BlockMatrix):
        matrix_Bij = step.matrix_Bij.cpu()
        return bool((matrix_Bij == torch.eye(BLOCK, dtype=matrix_Bij.dtype)).all())
    return False


def _is_inverse(first: Step, second: Step) -> bool:
    if isinstance(first, Hadamard) and isinstance(second, Hadamard):
        return first.size == second.size
    if isinstance(first, Permutation) and isinstance(second, Permutation):
        return _is_identity(Permutation(index_K=first.index_K[second.index_K]))
    if isinstance(first, Diagonal) and isinstance(second, Diagonal):
        return bool((first.scale_K.double() * second.scale_K.double() == 1).all())
    if isinstance(first, BlockMatrix) and isinstance(second, BlockMatrix):
        return _is_identity(BlockMatrix(matrix_Bij=second.matrix_Bij.double() @ first.matrix_Bij.double()))
    return False


def _keeps_blocks(index_K: Tensor) -> bool:
    if len(index_K) % BLOCK:
        return False
    sources = (index_K // BLOCK).reshape(-1, BLOCK)
    return bool((sources == sources[:, :1]).all())


def _is_absorbed(scale_K: Tensor, *, with_signs: bool) -> bool:
    """Whether a diagonal is one power of two on each block, positive or `with_signs` of either sign within it."""
    scale_K = scale_K.detach().cpu().to(torch.float32)
    if with_signs:
        scale_K = scale_K.abs()
    if len(scale_K) % BLOCK or not bool((scale_K > 0).all()):
        return False
    blocks = scale_K.reshape(-1, BLOCK)
    mantissa, _ = torch.frexp(blocks)
    return bool((mantissa == 0.5).all() and (blocks == blocks[:, :1]).all())


def _mixes_blocks(step: Step) -> bool:
    return isinstance(step, Permutation) or (isinstance(step, Hadamard) and step.size > BLOCK)
