"""What a program hands to `Session.install`, as data: encoded weight, activation rule, low-rank branch.

Legend: N output features, K input features, B = K / 32 blocks, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

ScaleRule = Literal["even", "floor", "rceil", "search"]
SCALE_RULES: tuple[ScaleRule, ...] = ("even", "floor", "rceil", "search")
CodeRule = Literal["nearest", "block_swap"]
CODE_RULES: tuple[CodeRule, ...] = ("nearest", "block_swap")
CODE_RULE_MULTIPLY_ADDS: dict[CodeRule, float] = {"nearest": 0.0, "block_swap": 32.0}
"""Online cost of a code rule per activation element."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tensor in MXFP4: one E2M1 code per element and one E8M0 byte per block of 32 along the last axis.

    codes_NK: (N, K) uint8 in 0..15, sign in bit 3, never 8 (minus zero).
    scales_NB: (N, K / 32) uint8; byte b stands for 2 ** (b - 127), 255 (NaN) is never written.
    """

    codes_NK: Tensor
    scales_NB: Tensor


@dataclass(frozen=True, kw_only=True)
class ActivationRule:
    """How a layer encodes its transformed input, per token and at run time.

    A function of that token's vector and of the installed weights alone.

    scale_rule: see `forge_kernels.encode`.
    code_rule: ``nearest``, or ``block_swap``: of each block of 32 the one code moves to its neighbour that lowers the block's
        error in the outputs of the group's installed layers most (`forge_kernels.encode_with_swap`). Its matrices follow from
        the installed codes and scales, so nothing more is stored; it costs 32 multiply-adds per element, and a model that
        uses it is of class online.
    """

    scale_rule: ScaleRule = "even"
    code_rule: CodeRule = "nearest"


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A correction added to the layer's output: ``y += (x a_RK^T) b_NR^T`` with x the *untransformed* input.

    a_RK: (R, K) bfloat16; b_NR: (N, R) bfloat16.
    """

    a_RK: Tensor
    b_NR: Tensor

    @property
    def rank(self) -> int:
        """R, the number of rows of `a_RK`."""
        return int(self.a_RK.shape[0])
