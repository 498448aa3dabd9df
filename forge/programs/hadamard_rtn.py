"""Block Hadamard rotation, then round to nearest.

Each run of 32 channels is rotated by the normalized Hadamard matrix H, which spreads an outlier over its block:

    x'_b = H x_b / sqrt(32),    W'_b = W_b H / sqrt(32),    y = Q(x') Q(W')^T

The rotation is orthogonal and aligned with the blocks that share a scale, so no block's noise reaches another. It runs
online, costs log2(32) = 5 multiply-adds per element and stores nothing.
"""

from forge_kernels import ActivationRule, Hadamard, encode, transform_weight

MECHANISMS = ("block_rotation",)


def block_rotation(session, group):
    """Rotate every block of 32 channels by H / sqrt(32)."""
    return (Hadamard(size=32),)


def without_block_rotation(session, group):
    """Leave the coordinates as they are."""
    return ()


def coordinates(session, group):
    """Return the transform T of the group, as a tuple of steps."""
    steps = ()
    steps += block_rotation(session, group)
    return steps


def codes(session, group, steps):
    """Return the codes of W T^-1 for every layer of the group: nearest."""
    weights = {layer.name: transform_weight(steps, session.weight(layer)) for layer in group.layers}
    return {name: encode(weight_NK, scale_rule="even") for name, weight_NK in weights.items()}


def quantize(session):
    """Walk the groups in execution order."""
    for group in session.groups:
        steps = coordinates(session, group)
        encoded = codes(session, group, steps)
        for layer in group.layers:
            session.install(layer, encoded[layer.name], transform=steps, activation=ActivationRule(scale_rule="even"))
