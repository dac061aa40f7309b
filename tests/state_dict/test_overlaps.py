"""The pairs of chunks that overlap are those of the plain definition, found in little work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from localckpt.state_dict import overlaps
from localckpt.state_dict.overlaps import overlapping_pairs

Chunks = list[ChunkStorageMetadata]


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tiled(edges: Sequence[Sequence[int]]) -> Chunks:
    """All boxes between neighbouring edges in each dimension."""
    return [
        chunk([start for start, _ in box], [end - start for start, end in box])
        for box in product(*(pairwise(along) for along in edges))
    ]


def tiling(shape: Sequence[int], parts: Sequence[int]) -> Chunks:
    """A tensor in so many nearly equal parts along each dimension."""
    return tiled(
        [
            [size * i // count for i in range(count + 1)]
            for size, count in zip(shape, parts, strict=True)
        ]
    )


def pairs_by_definition(wanted: Chunks, saved: Chunks) -> list[tuple[int, int]]:
    """All pairs whose intersection has a length in every dimension."""

    def overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
        return all(
            max(a, b) < min(a + a_size, b + b_size)
            for a, a_size, b, b_size in zip(
                one.offsets, one.sizes, other.offsets, other.sizes, strict=True
            )
        )

    return [
        (w, s)
        for w, one in enumerate(wanted)
        for s, other in enumerate(saved)
        if overlap(one, other)
    ]


@contextmanager
def small_limits() -> Iterator[None]:
    """With these a few chunks are searched as thousands are, some pairs at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlaps, "_PAIRS_OF_A_LOOP", 0)
        patch.setattr(overlaps, "_PAIRS_AT_ONCE", 30)
        yield


@st.composite
def two_lists_of_boxes(draw: st.DrawFn, smallest: int = 0) -> tuple[Chunks, Chunks]:
    """Boxes of one number of dimensions that lie in any way."""
    dims = draw(st.integers(0, 4))
    extent = draw(st.sampled_from([3, 12, 1000]))
    size = st.integers(smallest, draw(st.sampled_from([2, 5, extent])))
    box = st.tuples(*[st.tuples(st.integers(0, extent), size)] * dims)

    def boxes() -> Chunks:
        # Left alone, lists are mostly very short.
        fewest = draw(st.sampled_from([0, 15, 40]))
        drawn = draw(st.lists(box, min_size=fewest, max_size=40))
        return [chunk([start for start, _ in b], [size for _, size in b]) for b in drawn]

    return boxes(), boxes()


@st.composite
def two_tilings(draw: st.DrawFn) -> tuple[Chunks, Chunks]:
    """One tensor divided in two ways, unevenly, in any order."""
    shape = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))

    def edges(size: int) -> list[int]:
        most = min(size, 60 // len(shape) ** 2)
        inner = st.sets(st.integers(1, size), min_size=draw(st.integers(0, most)), max_size=most)
        return sorted({0, size} | draw(inner))

    return (
        draw(st.permutations(tiled([edges(size) for size in shape]))),
        draw(st.permutations(tiled([edges(size) for size in shape]))),
    )


@pytest.mark.parametrize("limits", [pytest.MonkeyPatch.context, small_limits])
@settings(max_examples=80, deadline=None)
@given(lists=two_lists_of_boxes())
def test_pairs_of_arbitrary_boxes_are_those_of_the_definition(
    limits: Callable[[], Any], lists: tuple[Chunks, Chunks]
) -> None:
    with limits():
        pairs = overlapping_pairs(*lists)

    assert pairs == pairs_by_definition(*lists)


@pytest.mark.parametrize("limits", [pytest.MonkeyPatch.context, small_limits])
@settings(max_examples=50, deadline=None)
@given(lists=two_tilings())
def test_pairs_of_tilings_are_those_of_the_definition(
    limits: Callable[[], Any], lists: tuple[Chunks, Chunks]
) -> None:
    with limits():
        pairs = overlapping_pairs(*lists)

    assert pairs == pairs_by_definition(*lists)


@pytest.mark.parametrize("count", [3, 300])
def test_chunks_without_elements_overlap_nothing(count: int) -> None:
    full, empty = [chunk((0, 0), (9, 9))] * count, [chunk((4, 4), (0, 2))] * count

    pairs = overlapping_pairs(full, empty), overlapping_pairs(empty, full)

    assert pairs == ([], [])


@pytest.mark.parametrize(("wanted", "saved"), [(2, 3), (200, 300)])
def test_all_chunks_of_a_tensor_without_dimensions_overlap(wanted: int, saved: int) -> None:
    pairs = overlapping_pairs([chunk((), ())] * wanted, [chunk((), ())] * saved)

    assert pairs == list(product(range(wanted), range(saved)))


@pytest.mark.parametrize(("wanted", "saved"), [(0, 0), (0, 500), (500, 0)])
def test_no_chunks_on_one_side_are_no_pairs(wanted: int, saved: int) -> None:
    pairs = overlapping_pairs(tiling((500,), (500,))[:wanted], tiling((500,), (500,))[:saved])

    assert pairs == []


def test_a_default_device_without_data_changes_nothing() -> None:
    wanted, saved = tiling((640, 64), (20, 2)), tiling((640, 64), (25, 3))

    with torch.device("meta"):
        pairs = overlapping_pairs(wanted, saved)

    assert pairs == pairs_by_definition(wanted, saved)


def work(wanted: Chunks, saved: Chunks) -> int:
    """Pairs that are compared, and chunks."""
    done = len(wanted) + len(saved)
    candidates = overlaps._candidates

    def counting(*sides: Any) -> Iterator[Any]:
        nonlocal done
        for some, others in candidates(*sides):
            done += len(some)
            yield some, others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlaps, "_candidates", counting)
        overlapping_pairs(wanted, saved)
    return done


@pytest.mark.parametrize(
    ("shape", "parts_of_1000", "parts_of_8000", "power"),
    [
        pytest.param((8000, 50000), (1000, 1), (8000, 1), 1, id="rows of a wide matrix"),
        pytest.param((8000, 64), (1000, 1), (8000, 1), 1, id="rows of a high matrix"),
        pytest.param((50000, 8000), (1, 1000), (1, 8000), 1, id="columns"),
        pytest.param((9000, 9000), (32, 31), (90, 89), 3 / 2, id="grid"),
        pytest.param((900, 900, 900), (10, 10, 10), (20, 20, 20), 5 / 3, id="blocks"),
    ],
)
def test_work_grows_as_the_chunks_do_that_overlap_along_one_dimension(
    shape: tuple[int, ...],
    parts_of_1000: tuple[int, ...],
    parts_of_8000: tuple[int, ...],
    power: float,
) -> None:
    def shifted(parts: tuple[int, ...]) -> Chunks:
        return tiling(shape, [max(1, count - 1) for count in parts])

    few = work(shifted(parts_of_1000), tiling(shape, parts_of_1000))
    many = work(shifted(parts_of_8000), tiling(shape, parts_of_8000))

    assert 0 < many < 1.5 * 8**power * few


def test_a_chunk_that_overlaps_all_adds_work_only_for_itself() -> None:
    shape, whole = (8000, 8000), chunk((0, 0), (8000, 8000))
    wanted, saved = tiling(shape, (79, 99)), tiling(shape, (80, 100))

    without, with_whole = work(wanted, saved), work([*wanted, whole], [*saved, whole])

    assert with_whole < 1.2 * without


def test_chunks_that_all_overlap_are_compared_once() -> None:
    same = [chunk((0, 0), (5, 5))] * 400

    pairs = overlapping_pairs(same, same)

    assert pairs == list(product(range(400), range(400)))
    assert work(same, same) < 1.5 * len(pairs)
