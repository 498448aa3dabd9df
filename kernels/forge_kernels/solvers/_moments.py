"""Checks and factorizations of second moments that the solvers share.

Legend: K input features.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

MAX_ESCALATIONS = 6
"""How often `damped_cholesky` multiplies the damping by ten before it gives up."""
_SMALLEST_ESCALATED_DAMPING = 1e-8


def checked_moment(moment_KK: Tensor, num_inputs: int) -> Tensor:
    """Return the symmetric part of `moment_KK` as a float64 copy.

    Raises:
        ValueError: not (num_inputs, num_inputs), not finite, or with a negative diagonal entry.
    """
    if tuple(moment_KK.shape) != (num_inputs, num_inputs):
        raise ValueError(
            f"second moment is {tuple(moment_KK.shape)}; {num_inputs} inputs need ({num_inputs}, {num_inputs})"
        )
    moment_KK = moment_KK.detach().to(torch.float64)
    num_bad = int((~torch.isfinite(moment_KK)).sum())
    if num_bad:
        raise ValueError(f"second moment has {num_bad} non-finite entries; measure it on finite activations")
    symmetric_KK = (moment_KK + moment_KK.mT) / 2
    diagonal_K = symmetric_KK.diagonal()
    if bool((diagonal_K < 0).any()):
        worst = int(diagonal_K.argmin())
        raise ValueError(
            f"second moment has {float(diagonal_K[worst])} at diagonal entry {worst}; a mean of squares is not negative"
        )
    return symmetric_KK


def checked_matrix(matrix: Tensor, *, what: str) -> Tensor:
    """Return `matrix` as float64; `what` names it in errors.

    Raises:
        ValueError: not a matrix of floating-point numbers, or not finite (the first such entry is named).
    """
    if matrix.dim() != 2 or not matrix.is_floating_point():
        raise ValueError(f"{what} is {matrix.dtype} {tuple(matrix.shape)}; give a floating-point matrix")
    bad = (~torch.isfinite(matrix)).nonzero()
    if len(bad):
        raise ValueError(f"{what} has {len(bad)} non-finite entries, the first at {tuple(int(i) for i in bad[0])}")
    return matrix.detach().to(torch.float64)


def check_damping(damping: float) -> None:
    """Raise where `damping` is no share of a mean.

    Raises:
        ValueError: negative or not finite.
    """
    if not (math.isfinite(damping) and damping >= 0):
        raise ValueError(f"damping is {damping}; give a share of the mean diagonal such as 0.01")


def damped_cholesky(moment_KK: Tensor, damping: float, *, what: str) -> Tensor:
    """Return lower triangular L with ``L L^T = moment + damping * mean(diagonal) * I``.

    Where the factorization fails the damping is multiplied by ten and it starts again from `moment_KK`, which is never
    changed; every such step is logged.

    Raises:
        ValueError: still not positive definite after `MAX_ESCALATIONS` steps; `what` names the matrix.
    """
    mean = float(moment_KK.diagonal().mean())
    identity_KK = torch.eye(len(moment_KK), dtype=moment_KK.dtype, device=moment_KK.device)
    used = damping
    for escalation in range(MAX_ESCALATIONS + 1):
        if escalation:
            used = max(used, _SMALLEST_ESCALATED_DAMPING) * 10
            _logger.warning("%s is not positive definite: damping raised to %g", what, used)
        factor_KK: Tensor
        factor_KK, info = torch.linalg.cholesky_ex(moment_KK + used * mean * identity_KK)
        if int(info) == 0 and bool(torch.isfinite(factor_KK).all()):
            return factor_KK
    raise ValueError(
        f"{what} is not positive definite even with damping {used:g} of its mean diagonal {mean:g};"
        " give a second moment X^T X / T of real activations"
    )
