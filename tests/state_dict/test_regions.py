"""Regions are the sets of elements that they describe; boxes place them in global tensors."""

from __future__ import annotations

import itertools
import json
import math
from math import prod
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

import localckpt
from localckpt.errors import CheckpointingException, CorruptShardError
from localckpt.state_dict.boxes import (
    NO_BOXES,
    Box,
    RankSet,
    Region,
    common,
    local_starts,
    overlapping_pairs,
    parse_boxes,
    rectangles_of,
    render_boxes,
    volume,
    whole,
    without,
)
from localckpt.state_dict.global_view import Job, shard_runs
from localckpt.state_dict.header import Skeleton
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import find_targets
from tests.faults.images import Parts
from tests.state_dict.states import IDENTITY, assert_same, elements_of, runs_of, source_of


def _rectangle(starts: Any, sizes: Any) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, a + n) for a, n in zip(starts, sizes, strict=True))))


@st.composite
def _regions(draw: Any, count: int = 2) -> tuple[tuple[int, ...], list[Region]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))

    def runs(size: int) -> tuple[tuple[int, int], ...]:
        return runs_of(sorted(draw(st.sets(st.integers(0, size - 1)))))

    return shape, [tuple(runs(size) for size in shape) for _ in range(count)]


@given(_regions())
def test_regions_are_sets(drawn: tuple[tuple[int, ...], list[Region]]) -> None:
    _, (one, other) = drawn
    both, rest = common(one, other), without(one, other)
    mine, others = elements_of(one), elements_of(other)

    assert (elements_of(both) if both is not None else set()) == mine & others
    parts = [elements_of(part) for part in rest]
    assert set().union(*parts) == mine - others
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert volume(one) == len(mine)


@given(_regions(1), st.integers(1, 40))
def test_a_region_is_its_rectangles_and_can_be_divided(
    drawn: tuple[tuple[int, ...], list[Region]], most: int
) -> None:
    _, (region,) = drawn

    found = [_rectangle(first, sizes) for first, sizes in rectangles_of(region)]
    parts = [_rectangle(first, sizes) for first, sizes in rectangles_of(region, most)]

    for pieces in (found, parts):
        assert set().union(*pieces) == elements_of(region)
        assert sum(map(len, pieces)) == volume(region)
    assert all(len(part) <= most for part in parts)
    for first, sizes in rectangles_of(region):
        if math.prod(sizes):
            starts = local_starts(region, first, sizes)
            sides = [[i for s, n in runs for i in range(s, s + n)] for runs in region]
            ends = zip(sides, starts, sizes, strict=True)
            assert [side[at : at + n] for side, at, n in ends] == [
                list(range(a, a + n)) for a, n in zip(first, sizes, strict=True)
            ]


def test_a_rectangle_outside_of_a_region_is_refused() -> None:
    region = (((0, 2), (4, 2)),)

    for first, size in ((1, 2), (2, 1), (5, 2), (-1, 1), (4, -1)):
        with pytest.raises(ValueError, match="is in no run"):
            local_starts(region, (first,), (size,))
    assert local_starts(region, (4,), (2,)) == (2,)
    assert whole((2, 3)) == (((0, 2),), ((0, 3),))


@st.composite
def two_lists_of_boxes(draw: st.DrawFn) -> tuple[list[Region], list[Region]]:
    """Boxes of one number of dimensions that lie in any way."""
    dims = draw(st.integers(0, 4))
    extent = draw(st.sampled_from([3, 12, 1000]))
    size = st.integers(0, draw(st.sampled_from([2, 5, extent])))
    box = st.tuples(*[st.tuples(st.tuples(st.integers(0, extent), size))] * dims)
    # Left alone, lists are mostly very short.
    boxes = st.sampled_from([0, 15, 40]).flatmap(
        lambda fewest: st.lists(box, min_size=fewest, max_size=40)
    )
    return draw(boxes), draw(boxes)


@given(lists=two_lists_of_boxes())
def test_pairs_of_arbitrary_boxes_are_those_that_have_elements_in_common(
    lists: tuple[list[Region], list[Region]],
) -> None:
    wanted, saved = lists

    pairs = overlapping_pairs(wanted, saved)

    assert pairs == [
        (w, s)
        for (w, one), (s, other) in itertools.product(enumerate(wanted), enumerate(saved))
        if (both := common(one, other)) is not None and volume(both)
    ]


@given(st.sets(st.integers(0, 60), max_size=20))
def test_a_set_of_ranks_has_the_ranks_that_it_was_made_of(ranks: set[int]) -> None:
    found = RankSet.of(sorted(ranks))

    assert set(found) == ranks
    assert len(found) == len(list(found)) == len(ranks)
    assert {rank for rank in range(-2, 64) if rank in found} == ranks


@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1), (0, 1, 2)])
def test_equal_ranks_in_a_mesh_of_16384_are_few_runs(kept: tuple[int, ...]) -> None:
    mesh = numpy.arange(16_384).reshape(64, 32, 8)
    own = tuple(slice(None) if dim in kept else 3 for dim in range(3))

    found = RankSet.of(mesh[own].flatten().tolist())

    assert len(found.runs) <= 64
    assert sorted(found) == mesh[own].flatten().tolist()


def _most_factors() -> int:
    """The greatest split factor of which this torch says what FSDP2 does with uneven tensors."""
    pieces, _ = _StridedShard(0, split_factor=2)._split_tensor(
        torch.arange(2), 2, with_padding=False, contiguous=True
    )
    # The first rank of two has the first of two pieces of either half; torch 2.8 says otherwise.
    return 3 if len(pieces[0]) == 2 else 1


@st.composite
def _shardings(draw: st.DrawFn) -> tuple[list[int], list[int], list[Any]]:
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims, factors = st.integers(0, len(shape) - 1), st.integers(1, _most_factors())
    placement = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, factors),
    )
    return shape, mesh, [draw(placement) for _ in mesh]


@given(_shardings())
def test_the_place_of_a_shard_is_where_torch_has_its_values_from_and_a_sum_has_none(
    sharding: tuple[list[int], list[int], list[Any]],
) -> None:
    shape, mesh, placements = sharding
    whole = torch.arange(prod(shape)).reshape(shape)
    for coordinate in numpy.ndindex(*mesh):
        local = whole
        for parts, number, placement in zip(mesh, coordinate, placements, strict=True):
            if not placement.is_replicate():
                pieces, _ = placement._split_tensor(
                    local, parts, with_padding=False, contiguous=True
                )
                local = pieces[number]

        runs = shard_runs(shape, mesh, coordinate, placements)

        assert runs is not None
        indices = [[i for start, n in of for i in range(start, start + n)] for of in runs]
        assert torch.equal(whole[numpy.ix_(*indices)], local)
    assert shard_runs([4], [2], [0], [Partial()]) is None


_BOXES = {
    0: Box("weight", (10, 8), (((3, 3),), ((0, 2), (4, 2))), RankSet.of([3, 7])),
    2: Box("layers", (12, 4), (((5, 1),), ((0, 4),)), None),
    3: Box("empty", (10, 4), (((10, 0),), ((0, 4),)), RankSet.of([3])),
}
_SHAPES = [(3, 4), (1,), (4,), (0, 4), ()]


def test_boxes_are_read_as_they_were_written() -> None:
    assert parse_boxes(render_boxes(_BOXES), _SHAPES, 3, 8) == _BOXES
    assert render_boxes({}) == NO_BOXES
    assert _BOXES[0].place == "[3:6, 0:2+4:6] of [10, 8]"


_HUGE = 10**19
HOSTILE: dict[str, Any] = {
    "nothing": None,
    "no groups": [[]],
    "a text": "boxes",
    "a tensor that is none": [[], [[5, "w", [3], [0], None]]],
    "a tensor before the first": [[], [[-1, "w", [3], [0], None]]],
    "a tensor by a bool": [[], [[True, "w", [3], [0], None]]],
    "a tensor twice": [[], [[1, "w", [3], [0], None], [1, "w", [3], [1], None]]],
    "a key that is no text": [[], [[1, 5, [3], [0], None]]],
    "a group that is none": [[], [[1, "w", [3], [0], 0]]],
    "a group before the first": [[[[3, 1, 1]]], [[1, "w", [3], [0], -1]]],
    "outside of the global tensor": [[], [[1, "w", [3], [3], None]]],
    "before the global tensor": [[], [[1, "w", [3], [-1], None]]],
    "larger than the global tensor": [[], [[0, "w", [2, 4], [0, 0], None]]],
    "too few dimensions": [[], [[0, "w", [12], [0], None]]],
    "too few starts": [[], [[0, "w", [3, 4], [0], None]]],
    "a shape with a fraction": [[], [[1, "w", [1.5], [0], None]]],
    "a shape with a bool": [[], [[1, "w", [True], [0], None]]],
    "a huge shape": [[], [[1, "w", [_HUGE], [0], None]]],
    "a huge start": [[], [[1, "w", [3], [_HUGE], None]]],
    "runs that overlap": [[], [[0, "w", [3, 9], [0, [[0, 2], [1, 2]]], None]]],
    "runs backwards": [[], [[0, "w", [3, 9], [0, [[4, 2], [0, 2]]], None]]],
    "runs that are too few": [[], [[0, "w", [3, 9], [0, [[0, 2], [4, 1]]], None]]],
    "runs that are too many": [[], [[0, "w", [3, 9], [0, [[0, 4], [4, 1]]], None]]],
    "runs beyond the end": [[], [[0, "w", [3, 9], [0, [[0, 2], [8, 2]]], None]]],
    "an empty run among others": [[], [[0, "w", [3, 9], [0, [[0, 4], [5, 0]]], None]]],
    "no runs": [[], [[0, "w", [3, 9], [0, []], None]]],
    "a prepended dimension of two": [[], [[1, "w", [3, 3], [[[0, 2]], 0], None]]],
    "ranks without the own": [[[[4, 1, 1]]], []],
    "ranks beyond the last": [[[[3, 2, 5]]], []],
    "ranks before the first": [[[[-3, 2, 6]]], []],
    "ranks that are named twice": [[[[3, 1, 1], [3, 1, 1]]], []],
    "ranks in ranks": [[[[0, 4, 1], [3, 1, 1]]], []],
    "a step of nothing": [[[[3, 4, 0]]], []],
    "ranks of which there are none": [[[[3, 0, 1]]], []],
    "a huge number of ranks": [[[[0, _HUGE, 1]]], []],
    "ranks without a step": [[[[3, 1]]], []],
    "no ranks": [[[]], []],
}


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("table", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_table_of_boxes_that_cannot_be_is_refused_before_a_tensor_is_written(table: Any) -> None:
    state = {"a": torch.ones(3, 4), "b": torch.ones(1)}
    forged = Parts.of(bytes(pack(state, IDENTITY).view)).replace(boxes=json.dumps(table).encode())
    into = {"a": torch.zeros(3, 4), "b": torch.zeros(1)}
    reader = ImageReader(source_of(forged.image()), SafeGlobals())

    with pytest.raises(CorruptShardError, match="the table of boxes"):
        reader.restore(find_targets(into))

    assert not into["a"].any()
    assert not into["b"].any()


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "place", [[[True], [0]], [[1.0], [0]], [[1], [False]], [[1], [[[0, 1.0]]]]]
)
def test_a_box_is_checked_though_an_equal_one_was(place: Any) -> None:
    rows = [[0, "w", [1], [0], None], [1, "v", [1], [[[0, 1]]], None], [2, "u", *place, None]]

    with pytest.raises(CorruptShardError, match="the table of boxes"):
        parse_boxes(json.dumps([[], rows]).encode(), [(1,)] * 3, 3, 8)


_JOB = Job(0, (0,))


def _boxes(state: Any, job: Job | None = _JOB) -> dict[int, Box]:
    capture = ImagePlanner(job=job).capture(state)
    table, text, _, _ = Skeleton.split(capture.skeleton)
    return parse_boxes(text, [tuple(row[2]) for row in json.loads(table)], 0, 1)


def test_a_marked_part_is_whole_and_loads_without_the_marker() -> None:
    tensors = {"weight": torch.rand(3, 2), "scale": torch.tensor(2.0), "table": numpy.arange(800)}
    state = {"model": localckpt.replicated({**tensors, "step": 3}), "own": torch.rand(5)}

    boxes = _boxes(state)

    alone = RankSet.of([0])
    assert sorted(boxes.values()) == [
        Box("model.scale", (), (), alone),
        Box("model.table", (800,), (((0, 800),),), alone),
        Box("model.weight", (3, 2), (((0, 3),), ((0, 2),)), alone),
    ]
    image = pack(state, IDENTITY)
    assert_same(unpack(image), {"model": {**tensors, "step": 3}, "own": state["own"]})
    into = {"model": {**tensors, "weight": torch.zeros(3, 2)}, "own": torch.zeros(5)}
    into["model"] = localckpt.replicated(into["model"])
    ImageReader(image, SafeGlobals()).restore(find_targets(into))
    assert torch.equal(into["own"], state["own"])


def test_a_marker_inside_of_another_is_refused_and_two_paths_of_one_text_have_two_keys() -> None:
    state = {"all": localckpt.replicated({"model": localckpt.replicated({"w": torch.ones(2)})})}
    alike = localckpt.replicated({"a": {"b": torch.rand(2)}, "a.b": torch.rand(3)})

    with pytest.raises(CheckpointingException, match=r"'all\.model' is marked .* inside"):
        ImagePlanner(job=_JOB).capture(state)
    assert [box.key for box in _boxes(alike).values()] == ["a.b", "a.b#2"]


def test_boxes_are_made_once_while_the_markers_stay(layouts: list[Any]) -> None:
    planner = ImagePlanner(job=Job(0, (0, 1)))
    weights = {"w": torch.rand(2)}
    for state in (localckpt.replicated(weights), localckpt.replicated(weights), weights):
        planner.capture(state)

    assert len(layouts) == 2
