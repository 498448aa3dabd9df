"""The layer that is scored: computed from decoded artifact data and nothing else.

    y = A(T x) What^T + bias + (x a^T) b^T,    A = encode and decode per token,    What = decode(codes, scales)

The layers of a group read one input, so they share one `GroupActivation`, which transforms and encodes it once.

Legend: N output features, K input features, R rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from evaluators.installs import Install, coordinates_digest
from forge_kernels.ops.block_swap import block_gram, fake_quantize_with_swap
from forge_kernels.ops.decode import decode
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.rules import ActivationRule
from forge_kernels.transforms import BlockMatrix, Diagonal, Permutation, Step, Transform, apply_transform


class _Kept(threading.local):
    """The last input of one thread and what it was encoded to."""

    source: weakref.ref[Tensor] | None = None
    version: int = -1
    encoded: Tensor | None = None
    num_reads: int = 0


class GroupActivation:
    """Transforms and encodes a group's input once for all its readers.

    The readers' weights matter to a code rule that looks at their outputs. The result is kept while the same tensor
    object, unchanged, is asked for again, and dropped when every reader has had it, so that no activation outlives its
    block. Each thread keeps its own: batches may be scored side by side.
    """

    def __init__(self, transform: Transform, activation: ActivationRule, weights: tuple[Tensor, ...]) -> None:
        self.transform = transform
        self.activation = activation
        self.num_readers = len(weights)
        self.gram_Bij = block_gram(weights) if activation.code_rule == "block_swap" else None
        self._kept = _Kept()

    def quantize(self, transformed: Tensor) -> Tensor:
        """Return ``decode(encode(x))`` of a transformed input (..., K), float32."""
        if self.gram_Bij is None:
            return fake_quantize(transformed, scale_rule=self.activation.scale_rule)
        return fake_quantize_with_swap(transformed, self.gram_Bij, scale_rule=self.activation.scale_rule)

    def encode(self, x: Tensor) -> Tensor:
        """Return ``decode(encode(T x))`` in float32; x is (..., K)."""
        kept = self._kept
        encoded = kept.encoded
        is_known = kept.source is not None and kept.source() is x and kept.version == x._version
        if encoded is None or not is_known:
            encoded = self.quantize(apply_transform(self.transform, x.to(torch.float32)))
            kept.encoded, kept.source, kept.version, kept.num_reads = encoded, weakref.ref(x), x._version, 0
        kept.num_reads += 1
        if kept.num_reads >= self.num_readers:
            self.clear()
        return encoded

    def clear(self) -> None:
        """Forget what this thread keeps."""
        self._kept.encoded = self._kept.source = None
        self._kept.num_reads = 0


class QuantizedLinear(nn.Module):
    """A quantized layer in float32 on the device of its bias or of `device`.

    Attributes:
        weight_NK: (N, K) float32, decoded from codes and scales; it stands for ``W T^-1``.
        a_RK, b_NR: the low-rank branch in float32 (its values are bfloat16), or None.
        coordinates: digest of transform and activation rule; layers that agree on it may share a `GroupActivation`.
    """

    weight_NK: Tensor
    a_RK: Tensor | None
    b_NR: Tensor | None

    def __init__(self, install: Install, bias_N: Tensor | None, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.in_features = int(install.weight.codes_NK.shape[1])
        self.out_features = int(install.weight.codes_NK.shape[0])
        self.coordinates = coordinates_digest(install.transform, install.activation)
        self.register_buffer("weight_NK", decode(install.weight).to(device), persistent=False)
        self.group_activation = GroupActivation(
            move_transform(install.transform, device), install.activation, (self.weight_NK,)
        )
        branch = install.low_rank
        a_RK = None if branch is None else branch.a_RK.to(device, torch.float32)
        b_NR = None if branch is None else branch.b_NR.to(device, torch.float32)
        self.register_buffer("a_RK", a_RK, persistent=False)
        self.register_buffer("b_NR", b_NR, persistent=False)
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach().to(device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x (..., K), in the dtype of x."""
        encoded = self.group_activation.encode(x)
        bias = None if self.bias is None else self.bias.to(torch.float32)
        y = functional.linear(encoded, self.weight_NK, bias)
        return self.add_branch(x, y).to(x.dtype)

    def add_branch(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``y + (x a^T) b^T``, or y itself when the layer has no branch."""
        if self.a_RK is None or self.b_NR is None:
            return y
        return y + functional.linear(functional.linear(x.to(torch.float32), self.a_RK), self.b_NR)


def share_activations(modules: Iterable[QuantizedLinear]) -> None:
    """Let layers of one group that agree on transform and activation rule transform and encode their input once."""
    readers: dict[str, list[QuantizedLinear]] = {}
    for module in modules:
        readers.setdefault(module.coordinates, []).append(module)
    for together in readers.values():
        own = together[0].group_activation
        weights = tuple(module.weight_NK for module in together)
        shared = GroupActivation(own.transform, own.activation, weights)
        for module in together:
            module.group_activation = shared


def move_transform(transform: Transform, device: torch.device | str) -> Transform:
    """Return the transform with its tensors on `device`, floating-point ones in float32 (exact for bfloat16)."""
    moved: list[Step] = []
    for step in transform:
        if isinstance(step, Diagonal):
            moved.append(Diagonal(scale_K=step.scale_K.to(device, torch.float32)))
        elif isinstance(step, Permutation):
            moved.append(Permutation(index_K=step.index_K.to(device)))
        elif isinstance(step, BlockMatrix):
            moved.append(BlockMatrix(matrix_Bij=step.matrix_Bij.to(device, torch.float32)))
        else:
            moved.append(step)
    return tuple(moved)
