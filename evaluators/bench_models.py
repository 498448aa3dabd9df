"""Whole models timed: a decoder of Qwen3-4B's shapes on a GPU, and a shipped subject scored on the CPU.

The decoder has 36 blocks, random bfloat16 weights, hidden size 2560, 32 heads and 8 key-value heads of 128, an MLP of 9728,
and no head; it reads 8 sequences of 2048 tokens. W4A4 with Hadamard 32 in front of every projection and nearest codes runs
through the layers that score, beside the same model in bfloat16, and beside eager fake quantization of the same codes.

The subject is scored on its own text in W4A4 (nearest codes, no transform), beside full precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from evaluators.corpora import load_corpus
from evaluators.corpus_spec import SampledCorpus
from evaluators.installs import Install
from evaluators.quantized_linear import QuantizedLinear, share_activations
from evaluators.scorer import score
from evaluators.subjects import load_subject
from evaluators.two_streams import TwoStreamModel
from forge_kernels.bench.timing import Measurement, clock_side_by_side, compared
from forge_kernels.ops.encode import encode
from forge_kernels.ops.fake_quantize import fake_quantize_reference
from forge_kernels.ops.hadamard import hadamard
from forge_kernels.rules import ActivationRule
from forge_kernels.transforms import Hadamard

QWEN3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
}
_GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)


class _EagerLinear(nn.Module):
    """What one writes without kernels: rotate, fake-quantize and multiply in eager operations."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__()
        self.weight_NK = weight_NK

    def forward(self, x: Tensor) -> Tensor:
        values = fake_quantize_reference(hadamard(x.to(torch.float32), 32))
        return functional.linear(values.to(torch.bfloat16), self.weight_NK)


def time_decoder(
    *, blocks: int = 36, sequences: int = 8, tokens: int = 2048, repeats: int = 5
) -> Iterator[Measurement]:
    """Yield the forward pass of the decoder in W4A4 beside bfloat16, and eager fake quantization beside bfloat16."""
    body = _random_decoder(blocks)
    tokens_CL = torch.randint(0, QWEN3_4B["vocab_size"], (sequences, tokens), device="cuda")
    plain = _projections(body)
    quantized, eager = _quantized(plain)
    sides = []
    for projections in (plain, quantized, eager):
        sides.append(partial(_forward, body, projections, tokens_CL))
    with torch.no_grad():
        bf16, ours, fake = clock_side_by_side(sides, repeats=repeats)
    shape = f"{blocks} blocks, {sequences} x {tokens}"
    for op, times in (("decoder W4A4, hadamard 32", ours), ("decoder, eager fake quantization", fake)):
        yield compared(op, shape, times, "decoder bf16", bf16)


def time_scoring(name: str = "nano-llama", *, chunks: int = 48, repeats: int = 5) -> Measurement:
    """Return how long a shipped subject is scored in W4A4; the alternative is its full-precision forward on the same tokens."""
    subject = load_subject(name)
    corpus = load_corpus(SampledCorpus(kind="sampled"), subject)
    tokens_CL = corpus.splits["search"][:chunks]
    streams = TwoStreamModel(subject.pristine().map)
    for layer in streams.map.layers:
        weight_NK = streams.map.linear(layer).weight.detach()
        install = Install(weight=encode(weight_NK), transform=(), activation=ActivationRule(), low_rank=None)
        streams.install(layer.name, QuantizedLinear(install, streams.map.linear(layer).bias))

    def quantized() -> None:
        with streams.fully_quantized() as model:
            score(model, tokens_CL, 1)

    mine, full = clock_side_by_side([quantized, partial(score, subject.model, tokens_CL, 1)], repeats=repeats)
    return compared("scoring in W4A4", f"{name}, {len(tokens_CL)} x {tokens_CL.shape[1]}", mine, "full precision", full)


def _random_decoder(blocks: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(**QWEN3_4B, num_hidden_layers=blocks, tie_word_embeddings=True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return cast(Any, Qwen3Model)(config).eval()  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(default)


Projections = dict[tuple[int, str, str], nn.Module]


def _projections(body: nn.Module) -> Projections:
    """Return the linear layers by block, part and name."""
    found: Projections = {}
    for index, block in enumerate(cast(Any, body).layers):
        for part, names in _GROUPS:
            for name in names:
                found[index, part, name] = getattr(getattr(block, part), name)
    return found


def _quantized(plain: Projections) -> tuple[Projections, Projections]:
    """Return the layers that score, and eager ones of the same codes."""
    ours: Projections = {}
    eager: Projections = {}
    for key, linear in plain.items():
        weight_NK = cast(Tensor, linear.weight).detach()
        encoded = encode(hadamard(weight_NK.to(torch.float32), 32))
        install = Install(weight=encoded, transform=(Hadamard(size=32),), activation=ActivationRule(), low_rank=None)
        module = QuantizedLinear(install, None, device="cuda")
        ours[key] = module
        eager[key] = _EagerLinear(module.weight_NK.to(torch.bfloat16))
    for index in {index for index, _, _ in plain}:
        for part, names in _GROUPS:
            share_activations(cast(QuantizedLinear, ours[index, part, name]) for name in names)
    return ours, eager


def _forward(body: nn.Module, projections: Projections, tokens_CL: Tensor) -> None:
    for (index, part, name), module in projections.items():
        setattr(getattr(cast(Any, body).layers[index], part), name, module)
    body(input_ids=tokens_CL, use_cache=False)
