"""A file is damaged everywhere, in every way; what is loaded is bit for bit right, or older.

One rank plays every case; tests/managers/test_damage.py has what replicas are taken.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from localckpt.ids import Generation
from localckpt.memory.digests import BLOCK_NBYTES
from tests.faults.images import Parts, blocks_of, flip, regions
from tests.managers.jobs import assert_same, make_manager, state_of
from tests.storage.test_files import make_cold

Cases = Iterator[tuple[str, bytes]]

_OLDER, _NEWEST = 7, 8
_ATTEMPT = "of another attempt"
_DIGEST_NBYTES = 8


def _state(rank: int, iteration: int) -> dict[str, Any]:
    """A state of four blocks, in files that are equally long at both iterations."""
    return state_of(rank, iteration, 3_500_000)


# Every way in which the file of a shard is damaged, of its bytes and of those of an older one.


def _flipped(content: bytes, older: bytes, every: bool = False) -> Cases:
    """Bits in all parts; of ``every`` byte of what describes the data."""
    found = [("length", position, bit) for position in range(8) for bit in range(8)]
    for name, (start, stop) in regions(content).items():
        chosen = {start, (start + stop) // 2, stop - 1} if start < stop else set()
        if name in ("header", "table", "pickle", "__digests__"):
            chosen |= set(range(start, stop, 1 if every else 31))
        found += [(name, position, (position * 5 + 3) % 8) for position in sorted(chosen)]
    for block in range(1, blocks_of(len(content))):
        found += [("border", block * BLOCK_NBYTES + side, 7) for side in (-1, 0)]
    if every:
        chance = random.Random(1)
        found += [("any", chance.randrange(len(content)), chance.randrange(8)) for _ in range(500)]
    for name, position, bit in found:
        yield f"bit {bit} of byte {position}, in {name}", flip(content, position, bit)


def _cut(content: bytes, older: bytes) -> Cases:
    """Ends too early: at every border of a block and of a part, one byte before and after."""
    borders = {block * BLOCK_NBYTES for block in range(blocks_of(len(content)))}
    borders |= {border for region in regions(content).values() for border in region}
    for length in sorted({border + side for border in borders for side in (-1, 0, 1)}):
        if 0 <= length < len(content):
            yield f"cut at {length}", content[:length]


def _zeroed(content: bytes, older: bytes) -> Cases:
    """The right length, but not all was written; or more was written than there should be."""
    size = len(content)
    for block in range(blocks_of(size)):
        start, stop = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, size)
        yield f"zeros from {start} on", content[:start] + bytes(size - start)
        hole = content[:start] + bytes(stop - start) + content[stop:]
        yield f"zeros from {start} to {stop}", hole
        # A file that is used again, and was not written to its end.
        if start:
            yield f"an older file from {start} on", content[:start] + older[start:]
    for count in (1, 8, 512, 4096):
        # The last byte of the last digest may be a zero.
        if any(content[-count:]):
            yield f"{count} zeros at the end", content[:-count] + bytes(count)
    for count in (1, 7, 8, 4096, BLOCK_NBYTES):
        yield f"{count} zeros behind the end", content + bytes(count)
    yield "an older file behind the end", content + older


def _exchanged(content: bytes, older: bytes) -> Cases:
    """Good blocks in the place of others, with and without their digests."""
    for digests_too in (False, True):
        how = "with their digests" if digests_too else "without their digests"
        # The last block is shorter than the others.
        for one, other in combinations(range(blocks_of(len(content)) - 1), 2):
            swapped = _put(content, one, content, other, digests_too)
            swapped = _put(swapped, other, content, one, digests_too)
            yield f"blocks {one} and {other} swapped, {how}", swapped
        for block in range(digests_too, blocks_of(len(content))):
            mixed = _put(content, block, older, block, digests_too)
            yield f"block {block} of an older file, {how}", mixed


def _foreign(content: bytes, older: bytes) -> Cases:
    """Files that are good, and are not the one that belongs there."""
    # Its header makes it a copy of the older one, though a bad one.
    yield "that begins as an older one does", _put(content, 0, older, 0, True)
    parts = Parts.of(content)
    who = parts.identity
    epoch, sequence = who.generation
    yield "of another iteration", older
    for what, other in (
        ("of another rank", replace(who, rank=who.rank + 1, world_size=who.world_size + 1)),
        ("of another number of ranks", replace(who, world_size=who.world_size + 1)),
        ("of another session", replace(who, session_id="another")),
        (_ATTEMPT, replace(who, generation=Generation(epoch - 1, sequence))),
    ):
        yield what, parts.replace(identity=other).image()


def _put(content: bytes, block: int, source: bytes, number: int, digest_too: bool) -> bytes:
    """A file with one block, and perhaps its digest, out of another file of its length."""
    result, size, count = bytearray(content), len(content), blocks_of(len(content))

    def span(place: int) -> slice:
        end = min((place + 1) * BLOCK_NBYTES, size - _DIGEST_NBYTES * count)
        return slice(place * BLOCK_NBYTES, end)

    def digest(place: int) -> slice:
        start = size - _DIGEST_NBYTES * (count - place)
        return slice(start, start + _DIGEST_NBYTES)

    result[span(block)] = source[span(number)]
    if digest_too:
        result[digest(block)] = source[digest(number)]
    assert len(result) == len(source) == size
    return bytes(result)


class _Node:
    """The store of a job of one rank that has saved twice, and whose newer file is damaged."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cases = 0
        with make_manager("disk", root, "job", keep_last=2) as manager:
            for iteration in (_OLDER, _NEWEST):
                manager.save(_state(0, iteration), iteration)
        older, self._path = sorted(root.rglob("*.safetensors"))
        self.older, self.newest = older.read_bytes(), self._path.read_bytes()
        self._into = _state(0, 0)

    def falls_back(self, damaged: bytes, bad: bool, cold: bool) -> None:
        """With this in the place of the newer file, which is bad or a stranger, the older one is
        loaded, also from a file that is cold in the page cache.
        """
        assert damaged != self.newest
        # A file of another version keeps its name: whoever wrote it can read it.
        version = re.search(rb'"localckpt-\d"', damaged[: regions(self.newest)["header"][1]])
        bad = bad and (version is None or version[0] in self.newest)
        self._cases += 1
        self._path.write_bytes(damaged)
        if cold:
            make_cold(self._path)
        aside = self._path.with_name(f"{self._path.name}.corrupt")
        try:
            with make_manager("disk", self._root, "job", keep_last=2) as manager:
                assert manager.find_latest() in (_OLDER, _NEWEST)
                # In new tensors, or in those of the caller, which a bad file has half filled.
                into = self._into if self._cases % 2 else None
                state, ckpt_id = manager.load(into=into)
            assert ckpt_id == (_OLDER, 0, "job")
            assert_same(state, _state(0, _OLDER))
            assert [aside.exists(), self._path.exists()] == [bad, not bad]
            assert (aside if bad else self._path).read_bytes() == damaged
        finally:
            aside.unlink(missing_ok=True)

    def is_loaded(self, content: bytes) -> None:
        """With this in the place of the newer file, its iteration is loaded."""
        self._path.write_bytes(content)
        with make_manager("disk", self._root, "job", keep_last=2) as manager:
            assert manager.find_latest() == _NEWEST
            assert_same(manager.load()[0], _state(0, _NEWEST))


_FLIPPED, _TORN, _PLACE = (
    pytest.mark.fault(name) for name in ("flipped-bit", "torn-file", "wrong-place")
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("damage", "cold", "every_nth"),
    [
        *(pytest.param(_flipped, *how, marks=_FLIPPED) for how in ((False, 6), (True, 8))),
        *(pytest.param(way, False, n, marks=_TORN) for way, n in ((_cut, 3), (_zeroed, 1))),
        *(pytest.param(way, False, 1, marks=_PLACE) for way in (_exchanged, _foreign)),
    ],
)
def test_what_is_damaged_is_seen_wherever_it_is_and_the_older_checkpoint_is_loaded(
    damage: Any, cold: bool, every_nth: int, tmp_path: Path, long_form: bool, record_property: Any
) -> None:
    node = _Node(tmp_path)
    options = {"every": long_form and not cold} if damage is _flipped else {}
    cases = list(damage(node.newest, node.older, **options))[:: 1 if long_form else every_nth]

    for what, damaged in cases:
        try:
            if what == _ATTEMPT:
                # Nobody gave that one up: it counts by its iteration.
                node.is_loaded(damaged)
            else:
                node.falls_back(damaged, damage is not _foreign, cold)
        except Exception as error:
            raise AssertionError(f"the newest file: {what}") from error

    record_property("cases", len(cases))
    # It was the damage, and nothing else.
    node.is_loaded(node.newest)
