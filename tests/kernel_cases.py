"""Inputs that kernels get wrong, and a comparison that names the worst element; on a GPU where there is one, else interpreted."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wild(rows: int, columns: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Values of many magnitudes: a row of zeros, one of subnormals, the largest finite values, exact ties."""
    generator = torch.Generator().manual_seed(rows * columns + seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(2 * torch.randn(rows, columns, generator=generator))
    x = x.clamp(-3e4, 3e4).to(dtype)
    if rows > 4:
        x[0] = 0.0
        x[1] = (x[1].float() * torch.finfo(dtype).tiny).to(dtype)
        x[2, :32] = torch.finfo(dtype).max
        x[3] = (torch.randint(-24, 25, (columns,), generator=generator) / 4).to(dtype)
    return x


def assert_equal(got: Tensor, wanted: Tensor, what: str) -> None:
    """Compare two tensors exactly, NaN equal to NaN; the message names the first difference and both values."""
    got, wanted = got.detach().cpu(), wanted.detach().cpu()
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)} in place of {tuple(wanted.shape)}"
    bad = ((got != wanted) & ~((got != got) & (wanted != wanted))).nonzero()
    where = tuple(bad[0].tolist()) if len(bad) else ()
    assert not len(bad), (
        f"{what} at {where}: {got[where].item()} in place of {wanted[where].item()} ({len(bad)} differ)"
    )


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return ``||got - wanted|| / ||wanted||`` in float64."""
    gap = got.detach().cpu().double() - wanted.detach().cpu().double()
    return float(gap.norm() / wanted.detach().cpu().double().norm())
