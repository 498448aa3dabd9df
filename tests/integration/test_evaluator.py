"""Evaluations in real workers: isolated, ended at a limit, and never in this process."""

from __future__ import annotations

import sys
from pathlib import Path

from evaluators.contract import MXFP4_W4A4
from evaluators.corpora import corpus_from_tensors
from evaluators.evaluator import Evaluator
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox import BubblewrapIsolation
from tests.tiny_models import make_tiny_subject, make_tiny_tokens

WALK = """
import sys
from forge_kernels import Hadamard, encode, transform_weight
MECHANISMS = ()
sys.modules["left_a_mark"] = sys
def quantize(session):
    print("walking")
    session.log("from the log")
    steps = (Hadamard(size=32),)
    for group in session.groups:
        moment = session.second_moment(group)
        assert moment.shape == (group.num_inputs, group.num_inputs)
        for layer in group.layers:
            encoded = encode(transform_weight(steps, session.weight(layer)), scale_rule="search")
            session.install(layer, encoded, transform=steps)
            assert 0 < session.output_error(layer, encoded, transform=steps) < 0.2
    assert session.gate_loss() > 0
"""
GREEDY = """
from forge_kernels import encode
MECHANISMS = ()
def quantize(session):
    for layer in session.layers * 100:
        session.install(layer, encode(session.weight(layer)))
        try:
            session.second_moment(session.groups[-1])
        except Exception:
            pass
"""


def test_programs_are_evaluated_in_the_sandbox(tmp_path: Path) -> None:
    subject = make_tiny_subject()
    chunks = {"calibration": 4, "gate": 2, "search": 3, "confirm": 2, "sealed": 2}
    splits = {name: make_tiny_tokens(count, 24, seed=seed) for seed, (name, count) in enumerate(chunks.items())}
    corpus = corpus_from_tensors(splits, subject, source="random tokens")  # type: ignore[arg-type]
    with Evaluator(subject, corpus, MXFP4_W4A4, BubblewrapIsolation(), Limits(wall_s=120.0), tmp_path) as evaluator:
        result = evaluator.evaluate(WALK, split="search")
        assert (result.outcome, result.reason, result.sandbox) == (Outcome.SCORED, "", "bubblewrap")
        assert "from the log" in result.program_log
        assert "walking" in result.program_log
        assert "left_a_mark" not in sys.modules
        assert [path.name for path in tmp_path.iterdir()] == [f"{result.artifact_hash}.safetensors"]

        smoke = evaluator.smoke(WALK)
        assert smoke.outcome is Outcome.SCORED
        assert smoke.evidence.layers.keys() == result.evidence.layers.keys()
        assert smoke.evidence.line_hits["quantize"] > 1
        assert not result.evidence.line_hits

        greedy = evaluator.evaluate(GREEDY, split="search")
        assert (greedy.outcome, greedy.chunk_nll) == (Outcome.OVER_METERED, ())
        assert greedy.metered_tokens > MXFP4_W4A4.max_forward_passes * 4 * 24
