"""Session calls as messages: what goes in comes out, and what no honest client sends is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluators.errors import ContractError
from evaluators.session import Group, Layer, Site
from evaluators.transport import ProtocolError
from evaluators.wire import (
    MAX_LOG_MESSAGE,
    MAX_STEPS,
    OPS,
    Hello,
    check_request,
    decode_hello,
    decode_install,
    decode_transform,
    decode_value,
    encode_hello,
    encode_install,
    encode_transform,
    encode_value,
)
from forge_kernels.rules import ActivationRule, Encoded, LowRank
from forge_kernels.transforms import BlockMatrix, Diagonal, Hadamard, Permutation

NUM_INPUTS = 64


def make_step(kind: str) -> Any:
    generator = torch.Generator().manual_seed(3)
    if kind == "diagonal":
        return Diagonal(scale_K=torch.rand(NUM_INPUTS, generator=generator) + 0.5)
    if kind == "permutation":
        return Permutation(index_K=torch.randperm(NUM_INPUTS, generator=generator))
    if kind == "block_matrix":
        return BlockMatrix(matrix_Bij=torch.randn(2, 32, 32, generator=generator).bfloat16())
    return Hadamard(size=int(kind))


def make_weight() -> Encoded:
    return Encoded(
        codes_NK=torch.randint(0, 8, (6, NUM_INPUTS), dtype=torch.uint8),
        scales_NB=torch.randint(100, 140, (6, 2), dtype=torch.uint8),
    )


def assert_same_steps(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    assert [type(step) for step in left] == [type(step) for step in right]
    for a, b in zip(left, right, strict=True):
        for name in vars(a):
            x, y = getattr(a, name), getattr(b, name)
            assert torch.equal(x, y) and x.dtype is y.dtype if isinstance(x, torch.Tensor) else x == y


@given(st.lists(st.sampled_from(["diagonal", "permutation", "block_matrix", "32", "64"]), max_size=MAX_STEPS))
def test_transforms_survive_the_way(kinds: list[str]) -> None:
    transform = tuple(make_step(kind) for kind in kinds)
    description, tensors = encode_transform(transform)
    assert_same_steps(decode_transform(description, tensors), transform)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("kinds", [[], ["diagonal", "32"], ["permutation", "block_matrix"]])
def test_installs_survive_the_way(kinds: list[str], branch: bool) -> None:
    weight, transform = make_weight(), tuple(make_step(kind) for kind in kinds)
    low_rank = (
        LowRank(a_RK=torch.randn(3, NUM_INPUTS).bfloat16(), b_NR=torch.randn(6, 3).bfloat16()) if branch else None
    )
    rule = ActivationRule(scale_rule="search")
    coded = encode_install(weight, transform=transform, activation=rule, low_rank=low_rank)
    result = decode_install(coded.description | {"layer": "blocks.0.q"}, coded.tensors)
    assert torch.equal(result.weight.codes_NK, weight.codes_NK)
    assert torch.equal(result.weight.scales_NB, weight.scales_NB)
    assert result.activation == rule
    assert_same_steps(result.transform, transform)
    assert (result.low_rank is None) is (low_rank is None)
    if low_rank is not None and result.low_rank is not None:
        assert torch.equal(result.low_rank.a_RK, low_rank.a_RK)
        assert torch.equal(result.low_rank.b_NR, low_rank.b_NR)


def test_no_activation_rule_means_the_default() -> None:
    coded = encode_install(make_weight(), transform=(), activation=None, low_rank=None)
    assert decode_install(coded.description, coded.tensors).activation == ActivationRule()


def test_hello_survives_the_way() -> None:
    layers = tuple(
        Layer(name=f"blocks.1.{role}", block=1, role=role, group="blocks.1.qkv", num_outputs=8, num_inputs=32)
        for role in ("q", "k", "v")
    )
    group = Group(name="blocks.1.qkv", block=1, role="qkv", layers=layers, num_inputs=32)
    sites = (
        Site(name="blocks.1.value_output", kind="value_output", block=1, shape=(2, 4, 4)),
        Site(name="residual_rotation", kind="residual_rotation", block=None, shape=(32, 32)),
    )
    hello = Hello(layers, (group,), sites, "cpu", -7)
    assert decode_hello(encode_hello(hello)) == hello


@pytest.mark.parametrize("value", [0.0, -1.5, 1e300, math.inf, -math.inf])
def test_values_survive_the_way(value: float) -> None:
    assert decode_value(encode_value(value)) == value
    assert math.isnan(decode_value(encode_value(math.nan)))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: encode_transform("hadamard"), "str"),
        (lambda: encode_transform((torch.ones(3),)), "Tensor"),
        (lambda: encode_transform((Hadamard(size=32),) * (MAX_STEPS + 1)), "16 steps"),
        (lambda: encode_transform((Diagonal(scale_K=[1.0]),)), "scale_K"),
        (lambda: encode_install(torch.ones(2), transform=(), activation=None, low_rank=None), "Encoded"),
        (lambda: encode_install(make_weight(), transform=(), activation="even", low_rank=None), "ActivationRule"),
        (lambda: encode_install(make_weight(), transform=(), activation=None, low_rank=4), "LowRank"),
    ],
)
def test_mistakes_of_a_program_are_contract_errors_that_name_them(make: Any, named: str) -> None:
    with pytest.raises(ContractError, match=named):
        make()


@pytest.mark.parametrize(
    ("steps", "num_tensors"),
    [
        (None, 0),
        ([{"kind": "diagonal"}], 0),
        ([{"kind": "diagonal"}], 2),
        ([{"kind": "hadamard", "size": 32}], 1),
        ([{"kind": "hadamard"}], 0),
        ([{"kind": "hadamard", "size": True}], 0),
        ([{"kind": "hadamard", "size": 0}], 0),
        ([{"kind": "hadamard", "size": 1 << 40}], 0),
        ([{"kind": "hadamard", "size": 32, "extra": 1}], 0),
        ([{"kind": "diagonal", "size": 32}], 1),
        ([{"kind": "dense"}], 1),
        ([{"kind": ["diagonal"]}], 1),
        (["diagonal"], 1),
        ([{"kind": "hadamard", "size": 32}] * (MAX_STEPS + 1), 0),
    ],
)
def test_malformed_transforms_are_protocol_errors(steps: object, num_tensors: int) -> None:
    with pytest.raises(ProtocolError):
        decode_transform(steps, [torch.ones(NUM_INPUTS)] * num_tensors)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("diagonal", torch.ones(2, 2)),
        ("diagonal", torch.ones(2, dtype=torch.int64)),
        ("permutation", torch.ones(2)),
        ("permutation", torch.ones(2, dtype=torch.bool)),
        ("block_matrix", torch.ones(32, 32)),
    ],
)
def test_tensors_of_the_wrong_kind_are_contract_errors(kind: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ContractError):
        decode_transform([{"kind": kind}], [tensor])


@pytest.mark.parametrize(
    "change",
    [
        {"low_rank": 1},
        {"low_rank": None},
        {"activation": None},
        {"activation": {"scale_rule": "even"}},
        {"activation": {"scale_rule": "even", "code_rule": "nearest", "table": []}},
        {"transform": None},
    ],
)
def test_malformed_installs_are_protocol_errors(change: dict[str, Any]) -> None:
    description, tensors = encode_install(make_weight(), transform=(), activation=None, low_rank=None)
    with pytest.raises(ProtocolError):
        decode_install(description | change, tensors)
    with pytest.raises(ProtocolError):
        decode_install({}, tensors)
    with pytest.raises(ProtocolError):
        decode_install(description, tensors[:1])
    with pytest.raises(ProtocolError):
        decode_install(description, [*tensors, torch.ones(3)])


@pytest.mark.parametrize("rule", [{"scale_rule": "exact"}, {"code_rule": "table"}, {"scale_rule": ["even"]}])
def test_unknown_rules_are_contract_errors(rule: dict[str, Any]) -> None:
    description, tensors = encode_install(make_weight(), transform=(), activation=None, low_rank=None)
    description["activation"] |= rule
    with pytest.raises(ContractError, match="rule"):
        decode_install(description, tensors)


HONEST: dict[str, tuple[dict[str, Any], int]] = {
    "hello": ({}, 0),
    "weight": ({"layer": "blocks.0.q"}, 0),
    "inputs": ({"group": "blocks.0.qkv", "stream": "quantized", "max_tokens": None}, 0),
    "second_moment": ({"group": "blocks.0.qkv", "stream": "reference", "max_tokens": 512}, 0),
    "output_error": ({"layer": "q", "transform": [], "activation": {}, "low_rank": False}, 2),
    "gate_loss": ({}, 0),
    "fold": ({"site": "blocks.0.up_down_diagonal"}, 1),
    "install": ({"layer": "q", "transform": [], "activation": {}, "low_rank": True}, 5),
    "log": ({"message": "x"}, 0),
}


@pytest.mark.parametrize("op", OPS)
def test_honest_requests_pass(op: str) -> None:
    args, num_tensors = HONEST[op]
    assert check_request({"op": op, "args": args}, num_tensors) == (op, args)


@pytest.mark.parametrize("op", OPS)
def test_requests_with_other_arguments_or_tensors_are_refused(op: str) -> None:
    args, num_tensors = HONEST[op]
    for wrong in (args | {"extra": 1}, dict(list(args.items())[1:]) if args else {"layer": "q"}):
        with pytest.raises(ProtocolError):
            check_request({"op": op, "args": wrong}, num_tensors)
    with pytest.raises(ProtocolError):
        check_request({"op": op, "args": args}, 40)
    with pytest.raises(ProtocolError):
        check_request({"op": op, "args": args, "more": 1}, num_tensors)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("weight", {"layer": 3}),
        ("weight", {"layer": "x" * 300}),
        ("inputs", {"stream": "future"}),
        ("inputs", {"stream": None}),
        ("inputs", {"stream": ["quantized"]}),
        ("inputs", {"max_tokens": 0}),
        ("inputs", {"max_tokens": -5}),
        ("inputs", {"max_tokens": True}),
        ("inputs", {"max_tokens": 10.0}),
        ("inputs", {"max_tokens": 1 << 60}),
        ("log", {"message": "x" * (MAX_LOG_MESSAGE + 1)}),
        ("log", {"message": None}),
        ("fold", {"site": None}),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(op: str, change: dict[str, Any]) -> None:
    args, num_tensors = HONEST[op]
    with pytest.raises(ProtocolError):
        check_request({"op": op, "args": args | change}, num_tensors)


@pytest.mark.parametrize(
    "body", [{}, {"op": "weight"}, {"op": 1, "args": {}}, {"op": "exec", "args": {}}, {"op": [], "args": {}}]
)
def test_unknown_ops_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        check_request(body, 0)
