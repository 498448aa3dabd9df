"""Where things are in a decoder: linear layers, groups that share an input, norms, and the places for sound folds.

`map_decoder` turns a transformers model into a `DecoderMap`, the only description of the model that the rest of the
package uses. It is built from the model's own modules and accounts for every parameter: a model with a parameter that
the map does not know (a fused projection, an expert, an adapter) is refused, because folds and scores would be wrong
silently.

Names are those of `evaluators.session`: layers ``blocks.<i>.<q|k|v|o|gate|up|down>``, groups
``blocks.<i>.<qkv|o|gate_up|down>`` in execution order. Each group reads:

    qkv       input norm of the attention          o       concatenated heads, (num_heads * head_dim)
    gate_up   input norm of the MLP                down    act(gate) * up

The map holds no weights; it points into one model. It does not import transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from evaluators.errors import ContractError, SubjectError
from evaluators.session import Group, GroupRole, Layer, LayerRole, Site
from forge_kernels.transforms import BLOCK


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between the architectures that can be mapped.

    gain_offset: the norm multiplies by ``gain_offset + weight``: 0 for Llama, 1 for Gemma.
    mlp_norm: the norm before gate/up. has_post_norms: attention and MLP outputs are normalized before they join the
    residual stream, so that the stream cannot be rotated by changing weights alone.
    """

    name: str
    gain_offset: float = 0.0
    mlp_norm: str = "post_attention_layernorm"
    has_post_norms: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(name="llama"),
    "MistralForCausalLM": Family(name="mistral"),
    "Qwen2ForCausalLM": Family(name="qwen2"),
    "Qwen3ForCausalLM": Family(name="qwen3"),
    "Gemma3ForCausalLM": Family(
        name="gemma3", gain_offset=1.0, mlp_norm="pre_feedforward_layernorm", has_post_norms=True
    ),
}
"""By class name of the transformers model."""

LAYER_PATHS: dict[LayerRole, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GROUP_ROLES: dict[GroupRole, tuple[LayerRole, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""In execution order."""

NORM_NAMES = frozenset(
    {
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "q_norm",
        "k_norm",
    }
)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm of the residual stream. Its output is ``x / rms(x) * gain_K`` with ``gain_K = offset + weight``."""

    module: nn.Module
    offset: float

    def gain_K(self) -> Tensor:
        """Return the factor that the norm multiplies by: (K,) float64, a new tensor."""
        return cast(Tensor, self.module.weight).detach().double() + self.offset

    def set_gain(self, gain_K: Tensor) -> None:
        """Write a new factor (K,) into the weight, in place and in the weight's dtype."""
        weight_K = cast(Tensor, self.module.weight)
        with torch.no_grad():
            weight_K.copy_(gain_K.to(torch.float64) - self.offset)


class DecoderMap:
    """The layers, groups and sites of one model, and the modules behind them.

    Attributes:
        model: the mapped transformers model.
        family: its `Family`.
        layers: every linear layer of the decoder blocks, in execution order.
        groups: layers that share an input, in execution order: per block qkv, o, gate_up, down.
        sites: where `evaluators.folds.fold` may act; only those sound for this architecture.
        block_modules: the decoder blocks, first to last.
        hidden_size, num_heads, num_kv_heads, head_dim, vocab_size: sizes in elements.
    """

    def __init__(self, model: nn.Module, family: Family) -> None:
        self.model = model
        self.family = family
        config: Any = model.config
        body = cast(nn.Module, model.model)
        self.block_modules: list[nn.Module] = list(cast(nn.ModuleList, body.layers))
        self.embedding = cast(nn.Embedding, body.embed_tokens)
        self.head = cast(nn.Linear, model.lm_head)
        self.final_norm = Norm(module=cast(nn.Module, body.norm), offset=family.gain_offset)
        self.hidden_size = int(config.hidden_size)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or self.hidden_size // self.num_heads)
        self.vocab_size = self.embedding.num_embeddings
        self._original: dict[str, nn.Linear] = {}
        self.groups: tuple[Group, ...] = tuple(
            self._describe_group(block, role) for block in range(self.num_blocks) for role in GROUP_ROLES
        )
        self.layers: tuple[Layer, ...] = tuple(layer for group in self.groups for layer in group.layers)
        self._layer_by_name = {layer.name: layer for layer in self.layers}
        self._group_by_name = {group.name: group for group in self.groups}
        self.sites: tuple[Site, ...] = tuple(self._describe_sites())
        self._site_by_name = {site.name: site for site in self.sites}
        self._check_parameters_known()

    @property
    def num_blocks(self) -> int:
        """Number of decoder blocks."""
        return len(self.block_modules)

    @property
    def is_tied(self) -> bool:
        """Whether the output head and the embedding are one parameter."""
        return self.head.weight is self.embedding.weight

    def layer(self, layer: Layer | str) -> Layer:
        """Return the layer of that name, or raise `ContractError`."""
        name = layer.name if isinstance(layer, Layer) else layer
        return _look_up(self._layer_by_name, name, "layer", "blocks.<i>.<q|k|v|o|gate|up|down>", self.num_blocks)

    def group(self, group: Group | str) -> Group:
        """Return the group of that name, or raise `ContractError`."""
        name = group.name if isinstance(group, Group) else group
        return _look_up(self._group_by_name, name, "group", "blocks.<i>.<qkv|o|gate_up|down>", self.num_blocks)

    def site(self, site: Site | str) -> Site:
        """Return the site of that name, or raise `ContractError`."""
        name = site.name if isinstance(site, Site) else site
        kinds = sorted({known.kind for known in self.sites})
        return _look_up(self._site_by_name, name, "site", f"sites of the kinds {', '.join(kinds)}", self.num_blocks)

    def module(self, layer: Layer | str) -> nn.Module:
        """Return the module that computes the layer now: an `nn.Linear` until it is replaced."""
        found = self.layer(layer)
        parent, attribute = self._slot(found)
        return cast(nn.Module, getattr(parent, attribute))

    def linear(self, layer: Layer | str) -> nn.Linear:
        """Return the full-precision linear of the layer, also after it was replaced in the model."""
        found = self.layer(layer)
        return self._original[found.name]

    def replace(self, layer: Layer | str, module: nn.Module) -> None:
        """Put `module` in the layer's place; the full-precision linear stays available through `linear`."""
        found = self.layer(layer)
        parent, attribute = self._slot(found)
        setattr(parent, attribute, module)

    def restore(self, layer: Layer | str) -> None:
        """Undo `replace`."""
        self.replace(layer, self.linear(layer))

    def is_replaced(self, layer: Layer | str) -> bool:
        """Whether another module computes the layer now."""
        return self.module(layer) is not self.linear(layer)

    def group_hook_module(self, group: Group | str) -> nn.Module:
        """Return the module whose first positional input is the group's input, (batch, length, K).

        It is the module that computes the group's first layer now, so ask again after `replace`.
        """
        return self.module(self.group(group).layers[0])

    def input_norm(self, group: Group | str) -> Norm | None:
        """Return the norm that feeds the group: qkv and gate_up have one, o and down have none."""
        found = self.group(group)
        attribute = {"qkv": "input_layernorm", "gate_up": self.family.mlp_norm}.get(found.role)
        if attribute is None:
            return None
        module = cast(nn.Module, getattr(self.block_modules[found.block], attribute))
        return Norm(module=module, offset=self.family.gain_offset)

    def parameter_prefix(self, layer: Layer | str) -> str:
        """Return the layer's module path in the model's state dict, without ``.weight``."""
        found = self.layer(layer)
        return f"model.layers.{found.block}.{LAYER_PATHS[found.role]}"

    def high_precision_parameters(self) -> dict[str, nn.Parameter]:
        """Return what is never quantized, by state-dict name: norms, biases of the layers, embedding and output head.

        A tied head appears once, as the embedding. Tensors of replaced layers are those of the full-precision linear.
        """
        weights = {id(linear.weight) for linear in self._original.values()}
        replaced = {self.parameter_prefix(layer) for layer in self.layers if self.is_replaced(layer)}
        kept: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in weights or name.startswith(tuple(f"{prefix}." for prefix in replaced)):
                continue
            kept[name] = parameter
        for layer in self.layers:
            bias = self.linear(layer).bias
            if bias is not None:
                kept[f"{self.parameter_prefix(layer)}.bias"] = bias
        return dict(sorted(kept.items()))

    def untie(self) -> None:
        """Give the output head a weight of its own, equal to the embedding; logits do not change."""
        if not self.is_tied:
            return
        self.head.weight = nn.Parameter(self.embedding.weight.detach().clone(), requires_grad=False)
        config: Any = self.model.config
        config.tie_word_embeddings = False

    def check_finite(self) -> None:
        """Raise `SubjectError` naming the first parameter that holds NaN or infinity."""
        for name, parameter in self._named_tensors():
            # A finite sum proves that every element is; the sum is cheaper, and only a suspect gets the second look.
            if bool(parameter.sum(dtype=torch.float64).isfinite()) or bool(parameter.isfinite().all()):
                continue
            count = int((~parameter.isfinite()).sum())
            raise SubjectError(
                f"{name} holds {count} non-finite of {parameter.numel()} values; a subject needs finite weights: "
                "download or export the model again"
            )

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self.layers:
            linear = self.linear(layer)
            yield f"layer {layer.name!r} (weight)", linear.weight
            if linear.bias is not None:
                yield f"layer {layer.name!r} (bias)", linear.bias
        for name, parameter in self.high_precision_parameters().items():
            yield f"parameter {name!r}", parameter

    def _slot(self, layer: Layer) -> tuple[nn.Module, str]:
        branch, attribute = LAYER_PATHS[layer.role].split(".")
        return cast(nn.Module, getattr(self.block_modules[layer.block], branch)), attribute

    def _describe_group(self, block: int, role: GroupRole) -> Group:
        name = f"blocks.{block}.{role}"
        layers = tuple(self._describe_layer(block, layer_role, name) for layer_role in GROUP_ROLES[role])
        return Group(name=name, block=block, role=role, layers=layers, num_inputs=layers[0].num_inputs)

    def _describe_layer(self, block: int, role: LayerRole, group: str) -> Layer:
        name = f"blocks.{block}.{role}"
        branch, attribute = LAYER_PATHS[role].split(".")
        module = getattr(getattr(self.block_modules[block], branch, None), attribute, None)
        if type(module) is not nn.Linear:
            found = "nothing" if module is None else type(module).__name__
            raise SubjectError(
                f"layer {name!r} is {found}, not a plain linear layer; give a dense full-precision model "
                "(no fused projections, experts, adapters or quantized weights)"
            )
        if module.in_features % BLOCK:
            raise SubjectError(
                f"layer {name!r} has {module.in_features} inputs, which {BLOCK} does not divide; MXFP4 blocks run "
                f"along the inputs, so every linear layer of the decoder blocks needs a multiple of {BLOCK}"
            )
        self._original[name] = module
        return Layer(
            name=name,
            block=block,
            role=role,
            group=group,
            num_outputs=module.out_features,
            num_inputs=module.in_features,
        )

    def _describe_sites(self) -> Iterator[Site]:
        if not self.family.has_post_norms:
            size = self.hidden_size
            yield Site(name="residual_rotation", kind="residual_rotation", block=None, shape=(size, size))
        heads = (self.num_kv_heads, self.head_dim, self.head_dim)
        for block in range(self.num_blocks):
            prefix = f"blocks.{block}"
            hidden = (self.group(f"{prefix}.qkv").num_inputs,)
            inner = (self.group(f"{prefix}.down").num_inputs,)
            yield Site(name=f"{prefix}.qkv.norm_diagonal", kind="norm_diagonal", block=block, shape=hidden)
            yield Site(name=f"{prefix}.value_output", kind="value_output", block=block, shape=heads)
            yield Site(name=f"{prefix}.gate_up.norm_diagonal", kind="norm_diagonal", block=block, shape=hidden)
            yield Site(name=f"{prefix}.up_down_diagonal", kind="up_down_diagonal", block=block, shape=inner)
            yield Site(name=f"{prefix}.up_down_permutation", kind="up_down_permutation", block=block, shape=inner)

    def _check_parameters_known(self) -> None:
        linears = {id(parameter) for linear in self._original.values() for parameter in linear.parameters()}
        ends = {id(self.embedding.weight), id(self.head.weight), id(cast(Tensor, self.final_norm.module.weight))}
        for name, parameter in self.model.named_parameters():
            parts = name.split(".")
            is_norm = len(parts) > 1 and parts[-2] in NORM_NAMES and parts[-1] == "weight"
            if not (is_norm or id(parameter) in linears or id(parameter) in ends):
                raise SubjectError(
                    f"{type(self.model).__name__} has a parameter {name!r} {tuple(parameter.shape)} that does not "
                    f"belong to a plain {self.family.name} decoder; give a model without adapters, experts or fused "
                    "projections"
                )


def map_decoder(model: nn.Module) -> DecoderMap:
    """Map a transformers causal LM.

    Args:
        model: one of `FAMILIES`, with plain linear layers.

    Raises:
        SubjectError: another architecture; a layer that is fused, missing or not an `nn.Linear`; a layer whose input 32
            does not divide; a parameter that the map does not know.
    """
    name = type(model).__name__
    family = FAMILIES.get(name)
    if family is None:
        raise SubjectError(f"architecture {name!r} cannot be mapped; known: {', '.join(sorted(FAMILIES))}")
    if not len(cast(nn.ModuleList, cast(nn.Module, model.model).layers)):
        raise SubjectError(f"{name} has no decoder blocks; give a model with at least one")
    return DecoderMap(model, family)


_Named = TypeVar("_Named")


def _look_up(table: dict[str, _Named], name: object, kind: str, form: str, num_blocks: int) -> _Named:
    if not isinstance(name, str) or name not in table:
        raise ContractError(f"unknown {kind} {name!r}; known: {form}, i below {num_blocks}")
    return table[name]
