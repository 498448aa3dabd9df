"""MXFP4 encoders, coordinate changes and solvers: what a quantization program is composed of."""

from __future__ import annotations

from forge_kernels.formats import FORMATS, BlockFormat
from forge_kernels.ops.block_encode import BlockEncoded, decode_blocks, encode_blocks
from forge_kernels.ops.block_swap import block_gram, encode_with_swap
from forge_kernels.ops.decode import decode, decode_codes
from forge_kernels.ops.encode import choose_scales, encode, encode_with_scales
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.ops.hadamard import hadamard
from forge_kernels.ops.mxfp4_linear import MXFP4Weight, mxfp4_linear, prepare_weight
from forge_kernels.ops.pack import pack, unpack
from forge_kernels.rules import ActivationRule, Encoded, LowRank, ScaleRule
from forge_kernels.solvers.balance import smooth_scales
from forge_kernels.solvers.code_swaps import swap_codes
from forge_kernels.solvers.gptq import gptq
from forge_kernels.solvers.low_rank import fit_low_rank
from forge_kernels.solvers.wush import wush_matrices
from forge_kernels.transforms import (
    IDENTITY,
    BlockMatrix,
    Diagonal,
    Hadamard,
    Permutation,
    Transform,
    apply_transform,
    transform_weight,
)

__all__ = [
    "FORMATS",
    "IDENTITY",
    "ActivationRule",
    "BlockEncoded",
    "BlockFormat",
    "BlockMatrix",
    "Diagonal",
    "Encoded",
    "Hadamard",
    "LowRank",
    "MXFP4Weight",
    "Permutation",
    "ScaleRule",
    "Transform",
    "apply_transform",
    "block_gram",
    "choose_scales",
    "decode",
    "decode_blocks",
    "decode_codes",
    "encode",
    "encode_blocks",
    "encode_with_scales",
    "encode_with_swap",
    "fake_quantize",
    "fit_low_rank",
    "gptq",
    "hadamard",
    "mxfp4_linear",
    "pack",
    "prepare_weight",
    "smooth_scales",
    "swap_codes",
    "transform_weight",
    "unpack",
    "wush_matrices",
]
