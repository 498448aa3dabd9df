"""One installed layer as checked data, with its digest and its cost in bits.

An `Install` is what remains of a program once it has run: everything after it (scoring, error maps, export) is computed
from installs alone. The digests are taken over what is *decoded*, and over what of a transform and a branch acts
(`evaluators.empty_steps`), so that two encodings of the same numbers are the same install, and so that a change that
alters nothing is seen to alter nothing.

Legend: N output features, K input features, B = K / 32 blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from evaluators.empty_steps import branch_rank, essence
from forge_kernels.ops.decode import decode
from forge_kernels.rules import ActivationRule, Encoded, LowRank
from forge_kernels.transforms import BlockMatrix, Diagonal, Hadamard, Permutation, Step, Transform

CODE_BITS = 4
SCALE_BITS = 8
BLOCK_LENGTH = 32
NARROW_INDEX_LIMIT = 2**15
"""Permutations of at most this many channels are stored, and counted, with 16 bits per index; longer ones with 32."""


@dataclass(frozen=True, kw_only=True)
class Install:
    """A quantized layer: ``y = decode(activation(T x)) decode(weight)^T + (x a^T) b^T``, plus the layer's own bias."""

    weight: Encoded
    transform: Transform
    activation: ActivationRule
    low_rank: LowRank | None

    @property
    def rank(self) -> int:
        """Rank of the low-rank branch, 0 without one."""
        return 0 if self.low_rank is None else self.low_rank.rank


def step_tensor(step: Step) -> Tensor | None:
    """Return the tensor that a step carries, None for a Hadamard step."""
    if isinstance(step, Diagonal):
        return step.scale_K
    if isinstance(step, Permutation):
        return step.index_K
    if isinstance(step, BlockMatrix):
        return step.matrix_Bij
    return None


def step_kind(step: Step) -> str:
    """Return ``diagonal``, ``permutation``, ``hadamard`` or ``block_matrix``."""
    if isinstance(step, Diagonal):
        return "diagonal"
    if isinstance(step, Permutation):
        return "permutation"
    if isinstance(step, Hadamard):
        return "hadamard"
    return "block_matrix"


def step_names(transform: Transform) -> list[str]:
    """Return the kinds of the steps, a Hadamard with its size: ``["diagonal", "hadamard:32"]``."""
    return [f"hadamard:{step.size}" if isinstance(step, Hadamard) else step_kind(step) for step in transform]


def coordinates_digest(transform: Transform, activation: ActivationRule) -> str:
    """Return the sha256 of what the layers of a group must share: the transform's values and the activation rule."""
    digest = hashlib.sha256()
    digest.update(f"{activation.scale_rule}|{activation.code_rule}".encode())
    for step, name in zip(transform, step_names(transform), strict=True):
        tensor = step_tensor(step)
        digest.update(f"|{name}".encode())
        if isinstance(step, Permutation):
            digest.update(_bytes(step.index_K.to(torch.int64)))
        elif tensor is not None:
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor.to(torch.float32)))
    return digest.hexdigest()


def install_digest(install: Install) -> str:
    """Return the sha256 of the layer as it computes: decoded weight, transform, activation rule, branch; no empty steps."""
    acting = essence(install.transform, install.activation)
    digest = hashlib.sha256(coordinates_digest(acting.steps, install.activation).encode())
    digest.update(f"{tuple(install.weight.codes_NK.shape)}".encode())
    digest.update(_bytes(acting.weight(decode(install.weight).cpu())))
    if install.low_rank is not None and branch_rank(install.low_rank) > 0:
        digest.update(f"|rank {install.rank}".encode())
        digest.update(_bytes(install.low_rank.a_RK.to(torch.float32)))
        digest.update(_bytes(install.low_rank.b_NR.to(torch.float32)))
    return digest.hexdigest()


def transform_bits(transform: Transform) -> int:
    """Return the bits that must be stored for a transform: each tensor in its dtype, indices in 16 or 32 bits."""
    total = 0
    for step in transform:
        tensor = step_tensor(step)
        if tensor is None:
            continue
        if isinstance(step, Permutation):
            total += tensor.numel() * (16 if tensor.numel() <= NARROW_INDEX_LIMIT else 32)
        else:
            total += tensor.numel() * tensor.element_size() * 8
    return total


def weight_bits(install: Install) -> int:
    """Return the bits of the codes and scales of a layer."""
    return CODE_BITS * install.weight.codes_NK.numel() + SCALE_BITS * install.weight.scales_NB.numel()


def branch_bits(install: Install) -> int:
    """Return the bits of a layer's low-rank branch."""
    if install.low_rank is None:
        return 0
    return sum(t.numel() * t.element_size() * 8 for t in (install.low_rank.a_RK, install.low_rank.b_NR))


def _bytes(tensor: Tensor) -> bytes:
    """Little-endian bytes of a tensor in row order; minus zero counts as zero."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        tensor = tensor + 0.0
    data: bytes = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return data
