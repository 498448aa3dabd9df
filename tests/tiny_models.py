"""Tiny random subjects and corpora for tests: every supported architecture, made in memory in a fraction of a second.

The models have 2 blocks, hidden size 64 (qwen2: 128), 4 query heads and 2 key-value heads of 32, so that the heads
together are wider than the residual stream, 96 MLP channels and a vocabulary of 128. Norm gains, biases and head are
random and not their usual 1 and 0, so that a fold which forgets one of them shows.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from evaluators.corpora import Corpus, corpus_from_tensors
from evaluators.corpus_spec import SPLIT_NAMES, SplitName
from evaluators.subjects import Subject, subject_from_model

Kind = Literal["llama", "qwen2", "qwen3", "mistral", "gemma3"]
KINDS: tuple[Kind, ...] = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
VOCAB_SIZE = 128
BOS_ID = 1


def make_tiny_config(kind: Kind, *, blocks: int = 2, tied: bool = False, **changes: Any) -> Any:
    """Return a transformers config of the kind; `changes` overrides any of its fields."""
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if kind == "llama":
        fields["attention_bias"] = True
        fields["mlp_bias"] = True
    if kind == "mistral":
        fields["sliding_window"] = 24
    if kind == "gemma3":
        fields |= {"sliding_window": 16, "query_pre_attn_scalar": 32}
        fields["layer_types"] = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(blocks)]
    if kind == "qwen2":
        fields["hidden_size"] = 128  # its heads are always hidden_size / num_heads wide
        del fields["head_dim"]
    fields |= changes
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma3": "Gemma3Text"}[kind]
    return getattr(transformers, f"{name}Config")(**fields)


def make_tiny_model(
    kind: Kind = "llama", *, seed: int = 0, blocks: int = 2, tied: bool = False, **changes: Any
) -> nn.Module:
    """Return a random causal LM of the kind, float32, eval, without gradients."""
    import transformers

    config = make_tiny_config(kind, blocks=blocks, tied=tied, **changes)
    generator = torch.Generator().manual_seed(seed)
    class_name = type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    model: nn.Module = getattr(transformers, class_name)(config)
    model.eval().requires_grad_(False)
    offset = 1.0 if kind == "gemma3" else 0.0
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        elif parameter.ndim == 1:
            parameter.copy_((0.3 * noise).exp() - offset)
        elif "embed_tokens" in name:
            parameter.copy_(noise if kind != "gemma3" else noise / 8)
        else:
            parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model


def make_tiny_subject(
    kind: Kind = "llama", *, seed: int = 0, blocks: int = 2, tied: bool = False, **changes: Any
) -> Subject:
    """Return `make_tiny_model` as a subject named ``tiny-<kind>``, without a tokenizer."""
    model = make_tiny_model(kind, seed=seed, blocks=blocks, tied=tied, **changes)
    return subject_from_model(model, name=f"tiny-{kind}")


def make_tiny_tokens(num_chunks: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Return random tokens of the tiny vocabulary: (num_chunks, length) int64, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_chunks, length), generator=generator)


def make_tiny_tokenizer() -> Any:
    """Return a tokenizer whose tokens are single printable ASCII characters and newline, ids below 128."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {"<pad>": 0, "<s>": BOS_ID, "</s>": 2, "<unk>": 3} | {c: 4 + i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def make_tiny_corpus(
    subject: Subject,
    *,
    length: int = 32,
    counts: dict[SplitName, int] | None = None,
    seed: int = 0,
) -> Corpus:
    """Return a corpus of random tokens for a tiny subject: by default 6, 2, 4, 2 and 3 chunks of 32 tokens."""
    sizes: dict[SplitName, int] = {"calibration": 6, "gate": 2, "search": 4, "confirm": 2, "sealed": 3}
    sizes |= counts or {}
    tokens = make_tiny_tokens(sum(sizes.values()), length, seed=seed)
    parts = torch.split(tokens, [sizes[name] for name in SPLIT_NAMES])
    return corpus_from_tensors(dict(zip(SPLIT_NAMES, parts, strict=True)), subject, source="random tokens")
