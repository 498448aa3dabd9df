"""Medians of two sides timed alternately, and what is said beside them.

On a GPU a call is captured into a CUDA graph of several, each on inputs of its own where the caches could hold them, and replays
are timed with events: what is compared is the device's work, not how fast Python launches it. What cannot be captured, because it
waits for the device, is timed by the clock with the device idle before and after. On a CPU calls are timed by the clock.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One op beside what one would call instead, or beside its floor.

    op_ms, instead_ms: medians. op_spread, instead_spread: quartile distance over median. floor: what bounds the op, and `share`
    how much of that bound it reaches (1 is the bound itself). error: relative to float64, where there is something to compare.
    """

    op: str
    shape: str
    op_ms: float
    op_spread: float
    instead: str = ""
    instead_ms: float | None = None
    instead_spread: float | None = None
    floor: str = ""
    share: float | None = None
    error: float | None = None

    @property
    def speed(self) -> float | None:
        """How many times as fast as the alternative the op is."""
        return None if self.instead_ms is None else self.instead_ms / self.op_ms

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the ratio."""
        return asdict(self) | {"speed": self.speed}


def compared(op: str, shape: str, times: Times, instead: str, others: Times, **rest: Any) -> Measurement:
    """Return the measurement of an op beside what one would call instead."""
    return Measurement(
        op=op,
        shape=shape,
        op_ms=times.median,
        op_spread=times.spread,
        instead=instead,
        instead_ms=others.median,
        instead_spread=others.spread,
        **rest,
    )


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of repeated calls."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        if len(self.samples) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median


def clock_side_by_side(sides: Sequence[Call], *, repeats: int) -> list[Times]:
    """Time the sides alternately by the clock, after one unmeasured call of each; the device is idle before and after each."""
    for side in sides:
        side()
    samples: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for index, side in enumerate(sides):
            _wait()
            start = time.perf_counter()
            side()
            _wait()
            samples[index].append((time.perf_counter() - start) * 1e3)
    return [Times(samples=tuple(taken)) for taken in samples]


def replay_side_by_side(sides: Sequence[Sequence[Call]], *, repeats: int = 25) -> list[Times]:
    """Capture each side's calls into a CUDA graph and time replays alternately; times are per call."""
    graphs = []
    for calls in sides:
        for call in calls:
            call()  # compiles, and lets the library choose
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        graphs.append(graph)
    samples: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for index, graph in enumerate(graphs):
            samples[index].append(_event_ms(graph.replay) / len(sides[index]))
    return [Times(samples=tuple(taken)) for taken in samples]


def time_by_events(call: Call, *, repeats: int) -> Times:
    """Time single calls on the device, after one unmeasured."""
    call()
    return Times(samples=tuple(_event_ms(call) for _ in range(repeats)))


def _event_ms(call: Call) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def describe(device: torch.device) -> dict[str, str]:
    """Return what the figures depend on: hardware, threads, versions."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda) if is_cuda else "none",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
