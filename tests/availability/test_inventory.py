"""Reports of nodes, as all ranks get them over the job's store."""

from __future__ import annotations

import base64
import zlib

import pytest

from localckpt.availability.inventory import unpacked
from localckpt.errors import MismatchError


@pytest.mark.parametrize(
    "text",
    [
        "not compressed",
        base64.b85encode(zlib.compress(b"[" * 100_000)).decode(),
        base64.b85encode(zlib.compress(bytes(1 << 30), 9)).decode(),
        base64.b85encode(zlib.compress(b"[1, 2")).decode(),
    ],
    ids=["text", "nested", "bomb", "cut"],
)
def test_reports_that_no_rank_has_packed_are_refused(text: str) -> None:
    with pytest.raises(MismatchError, match="cannot be read"):
        unpacked(text)
