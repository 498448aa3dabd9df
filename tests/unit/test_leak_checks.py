"""A model that sees later tokens, or its neighbours in the batch, is found before its loss counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evaluators import evaluator as evaluating
from evaluators.contract import MXFP4_W4A4
from evaluators.errors import HostError, SubjectError
from evaluators.evaluator import Evaluator
from evaluators.leak_checks import BATCH_TOLERANCE, CAUSALITY_TOLERANCE, batch_gap, causality_gap, find_leak
from evaluators.limits import Limits
from evaluators.sandbox import NoIsolation
from tests.tiny_models import KINDS, Kind, make_tiny_corpus, make_tiny_model, make_tiny_subject, make_tiny_tokens

TOKENS = make_tiny_tokens(4, 32)


class Leaking(nn.Module):
    """Adds a little of another position's or another sequence's state to a block's output."""

    def __init__(self, block: nn.Module, mix: Any) -> None:
        super().__init__()
        self.block = block
        self.mix = mix
        for name in ("attention_type", "layer_type"):
            if hasattr(block, name):
                setattr(self, name, getattr(block, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.block(*args, **kwargs)
        hidden_CLH = out[0] if isinstance(out, tuple) else out
        leaked_CLH = hidden_CLH + 0.05 * self.mix(hidden_CLH)
        return (leaked_CLH, *out[1:]) if isinstance(out, tuple) else leaked_CLH


def from_the_last_token(hidden_CLH: Tensor) -> Tensor:
    return hidden_CLH[:, -1:].expand_as(hidden_CLH)


def from_the_next_token(hidden_CLH: Tensor) -> Tensor:
    return torch.roll(hidden_CLH, -1, dims=1)


def from_the_batch(hidden_CLH: Tensor) -> Tensor:
    return hidden_CLH.mean(dim=0, keepdim=True).expand_as(hidden_CLH)


def leaking(kind: Kind, mix: Any) -> nn.Module:
    model: Any = make_tiny_model(kind)
    model.model.layers[0] = Leaking(model.model.layers[0], mix)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_sound_models_pass(kind: Kind) -> None:
    model = make_tiny_model(kind)
    assert causality_gap(model, TOKENS[0], TOKENS[1]) == 0.0
    assert batch_gap(model, TOKENS) < 1e-5
    assert find_leak(model, TOKENS, check_batches=True) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", [from_the_last_token, from_the_next_token])
def test_later_tokens_are_found(kind: Kind, mix: Any) -> None:
    model = leaking(kind, mix)
    assert causality_gap(model, TOKENS[0], TOKENS[1]) > 10 * CAUSALITY_TOLERANCE
    assert "not causal" in str(find_leak(model, TOKENS, check_batches=False))


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_in_the_batch_are_found(kind: Kind) -> None:
    model = leaking(kind, from_the_batch)
    assert causality_gap(model, TOKENS[0], TOKENS[1]) == 0.0
    gap = batch_gap(model, TOKENS)
    assert gap > BATCH_TOLERANCE, gap


def test_chunks_that_are_too_short_tell_nothing() -> None:
    assert find_leak(leaking("llama", from_the_last_token), TOKENS[:, :3], check_batches=True) is None


def test_a_subject_that_leaks_is_refused_and_a_leak_of_ours_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_tiny_subject()
    corpus = make_tiny_corpus(subject)
    with Evaluator(subject, corpus, MXFP4_W4A4, NoIsolation(), Limits(), tmp_path) as evaluator:
        program = """
from forge_kernels import encode
MECHANISMS = ()
def quantize(session):
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer)))
"""
        result = evaluator.evaluate(program, split="search")
        assert result.outcome.is_scored, result.reason
        monkeypatch.setattr(evaluating, "find_leak", lambda model, chunks_CL, check_batches: "it looks ahead")
        with pytest.raises(SubjectError, match="it looks ahead"):
            evaluator.full_precision_nll("search")
        with pytest.raises(HostError, match="it looks ahead"):
            evaluator.evaluate(program, split="search")


def test_a_chunk_is_scored_the_same_in_any_company(tmp_path: Path) -> None:
    subject = make_tiny_subject()
    corpus = make_tiny_corpus(subject)
    with Evaluator(subject, corpus, MXFP4_W4A4, NoIsolation(), Limits(), tmp_path) as evaluator:
        tokens_CL = corpus.splits["search"]
        together = evaluator._score_subject(tokens_CL)
        assert together == evaluator._score_subject(tokens_CL.flip(0))[::-1]
        assert together[1:] == evaluator._score_subject(tokens_CL[1:])
