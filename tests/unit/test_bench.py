"""The bench runs, pairs every op with an alternative, and prints both a table and JSON."""

from __future__ import annotations

import json

import pytest

from forge_kernels import bench


def test_ratios_are_of_medians_taken_alternately() -> None:
    calls: list[str] = []
    timing = bench.compare("a", lambda: calls.append("a"), "b", lambda: calls.append("b"), shape="1", repeats=3)
    assert "".join(calls) == "ab" * 4
    assert timing.ratio == timing.op_ms / timing.instead_ms


@pytest.mark.parametrize("as_json", [False, True])
def test_it_prints_device_versions_and_every_op(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--device", "cpu", "--repeats", "1", "--tokens", "64"]
    monkeypatch.setattr(bench, "SOLVER_SHAPES", ((8, 64),))
    monkeypatch.setattr("sys.argv", [*arguments, "--json"] if as_json else arguments)
    bench.main()
    printed = capsys.readouterr().out
    for word in ("torch", "fake_quantize even", "encode even", "hadamard 32", "block matrices", "gptq", "copy"):
        assert word in printed
    if as_json:
        document = json.loads(printed)
        assert all(row["ratio"] > 0 for row in document["timings"])
        assert document["environment"]["device"].startswith("cpu")
