"""The map of a decoder: names, order, modules, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from evaluators.architecture import FAMILIES, map_decoder
from evaluators.errors import ContractError, SubjectError
from tests.tiny_models import KINDS, Kind, make_tiny_model, make_tiny_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_groups_come_in_execution_order_with_the_shapes_of_their_modules(kind: Kind) -> None:
    model = make_tiny_model(kind)
    decoder_map = map_decoder(model)
    roles = ["qkv", "o", "gate_up", "down"]
    assert [group.name for group in decoder_map.groups] == [f"blocks.{i}.{role}" for i in range(2) for role in roles]
    assert [layer.role for layer in decoder_map.layers[:7]] == ["q", "k", "v", "o", "gate", "up", "down"]
    for layer in decoder_map.layers:
        assert decoder_map.linear(layer).weight.shape == (layer.num_outputs, layer.num_inputs)
        assert layer in decoder_map.group(layer.group).layers
        assert model.get_submodule(decoder_map.parameter_prefix(layer)) is decoder_map.module(layer)

    seen: list[str] = []
    hooks = [
        decoder_map.group_hook_module(group).register_forward_pre_hook(
            lambda _module, arguments, group=group: (
                seen.append(group.name) if arguments[0].shape[-1] == group.num_inputs else seen.append("wrong shape")
            )
        )
        for group in decoder_map.groups
    ]
    model(make_tiny_tokens(1, 8), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert seen == [group.name for group in decoder_map.groups]


@pytest.mark.parametrize("kind", KINDS)
def test_the_input_norm_is_what_feeds_the_group(kind: Kind) -> None:
    decoder_map = map_decoder(make_tiny_model(kind))
    for group in decoder_map.groups:
        norm = decoder_map.input_norm(group)
        if group.role in ("o", "down"):
            assert norm is None
            continue
        assert norm is not None
        captured: dict[str, torch.Tensor] = {}
        hooks = [
            norm.module.register_forward_hook(lambda _m, _a, output, captured=captured: captured.update(norm=output)),
            decoder_map.group_hook_module(group).register_forward_pre_hook(
                lambda _m, arguments, captured=captured: captured.update(group=arguments[0])
            ),
        ]
        decoder_map.model(make_tiny_tokens(1, 8), use_cache=False)
        for hook in hooks:
            hook.remove()
        assert torch.equal(captured["norm"], captured["group"])


@pytest.mark.parametrize("kind", KINDS)
def test_gain_is_what_the_norm_multiplies_by_and_can_be_set(kind: Kind) -> None:
    decoder_map = map_decoder(make_tiny_model(kind))
    norm = decoder_map.final_norm
    x_TK = torch.randn(3, decoder_map.hidden_size, generator=torch.Generator().manual_seed(0))
    unit_TK = x_TK / (x_TK.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm.module(x_TK), unit_TK * norm.gain_K().float(), rtol=1e-4, atol=1e-5)
    norm.set_gain(torch.full((decoder_map.hidden_size,), 3.0))
    torch.testing.assert_close(norm.module(x_TK), unit_TK * 3, rtol=1e-4, atol=1e-5)


def test_sites_leave_out_the_rotation_where_outputs_are_normalized() -> None:
    kinds = {site.kind for site in map_decoder(make_tiny_model("llama")).sites}
    assert kinds == {"norm_diagonal", "value_output", "up_down_diagonal", "up_down_permutation", "residual_rotation"}
    gemma = map_decoder(make_tiny_model("gemma3"))
    assert {site.kind for site in gemma.sites} == kinds - {"residual_rotation"}
    assert gemma.site("blocks.1.value_output").shape == (2, 32, 32)
    assert gemma.site("blocks.0.up_down_permutation").shape == (96,)


def test_replace_keeps_the_full_precision_linear_and_restore_undoes_it() -> None:
    decoder_map = map_decoder(make_tiny_model("llama"))
    original = decoder_map.module("blocks.1.down")
    before = decoder_map.high_precision_parameters()
    substitute = nn.Sequential(nn.Linear(96, 64))
    decoder_map.replace("blocks.1.down", substitute)
    assert decoder_map.module("blocks.1.down") is substitute
    assert decoder_map.linear("blocks.1.down") is original
    assert decoder_map.is_replaced("blocks.1.down")
    after = decoder_map.high_precision_parameters()
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    decoder_map.restore("blocks.1.down")
    assert decoder_map.module("blocks.1.down") is original


@pytest.mark.parametrize("kind", KINDS)
def test_high_precision_parameters_are_all_but_the_layer_weights(kind: Kind) -> None:
    decoder_map = map_decoder(make_tiny_model(kind, tied=True))
    high = decoder_map.high_precision_parameters()
    weights = {f"{decoder_map.parameter_prefix(layer)}.weight" for layer in decoder_map.layers}
    assert set(high) | weights == {name for name, _ in decoder_map.model.named_parameters()}
    assert not set(high) & weights
    assert "lm_head.weight" not in high
    decoder_map.untie()
    assert "lm_head.weight" in decoder_map.high_precision_parameters()


def test_untie_leaves_the_logits_as_they_are() -> None:
    model = make_tiny_model("qwen3", tied=True)
    decoder_map = map_decoder(model)
    tokens = make_tiny_tokens(2, 16)
    before = model(tokens, use_cache=False).logits
    assert decoder_map.is_tied
    decoder_map.untie()
    assert not decoder_map.is_tied
    assert torch.equal(model(tokens, use_cache=False).logits, before)
    decoder_map.embedding.weight.zero_()
    assert decoder_map.head.weight.abs().sum() > 0


def test_an_unknown_architecture_is_refused_with_the_list_that_works() -> None:
    with pytest.raises(SubjectError, match=r"'Linear' cannot be mapped; known: .*Qwen3ForCausalLM") as caught:
        map_decoder(nn.Linear(32, 32))
    assert all(name in str(caught.value) for name in FAMILIES)


def test_a_mixture_of_experts_is_refused() -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    with pytest.raises(SubjectError, match="'Qwen3MoeForCausalLM' cannot be mapped"):
        map_decoder(transformers.Qwen3MoeForCausalLM(config))


def test_an_input_that_32_does_not_divide_is_refused_by_name_and_number() -> None:
    with pytest.raises(SubjectError, match=r"'blocks.0.down' has 80 inputs, which 32 does not divide"):
        map_decoder(make_tiny_model("llama", intermediate_size=80))


def test_fused_missing_and_foreign_modules_are_refused() -> None:
    fused = make_tiny_model("llama")
    block: Any = fused.get_submodule("model.layers.1")
    block.self_attn.q_proj = nn.Sequential(nn.Linear(64, 128))
    with pytest.raises(SubjectError, match=r"'blocks.1.q' is Sequential, not a plain linear"):
        map_decoder(fused)
    del block.self_attn.q_proj
    with pytest.raises(SubjectError, match=r"'blocks.1.q' is nothing"):
        map_decoder(fused)
    adapted = make_tiny_model("llama")
    adapted.get_submodule("model.layers.0.mlp").adapter = nn.Linear(64, 64)
    with pytest.raises(SubjectError, match=r"parameter 'model.layers.0.mlp.adapter.weight'"):
        map_decoder(adapted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_weight_names_its_layer(value: float) -> None:
    model = make_tiny_model("llama")
    map_decoder(model).check_finite()
    map_decoder(model).linear("blocks.1.up").weight[3, 5] = value
    with pytest.raises(SubjectError, match=r"layer 'blocks.1.up' \(weight\) holds 1 non-finite of 6144 values"):
        map_decoder(model).check_finite()


def test_non_finite_norms_and_biases_are_named_and_opposite_infinities_do_not_cancel() -> None:
    decoder_map = map_decoder(make_tiny_model("qwen2"))
    gain_K = decoder_map.final_norm.module.get_parameter("weight")
    saved_K = gain_K.clone()
    gain_K[0], gain_K[1] = float("inf"), float("-inf")
    with pytest.raises(SubjectError, match=r"parameter 'model.norm.weight' holds 2 non-finite"):
        decoder_map.check_finite()
    gain_K.copy_(saved_K)
    decoder_map.linear("blocks.0.k").bias[0] = float("nan")
    with pytest.raises(SubjectError, match=r"layer 'blocks.0.k' \(bias\)"):
        decoder_map.check_finite()


def test_huge_finite_weights_are_not_mistaken_for_infinities() -> None:
    decoder_map = map_decoder(make_tiny_model("llama"))
    decoder_map.linear("blocks.0.q").weight.fill_(3e38)
    decoder_map.check_finite()


@pytest.mark.parametrize("name", ["blocks.9.q", "q", "", None, 3, "blocks.0.qkv"])
def test_an_unknown_layer_name_is_the_programs_fault(name: object) -> None:
    decoder_map = map_decoder(make_tiny_model("llama"))
    with pytest.raises(ContractError, match="unknown layer"):
        decoder_map.layer(name)  # type: ignore[arg-type]


def test_the_map_of_a_copy_points_into_the_copy() -> None:
    model = make_tiny_model("llama")
    other = copy.deepcopy(model)
    assert map_decoder(other).linear("blocks.0.q").weight is not map_decoder(model).linear("blocks.0.q").weight
