"""Where a quantized model loses: relative output error of every layer, split by what is quantized.

All layers in one pass over the blocks, each at the input that the *quantized* model gives it:

    weight       || x W^T - (T x) What^T ||^2 / || x W^T ||^2
    activation   || x W^T - A(T x) (W T^-1)^T ||^2 / || x W^T ||^2
    joint        || x W^T - A(T x) What^T - (x a^T) b^T ||^2 / || x W^T ||^2

W includes the artifact's folds. Biases cancel. A ratio that is not finite, or beyond `MAX_RATIO`, counts as `MAX_RATIO`: the
numbers of an artifact that scored well on one text may overflow on another.

Legend: C chunks, L tokens per chunk, T tokens, N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from evaluators.apply import apply_artifact
from evaluators.artifact import Artifact
from evaluators.contract import Contract
from evaluators.installs import BLOCK_LENGTH
from evaluators.quantized_linear import QuantizedLinear
from evaluators.results import LayerError
from evaluators.session import Layer
from evaluators.streams import BATCH_TOKENS
from evaluators.subjects import Subject
from evaluators.two_streams import TwoStreamModel
from forge_kernels.ops._arithmetic import split_runs
from forge_kernels.ops.encode import block_amax, scale_bytes
from forge_kernels.rules import ScaleRule
from forge_kernels.transforms import apply_transform, transform_weight

LARGEST_VALUE = 6.0
MAX_RATIO = 1e9
SCALE_BIAS = 127


def error_map(subject: Subject, artifact: Artifact, tokens_CL: Tensor, contract: Contract) -> list[LayerError]:
    """Return one row per layer, in execution order.

    Args:
        subject: the subject that the artifact was made for.
        artifact: the quantized model to look into.
        tokens_CL: (C, L) int64 text.
        contract: the contract the artifact was made under.

    Raises:
        ArtifactError, ContractError: as `apply_artifact`.
    """
    model = apply_artifact(artifact, subject, contract)
    batches = torch.split(tokens_CL.to(subject.device), max(1, BATCH_TOKENS // int(tokens_CL.shape[1])))
    hidden = [model.embed(batch_CL) for batch_CL in batches]
    rows: list[LayerError] = []
    for block in range(model.num_blocks):
        groups = [group for group in model.map.groups if group.block == block]
        sums = {layer.name: _LayerSums(model, layer) for group in groups for layer in group.layers}
        for index, (leaving, inputs) in enumerate(model.run_block(block, hidden, "quantized", groups=groups)):
            assert leaving is not None
            hidden[index] = leaving
            for group in groups:
                inputs_TK = inputs[group.name].flatten(0, 1).to(torch.float32)
                for layer in group.layers:
                    sums[layer.name].add(inputs_TK)
        rows.extend(sums[layer.name].row() for group in groups for layer in group.layers)
    return rows


def clip_counts(transformed_TK: Tensor, scale_rule: ScaleRule) -> int:
    """Return how many values of (T, K) lie beyond the largest code of their block, ``|x| > 6 * 2^(byte - 127)``.

    All values of a block that is not finite as a whole are counted.
    """
    blocks_TBJ = split_runs(transformed_TK.to(torch.float32), BLOCK_LENGTH)
    scales_TB1 = scale_bytes(blocks_TBJ, block_amax(blocks_TBJ), scale_rule).to(torch.float32)
    limits_TB1 = LARGEST_VALUE * torch.exp2(scales_TB1 - SCALE_BIAS)
    is_broken_TB1 = ~blocks_TBJ.isfinite().all(dim=-1, keepdim=True)
    return int(((blocks_TBJ.abs() > limits_TB1) | is_broken_TB1).sum())


class _LayerSums:
    """Squared errors of one layer, added up over batches in float64."""

    def __init__(self, model: TwoStreamModel, layer: Layer) -> None:
        self._layer = layer
        self._module: QuantizedLinear = model.installed[layer.name]
        self._transform = self._module.group_activation.transform
        self._group_activation = self._module.group_activation
        self._weight_NK = model.map.linear(layer).weight.detach()
        self._turned_NK = transform_weight(self._transform, self._weight_NK)
        self._weight = self._activation = self._joint = self._power = 0.0
        self._num_clipped = self._num_values = 0

    def add(self, inputs_TK: Tensor) -> None:
        """Add the errors of one batch of inputs (T, K)."""
        with torch.no_grad():
            transformed_TK = apply_transform(self._transform, inputs_TK)
            encoded_TK = self._group_activation.quantize(transformed_TK)
            expected_TN = functional.linear(inputs_TK, self._weight_NK)
            joint_TN = functional.linear(encoded_TK, self._module.weight_NK)
            self._joint += _squared(expected_TN - self._module.add_branch(inputs_TK, joint_TN))
            self._weight += _squared(expected_TN - functional.linear(transformed_TK, self._module.weight_NK))
            self._activation += _squared(expected_TN - functional.linear(encoded_TK, self._turned_NK))
            self._power += _squared(expected_TN)
            self._num_clipped += clip_counts(transformed_TK, self._group_activation.activation.scale_rule)
            self._num_values += transformed_TK.numel()

    def row(self) -> LayerError:
        """Return the layer's row; errors are 0 where the output itself is 0."""
        power = self._power or 1.0
        return LayerError(
            layer=self._layer.name,
            block=self._layer.block,
            role=self._layer.role,
            weight=_ratio(self._weight, power),
            activation=_ratio(self._activation, power),
            joint=_ratio(self._joint, power),
            clip_rate=self._num_clipped / max(1, self._num_values),
        )


def _ratio(error: float, power: float) -> float:
    ratio = error / power
    return ratio if ratio < MAX_RATIO else MAX_RATIO


def _squared(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))
