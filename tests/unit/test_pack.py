"""Packing codes of every width: against Python's own integers, there and back, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_kernels.ops.pack import pack, unpack


@given(st.integers(1, 16), st.integers(0, 5), st.data())
def test_a_row_is_one_long_number_lowest_bit_first(bits: int, eighths: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=8 * eighths, max_size=8 * eighths))
    packed = pack(torch.tensor(codes, dtype=torch.int32), bits=bits)
    number = sum(code << (index * bits) for index, code in enumerate(codes))
    assert bytes(packed.tolist()) == number.to_bytes(eighths * bits, "little")
    assert unpack(packed, bits=bits).tolist() == codes


@given(st.lists(st.integers(0, 255), min_size=1, max_size=20))
def test_unpacking_is_undone_by_packing(packed: list[int]) -> None:
    assert pack(unpack(torch.tensor(packed, dtype=torch.uint8))).tolist() == packed


@pytest.mark.parametrize("bits", [1, 3, 4, 6, 8, 16])
def test_leading_axes_are_kept(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, 32), generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits=bits)
    assert tuple(packed.shape) == (3, 5, 32 * bits // 8)
    assert torch.equal(packed[1, 2], pack(codes[1, 2], bits=bits))
    assert torch.equal(unpack(packed, bits=bits).to(codes.dtype), codes)


@pytest.mark.parametrize("bits", [3, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_codes_may_come_in_any_integer(bits: int, dtype: torch.dtype) -> None:
    codes = torch.arange(8).to(dtype)
    assert unpack(pack(codes, bits=bits), bits=bits).tolist() == list(range(8))
    again = unpack(pack(torch.arange(8), bits=bits), bits=bits)
    assert torch.equal(pack(again, bits=bits), pack(codes, bits=bits))


def test_nibble_order() -> None:
    assert pack(torch.tensor([0x1, 0xA, 0xF, 0x0], dtype=torch.uint8)).tolist() == [0xA1, 0x0F]
    assert unpack(torch.tensor([[0xA1], [0x0F]], dtype=torch.uint8)).tolist() == [[1, 10], [15, 0]]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="cannot pack 3 codes of 4 bits per row: they do not fill whole bytes"):
        pack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"code at \(1,\) is 16; codes of 4 bits are 0\.\.15"):
        pack(torch.tensor([0, 16], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"code at \(0, 3\) is -1"):
        pack(torch.tensor([[0, 1, 2, -1]]), bits=6)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        pack(torch.zeros(4))
    with pytest.raises(ValueError, match=r"torch\.float32"):
        unpack(torch.zeros(4))
    with pytest.raises(ValueError, match="4 bytes per row do not hold whole codes of 6 bits"):
        unpack(torch.zeros(4, dtype=torch.uint8), bits=6)
    with pytest.raises(ValueError, match="codes of 17 bits are not known"):
        pack(torch.zeros(8, dtype=torch.int32), bits=17)
