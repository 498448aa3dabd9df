"""SmoothQuant: balance activation and weight channel by channel, then round to nearest.

    s_j = max|X_j|^a / max|W_j|^(1 - a),    x'_j = x_j / s_j,    W'_j = W_j s_j,    a = 0.5

max|W_j| is taken over all layers that read the input. The diagonal runs online here, one multiplication per element and
16 bits per channel stored; behind a norm it could be folded.

Source: SmoothQuant, arXiv 2211.10438.
"""

import torch

from forge_kernels import ActivationRule, Diagonal, encode, smooth_scales, transform_weight

MECHANISMS = ("balancing",)

EXPONENT = 0.5


def balancing(session, group):
    """Divide each channel by s_j, rounded to bfloat16 before anything depends on it."""
    activation_max_K = session.inputs(group).abs().amax(dim=0)
    weight_max_K = torch.stack([session.weight(layer).abs().amax(dim=0) for layer in group.layers]).amax(dim=0)
    scale_K = smooth_scales(activation_max_K, weight_max_K, exponent=EXPONENT)
    return (Diagonal(scale_K=scale_K.bfloat16()),)


def without_balancing(session, group):
    """Leave the coordinates as they are."""
    return ()


def coordinates(session, group):
    """Return the transform T of the group, as a tuple of steps."""
    steps = ()
    steps += balancing(session, group)
    return steps


def codes(session, group, steps):
    """Return the codes of W T^-1 for every layer of the group: nearest."""
    weights = {layer.name: transform_weight(steps, session.weight(layer)) for layer in group.layers}
    return {name: encode(weight_NK, scale_rule="even") for name, weight_NK in weights.items()}


def quantize(session):
    """Walk the groups in execution order; each is measured with everything before it installed."""
    for group in session.groups:
        steps = coordinates(session, group)
        encoded = codes(session, group, steps)
        for layer in group.layers:
            session.install(layer, encoded[layer.name], transform=steps, activation=ActivationRule(scale_rule="even"))
