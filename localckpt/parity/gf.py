"""Arithmetic in GF(2^8) on long runs of bytes, and on single elements.

The field is that of the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), in which x generates all
elements but 0: the field that RAID 6 uses (H. P. Anvin, "The mathematics of RAID-6"). Runs are
one-dimensional uint8 arrays of any length, at any address; what is done to them releases the GIL.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

ORDER = 255
"""Number of different powers of x."""

_REDUCTION = 0x1D
# A block, its scratch and the data stay in a core's own cache, and calls are few enough.
_XTIME_BLOCK_NBYTES = 512 << 10
_SCALE_BLOCK_NBYTES = 256 << 10

_ZERO = np.int8(0)
# On words of two bytes, since processors have no product of single bytes.
_REDUCTION_WORD = np.uint16(_REDUCTION)


class Scratch:
    """Memory that the kernels need; one for each thread that calls them."""

    def __init__(self) -> None:
        self.carries = np.empty(_XTIME_BLOCK_NBYTES, np.uint8)
        self.product = np.empty(_SCALE_BLOCK_NBYTES, np.uint8)


def xor_into(acc: Bytes, data: Bytes) -> None:
    """``acc ^= data`` for the bytes that ``data`` has."""
    part = acc[: len(data)]
    np.bitwise_xor(part, data, out=part)


def xtime_xor_into(acc: Bytes, data: Bytes, scratch: Scratch) -> None:
    """``acc = x * acc ^ data``; where ``data`` is shorter it counts as zeros."""
    for start in range(0, len(acc), _XTIME_BLOCK_NBYTES):
        stop = start + _XTIME_BLOCK_NBYTES
        _xtime_xor(acc[start:stop], data[start:stop], scratch)


def scale_xor_into(acc: Bytes, data: Bytes, factor: int, scratch: Scratch) -> None:
    """``acc ^= factor * data`` by doubling, as fast as a table of products of pairs of bytes."""
    if factor == 0:
        return
    if factor == 1:
        xor_into(acc, data)
        return
    for start in range(0, len(data), _SCALE_BLOCK_NBYTES):
        block = data[start : start + _SCALE_BLOCK_NBYTES]
        product = scratch.product[: len(block)]
        np.copyto(product, block)
        for bit in reversed(range(factor.bit_length() - 1)):
            _xtime_xor(product, block if factor >> bit & 1 else block[:0], scratch)
        xor_into(acc[start:], product)


def multiply(a: int, b: int) -> int:
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= 0x100 | _REDUCTION
        b >>= 1
    return product


def power(exponent: int) -> int:
    """x to an exponent, which may be negative."""
    element = 1
    for _ in range(exponent % ORDER):
        element = multiply(element, 2)
    return element


def inverse(a: int) -> int:
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    # Every element to the power 255 is 1.
    element, square = 1, a
    for _ in range(7):
        square = multiply(square, square)
        element = multiply(element, square)
    return element


def _xtime_xor(acc: Bytes, data: Bytes, scratch: Scratch) -> None:
    """Compute :func:`xtime_xor_into` for at most as many bytes as the scratch has."""
    words = scratch.carries[: len(acc) + len(acc) % 2].view(np.uint16)
    carries = scratch.carries[: len(acc)]
    np.less(acc.view(np.int8), _ZERO, out=carries.view(np.bool_))
    np.multiply(words, _REDUCTION_WORD, out=words)
    xor_into(carries, data)
    np.add(acc, acc, out=acc)
    np.bitwise_xor(acc, carries, out=acc)
