"""Time the ops and solvers beside what one would call instead, in one run: ``python -m forge_kernels.bench``.

Every line is a ratio of two medians taken alternately on the same random data, so that a busy machine slows both sides.
An absolute time says nothing without the machine; the ratio to a copy of the same tensor says how far an elementwise op
is from the memory bandwidth, which it cannot beat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forge_kernels.ops.decode import decode
from forge_kernels.ops.encode import encode
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.ops.hadamard import hadamard
from forge_kernels.solvers.gptq import gptq
from forge_kernels.transforms import BlockMatrix

Call = Callable[[], Any]

SOLVER_SHAPES = ((192, 512), (576, 1536))
"""Outputs and inputs of the weights that the solvers are timed on."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians of one op and of what it is compared with, in milliseconds."""

    op: str
    shape: str
    op_ms: float
    instead: str
    instead_ms: float

    @property
    def ratio(self) -> float:
        """How many times as long the op takes as the alternative."""
        return self.op_ms / self.instead_ms


def compare(op: str, run_op: Call, instead: str, run_instead: Call, *, shape: str, repeats: int) -> Timing:
    """Time both sides alternately, after one unmeasured call of each, and return their medians."""
    run_op(), run_instead()
    op_ms, instead_ms = [], []
    for _ in range(repeats):
        op_ms.append(_time_ms(run_op))
        instead_ms.append(_time_ms(run_instead))
    return Timing(
        op=op,
        shape=shape,
        op_ms=statistics.median(op_ms),
        instead=instead,
        instead_ms=statistics.median(instead_ms),
    )


def time_ops(device: torch.device, *, repeats: int, tokens: int) -> list[Timing]:
    """Time the ops on activations of `tokens` rows."""
    timings = []
    for num_inputs in (192, 576):
        x_TK = _random(tokens, num_inputs, device=device)
        block = BlockMatrix(matrix_Bij=_random(num_inputs // 32, 32, 32, device=device))
        copy = ("copy", partial(torch.clone, x_TK))
        product = ("square float32 product", partial(torch.mm, x_TK, _random(num_inputs, num_inputs, device=device)))
        in_two_steps = ("decode(encode(x))", partial(_decode_encoded, x_TK))
        pairs: list[tuple[str, Call, tuple[str, Call]]] = [
            ("fake_quantize even", partial(fake_quantize, x_TK), copy),
            ("fake_quantize even", partial(fake_quantize, x_TK), in_two_steps),
            ("fake_quantize even", partial(fake_quantize, x_TK), product),
            ("fake_quantize search", partial(fake_quantize, x_TK, scale_rule="search"), copy),
            ("encode even", partial(encode, x_TK), copy),
            ("hadamard 32", partial(hadamard, x_TK, 32), copy),
            ("hadamard 64", partial(hadamard, x_TK, 64), product),
            ("block matrices", partial(block.apply, x_TK), product),
        ]
        shape = f"{tokens} x {num_inputs}"
        timings += [compare(op, call, *instead, shape=shape, repeats=repeats) for op, call, instead in pairs]
    return timings


def time_solvers(device: torch.device, *, repeats: int) -> list[Timing]:
    """Time GPTQ on weights of `SOLVER_SHAPES`."""
    timings = []
    for num_outputs, num_inputs in SOLVER_SHAPES:
        weight_NK = _random(num_outputs, num_inputs, device=device)
        samples_TK = _random(2 * num_inputs, num_inputs, device=device)
        moment_KK = (samples_TK.T @ samples_TK / len(samples_TK)).double()
        timings.append(
            compare(
                "gptq",
                partial(gptq, weight_NK, moment_KK),
                "float64 inverse of the moment",
                partial(torch.linalg.inv, moment_KK),
                shape=f"{num_outputs} x {num_inputs}",
                repeats=repeats,
            )
        )
    return timings


def main() -> None:
    """Print the timings as a table, or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m forge_kernels.bench", description=main.__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls per side")
    parser.add_argument("--tokens", type=int, default=16384, help="rows of the activations")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.tokens < 1:
        parser.error(f"repeats {arguments.repeats} and tokens {arguments.tokens} must be at least 1")
    device = torch.device(arguments.device)
    timings = time_ops(device, repeats=arguments.repeats, tokens=arguments.tokens)
    timings += time_solvers(device, repeats=max(1, arguments.repeats // 3))
    if arguments.json:
        rows = [asdict(timing) | {"ratio": timing.ratio} for timing in timings]
        print(json.dumps({"environment": _describe(device), "timings": rows}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in _describe(device).items()))
    print(f"{'op':22}{'shape':>14}{'ms':>10}{'ratio':>9}  times as long as")
    for timing in timings:
        print(
            f"{timing.op:22}{timing.shape:>14}{timing.op_ms:10.3f}{timing.ratio:9.2f}"
            f"  {timing.instead} ({timing.instead_ms:.3f} ms)"
        )


def _describe(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    return {
        "device": f"{device.type} ({name})",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def _decode_encoded(x_TK: Tensor) -> Tensor:
    return decode(encode(x_TK))


def _time_ms(run: Call) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
