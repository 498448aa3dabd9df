"""A staged program for strict MXFP4. Without mechanisms it is round to nearest (RTN), the seed of every search.

For each layer, with blocks of 32 along the inputs and T the transform of its group:

    y = Q(T x) What^T + low-rank branch,    What = decode(encode(W T^-1))

RTN has T = 1, no branch, and the nearest code under the `even` scale rule for every weight and activation. The mechanisms
listed below change that through the four stages; each says in its own text what it computes.
"""

from forge_kernels import ActivationRule, encode, transform_weight

MECHANISMS = ()


def coordinates(session, group):
    """Return the transform T of the group, as a tuple of steps applied from left to right."""
    steps = ()
    return steps


def codes(session, group, steps):
    """Return the codes of W T^-1 for every layer of the group, by layer name."""
    weights = {layer.name: transform_weight(steps, session.weight(layer)) for layer in group.layers}
    return {name: encode(weight_NK, scale_rule="even") for name, weight_NK in weights.items()}


def corrections(session, group, steps, encoded):
    """Return the low-rank branch of each layer that has one, by layer name."""
    branches = {}
    return branches


def activation(session, group):
    """Return how the group's activation is encoded at run time."""
    return ActivationRule(scale_rule="even")


def quantize(session):
    """Walk the groups in execution order; each is measured with everything before it installed."""
    for group in session.groups:
        steps = coordinates(session, group)
        encoded = codes(session, group, steps)
        branches = corrections(session, group, steps, encoded)
        rule = activation(session, group)
        for layer in group.layers:
            session.install(
                layer, encoded[layer.name], transform=steps, activation=rule, low_rank=branches.get(layer.name)
            )
