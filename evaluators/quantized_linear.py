"""The layer that is scored: computed from decoded artifact data and nothing else.

    y = A(T x) What^T + bias + (x a^T) b^T,    A = encode and decode per token,    What = decode(codes, scales)

The layers of a group read one input, so they share one `GroupActivation`, which transforms and encodes it once. How the product
is computed, its route, is chosen by the device (`forge_kernels.ops.routes`); in float32 on a CPU, which is the reference.

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
from forge_kernels.ops.block_swap import block_gram
from forge_kernels.ops.encode_activation import EncodedActivation, encode_activation
from forge_kernels.ops.mxfp4_linear import MXFP4Weight, multiply, prepare_weight
from forge_kernels.ops.routes import Route
from forge_kernels.rules import ActivationRule, LowRank
from forge_kernels.transforms import BlockMatrix, Diagonal, Permutation, Step, Transform


class _Kept(threading.local):
    """The last input of one thread and what it was encoded to."""

    source: weakref.ref[Tensor] | None = None
    version: int = -1
    encoded: EncodedActivation | None = None
    num_reads: int = 0


class GroupActivation:
    """Transforms and encodes a group's input once for all its readers.

    The readers' weights matter to a code rule that looks at their outputs. The result is kept while the same tensor
    object, unchanged, is asked for again, and dropped when every reader has had it, so that no activation outlives its
    block. Each thread keeps its own: batches may be scored side by side.
    """

    def __init__(
        self, transform: Transform, activation: ActivationRule, weights: tuple[MXFP4Weight, ...], route: Route
    ) -> None:
        self.transform = transform
        self.activation = activation
        self.route = route
        self.num_readers = len(weights)
        self.gram_Bij = None
        if activation.code_rule == "block_swap":
            self.gram_Bij = block_gram(tuple(weight.decoded() for weight in weights))
        self._kept = _Kept()

    def quantize(self, transformed_TK: Tensor) -> Tensor:
        """Return ``decode(encode(x))`` of a transformed input, (T, K) float32."""
        encoded = encode_activation(transformed_TK, "float32", activation=self.activation, gram_Bij=self.gram_Bij)
        assert encoded.values_MK is not None
        return encoded.values_MK

    def encode(self, x: Tensor) -> EncodedActivation:
        """Return the encoded rows of ``T x``; x is (..., K)."""
        kept = self._kept
        encoded = kept.encoded
        is_known = kept.source is not None and kept.source() is x and kept.version == x._version
        if encoded is None or not is_known:
            encoded = encode_activation(
                x.reshape(-1, x.shape[-1]),
                self.route,
                transform=self.transform,
                activation=self.activation,
                gram_Bij=self.gram_Bij,
            )
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
    """A quantized layer on the device of its bias or of `device`.

    Attributes:
        weight: codes and scales, laid out for the layer's route; they stand for ``W T^-1``.
        branch: the low-rank branch (bfloat16), or None.
        coordinates: digest of transform and activation rule; layers that agree on it may share a `GroupActivation`.
    """

    def __init__(self, install: Install, bias_N: Tensor | None, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.in_features = int(install.weight.codes_NK.shape[1])
        self.out_features = int(install.weight.codes_NK.shape[0])
        self.coordinates = coordinates_digest(install.transform, install.activation)
        self.weight = prepare_weight(install.weight, device=device)
        self.group_activation = GroupActivation(
            move_transform(install.transform, device), install.activation, (self.weight,), self.route
        )
        branch = install.low_rank
        self.branch = None if branch is None else LowRank(a_RK=branch.a_RK.to(device), b_NR=branch.b_NR.to(device))
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach().to(device), requires_grad=False)

    @property
    def route(self) -> Route:
        """How this layer's product is computed."""
        return self.weight.route

    @property
    def weight_NK(self) -> Tensor:
        """The decoded weight, (N, K) float32."""
        return self.weight.decoded()

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x (..., K), in the dtype of x."""
        y_MN = multiply(
            self.group_activation.encode(x),
            self.weight,
            x_MK=x.reshape(-1, x.shape[-1]),
            bias_N=self.bias,
            low_rank=self.branch,
            dtype=x.dtype,
        )
        return y_MN.reshape(*x.shape[:-1], self.out_features)

    def add_branch(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``y + (x a^T) b^T``, or y itself when the layer has no branch."""
        if self.branch is None:
            return y
        a_RK, b_NR = self.branch.a_RK.to(torch.float32), self.branch.b_NR.to(torch.float32)
        return y + functional.linear(functional.linear(x.to(torch.float32), a_RK), b_NR)


def share_activations(modules: Iterable[QuantizedLinear]) -> None:
    """Let layers of one group that agree on transform, activation rule and route transform and encode their input once."""
    readers: dict[tuple[str, Route], list[QuantizedLinear]] = {}
    for module in modules:
        readers.setdefault((module.coordinates, module.route), []).append(module)
    for (_, route), together in readers.items():
        own = together[0].group_activation
        shared = GroupActivation(own.transform, own.activation, tuple(m.weight for m in together), route)
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
