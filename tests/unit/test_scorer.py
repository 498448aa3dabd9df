"""The loss of a chunk: right, causal, independent of its batch, and honest about what is not finite."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from evaluators import scorer
from evaluators.scorer import head_logits, last_hidden, score
from tests.tiny_models import KINDS, Kind, make_tiny_model, make_tiny_tokens

TOKENS = make_tiny_tokens(7, 40)


def logits_of(model: Any, tokens_CL: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return cast(torch.Tensor, model(input_ids=tokens_CL, use_cache=False).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_models_own_logits(kind: Kind) -> None:
    model = make_tiny_model(kind)
    log_probabilities = logits_of(model, TOKENS).double().log_softmax(dim=-1)[:, :-1]
    expected = -log_probabilities.gather(-1, TOKENS[:, 1:, None]).mean(dim=(1, 2))
    assert score(model, TOKENS, 3) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_soft_cap_on_logits_is_applied() -> None:
    model = make_tiny_model("gemma3", final_logit_softcapping=2.0)
    hidden_CLH = last_hidden(model, TOKENS)
    torch.testing.assert_close(head_logits(model, hidden_CLH[0]), logits_of(model, TOKENS)[0])
    assert float(head_logits(model, hidden_CLH[0]).abs().max()) <= 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_losses_do_not_depend_on_the_batch(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(kind)
    alone = score(model, TOKENS, 1)
    for batch_size in (2, 3, 7, 50):
        assert score(model, TOKENS, batch_size) == pytest.approx(alone, abs=1e-5)
    assert score(model, TOKENS.flip(0), 3)[::-1] == pytest.approx(alone, abs=1e-5)
    assert score(model, TOKENS, 3) == score(model, TOKENS, 3)
    monkeypatch.setattr(scorer, "MAX_LOGITS", 128 * 5)
    assert score(model, TOKENS, 3) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_causal(kind: Kind) -> None:
    model = make_tiny_model(kind)
    changed = TOKENS.clone()
    changed[:, 20:] = make_tiny_tokens(7, 20, seed=9)
    torch.testing.assert_close(last_hidden(model, changed)[:, :20], last_hidden(model, TOKENS)[:, :20])
    assert not torch.allclose(last_hidden(model, changed)[:, 20:], last_hidden(model, TOKENS)[:, 20:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_not_finite_makes_its_chunks_nan(value: float) -> None:
    model = make_tiny_model("llama")
    unused = next(token for token in range(128) if not bool((TOKENS == token).any()))

    def poison(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., unused] = torch.where(args[0][..., 0] > 0, value, 0.0)
        return logits

    cast(Any, model).lm_head.register_forward_hook(poison)
    with torch.no_grad():
        hit = (last_hidden(model, TOKENS)[:, :-1, 0] > 0).any(dim=1)
    losses = score(model, TOKENS[:, :2], 2)
    with torch.no_grad():
        hit = last_hidden(model, TOKENS[:, :2])[:, 0, 0] > 0
    assert 0 < int(hit.sum()) < len(hit)
    assert torch.equal(torch.tensor(losses).isnan(), hit)


def test_two_tokens_are_the_least() -> None:
    assert len(score(make_tiny_model("llama"), TOKENS[:2, :2])) == 2
