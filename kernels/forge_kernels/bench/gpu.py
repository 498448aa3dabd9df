"""The GPU's rows: encoders against the copy bandwidth, products against cuBLAS in bfloat16, both measured in the same run.

Bytes of an encoder are what it must read and write once; the floor is the bandwidth of a copy, bytes read plus bytes written.
Errors of products are relative to float64, both operands taken as decoded, over the first rows.

Legend: M rows, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from forge_kernels.bench.cpu import time_gptq
from forge_kernels.bench.foreign import foreign_fake_quantize
from forge_kernels.bench.timing import (
    Call,
    Measurement,
    clock_side_by_side,
    compared,
    replay_side_by_side,
    time_by_events,
)
from forge_kernels.ops.block_matrix_kernel import encode_block_matrix_triton
from forge_kernels.ops.block_swap import block_gram
from forge_kernels.ops.block_swap_kernel import encode_with_swap_triton
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.encode_kernel import encode_packed_triton, fake_quantize_triton
from forge_kernels.ops.lift_kernel import encode_lifted_triton, lift_packed_triton
from forge_kernels.ops.mxfp4_linear import Accumulation, MXFP4Weight, mxfp4_linear, prepare_weight
from forge_kernels.ops.pack import unpack
from forge_kernels.rules import Encoded, LowRank

ENCODED_SHAPE = (16384, 8192)
PRODUCT_SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 9728, 2560))
FEW_ROWS = (1, 4, 16)
SIDE = 8192
GPTQ_SIDE = 4096
_CHECKED_ROWS = 64
_COPIES = 6
"""Weights that products of few rows take in turn: together far larger than the L2 cache."""
_ROUNDS = 8
"""How often they do so in one replay, whose own launch takes as long as a product or nearly."""


def time_gpu(*, repeats: int = 25) -> Iterator[Measurement]:
    """Yield all rows."""
    bandwidth = copy_bandwidth(repeats=repeats)
    yield Measurement(op=f"copy, {bandwidth / 1e9:.2f} TB/s", shape="2 GiB", op_ms=2 * 2**31 / bandwidth, op_spread=0.0)
    yield from time_encoders(bandwidth, repeats=repeats)
    for shape in PRODUCT_SHAPES:
        yield from time_products(*shape, repeats=repeats)
    yield from time_few_rows(bandwidth, repeats=repeats)
    yield time_gptq(GPTQ_SIDE, GPTQ_SIDE, torch.device("cuda"), repeats=max(1, min(3, repeats // 3)))


def copy_bandwidth(*, repeats: int) -> float:
    """Return bytes read plus bytes written per millisecond of a copy of 2 GiB."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    # Not captured: a graph would hand a copy to the copy engines, which are slower.
    times = time_by_events(partial(target.copy_, source), repeats=repeats)
    return 2 * source.numel() * source.element_size() / times.median


def time_encoders(bandwidth: float, *, repeats: int) -> Iterator[Measurement]:
    """Yield every encoder on bfloat16 activations, as a share of the copy bandwidth (bytes per millisecond)."""
    rows, columns = ENCODED_SHAPE
    x_MK = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    matrix_Bij = torch.randn(columns // 32, 32, 32, device="cuda").to(torch.bfloat16)
    diagonal_K = torch.randn(columns, device="cuda").exp()
    gram_Bij = block_gram((torch.randn(512, columns, device="cuda"),))
    packed = encode_packed_triton(x_MK, "even")
    to_packed = 2 + 0.5 + 1 / 32
    calls: list[tuple[str, float, Call]] = [
        ("encode even", to_packed, partial(encode_packed_triton, x_MK, "even")),
        ("encode search", to_packed, partial(encode_packed_triton, x_MK, "search")),
    ]
    calls += [
        (f"hadamard {size} + encode", to_packed, partial(encode_packed_triton, x_MK, "even", hadamard_size=size))
        for size in (16, 32, 64, 128, 512)
    ]
    calls += [
        (
            "diagonal + hadamard 32 + encode",
            to_packed,
            partial(encode_packed_triton, x_MK, "even", diagonal_K=diagonal_K, hadamard_size=32),
        ),
        ("matrix per block + encode", to_packed, partial(encode_block_matrix_triton, x_MK, matrix_Bij, "even")),
        ("one matrix + encode", to_packed, partial(encode_block_matrix_triton, x_MK, matrix_Bij[:1], "even")),
        ("encode + block swap", to_packed, partial(encode_with_swap_triton, x_MK, gram_Bij, "even")),
        ("fake_quantize to bf16", 4, partial(fake_quantize_triton, x_MK, "even", dtype=torch.bfloat16)),
        ("encode + lift", 3, partial(encode_lifted_triton, x_MK, "even")),
        ("hadamard 32 + encode + lift", 3, partial(encode_lifted_triton, x_MK, "even", hadamard_size=32)),
        ("lift packed codes", 1.5 + 1 / 32, partial(lift_packed_triton, *packed)),
    ]
    for op, bytes_per_element, call in calls:
        (times,) = replay_side_by_side([[call]], repeats=repeats)
        yield Measurement(
            op=op,
            shape=f"{rows} x {columns}",
            op_ms=times.median,
            op_spread=times.spread,
            floor="copy bandwidth",
            share=bytes_per_element * x_MK.numel() / times.median / bandwidth,
        )
    foreign = foreign_fake_quantize(x_MK)
    if foreign is not None:
        ours = partial(fake_quantize_triton, x_MK, "even", dtype=torch.bfloat16)
        mine, theirs = clock_side_by_side([ours, foreign], repeats=max(3, repeats // 3))
        yield compared(
            "fake_quantize to bf16",
            f"{rows} x {columns}",
            mine,
            "compressed-tensors",
            theirs,
        )


def time_products(rows: int, outputs: int, inputs: int, *, repeats: int) -> Iterator[Measurement]:
    """Yield the product from bfloat16 activations, encoding included, beside the same product in bfloat16."""
    x_MK = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight_NK = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    encoded = encode(weight_NK)
    lifted = prepare_weight(encoded, route="fp8_lift")
    branch = LowRank(
        a_RK=torch.randn(16, inputs, device="cuda").to(torch.bfloat16),
        b_NR=torch.randn(outputs, 16, device="cuda").to(torch.bfloat16),
    )
    # Of one magnitude everywhere, MXFP4 products would add up without any rounding.
    checked_MK = x_MK[:_CHECKED_ROWS] * torch.randn(inputs, device="cuda").exp().to(torch.bfloat16)
    wanted = decode(encode(checked_MK)).double() @ decode(encoded).double().T
    kinds: list[tuple[str, Callable[..., Tensor]]] = [
        ("fp8_lift", _product(lifted, "float32")),
        ("fp8_lift, fast accumulation", _product(lifted, "fast")),
        ("fp8_lift, branch of rank 16", partial(_product(lifted, "float32"), low_rank=branch)),
        ("dot_scaled", _product(prepare_weight(encoded, route="dot_scaled"), "float32")),
        ("bf16", _product(prepare_weight(encoded, route="bf16"), "float32")),
    ]
    for name, call in kinds:
        mine, instead = replay_side_by_side(
            [[partial(call, x_MK)] * 3, [partial(torch.mm, x_MK, weight_NK.T)] * 3], repeats=repeats
        )
        error = None
        if "branch" not in name:
            error = _relative(call(checked_MK, dtype=torch.float32), wanted)
        yield compared(
            f"mxfp4_linear {name}",
            f"{rows} x {outputs} x {inputs}",
            mine,
            "cuBLAS bf16",
            instead,
            error=error,
        )


def time_few_rows(bandwidth: float, *, repeats: int) -> Iterator[Measurement]:
    """Yield the products of few rows, encoding included, beside bfloat16; the share is of reading 4.25 bits per weight."""
    weights = [torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(_COPIES)]
    prepared = []
    for weight_NK in weights:
        packed_NH, scales_NB = encode_packed_triton(weight_NK, "even")
        encoded = Encoded(codes_NK=unpack(packed_NH), scales_NB=scales_NB)
        prepared.append(prepare_weight(encoded, route="fp8_lift", few_rows_only=True))
    for rows in FEW_ROWS:
        x_MK = torch.randn(rows, SIDE, device="cuda", dtype=torch.bfloat16)
        calls = [partial(_product(weight, "float32"), x_MK) for weight in prepared]
        mine, instead = replay_side_by_side(
            [calls * _ROUNDS, [partial(torch.mm, x_MK, weight_NK.T) for weight_NK in weights] * _ROUNDS],
            repeats=repeats,
        )
        checked_MK = x_MK * torch.randn(SIDE, device="cuda").exp().to(torch.bfloat16)
        wanted = decode(encode(checked_MK)).double() @ prepared[0].decoded().double().T
        yield compared(
            f"mxfp4_linear, {rows} rows" if rows > 1 else "mxfp4_linear, 1 row",
            f"{rows} x {SIDE} x {SIDE}",
            mine,
            "cuBLAS bf16",
            instead,
            floor="reading the weight",
            share=SIDE * SIDE * 4.25 / 8 / bandwidth / mine.median,
            error=_relative(mxfp4_linear(checked_MK, prepared[0], dtype=torch.float32), wanted),
        )


def _product(weight: MXFP4Weight, accumulation: Accumulation) -> Callable[..., Tensor]:
    return partial(mxfp4_linear, weight=weight, accumulation=accumulation)


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())
