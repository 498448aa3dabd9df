"""Round to nearest (RTN): every weight and activation takes its nearest MXFP4 code. The seed of every search.

For each layer, with blocks of 32 along the inputs and the `even` scale rule on both sides:

    y = Q(x) What^T,    What = decode(encode(W))

Nothing is measured and nothing runs online. The four stages below are where a search puts its mechanisms.
"""

from forge_kernels import ActivationRule, encode, transform_weight

MECHANISMS = ()


def coordinates(session, group):
    """Return the transform T of the group, as a tuple of steps: none."""
    steps = ()
    return steps


def codes(session, group, steps):
    """Return the codes of W T^-1 for every layer of the group: nearest."""
    weights = {layer.name: transform_weight(steps, session.weight(layer)) for layer in group.layers}
    return {name: encode(weight_NK, scale_rule="even") for name, weight_NK in weights.items()}


def corrections(session, group, steps, encoded):
    """Return the low-rank branch of each layer that has one: none."""
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
