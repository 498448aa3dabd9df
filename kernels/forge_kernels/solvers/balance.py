"""Per-channel scales that share the range of a layer's input channels between activations and weights.

SmoothQuant's rule: with a_j and w_j the largest magnitudes of channel j in the activations and in the weights, divide
the activation by ``s_j = a_j^exponent / w_j^(1 - exponent)`` and multiply the weight by it. At 0.5 both end at
sqrt(a_j w_j).

Legend: K input features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_RATIO = 1e4
"""Largest over smallest scale that contracts accept in a diagonal."""


def smooth_scales(
    activation_max_K: Tensor,
    weight_max_K: Tensor,
    *,
    exponent: float = 0.5,
    max_ratio: float = MAX_RATIO,
    power_of_two: bool = False,
) -> Tensor:
    """Return ``1 / s_j``, the scales for `Diagonal`: ``x'_j = x_j * scale_K[j]``.

    Args:
        activation_max_K: (K,) non-negative; largest magnitudes, or any other measure of spread.
        weight_max_K: (K,) non-negative, over all layers that read the input.
        exponent: share of the activations' spread that moves into the weights, 0 to 1.
        max_ratio: the scales keep within this ratio of each other, around their geometric mean.
        power_of_two: round to powers of two, which fold into weights without any rounding.

    Returns:
        (K,) float32, positive and finite. A channel without activation or without weight gets the geometric mean of the
        others (1 if there are none): nothing is known that would set it apart.

    Raises:
        ValueError: shapes differ, values are negative or not finite, exponent outside 0..1, or a ratio below 1.
    """
    if activation_max_K.dim() != 1 or activation_max_K.shape != weight_max_K.shape:
        raise ValueError(
            f"activation maxima {tuple(activation_max_K.shape)} and weight maxima {tuple(weight_max_K.shape)}"
            " must be two vectors of one length"
        )
    if not 0 <= exponent <= 1:
        raise ValueError(f"exponent is {exponent}; give a share from 0 to 1")
    if not (math.isfinite(max_ratio) and max_ratio >= 1):
        raise ValueError(f"max_ratio is {max_ratio}; give a finite ratio of at least 1")
    activation_K = activation_max_K.detach().to(torch.float64)
    weight_K = weight_max_K.detach().to(activation_K)
    for name, values_K in (("activation", activation_K), ("weight", weight_K)):
        bad = (~(torch.isfinite(values_K) & (values_K >= 0))).nonzero()
        if len(bad):
            raise ValueError(
                f"{name} maximum of channel {int(bad[0])} is {float(values_K[bad[0]])}; give finite magnitudes"
            )
    known_K = (activation_K > 0) & (weight_K > 0)
    log_scale_K = torch.where(
        known_K,
        (1 - exponent) * torch.log2(weight_K) - exponent * torch.log2(activation_K),
        torch.zeros_like(activation_K),
    )
    center = log_scale_K.sum() / known_K.sum().clamp(min=1)
    log_scale_K = torch.where(known_K, log_scale_K, center)
    half_width = math.log2(max_ratio) / 2
    if power_of_two:
        # Whole exponents inside the interval, so that rounding cannot leave it.
        low, high = torch.ceil(center - half_width), torch.floor(center + half_width)
        log_scale_K = torch.minimum(torch.maximum(log_scale_K.round(), low), torch.maximum(low, high))
    else:
        # A hair inside: the ratio must hold after rounding to float32.
        half_width = max(half_width - 1e-6, 0.0)
        log_scale_K = torch.minimum(torch.maximum(log_scale_K, center - half_width), center + half_width)
    return torch.exp2(log_scale_K).to(torch.float32)
