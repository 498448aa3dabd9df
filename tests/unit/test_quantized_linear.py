"""The scored layer computes the formula it stands for, and transforms a group's input once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from evaluators import quantized_linear
from evaluators.contract import MXFP4_W4A4, check_install
from evaluators.installs import Install
from evaluators.quantized_linear import QuantizedLinear, share_activations
from evaluators.session import Layer
from forge_kernels import (
    ActivationRule,
    BlockMatrix,
    Diagonal,
    Hadamard,
    LowRank,
    Permutation,
    apply_transform,
    block_gram,
    decode,
    encode,
    encode_with_swap,
    transform_weight,
)
from forge_kernels.ops.encode_activation import EncodedActivation
from forge_kernels.rules import CODE_RULES, CodeRule
from forge_kernels.transforms import Transform

N, K = 48, 64
LAYER = Layer(name="blocks.0.q", block=0, role="q", group="blocks.0.qkv", num_outputs=N, num_inputs=K)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_install(
    transform: Transform, *, rank: int = 0, rule: str = "even", codes: CodeRule = "nearest", seed: int = 0
) -> Install:
    branch = None
    if rank:
        branch = LowRank(a_RK=random(rank, K, seed=1).bfloat16(), b_NR=random(N, rank, seed=2).bfloat16())
    return check_install(
        MXFP4_W4A4,
        LAYER,
        encode(transform_weight(transform, random(N, K, seed=seed))),
        transform=transform,
        activation=ActivationRule(scale_rule=rule, code_rule=codes),  # type: ignore[arg-type]
        low_rank=branch,
    )


TRANSFORMS: dict[str, Transform] = {
    "none": (),
    "hadamard": (Hadamard(size=64),),
    "diagonal": (Diagonal(scale_K=random(K).mul(0.3).exp().bfloat16()),),
    "permutation": (Permutation(index_K=torch.randperm(K, generator=torch.Generator().manual_seed(0))),),
    "block matrices": (BlockMatrix(matrix_Bij=torch.linalg.qr(random(2, 32, 32)).Q),),
    "three steps": (
        Diagonal(scale_K=random(K).mul(0.3).exp()),
        Permutation(index_K=torch.arange(K).flip(0)),
        Hadamard(size=32),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("rank", "rule", "has_bias"), [(0, "even", True), (3, "rceil", False), (2, "search", True)])
def test_the_layer_is_its_formula(name: str, rank: int, rule: Any, has_bias: bool) -> None:
    install = make_install(TRANSFORMS[name], rank=rank, rule=rule)
    bias_N = random(N, seed=3) if has_bias else None
    module = QuantizedLinear(install, bias_N)
    x = random(2, 5, K, seed=4)
    encoded = decode(encode(apply_transform(TRANSFORMS[name], x), scale_rule=rule))
    expected = encoded.double() @ decode(install.weight).double().T
    if bias_N is not None:
        expected = expected + bias_N
    if install.low_rank is not None:
        expected = expected + x.double() @ install.low_rank.a_RK.double().T @ install.low_rank.b_NR.double().T
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-5, atol=1e-4)
    # A token's output does not depend on the tokens beside it.
    torch.testing.assert_close(module(x[1, 2:3]), module(x)[1, 2:3])


def test_close_to_the_full_precision_layer_in_every_coordinate_system() -> None:
    x, weight_NK = random(64, K, seed=4), random(N, K)
    for transform in TRANSFORMS.values():
        y = QuantizedLinear(make_install(transform), None)(x)
        expected = x @ weight_NK.T
        assert float((y - expected).square().sum() / expected.square().sum()) < 0.06


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    calls: list[Tensor] = []
    original = quantized_linear.encode_activation

    def count(x: Tensor, *route: Any, **rest: Any) -> EncodedActivation:
        calls.append(x)
        return original(x, *route, **rest)

    monkeypatch.setattr(quantized_linear, "encode_activation", count)
    return calls


def test_layers_that_agree_encode_their_input_once(encodings: list[Tensor]) -> None:
    transform = TRANSFORMS["hadamard"]
    modules = [QuantizedLinear(make_install(transform, seed=seed), None) for seed in range(3)]
    odd = QuantizedLinear(make_install(transform, rule="rceil"), None)
    alone = [module(random(4, K)) for module in (*modules, odd)]
    share_activations([*modules, odd])
    encodings.clear()
    for _ in range(2):
        x = random(4, K)
        assert all(torch.equal(module(x), y) for module, y in zip((*modules, odd), alone, strict=True))
    assert len(encodings) == 4


def test_a_shared_encoding_is_never_taken_for_another_input(encodings: list[Tensor]) -> None:
    first, second = (QuantizedLinear(make_install((), seed=seed), None) for seed in range(2))
    share_activations([first, second])
    x = random(4, K)
    first(x)
    x.mul_(2)  # the same object with other values
    torch.testing.assert_close(second(x), QuantizedLinear(make_install((), seed=1), None)(x))
    third, fourth = random(4, K, seed=5), random(4, K, seed=6)
    first(third)
    torch.testing.assert_close(second(fourth), QuantizedLinear(make_install((), seed=1), None)(fourth))
    assert len(encodings) == 6


def test_nothing_is_kept_once_every_reader_is_served() -> None:
    first, second = (QuantizedLinear(make_install((), seed=seed), None) for seed in range(2))
    share_activations([first, second])
    x = random(4, K)
    first(x)
    assert first.group_activation._kept.encoded is not None
    second(x)
    assert first.group_activation._kept.encoded is None
    first(x)
    first.group_activation.clear()
    assert second.group_activation._kept.encoded is None


def test_block_swap_looks_at_the_installed_weights_of_all_readers() -> None:
    transform = TRANSFORMS["block matrices"]
    installs = [make_install(transform, codes="block_swap", seed=seed) for seed in range(2)]
    modules = [QuantizedLinear(install, None) for install in installs]
    x = random(6, K, seed=9)
    transformed = apply_transform(transform, x)
    weights = [decode(install.weight) for install in installs]
    for module, weight in zip(modules, weights, strict=True):
        swapped = decode(encode_with_swap(transformed, block_gram((weight,))))
        torch.testing.assert_close(module(x), functional.linear(swapped, weight))
    share_activations(modules)
    swapped = decode(encode_with_swap(transformed, block_gram(tuple(weights))))
    for module, weight in zip(modules, weights, strict=True):
        torch.testing.assert_close(module(x), functional.linear(swapped, weight))
    nearest = QuantizedLinear(make_install(transform), None)
    assert modules[0].coordinates != nearest.coordinates
    share_activations([modules[0], nearest])
    assert modules[0].group_activation is not nearest.group_activation


def test_block_swap_lowers_the_error_of_a_layer_with_alike_columns() -> None:
    weight = random(N, K, seed=1) + 2 * random(N, 1, seed=2)
    x = random(64, K, seed=3)
    errors = {}
    for rule in CODE_RULES:
        install = check_install(MXFP4_W4A4, LAYER, encode(weight), activation=ActivationRule(code_rule=rule))
        module = QuantizedLinear(install, None)
        errors[rule] = float((module(x) - functional.linear(x, decode(install.weight))).square().mean())
    assert errors["block_swap"] < 0.8 * errors["nearest"]


def test_non_finite_inputs_are_passed_on() -> None:
    module = QuantizedLinear(make_install(()), None)
    x = random(3, K)
    x[1, 0] = torch.inf
    finite = module(x).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]
