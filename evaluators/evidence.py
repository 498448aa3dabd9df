"""What trusted code saw of a run, for probes: the session's events, and each layer as decoded from the artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evaluators.artifact import Artifact
from evaluators.empty_steps import branch_rank, essence
from evaluators.installs import Install, branch_bits, install_digest, step_names, transform_bits, weight_bits
from evaluators.results import Evidence
from forge_kernels.ops.decode import decode
from forge_kernels.transforms import transform_weight


def collect_evidence(
    events: Sequence[dict[str, Any]], artifact: Artifact, reference_weight: Callable[[str], Tensor]
) -> Evidence:
    """Return the evidence of a finished run.

    Args:
        events: the session's calls in order.
        artifact: as loaded back from its file.
        reference_weight: full-precision weight (N, K) of a layer by name, folds included.
    """
    layers: dict[str, dict[str, Any]] = {}
    for members in artifact.groups.values():
        group_weights = sum(install.weight.codes_NK.numel() for install in members.values())
        for name, install in members.items():
            num_weights = install.weight.codes_NK.numel()
            own_bits = weight_bits(install) + branch_bits(install)
            layers[name] = {
                "digest": install_digest(install),
                "transform": step_names(essence(install.transform, install.activation).steps),
                "scale_rule": install.activation.scale_rule,
                "code_rule": install.activation.code_rule,
                "rank": branch_rank(install.low_rank),
                # The transform is shared out by weights, so that the weighted mean over layers is the model's.
                "bits": own_bits / num_weights + transform_bits(install.transform) / group_weights,
                "weight_error": weight_error(install, reference_weight(name)),
            }
    return Evidence(events=tuple(events), layers=layers)


def weight_error(install: Install, weight_NK: Tensor) -> float:
    """Return ``||decoded - W T^-1||^2 / ||W T^-1||^2``, 0 for a weight of zeros that decodes to zeros."""
    turned_NK = transform_weight(install.transform, weight_NK.detach().cpu().to(torch.float32))
    error = float((decode(install.weight) - turned_NK).square().sum(dtype=torch.float64))
    power = float(turned_NK.square().sum(dtype=torch.float64))
    return error / power if power > 0 else error
