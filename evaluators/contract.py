"""The rules that a quantized model must obey, and their check on every install.

`check_install` looks at tensors that may come from a hostile program: it trusts no type, shape, dtype or value, copies
what it accepts, and raises `ContractError` with a message that says what would be accepted. What is *counted* (class,
effective bits) is computed from checked installs, for the whole model, by `measure_contract`.

Legend: N output features, K input features, B = K / 32 blocks, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evaluators.errors import ContractError
from evaluators.installs import Install, branch_bits, coordinates_digest, step_names, transform_bits, weight_bits
from evaluators.results import ContractClass
from evaluators.session import Group, Layer
from forge_kernels.ops.decode import decode
from forge_kernels.rules import (
    CODE_RULE_MULTIPLY_ADDS,
    CODE_RULES,
    SCALE_RULES,
    ActivationRule,
    Encoded,
    LowRank,
)
from forge_kernels.transforms import (
    BLOCK,
    BlockMatrix,
    Diagonal,
    Hadamard,
    Permutation,
    Step,
    Transform,
    multiply_adds_per_element,
)

MINUS_ZERO = 8
NAN_SCALE = 255
HADAMARD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A versioned set of rules.

    max_bits: by class, the most effective bits per quantized weight.
    allowed_classes: classes that a finished model may have.
    max_condition: largest condition number of one block matrix, and largest ratio of magnitudes in one diagonal.
    max_multiply_adds: largest online cost of a transform and code rule together, per activation element.
    max_rank_share: the rank of a branch must stay below this share of min(N, K).
    max_steps: most steps of one transform.
    max_forward_passes: cap on metered subject-forward tokens, in passes over the calibration tokens.
    max_calls: most Session calls of one run, refused ones included.
    max_folds_per_site: most folds at one site; every one is kept in the artifact, and replayed where it is applied.
    """

    name: str
    max_bits: Mapping[ContractClass, float]
    allowed_classes: tuple[ContractClass, ...] = ("folded", "online", "corrected")
    max_condition: float = 1e4
    max_multiply_adds: float = 64.0
    max_rank_share: float = 0.25
    max_steps: int = 8
    max_forward_passes: int = 64
    max_calls: int = 20_000
    max_folds_per_site: int = 4


MXFP4_W4A4 = Contract(name="mxfp4-w4a4/1", max_bits={"folded": 4.25, "online": 5.5, "corrected": 6.0})
"""Strict MXFP4 for weights and activations of every linear layer of the blocks: E2M1, an E8M0 scale per 32 inputs."""

CONTRACTS: dict[str, Contract] = {MXFP4_W4A4.name: MXFP4_W4A4}


@dataclass(frozen=True, kw_only=True)
class ContractMeasure:
    """What a whole model comes to under its contract."""

    contract_class: ContractClass
    effective_bits: float


def check_install(
    contract: Contract,
    layer: Layer,
    weight: Encoded,
    *,
    transform: Transform = (),
    activation: ActivationRule | None = None,
    low_rank: LowRank | None = None,
) -> Install:
    """Check everything about one layer that can be checked alone, and return a copy that the program cannot reach.

    Args:
        contract: the rules.
        layer: the layer to install.
        weight: codes (N, K) uint8 in 0..15 without 8; scales (N, K / 32) uint8 without 255.
        transform: at most `contract.max_steps` steps of the listed families, float32 or bfloat16 (indices int64).
        activation: None stands for ``ActivationRule()``.
        low_rank: a (R, K) and b (N, R), bfloat16.

    Raises:
        ContractError: any rule is broken.
    """
    checked_weight = _check_weight(layer, weight)
    checked_transform = _check_transform(contract, layer, transform)
    checked_activation = _check_activation(layer, ActivationRule() if activation is None else activation)
    _check_online_cost(contract, layer, checked_transform, checked_activation)
    branch = None if low_rank is None else _check_low_rank(contract, layer, low_rank)
    return Install(weight=checked_weight, transform=checked_transform, activation=checked_activation, low_rank=branch)


def _check_transform(contract: Contract, layer: Layer, transform: Transform) -> Transform:
    """Check the steps of a transform for a layer with K inputs, and return copies; the cost is checked with the rule."""
    if not isinstance(transform, tuple | list):
        raise ContractError(f"layer {layer.name!r}: transform is a {type(transform).__name__}; give a tuple of steps")
    if len(transform) > contract.max_steps:
        raise ContractError(
            f"layer {layer.name!r}: transform has {len(transform)} steps; at most {contract.max_steps} are allowed"
        )
    return tuple(_check_step(contract, layer, index, step) for index, step in enumerate(transform))


def measure_contract(contract: Contract, groups: Sequence[Group], installs: Mapping[str, Install]) -> ContractMeasure:
    """Check a whole model and return its class and effective bits.

    Bits are those of codes and scales, of each group's transform (stored once, the layers of a group share it) and of
    the branches, divided by the number of quantized weights.

    Raises: ContractError: a layer without an install, a group whose layers disagree on transform or activation rule, a
        class that is not allowed, too many bits.
    """
    bits = num_weights = 0
    is_online = has_branch = False
    for group in groups:
        missing = [layer.name for layer in group.layers if layer.name not in installs]
        if missing:
            raise ContractError(f"not every layer is installed: {', '.join(missing)} of group {group.name!r} missing")
        members = [installs[layer.name] for layer in group.layers]
        if len({coordinates_digest(member.transform, member.activation) for member in members}) != 1:
            names = ", ".join(
                f"{layer.role}: {step_names(member.transform)} {member.activation.scale_rule} {member.activation.code_rule}"
                for layer, member in zip(group.layers, members, strict=True)
            )
            raise ContractError(
                f"layers of group {group.name!r} disagree on transform or activation rule ({names}); "
                "they read one input, so give all of them the same"
            )
        bits += transform_bits(members[0].transform)
        is_online = is_online or bool(members[0].transform) or members[0].activation.code_rule != "nearest"
        for member in members:
            bits += weight_bits(member) + branch_bits(member)
            num_weights += member.weight.codes_NK.numel()
            has_branch = has_branch or member.low_rank is not None
    effective_bits = bits / num_weights
    contract_class: ContractClass = "corrected" if has_branch else "online" if is_online else "folded"
    if contract_class not in contract.allowed_classes:
        raise ContractError(
            f"the model is of class {contract_class!r}; allowed here: {', '.join(contract.allowed_classes)}"
        )
    limit = contract.max_bits[contract_class]
    if effective_bits > limit:
        raise ContractError(
            f"the model has {effective_bits:.4f} effective bits per weight; class {contract_class!r} allows {limit:g}"
        )
    return ContractMeasure(contract_class=contract_class, effective_bits=effective_bits)


def _check_weight(layer: Layer, weight: Any) -> Encoded:
    if type(weight) is not Encoded:
        raise ContractError(f"layer {layer.name!r}: weight is a {type(weight).__name__}; give an Encoded")
    num_outputs, num_inputs = layer.num_outputs, layer.num_inputs
    codes_NK = _copy(layer, "codes", weight.codes_NK, (num_outputs, num_inputs), (torch.uint8,))
    scales_NB = _copy(layer, "scales", weight.scales_NB, (num_outputs, num_inputs // BLOCK), (torch.uint8,))
    if int(codes_NK.max()) > 15 or bool((codes_NK == MINUS_ZERO).any()):
        raise ContractError(f"layer {layer.name!r}: codes must lie in 0..15 and never be 8 (minus zero)")
    if bool((scales_NB == NAN_SCALE).any()):
        raise ContractError(f"layer {layer.name!r}: scale byte 255 stands for NaN and is never written; use 0..254")
    checked = Encoded(codes_NK=codes_NK, scales_NB=scales_NB)
    if not bool(decode(checked).isfinite().all()):
        raise ContractError(f"layer {layer.name!r}: codes times scales overflow float32; use smaller scale bytes")
    return checked


def _check_activation(layer: Layer, rule: Any) -> ActivationRule:
    if type(rule) is not ActivationRule:
        raise ContractError(f"layer {layer.name!r}: activation is a {type(rule).__name__}; give an ActivationRule")
    for name in (rule.scale_rule, rule.code_rule):
        if type(name) is not str:
            raise ContractError(f"layer {layer.name!r}: a rule is a {type(name).__name__}; give its name as a str")
    if rule.scale_rule not in SCALE_RULES:
        raise ContractError(
            f"layer {layer.name!r}: unknown scale rule {rule.scale_rule!r}; known: {', '.join(SCALE_RULES)}"
        )
    if rule.code_rule not in CODE_RULES:
        raise ContractError(
            f"layer {layer.name!r}: unknown code rule {rule.code_rule!r}; known: {', '.join(CODE_RULES)}"
        )
    return ActivationRule(scale_rule=rule.scale_rule, code_rule=rule.code_rule)


def _check_online_cost(contract: Contract, layer: Layer, transform: Transform, rule: ActivationRule) -> None:
    parts = {"transform": multiply_adds_per_element(transform), rule.code_rule: CODE_RULE_MULTIPLY_ADDS[rule.code_rule]}
    cost = sum(parts.values())
    if cost > contract.max_multiply_adds:
        names = " and ".join(name for name, part in parts.items() if part)
        raise ContractError(
            f"layer {layer.name!r}: {names} costs {cost:g} multiply-adds per element; "
            f"at most {contract.max_multiply_adds:g} are allowed"
        )


def _check_low_rank(contract: Contract, layer: Layer, branch: Any) -> LowRank:
    if type(branch) is not LowRank:
        raise ContractError(f"layer {layer.name!r}: low_rank is a {type(branch).__name__}; give a LowRank")
    a_RK = branch.a_RK
    if not isinstance(a_RK, Tensor) or a_RK.ndim != 2:
        raise ContractError(f"layer {layer.name!r}: low_rank.a_RK must be a tensor (R, {layer.num_inputs})")
    rank = int(a_RK.shape[0])
    limit = contract.max_rank_share * min(layer.num_outputs, layer.num_inputs)
    if not 1 <= rank < limit:
        raise ContractError(f"layer {layer.name!r}: rank {rank} of the branch must be at least 1 and below {limit:g}")
    a_copy_RK = _copy(layer, "low_rank.a_RK", a_RK, (rank, layer.num_inputs), (torch.bfloat16,))
    b_copy_NR = _copy(layer, "low_rank.b_NR", branch.b_NR, (layer.num_outputs, rank), (torch.bfloat16,))
    _require_finite(layer, "low_rank.a_RK", a_copy_RK)
    _require_finite(layer, "low_rank.b_NR", b_copy_NR)
    return LowRank(a_RK=a_copy_RK, b_NR=b_copy_NR)


def _check_step(contract: Contract, layer: Layer, index: int, step: Any) -> Step:
    place = f"transform step {index}"
    floats = (torch.float32, torch.bfloat16)
    num_inputs = layer.num_inputs
    if type(step) is Hadamard:
        if type(step.size) is not int or step.size not in HADAMARD_SIZES or num_inputs % step.size:
            raise ContractError(
                f"layer {layer.name!r}: {place} is a Hadamard of size {step.size!r}; "
                f"use a power of two from 2 to 512 that divides {num_inputs}"
            )
        return Hadamard(size=step.size)
    if type(step) is Diagonal:
        scale_K = _copy(layer, f"{place} (diagonal)", step.scale_K, (num_inputs,), floats)
        _require_finite(layer, f"{place} (diagonal)", scale_K)
        magnitude_K = scale_K.double().abs()
        smallest, largest = float(magnitude_K.min()), float(magnitude_K.max())
        _check_condition(contract, layer, f"{place} (diagonal)", largest, smallest)
        return Diagonal(scale_K=scale_K)
    if type(step) is Permutation:
        index_K = _copy(layer, f"{place} (permutation)", step.index_K, (num_inputs,), (torch.int64,))
        if not torch.equal(index_K.sort().values, torch.arange(num_inputs)):
            raise ContractError(f"layer {layer.name!r}: {place} is not a permutation of 0..{num_inputs - 1}")
        return Permutation(index_K=index_K)
    if type(step) is BlockMatrix:
        matrix = step.matrix_Bij
        is_shared = isinstance(matrix, Tensor) and matrix.ndim == 3 and matrix.shape[0] == 1
        num_matrices = 1 if is_shared else num_inputs // BLOCK
        matrix_Bij = _copy(layer, f"{place} (block matrix)", matrix, (num_matrices, BLOCK, BLOCK), floats)
        _require_finite(layer, f"{place} (block matrix)", matrix_Bij)
        try:
            singular_BS = torch.linalg.svdvals(matrix_Bij.double())
        except RuntimeError as error:  # torch.linalg.LinAlgError, which has no typed name
            raise ContractError(f"layer {layer.name!r}: {place} has no singular values ({error})") from error
        for largest, smallest in zip(singular_BS[:, 0].tolist(), singular_BS[:, -1].tolist(), strict=True):
            _check_condition(contract, layer, f"{place} (block matrix)", largest, smallest)
        return BlockMatrix(matrix_Bij=matrix_Bij)
    raise ContractError(
        f"layer {layer.name!r}: {place} is a {type(step).__name__}; use Diagonal, Permutation, Hadamard or BlockMatrix"
    )


def _check_condition(contract: Contract, layer: Layer, place: str, largest: float, smallest: float) -> None:
    if smallest <= 0 or largest > contract.max_condition * smallest:
        ratio = "infinite" if smallest <= 0 else f"{largest / smallest:.3g}"
        raise ContractError(
            f"layer {layer.name!r}: {place} has a condition number of {ratio}; "
            f"at most {contract.max_condition:g} is allowed"
        )


def _require_finite(layer: Layer, place: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise ContractError(f"layer {layer.name!r}: {place} holds a value that is not finite")


def _copy(layer: Layer, place: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Check type, layout, dtype and shape, and return a contiguous copy on the CPU."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ContractError(f"layer {layer.name!r}: {place} must be a dense tensor {shape}")
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ContractError(
            f"layer {layer.name!r}: {place} is {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}; "
            f"give {known} {shape}"
        )
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
