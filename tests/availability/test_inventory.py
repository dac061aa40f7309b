"""Reports of nodes, as all ranks get them over the job's store."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

import pytest

from localckpt.availability.inventory import unpacked
from localckpt.errors import MismatchError


def _packed(content: bytes) -> str:
    return base64.b85encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    "pack",
    [
        lambda: "not compressed",
        lambda: _packed(b"[" * 100_000),
        lambda: _packed(bytes(1 << 28)),
        lambda: _packed(b"[1, 2"),
    ],
    ids=["text", "nested", "bomb", "cut"],
)
def test_reports_that_no_rank_has_packed_are_refused(pack: Callable[[], str]) -> None:
    with pytest.raises(MismatchError, match="cannot be read"):
        unpacked(pack())
