"""Small floats by another hand: the element formats of ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

ML_DTYPES: dict[str, Any] = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
}


def rounded_by_ml_dtypes(y: Tensor, name: str) -> Tensor:
    """Return finite float32 values as ml_dtypes rounds them; it does not saturate, so give none beyond the largest."""
    return torch.from_numpy(y.numpy().astype(ML_DTYPES[name]).astype(np.float32))


def codes_by_ml_dtypes(rounded: Tensor, name: str) -> Tensor:
    """Return the int32 codes of values that the format has."""
    small = rounded.numpy().astype(ML_DTYPES[name])
    return torch.from_numpy(small.view(f"u{small.dtype.itemsize}").astype(np.int32))
