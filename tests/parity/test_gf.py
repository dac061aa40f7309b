"""The kernels do what the field's definition says, for every length and address."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.parity import gf

_ELEMENTS = st.integers(0, 255)
_BLOCKS = (gf._XTIME_BLOCK_NBYTES, gf._SCALE_BLOCK_NBYTES)


def _times(a: int, b: int) -> int:
    """By long division of polynomials, as it is defined."""
    product = 0
    for bit in range(8):
        product ^= (a << bit) if b >> bit & 1 else 0
    for bit in range(14, 7, -1):
        product ^= (0x11D << (bit - 8)) if product >> bit & 1 else 0
    return product


_TIMES = np.array([[_times(a, b) for a in range(256)] for b in range(256)], np.uint8)


def _random(seed: int, nbytes: int, offset: int) -> gf.Bytes:
    whole = np.random.default_rng(seed).integers(0, 256, nbytes + offset, dtype=np.uint8)
    return whole[offset:]


def test_products_of_all_pairs_are_those_of_the_definition() -> None:
    assert [[gf.multiply(a, b) for a in range(256)] for b in range(256)] == _TIMES.tolist()


def test_x_generates_every_element_but_0() -> None:
    assert {gf.power(exponent) for exponent in range(gf.ORDER)} == set(range(1, 256))
    assert gf.power(-1) == gf.inverse(2)


@given(st.integers(1, 255))
def test_an_element_times_its_inverse_is_1(a: int) -> None:
    assert gf.multiply(a, gf.inverse(a)) == 1


def test_0_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        gf.inverse(0)


_LENGTHS = st.one_of(
    st.integers(0, 70),
    st.builds(lambda block, more: block + more, st.sampled_from(_BLOCKS), st.integers(-9, 9)),
)


@settings(deadline=None)
@given(_LENGTHS, st.integers(0, 80), st.integers(0, 9), st.integers(0, 9), _ELEMENTS)
def test_kernels_are_what_the_table_of_products_gives(
    nbytes: int, shorter: int, acc_offset: int, data_offset: int, factor: int
) -> None:
    before = _random(1, nbytes, acc_offset)
    data = _random(2, max(0, nbytes - shorter), data_offset)
    padded = np.zeros(nbytes, np.uint8)
    padded[: len(data)] = data
    scratch = gf.Scratch()
    summed, doubled, scaled = before.copy(), _random(1, nbytes, acc_offset), before.copy()

    gf.xor_into(summed, data)
    gf.xtime_xor_into(doubled, data, scratch)
    gf.scale_xor_into(scaled, data, factor, scratch)

    assert np.array_equal(summed, before ^ padded)
    assert np.array_equal(doubled, _TIMES[2][before] ^ padded)
    assert np.array_equal(scaled, before ^ _TIMES[factor][padded])
