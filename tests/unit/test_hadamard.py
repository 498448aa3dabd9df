"""The Hadamard transform against the definition of the Sylvester matrix."""

from __future__ import annotations

import pytest
import torch

from forge_kernels.ops.hadamard import hadamard, hadamard_butterflies, hadamard_matrix

SIZES = [2, 4, 8, 16, 32, 64, 128, 256, 512]


def sylvester(size: int) -> torch.Tensor:
    index = torch.arange(size)
    shared_bits = (index[:, None] & index[None, :]).unsqueeze(-1) >> torch.arange(10) & 1
    return (1.0 - 2.0 * (shared_bits.sum(-1) % 2)).double() / size**0.5


@pytest.mark.parametrize("size", SIZES)
def test_every_run_is_multiplied_by_the_sylvester_matrix(size: int) -> None:
    x_MK = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    expected = torch.cat((x_MK[:, :size] @ sylvester(size), x_MK[:, size:] @ sylvester(size)), dim=1)
    torch.testing.assert_close(hadamard(x_MK, size), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(hadamard_matrix(size, torch.float64), sylvester(size), rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", SIZES)
def test_butterflies_are_within_their_stated_error(size: int) -> None:
    x_MK = torch.randn(5, 2 * size, generator=torch.Generator().manual_seed(size))
    exact = torch.cat((x_MK[:, :size].double() @ sylvester(size), x_MK[:, size:].double() @ sylvester(size)), dim=1)
    sums_MR1 = x_MK.abs().double().view(5, 2, size).sum(dim=-1, keepdim=True)
    bound = ((size.bit_length()) * 2.0**-24 * sums_MR1 / size**0.5).expand(5, 2, size).reshape(5, -1)
    worst = ((hadamard_butterflies(x_MK, size).double() - exact).abs() / bound).amax()
    assert worst <= 1, f"{float(worst)} times the bound"
    assert torch.equal(hadamard_butterflies(x_MK[2:3], size), hadamard_butterflies(x_MK, size)[2:3])


@pytest.mark.parametrize("size", SIZES)
def test_it_is_its_own_inverse_and_keeps_lengths(size: int) -> None:
    x_MK = torch.randn(2, 5, size, generator=torch.Generator().manual_seed(size))
    rotated = hadamard(x_MK, size)
    torch.testing.assert_close(hadamard(rotated, size), x_MK, rtol=0, atol=5e-6)
    torch.testing.assert_close(rotated.norm(dim=-1), x_MK.norm(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_shape_are_kept_and_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x_MK = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotated = hadamard(x_MK, 64)
    assert rotated.dtype == dtype
    assert rotated.shape == x_MK.shape
    if dtype.itemsize == 2:
        assert torch.equal(rotated, hadamard(x_MK.float(), 64).to(dtype))


def test_strided_and_empty_inputs() -> None:
    x_KM = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(x_KM.T, 32), hadamard(x_KM.T.contiguous(), 32))
    assert hadamard(torch.ones(0, 64), 64).shape == (0, 64)


@pytest.mark.parametrize("size", [-2, 0, 1, 3, 48, 1024])
def test_sizes_that_are_no_power_of_two_in_range_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size {size} is not a power of two from 2 to 512"):
        hadamard(torch.ones(1024 * 3), size)


def test_sizes_that_do_not_divide_and_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size 64 does not divide the last axis of \(2, 96\)"):
        hadamard(torch.ones(2, 96), 64)
    with pytest.raises(ValueError, match=r"cannot rotate torch\.int64"):
        hadamard(torch.ones(2, 64, dtype=torch.int64), 64)


def test_gradients_flow_whoever_asked_for_the_matrix_first() -> None:
    hadamard_matrix.cache_clear()
    x_MK = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        hadamard(x_MK, 16)
    x_MK.requires_grad_()
    hadamard(x_MK, 16).sum().backward()
    assert x_MK.grad is not None
