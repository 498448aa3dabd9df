"""Number formats as small frozen dataclasses."""

from __future__ import annotations

from forge_kernels.formats.block_format import BlockFormat, ElementFormat, ScaleFormat
from forge_kernels.formats.mxfp4 import E2M1, E8M0, MXFP4

__all__ = ["E2M1", "E8M0", "MXFP4", "BlockFormat", "ElementFormat", "ScaleFormat"]
