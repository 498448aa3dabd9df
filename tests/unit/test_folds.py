"""Folds: the model's function stays, the activation changes as the site says, hostile matrices are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evaluators.architecture import DecoderMap, map_decoder
from evaluators.errors import ContractError
from evaluators.folds import fold
from evaluators.session import Site
from tests.tiny_models import KINDS, Kind, make_tiny_model, make_tiny_tokens

MAX_RELATIVE = 1e-4


def random_matrix(site: Site, seed: int = 0) -> Tensor:
    """Return a matrix that the site accepts, far from the identity."""
    generator = torch.Generator().manual_seed(seed)
    if site.kind == "up_down_permutation":
        return torch.randperm(site.shape[0], generator=generator)
    normal = torch.randn(site.shape, generator=generator, dtype=torch.float64)
    if site.kind == "residual_rotation":
        rotation: Tensor = torch.linalg.qr(normal).Q
        return rotation.float()
    if site.kind == "value_output":
        shear: Tensor = 0.4 * normal / site.shape[-1] ** 0.5 + torch.eye(site.shape[-1])
        return shear.float()
    return ((0.7 * normal).exp() * torch.where(normal > 1, -1.0, 1.0)).float()


def reference_activation(site: Site, matrix: Tensor, x_TK: Tensor) -> Tensor:
    """Return what `Site` promises: the activation after the fold, from the one before it."""
    if site.kind == "up_down_permutation":
        return x_TK[..., matrix]
    if site.kind == "value_output":
        heads, size, _ = site.shape
        x_TGRD = x_TK.reshape(*x_TK.shape[:-1], heads, -1, size)
        return torch.einsum("...grd,ged->...gre", x_TGRD, matrix).flatten(-3)
    return x_TK * matrix


def captured_input(decoder_map: DecoderMap, group: str, tokens: Tensor) -> Tensor:
    seen: list[Tensor] = []
    hook = decoder_map.group_hook_module(group).register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    decoder_map.model(tokens, use_cache=False)
    hook.remove()
    return seen[0]


def logits(decoder_map: DecoderMap, tokens: Tensor) -> Tensor:
    result: Tensor = decoder_map.model(tokens, use_cache=False).logits.double()
    return result


def relative(after: Tensor, before: Tensor) -> float:
    return float((after - before).norm() / before.norm())


def cases() -> Iterator[tuple[Kind, str]]:
    for kind in KINDS:
        for site in map_decoder(make_tiny_model(kind)).sites:
            yield kind, site.name


GROUP_OF_KIND = {"value_output": "o", "up_down_diagonal": "down", "up_down_permutation": "down"}


@pytest.mark.parametrize(("kind", "name"), list(cases()))
def test_every_site_keeps_the_function_and_changes_the_activation_as_it_says(kind: Kind, name: str) -> None:
    decoder_map = map_decoder(make_tiny_model(kind))
    site = decoder_map.site(name)
    tokens = make_tiny_tokens(2, 40)
    matrix = random_matrix(site)
    group = name.removesuffix(".norm_diagonal") if site.kind == "norm_diagonal" else ""
    group = group or f"blocks.{site.block or 0}.{GROUP_OF_KIND.get(site.kind, 'qkv')}"
    logits_before, input_before = logits(decoder_map, tokens), captured_input(decoder_map, group, tokens)
    embedded_before = decoder_map.embedding(tokens)
    fold(decoder_map, site, matrix)
    assert relative(logits(decoder_map, tokens), logits_before) < MAX_RELATIVE
    if site.kind == "residual_rotation":
        torch.testing.assert_close(decoder_map.embedding(tokens), embedded_before @ matrix.T, rtol=1e-4, atol=1e-4)
    else:
        expected = reference_activation(site, matrix, input_before)
        assert relative(captured_input(decoder_map, group, tokens), expected) < MAX_RELATIVE
        assert relative(expected, input_before) > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_sites_one_after_the_other_twice_over(kind: Kind, tied: bool) -> None:
    decoder_map = map_decoder(make_tiny_model(kind, tied=tied))
    tokens = make_tiny_tokens(2, 40)
    before = logits(decoder_map, tokens)
    for seed in (1, 2):
        for site in decoder_map.sites:
            fold(decoder_map, site, random_matrix(site, seed))
        for site in reversed(decoder_map.sites):
            fold(decoder_map, site, random_matrix(site, seed + 10))
    assert relative(logits(decoder_map, tokens), before) < MAX_RELATIVE
    rotated = kind != "gemma3"
    assert decoder_map.is_tied == (tied and not rotated)


def test_a_rotation_of_a_tied_model_unties_the_head() -> None:
    decoder_map = map_decoder(make_tiny_model("qwen3", tied=True))
    tokens = make_tiny_tokens(2, 20)
    before = logits(decoder_map, tokens)
    fold(decoder_map, "residual_rotation", random_matrix(decoder_map.site("residual_rotation")))
    assert not decoder_map.is_tied
    assert relative(logits(decoder_map, tokens), before) < MAX_RELATIVE
    assert torch.equal(decoder_map.final_norm.gain_K(), torch.ones(64, dtype=torch.float64))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_value_output_serves_every_grouping_of_heads(num_kv_heads: int) -> None:
    decoder_map = map_decoder(make_tiny_model("llama", num_key_value_heads=num_kv_heads))
    tokens = make_tiny_tokens(2, 20)
    before = logits(decoder_map, tokens)
    site = decoder_map.site("blocks.0.value_output")
    assert site.shape == (num_kv_heads, 32, 32)
    fold(decoder_map, site, random_matrix(site))
    assert relative(logits(decoder_map, tokens), before) < MAX_RELATIVE


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_fold_and_its_inverse_give_the_weights_back(kind: Kind) -> None:
    decoder_map = map_decoder(make_tiny_model(kind))
    saved = {name: value.clone() for name, value in decoder_map.model.state_dict().items()}
    for site in decoder_map.sites:
        matrix = random_matrix(site)
        if site.kind == "residual_rotation":
            continue  # the gains stay folded into the layers
        inverse = {
            "value_output": lambda m: torch.linalg.inv(m.double()),
            "up_down_permutation": lambda m: m.argsort(),
        }.get(site.kind, lambda m: 1 / m.double())(matrix)
        fold(decoder_map, site, matrix)
        fold(decoder_map, site, inverse)
    for name, value in decoder_map.model.state_dict().items():
        torch.testing.assert_close(value, saved[name], rtol=1e-5, atol=1e-5, msg=name)


def test_permutation_is_exact() -> None:
    decoder_map = map_decoder(make_tiny_model("llama"))
    up, down = decoder_map.linear("blocks.1.up"), decoder_map.linear("blocks.1.down")
    up_NK, bias_N, down_NK = up.weight.clone(), up.bias.clone(), down.weight.clone()
    index = random_matrix(decoder_map.site("blocks.1.up_down_permutation"))
    fold(decoder_map, "blocks.1.up_down_permutation", index)
    assert torch.equal(up.weight, up_NK[index])
    assert torch.equal(up.bias, bias_N[index])
    assert torch.equal(down.weight, down_NK[:, index])


def test_gains_of_zero_and_tiny_gemma_gains_keep_the_function() -> None:
    decoder_map = map_decoder(make_tiny_model("gemma3"))
    tokens = make_tiny_tokens(2, 20)
    norm = decoder_map.input_norm("blocks.0.qkv")
    assert norm is not None
    gain_K = norm.gain_K()
    gain_K[3] = 0
    norm.set_gain(gain_K)
    before = logits(decoder_map, tokens)
    site = decoder_map.site("blocks.0.qkv.norm_diagonal")
    # 1 + weight holds a gain of 1e-4 to three digits only; the layers have to take up the difference.
    fold(decoder_map, site, torch.full(site.shape, 1e-4))
    assert relative(logits(decoder_map, tokens), before) < 1e-5


def test_an_almost_orthogonal_rotation_is_made_exact() -> None:
    decoder_map = map_decoder(make_tiny_model("llama"))
    tokens = make_tiny_tokens(2, 20)
    before = logits(decoder_map, tokens)
    rotation = random_matrix(decoder_map.site("residual_rotation"))
    for _ in range(8):
        fold(decoder_map, "residual_rotation", rotation + 4e-6 * torch.randn(64, 64))
    assert relative(logits(decoder_map, tokens), before) < 1e-5


NAN, INF = float("nan"), float("inf")


def hostile() -> Iterator[tuple[str, object, str]]:
    eye = torch.eye(64)
    heads = torch.eye(32).expand(2, 32, 32).clone()
    singular, nearly, not_finite = heads.clone(), heads.clone(), heads.clone()
    singular[1, 0, 0] = 0
    nearly[1, 0, 0] = 1e-5
    not_finite[0, 0, 0] = NAN
    value, rotation = "blocks.0.value_output", "residual_rotation"
    diagonals = (
        ("blocks.1.qkv.norm_diagonal", 64),
        ("blocks.1.gate_up.norm_diagonal", 64),
        ("blocks.0.up_down_diagonal", 96),
    )
    for name, size in diagonals:
        for entry, message in ((0.0, "cannot be inverted"), (NAN, "1 values that are not finite"), (INF, "not finite"),
                               (1e-5, "a ratio of 1e[+]05"), (-1e5, "a ratio of 1e[+]05")):  # fmt: skip
            diagonal = torch.ones(size)
            diagonal[5] = entry
            yield name, diagonal, message
        yield name, torch.full((size,), 1e30), "keep them within 1e-06 to 1e[+]06"
        yield name, torch.full((size,), 1e-30), "keep them within"
        yield name, torch.ones(size - 1), rf"got a tensor \({size - 1},\) of float32; give \({size},\)"
        yield name, torch.ones(size, 1), "give"
        yield name, torch.ones(size, dtype=torch.int64), "of int64; give"
        yield name, torch.ones(size, dtype=torch.complex64), "of complex64; give"
        yield name, [1.0] * size, "got list; give a tensor"
        yield name, None, "got NoneType"
    yield value, singular, "cannot be inverted|a ratio of"
    yield value, nearly, "singular values from 1e-05 to 1, a ratio of 1e[+]05"
    yield value, not_finite, "not finite"
    yield value, heads[0], "got a tensor"
    yield value, heads * 1e20, "keep them within"
    yield value, torch.zeros_like(heads), "cannot be inverted"
    yield rotation, 2 * eye, r"\|R R\^T - I\| up to 3"
    yield rotation, torch.zeros(64, 64), "up to 1"
    yield rotation, eye + 1e-3 * torch.ones(64, 64), "orthogonal"
    yield rotation, torch.full((64, 64), NAN), "not finite"
    yield rotation, 1e300 * eye.double(), "orthogonal"
    yield rotation, torch.eye(32), "got a tensor"
    permutation = "blocks.0.up_down_permutation"
    yield permutation, torch.zeros(96, dtype=torch.int64), "from 0 to 0, 1 of them distinct"
    yield permutation, torch.arange(96) + 1, "from 1 to 96"
    yield permutation, torch.arange(96) - 1, "from -1 to 94"
    yield permutation, torch.arange(96.0), "of float32; give"
    yield permutation, torch.arange(96, dtype=torch.int32), "of int32; give"
    yield "blocks.7.value_output", heads, "unknown site 'blocks.7.value_output'"
    yield "lm_head", eye, "unknown site"


@pytest.mark.parametrize(("name", "matrix", "message"), list(hostile()))
def test_a_hostile_matrix_is_refused_and_leaves_the_model_alone(name: str, matrix: object, message: str) -> None:
    decoder_map = map_decoder(make_tiny_model("llama", tied=True))
    saved = {key: value.clone() for key, value in decoder_map.model.state_dict().items()}
    with pytest.raises(ContractError, match=message):
        fold(decoder_map, name, matrix)  # type: ignore[arg-type]
    assert decoder_map.is_tied
    assert all(torch.equal(value, saved[key]) for key, value in decoder_map.model.state_dict().items())


def test_weights_that_overflow_are_refused_before_anything_is_written() -> None:
    decoder_map = map_decoder(make_tiny_model("llama"))
    down = decoder_map.linear("blocks.0.down")
    down.weight[0, 0] = 1e36
    site = decoder_map.site("blocks.0.up_down_diagonal")
    saved = decoder_map.linear("blocks.0.up").weight.clone()
    with pytest.raises(ContractError, match="that float32 cannot hold"):
        fold(decoder_map, site, torch.full(site.shape, 1e-5))
    assert torch.equal(decoder_map.linear("blocks.0.up").weight, saved)


def test_a_site_not_sound_for_the_architecture_is_unknown() -> None:
    decoder_map = map_decoder(make_tiny_model("gemma3"))
    with pytest.raises(ContractError, match="unknown site 'residual_rotation'"):
        fold(decoder_map, "residual_rotation", torch.eye(64))


@pytest.mark.parametrize(
    ("site", "layer"),
    [
        ("blocks.0.value_output", "blocks.0.o"),
        ("blocks.0.qkv.norm_diagonal", "blocks.0.k"),
        ("blocks.0.gate_up.norm_diagonal", "blocks.0.up"),
        ("blocks.0.up_down_permutation", "blocks.0.gate"),
        ("residual_rotation", "blocks.1.down"),
    ],
)
def test_a_layer_that_is_installed_bars_the_folds_that_touch_it(site: str, layer: str) -> None:
    decoder_map = map_decoder(make_tiny_model("llama"))
    decoder_map.replace(layer, nn.Identity())
    with pytest.raises(ContractError, match=f"changes layer '{layer}', which is installed"):
        fold(decoder_map, site, random_matrix(decoder_map.site(site)))
    fold(decoder_map, "blocks.1.value_output", random_matrix(decoder_map.site("blocks.1.value_output")))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 1.2), index=st.integers(0, 10))
def test_any_accepted_diagonal_keeps_the_function(seed: int, spread: float, index: int) -> None:
    decoder_map = map_decoder(make_tiny_model("qwen3"))
    sites = [site for site in decoder_map.sites if site.kind.endswith("diagonal")]
    site = sites[index % len(sites)]
    tokens = make_tiny_tokens(1, 12)
    before = logits(decoder_map, tokens)
    fold(decoder_map, site, (spread * torch.randn(site.shape, generator=torch.Generator().manual_seed(seed))).exp())
    assert relative(logits(decoder_map, tokens), before) < MAX_RELATIVE
