"""Rows of the error map are the stated ratios, at the input that the quantized model gives each layer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from evaluators.apply import apply_artifact
from evaluators.contract import MXFP4_W4A4
from evaluators.error_map import MAX_RATIO, clip_counts, error_map
from forge_kernels import Diagonal, choose_scales, encode
from tests.tiny_models import KINDS, Kind, make_tiny_subject
from tests.unit.test_artifact import TOKENS, make_server


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_ratios_of_hooked_forward_passes(kind: Kind) -> None:
    subject = make_tiny_subject(kind)
    artifact = make_server(subject).finish()
    rows = error_map(subject, artifact, TOKENS, MXFP4_W4A4)
    assert [row.layer for row in rows] == [layer.name for layer in subject.map.layers]
    model = apply_artifact(artifact, subject, MXFP4_W4A4)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _, args, y, name=name: seen.update({name: (args[0], y)}))
        for name, module in model.installed.items()
    ]
    with model.fully_quantized() as quantized, torch.no_grad():
        quantized(input_ids=TOKENS, use_cache=False)
    for handle in handles:
        handle.remove()
    for row in rows:
        linear = model.map.linear(row.layer)
        x, y = seen[row.layer]
        expected = x @ linear.weight.T
        given = y if linear.bias is None else y - linear.bias
        joint = float((given - expected).square().sum() / expected.square().sum())
        assert row.joint == pytest.approx(joint, rel=2e-3)
        assert 0.002 < row.weight < 0.06
        assert 0.002 < row.activation < 0.06
        if row.role != "down":  # down has a random branch, which only the joint error includes
            assert row.joint == pytest.approx(row.weight + row.activation, rel=0.5)
        assert (row.clip_rate == 0) == (row.role == "o")  # o uses rceil, which never clips


def test_clipped_values_are_those_beyond_six_scales() -> None:
    x_TK = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * 3
    for rule in ("even", "floor", "rceil", "search"):
        scales = torch.exp2(choose_scales(x_TK, scale_rule=rule).float() - 127).repeat_interleave(32, dim=1)
        assert clip_counts(x_TK, rule) == int((x_TK.abs() > 6 * scales).sum())
    assert clip_counts(x_TK, "rceil") == 0
    assert clip_counts(x_TK, "floor") > clip_counts(x_TK, "even") > 0
    broken = x_TK.clone()
    broken[3, 40] = torch.inf
    assert clip_counts(broken, "rceil") == 32, "all values of a block that is not finite count"
    zeros = torch.zeros(2, 32)
    assert clip_counts(zeros, "even") == 0
    assert int(encode(zeros).scales_NB.max()) == 0


def test_an_artifact_that_overflows_on_this_text_has_a_map_of_finite_numbers() -> None:
    subject = make_tiny_subject()
    server = make_server(subject)
    for layer in subject.map.layers:
        scale = 1e38 if layer.group == "blocks.1.down" else 1.0
        transform = (Diagonal(scale_K=torch.full((layer.num_inputs,), scale)),)
        server.install(layer.name, encode(subject.map.linear(layer).weight), transform=transform)
    rows = {row.layer: row for row in error_map(subject, server.finish(), TOKENS, MXFP4_W4A4)}
    broken = rows["blocks.1.down"]
    assert (broken.joint, broken.activation) == (MAX_RATIO, MAX_RATIO), broken
    assert 0 < broken.clip_rate <= 1
    assert all(math.isfinite(value) for row in rows.values() for value in (row.weight, row.activation, row.joint))
