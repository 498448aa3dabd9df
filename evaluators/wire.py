"""The Session calls as messages: JSON descriptions beside lists of tensors.

    op             arguments                                        tensors                        reply
    hello          --                                               --                             see `encode_hello`
    weight         layer                                            --                             [(N, K) float32]
    inputs         group, stream, max_tokens                        --                             [(T, K) float32]
    second_moment  group, stream, max_tokens                        --                             [(K, K) float64]
    output_error   layer, transform, activation, low_rank           codes, scales, steps', a, b    value
    gate_loss      --                                               --                             value
    fold           site                                             [matrix]                       --
    install        layer, transform, activation, low_rank           codes, scales, steps', a, b    --
    log            message                                          --                             --

A request is ``{"op", "args"}``. A reply is the result, or ``{"error": {"kind": "contract", "message"}}``, which the
client raises as `ContractError`. Two kinds of refusal: what an honest client can send by a mistake of the program is
a `ContractError` (the program may catch it and try something else); what only a forged client sends is a
`ProtocolError`, and ends the run. Shapes against the layer, ranges of codes and limits of the contract are checked by
the contract, not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, get_args

import torch
from torch import Tensor

from evaluators.errors import ContractError
from evaluators.session import Group, Layer, Site, Stream
from evaluators.transport import ProtocolError
from forge_kernels.rules import CODE_RULES, SCALE_RULES, ActivationRule, Encoded, LowRank
from forge_kernels.transforms import BlockMatrix, Diagonal, Hadamard, Permutation, Step, Transform

MAX_STEPS: Final = 16
MAX_NAME: Final = 256
MAX_LOG_MESSAGE: Final = 8192
STREAMS: Final[tuple[str, ...]] = get_args(Stream)

_INSTALL_ARGUMENTS: Final = frozenset({"layer", "transform", "activation", "low_rank"})
_MEASURE_ARGUMENTS: Final = frozenset({"group", "stream", "max_tokens"})
_ARGUMENTS: Final[dict[str, frozenset[str]]] = {
    "hello": frozenset(),
    "weight": frozenset({"layer"}),
    "inputs": _MEASURE_ARGUMENTS,
    "second_moment": _MEASURE_ARGUMENTS,
    "output_error": _INSTALL_ARGUMENTS,
    "gate_loss": frozenset(),
    "fold": frozenset({"site"}),
    "install": _INSTALL_ARGUMENTS,
    "log": frozenset({"message"}),
}
OPS: Final[tuple[str, ...]] = tuple(_ARGUMENTS)
_TENSOR_STEPS: Final = ("diagonal", "permutation", "block_matrix")


class Coded(NamedTuple):
    """A value as JSON and the tensors that it refers to, in order."""

    description: Any
    tensors: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class InstallArguments:
    """What `Session.install` and `Session.output_error` are given, apart from the layer."""

    weight: Encoded
    transform: Transform
    activation: ActivationRule
    low_rank: LowRank | None


class Hello(NamedTuple):
    """What a session is about."""

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    sites: tuple[Site, ...]
    device: str
    seed: int


def encode_transform(transform: Transform) -> Coded:
    """Describe a transform.

    Raises:
        ContractError: it is not a tuple of at most 16 steps of the listed families.
    """
    if not isinstance(transform, tuple | list) or len(transform) > MAX_STEPS:
        raise ContractError(f"a transform is a tuple of at most {MAX_STEPS} steps, not {type(transform).__name__}")
    steps: list[dict[str, Any]] = []
    tensors: list[Tensor] = []
    for step in transform:
        if isinstance(step, Hadamard):
            if type(step.size) is not int:
                raise ContractError(f"Hadamard size {step.size!r} is not an int")
            steps.append({"kind": "hadamard", "size": step.size})
        elif isinstance(step, Diagonal):
            steps.append({"kind": "diagonal"})
            tensors.append(_require_tensor(step.scale_K, "Diagonal.scale_K"))
        elif isinstance(step, Permutation):
            steps.append({"kind": "permutation"})
            tensors.append(_require_tensor(step.index_K, "Permutation.index_K"))
        elif isinstance(step, BlockMatrix):
            steps.append({"kind": "block_matrix"})
            tensors.append(_require_tensor(step.matrix_Bij, "BlockMatrix.matrix_Bij"))
        else:
            raise ContractError(
                f"transform step {type(step).__name__} is not one of Diagonal, Permutation, Hadamard, BlockMatrix"
            )
    return Coded(steps, tensors)


def decode_transform(description: object, tensors: Sequence[Tensor]) -> Transform:
    """Rebuild a transform; every tensor must be used.

    Raises:
        ProtocolError: the description is malformed or the number of tensors differs.
        ContractError: a tensor has the wrong number of axes or dtype for its step.
    """
    steps = _check_steps(description)
    if len(tensors) != sum(kind in _TENSOR_STEPS for kind, _ in steps):
        raise ProtocolError(f"a transform of {len(steps)} steps came with {len(tensors)} tensors")
    remaining = iter(tensors)
    result: list[Step] = []
    for kind, size in steps:
        if kind == "hadamard":
            result.append(Hadamard(size=size))
        elif kind == "diagonal":
            result.append(Diagonal(scale_K=_require_axes(next(remaining), 1, "Diagonal.scale_K", floating=True)))
        elif kind == "permutation":
            index_K = _require_axes(next(remaining), 1, "Permutation.index_K", floating=False)
            result.append(Permutation(index_K=index_K.to(torch.int64)))
        else:
            matrix_Bij = _require_axes(next(remaining), 3, "BlockMatrix.matrix_Bij", floating=True)
            result.append(BlockMatrix(matrix_Bij=matrix_Bij))
    return tuple(result)


def encode_install(
    weight: Encoded, *, transform: Transform, activation: ActivationRule | None, low_rank: LowRank | None
) -> Coded:
    """Describe the arguments of an install; the description is a dict without the layer.

    Raises:
        ContractError: an argument of another type.
    """
    if not isinstance(weight, Encoded):
        raise ContractError(f"weight is {type(weight).__name__}, not Encoded; encode(...) makes one")
    if activation is None:
        activation = ActivationRule()
    if not isinstance(activation, ActivationRule):
        raise ContractError(f"activation is {type(activation).__name__}, not ActivationRule")
    if low_rank is not None and not isinstance(low_rank, LowRank):
        raise ContractError(f"low_rank is {type(low_rank).__name__}, not LowRank")
    steps, step_tensors = encode_transform(transform)
    tensors = [_require_tensor(weight.codes_NK, "codes_NK"), _require_tensor(weight.scales_NB, "scales_NB")]
    tensors += step_tensors
    if low_rank is not None:
        tensors += [_require_tensor(low_rank.a_RK, "a_RK"), _require_tensor(low_rank.b_NR, "b_NR")]
    description = {
        "transform": steps,
        "activation": {"scale_rule": str(activation.scale_rule), "code_rule": str(activation.code_rule)},
        "low_rank": low_rank is not None,
    }
    return Coded(description, tensors)


def decode_install(description: object, tensors: Sequence[Tensor]) -> InstallArguments:
    """Rebuild the arguments of an install; keys other than the three of `encode_install` are ignored.

    Raises:
        ProtocolError: the description is malformed or the number of tensors differs.
        ContractError: an unknown rule, or a tensor with the wrong number of axes or dtype.
    """
    if not isinstance(description, dict) or not description.keys() >= {"transform", "activation", "low_rank"}:
        raise ProtocolError("an install is not described by transform, activation and low_rank")
    has_branch = description["low_rank"]
    if not isinstance(has_branch, bool):
        raise ProtocolError("low_rank of an install is not true or false")
    num_branch = 2 if has_branch else 0
    if len(tensors) < 2 + num_branch:
        raise ProtocolError(f"an install came with {len(tensors)} tensors")
    activation = _decode_activation(description["activation"])
    transform = decode_transform(description["transform"], tensors[2 : len(tensors) - num_branch])
    weight = Encoded(
        codes_NK=_require_axes(tensors[0], 2, "codes_NK", floating=False),
        scales_NB=_require_axes(tensors[1], 2, "scales_NB", floating=False),
    )
    low_rank = None
    if has_branch:
        low_rank = LowRank(
            a_RK=_require_axes(tensors[-2], 2, "a_RK", floating=True),
            b_NR=_require_axes(tensors[-1], 2, "b_NR", floating=True),
        )
    return InstallArguments(weight=weight, transform=transform, activation=activation, low_rank=low_rank)


def encode_hello(hello: Hello) -> dict[str, Any]:
    """Describe a session's layers, groups, sites, device and seed."""
    return {
        "layers": [
            [layer.name, layer.block, layer.role, layer.group, layer.num_outputs, layer.num_inputs]
            for layer in hello.layers
        ],
        "groups": [
            [group.name, group.block, group.role, group.num_inputs, [layer.name for layer in group.layers]]
            for group in hello.groups
        ],
        "sites": [[site.name, site.kind, site.block, list(site.shape)] for site in hello.sites],
        "device": hello.device,
        "seed": hello.seed,
    }


def decode_hello(description: dict[str, Any]) -> Hello:
    """Rebuild what `encode_hello` described; the worker's side, which trusts the evaluator."""
    layers = {
        name: Layer(name=name, block=block, role=role, group=group, num_outputs=num_outputs, num_inputs=num_inputs)
        for name, block, role, group, num_outputs, num_inputs in description["layers"]
    }
    groups = tuple(
        Group(name=name, block=block, role=role, layers=tuple(layers[n] for n in names), num_inputs=num_inputs)
        for name, block, role, num_inputs, names in description["groups"]
    )
    sites = tuple(
        Site(name=name, kind=kind, block=block, shape=tuple(shape)) for name, kind, block, shape in description["sites"]
    )
    return Hello(tuple(layers.values()), groups, sites, description["device"], description["seed"])


def encode_value(value: float) -> dict[str, Any]:
    """Describe a number; JSON has no infinities and NaN, so these travel as text."""
    return {"value": value if math.isfinite(value) else str(float(value))}


def decode_value(description: dict[str, Any]) -> float:
    """Return the number that `encode_value` described."""
    return float(description["value"])


def check_request(body: dict[str, Any], num_tensors: int) -> tuple[str, dict[str, Any]]:
    """Return op and arguments of a request whose form is right, before anything acts on it.

    Raises:
        ProtocolError: unknown op, missing or surplus arguments, an argument of the wrong type or length, or tensors
            where the op takes none.
    """
    if body.keys() != {"op", "args"} or not isinstance(body["op"], str) or not isinstance(body["args"], dict):
        raise ProtocolError("a request is not an op with arguments")
    op, args = body["op"], body["args"]
    if op not in _ARGUMENTS:
        raise ProtocolError(f"unknown op {op[:40]!r}; known: {', '.join(OPS)}")
    if args.keys() != _ARGUMENTS[op]:
        raise ProtocolError(f"{op} takes the arguments {sorted(_ARGUMENTS[op])}")
    for key in ("layer", "group", "site"):
        if key in args and not (isinstance(args[key], str) and len(args[key]) <= MAX_NAME):
            raise ProtocolError(f"{key} of {op} is not a name")
    if "message" in args and not (isinstance(args["message"], str) and len(args["message"]) <= MAX_LOG_MESSAGE):
        raise ProtocolError(f"message of {op} is not a text of at most {MAX_LOG_MESSAGE} characters")
    if "stream" in args and args["stream"] not in STREAMS:
        raise ProtocolError(f"stream of {op} is not one of {', '.join(STREAMS)}")
    if "max_tokens" in args:
        max_tokens = args["max_tokens"]
        if max_tokens is not None and not (type(max_tokens) is int and 0 < max_tokens < 1 << 40):
            raise ProtocolError(f"max_tokens of {op} is not a positive int")
    _check_tensor_count(op, num_tensors)
    return op, args


def _check_tensor_count(op: str, num_tensors: int) -> None:
    if op in ("install", "output_error"):
        is_right = 2 <= num_tensors <= 4 + MAX_STEPS
    else:
        is_right = num_tensors == (1 if op == "fold" else 0)
    if not is_right:
        raise ProtocolError(f"{op} came with {num_tensors} tensors")


def _check_steps(description: object) -> list[tuple[str, int]]:
    if not isinstance(description, list) or len(description) > MAX_STEPS:
        raise ProtocolError(f"a transform is not a list of at most {MAX_STEPS} steps")
    steps: list[tuple[str, int]] = []
    for step in description:
        if not isinstance(step, dict) or not isinstance(step.get("kind"), str):
            raise ProtocolError("a transform step has no kind")
        kind, size = step["kind"], step.get("size")
        if kind == "hadamard" and step.keys() == {"kind", "size"} and type(size) is int and 0 < size < 1 << 20:
            steps.append((kind, size))
        elif kind in _TENSOR_STEPS and step.keys() == {"kind"}:
            steps.append((kind, 0))
        else:
            raise ProtocolError(f"transform step {str(step)[:80]} is malformed")
    return steps


def _decode_activation(description: object) -> ActivationRule:
    if not isinstance(description, dict) or description.keys() != {"scale_rule", "code_rule"}:
        raise ProtocolError("an activation rule is not described by scale_rule and code_rule")
    scale_rule, code_rule = description["scale_rule"], description["code_rule"]
    if scale_rule not in SCALE_RULES:
        raise ContractError(f"unknown scale rule {str(scale_rule)[:40]!r}; known: {', '.join(SCALE_RULES)}")
    if code_rule not in CODE_RULES:
        raise ContractError(f"unknown code rule {str(code_rule)[:40]!r}; known: {', '.join(CODE_RULES)}")
    return ActivationRule(scale_rule=scale_rule, code_rule=code_rule)


def _require_tensor(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ContractError(f"{name} is {type(value).__name__}, not a tensor")
    return value


def _require_axes(tensor: Tensor, num_axes: int, name: str, *, floating: bool) -> Tensor:
    if tensor.ndim != num_axes:
        raise ContractError(f"{name} has {tensor.ndim} axes, not {num_axes}")
    if tensor.is_floating_point() != floating or tensor.dtype is torch.bool:
        raise ContractError(f"{name} has dtype {tensor.dtype}; {'a floating' if floating else 'an integer'} one is due")
    return tensor
