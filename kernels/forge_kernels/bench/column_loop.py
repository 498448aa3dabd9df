"""GPTQ as it is usually written, to compare with: a Python loop over columns of eager operations, errors handed on in blocks.

Same order, same static scales and same damping as `forge_kernels.gptq`, in float64.

Legend: N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_kernels.ops._arithmetic import codes_of_e2m1, inverse_scale_of_bytes, round_to_e2m1_, scale_of_bytes
from forge_kernels.ops.encode import choose_scales
from forge_kernels.rules import Encoded

_BLOCK = 128


def column_loop_gptq(weight_NK: Tensor, moment_KK: Tensor, *, damping: float = 0.01) -> Encoded:
    """Return codes and scales; the moment's diagonal must be positive throughout."""
    order_K = torch.argsort(moment_KK.diagonal(), descending=True, stable=True)
    scales_NB = choose_scales(weight_NK)
    bytes_NK = scales_NB.to(torch.int32)[:, order_K // 32]
    weight_NK = weight_NK.double()[:, order_K]
    moment_KK = moment_KK[order_K][:, order_K]
    identity_KK = torch.eye(len(moment_KK), dtype=torch.float64, device=moment_KK.device)
    damped_KK = moment_KK + damping * moment_KK.diagonal().mean() * identity_KK
    upper_KK = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped_KK)), upper=True)
    rounded_NK = torch.empty_like(weight_NK, dtype=torch.float32)
    for start in range(0, weight_NK.shape[1], _BLOCK):
        stop = min(start + _BLOCK, weight_NK.shape[1])
        block_NP, error_NP = weight_NK[:, start:stop].clone(), torch.empty_like(weight_NK[:, start:stop])
        for j in range(stop - start):
            column = start + j
            byte_N = bytes_NK[:, column]
            scaled_N = (block_NP[:, j] * inverse_scale_of_bytes(byte_N)).float()
            rounded_NK[:, column] = round_to_e2m1_(scaled_N)
            gap_N = block_NP[:, j] - rounded_NK[:, column].double() * scale_of_bytes(byte_N)
            error_NP[:, j] = gap_N / upper_KK[column, column]
            block_NP[:, j:] -= error_NP[:, j : j + 1] * upper_KK[column, column:stop].unsqueeze(0)
        weight_NK[:, stop:] -= error_NP @ upper_KK[start:stop, stop:]
    codes_NK = torch.empty_like(rounded_NK, dtype=torch.uint8)
    codes_NK[:, order_K] = codes_of_e2m1(rounded_NK)
    return Encoded(codes_NK=codes_NK, scales_NB=scales_NB)


def objective(encoded_NK: Tensor, weight_NK: Tensor, moment_KK: Tensor) -> float:
    """Return ``tr(D H D^T)`` for the decoded weight's distance D from the weight, in float64."""
    gap_NK = encoded_NK.double() - weight_NK.double()
    return float(((gap_NK @ moment_KK) * gap_NK).sum())
