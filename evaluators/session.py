"""The Session API: the only door between a program and the subject it quantizes.

A program is one file with ``MECHANISMS`` and ``quantize(session)``. It sees weights, measures inputs, folds
function-preserving changes and installs quantized layers through the methods below, and nothing else. The evaluator
serves every call from its own process, keeps the log of them, and checks every install at once. This module holds the
contract; `evaluators.session_server` serves it, `evaluators.session_client` is what a program holds in the sandbox.

Legend: T tokens, N output features, K input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge_kernels.rules import ActivationRule, Encoded, LowRank
from forge_kernels.transforms import IDENTITY, Transform

Stream = Literal["quantized", "reference"]
"""Which activations a measurement sees: the model as quantized so far, or the full-precision model."""

LayerRole = Literal["q", "k", "v", "o", "gate", "up", "down"]
GroupRole = Literal["qkv", "o", "gate_up", "down"]
SiteKind = Literal["norm_diagonal", "value_output", "up_down_diagonal", "up_down_permutation", "residual_rotation"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer of a decoder block. `name` is ``blocks.<block>.<role>``; its weight is (num_outputs, num_inputs)."""

    name: str
    block: int
    role: LayerRole
    group: str
    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that read the same input, and so share one transform. `name` is ``blocks.<block>.<role>``."""

    name: str
    block: int
    role: GroupRole
    layers: tuple[Layer, ...]
    num_inputs: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place where a function-preserving change can be folded into full-precision weights at no run-time cost.

    kind           matrix given to `Session.fold`                        effect on the activation x of the site
    norm_diagonal        (K,) finite, non-zero                           x' = x * matrix, the norm before q/k/v or gate/up
    value_output         (num_kv_heads, D, D) invertible                 x'_h = matrix[h] x_h, between v and o
    up_down_diagonal     (K,) finite, non-zero                           x' = x * matrix, between up and down
    up_down_permutation  (K,) int64 permutation                          x'_j = x[matrix_j], between gate/up and down
    residual_rotation    (K, K) orthogonal                               x' = matrix x, the whole residual stream
    """

    name: str
    kind: SiteKind
    block: int | None
    shape: tuple[int, ...]


class Session(ABC):
    """What a program can do. Layers and groups are given as objects or by name.

    Every measurement is taken *now*, on the model with all folds and installs made so far; nothing is reused across an
    install upstream. The cost of a measurement is metered in subject-forward tokens, and the contract caps their sum.
    """

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    sites: tuple[Site, ...]
    device: torch.device

    @abstractmethod
    def weight(self, layer: Layer | str) -> Tensor:
        """Return the layer's full-precision weight, folds included: (N, K) float32."""

    @abstractmethod
    def inputs(self, group: Group | str, *, stream: Stream = "quantized", max_tokens: int | None = None) -> Tensor:
        """Return the group's input on calibration text, untransformed: (T, K) float32, rows in text order.

        Both streams return the same tokens in the same order. `max_tokens` keeps whole sequences up to that many tokens.
        """

    @abstractmethod
    def second_moment(
        self, group: Group | str, *, stream: Stream = "quantized", max_tokens: int | None = None
    ) -> Tensor:
        """Return ``X^T X / T`` of `inputs`: (K, K) float64, symmetric."""

    @abstractmethod
    def output_error(
        self,
        layer: Layer | str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> float:
        """Return ``|| X W^T - quantized layer(X) ||^2 / || X W^T ||^2`` on calibration inputs, without installing."""

    @abstractmethod
    def gate_loss(self) -> float:
        """Return the model's mean loss in nats per token on the gate split, as folded and installed so far."""

    @abstractmethod
    def fold(self, site: Site | str, matrix: Tensor) -> None:
        """Fold a function-preserving change into full-precision weights, in float64, by trusted code.

        Raises:
            ContractError: unknown site, wrong shape, not invertible (or not orthogonal), or a layer it touches is
                already installed. Logits are checked before and after.
        """

    @abstractmethod
    def install(
        self,
        layer: Layer | str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> None:
        """Replace the layer by its quantized form. `weight` encodes ``W T^-1``.

        Installing a layer again replaces the earlier install. Layers of one group must end with the same transform and
        the same activation rule.

        Raises:
            ContractError: codes, scales, transform or branch break the contract.
        """

    @abstractmethod
    def rng(self, layer: Layer | Group | str, purpose: str) -> torch.Generator:
        """Return a CPU generator keyed by the evaluation's seed, the layer and the purpose, so that draws never shift."""

    @abstractmethod
    def log(self, message: str) -> None:
        """Append a line to the evaluation's log (capped; shown as the program's own words, never as evidence)."""
