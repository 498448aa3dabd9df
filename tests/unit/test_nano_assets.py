"""The shipped subjects hold what every other part relies on: small, loadable, divisible by 32, with disjoint splits."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evaluators.nano.plant import EXPONENT, draw_exponents, plant

NANO = Path(__file__).parents[2] / "evaluators" / "nano"
NAMES = ("nano-llama", "nano-qwen3")
SPLITS = {"calibration": 192, "gate": 24, "search": 128, "confirm": 128, "sealed": 192}
MAX_BYTES = 24e6


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return NANO / request.param


def test_all_assets_fit_their_size() -> None:
    total = sum(path.stat().st_size for name in NAMES for path in (NANO / name).rglob("*") if path.is_file())
    assert total <= MAX_BYTES, f"{total} bytes shipped, at most {MAX_BYTES:.0f}"


def test_every_shape_is_divisible_by_the_block(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 4096
    assert config["tie_word_embeddings"] is True
    for key in ("hidden_size", "intermediate_size", "head_dim"):
        assert config[key] % 32 == 0, key
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_weights_are_stored_in_bfloat16_and_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for name, weight in weights.items():
        assert torch.isfinite(weight).all(), name
        if "_proj" in name:
            assert weight.shape[1] % 32 == 0, name


def test_splits_are_present_distinct_and_in_range(folder: Path) -> None:
    splits = load_file(folder / "splits.safetensors")
    assert {name: tuple(tokens.shape) for name, tokens in splits.items()} == {n: (k, 256) for n, k in SPLITS.items()}
    every = torch.cat(list(splits.values()))
    assert every.dtype == torch.int32
    assert int(every.min()) >= 0
    assert int(every.max()) < 4096
    assert torch.equal(every[:, 0], torch.zeros(len(every), dtype=torch.int32)), "a sequence lacks the begin token"
    assert len(torch.unique(every, dim=0)) == sum(SPLITS.values())


def test_split_file_gives_no_seed_away(folder: Path) -> None:
    with safe_open(folder / "splits.safetensors", framework="pt") as file:
        assert set(file.metadata() or {}) <= {"recipe", "tokens"}


def test_loads_and_scores_its_own_text_at_its_entropy(folder: Path) -> None:
    """Text sampled from the model costs it its entropy: far below what other text or a broken load would cost."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = load_file(folder / "splits.safetensors")["search"][:6].long()
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].double()
    log_probability = torch.log_softmax(logits, -1)
    nll = -log_probability.gather(2, tokens[:, 1:, None]).mean()
    entropy = -(log_probability.exp() * log_probability).sum(-1).mean()
    # Their difference has mean zero; its standard error over 1530 tokens is near 0.05.
    assert abs(float(nll - entropy)) < 0.25, (float(nll), float(entropy))
    assert 1.5 < float(nll) < 3.5


def test_tokenizer_round_trips_and_knows_its_begin_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The river, says the guide, is 4 km wide; nobody crosses it."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 4096
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert len(tokenizer) == 4096


def test_planted_outliers_are_there(folder: Path) -> None:
    """Some columns of a projection are eight times their block's usual size: what the subjects were planted with."""
    found = 0
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "gate_proj.weight", "down_proj.weight")):
            size = weight.float().square().mean(0).sqrt().view(-1, 32)
            found += int((size.amax(1) > 4 * size.median(1).values).sum())
    assert found >= 8


def _tiny_models() -> list[torch.nn.Module]:
    shape = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    return [LlamaForCausalLM(LlamaConfig(**shape)), Qwen3ForCausalLM(Qwen3Config(**shape))]


@pytest.mark.parametrize("index", [0, 1])
def test_planting_keeps_the_function(index: int) -> None:
    model = _tiny_models()[index].to(torch.bfloat16)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    planted = _tiny_models()[index].to(torch.bfloat16)
    plant(planted, share=1.0, seed=0)
    with torch.no_grad():
        before = model.float().eval()(input_ids=tokens, use_cache=False).logits
        after = planted.float().eval()(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    old, new = model.state_dict(), planted.state_dict()
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    assert len(changed) == 2 * (2 + 7), changed


def test_exponents_hit_one_channel_of_the_chosen_blocks() -> None:
    energy = torch.rand(320, generator=torch.Generator().manual_seed(0))
    exponents = draw_exponents(energy, 0.5, torch.Generator().manual_seed(3)).view(-1, 32)
    counts = (exponents != 0).sum(1)
    assert set(counts.tolist()) <= {0, 1}
    assert int(counts.sum()) in (5, 6)
    assert set(exponents.unique().tolist()) == {0.0, float(EXPONENT)}
    shares = [int((draw_exponents(energy, s, torch.Generator().manual_seed(3)) != 0).sum()) for s in (0.0, 0.3, 0.9)]
    assert all(low <= high for low, high in pairwise(shares))
