"""GPTQ: choose weight codes one input channel at a time and let the later channels make up for each error.

With the second moment H = X^T X / T of the inputs, measured on the partly quantized model, and U the upper Cholesky factor
of (H + 0.01 mean(diag H) I)^-1, for each column j in descending order of H_jj:

    e_j = (w_j - q(w_j)) / U_jj,    w_i -= e_j U_ji  for all later i

Block scales are static (strict MXFP4 allows no other order-independent choice): set from the weight before the loop.

Source: GPTQ, arXiv 2210.17323.
"""

from forge_kernels import ActivationRule, gptq

MECHANISMS = ("error_feedback",)


def error_feedback(session, group):
    """Return GPTQ codes for every layer of the group."""
    moment_KK = session.second_moment(group)
    return {
        layer.name: gptq(session.weight(layer), moment_KK, scale_rule="even", damping=0.01, order="descending")
        for layer in group.layers
    }


def without_error_feedback(session, group):
    """Return nearest codes: GPTQ with a diagonal moment never moves an error to another column."""
    return {
        layer.name: gptq(session.weight(layer), session.weight(layer).new_ones(group.num_inputs).double().diag())
        for layer in group.layers
    }


def quantize(session):
    """Walk the groups in execution order; each is measured with everything before it installed."""
    for group in session.groups:
        encoded = error_feedback(session, group)
        for layer in group.layers:
            session.install(layer, encoded[layer.name], activation=ActivationRule(scale_rule="even"))
