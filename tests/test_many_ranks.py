"""Decisions of more ranks than a machine runs: each is a thread with a connection of its own.

The store is a real one, and so is the code of the ranks. In worlds of this size a rank waits on a
connection of its own instead of asking again and again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from localckpt.errors import PeerLostError
from tests.simulated import World, gather, many

_WORLD = 72
_PATIENT_S, _HURRIED_S = 90.0, 4.0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks that have begun, with a deadline that they meet on a busy machine, too."""
    with many(_WORLD, _PATIENT_S) as world:
        yield world


def test_a_decision_takes_few_operations_a_rank_and_its_verdict_is_the_same_on_all(
    world: World,
) -> None:
    before = world.operations()

    for _ in range(3):
        outcomes = world.all_do(
            lambda ranks: ranks.decide("add up", lambda: ranks.rank, lambda all_: sum(all_))
        )
        assert set(outcomes.values()) == {sum(range(_WORLD))}

    taken = [after - b for b, after in zip(before, world.operations(), strict=True)]
    # The root does more; together it is a few for each.
    assert sorted(taken)[_WORLD // 2] <= 3 * 7
    assert sum(taken) <= 3 * 12 * _WORLD


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("missing", [(17,), (0,), (3, 4, 71)], ids=["one", "root", "three"])
@pytest.mark.rows(1)
def test_ranks_that_do_not_come_are_named_in_time_and_raise_when_they_come(
    world: World, missing: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: world.set_timeout(_PATIENT_S))
    world.set_timeout(_HURRIED_S)
    world.all_do(lambda ranks: gather(ranks, "meet before", None))
    began = time.monotonic()

    outcomes = world.all_do(lambda ranks: gather(ranks, "meet", ranks.rank), without=missing)

    assert time.monotonic() - began < 30.0
    (told,) = {str(error) for error in outcomes.values()}
    assert {type(error) for error in outcomes.values()} == {PeerLostError}
    named = ", ".join(f"rank {rank} (last seen: meet before)" for rank in missing)
    assert f"to meet, and {named} did not come" in told
    others = tuple(rank for rank in range(_WORLD) if rank not in missing)
    late = world.all_do(lambda ranks: gather(ranks, "meet", ranks.rank), without=others)
    for rank in missing:
        assert f"rank {rank} came too late to meet" in str(late[rank])
        assert ("had not come either" in str(late[rank])) == (len(missing) > 1)
    again = world.all_do(lambda ranks: gather(ranks, "meet again", ranks.rank))
    assert again == {rank: list(range(_WORLD)) for rank in range(_WORLD)}
