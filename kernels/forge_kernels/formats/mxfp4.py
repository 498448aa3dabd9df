"""MXFP4 of the OCP microscaling text: E2M1 elements, one E8M0 scale per 32."""

from __future__ import annotations

from forge_kernels.formats.block_format import BlockFormat, ElementFormat, ScaleFormat

E2M1 = ElementFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, exponent_bias=1)
"""0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

E8M0 = ScaleFormat(name="e8m0", bits=8, bias=127, max_byte=254)
"""Powers of two from 2^-127 to 2^127; byte 255 is NaN."""

MXFP4 = BlockFormat(name="mxfp4", element=E2M1, scale=E8M0, block=32)
"""4.25 bits per element."""
