"""Run the timings and show them: ``quantforge bench kernels``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from evaluators.bench_models import time_decoder, time_scoring
from evaluators.errors import UserError
from forge_kernels.bench.cpu import time_cpu
from forge_kernels.bench.gpu import time_gpu
from forge_kernels.bench.timing import Measurement, describe


def bench_kernels(device_name: str | None, *, out: Path | None, repeats: int) -> dict[str, Any]:
    """Time everything on a device, print a line as each row is done, and return the whole; keep it in `out` if given.

    Raises:
        UserError: a device that is not there, or an `out` whose folder is not.
    """
    device = _device(device_name)
    if repeats < 1:
        raise UserError(f"repeats is {repeats}; give at least 1")
    if out is not None:
        require_writable(out)
    progress = Console(stderr=True)
    document: dict[str, Any] = {"environment": describe(device), "repeats": repeats, "measurements": []}
    for measurement in _all(device, repeats):
        progress.print(_line(measurement), highlight=False)
        document["measurements"].append(measurement.to_json())
    if out is not None:
        out.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return document


def bench_table(document: dict[str, Any]) -> Table:
    """Return the document as a table."""
    title = ", ".join(f"{name} {value}" for name, value in document["environment"].items())
    table = Table(title=title, title_justify="left")
    for column in ("op", "shape", "ms", "spread", "times as fast as", "share of floor", "error"):
        table.add_column(column, justify="left" if column in ("op", "shape", "times as fast as") else "right")
    for row in document["measurements"]:
        speed = "" if row["speed"] is None else f"{row['speed']:.2f} {row['instead']} ({row['instead_ms']:.4g} ms)"
        table.add_row(
            row["op"],
            row["shape"],
            f"{row['op_ms']:.4g}",
            f"{row['op_spread']:.1%}",
            speed,
            "" if row["share"] is None else f"{row['share']:.0%} {row['floor']}",
            "" if row["error"] is None else f"{row['error']:.1e}",
        )
    return table


def _all(device: torch.device, repeats: int) -> Iterator[Measurement]:
    if device.type == "cuda":
        yield from time_gpu(repeats=repeats)
        yield from time_decoder(repeats=max(3, repeats // 5))
    else:
        yield from time_cpu(repeats=repeats)
        yield time_scoring(repeats=max(3, repeats // 2))


def require_writable(out: Path) -> None:
    """Find out before minutes of work whether there will be a place for the result.

    Raises:
        UserError: there is none.
    """
    if not out.parent.is_dir():
        raise UserError(f"{out} cannot be written: there is no folder {out.parent}; make it first")
    try:
        existed = out.exists()
        out.open("a").close()
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; give the path of a file") from error
    if not existed:
        out.unlink()


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"unknown device {name!r}; give cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("this torch sees no CUDA device; give --device cpu")
    return torch.device(name)


def _line(row: Measurement) -> str:
    parts = [f"{row.op}, {row.shape}: {row.op_ms:.4g} ms"]
    if row.speed is not None:
        parts.append(f"{row.speed:.2f} times as fast as {row.instead}")
    if row.share is not None:
        parts.append(f"{row.share:.0%} of {row.floor}")
    return ", ".join(parts)
