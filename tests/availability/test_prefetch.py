"""Which nodes' shards are sent to which spare."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.prefetch import Prefetch, SpareRecord, plan_prefetches


def _spare(number: int, nbytes: int, ranks: tuple[int, ...] = ()) -> SpareRecord:
    return SpareRecord(f"{number:016x}", "host", 1, nbytes, 8.0, ranks)


def _numbers(plan: Prefetch) -> list[int]:
    return [number for first, last in plan.nodes for number in range(first, last + 1)]


@given(st.data())
def test_each_spare_gets_whole_nodes_as_many_as_fit_and_spares_share_the_rate(data: Any) -> None:
    places = [
        n for n, size in enumerate(data.draw(st.lists(st.integers(1, 3)))) for _ in range(size)
    ]
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(places), max_size=len(places)))
    on_node = [sum(s for p, s in zip(places, sizes, strict=True) if p == n) for n in set(places)]
    spares = [_spare(i, room) for i, room in enumerate(data.draw(st.lists(st.integers(0, 40))))]

    planned = {plan.spare: plan for plan in plan_prefetches(spares, places, sizes)}

    for spare in spares:
        took = _numbers(planned[spare.name]) if spare.name in planned else []
        left = spare.nbytes - sum(on_node[n] for n in took)
        assert left >= 0
        # What is left out has no room.
        assert all(on_node[n] > left for n in set(range(len(on_node))) - set(took))
    assert sum(plan.rate_limit for plan in planned.values()) <= 8.0 + 1e-9


def test_a_second_spare_takes_what_the_first_has_no_room_for_and_a_plan_for_many_is_short() -> None:
    spares = [_spare(0, 20), _spare(1, 20), _spare(2, 99, (2, 7))]

    planned = plan_prefetches(spares, [0, 0, 1, 1, 2, 2, 3, 3], [5] * 8)
    (many,) = plan_prefetches([_spare(0, 1 << 60)], [r // 8 for r in range(16384)], [9] * 16384)

    assert [_numbers(plan) for plan in planned] == [[0, 1], [2, 3], [1, 3]]
    assert many.nodes == ((0, 2047),)
