"""Closed-form block transforms that balance a block's activations against its weights, then flatten both.

For block k with input moment H_k (32 x 32, damped) and weights W_k (N x 32):

    R^T R = H_k;    R (W_k^T W_k / N) R^T = V S^2 V^T;    T_k = (H32 / sqrt(32)) S^(1/2) V^T R^-T

Then ``T_k H_k T_k^T = (W_k T_k^-1)^T (W_k T_k^-1) / N = H32 S H32^T / 32``: activations and weights carry the same
covariance, so that neither is the weak side, and the Hadamard factor spreads its eigenvalues over all 32 channels.

Legend: N output features of all layers of the group, K input features, B = K / 32 blocks, i and j channels of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_kernels.formats import MXFP4
from forge_kernels.ops._arithmetic import split_runs
from forge_kernels.ops.hadamard import hadamard_matrix
from forge_kernels.solvers._moments import check_damping, checked_matrix, checked_moment


def wush_matrices(
    moment_KK: Tensor,
    weights: Sequence[Tensor],
    *,
    damping: float = 0.01,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return one 32 x 32 matrix per block, for `BlockMatrix`.

    Args:
        moment_KK: (K, K), ``X^T X / T`` of the group's untransformed inputs; only its diagonal blocks are used.
        weights: the (N_i, K) weights of every layer that reads these inputs; they count row by row.
        damping: share of the mean added to the diagonal of each H_k and to the spectrum S, which bounds the condition
            number of T_k: below 3300 at 0.01.
        dtype: what the matrices are rounded to and stored in; bfloat16 counts 16 bits per entry, float32 counts 32.
            Weights have to be solved for the rounded matrices that will be applied: use the returned tensor as it is.

    Returns:
        (B, 32, 32) of `dtype`. A block with no input or no weight gets the plain Hadamard matrix.

    Raises:
        ValueError: no weight, shapes that do not fit, non-finite values, or a damping that is not positive.
    """
    check_damping(damping)
    if damping == 0:
        raise ValueError("damping is 0; a rank-deficient block would have no inverse, give a small share such as 0.01")
    if not weights:
        raise ValueError("no weight given; give the weight of every layer that reads these inputs")
    num_inputs = weights[0].shape[-1]
    if num_inputs % MXFP4.block or any(weight.shape[-1] != num_inputs for weight in weights):
        raise ValueError(
            f"weights {[tuple(weight.shape) for weight in weights]} need one number of inputs, a multiple of 32"
        )
    moment_KK = checked_moment(moment_KK, num_inputs)
    moment_Bij = _diagonal_blocks(moment_KK)
    grams = [_block_grams(checked_matrix(weight, what="weight").to(moment_Bij.device)) for weight in weights]
    gram_Bij = torch.stack(grams).sum(0) / sum(len(weight) for weight in weights)
    identity_ij = torch.eye(MXFP4.block, dtype=torch.float64, device=moment_Bij.device)

    input_mean_B = moment_Bij.diagonal(dim1=-2, dim2=-1).mean(-1)
    weight_mean_B = gram_Bij.diagonal(dim1=-2, dim2=-1).mean(-1)
    empty_B11 = ((input_mean_B <= 0) | (weight_mean_B <= 0)).view(-1, 1, 1)
    moment_Bij = torch.where(empty_B11, identity_ij, moment_Bij + damping * input_mean_B.view(-1, 1, 1) * identity_ij)
    gram_Bij = torch.where(empty_B11, identity_ij, gram_Bij)

    lower_Bij = torch.linalg.cholesky(moment_Bij)  # R^T
    squared_Bj, v_Bij = torch.linalg.eigh(lower_Bij.mT @ gram_Bij @ lower_Bij)
    spectrum_Bj = squared_Bj.clamp(min=0).sqrt()
    spectrum_Bj = spectrum_Bj + damping * spectrum_Bj.mean(-1, keepdim=True)
    # V^T R^-T is the transpose of R^-1 V, and R is L^T.
    unmixed_Bij = torch.linalg.solve_triangular(lower_Bij.mT, v_Bij, upper=True).mT
    balanced_Bij = spectrum_Bj.sqrt().unsqueeze(-1) * unmixed_Bij
    hadamard_ij = hadamard_matrix(MXFP4.block, torch.float64, moment_Bij.device)
    balanced_Bij = torch.where(empty_B11, identity_ij, balanced_Bij)
    return (hadamard_ij @ balanced_Bij).to(dtype)


def _diagonal_blocks(moment_KK: Tensor) -> Tensor:
    num_blocks = len(moment_KK) // MXFP4.block
    blocks_BiBj = moment_KK.view(num_blocks, MXFP4.block, num_blocks, MXFP4.block)
    return blocks_BiBj.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _block_grams(weight_NK: Tensor) -> Tensor:
    """Return ``W_k^T W_k`` of every block, (B, 32, 32)."""
    weight_BNj = split_runs(weight_NK).transpose(0, 1)
    return weight_BNj.mT @ weight_BNj
