"""Digests of many ranks are compared, and what differs is named: pure functions."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.coverage import SaveOutcome
from localckpt.availability.divergence import (
    Divergence,
    compare_replicas,
    describe,
    judge_differences,
)
from localckpt.availability.durability import SaveVerdict, judge_save
from localckpt.ids import Generation

_TENSORS = "abc"


@st.composite
def _states(draw: st.DrawFn) -> list[dict[int, dict[str, int]]]:
    """For each rank, the sets that it belongs to, each with its tensors."""
    sets = draw(st.lists(st.sets(st.integers(0, 5), min_size=2), max_size=3))
    ranks: list[dict[int, dict[str, int]]] = [{} for _ in range(6)]
    for set_id, members in enumerate(sets):
        whole = dict.fromkeys(draw(st.sets(st.sampled_from(_TENSORS), min_size=1)), 0)
        for rank in members:
            changes = draw(st.dictionaries(st.sampled_from(_TENSORS), st.integers(0, 2)))
            gone = draw(st.sets(st.sampled_from(_TENSORS), max_size=1))
            own = {**whole, **changes} if draw(st.booleans()) else dict(whole)
            if draw(st.integers(0, 4)) == 0:
                own = {key: value for key, value in own.items() if key not in gone}
            ranks[rank][set_id] = own
    return ranks


def _digest(tensors: dict[str, int]) -> int:
    return hash(tuple(sorted(tensors.items()))) & 0xFFFFFFFF


def _as_sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _named(ranks: list[dict[int, dict[str, int]]]) -> Divergence | None:
    reports = [[(s, _digest(tensors)) for s, tensors in of.items()] for of in ranks]
    found = compare_replicas(reports)
    if found is None:
        return None
    found = Divergence.from_json(_as_sent(found.to_json()))
    told: list[Any] = []
    for rank, of in enumerate(ranks):
        asked = {s.set_id for s in found.sets if rank in s.asked}
        tensors = {str(s): t for s, t in of.items() if s in asked}
        is_concerned = any(s.may_be_named(rank) for s in found.sets)
        told.append([f"host{rank}", tensors] if is_concerned else None)
    named = judge_differences(found, _as_sent(told))
    return Divergence.from_json(_as_sent(named.to_json()))


@given(_states())
def test_each_tensor_that_differs_is_named_with_the_ranks_of_each_value(
    ranks: list[dict[int, dict[str, int]]],
) -> None:
    found = _named(ranks)

    wanted: list[tuple[str, dict[int | None, set[int]]]] = []
    for set_id in sorted({s for of in ranks for s in of}):
        members = [rank for rank, of in enumerate(ranks) if set_id in of]
        for key in _TENSORS:
            values: dict[int | None, set[int]] = {}
            for rank in members:
                values.setdefault(ranks[rank][set_id].get(key), set()).add(rank)
            if len(values) > 1:
                wanted.append((key, values))
    differences = () if found is None else found.differences
    assert (found is None) == (not wanted)

    def outline(key: str, groups: Any) -> tuple[Any, ...]:
        return key, tuple(sorted(tuple(sorted(group)) for group in groups))

    # Six ranks make six groups at most, so all are told.
    assert Counter(outline(d.key, d.groups) for d in differences) == Counter(
        outline(key, values.values()) for key, values in wanted
    )
    for difference in differences:
        count = sum(map(len, difference.groups))
        majority = difference.groups[0] if 2 * len(difference.groups[0]) > count else None
        others = {rank for group in difference.groups for rank in group} - {*(majority or ())}
        assert {*difference.minority} == (others if majority else set())
    if found is not None:
        assert found.nodes == tuple(f"host{rank}" for rank in found.suspects)
        assert all(f"rank {rank} on host{rank}" in describe(found) for rank in found.suspects)


def test_of_a_large_job_only_a_few_ranks_are_asked_and_little_is_told() -> None:
    reports = [[(100, 10), (rank % 64, 3)] for rank in range(4096)]
    reports[77] = [(100, 11), (77 % 64, 3)]

    found = compare_replicas(reports)

    assert found is not None
    (of,) = found.sets
    assert of.asked == [0, 77]
    assert found.suspects == tuple(range(4096)), "nobody has asked yet"
    told: list[Any] = [None] * 4096
    told[0], told[77] = ["a", {"100": {"w": 1, "b": 5}}], ["b", {"100": {"w": 2, "b": 5}}]
    named = judge_differences(found, told)
    assert named.suspects == (77,)
    assert describe(named) == (
        "'w' of rank 77 is not that of the others. In the minority: rank 77 on b"
    )
    assert len(json.dumps(named.to_json())) < 300


@pytest.mark.parametrize("digest", [0, 1, (1 << 64) - 1])
def test_a_difference_is_part_of_the_verdict_on_a_save(digest: int) -> None:
    def outcome(replicas: tuple[tuple[int, int], ...], error: str | None = None) -> Any:
        generation = Generation(1, 2)
        return _as_sent(SaveOutcome(3, generation, error, (), replicas=replicas).to_json())

    equal, other = ((5, digest),), ((5, digest ^ 1),)

    def verdict(*outcomes: Any) -> SaveVerdict:
        return SaveVerdict.from_json(_as_sent(judge_save(outcomes)))

    assert verdict(outcome(equal), outcome(equal)).divergence is None
    assert verdict(outcome(equal), outcome(())).divergence is None
    found = verdict(outcome(equal), outcome(other)).divergence
    assert found is not None
    assert [of.groups for of in found.sets] == [((0,), (1,))]
    failed = verdict(outcome(equal), outcome(other, "the disk is full"))
    assert failed.reached is None
    assert failed.problems == ("rank 1: the disk is full",)
