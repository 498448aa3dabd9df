"""Whole evaluations of programs on a tiny subject, from source to score; the worker is stood in for."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evaluators.artifact import Artifact, ArtifactError
from evaluators.contract import MXFP4_W4A4
from evaluators.corpora import Corpus, corpus_from_tensors
from evaluators.evaluator import Evaluator
from evaluators.limits import Limits
from evaluators.results import Outcome
from evaluators.sandbox import NoIsolation
from evaluators.scorer import score
from evaluators.session_server import draw_chunks
from evaluators.subjects import Subject
from tests.session_loopback import LoopbackHost
from tests.tiny_models import make_tiny_subject, make_tiny_tokens

RTN = """
from forge_kernels import encode
MECHANISMS = ()
def quantize(session):
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer)))
"""
WALK = """
from forge_kernels import Hadamard, encode, transform_weight
MECHANISMS = ()
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
RESIGN = "def quantize(session):\n    session.install('blocks.0.q', session.weight('blocks.0.q'))\n"
FORGETFUL = RTN.replace("session.layers:", "session.layers[:-1]:")
CRASH = "def quantize(session):\n    raise ZeroDivisionError('on purpose')\n"
GREEDY = (
    RTN
    + """
    for _ in range(200):
        for layer in session.layers:
            session.install(layer, encode(session.weight(layer)))
            try:
                session.gate_loss()
                session.second_moment(session.groups[-1])
            except Exception:
                pass
"""
)
# Finite weights at the edge of float32, so that the model overflows.
HUGE = """
import torch
from forge_kernels import Encoded, encode
def quantize(session):
    for layer in session.layers:
        encoded = encode(session.weight(layer))
        if layer.role == "down":
            encoded = Encoded(codes_NK=encoded.codes_NK, scales_NB=torch.full_like(encoded.scales_NB, 252))
        session.install(layer, encoded)
"""


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_tiny_subject("llama", blocks=3)


@pytest.fixture(scope="module")
def corpus(subject: Subject) -> Corpus:
    splits = {
        name: make_tiny_tokens(chunks, 24, seed=seed)
        for seed, (name, chunks) in enumerate(
            [("calibration", 6), ("gate", 3), ("search", 5), ("confirm", 4), ("sealed", 4)]
        )
    }
    return corpus_from_tensors(splits, subject, source="random tokens")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def evaluator(subject: Subject, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    folder = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluators.evaluator.WorkerHost", LoopbackHost)
        return Evaluator(subject, corpus, MXFP4_W4A4, NoIsolation(), Limits(), folder, calibration_chunks=4)


def test_a_program_is_scored_from_its_artifact(evaluator: Evaluator, subject: Subject, corpus: Corpus) -> None:
    result = evaluator.evaluate(WALK, split="search", draw=1, seed=7)
    assert (result.outcome, result.reason) == (Outcome.SCORED, "")
    assert (result.split, result.draw, result.seed) == ("search", 1, 7)
    assert len(result.chunk_nll) == 5
    assert result.tokens_per_chunk == 23
    assert result.reference_chunk_nll == ()
    assert (result.contract, result.contract_class, result.effective_bits) == ("mxfp4-w4a4/1", "online", 4.25)
    assert (result.route, result.device, result.sandbox) == (
        f"float32 ({len(subject.map.layers)} layers)",
        "cpu",
        "none",
    )
    assert set(result.versions) == {"torch", "transformers", "python", "quantforge"}
    assert 0 < result.metered_tokens <= 8 * 4 * 24
    assert "from the log" in result.program_log
    assert "walking" in result.program_log
    assert result.wall_s > 0
    layers = result.evidence.layers
    assert list(layers) == [layer.name for layer in subject.map.layers]
    assert layers["blocks.1.up"]["transform"] == ["hadamard:32"]
    assert layers["blocks.1.up"]["bits"] == 4.25
    assert layers["blocks.1.up"]["route"] == "float32"
    assert 0.001 < layers["blocks.1.up"]["weight_error"] < 0.03
    operations = [event["op"] for event in result.evidence.events]
    assert operations[:3] == ["second_moment", "weight", "install"]
    assert operations[-1] == "gate_loss"
    assert [event["index"] for event in result.evidence.events] == list(range(len(operations)))
    assert result.artifact_hash is not None
    assert evaluator.score_artifact(result.artifact_hash, "search") == result.chunk_nll
    full = evaluator.full_precision_nll("search")
    assert full == pytest.approx(score(subject.model, corpus.splits["search"]))
    assert result.chunk_nll != full


def test_equal_runs_are_equal_and_a_reference_is_scored_beside(evaluator: Evaluator) -> None:
    first = evaluator.evaluate(RTN, split="search")
    again = evaluator.evaluate(RTN, split="confirm", draw=3, seed=1, reference_artifact=first.artifact_hash)
    assert again.artifact_hash == first.artifact_hash
    assert again.chunk_nll == again.reference_chunk_nll
    assert len(again.chunk_nll) == 4
    assert again.evidence.layers == first.evidence.layers
    assert first.contract_class == "folded"
    rows = evaluator.error_map(first.artifact_hash or "")
    assert [row.layer for row in rows] == list(first.evidence.layers)
    assert all(0 < row.weight < 0.1 and 0 < row.activation < 0.1 and 0 < row.joint < 0.2 for row in rows)


@pytest.mark.parametrize(
    ("source", "outcome", "reason"),
    [
        (RESIGN, Outcome.CONTRACT, "not Encoded"),
        (FORGETFUL, Outcome.CONTRACT, r"blocks\.2\.down"),
        (CRASH, Outcome.CRASHED, "on purpose"),
        (GREEDY, Outcome.OVER_METERED, "subject-forward tokens"),
        (HUGE, Outcome.NON_FINITE, "not finite on 5 of 5 chunks"),
        ("this is no Python", Outcome.CRASHED, "SyntaxError"),
    ],
)
def test_failures_of_a_program_are_outcomes(evaluator: Evaluator, source: str, outcome: Outcome, reason: str) -> None:
    result = evaluator.evaluate(source, split="search")
    assert result.outcome is outcome
    assert re.search(reason, result.reason)
    assert result.chunk_nll == ()
    assert result.nll is None
    assert result.sandbox == "none"


def test_smoke_gives_layer_digests_that_knock_outs_can_be_compared_by(evaluator: Evaluator) -> None:
    kept = sorted(evaluator.artifacts_dir.iterdir())
    plain, walked, again = (evaluator.smoke(source) for source in (RTN, WALK, WALK))
    assert (plain.outcome, walked.outcome) == (Outcome.SCORED, Outcome.SCORED)
    assert plain.chunk_nll == ()
    assert {layer.split(".")[1] for layer in plain.evidence.layers} == {"0", "1"}
    assert walked.evidence.layers == again.evidence.layers
    assert all(
        plain.evidence.layers[name]["digest"] != walked.evidence.layers[name]["digest"]
        for name in plain.evidence.layers
    )
    assert plain.artifact_hash is None
    assert sorted(evaluator.artifacts_dir.iterdir()) == kept
    assert evaluator.smoke(HUGE).outcome is Outcome.NON_FINITE
    assert evaluator.smoke(FORGETFUL).outcome is Outcome.CONTRACT


def test_reads_of_the_sealed_split_are_counted_and_failures_do_not_read(evaluator: Evaluator, corpus: Corpus) -> None:
    before = len(corpus.sealed_readers)
    evaluator.evaluate(CRASH, split="sealed")
    assert len(corpus.sealed_readers) == before
    result = evaluator.evaluate(RTN, split="sealed")
    assert len(result.chunk_nll) == 4
    assert len(corpus.sealed_readers) == before + 1
    assert (result.artifact_hash or "") in corpus.sealed_readers[-1]


def test_unknown_splits_and_artifacts_are_refused_before_anything_runs(evaluator: Evaluator) -> None:
    with pytest.raises(ValueError, match="known: search"):
        evaluator.evaluate(RTN, split="calibration")  # type: ignore[arg-type]
    for name in ("0" * 64, "../../etc/passwd", ""):
        with pytest.raises(ArtifactError):
            evaluator.evaluate(RTN, split="search", reference_artifact=name)


def test_an_artifact_name_cannot_leave_its_folder(evaluator: Evaluator, tmp_path: Path) -> None:
    result = evaluator.evaluate(WALK, split="search")
    assert result.artifact_hash is not None
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((evaluator.artifacts_dir / f"{result.artifact_hash}.safetensors").read_bytes())
    (evaluator.artifacts_dir / f"{'0' * 64}.safetensors").symlink_to(outside)
    relative = os.path.relpath(outside, evaluator.artifacts_dir).removesuffix(".safetensors")
    for name in (relative, str(outside.with_suffix("")), "", "..", result.artifact_hash.upper()):
        assert not evaluator.has_artifact(name), name
        with pytest.raises(ArtifactError, match="no artifact hash"):
            evaluator.load_artifact(name)
    with pytest.raises(ArtifactError, match="was changed"):
        evaluator.load_artifact("0" * 64)


def test_a_changed_artifact_file_is_noticed(evaluator: Evaluator, tmp_path: Path) -> None:
    result = evaluator.evaluate(RTN, split="search")
    path = evaluator.artifacts_dir / f"{result.artifact_hash}.safetensors"
    original = path.read_bytes()
    try:
        artifact = Artifact.load(path)
        replace(artifact, contract="another").save(path)
        with pytest.raises(ArtifactError, match="was changed"):
            evaluator.load_artifact(result.artifact_hash or "")
    finally:
        path.write_bytes(original)


def test_a_draw_is_a_sorted_choice_that_its_number_fixes() -> None:
    chunks_CL = torch.arange(20).view(10, 2)
    draws = [draw_chunks(chunks_CL, 6, draw) for draw in range(4)]
    for chosen in draws:
        assert chosen.shape == (6, 2)
        assert torch.equal(chosen, chosen.sort(dim=0).values)
        assert len(set(chosen.flatten().tolist())) == 12
    assert torch.equal(draws[2], draw_chunks(chunks_CL, 6, 2))
    assert any(not torch.equal(draws[0], other) for other in draws[1:])
    assert draw_chunks(chunks_CL, 10, 5) is chunks_CL
