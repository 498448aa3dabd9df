"""The product of a quantized layer: ``y = A(T x) What^T + bias + (x a^T) b^T``, from the activation as the model has it.

`prepare_weight` lays a weight out once for a route; `mxfp4_linear` encodes the activation and multiplies; `encode_activation` and
`multiply` are its two halves, for layers that share an input. Relative errors to float64, both operands taken as decoded:

    float32 accumulation, float32 output    at most 3e-4 on every route (measured 1.3e-4 for fp8_lift, 1e-7 for float32)
    fast accumulation, float32 output       about 2e-3 at K = 8192 (fp8_lift only: Hopper's own FP8 sums)
    bfloat16 output                         1.7e-3, the rounding of the output

The lift keeps every row of an activation exact whose blocks' exponents differ by at most 14; of other rows it moves values by
less than 2^-17 of the row's largest (`forge_kernels.ops.lift` has the bound). A weight with larger differences in some row is
lifted to E5M2, which holds 28; one beyond that takes the route bf16. `MXFP4Weight.route` says which was taken. Sums are
multiplied by the scale of their row and of their output one after the other, in float32: where one of the two lies more than some
90 octaves from 1, the result may overflow or vanish although the product of all three would not.

Legend: M rows (all leading axes), N output features, K input features, R rank of the branch, H = K / 2 bytes, B = K / 32 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from forge_kernels.ops._arithmetic import split_runs
from forge_kernels.ops._device import is_interpreted, widen
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode_activation import (
    NEAREST_EVEN,
    EncodedActivation,
    checked_rule,
    encode_activation,
    fused_steps,
)
from forge_kernels.ops.few_rows_kernel import EXACT_OCTAVES, few_rows_triton
from forge_kernels.ops.lift import Lifted, LiftElement
from forge_kernels.ops.lift_kernel import MAX_COLUMNS, encode_lifted_triton, lift_packed_triton
from forge_kernels.ops.lifted_product_kernel import lifted_product_triton
from forge_kernels.ops.one_row_kernel import MOST_BLOCKS, one_row_triton
from forge_kernels.ops.pack import pack, unpack
from forge_kernels.ops.routes import Route, choose_route, most_packed_rows, require_known_route
from forge_kernels.ops.scaled_product_kernel import scaled_product_triton
from forge_kernels.rules import ActivationRule, Encoded, LowRank
from forge_kernels.transforms import Transform, require_fitting

Accumulation = Literal["float32", "fast"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""The library's FP8 products want this many outputs, or a multiple."""


@dataclass(frozen=True, kw_only=True)
class MXFP4Weight:
    """A weight laid out for one route.

    packed_NH, scales_NB: uint8, the weight itself at 4.25 bits per element. lifted: FP8, padded to a multiple of 16 outputs
    (route fp8_lift, unless only few rows are ever multiplied). values_NK: decoded (routes bf16 and float32). references_N:
    uint8, the largest scale byte of each row; counters: int32 zeros that a product of few rows borrows, so that products with
    one weight must follow one another.
    """

    route: Route
    num_outputs: int
    num_inputs: int
    packed_NH: Tensor
    scales_NB: Tensor
    lifted: Lifted | None = None
    values_NK: Tensor | None = None
    references_N: Tensor | None = None
    counters: Tensor | None = None

    def decoded(self) -> Tensor:
        """Return the weight's values, (N, K) float32; decoded for the occasion where the route does not keep them so."""
        if self.values_NK is not None and self.values_NK.dtype == torch.float32:
            return self.values_NK
        return decode(Encoded(codes_NK=unpack(self.packed_NH), scales_NB=self.scales_NB))


def prepare_weight(
    weight: Encoded,
    *,
    device: torch.device | str | None = None,
    route: Route | None = None,
    few_rows_only: bool = False,
) -> MXFP4Weight:
    """Lay an encoded weight out for `route`, by default the one that suits the device.

    Args:
        weight: codes (N, K) and scale bytes.
        device: where it goes; None leaves it where its codes are.
        route: see `forge_kernels.ops.routes`.
        few_rows_only: on route fp8_lift, keep nothing but the 4.25 bits. It then multiplies 1 to 16 rows (where the device is no
            Hopper: 1 row) under nearest codes and transforms that end in a diagonal or a Hadamard transform, and refuses all
            else.

    Raises:
        ValueError: an unknown route, or one that the device cannot take, no matrix, or codes and scales that do not belong
            together.
    """
    device = weight.codes_NK.device if device is None else torch.device(device)
    route = choose_route(device) if route is None else route
    require_known_route(route)
    if device.type != "cuda" and route in ("fp8_lift", "dot_scaled") and not is_interpreted(widen):
        raise ValueError(
            f"route {route!r} runs Triton kernels, and {str(device)!r} has none: give a CUDA device, or float32"
        )
    if weight.codes_NK.dim() != 2:
        raise ValueError(f"a weight is a matrix of codes; these are {tuple(weight.codes_NK.shape)}")
    values_NK = decode(weight)
    num_outputs, num_inputs = values_NK.shape
    packed_NH = pack(weight.codes_NK).to(device).contiguous()
    scales_NB = weight.scales_NB.to(device).clone(memory_format=torch.contiguous_format)
    if route == "fp8_lift" and (num_inputs > MAX_COLUMNS or num_outputs == 0):
        route = "bf16"
    lifted, references_N, counters = None, None, None
    if route == "fp8_lift":
        references_N = _row_references(weight, device)
        counters = torch.zeros(num_outputs // 64 + 1, dtype=torch.int32, device=device)
        if not few_rows_only:
            lifted = _lifted_weight(packed_NH, scales_NB)
        if (references_N if few_rows_only else lifted) is None:
            route = "bf16"
    stored = {"bf16": torch.bfloat16, "float32": torch.float32}
    return MXFP4Weight(
        route=route,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        packed_NH=packed_NH,
        scales_NB=scales_NB,
        lifted=lifted,
        values_NK=values_NK.to(device, stored[route]) if route in stored else None,
        references_N=references_N,
        counters=counters,
    )


@torch.no_grad()
def mxfp4_linear(
    x: Tensor,
    weight: MXFP4Weight,
    *,
    transform: Transform = (),
    activation: ActivationRule = NEAREST_EVEN,
    gram_Bij: Tensor | None = None,
    bias_N: Tensor | None = None,
    low_rank: LowRank | None = None,
    accumulation: Accumulation = "float32",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the layer's output, (..., N). Nothing can be differentiated through it.

    Args:
        x: (..., K) float32, bfloat16 or float16, untransformed, on the weight's device.
        weight: from `prepare_weight`.
        transform: T, applied left to right; its inverse is in the weight.
        activation: scale rule and code rule of the transformed input.
        gram_Bij: for the code rule block_swap, see `forge_kernels.block_gram`.
        bias_N: float32 or the dtype of x.
        low_rank: a branch that reads the untransformed input.
        accumulation: "fast" leaves FP8 sums to the matrix units; other routes than fp8_lift sum in float32 either way.
        dtype: of the output; None means that of x.

    Raises:
        ValueError: an input of another width or dtype, a bias or branch that does not fit, more rows than a weight for few rows
            takes, or what encoding refuses.
    """
    if x.dim() == 0 or x.shape[-1] != weight.num_inputs:
        raise ValueError(f"input {tuple(x.shape)} does not end in the weight's {weight.num_inputs} inputs")
    if x.dtype not in _DTYPES:
        raise ValueError(f"cannot multiply {x.dtype}; give float32, bfloat16 or float16")
    rows_MK = x.reshape(-1, x.shape[-1])
    dtype = x.dtype if dtype is None else dtype
    _check_epilogue(weight, bias_N, low_rank, accumulation)
    require_fitting(transform, weight.num_inputs)
    gram_Bij = checked_rule(activation, gram_Bij, weight.num_inputs)
    y_MN = None
    if weight.route == "fp8_lift" and 0 < len(rows_MK) <= most_packed_rows(x.device) and gram_Bij is None:
        is_plain = bias_N is None and low_rank is None
        y_MN = _few_rows(rows_MK, weight, transform, activation, dtype if is_plain else torch.float32)
    if y_MN is not None:
        y_MN = _with_bias_and_branch(y_MN, bias_N, _branch_input(rows_MK, low_rank), low_rank).to(dtype)
    else:
        encoded = encode_activation(
            rows_MK, weight.route, transform=transform, activation=activation, gram_Bij=gram_Bij
        )
        y_MN = multiply(
            encoded, weight, x_MK=rows_MK, bias_N=bias_N, low_rank=low_rank, accumulation=accumulation, dtype=dtype
        )
    return y_MN.reshape(*x.shape[:-1], weight.num_outputs)


@torch.no_grad()
def multiply(
    encoded: EncodedActivation,
    weight: MXFP4Weight,
    *,
    x_MK: Tensor,
    bias_N: Tensor | None = None,
    low_rank: LowRank | None = None,
    accumulation: Accumulation = "float32",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the output of a layer whose activation is encoded already, (M, N); `x_MK` is the input before any transform.

    Raises:
        ValueError: the activation was encoded for another route, shapes that do not fit, or a weight that keeps nothing to
            multiply such an activation with.
    """
    if encoded.route != weight.route:
        raise ValueError(f"the activation was encoded for route {encoded.route!r}, the weight for {weight.route!r}")
    if encoded.shape != tuple(x_MK.shape) or encoded.shape[1] != weight.num_inputs:
        raise ValueError(
            f"the encoded activation is {encoded.shape} and its input {tuple(x_MK.shape)};"
            f" the weight needs (M, {weight.num_inputs}) of both"
        )
    _check_epilogue(weight, bias_N, low_rank, accumulation)
    u_MR = _branch_input(x_MK, low_rank)
    if encoded.lifted is not None:
        if weight.lifted is None:
            most = most_packed_rows(x_MK.device)
            raise ValueError(
                f"this weight was prepared for 1 to {most} rows under nearest codes and a diagonal or Hadamard transform,"
                f" and got {len(x_MK)} rows or another transform or rule; prepare it without few_rows_only"
            )
        return _lifted_product(
            encoded.lifted, weight.lifted, weight.num_outputs, u_MR, bias_N, low_rank, accumulation, dtype
        )
    if encoded.packed is not None:
        y_MN = scaled_product_triton(*encoded.packed, weight.packed_NH, weight.scales_NB)
    elif encoded.values_MK is not None and weight.values_NK is not None:
        y_MN = _float_product(encoded.values_MK, weight.values_NK, bias_N)
        bias_N = None
    else:
        raise AssertionError("an activation holds what its route multiplies")
    return _with_bias_and_branch(y_MN, bias_N, u_MR, low_rank).to(dtype)


def _check_epilogue(
    weight: MXFP4Weight, bias_N: Tensor | None, low_rank: LowRank | None, accumulation: Accumulation
) -> None:
    if accumulation not in ("float32", "fast"):
        raise ValueError(f"unknown accumulation {accumulation!r}; known: 'float32', 'fast'")
    if bias_N is not None and tuple(bias_N.shape) != (weight.num_outputs,):
        raise ValueError(f"bias is {tuple(bias_N.shape)}; the weight's outputs need ({weight.num_outputs},)")
    if low_rank is not None:
        a_shape, b_shape = tuple(low_rank.a_RK.shape), tuple(low_rank.b_NR.shape)
        if a_shape != (low_rank.rank, weight.num_inputs) or b_shape != (weight.num_outputs, low_rank.rank):
            raise ValueError(
                f"branch is {a_shape} and {b_shape}; the weight needs (R, {weight.num_inputs}) and ({weight.num_outputs}, R)"
            )


def _row_references(weight: Encoded, device: torch.device) -> Tensor | None:
    """Return each row's largest scale byte of a block that is not zero; None where a row spans too much for few rows' kernel."""
    is_used_NB = split_runs((weight.codes_NK & 7) != 0).any(dim=-1)
    bytes_NB = weight.scales_NB.to(torch.int32)
    largest_N = torch.where(is_used_NB, bytes_NB, 0).amax(dim=1)
    smallest_N = torch.where(is_used_NB, bytes_NB, 255).amin(dim=1)
    if bool((largest_N - smallest_N > EXACT_OCTAVES).any()):
        return None
    return largest_N.to(device, torch.uint8)


def _lifted_weight(packed_NH: Tensor, scales_NB: Tensor) -> Lifted | None:
    """Return the FP8 operand, exact in every row, padded to a multiple of 16 rows; None where no FP8 format holds it."""
    padding = -len(packed_NH) % _ALIGNMENT
    packed_NH, scales_NB = (functional.pad(part, (0, 0, 0, padding)) for part in (packed_NH, scales_NB))
    elements: tuple[LiftElement, ...] = ("e4m3", "e5m2")
    for element in elements:
        lifted = lift_packed_triton(packed_NH, scales_NB, element)
        if bool(lifted.is_exact_M.all()):
            return lifted
    return None


def _few_rows(
    rows_MK: Tensor, weight: MXFP4Weight, transform: Transform, activation: ActivationRule, dtype: torch.dtype
) -> Tensor | None:
    """Return the product of up to 16 rows, or None where the transform is not of the kind that its kernels do."""
    fused = fused_steps(transform)
    if fused.before or fused.matrix_Bij is not None:
        return None
    rows_MK = rows_MK.contiguous()
    if len(rows_MK) == 1 and weight.num_inputs <= 32 * MOST_BLOCKS:
        return one_row_triton(
            rows_MK,
            weight.packed_NH,
            weight.scales_NB,
            activation.scale_rule,
            diagonal_K=fused.diagonal_K,
            hadamard_size=fused.hadamard_size,
            dtype=dtype,
        )
    if weight.references_N is None or weight.counters is None:
        return None
    lifted = encode_lifted_triton(
        rows_MK,
        activation.scale_rule,
        "e5m2",
        diagonal_K=fused.diagonal_K,
        hadamard_size=fused.hadamard_size,
        for_few_rows=True,
    )
    return few_rows_triton(
        lifted, weight.packed_NH, weight.scales_NB, weight.references_N, weight.counters, dtype=dtype
    )


def _lifted_product(
    a: Lifted,
    b: Lifted,
    num_outputs: int,
    u_MR: Tensor | None,
    bias_N: Tensor | None,
    low_rank: LowRank | None,
    accumulation: Accumulation,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product: by the library, or by our kernel with bias and branch in its epilogue.

    The library is the faster one where sums are in float32, even with a pass over the output for the branch; ours where the
    matrix units keep their own sums.
    """
    v_NR = None if low_rank is None else low_rank.b_NR.to(a.values_MK.device)
    if a.values_MK.is_cuda and len(a.values_MK) and accumulation == "float32":
        y_MN = torch._scaled_mm(
            a.values_MK,
            b.values_MK.T,
            scale_a=a.scales_M.unsqueeze(1),
            scale_b=b.scales_M.unsqueeze(0),
            out_dtype=dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32,
            use_fast_accum=False,
        )[:, :num_outputs]
        if bias_N is not None:
            y_MN = y_MN + bias_N.to(y_MN.dtype)
        if u_MR is not None and v_NR is not None:
            y_MN = torch.addmm(y_MN, u_MR.to(y_MN.dtype), v_NR.to(y_MN.dtype).T)
        return y_MN.to(dtype)
    b = Lifted(
        values_MK=b.values_MK[:num_outputs], scales_M=b.scales_M[:num_outputs], is_exact_M=b.is_exact_M[:num_outputs]
    )
    branch = None
    if u_MR is not None and v_NR is not None:
        branch = (u_MR.contiguous(), v_NR.to(torch.float32).contiguous())
    return lifted_product_triton(
        a,
        b,
        bias_N=None if bias_N is None else bias_N.to(torch.float32).contiguous(),
        branch=branch,
        dtype=dtype,
        is_fast=accumulation == "fast",
    )


def _float_product(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return ``a b^T + bias`` in float32: bfloat16 operands are summed in float32."""
    bias_N = None if bias_N is None else bias_N.to(torch.float32)
    if a_MK.dtype == torch.bfloat16 and a_MK.is_cuda:
        y_MN = torch.mm(a_MK, b_NK.T, out_dtype=torch.float32)
        return y_MN if bias_N is None else y_MN.add_(bias_N)
    return functional.linear(a_MK.to(torch.float32), b_NK.to(torch.float32), bias_N)


def _branch_input(x_MK: Tensor, low_rank: LowRank | None) -> Tensor | None:
    """Return ``x a^T``, (M, R) float32."""
    if low_rank is None:
        return None
    a_RK = low_rank.a_RK.to(x_MK.device)
    if x_MK.is_cuda and x_MK.dtype == a_RK.dtype == torch.bfloat16:
        return torch.mm(x_MK, a_RK.T, out_dtype=torch.float32)
    return functional.linear(x_MK.to(torch.float32), a_RK.to(torch.float32))


def _with_bias_and_branch(y_MN: Tensor, bias_N: Tensor | None, u_MR: Tensor | None, low_rank: LowRank | None) -> Tensor:
    if bias_N is not None:
        y_MN = y_MN + bias_N.to(torch.float32)
    if low_rank is not None and u_MR is not None:
        y_MN = y_MN + functional.linear(u_MR, low_rank.b_NR.to(u_MR.device, torch.float32))
    return y_MN
