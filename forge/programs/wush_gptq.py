"""WUSH coordinates, then GPTQ codes: the strongest closed-form program of this collection.

For each block b of 32 channels, with the input's second moment H_b = R_b^T R_b and the weights W_b stacked over the layers
that read it (N rows):

    V S U^T = svd(R_b W_b^T / sqrt(N)),    T_b = Hadamard32 / sqrt(32) . S^(1/2) V^T R_b^-T

so that the moments of T_b x and of W_b T_b^-1 are equal and flat: neither side carries more risk than the other. The
matrices run online (32 multiply-adds per element) and are stored in bfloat16, 512 / N bits per weight. Where few outputs
share them that is more than they are worth: there a diagonal balances channel by channel, and the rotation follows,

    d_j = (E[w_j^2] / E[x_j^2])^(1/4),    x' = Hadamard32 / sqrt(32) . diag(d) x

GPTQ then works in the new coordinates with the moment T H T^T, block scales searched with the diagonal of that moment as
weight.

Sources: WUSH, arXiv 2512.00956; GPTQ, arXiv 2210.17323.
"""

from forge_kernels import (
    ActivationRule,
    BlockMatrix,
    Diagonal,
    Hadamard,
    apply_transform,
    encode,
    gptq,
    transform_weight,
    wush_matrices,
)

MECHANISMS = ("block_balance", "error_feedback")

MAX_MATRIX_BITS = 2.0


def block_balance(session, group, moment_KK):
    """Return one balancing matrix for each block of 32 channels, or a diagonal and a rotation where those cost too much."""
    weights = [session.weight(layer) for layer in group.layers]
    if 512 / sum(layer.num_outputs for layer in group.layers) <= MAX_MATRIX_BITS:
        return (BlockMatrix(matrix_Bij=wush_matrices(moment_KK, weights)),)
    weight_moment_K = sum(weight_NK.double().square().mean(dim=0) for weight_NK in weights) / len(weights)
    scale_K = (weight_moment_K.clamp_min(1e-12) / moment_KK.diagonal().clamp_min(1e-12)) ** 0.25
    return (Diagonal(scale_K=scale_K.bfloat16()), Hadamard(size=32))


def without_block_balance(session, group, moment_KK):
    """Leave the coordinates as they are."""
    return ()


def error_feedback(weight_NK, moment_KK):
    """Return GPTQ codes in the transformed coordinates."""
    return gptq(weight_NK, moment_KK, scale_rule="search", damping=0.01, order="descending")


def without_error_feedback(weight_NK, moment_KK):
    """Return nearest codes."""
    return encode(weight_NK, scale_rule="search")


def quantize(session):
    """Walk the groups in execution order; each is measured with everything before it installed."""
    for group in session.groups:
        moment_KK = session.second_moment(group)
        steps = block_balance(session, group, moment_KK)
        # T H T^T: the transform acts on rows, so it is applied to both sides of the symmetric moment.
        turned_KK = apply_transform(steps, apply_transform(steps, moment_KK).T)
        for layer in group.layers:
            weight_NK = transform_weight(steps, session.weight(layer))
            encoded = error_feedback(weight_NK, turned_KK)
            session.install(layer, encoded, transform=steps, activation=ActivationRule(scale_rule="even"))
