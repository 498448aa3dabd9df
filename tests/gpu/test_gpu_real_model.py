"""A real model scored on a GPU against a CPU: QUANTFORGE_MODEL names its folder, QUANTFORGE_TEXT a text file. Minutes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from evaluators.installs import Install
from evaluators.quantized_linear import QuantizedLinear
from evaluators.scorer import score
from evaluators.subjects import load_subject
from evaluators.two_streams import TwoStreamModel
from forge_kernels.ops.encode import encode
from forge_kernels.rules import ActivationRule
from forge_kernels.transforms import Hadamard, Transform, transform_weight

MODEL, TEXT = os.environ.get("QUANTFORGE_MODEL", ""), os.environ.get("QUANTFORGE_TEXT", "")
CHUNKS, LENGTH = 8, 1024
BOUND = 0.015
"""Nats per token between mean losses, as for the shipped subjects; of this many tokens rounding luck leaves less."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (MODEL and TEXT), reason="give QUANTFORGE_MODEL and QUANTFORGE_TEXT"),
]


def losses(device: str, transform: Transform, tokens_CL: Tensor) -> tuple[Tensor, set[str]]:
    streams = TwoStreamModel(load_subject(MODEL, device=device).pristine().map)
    for layer in streams.map.layers:
        linear = streams.map.linear(layer)
        weight_NK = linear.weight.detach().cpu().float()
        install = Install(
            weight=encode(transform_weight(transform, weight_NK)),
            transform=transform,
            activation=ActivationRule(),
            low_rank=None,
        )
        streams.install(layer.name, QuantizedLinear(install, linear.bias, device=device))
    with streams.fully_quantized() as model:
        values = score(model, tokens_CL.to(device), 4)
    return torch.tensor(values, dtype=torch.float64).flatten(), set(streams.routes.values())


@pytest.mark.parametrize("transform", [(), (Hadamard(size=32),)], ids=["none", "hadamard 32"])
def test_the_gpu_scores_what_the_cpu_scores(transform: Transform) -> None:
    text = Path(TEXT).read_text(encoding="utf-8")[: 8 * CHUNKS * LENGTH]
    ids = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"])
    tokens_CL = ids[: CHUNKS * LENGTH].view(CHUNKS, LENGTH)
    on_cpu, cpu_routes = losses("cpu", transform, tokens_CL)
    on_gpu, gpu_routes = losses("cuda", transform, tokens_CL)
    assert cpu_routes == {"float32"}
    assert "float32" not in gpu_routes, "an evaluation never falls back silently"
    gap_C = on_gpu - on_cpu
    print(
        f"{Path(MODEL).name} {transform}: mean {float(gap_C.mean()):+.2e} nats of {float(on_cpu.mean()):.4f}, "
        f"by chunk at most {float(gap_C.abs().max()):.2e}, {gpu_routes}"
    )
    assert abs(float(gap_C.mean())) < BOUND
