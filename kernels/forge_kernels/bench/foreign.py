"""Fake quantization as compressed-tensors does it, where that is installed: what one would call in place of our encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def foreign_fake_quantize(x_MK: Tensor) -> Callable[[], Any] | None:
    """Return a call that scales, rounds and decodes `x_MK` in MXFP4 by compressed-tensors; None if it is not installed."""
    try:
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
    except ImportError:
        return None
    arguments = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, dynamic=True, scale_dtype=torch.uint8
    )

    def run() -> Any:
        scale_MB, zero_MB = compute_dynamic_scales_and_zp(x_MK, arguments, module=torch.nn.Identity())
        return fake_quantize(x_MK, scale_MB, zero_MB, arguments)

    return run
