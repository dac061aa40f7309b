"""Reports of nodes, as all ranks get them over the job's store."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.inventory import Inventory, unpacked
from localckpt.errors import MismatchError
from localckpt.ids import MOST_RANKS


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


_NUMBERS = st.integers(0, 10**19 - 1)
_RANKS_ON = {"a": [0, 1, 4], "b": [2], "c": [3, 5]}


@pytest.mark.parametrize(
    "lineage",
    [
        *(None, {}, [1, 1, 4, -1, [], [], 0], [1, 1, -1, 5, [], [], 0], [1, 1, 0, -2, [], [], 0]),
        *([1, 1, 0, 5, [[1, 1]], [], 0], [1, 1, 0, 5, [[1, 1, "5"]], [], 0]),
        *([1, 1, 0, 5, [[0, 0, 0]] * 9, [], 0], [1, 1, 0, 5, [], [[0, 0, 0]] * 9, 0]),
        *([1, 1, 0, 5, [], [], 2], [10**20, 1, 0, 5, [], [], 0]),
    ],
    ids=str,
)
def test_a_lineage_that_cannot_be_is_refused_and_nothing_is_taken_in(lineage: Any) -> None:
    inventory = Inventory(_RANKS_ON)

    with pytest.raises(MismatchError, match="what rank 3 tells of its node's shards"):
        inventory.merge("c", [[[1, 1, 9, 1, [0], [8]]], [lineage]])

    assert not inventory.checkpoints
    assert not inventory.lineages


@pytest.mark.parametrize(
    "told",
    [
        *(None, "text", [7], [[1, 1, 5, 2, [0], [9], 0]], [[1, 1, 5, 2, [0, 1], [9]]]),
        *([[1, 1, 5, 2, [], []]], [[1, 1, 5, 2, [0, 0], [9, 9]]]),
        *([[1, 1, 5, 2, [0], [9]], [1, 1, 5, 2, [1], [9]]], [[1, 1, 10**19, 2, [0], [9]]]),
        *([[1, 1, 5, 2, [MOST_RANKS], [9]]], [[1, 1, 5, MOST_RANKS + 1, [0], [9]]]),
        *([[1, 1, True, 2, [0], [9]]], [[1, 1, 5, 2, [0], [-9]]], [[1, 1, 5, 2, [0], [9.0]]]),
    ],
    ids=str,
)
def test_a_report_that_cannot_be_read_is_refused_and_its_rank_named(told: Any) -> None:
    inventory = Inventory(_RANKS_ON)
    shards = [[1, 1, 9, 1, [0], [8]], *told] if isinstance(told, list) else told

    with pytest.raises(MismatchError, match="what rank 3 tells of its node's shards") as raised:
        inventory.merge("c", [shards, []])

    assert len(str(raised.value)) < 500
    assert not inventory.checkpoints


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.just("a"), inner),
    max_leaves=8,
)
_NEARLY_TOLD = st.lists(
    st.tuples(*[_NUMBERS | _JSON] * 4, *[st.lists(_NUMBERS, max_size=3) | _JSON] * 2).map(list),
    max_size=2,
).map(lambda shards: [shards, []])


@given(_JSON | _NEARLY_TOLD)
def test_every_report_is_either_refused_or_taken_as_it_is(told: Any) -> None:
    inventory = Inventory(_RANKS_ON)

    try:
        inventory.merge("a", told)
    except MismatchError:
        assert not inventory.checkpoints
        return

    heard = {
        (*c.generation, c.iteration, c.world_size, *inventory.shards_on(c, "a").items())
        for c in inventory.checkpoints
    }
    assert heard == {(*held[:4], *zip(held[4], held[5], strict=True)) for held in told[0]}
