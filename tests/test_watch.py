"""Ranks that agree on the ends of calls behind training: all act in the same poll, or none does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from localckpt.async_save.callers import PendingCall
from localckpt.errors import PeerLostError, StorageError
from localckpt.ranks.failure import Failure
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.watch import Watch, Watched
from tests.simulated import PATIENCE_S, World, many

_WORLD = 20
_CALLS = 12
_MOST_DISTURBED = 5


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with many(_WORLD, 0.5, waits_on_clients=True) as world:
        yield world


def _call(number: int, *, ends_after_s: float = 0.0, error: Exception | None = None) -> Watched:
    call = PendingCall("save")
    if ends_after_s:
        timer = threading.Timer(ends_after_s, call.end, [error])
        timer.daemon = True
        timer.start()
    else:
        call.end(error)
    return Watched(number, call.name, call)


def _train(ranks: Ranks, seed: int) -> list[tuple[int, int, Failure | None]]:
    """Poll now and then, and say in which poll this rank acted on which call, and how it ended."""
    watch = Watch(PATIENCE_S, ranks=ranks)
    # What the ranks have in common, and what each of them has alone.
    plan, own = random.Random(seed), random.Random(seed * 1000 + ranks.rank)
    acted: list[tuple[int, int, Failure | None]] = []
    step_s = own.choice([0.0, 0.001, 0.004])
    scheduled, poll = 0, 0
    while len(acted) < _CALLS:
        poll += 1
        for _ in range(plan.choice([0, 0, 1, 2])):
            if scheduled < _CALLS:
                fails = scheduled == 5 and ranks.rank == 3
                error = StorageError("no space") if fails else None
                watch._follow(_call(scheduled, ends_after_s=own.uniform(0.0, 0.05), error=error))
                scheduled += 1
        blocking = plan.random() < 0.05
        watch.poll(blocking)
        while len(acted) < scheduled:
            oldest = len(acted)
            if blocking:
                verdict = watch._await_verdict(oldest, time.monotonic())
            elif (found := watch._due_verdict(oldest)) is None:
                break
            else:
                verdict = found
            acted.append((poll, verdict.number, verdict.failure))
        time.sleep(own.uniform(0.0, step_s))
    return acted


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_act_on_each_call_in_the_same_poll_however_fast_they_poll(
    world: World, seed: int
) -> None:
    acted = world.all_do(lambda ranks: _train(ranks, seed))

    assert [acted[rank] for rank in range(_WORLD)] == [acted[0]] * _WORLD
    assert [number for _, number, _ in acted[0]] == list(range(_CALLS))
    failures = [failure for *_, failure in acted[0]]
    assert [failure is not None for failure in failures] == [n == 5 for n in range(_CALLS)]
    assert failures[5] is not None
    assert failures[5].kind == "StorageError"
    assert "call 5 (save) failed on rank 3: StorageError: no space" in failures[5].text


def test_a_poll_asks_the_store_nothing(world: World) -> None:
    over = [PendingCall("save") for _ in range(_WORLD)]
    watches = [Watch(PATIENCE_S, ranks=ranks) for ranks in world.ranks]
    for watch, call in zip(watches, over, strict=True):
        watch._follow(Watched(0, call.name, call))
    before = world.operations()

    for watch in watches:
        for _ in range(100):
            watch.poll(blocking=False)
            assert watch._due_verdict(0) is None

    assert world.operations() == before
    for call in over:
        call.end(None)
    world.all_do(lambda ranks: watches[ranks.rank]._await_verdict(0, time.monotonic()))


class _DiedError(Exception):
    """Ends the thread of a rank, as the end of its process does."""


class _Dying:
    """A connection of a rank that dies after some messages, over all of its connections."""

    def __init__(self, store: Any, left: list[int]) -> None:
        self.store = store
        self.left = left

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def asked(*args: Any) -> Any:
            self.left[0] -= 1
            if self.left[0] < 0:
                raise _DiedError
            return method(*args)

        return asked


# The root, and two others.
@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("dying", [0, 3, 16])
@pytest.mark.rows(1)
def test_a_rank_that_dies_at_any_message_is_named_by_all_others_or_has_had_its_say(
    dying: int, world: World, long_form: bool, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    # How long a rank is waited for that may be about to say what it has found.
    monkeypatch.setattr("localckpt.ranks.round.AFTER_FIRST_S", 0.3)
    part: Any = world.ranks[dying]._part
    store, clients = part._store, part._clients
    survived, messages, cases, disturbed = False, 0, 0, 0

    def agree(ranks: Ranks) -> Any:
        watch = Watch(ranks.timeout_s, ranks=ranks)
        watch._follow(_call(0))
        began = time.monotonic()
        if ranks.rank == dying:
            assert watch._thread is not None
            watch._thread.wait(PATIENCE_S)
            return None
        verdict = watch._await_verdict(0, began)
        return verdict.failure, time.monotonic() - began

    while not survived:
        left = [messages]
        part._store = _Dying(store, left)
        part._clients = [_Dying(client, left) for client in clients]
        outcomes = world.all_do(agree)
        survived = left[0] >= 0
        rounds = max(ranks.rounds for ranks in world.ranks)
        for ranks in world.ranks:
            ranks.rounds = ranks._place.forgotten = rounds
        others = [outcome for rank, outcome in outcomes.items() if rank != dying]
        errors = [outcome for outcome in others if isinstance(outcome, Exception)]
        failures = [failure for failure, _ in others] if not errors else []
        texts = {None if failure is None else failure.text for failure in failures}
        named = {text for text in texts if text is not None and f"rank {dying} (last seen" in text}
        is_named = not errors and texts - {None} == named
        if disturbed < _MOST_DISTURBED and not is_named:
            # Half a second was too short for another rank: the machine was busy with something
            # else. The same again.
            disturbed, survived = disturbed + 1, False
            continue
        assert is_named, (errors, texts)
        assert len(texts) == 1, texts
        assert max(took_s for _, took_s in others) < PATIENCE_S / 2
        assert not survived or texts == {None}
        cases, messages = cases + 1, messages + (1 if long_form else 2)
    part._store, part._clients = store, clients
    assert messages > 6
    record_property("cases", cases)


@pytest.mark.parametrize("when", ["it waits for others", "its call is not over", "not followed"])
def test_a_rank_that_leaves_ends_the_wait_of_all_others_at_once(when: str, world: World) -> None:
    rounds = max(ranks.rounds for ranks in world.ranks)
    for ranks in world.ranks:
        ranks.rounds = ranks._place.forgotten = rounds
    watches = [Watch(PATIENCE_S, ranks=ranks) for ranks in world.ranks]
    leaving = watches[7]
    work = PendingCall("save")
    call = Watched(0, work.name, work)
    if when == "it waits for others":
        work.end(None)
    if when == "not followed":
        leaving.add(call)
    else:
        leaving._follow(call)
    time.sleep(0.2)

    leaving.leave()
    began = time.monotonic()

    def agree(ranks: Ranks) -> Any:
        watches[ranks.rank]._follow(_call(0))
        return watches[ranks.rank]._await_verdict(0, began).failure

    outcomes = world.all_do(agree, without=(7,))
    assert time.monotonic() - began < 10.0
    (text,) = {failure.text for failure in outcomes.values()}
    assert "rank 7 has left" in text
    assert {failure.kind for failure in outcomes.values()} == {PeerLostError.__name__}
    work.end(None)
    world.ranks[7].wait_again()
