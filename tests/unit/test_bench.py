"""The bench: sides are timed alternately, alternatives do the same work, and the document holds what a reader needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from evaluators import bench_models
from evaluators.errors import UserError
from forge.cli import benching
from forge_kernels.bench.column_loop import column_loop_gptq
from forge_kernels.bench.cpu import time_cpu, time_gptq
from forge_kernels.bench.foreign import foreign_fake_quantize
from forge_kernels.bench.timing import Measurement, Times, clock_side_by_side, describe
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.solvers.gptq import gptq


def test_sides_are_timed_alternately_after_one_unmeasured_call() -> None:
    calls: list[str] = []
    times = clock_side_by_side([lambda: calls.append("a"), lambda: calls.append("b")], repeats=3)
    assert "".join(calls) == "ab" * 4
    assert [len(side.samples) for side in times] == [3, 3]


def test_median_spread_and_ratio() -> None:
    times = Times(samples=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert times.median == 3.0
    assert times.spread == pytest.approx(1.0)
    row = Measurement(op="a", shape="1", op_ms=2.0, op_spread=0.0, instead="b", instead_ms=5.0)
    assert row.to_json()["speed"] == 2.5
    assert Measurement(op="a", shape="1", op_ms=2.0, op_spread=0.0).speed is None


def test_the_column_loop_makes_the_codes_of_gptq() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(700, 160, generator=generator) * torch.randn(160, generator=generator).exp()
    moment_KK = x_TK.double().T @ x_TK.double() / 700
    weight_NK = torch.randn(30, 160, generator=generator)
    ours, loop = gptq(weight_NK, moment_KK), column_loop_gptq(weight_NK, moment_KK)
    assert torch.equal(ours.scales_NB, loop.scales_NB)
    assert (ours.codes_NK != loop.codes_NK).float().mean() < 1e-3
    assert abs(time_gptq(20, 96, torch.device("cpu"), repeats=1).error or 0.0) < 1e-4


def test_the_foreign_call_gives_the_values_that_ours_gives() -> None:
    x_MK = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    foreign = foreign_fake_quantize(x_MK)
    assert foreign is not None
    assert torch.equal(foreign() + 0.0, fake_quantize(x_MK))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "time_cpu", lambda repeats: time_cpu(side=64, tokens=64, inputs=64, repeats=repeats))
    monkeypatch.setattr(benching, "time_scoring", lambda repeats: bench_models.time_scoring(chunks=1, repeats=1))


@pytest.mark.usefixtures("small")
def test_the_document_names_device_versions_and_every_op(tmp_path: Path) -> None:
    document = benching.bench_kernels("cpu", out=tmp_path / "bench.json", repeats=1)
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(json.dumps(document))
    ops = [row["op"] for row in document["measurements"]]
    for op in ("encode + decode", "fake_quantize even", "block swap", "hadamard 32", "gptq", "scoring in W4A4"):
        assert op in ops
    assert all(row["op_ms"] > 0 and (row["speed"] is None or row["speed"] > 0) for row in document["measurements"])
    console = Console(width=200, record=True, quiet=True)
    console.print(benching.bench_table(document))
    assert set(describe(torch.device("cpu"))) == {"device", "threads", "torch", "triton", "cuda", "python", "date"}


def test_what_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown device 'tpu'; give cpu or cuda"):
        benching.bench_kernels("tpu", out=None, repeats=1)
    with pytest.raises(UserError, match="repeats is 0; give at least 1"):
        benching.bench_kernels("cpu", out=None, repeats=0)
    with pytest.raises(UserError, match=r"there is no folder .*/missing; make it first"):
        benching.bench_kernels("cpu", out=tmp_path / "missing" / "bench.json", repeats=1)
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        benching.bench_kernels("cpu", out=tmp_path, repeats=1)
    assert list(tmp_path.iterdir()) == []
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="this torch sees no CUDA device; give --device cpu"):
            benching.bench_kernels("cuda", out=None, repeats=1)
