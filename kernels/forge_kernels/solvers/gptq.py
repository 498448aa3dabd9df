"""GPTQ under static MXFP4 scales: choose the codes of a weight one input channel at a time.

Minimizes ``tr((What - W) H (What - W)^T)`` greedily. With ``H + damping = R R^T``, R upper triangular, U = R^-1 is the
upper Cholesky factor of the damped inverse, and for input channels j in order

    q_j = nearest code of w_j;    e_j = w_j - q_j;    w_l -= e_j U_jl / U_jj  for every l > j

so that channels not yet encoded make up for the error of those that are. Scales are static: a block of 32 channels
keeps the scale that its given weights call for, whatever the updates do to them and in whatever order its channels
come; that is what lets channels be taken in descending order of their second moment.

The loop runs on the transposed weight, 32 channels at a time: within such a panel every error is passed on at once, and
the channels behind the panel take in all of its errors in one matrix product.

Legend: N output features, K input features, B = K / 32 blocks, P channels of a panel.
"""

from __future__ import annotations

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

_PANEL = 32
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
    update_KK = _update_rows(moment_KK[channels_K][:, channels_K], damping)
    scales_KN = scales_NB.T[channels_K // MXFP4.block]
    weight_KN = weight_NK.T[channels_K].contiguous()
    rounded_KN = _encode_channels(weight_KN, scales_KN, update_KK)
    codes_KN = torch.empty_like(rounded_KN, dtype=torch.uint8)
    codes_KN[channels_K] = codes_of_e2m1(rounded_KN)
    return Encoded(codes_NK=codes_KN.T.contiguous(), scales_NB=scales_NB)


def _update_rows(moment_KK: Tensor, damping: float) -> Tensor:
    """Return ``U_jl / U_jj``: what a unit of error in channel j moves channel l by; unit diagonal, zero below it."""
    dead_K = moment_KK.diagonal() == 0
    damped_KK = moment_KK.masked_fill(dead_K.unsqueeze(0) | dead_K.unsqueeze(1), 0.0)
    # Reversing rows and columns turns the lower factor into the upper one, without inverting the moment first.
    live_mean = moment_KK.diagonal().sum() / (~dead_K).sum().clamp(min=1)
    damped_KK.diagonal().add_(torch.where(dead_K, torch.where(live_mean > 0, live_mean, 1.0), 0.0))
    lower_KK = damped_cholesky(damped_KK.flip(0, 1), damping, what="second moment")
    upper_KK = lower_KK.flip(0, 1)
    identity_KK = torch.eye(len(upper_KK), dtype=upper_KK.dtype, device=upper_KK.device)
    inverse_KK: Tensor = torch.linalg.solve_triangular(upper_KK, identity_KK, upper=True)
    return inverse_KK / inverse_KK.diagonal().unsqueeze(1)


def _encode_channels(weight_KN: Tensor, scales_KN: Tensor, update_KK: Tensor) -> Tensor:
    """Return the rounded values in units of the scales, (K, N) float32 on the E2M1 grid; `weight_KN` is overwritten."""
    num_channels = len(weight_KN)
    rounded_KN = torch.empty_like(weight_KN, dtype=torch.float32)
    for start in range(0, num_channels, _PANEL):
        stop = min(start + _PANEL, num_channels)
        scale_PN = scale_of_bytes(scales_KN[start:stop].to(torch.int32)).double()
        inverse_PN = inverse_scale_of_bytes(scales_KN[start:stop].to(torch.int32)).double()
        weight_PN = weight_KN[start:stop]
        error_PN = torch.empty_like(weight_PN)
        update_PP1 = update_KK[start:stop, start:stop].unsqueeze(-1)
        for j in range(stop - start):
            rounded_N = round_to_e2m1_((weight_PN[j] * inverse_PN[j]).to(torch.float32))
            rounded_KN[start + j] = rounded_N
            torch.addcmul(weight_PN[j], scale_PN[j], rounded_N.double(), value=-1, out=error_PN[j])
            weight_PN[j + 1 :].addcmul_(update_PP1[j, j + 1 :], error_PN[j], value=-1)
        weight_KN[stop:].addmm_(update_KK[start:stop, stop:].T, error_PN, alpha=-1)
    return rounded_KN
