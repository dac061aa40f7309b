"""Decisions of more ranks than a machine runs: each is a thread with a connection of its own.

The store is a real one, and so is the code of the ranks. In worlds of this size a rank waits on a
connection of its own instead of asking again and again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from localckpt.errors import CheckpointingException, PeerLostError, StorageError
from localckpt.ranks.job_store import Group
from localckpt.ranks.ranks import Ranks
from localckpt.threads import Task

_WORLD = 72
_PATIENCE_S = 60.0


class _Counting:
    """A store, and how often it is asked."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            # A get first waits for the key.
            self.asked += 2 if name in ("get", "multi_get") else name != "has_extended_api"
            return method(*args)

        return counted


class _World:
    """Simulated ranks of one job."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        # To copy a client takes far less time than to make one.
        self._client = TCPStore(
            *("127.0.0.1", self._server.port, None, False),
            timedelta(seconds=_PATIENCE_S),
            wait_for_workers=False,
        )
        members = tuple(range(world_size))

        def join(rank: int) -> Ranks:
            group = Group(rank, members, self._client.clone())
            ranks = Ranks("many", timeout_s=_PATIENCE_S, group=group)
            ranks.barrier("begin")
            ranks.set_timeout(timeout_s)
            return ranks

        self.ranks = _together([lambda rank=rank: join(rank) for rank in members])
        self.counts = []
        for ranks in self.ranks:
            part: Any = ranks._part
            part._store, part._waiter = _Counting(part._store), _Counting(part._waiter)
            self.counts.append((part._store, part._waiter))

    def all_do(self, act: Callable[[Ranks], Any], without: tuple[int, ...] = ()) -> dict[int, Any]:
        """What each rank returns or raises, by rank."""
        acting = [ranks for ranks in self.ranks if ranks.rank not in without]
        outcomes = _together([lambda ranks=ranks: _outcome(ranks, act) for ranks in acting])
        return {ranks.rank: out for ranks, out in zip(acting, outcomes, strict=True)}

    def operations(self) -> list[int]:
        """How often each rank has asked the store."""
        return [quick.asked + waiter.asked for quick, waiter in self.counts]


def _together(calls: list[Callable[[], Any]]) -> list[Any]:
    tasks = [Task(call) for call in calls]
    for task in tasks:
        task.start("simulated rank", daemon=True)
    return [task.result(_PATIENCE_S) for task in tasks]


def _outcome(ranks: Ranks, act: Callable[[Ranks], Any]) -> Any:
    try:
        return act(ranks)
    except CheckpointingException as error:
        return error


@pytest.fixture(scope="module")
def world() -> Iterator[_World]:
    """Ranks that have begun, with a deadline of 3 s."""
    before = threading.stack_size(512 << 10)
    try:
        yield _World(_WORLD, 3.0)
    finally:
        threading.stack_size(before)


def test_a_decision_takes_few_operations_a_rank_and_its_verdict_is_the_same_on_all(
    world: _World,
) -> None:
    before = world.operations()

    for _ in range(3):
        outcomes = world.all_do(
            lambda ranks: ranks.decide("add up", lambda: ranks.rank, lambda all_: sum(all_))
        )
        assert set(outcomes.values()) == {sum(range(_WORLD))}

    taken = [after - b for b, after in zip(before, world.operations(), strict=True)]
    # A rank that is the last of its team, and the root, do more; together it is a few for each.
    assert sorted(taken)[_WORLD // 2] <= 3 * 7
    assert sum(taken) <= 3 * 12 * _WORLD


def test_an_error_on_one_rank_is_the_same_error_on_all_at_once(world: _World) -> None:
    def fail(ranks: Ranks) -> None:
        def work() -> None:
            if ranks.rank == 50:
                raise StorageError("/disk cannot be read")

        ranks.decide("look", work, lambda _: None)

    outcomes = world.all_do(fail)

    assert {type(error) for error in outcomes.values()} == {StorageError}
    assert {str(error) for error in outcomes.values()} == {
        "could not look: rank 50: /disk cannot be read"
    }


def test_an_error_of_the_judge_is_raised_on_all(world: _World) -> None:
    def refuse(_: list[Any]) -> None:
        raise StorageError("not so")

    outcomes = world.all_do(lambda ranks: ranks.decide("judge", lambda: 1, refuse))

    assert {str(error) for error in outcomes.values()} == {"not so"}


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("missing", [(17,), (0,), (3, 4, 71)], ids=["one", "root", "three"])
def test_ranks_that_do_not_come_are_named_in_time_and_told_when_they_come(
    world: _World, missing: tuple[int, ...]
) -> None:
    world.all_do(lambda ranks: ranks.barrier("meet before"))
    began = time.monotonic()

    outcomes = world.all_do(lambda ranks: ranks.gather("meet", ranks.rank), without=missing)

    assert time.monotonic() - began < 30.0
    (told,) = {str(error) for error in outcomes.values()}
    assert {type(error) for error in outcomes.values()} == {PeerLostError}
    named = ", ".join(f"rank {rank} (last seen: meet before)" for rank in missing)
    assert f"to meet, and {named} did not come" in told
    others = tuple(rank for rank in range(_WORLD) if rank not in missing)
    late = world.all_do(lambda ranks: ranks.gather("meet", ranks.rank), without=others)
    for rank in missing:
        assert f"rank {rank} came too late to meet" in str(late[rank])
        assert ("had not come either" in str(late[rank])) == (len(missing) > 1)
    again = world.all_do(lambda ranks: ranks.gather("meet again", ranks.rank))
    assert again == {rank: list(range(_WORLD)) for rank in range(_WORLD)}


@pytest.mark.fault("interrupted")
def test_a_rank_that_stops_waiting_returns_at_once_and_the_others_hear_of_it(
    world: _World,
) -> None:
    waiting = [
        Task(lambda r=ranks: _outcome(r, lambda rs: rs.barrier("wait")))
        for ranks in world.ranks[1:3]
    ]
    for task in waiting:
        task.start("waits", daemon=True)
    time.sleep(0.3)

    began = time.monotonic()
    world.ranks[1].stop_waiting()
    stopped = waiting[0].result(_PATIENCE_S)

    assert time.monotonic() - began < 2.0
    assert isinstance(stopped, PeerLostError)
    assert isinstance(waiting[1].result(_PATIENCE_S), PeerLostError)
    world.ranks[1].wait_again()
    rest = world.all_do(lambda ranks: ranks.barrier("wait"), without=(1, 2))
    assert {type(error) for error in rest.values()} == {PeerLostError}
    world.all_do(lambda ranks: ranks.barrier("go on"))


def test_values_of_many_mib_come_whole(world: _World) -> None:
    text = ["x" * 1000] * 4500

    outcomes = world.all_do(
        lambda ranks: ranks.gather("tell much", text if ranks.rank == 70 else None)
    )

    assert all(outcome == [None] * 70 + [text, None] for outcome in outcomes.values())
