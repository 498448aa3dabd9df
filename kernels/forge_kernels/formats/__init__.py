"""Number formats as small frozen dataclasses: elements, scales, and blocks of both."""

from __future__ import annotations

from forge_kernels.formats.block_format import FORMATS, MXFP4, BlockFormat
from forge_kernels.formats.elements import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    INT3,
    INT4,
    INT8,
    Element,
    FloatElement,
    IntegerElement,
)
from forge_kernels.formats.scales import BF16_SCALE, E4M3_SCALE, E8M0, FloatScale, PowerOfTwoScale, Scale

__all__ = [
    "BF16",
    "BF16_SCALE",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E4M3_SCALE",
    "E5M2",
    "E8M0",
    "FORMATS",
    "INT3",
    "INT4",
    "INT8",
    "MXFP4",
    "BlockFormat",
    "Element",
    "FloatElement",
    "FloatScale",
    "IntegerElement",
    "PowerOfTwoScale",
    "Scale",
]
