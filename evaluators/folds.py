"""Function-preserving changes folded into full-precision weights, norms and embeddings, at no run-time cost.

At every site an invertible change of the activation is written into what produces it, its inverse into what reads it:

    norm_diagonal         gain' = gain * d                     W' = W diag(1/d), every layer of the group
    value_output          Wv'_g = M_g Wv_g, bv'_g = M_g bv_g   Wo'_h = Wo_h M_g^-1, g the key-value head of query head h
    up_down_diagonal      Wu' = diag(d) Wu, bu' = d * bu       Wd' = Wd diag(1/d)
    up_down_permutation   rows of Wg, Wu (and biases) moved    columns of Wd moved
    residual_rotation     E' = E R^T, Wo' = R Wo, Wd' = R Wd   W' = W diag(gain) R^T for q, k, v, gate, up, head
                          bo' = R bo, bd' = R bd               every gain 1

Attention mixes values with weights that do not depend on them, so M passes through it; act(gate) * up is linear in up,
so d passes through it; a norm without its gain commutes with every rotation, because it divides by a length.

Arithmetic is float64 on the float32 weights, rounded once to float32. All new values exist and are finite before the
first is written: a refused fold leaves the model as it was. Whether logits really stay is checked by the caller, who
has text.

Legend: K channels of the site, G key-value heads, R query heads per key-value head, D head size, N output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evaluators.architecture import DecoderMap
from evaluators.errors import ContractError
from evaluators.session import GroupRole, LayerRole, Site, SiteKind

MAX_CONDITION = 1e4
"""Largest ratio of singular values (of magnitudes, for a diagonal): float32 rounding grows by as much."""

MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-6, 1e6
"""Range of singular values (of magnitudes, for a diagonal): keeps weights far from overflow and from subnormals."""

MAX_ORTHOGONALITY_ERROR = 1e-4
"""Largest entry of ``|R R^T - I|``. A rotation within it is replaced by the nearest exactly orthogonal matrix."""

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Changes = list[tuple[Tensor, Tensor]]
"""Parameters and their new values, float64 or already in the parameter's dtype."""


def fold(decoder_map: DecoderMap, site: Site | str, matrix: Tensor) -> None:
    """Fold a change into the weights of the mapped model, in place.

    Args:
        decoder_map: the model; layers that the fold touches are still its full-precision linears.
        site: one of `decoder_map.sites`, or its name.
        matrix: see `evaluators.session.Site` for shape and meaning; a floating dtype, int64 for a permutation.

    Raises:
        ContractError: unknown site; wrong type, dtype or shape; values that are not finite; singular, badly
            conditioned, not orthogonal, or no permutation; a touched layer is already replaced. The values of the
            model are unchanged.
    """
    found = decoder_map.site(site)
    checked = _check_form(found, matrix)
    for layer in decoder_map.layers:
        touched = found.block is None or (layer.block == found.block and layer.role in _touched_roles(found))
        if touched and decoder_map.is_replaced(layer):
            raise ContractError(f"fold at {found.name!r} changes layer {layer.name!r}, which is installed; fold first")
    changes = _FOLDS[found.kind](decoder_map, found, checked.to(decoder_map.embedding.weight.device))
    rounded = [(parameter, value.to(parameter.dtype)) for parameter, value in changes]
    if not all(bool(value.isfinite().all()) for _, value in rounded):
        raise ContractError(f"fold at {found.name!r} makes weights that float32 cannot hold; give a smaller matrix")
    with torch.no_grad():
        for parameter, value in rounded:
            parameter.copy_(value)


def _fold_norm_diagonal(decoder_map: DecoderMap, site: Site, scale_K: Tensor) -> Changes:
    _check_diagonal(site, scale_K)
    group = decoder_map.group(f"blocks.{site.block}.{_norm_group(site)}")
    norm = decoder_map.input_norm(group)
    assert norm is not None  # qkv and gate_up have one
    weight_K = norm.module.get_parameter("weight")
    gain_K = norm.gain_K()
    new_weight_K = (gain_K * scale_K - norm.offset).to(weight_K.dtype)
    new_gain_K = new_weight_K.double() + norm.offset
    if bool(((new_gain_K == 0) & (gain_K != 0)).any()):
        raise ContractError(f"fold at {site.name!r} makes a norm gain vanish in float32; give entries closer to 1")
    # The layers get the inverse of the factor as rounded: near -1 a (1 + weight) norm keeps few digits of its gain.
    inverse_K = torch.where(gain_K == 0, 1 / scale_K, gain_K / torch.where(new_gain_K == 0, 1.0, new_gain_K))
    return [(weight_K, new_weight_K)] + [
        (linear.weight, linear.weight.double() * inverse_K)
        for linear in (decoder_map.linear(layer) for layer in group.layers)
    ]


def _fold_value_output(decoder_map: DecoderMap, site: Site, matrix_GDD: Tensor) -> Changes:
    sizes = torch.linalg.svdvals(matrix_GDD)
    _check_range(site, sizes.amax(-1), sizes.amin(-1), "singular values")
    value, output = _linear(decoder_map, site, "v"), _linear(decoder_map, site, "o")
    heads, size = decoder_map.num_kv_heads, decoder_map.head_dim
    output_NGRD = output.weight.double().reshape(-1, heads, decoder_map.num_heads // heads, size)
    changes: Changes = [
        (value.weight, (matrix_GDD @ value.weight.double().reshape(heads, size, -1)).flatten(0, 1)),
        (output.weight, torch.einsum("ngrd,gde->ngre", output_NGRD, torch.linalg.inv(matrix_GDD)).flatten(1)),
    ]
    if value.bias is not None:
        bias_GD = value.bias.double().view(heads, size)
        changes.append((value.bias, torch.einsum("gde,ge->gd", matrix_GDD, bias_GD).flatten()))
    return changes


def _fold_up_down_diagonal(decoder_map: DecoderMap, site: Site, scale_K: Tensor) -> Changes:
    _check_diagonal(site, scale_K)
    up, down = _linear(decoder_map, site, "up"), _linear(decoder_map, site, "down")
    changes: Changes = [
        (up.weight, up.weight.double() * scale_K[:, None]),
        (down.weight, down.weight.double() / scale_K),
    ]
    if up.bias is not None:
        changes.append((up.bias, up.bias.double() * scale_K))
    return changes


def _fold_up_down_permutation(decoder_map: DecoderMap, site: Site, index_K: Tensor) -> Changes:
    size = site.shape[0]
    if not torch.equal(index_K.sort().values, torch.arange(size, device=index_K.device)):
        raise ContractError(
            f"fold at {site.name!r} got entries from {int(index_K.min())} to {int(index_K.max())}, "
            f"{len(set(index_K.tolist()))} of them distinct; a permutation holds each of 0..{size - 1} once"
        )
    changes: Changes = []
    for linear in (_linear(decoder_map, site, "gate"), _linear(decoder_map, site, "up")):
        changes.append((linear.weight, linear.weight[index_K]))
        if linear.bias is not None:
            changes.append((linear.bias, linear.bias[index_K]))
    down = _linear(decoder_map, site, "down")
    return [*changes, (down.weight, down.weight[:, index_K])]


def _fold_residual_rotation(decoder_map: DecoderMap, site: Site, given_KK: Tensor) -> Changes:
    identity_KK = torch.eye(site.shape[0], dtype=torch.float64, device=given_KK.device)
    error = float((given_KK @ given_KK.T - identity_KK).abs().max())
    if not error <= MAX_ORTHOGONALITY_ERROR:
        raise ContractError(
            f"fold at {site.name!r} got a matrix R with |R R^T - I| up to {error:.2g}; an orthogonal one stays below "
            f"{MAX_ORTHOGONALITY_ERROR:g}"
        )
    rotation_KK = given_KK
    for _ in range(2):  # Newton-Schulz: squares the error, here from 1e-4 to below 1e-15
        rotation_KK = 1.5 * rotation_KK - 0.5 * rotation_KK @ rotation_KK.T @ rotation_KK

    decoder_map.untie()
    unit_K = torch.ones(site.shape[0], dtype=torch.float64, device=given_KK.device)
    changes: Changes = [(decoder_map.embedding.weight, decoder_map.embedding.weight.double() @ rotation_KK.T)]
    readers = [(decoder_map.final_norm, [decoder_map.head])]
    for group in decoder_map.groups:
        linears = [decoder_map.linear(layer) for layer in group.layers]
        norm = decoder_map.input_norm(group)
        if norm is not None:
            readers.append((norm, linears))
            continue
        for linear in linears:
            changes.append((linear.weight, rotation_KK @ linear.weight.double()))
            if linear.bias is not None:
                changes.append((linear.bias, rotation_KK @ linear.bias.double()))
    for norm, linears in readers:
        gain_K = norm.gain_K()
        changes.append((norm.module.get_parameter("weight"), unit_K - norm.offset))
        changes.extend((linear.weight, (linear.weight.double() * gain_K) @ rotation_KK.T) for linear in linears)
    return changes


_FOLDS: dict[SiteKind, Callable[[DecoderMap, Site, Tensor], Changes]] = {
    "norm_diagonal": _fold_norm_diagonal,
    "value_output": _fold_value_output,
    "up_down_diagonal": _fold_up_down_diagonal,
    "up_down_permutation": _fold_up_down_permutation,
    "residual_rotation": _fold_residual_rotation,
}


def _touched_roles(site: Site) -> tuple[LayerRole, ...]:
    """Return the roles whose weights a fold within one block changes."""
    if site.kind == "norm_diagonal":
        return ("q", "k", "v") if _norm_group(site) == "qkv" else ("gate", "up")
    roles: dict[SiteKind, tuple[LayerRole, ...]] = {
        "value_output": ("v", "o"),
        "up_down_diagonal": ("up", "down"),
        "up_down_permutation": ("gate", "up", "down"),
    }
    return roles[site.kind]


def _norm_group(site: Site) -> GroupRole:
    """Return the group of a norm_diagonal site, whose name is the group's with the kind behind it."""
    return "qkv" if site.name.endswith(".qkv.norm_diagonal") else "gate_up"


def _linear(decoder_map: DecoderMap, site: Site, role: LayerRole) -> nn.Linear:
    return decoder_map.linear(f"blocks.{site.block}.{role}")


def _check_form(site: Site, matrix: Any) -> Tensor:
    """Return the matrix detached, float64 unless it is a permutation; values are checked to be finite and no more."""
    dtypes = (torch.int64,) if site.kind == "up_down_permutation" else FLOAT_DTYPES
    known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(matrix, Tensor):
        raise ContractError(f"fold at {site.name!r} got {type(matrix).__name__}; give a tensor {site.shape} of {known}")
    if matrix.dtype not in dtypes or tuple(matrix.shape) != site.shape:
        given = f"{tuple(matrix.shape)} of {str(matrix.dtype).removeprefix('torch.')}"
        raise ContractError(f"fold at {site.name!r} got a tensor {given}; give {site.shape} of {known}")
    if site.kind == "up_down_permutation":
        return matrix.detach()
    finite = matrix.isfinite()
    if not bool(finite.all()):
        raise ContractError(f"fold at {site.name!r} got {int((~finite).sum())} values that are not finite; give none")
    return matrix.detach().double()


def _check_diagonal(site: Site, scale_K: Tensor) -> None:
    _check_range(site, scale_K.abs().amax(), scale_K.abs().amin(), "magnitudes")


def _check_range(site: Site, largest: Tensor, smallest: Tensor, what: str) -> None:
    """Refuse what is not invertible in practice; of several matrices the worst one speaks."""
    largest, smallest = largest.reshape(-1), smallest.reshape(-1)
    ratio = torch.where(smallest > 0, largest / smallest, torch.inf)
    worst = int(ratio.argmax())
    low, high = float(smallest[worst]), float(largest[worst])
    if low == 0:
        raise ContractError(f"fold at {site.name!r} got a matrix that cannot be inverted: {what} from 0 to {high:.3g}")
    if float(ratio[worst]) > MAX_CONDITION:
        raise ContractError(
            f"fold at {site.name!r} got {what} from {low:.3g} to {high:.3g}, a ratio of {float(ratio[worst]):.3g}; at "
            f"most {MAX_CONDITION:g} survives rounding"
        )
    low, high = float(smallest.min()), float(largest.max())
    if low < MIN_MAGNITUDE or high > MAX_MAGNITUDE:
        raise ContractError(
            f"fold at {site.name!r} got {what} from {low:.3g} to {high:.3g}; keep them within {MIN_MAGNITUDE:g} to "
            f"{MAX_MAGNITUDE:g}"
        )
