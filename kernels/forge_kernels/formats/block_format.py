"""Formats of whole tensors as data: elements in blocks, one scale per block, and what both cost in bits."""

from __future__ import annotations

from dataclasses import dataclass

from forge_kernels.formats.elements import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, INT3, INT4, INT8, Element
from forge_kernels.formats.scales import BF16_SCALE, E4M3_SCALE, E8M0, Scale


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements in runs of `block` along the last axis, each run with one shared scale; none where `scale` is None."""

    name: str
    element: Element
    scale: Scale | None
    block: int = 1

    @property
    def effective_bits(self) -> float:
        """Bits per element, its share of the scale included; a scale of the whole tensor is not counted."""
        return self.element.bits + (self.scale.bits / self.block if self.scale is not None else 0.0)


MXFP4 = BlockFormat(name="mxfp4", element=E2M1, scale=E8M0, block=32)
"""4.25 bits per element."""

FORMATS: dict[str, BlockFormat] = {
    known.name: known
    for known in (
        MXFP4,
        BlockFormat(name="mxfp6_e2m3", element=E2M3, scale=E8M0, block=32),
        BlockFormat(name="mxfp6_e3m2", element=E3M2, scale=E8M0, block=32),
        BlockFormat(name="mxfp8_e4m3", element=E4M3, scale=E8M0, block=32),
        BlockFormat(name="mxfp8_e5m2", element=E5M2, scale=E8M0, block=32),
        BlockFormat(name="nvfp4", element=E2M1, scale=E4M3_SCALE, block=16),
        BlockFormat(name="int8_g64", element=INT8, scale=BF16_SCALE, block=64),
        BlockFormat(name="int8_g128", element=INT8, scale=BF16_SCALE, block=128),
        BlockFormat(name="int4_g64", element=INT4, scale=BF16_SCALE, block=64),
        BlockFormat(name="int4_g128", element=INT4, scale=BF16_SCALE, block=128),
        BlockFormat(name="int3_g64", element=INT3, scale=BF16_SCALE, block=64),
        BlockFormat(name="int3_g128", element=INT3, scale=BF16_SCALE, block=128),
        BlockFormat(name="bf16", element=BF16, scale=None),
    )
}
"""Every format by its name."""
