"""The bench of isolation: the same work on every side, and figures that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluators import bench
from evaluators.bench_sides import SIDES, STAGES
from tests.tiny_models import make_tiny_corpus, make_tiny_subject

PROGRAM = """
from forge_kernels import encode
def quantize(session):
    for group in session.groups:
        session.second_moment(group)
        for layer in group.layers:
            session.install(layer, encode(session.weight(layer)))
"""
SEES_ITS_PLACE = """
import os
from forge_kernels import encode
def quantize(session):
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer), scale_rule="even" if os.getpid() < 9 else "search"))
"""


def test_every_side_does_the_same_work_and_its_times_add_up() -> None:
    subject = make_tiny_subject("llama")
    times = bench.measure(subject, make_tiny_corpus(subject), {"rtn": PROGRAM}, sides=SIDES, rounds=2, chunks=4)
    for name, side in times.items():
        assert len(side.round_wall_s) == len(side.round_cpu_s) == len(side.programs_s["rtn"]) == 2
        assert sum(side.programs_s["rtn"]) <= sum(side.round_wall_s), f"{name}: a round ends with its evaluations"
        inside = sum(seconds for stage, seconds in side.stages_s.items() if not stage.startswith("beside"))
        assert 0 < inside <= sum(side.programs_s["rtn"]), f"{name}: stages of {inside} s are longer than the whole"
        assert side.stages_s["session calls"] > 0, f"{name}: session calls were not timed"
        assert side.stages_s["scoring"] > 0, f"{name}: scoring was not timed"
    assert times["in process"].stages_s["copying tensors, on this side"] == 0
    assert times["template"].stages_s["copying tensors, on this side"] > 0
    # Two imports of torch, against one and two forks.
    assert sum(times["direct"].round_cpu_s) > sum(times["in process"].round_cpu_s)
    text = "\n".join(bench.report(times))
    for word in (*SIDES, "rtn", *STAGES, "the rest"):
        assert word in text


def test_programs_that_do_other_work_elsewhere_are_refused() -> None:
    subject = make_tiny_subject("llama")
    with pytest.raises(RuntimeError, match="another score"):
        bench.measure(subject, make_tiny_corpus(subject), {"odd": SEES_ITS_PLACE}, sides=SIDES[:2], rounds=1, chunks=4)


def test_it_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "rtn.py").write_text(PROGRAM)
    subject = make_tiny_subject("llama")
    monkeypatch.setattr(bench, "load_subject", lambda _: subject)
    monkeypatch.setattr(bench, "load_corpus", lambda *_: make_tiny_corpus(subject))
    arguments = ["--programs", str(tmp_path), "--rounds", "1", "--sides", "in process", "--json"]
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    bench.main()
    document = json.loads(capsys.readouterr().out)
    assert document["environment"]["evaluations"] == "1 x 1 per side"
    assert list(document["sides"]) == ["in process"]
