"""The CPU's rows: ops and solvers that a campaign on a shipped subject lives on.

An elementwise op cannot beat a copy of the same tensor, so that its share is the time of a copy over its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from forge_kernels.bench.column_loop import column_loop_gptq, objective
from forge_kernels.bench.foreign import foreign_fake_quantize
from forge_kernels.bench.timing import Call, Measurement, clock_side_by_side, compared
from forge_kernels.ops.block_swap import block_gram, fake_quantize_with_swap
from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.ops.hadamard import hadamard
from forge_kernels.solvers.gptq import gptq
from forge_kernels.transforms import BlockMatrix


def time_cpu(*, side: int = 4096, tokens: int = 16384, inputs: int = 576, repeats: int = 9) -> Iterator[Measurement]:
    """Yield the rows: encoding a square matrix of `side`, ops on activations of `tokens` rows, GPTQ of a small layer."""
    weight_NK = _random(side, side)
    foreign = foreign_fake_quantize(weight_NK)
    shape = f"{side} x {side}"
    if foreign is not None:
        yield _against(
            "encode + decode", lambda: decode(encode(weight_NK)), "compressed-tensors", foreign, shape, repeats
        )
        yield _against(
            "fake_quantize", partial(fake_quantize, weight_NK), "compressed-tensors", foreign, shape, repeats
        )
    x_TK = _random(tokens, inputs)
    block = BlockMatrix(matrix_Bij=_random(inputs // 32, 32, 32))
    gram_Bij = block_gram((_random(inputs, inputs),))
    shape = f"{tokens} x {inputs}"
    calls: list[tuple[str, Call]] = [
        ("fake_quantize even", partial(fake_quantize, x_TK)),
        ("fake_quantize search", partial(fake_quantize, x_TK, scale_rule="search")),
        ("encode even", partial(encode, x_TK)),
        ("block swap", partial(fake_quantize_with_swap, x_TK, gram_Bij)),
        ("hadamard 32", partial(hadamard, x_TK, 32)),
        ("hadamard 512", partial(hadamard, _random(tokens, 512), 512)),
        ("block matrices", partial(block.apply, x_TK)),
    ]
    for op, call in calls:
        mine, copy = clock_side_by_side([call, partial(torch.clone, x_TK)], repeats=repeats)
        yield Measurement(
            op=op, shape=shape, op_ms=mine.median, op_spread=mine.spread, floor="copy", share=copy.median / mine.median
        )
    yield time_gptq(inputs, inputs, torch.device("cpu"), repeats=max(1, repeats // 3))


def time_gptq(num_outputs: int, num_inputs: int, device: torch.device, *, repeats: int) -> Measurement:
    """Return GPTQ beside the loop over columns; `error` is how far its objective lies above the loop's, relatively."""
    samples_TK = _random(2 * num_inputs, num_inputs).to(device)
    samples_TK *= (0.7 * torch.randn(num_inputs, generator=torch.Generator().manual_seed(1))).exp().to(device)
    moment_KK = (samples_TK.T @ samples_TK / len(samples_TK)).double()
    weight_NK = _random(num_outputs, num_inputs).to(device) * 0.05
    ours, loop = gptq(weight_NK, moment_KK), column_loop_gptq(weight_NK, moment_KK)
    gap = objective(decode(ours), weight_NK, moment_KK) / objective(decode(loop), weight_NK, moment_KK) - 1
    sides = [partial(gptq, weight_NK, moment_KK), partial(column_loop_gptq, weight_NK, moment_KK)]
    mine, instead = clock_side_by_side(sides, repeats=repeats)
    return compared(
        "gptq",
        f"{num_outputs} x {num_inputs}",
        mine,
        "column loop, eager torch",
        instead,
        error=gap,
    )


def _against(op: str, call: Call, instead: str, other: Call, shape: str, repeats: int) -> Measurement:
    mine, theirs = clock_side_by_side([call, other], repeats=repeats)
    return compared(
        op,
        shape,
        mine,
        instead,
        theirs,
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
