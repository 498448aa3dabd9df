"""Measurements equal a naive fresh forward pass at every point of any sequence of installs and folds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evaluators.architecture import DecoderMap, map_decoder
from evaluators.contract import MXFP4_W4A4, check_install
from evaluators.errors import HostError, ProgramError
from evaluators.folds import fold
from evaluators.meter import Meter
from evaluators.quantized_linear import QuantizedLinear
from evaluators.results import Outcome
from evaluators.scorer import score
from evaluators.session import Stream
from evaluators.streams import Streams
from evaluators.subjects import Subject
from evaluators.two_streams import TwoStreamModel, _without_cache
from forge_kernels import Hadamard, encode, transform_weight
from tests.tiny_models import KINDS, Kind, make_tiny_subject, make_tiny_tokens

CHUNKS, LENGTH = 5, 20
TRANSFORMS = [(), (Hadamard(size=32),)]


class Naive:
    """The same folds and installs on plain models, measured by whole forward passes over all chunks at once."""

    def __init__(self, subject: Subject, tokens_CL: Tensor) -> None:
        self.reference: DecoderMap = subject.pristine().map
        self.quantized: DecoderMap = subject.pristine().map
        self.tokens_CL = tokens_CL

    def inputs(self, group: str, stream: Stream) -> Tensor:
        decoder_map = self.reference if stream == "reference" else self.quantized
        seen: list[Tensor] = []
        handle = decoder_map.group_hook_module(group).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            decoder_map.model(input_ids=self.tokens_CL, use_cache=False)
        handle.remove()
        return seen[0].flatten(0, 1)


def open_streams(subject: Subject, *, batch_tokens: int = 2 * LENGTH, cache_bytes: int = 2**30) -> Streams:
    model = TwoStreamModel(subject.pristine().map)
    meter = Meter(num_blocks=model.num_blocks, max_tokens=10**9)
    tokens_CL = make_tiny_tokens(CHUNKS, LENGTH)
    return Streams(model, tokens_CL, meter, batch_tokens=batch_tokens, cache_bytes=cache_bytes)


def install(streams: Streams, naive: Naive, layer_name: str, *, transform_index: int) -> None:
    decoder_map = streams.model.map
    layer = decoder_map.layer(layer_name)
    linear = decoder_map.linear(layer)
    transform = TRANSFORMS[transform_index]
    checked = check_install(MXFP4_W4A4, layer, encode(transform_weight(transform, linear.weight)), transform=transform)
    streams.model.install(layer.name, QuantizedLinear(checked, linear.bias))
    streams.forget_after_install(decoder_map.group(layer.group))
    naive.quantized.replace(layer.name, QuantizedLinear(checked, linear.bias))


def make_fold(streams: Streams, naive: Naive, site_name: str, seed: int) -> bool:
    """Fold at the site in all three models, unless a layer that the fold touches may be installed."""
    decoder_map = streams.model.map
    site = decoder_map.site(site_name)
    if any(site.block is None or decoder_map.layer(name).block == site.block for name in streams.model.installed):
        return False
    generator = torch.Generator().manual_seed(seed)
    if site.kind == "up_down_permutation":
        matrix = torch.randperm(site.shape[0], generator=generator)
    elif site.kind == "residual_rotation":
        matrix = torch.linalg.qr(torch.randn(site.shape, generator=generator, dtype=torch.float64)).Q
    elif site.kind == "value_output":
        matrix = torch.eye(site.shape[-1]) + 0.1 * torch.randn(site.shape, generator=generator) / 6
    else:
        matrix = (0.3 * torch.randn(site.shape, generator=generator)).exp()
    for one in (decoder_map, naive.reference, naive.quantized):
        fold(one, one.site(site_name), matrix)
    streams.forget_after_fold(site)
    return True


def assert_same(streams: Streams, naive: Naive, group_name: str, stream: Stream) -> None:
    measured = torch.cat(streams.batched_inputs(streams.model.map.group(group_name), stream))
    expected = naive.inputs(group_name, stream)
    torch.testing.assert_close(measured, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_measurements_equal_fresh_forward_passes(kind: Kind, data: st.DataObject) -> None:
    subject = make_tiny_subject(kind)
    streams = open_streams(subject, cache_bytes=data.draw(st.sampled_from([2**30, 40_000, 0]), label="cache_bytes"))
    naive = Naive(subject, streams.chunks_CL)
    layers = st.sampled_from([layer.name for layer in subject.map.layers])
    groups = st.sampled_from([group.name for group in subject.map.groups])
    sites = st.sampled_from([site.name for site in subject.map.sites])
    for step in range(data.draw(st.integers(3, 8), label="steps")):
        action = data.draw(st.sampled_from(["install", "fold", "measure", "measure", "loss"]), label="action")
        if action == "install":
            install(streams, naive, data.draw(layers), transform_index=data.draw(st.integers(0, 1)))
        elif action == "fold":
            make_fold(streams, naive, data.draw(sites), step)
        elif action == "measure":
            assert_same(streams, naive, data.draw(groups), data.draw(st.sampled_from(["quantized", "reference"])))
        else:
            expected = score(naive.quantized.model, streams.chunks_CL, CHUNKS)
            assert streams.losses().tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_installs_from_last_to_first_are_seen(cache_bytes: int) -> None:
    subject = make_tiny_subject(blocks=3)
    streams = open_streams(subject, cache_bytes=cache_bytes)
    naive = Naive(subject, streams.chunks_CL)
    for name in ("blocks.2.q", "blocks.1.down", "blocks.1.o", "blocks.0.up", "blocks.0.k"):
        install(streams, naive, name, transform_index=1)
        for group in subject.map.groups:
            assert_same(streams, naive, group.name, "quantized")
            assert_same(streams, naive, group.name, "reference")
        assert streams.losses().tolist() == pytest.approx(score(naive.quantized.model, streams.chunks_CL), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_batches_give_equal_bits(kind: Kind) -> None:
    subject = make_tiny_subject(kind)
    streams = open_streams(subject, batch_tokens=CHUNKS * LENGTH)
    naive = Naive(subject, streams.chunks_CL)
    install(streams, naive, "blocks.0.o", transform_index=1)
    install(streams, naive, "blocks.1.k", transform_index=0)
    for group in subject.map.groups:
        measured = torch.cat(streams.batched_inputs(group, "quantized"))
        assert torch.equal(measured, naive.inputs(group.name, "quantized"))


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_a_block_gives_the_same_output(kind: Kind) -> None:
    model = TwoStreamModel(make_tiny_subject(kind).map)
    tokens_CL = make_tiny_tokens(2, 40)
    hidden_CLH = model.embed(tokens_CL)
    ((first, _),) = model.run_block(0, [hidden_CLH], "reference")
    for _ in range(3):
        ((again, _),) = model.run_block(0, [hidden_CLH], "reference")
        assert first is not None
        assert again is not None
        assert torch.equal(first, again)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_replayed_one_by_one_are_the_whole_model(kind: Kind) -> None:
    subject = make_tiny_subject(kind, blocks=3)
    model = TwoStreamModel(subject.pristine().map)
    tokens_CL = make_tiny_tokens(2, 40)
    hidden_CLH = model.embed(tokens_CL)
    for block in range(3):
        ((leaving, _),) = model.run_block(block, [hidden_CLH], "reference")
        assert leaving is not None
        hidden_CLH = leaving
    with torch.no_grad():
        expected = subject.model.model(input_ids=tokens_CL, use_cache=False).last_hidden_state  # type: ignore[operator]
    assert torch.equal(model.finish(tokens_CL, hidden_CLH), expected)


def test_a_cache_among_block_arguments_is_a_host_error() -> None:
    assert _without_cache({"cache": None, "use_cache": False, "position_ids": 1}) == {"position_ids": 1}
    with pytest.raises(HostError, match="key-value cache"):
        _without_cache({"past_key_values": object()})


def test_blocks_are_plain_again_after_a_failure() -> None:
    subject = make_tiny_subject()
    streams = open_streams(subject)
    naive = Naive(subject, streams.chunks_CL)
    install(streams, naive, "blocks.0.q", transform_index=0)
    model = streams.model
    with pytest.raises(KeyError):
        model.run_block(0, [torch.zeros(7, 7, 64)], "quantized")
    with pytest.raises(RuntimeError), model.fully_quantized():
        raise RuntimeError
    assert not any(model.map.is_replaced(layer) for layer in model.map.layers)
    assert not any("forward" in vars(block) for block in model.map.block_modules)


def test_walking_the_groups_in_order_costs_five_blocks_per_block() -> None:
    subject = make_tiny_subject(blocks=4)
    streams = open_streams(subject)
    naive = Naive(subject, streams.chunks_CL)
    for group in subject.map.groups:
        streams.batched_inputs(group, "quantized")
        streams.batched_inputs(group, "quantized")
        for layer in group.layers:
            install(streams, naive, layer.name, transform_index=0)
    # The first block has none before it, and its first group is read from the reference stream like everything in it.
    assert streams.meter.tokens <= 5 * CHUNKS * LENGTH
    assert streams.meter.tokens > 4 * CHUNKS * LENGTH


def test_without_installs_one_pass_serves_both_streams_and_all_groups() -> None:
    streams = open_streams(make_tiny_subject(blocks=3))
    for stream in ("quantized", "reference"):
        for group in streams.model.map.groups:
            streams.batched_inputs(group, stream)
        if stream == "quantized":
            assert streams.meter.tokens == CHUNKS * LENGTH


def test_a_measurement_of_few_chunks_runs_few_batches() -> None:
    streams = open_streams(make_tiny_subject())
    group = streams.model.map.groups[0]
    (inputs_TK,) = streams.batched_inputs(group, "quantized", num_chunks=1)
    assert inputs_TK.shape == (LENGTH, 64)
    assert streams.meter.tokens == 2 * LENGTH // 2  # one batch of two chunks through one of two blocks
    assert [len(batch) for batch in streams.batched_inputs(group, "quantized", num_chunks=3)] == [2 * LENGTH, LENGTH]


def test_losses_are_kept_until_something_changes() -> None:
    subject = make_tiny_subject()
    streams = open_streams(subject)
    naive = Naive(subject, streams.chunks_CL)
    streams.losses()
    assert streams.meter.tokens == CHUNKS * LENGTH
    streams.losses()
    assert streams.meter.tokens == CHUNKS * LENGTH
    install(streams, naive, "blocks.1.down", transform_index=0)
    streams.losses()
    assert streams.meter.tokens == CHUNKS * LENGTH + CHUNKS * LENGTH // 2  # the second of two blocks


def test_the_meter_refuses_before_it_runs() -> None:
    meter = Meter(num_blocks=3, max_tokens=10)
    meter.charge(10, 1)
    assert meter.tokens == 4
    meter.charge(10, 2)
    assert meter.tokens == 10
    with pytest.raises(ProgramError, match="allows 10") as caught:
        meter.charge(1)
    assert caught.value.outcome is Outcome.OVER_METERED


def test_no_activation_is_kept_after_a_block_was_stopped_or_finished() -> None:
    subject = make_tiny_subject()
    streams = open_streams(subject)
    naive = Naive(subject, streams.chunks_CL)
    for name in ("blocks.0.q", "blocks.0.k", "blocks.0.v"):
        install(streams, naive, name, transform_index=0)
    hidden_CLH = streams.model.embed(streams.chunks_CL)
    k_module = streams.model.installed["blocks.0.k"]
    handle = k_module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop here")))
    with pytest.raises(RuntimeError, match="stop here"):
        streams.model.run_block(0, [hidden_CLH], "quantized")
    handle.remove()
    assert k_module.group_activation._kept.encoded is None


def test_a_truncated_subject_can_be_measured() -> None:
    subject = make_tiny_subject("gemma3", blocks=3).truncated(2)
    streams = open_streams(subject)
    naive = Naive(subject, streams.chunks_CL)
    assert map_decoder(subject.model).num_blocks == 2
    assert_same(streams, naive, "blocks.1.down", "quantized")
