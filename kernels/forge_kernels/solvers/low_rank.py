"""Low-rank corrections of a layer's output: reduced-rank regression of its residual on its input.

For inputs Z (T, K) and residual E (T, N) = wanted output - quantized output, minimize

    || E - Z a^T b^T ||^2 + damping * mean(diag(Z^T Z)) * || b a ||^2     over a (R, K), b (N, R).

With ``G = Z^T Z + damping term = L L^T`` the optimum keeps the R leading left singular vectors U of ``L^-1 Z^T E``:
``a = U^T L^-1``, whose outputs are orthonormal under G, and ``b = E^T Z a^T``. After `a` is rounded to bfloat16, `b` is
solved for again, so that only the rounding of `b` itself is left.

Legend: T tokens, N output features, K input features, R rank.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from forge_kernels.rules import LowRank
from forge_kernels.solvers._moments import check_damping, checked_matrix, damped_cholesky


def fit_low_rank(
    inputs_TK: Tensor,
    residual_TN: Tensor,
    rank: int,
    *,
    damping: float = 0.01,
    directions: Literal["principal", "random"] = "principal",
    generator: torch.Generator | None = None,
) -> LowRank:
    """Fit a correction ``(x a^T) b^T`` to `residual_TN`.

    Args:
        inputs_TK: (T, K) untransformed inputs, finite.
        residual_TN: (T, N) what the correction should add to the output, finite.
        rank: R, from 1 to min(N, K).
        damping: ridge, as a share of the mean diagonal of ``Z^T Z``.
        directions: "principal" reads the R best input directions off the regression; "random" draws them (`a` is
            Gaussian) and fits `b` alone. The second has the same size and cost: it is the control that tells the choice
            of directions from the capacity they come with.
        generator: CPU generator for "random"; required there.

    Returns:
        `a_RK` and `b_NR` in bfloat16, on the device of the inputs.

    Raises:
        ValueError: shapes that do not fit, non-finite values, a rank out of range, or "random" without a generator.
    """
    check_damping(damping)
    inputs_TK = checked_matrix(inputs_TK, what="input")
    residual_TN = checked_matrix(residual_TN, what="residual").to(inputs_TK.device)
    if len(inputs_TK) != len(residual_TN) or len(inputs_TK) == 0:
        raise ValueError(
            f"inputs {tuple(inputs_TK.shape)} and residual {tuple(residual_TN.shape)} need the same tokens, not none"
        )
    num_inputs = inputs_TK.shape[1]
    max_rank = min(num_inputs, residual_TN.shape[1])
    if not 1 <= rank <= max_rank:
        raise ValueError(
            f"rank is {rank}; for {num_inputs} inputs and {residual_TN.shape[1]} outputs use 1 to {max_rank}"
        )
    gram_KK = inputs_TK.mT @ inputs_TK / len(inputs_TK)
    cross_KN = inputs_TK.mT @ residual_TN / len(inputs_TK)
    if not bool(gram_KK.diagonal().any()):
        gram_KK = torch.eye(num_inputs, dtype=gram_KK.dtype, device=gram_KK.device)
    lower_KK = damped_cholesky(gram_KK, damping, what="second moment of the inputs")
    if directions == "principal":
        a_RK = _principal_directions(lower_KK, cross_KN, rank)
    elif directions == "random":
        if generator is None:
            raise ValueError("directions='random' needs a generator, such as session.rng(layer, purpose)")
        a_RK = torch.randn(rank, num_inputs, generator=generator, dtype=torch.float64).to(lower_KK.device)
    else:
        raise ValueError(f"unknown directions {directions!r}; known: 'principal', 'random'")
    a_RK = a_RK.to(torch.bfloat16)
    # (a G a^T) b^T = a Z^T E for the rounded a.
    rounded_RK = a_RK.double()
    projected_RK = rounded_RK @ lower_KK
    gram_RR = projected_RK @ projected_RK.mT
    b_NR = (torch.linalg.pinv(gram_RR, hermitian=True, rtol=1e-12) @ (rounded_RK @ cross_KN)).mT
    return LowRank(a_RK=a_RK, b_NR=b_NR.to(torch.bfloat16).contiguous())


def _principal_directions(lower_KK: Tensor, cross_KN: Tensor, rank: int) -> Tensor:
    """Return ``U^T L^-1`` for the leading left singular vectors U of ``L^-1 Z^T E``."""
    whitened_KN = torch.linalg.solve_triangular(lower_KK, cross_KN, upper=False)
    # The eigenvectors of the smaller Gram matrix cost a fraction of a singular value decomposition.
    if whitened_KN.shape[0] <= whitened_KN.shape[1]:
        u_KR = torch.linalg.eigh(whitened_KN @ whitened_KN.mT).eigenvectors[:, -rank:]
    else:
        v_NR = torch.linalg.eigh(whitened_KN.mT @ whitened_KN).eigenvectors[:, -rank:]
        u_KR = torch.nn.functional.normalize(whitened_KN @ v_NR, dim=0)
    a_KR: Tensor = torch.linalg.solve_triangular(lower_KK.mT, u_KR.flip(1), upper=True)
    return a_KR.mT
