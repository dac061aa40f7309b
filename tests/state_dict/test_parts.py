"""Images of divided tensors: they are put together, or refused before anything is changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import CorruptShardError, RestoreError
from localckpt.ids import Generation, ShardIdentity
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.header import Skeleton
from localckpt.state_dict.image import Capture, ImagePlanner
from localckpt.state_dict.parts import deal
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.replicated import Replicated
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import find_targets
from tests.state_dict.states import source_of, written

_ALLOWED = SafeGlobals(())
_RANKS = 3


def _identity(rank: int) -> ShardIdentity:
    return ShardIdentity("job", Generation(1, 1), 3, rank, _RANKS)


def _state() -> dict[str, Any]:
    common = {"a": torch.arange(40_000.0).view(200, 200), "b": torch.ones(3, 20_000)}
    common |= {"c": torch.arange(30_000.0)}
    return {"all": Replicated(common, range(_RANKS)), "own": torch.ones(4)}


def _captured(rank: int) -> Capture:
    planner = ImagePlanner(job=Job(rank, range(_RANKS)))
    return planner.capture(wrapped(_state()), tuple(range(_RANKS)))


def _reader(rank: int, capture: Capture) -> ImageReader:
    image = written(capture, _identity(rank))
    return ImageReader(source_of(image), _ALLOWED, _identity(rank))


def _changed(
    capture: Capture, ranks: Sequence[Any] = range(_RANKS), rows: Sequence[dict[int, Any]] = ({},)
) -> Capture:
    """The image with another table of parts, which has good digests.

    It has other ranks, or other rows for the one of ``all.a``, whose columns are name, division and
    owner.
    """
    skeleton = Skeleton.split(capture.skeleton)
    _, (of_a, *others) = json.loads(skeleton.parts)
    assert of_a[0] == "all.a"
    changed = [[row.get(at, value) for at, value in enumerate(of_a)] for row in rows]
    table = [[list(ranks)], [*changed, *others]]
    parts = skeleton._replace(parts=json.dumps(table).encode())
    return dataclasses.replace(capture, skeleton=parts.join())


def _load(of_rank_0: ImageReader, co_owners: dict[int, ImageReader]) -> dict[str, Any]:
    into = _state()
    for tensor in (*into["all"].value.values(), into["own"]):
        tensor.zero_()
    try:
        for co_owner in co_owners.values():
            of_rank_0.join(co_owner)
        of_rank_0.restore(find_targets(wrapped(into)))
    except (CorruptShardError, RestoreError):
        assert not any(t.any() for t in (*into["all"].value.values(), into["own"]))
        raise
    return into


def test_the_parts_of_all_ranks_are_the_state() -> None:
    readers = {rank: _reader(rank, _captured(rank)) for rank in range(_RANKS)}

    assert readers[0].co_owners == [1, 2]
    loaded = _load(readers[0], {1: readers[1], 2: readers[2]})

    for key, tensor in _state()["all"].value.items():
        assert torch.equal(loaded["all"].value[key], tensor)
    assert torch.equal(loaded["own"], torch.ones(4))


def test_an_image_of_parts_is_not_loaded_by_itself() -> None:
    with pytest.raises(RestoreError, match=r"images of ranks 1, 2 hold the rest"):
        _load(_reader(0, _captured(0)), {})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rows": [{2: 0}]}, "the header 0"),
        ({"rows": [{2: 2}]}, "not so in"),
        ({"rows": [{2: -1}]}, "an owner"),
        ({"rows": [{2: True}]}, "an owner"),
        ({"rows": [{2: 3}]}, "an owner"),
        ({"rows": [{1: 7}]}, "division"),
        ({"rows": [{0: "own"}]}, "do not share|a part of"),
        ({"rows": [{}, {}]}, "a part of"),
        ({"ranks": [0, 1]}, "an owner"),
        ({"ranks": [0, 1, 3]}, "ranks"),
        ({"ranks": [1, 2]}, "ranks"),
        ({"ranks": [0, 0, 1]}, "ranks"),
        ({"ranks": [0, "1", 2]}, "ranks"),
    ],
)
def test_a_table_of_parts_that_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    co_owners = {rank: _reader(rank, _captured(rank)) for rank in (1, 2)}

    with pytest.raises(CorruptShardError, match=why):
        _load(_reader(0, _changed(_captured(0), **changes)), co_owners)


@pytest.mark.parametrize("owner", [0, 2])
def test_another_rank_that_does_not_hold_its_part_is_refused(owner: int) -> None:
    changed = _changed(_captured(1), rows=[{2: owner}])
    co_owners = {1: _reader(1, changed), 2: _reader(2, _captured(2))}

    with pytest.raises(CorruptShardError, match="the header 160000"):
        _load(_reader(0, _captured(0)), co_owners)


_sizes = st.dictionaries(st.text(max_size=4), st.integers(0, 4000), max_size=20)


@given(_sizes, st.integers(1, 9), st.randoms())
def test_each_tensor_has_one_owner_in_whatever_order_and_no_part_is_much_larger_than_another(
    sizes: dict[str, int], parts: int, random: object
) -> None:
    shuffled = list(sizes.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    owners = deal(sizes, parts)

    totals = [sum(sizes[key] for key, owner in owners.items() if owner == n) for n in range(parts)]
    assert owners.keys() == sizes.keys()
    assert max(totals) - min(totals) <= max(sizes.values(), default=0)
    assert deal(dict(shuffled), parts) == owners
