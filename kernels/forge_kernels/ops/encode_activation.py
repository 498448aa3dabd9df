"""An activation on its way into a product: transformed, encoded, and laid out as one route wants it.

What the kernels do in one pass is the end of a transform: a diagonal, a Hadamard transform or one 32 x 32 matrix per block, each
optional and in this order. Steps before that are applied in float32 first, one by one.

Legend: M rows, K elements per row, B = K / 32 blocks, i and j channels of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forge_kernels.formats import E2M1, E8M0
from forge_kernels.ops._arithmetic import scale_of_bytes, split_runs
from forge_kernels.ops.block_matrix_kernel import encode_block_matrix_triton
from forge_kernels.ops.block_swap import fake_quantize_with_swap
from forge_kernels.ops.block_swap_kernel import encode_with_swap_triton
from forge_kernels.ops.encode import require_known_rule
from forge_kernels.ops.encode_kernel import encode_packed_triton, fake_quantize_triton
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.ops.lift import Lifted
from forge_kernels.ops.lift_kernel import encode_lifted_triton, lift_packed_triton
from forge_kernels.ops.pack import unpack
from forge_kernels.ops.routes import Route, require_known_route
from forge_kernels.rules import CODE_RULES, ActivationRule
from forge_kernels.transforms import BlockMatrix, Diagonal, Hadamard, Step, Transform, apply_transform, require_fitting

NEAREST_EVEN = ActivationRule()

_VALUES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""What the routes that multiply decoded values take them as."""


@dataclass(frozen=True, kw_only=True)
class EncodedActivation:
    """Rows of an activation as MXFP4, as one route wants them.

    values_MK: decoded, float32 or bfloat16 (routes float32 and bf16). packed: codes (M, K / 2) and scale bytes (M, K / 32), uint8
    (route dot_scaled). lifted: FP8 (route fp8_lift).
    """

    route: Route
    values_MK: Tensor | None = None
    packed: tuple[Tensor, Tensor] | None = None
    lifted: Lifted | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """M and K."""
        if self.lifted is not None:
            return len(self.lifted.values_MK), self.lifted.values_MK.shape[1]
        if self.packed is not None:
            return len(self.packed[0]), 2 * self.packed[0].shape[1]
        assert self.values_MK is not None
        return len(self.values_MK), self.values_MK.shape[1]


@dataclass(frozen=True, kw_only=True)
class FusedSteps:
    """The end of a transform that a kernel does itself; `before` comes first."""

    before: Transform
    diagonal_K: Tensor | None = None
    hadamard_size: int = 1
    matrix_Bij: Tensor | None = None


def fused_steps(transform: Transform, *, longest_hadamard: int = 512, takes_matrices: bool = True) -> FusedSteps:
    """Split a transform into what is applied beforehand and what a kernel does."""
    steps: list[Step] = list(transform)
    size, matrix_Bij, diagonal_K = 1, None, None
    if steps and isinstance(steps[-1], Hadamard) and steps[-1].size <= longest_hadamard:
        size = steps.pop().size  # type: ignore[union-attr]
    elif steps and isinstance(steps[-1], BlockMatrix) and takes_matrices:
        matrix_Bij = steps.pop().matrix_Bij  # type: ignore[union-attr]
    if steps and isinstance(steps[-1], Diagonal):
        diagonal_K = steps.pop().scale_K.to(torch.float32).contiguous()  # type: ignore[union-attr]
    return FusedSteps(before=tuple(steps), diagonal_K=diagonal_K, hadamard_size=size, matrix_Bij=matrix_Bij)


def checked_rule(activation: ActivationRule, gram_Bij: Tensor | None, num_inputs: int) -> Tensor | None:
    """Return the Gram matrices if the code rule reads them.

    Raises:
        ValueError: an unknown rule, or Gram matrices that are missing or of another shape.
    """
    require_known_rule(activation.scale_rule)
    if activation.code_rule not in CODE_RULES:
        raise ValueError(f"unknown code rule {activation.code_rule!r}; known: {', '.join(CODE_RULES)}")
    if activation.code_rule == "nearest":
        return None
    expected = (num_inputs // 32, 32, 32)
    if gram_Bij is None:
        raise ValueError("the code rule block_swap needs the Gram matrices of the installed weights, and got none")
    if tuple(gram_Bij.shape) != expected:
        raise ValueError(
            f"Gram matrices are {tuple(gram_Bij.shape)}; an input of {num_inputs} channels needs {expected}"
        )
    return gram_Bij


def encode_activation(
    x_MK: Tensor,
    route: Route,
    *,
    transform: Transform = (),
    activation: ActivationRule = NEAREST_EVEN,
    gram_Bij: Tensor | None = None,
) -> EncodedActivation:
    """Return ``encode(T x)`` of a 2-D activation: by kernels, but for the routes that a CPU takes without them.

    Rows with a NaN or an infinity give NaN in every product; nothing waits for the device.

    Args:
        x_MK: float32, bfloat16 or float16; K divisible by 32.
        route: what it is laid out for.
        transform: T, applied left to right.
        activation: scale rule and code rule.
        gram_Bij: for the code rule block_swap, see `forge_kernels.block_gram`.

    Raises:
        ValueError: no rows of a known dtype, an unknown route or rule, a transform or Gram matrices that do not fit, or a code
            rule that needs Gram matrices and got none.
    """
    require_known_route(route)
    if x_MK.dim() != 2 or x_MK.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"activation is {x_MK.dtype} {tuple(x_MK.shape)}; give rows of float32, bfloat16 or float16 (M, K)"
        )
    if x_MK.shape[1] == 0 or x_MK.shape[1] % 32:
        raise ValueError(f"shape {tuple(x_MK.shape)} has no whole blocks; the last axis must be a multiple of 32")
    require_fitting(transform, x_MK.shape[1])
    gram_Bij = checked_rule(activation, gram_Bij, x_MK.shape[1])
    x_MK = x_MK.detach()
    if not x_MK.is_cuda and route in _VALUES:
        transformed_MK = apply_transform(transform, x_MK.to(torch.float32))
        values_MK = (
            fake_quantize(transformed_MK, scale_rule=activation.scale_rule)
            if gram_Bij is None
            else fake_quantize_with_swap(transformed_MK, gram_Bij, scale_rule=activation.scale_rule)
        )
        return EncodedActivation(route=route, values_MK=values_MK.to(_VALUES[route]))
    if gram_Bij is not None:
        gram_Bij = gram_Bij.to(x_MK.device, torch.float32).contiguous()
    takes_all = gram_Bij is None
    fused = fused_steps(transform, longest_hadamard=512 if takes_all else 32, takes_matrices=takes_all)
    x_MK = apply_transform(fused.before, x_MK.to(torch.float32)) if fused.before else x_MK
    if x_MK.stride(-1) != 1:
        x_MK = x_MK.contiguous()
    if gram_Bij is None and fused.matrix_Bij is None and route != "dot_scaled":
        return _in_one_pass(x_MK, route, activation, fused)
    if gram_Bij is not None:
        packed = encode_with_swap_triton(
            x_MK,
            gram_Bij,
            activation.scale_rule,
            diagonal_K=fused.diagonal_K,
            hadamard_size=fused.hadamard_size,
        )
    elif fused.matrix_Bij is not None:
        packed = encode_block_matrix_triton(
            x_MK, fused.matrix_Bij.contiguous(), activation.scale_rule, diagonal_K=fused.diagonal_K
        )
    else:
        packed = encode_packed_triton(
            x_MK, activation.scale_rule, diagonal_K=fused.diagonal_K, hadamard_size=fused.hadamard_size
        )
    if route == "fp8_lift":
        return EncodedActivation(route=route, lifted=lift_packed_triton(*packed))
    if route == "dot_scaled":
        return EncodedActivation(route=route, packed=packed)
    return EncodedActivation(route=route, values_MK=_values_of_packed(*packed).to(_VALUES[route]))


def _in_one_pass(x_MK: Tensor, route: Route, activation: ActivationRule, fused: FusedSteps) -> EncodedActivation:
    diagonal_K, size = fused.diagonal_K, fused.hadamard_size
    if route == "fp8_lift":
        lifted = encode_lifted_triton(x_MK, activation.scale_rule, diagonal_K=diagonal_K, hadamard_size=size)
        return EncodedActivation(route=route, lifted=lifted)
    values_MK = fake_quantize_triton(
        x_MK, activation.scale_rule, diagonal_K=diagonal_K, hadamard_size=size, dtype=_VALUES[route]
    )
    return EncodedActivation(route=route, values_MK=values_MK)


def _values_of_packed(packed_MH: Tensor, scales_MB: Tensor) -> Tensor:
    """Return float32 values; NaN under scale byte 255. Nothing is checked, so that nothing waits for the device."""
    codebook = torch.tensor(E2M1.codebook, dtype=torch.float32, device=packed_MH.device)
    values_MBJ = split_runs(codebook[unpack(packed_MH).to(torch.int32)])
    scale_MB = scale_of_bytes(scales_MB.to(torch.int32)).masked_fill_(scales_MB == E8M0.max_byte + 1, torch.nan)
    return values_MBJ.mul_(scale_MB.unsqueeze(-1)).flatten(-2)
