"""A file is damaged everywhere, in every way; what is loaded is bit for bit right, or older.

One rank alone, in this process, plays every case: without a replica it is the older checkpoint that
is loaded. Two ranks that keep each other's replicas play a selection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.damage import cut, exchanged, flip, flips, foreign, mixed_state, zeroed
from tests.faults.images import regions
from tests.faults.lives import Lives
from tests.managers.jobs import assert_same, make_manager
from tests.ranks import run_ranks
from tests.storage.test_files import make_cold

Cases = Iterable[tuple[str, bytes]]

_OLDER, _NEWEST = 7, 8
_ATTEMPT = "of another attempt"


class _Node:
    """The store of a job of one rank that has saved twice, and whose newer file is damaged."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cases = 0
        with make_manager("disk", root, "job", keep_last=2) as manager:
            for iteration in (_OLDER, _NEWEST):
                manager.save(mixed_state(0, iteration), iteration)
        older, self._path = sorted(root.rglob("*.safetensors"))
        self.older, self.newest = older.read_bytes(), self._path.read_bytes()
        self._expected = mixed_state(0, _OLDER)
        self._into = mixed_state(0, 0)

    def falls_back(self, damaged: bytes, *, bad: bool = True, cold: bool = False) -> None:
        """With this in the place of the newer file, the older one is loaded.

        Args:
            damaged: The content of the file.
            bad: Whether it is set aside; else it is good, and what it is was not looked for.
            cold: Whether the files are read from the disk, past the page cache.
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
            assert_same(state, self._expected)
            assert [aside.exists(), self._path.exists()] == [bad, not bad]
            assert (aside if bad else self._path).read_bytes() == damaged
        finally:
            aside.unlink(missing_ok=True)

    def is_loaded(self, content: bytes) -> None:
        """With this in the place of the newer file, its iteration is loaded."""
        self._path.write_bytes(content)
        with make_manager("disk", self._root, "job", keep_last=2) as manager:
            assert manager.find_latest() == _NEWEST
            assert_same(manager.load()[0], mixed_state(0, _NEWEST))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[_Node]:
    made = _Node(tmp_path)

    yield made

    # It was the damage, and nothing else.
    made.is_loaded(made.newest)


def _play(node: _Node, cases: Cases, record_property: Any, **options: Any) -> None:
    number = 0
    for what, damaged in cases:
        try:
            node.falls_back(damaged, **options)
        except Exception as error:
            raise AssertionError(f"the newest file: {what}") from error
        number += 1
    record_property("cases", number)
    assert number


def _flipped(node: _Node, chosen: list[tuple[str, int, int]]) -> Cases:
    for part, position, bit in chosen:
        yield f"bit {bit} of byte {position}, in {part}", flip(node.newest, position, bit)


@pytest.mark.fault("flipped-bit")
@pytest.mark.timeout(1800)
def test_a_flipped_bit_is_seen_wherever_it_is(
    node: _Node, long_form: bool, record_property: Any
) -> None:
    chosen = flips(node.newest, every=long_form)

    _play(node, _flipped(node, chosen if long_form else chosen[::6]), record_property)


@pytest.mark.fault("flipped-bit")
def test_a_flipped_bit_is_seen_when_it_comes_from_the_disk(
    node: _Node, long_form: bool, record_property: Any
) -> None:
    chosen = flips(node.newest, every=False)[:: 1 if long_form else 8]

    _play(node, _flipped(node, chosen), record_property, cold=True)


@pytest.mark.fault("torn-file")
def test_a_file_that_ends_too_early_is_seen_wherever_it_ends(
    node: _Node, long_form: bool, record_property: Any
) -> None:
    _play(node, list(cut(node.newest))[:: 1 if long_form else 3], record_property)


@pytest.mark.fault("torn-file")
def test_a_file_that_was_not_written_all_through_is_seen(node: _Node, record_property: Any) -> None:
    _play(node, zeroed(node.newest, node.older), record_property)


@pytest.mark.fault("wrong-place")
def test_a_good_block_in_the_place_of_another_is_seen(node: _Node, record_property: Any) -> None:
    _play(node, exchanged(node.newest, node.older), record_property)


@pytest.mark.fault("wrong-place")
def test_a_good_file_in_the_place_of_another_is_taken_for_what_it_is(
    node: _Node, record_property: Any
) -> None:
    cases = [case for case in foreign(node.newest, node.older) if case[0] != _ATTEMPT]
    _play(node, cases, record_property, bad=False)


@pytest.mark.fault("wrong-place")
def test_a_good_file_of_an_attempt_that_nobody_gave_up_counts_by_its_iteration(
    node: _Node,
) -> None:
    other = dict(foreign(node.newest, node.older))[_ATTEMPT]

    node.is_loaded(other)


_PLACES = ("own", "replica", "both")


def _ways(newest: bytes, older: bytes, others: bytes, every: bool) -> list[tuple[str, bytes]]:
    """What may stand in the place of a rank's newest shard, in a selection."""
    chosen = flips(newest, every=False)
    ways = [
        *(
            (f"bit of {part}", flip(newest, at, bit))
            for part, at, bit in chosen[:: len(chosen) // 20]
        ),
        *list(cut(newest))[::5],
        *list(zeroed(newest, older))[::4],
        *list(exchanged(newest, older))[::4],
        *foreign(newest, older),
        ("another rank's", others),
    ]
    return ways if every else ways[::7] + ways[-3:]


def _play_together(
    rank: int, world_size: int, base: Path, every: bool
) -> list[tuple[str, str, int, str]]:
    """Rank 1's newest shard is bad; what each case was, and what came of it on this rank."""
    lives = Lives("disk", base, rank, (1, 2))
    with lives.life(None, keep_last=2) as manager:
        for iteration in (_OLDER, _NEWEST):
            manager.save(mixed_state(rank, iteration), iteration)
    lives.keep("whole")
    (older,), (newest,), (others,) = (
        [path.read_bytes() for path in _copies(lives.root, owner, iteration)]
        for owner, iteration in ((1, _OLDER), (1, _NEWEST), (0, _NEWEST))
    )
    told = []
    for what, damaged in _ways(newest, older, others, every):
        for place in _PLACES:
            holds_a_bad_one = place == "both" or (place == "own") == (rank == 1)

            def spoil(root: Path, damaged: bytes = damaged) -> None:
                (path,) = _copies(root, 1, _NEWEST)
                path.write_bytes(damaged)

            with lives.life("whole", spoil if holds_a_bad_one else None, keep_last=2) as manager:
                assert manager.find_latest() in (_OLDER, _NEWEST)
                state, ckpt_id = manager.load()
                assert_same(state, mixed_state(rank, ckpt_id.iteration))
                told.append((what, place, ckpt_id.iteration, manager.last_load.source))
    lives.close()
    return told


def _copies(root: Path, owner: int, iteration: int) -> list[Path]:
    return [p for p in root.rglob(f"{iteration:012d}.{owner}.*") if p.suffix == ".safetensors"]


@pytest.mark.fault("flipped-bit", "torn-file", "wrong-place", "bad-copies")
@pytest.mark.timeout(1800)
def test_the_replica_is_taken_whatever_is_wrong_with_the_own_copy(
    tmp_path: Path, long_form: bool, record_property: Any
) -> None:
    zero, one = run_ranks(_play_together, 2, tmp_path, long_form, timeout_s=1200.0)

    for (what, place, *at_zero), (_, _, *at_one) in zip(zero, one, strict=True):
        loaded = _OLDER if place == "both" else _NEWEST
        source = "peer rank 0" if place == "own" else "own node"
        assert at_zero == [loaded, "own node"], (what, place)
        assert at_one == [loaded, source], (what, place)
    record_property("cases", len(zero))
