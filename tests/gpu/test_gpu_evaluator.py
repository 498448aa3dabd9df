"""A model scored on a GPU, through the kernels, against the same artifact scored on the CPU."""

from __future__ import annotations

import pytest
import torch

from evaluators.bench_models import QWEN3_4B
from evaluators.corpora import load_corpus
from evaluators.corpus_spec import SampledCorpus
from evaluators.installs import Install
from evaluators.quantized_linear import QuantizedLinear
from evaluators.scorer import score
from evaluators.subjects import load_subject
from evaluators.two_streams import TwoStreamModel
from forge_kernels.ops.encode import encode
from forge_kernels.rules import CODE_RULES, ActivationRule, CodeRule, LowRank
from forge_kernels.transforms import BlockMatrix, Diagonal, Hadamard, Transform, transform_weight

pytestmark = pytest.mark.gpu

BOUND = 0.015
"""Nats per token between mean losses over 24 sequences. Sums are ordered differently, and what moves across a tie moves a whole
code: on the CPU alone, noise of 1e-6 on the embedding moves these losses by up to 0.006 (standard deviation 0.003)."""


def transforms_of(num_inputs: int) -> dict[str, Transform]:
    generator = torch.Generator().manual_seed(num_inputs)
    noise = 0.02 * torch.randn(num_inputs // 32, 32, 32, generator=generator)
    return {
        "none": (),
        "diagonal, hadamard 32": (
            Diagonal(scale_K=(0.3 * torch.randn(num_inputs, generator=generator)).exp()),
            Hadamard(size=32),
        ),
        "block matrices": (BlockMatrix(matrix_Bij=(torch.eye(32) + noise).to(torch.bfloat16)),),
    }


def losses(
    name: str, device: str, transform_name: str, code_rule: CodeRule, *, has_branch: bool
) -> tuple[float, set[str]]:
    subject = load_subject(name, device=device)
    tokens_CL = load_corpus(SampledCorpus(kind="sampled"), subject).splits["search"][:24].to(device)
    streams = TwoStreamModel(subject.pristine().map)
    for layer in streams.map.layers:
        linear = streams.map.linear(layer)
        weight_NK = linear.weight.detach().cpu()
        transform = transforms_of(weight_NK.shape[1])[transform_name]
        generator = torch.Generator().manual_seed(len(layer.name))
        branch = LowRank(
            a_RK=(0.02 * torch.randn(4, weight_NK.shape[1], generator=generator)).to(torch.bfloat16),
            b_NR=(0.02 * torch.randn(weight_NK.shape[0], 4, generator=generator)).to(torch.bfloat16),
        )
        install = Install(
            weight=encode(transform_weight(transform, weight_NK)),
            transform=transform,
            activation=ActivationRule(code_rule=code_rule),
            low_rank=branch if has_branch else None,
        )
        streams.install(layer.name, QuantizedLinear(install, linear.bias, device=device))
    with streams.fully_quantized() as model:
        values = score(model, tokens_CL, 8)
    return sum(values) / len(values), set(streams.routes.values())


@pytest.mark.parametrize("has_branch", [False, True])
@pytest.mark.parametrize("code_rule", CODE_RULES)
@pytest.mark.parametrize("transform_name", transforms_of(64))
@pytest.mark.parametrize("name", ["nano-llama", "nano-qwen3"])
def test_the_gpu_scores_what_the_cpu_scores(
    name: str, transform_name: str, code_rule: CodeRule, has_branch: bool
) -> None:
    on_cpu, cpu_routes = losses(name, "cpu", transform_name, code_rule, has_branch=has_branch)
    on_gpu, gpu_routes = losses(name, "cuda", transform_name, code_rule, has_branch=has_branch)
    assert cpu_routes == {"float32"}
    assert "float32" not in gpu_routes, "an evaluation never falls back silently"
    print(
        f"{name} {transform_name} {code_rule} {has_branch}: {on_gpu - on_cpu:+.2e} nats of {on_cpu:.4f}, {gpu_routes}"
    )
    assert abs(on_gpu - on_cpu) < BOUND


def test_the_shapes_of_the_timed_decoder_are_whole_blocks() -> None:
    assert QWEN3_4B["hidden_size"] % 32 == QWEN3_4B["intermediate_size"] % 32 == 0
