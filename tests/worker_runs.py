"""Programs in real workers, served by one fake layer: what tests of the sandbox share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evaluators.errors import ContractError, ProgramError
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.session import Group, Layer
from evaluators.wire import Hello, encode_hello, encode_value
from evaluators.worker_host import WorkerHost, WorkerReport

WALL_S = 6.0
LIMITS = Limits(
    wall_s=WALL_S, memory_bytes=1 << 30, processes=60, output_bytes=1 << 20, file_bytes=1 << 26, open_files=256
)
LAYER = Layer(name="blocks.0.q", block=0, role="q", group="blocks.0.qkv", num_outputs=8, num_inputs=32)
GROUP = Group(name="blocks.0.qkv", block=0, role="qkv", layers=(LAYER,), num_inputs=32)


class FakeServer:
    """Serves one layer without a model; keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], list[Tensor]]] = []

    def dispatch(self, op: str, args: dict[str, Any], tensors: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        self.calls.append((op, args, list(tensors)))
        if op == "hello":
            return encode_hello(Hello((LAYER,), (GROUP,), (), "cpu", 11)), []
        if op == "weight":
            if args["layer"] != LAYER.name:
                raise ContractError(f"unknown layer {args['layer']!r}")
            return {}, [torch.arange(256, dtype=torch.float32).reshape(8, 32)]
        if op == "inputs":
            raise ProgramError("spent 10 tokens, may spend 9", Outcome.OVER_METERED)
        if op == "second_moment":
            raise ValueError("a fault of the server")
        if op in ("gate_loss", "output_error"):
            return encode_value(2.5), []
        return {}, []

    def logged(self) -> list[str]:
        return [args["message"] for op, args, _ in self.calls if op == "log"]


def command_lines() -> list[bytes]:
    """Return the command lines of all processes that this one may see."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def run(host: WorkerHost, body: str, *, head: str = "import os, sys, time") -> tuple[WorkerReport, FakeServer]:
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    server = FakeServer()
    return host.run(f"{head}\ndef quantize(session):\n{indented}\n", server), server


def quick_first(cases: Collection[str], quick: Sequence[str]) -> list[Any]:
    """Parameters of which all but the quick ones are marked slow."""
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.slow) for case in cases]
