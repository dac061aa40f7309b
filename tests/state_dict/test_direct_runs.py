"""Rows that are one run of bytes in an image go straight where they belong; nothing else does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.direct_runs import DirectRun, find_run
from localckpt.state_dict.placed_runs import PlacedRuns
from localckpt.state_dict.regions import Region

_COLUMNS = 3


@dataclass
class _Target:
    region: Region
    memory: memoryview | None
    got: list[int] = field(default_factory=list)

    def filled(self, nbytes: int) -> None:
        self.got.append(nbytes)


def _rows(first: int, count: int, columns: int = _COLUMNS) -> Region:
    return ((first, count),), ((0, columns),)


@given(st.data())
def test_every_byte_of_a_run_goes_to_its_place_and_every_other_one_does_not(
    data: st.DataObject,
) -> None:
    saved_first = data.draw(st.integers(0, 5))
    saved_count = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, 9))
    first = data.draw(st.integers(saved_first, saved_first + saved_count - 1))
    count = data.draw(st.integers(1, saved_first + saved_count - first))
    own_first = data.draw(st.integers(0, first))
    own_count = data.draw(st.integers(first + count - own_first, 40))
    image = bytes(range(start + saved_count * _COLUMNS + data.draw(st.integers(0, 7))))
    own = memoryview(bytearray(own_count * _COLUMNS))
    target = _Target(_rows(own_first, own_count), own)

    found = find_run(
        _rows(saved_first, saved_count), [_rows(first, count)], 0, target, start, _COLUMNS
    )
    assert found is not None
    runs = PlacedRuns([DirectRun(*found, target.filled)])
    others = bytearray()
    at = 0
    while at < len(image):
        stop = min(len(image), at + data.draw(st.integers(1, 12)))
        scratch = memoryview(bytearray(stop - at))
        places = runs.places(at, stop, lambda buffer=scratch: buffer)
        assert sum(map(len, places)) == stop - at
        done = at
        for place in places:
            place[:] = image[done : done + len(place)]
            done += len(place)
        others += scratch
        for run in runs.overlapping(at, stop):
            run.note_filled(at, stop)
        at = stop

    begin = start + (first - saved_first) * _COLUMNS
    end = begin + count * _COLUMNS
    expected = bytearray(len(own))
    place = (first - own_first) * _COLUMNS
    expected[place : place + end - begin] = image[begin:end]
    assert own == expected
    assert others == image[:begin] + bytes(end - begin) + image[end:]
    assert sum(target.got) == end - begin


_SAVED = _rows(2, 4)


@pytest.mark.parametrize(
    ("wanted", "target"),
    [
        pytest.param([_rows(2, 2), _rows(3, 2)], _rows(0, 9), id="wanted by another, too"),
        pytest.param([_rows(2, 2, 2)], _rows(0, 9, 2), id="not all columns"),
        pytest.param([_rows(2, 2)], _rows(0, 9, 4), id="longer rows in the target"),
        pytest.param([(((2, 1), (4, 1)), ((0, 3),))], _rows(0, 9), id="rows apart"),
        pytest.param([_rows(2, 2)], (((0, 3), (4, 2)), ((0, 3),)), id="target with a gap"),
        pytest.param([()], (), id="no dimension"),
    ],
)
def test_what_is_no_single_run_or_wanted_twice_is_left_to_be_copied(
    wanted: list[Region], target: Region
) -> None:
    given = _Target(target, memoryview(bytearray(100)))

    assert find_run(_SAVED, wanted, 0, given, 0, _COLUMNS) is None


def test_a_target_without_a_run_of_host_memory_is_left_to_be_copied() -> None:
    given = _Target(_rows(0, 9), None)

    assert find_run(_SAVED, [_rows(2, 2)], 0, given, 0, _COLUMNS) is None
