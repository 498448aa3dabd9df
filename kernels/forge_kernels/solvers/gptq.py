"""GPTQ under static MXFP4 scales: choose the codes of a weight one input channel at a time.

Minimizes ``tr((What - W) H (What - W)^T)`` greedily. With ``H + damping = R R^T``, R upper triangular, and D = W - What,
component j of a row of ``D R`` holds nothing of the channels after j. For input channels j in order, what makes it smallest is

    q_j = nearest code of w_j + sum_{l < j} d_l R_lj / R_jj;    d_j = w_j - q_j

The usual form hands the error of j on to all later channels by row j of R^-1, and chooses the same codes; this one looks back
instead, and needs no inverse. Scales are static: a block of 32 channels keeps the scale that its given weights call for,
whatever is added to them and in whatever order its channels come; that is what lets channels be taken in descending order of
their second moment.

The loop runs on the transposed weight, 32 channels at a time: one matrix product adds up what all earlier panels hand on, and
within a panel every difference is handed on at once, on a GPU by one kernel (`forge_kernels.solvers.gptq_kernel`).

Legend: N output features, K input features, B = K / 32 blocks, P channels of a panel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from forge_kernels.formats import MXFP4
from forge_kernels.ops._arithmetic import (
    codes_of_e2m1,
    inverse_scale_of_bytes,
    round_to_e2m1_,
    scale_of_bytes,
)
from forge_kernels.ops.encode import choose_scales
from forge_kernels.rules import Encoded
from forge_kernels.solvers._moments import check_damping, checked_matrix, checked_moment, damped_cholesky
from forge_kernels.solvers.gptq_kernel import encode_panel_triton

_logger = logging.getLogger(__name__)

PANEL = 32
"""Channels per panel. Small enough that the operations within a panel stay below the size from which torch splits them
over threads (32768 elements, so up to 1024 outputs): one barrier per column would cost more than the column itself."""


def gptq(
    weight_NK: Tensor,
    moment_KK: Tensor,
    *,
    scale_rule: Literal["even", "floor", "rceil", "search"] = "even",
    damping: float = 0.01,
    order: Literal["natural", "descending"] = "descending",
) -> Encoded:
    """Encode `weight_NK` against the second moment of its inputs.

    Args:
        weight_NK: (N, K) floating point, in the coordinates it will be used in (``W T^-1``); K divisible by 32.
        moment_KK: (K, K), ``X^T X / T`` of the transformed inputs.
        scale_rule: rule for the static scales; "search" weighs errors by the diagonal of the moment.
        damping: share of the moment's mean diagonal (over channels that are ever non-zero) added to its diagonal;
            raised tenfold, with a logged warning, as long as the Cholesky factorization fails.
        order: channels from the largest diagonal entry to the smallest, or as they come. Equals keep their order.

    Returns:
        Codes and scales in the natural order of channels. Channels whose input was always zero get their nearest codes:
        nothing is known against them, and no error is passed on to or from them.

    Raises:
        ValueError: non-finite weight or moment, shapes that do not fit, or a moment that no damping makes definite.
    """
    check_damping(damping)
    if order not in ("natural", "descending"):
        raise ValueError(f"unknown order {order!r}; known: 'natural', 'descending'")
    weight_NK = checked_matrix(weight_NK, what="weight")
    moment_KK = checked_moment(moment_KK, weight_NK.shape[1]).to(weight_NK.device)
    scales_NB = choose_scales(
        weight_NK.to(torch.float32),
        scale_rule=scale_rule,
        importance_K=moment_KK.diagonal() if scale_rule == "search" else None,
    )
    diagonal_K = moment_KK.diagonal()
    channels_K = torch.arange(len(diagonal_K), device=weight_NK.device)
    if order == "descending":
        channels_K = torch.argsort(diagonal_K, descending=True, stable=True)
    feedback_KK = _feedback(moment_KK[channels_K][:, channels_K], damping)
    scales_KN = scales_NB.T[channels_K // MXFP4.block].contiguous()
    weight_KN = weight_NK.T[channels_K].contiguous()
    rounded_KN = _encode_channels(weight_KN, scales_KN, feedback_KK)
    codes_KN = torch.empty_like(rounded_KN, dtype=torch.uint8)
    codes_KN[channels_K] = codes_of_e2m1(rounded_KN)
    return Encoded(codes_NK=codes_KN.T.contiguous(), scales_NB=scales_NB)


def _feedback(moment_KK: Tensor, damping: float) -> Tensor:
    """Return ``R_lj / R_jj``: what a unit of difference in channel l adds to a later channel j; unit diagonal, zero below it."""
    dead_K = moment_KK.diagonal() == 0
    damped_KK = moment_KK.masked_fill(dead_K.unsqueeze(0) | dead_K.unsqueeze(1), 0.0)
    live_mean = moment_KK.diagonal().sum() / (~dead_K).sum().clamp(min=1)
    damped_KK.diagonal().add_(torch.where(dead_K, torch.where(live_mean > 0, live_mean, 1.0), 0.0))
    # Reversing rows and columns turns a lower factor into the upper one.
    upper_KK = damped_cholesky(damped_KK.flip(0, 1), damping, what="second moment").flip(0, 1)
    return (upper_KK / upper_KK.diagonal()).contiguous()  # factorizations come column by column


def _encode_channels(weight_KN: Tensor, scales_KN: Tensor, feedback_KK: Tensor) -> Tensor:
    """Return the rounded values in units of the scales, (K, N) float32 on the E2M1 grid."""
    rounded_KN = torch.empty_like(weight_KN, dtype=torch.float32)
    difference_KN = torch.empty_like(weight_KN)
    encode_panel = choose_panel_encoder(weight_KN.device)
    for start in range(0, len(weight_KN), PANEL):
        panel = slice(start, start + PANEL)
        target_PN = torch.addmm(weight_KN[panel], feedback_KK[:start, panel].T, difference_KN[:start])
        encode_panel(
            target_PN,
            weight_KN[panel],
            scales_KN[panel],
            feedback_KK[panel, panel],
            rounded_KN[panel],
            difference_KN[panel],
        )
    return rounded_KN


PanelEncoder = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


@lru_cache(maxsize=8)
def choose_panel_encoder(device: torch.device) -> PanelEncoder:
    """Return what encodes a panel: on CUDA the kernel, if it can be compiled here, which is tried once; else the reference.

    A sandbox need not have a compiler or leave to start it; the codes are the same either way, and a warning says which it is.
    """
    if device.type != "cuda":
        return encode_panel_reference
    zeros = torch.zeros(MXFP4.block, 1, dtype=torch.float64, device=device)
    identity = torch.eye(MXFP4.block, dtype=torch.float64, device=device)
    try:
        encode_panel_triton(zeros, zeros, zeros.to(torch.uint8), identity, zeros.float(), zeros.clone())
    except Exception as error:
        _logger.warning("GPTQ runs as eager operations, its kernel cannot be compiled here: %s", error)
        return encode_panel_reference
    return encode_panel_triton


def encode_panel_reference(
    target_PN: Tensor,
    weight_PN: Tensor,
    scales_PN: Tensor,
    feedback_PP: Tensor,
    rounded_PN: Tensor,
    difference_PN: Tensor,
) -> None:
    """Encode the channels of one panel in order, into `rounded_PN` and `difference_PN`; `target_PN` is overwritten.

    target_PN: float64, the weights and what earlier panels add. weight_PN: float64. scales_PN: uint8.
    feedback_PP: float64, (l, j) what a unit of difference in channel l adds to channel j.
    rounded_PN: float32, in units of the scales. difference_PN: float64, weight minus decoded value.
    """
    scale_PN = scale_of_bytes(scales_PN.to(torch.int32)).double()
    inverse_PN = inverse_scale_of_bytes(scales_PN.to(torch.int32)).double()
    feedback_PP1 = feedback_PP.unsqueeze(-1)
    for j in range(len(target_PN)):
        rounded_N = round_to_e2m1_((target_PN[j] * inverse_PN[j]).to(torch.float32))
        rounded_PN[j] = rounded_N
        torch.addcmul(weight_PN[j], scale_PN[j], rounded_N.double(), value=-1, out=difference_PN[j])
        target_PN[j + 1 :].addcmul_(feedback_PP1[j, j + 1 :], difference_PN[j])
