"""Whatever the chains are, no order of waiting locks the ranks up, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.parity import chains as chaining
from localckpt.parity.chains import (
    BUFFERS_NBYTES,
    Chain,
    ChainSchedule,
    ChainStep,
    Hop,
    schedule,
    tasks_of,
)
from localckpt.parity.encode import encoding_chains
from localckpt.parity.stripes import Kind, ParityLayout, Strip

_RANKS = 5
_MESSAGE = 10


@st.composite
def _chains(draw: st.DrawFn) -> list[Chain]:
    found = []
    for _ in range(draw(st.integers(0, 90))):
        ranks = draw(st.permutations(range(_RANKS)))[: draw(st.integers(1, _RANKS))]
        place = Strip(Kind.IMAGE, 0, 0, draw(st.integers(0, 60)))
        found.append(Chain(tuple(Hop(rank, ()) for rank in ranks), place))
    return found


def _schedule(chains: Sequence[Chain], message_nbytes: int) -> ChainSchedule:
    with mock.patch.object(chaining, "_LARGEST_MESSAGE_NBYTES", message_nbytes):
        return schedule(chains)


def _run(chains: Sequence[Chain], when: ChainSchedule) -> dict[int, list[ChainStep]]:
    """Let ranks go on while any can: with no message asked for before its task is the next."""
    todo = {rank: list(tasks_of(rank, chains, when)) for rank in range(_RANKS)}
    done: dict[int, list[ChainStep]] = {rank: [] for rank in range(_RANKS)}
    handled: set[tuple[int, int, int]] = set()
    unanswered: dict[int, list[tuple[int, tuple[int, int, int]]]] = {r: [] for r in range(_RANKS)}
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for rank, tasks in todo.items():
            if not tasks:
                continue
            task = tasks[0]
            waiting = [sent for sent in unanswered[rank] if sent[1] not in handled]
            unanswered[rank] = waiting
            is_last = task.hop == len(chains[task.chain].hops) - 1
            has_come = not task.hop or (task.chain, task.hop - 1, task.start) in handled
            has_room = is_last or len(waiting) < when.buffers
            if not has_come or not has_room or any(step + 1 < task.step for step, _ in waiting):
                continue
            is_stuck = False
            done[rank].append(tasks.pop(0))
            handled.add((task.chain, task.hop, task.start))
            if not is_last:
                unanswered[rank].append((task.step, (task.chain, task.hop + 1, task.start)))
    assert not any(todo.values()), "the ranks wait for each other"
    return done


@settings(max_examples=60, deadline=None)
@given(_chains())
def test_no_chains_lock_up_ranks_or_outgrow_the_room(
    chains: list[Chain],
) -> None:
    done = _run(chains, _schedule(chains, _MESSAGE))

    when = schedule(chains)
    assert when.buffers * when.message_nbytes <= BUFFERS_NBYTES
    for number, chain in enumerate(chains):
        for hop, by in enumerate(chain.hops):
            tasks = [t for t in done[by.rank] if (t.chain, t.hop) == (number, hop)]
            handled = [place for task in tasks for place in range(task.start, task.stop)]
            assert handled == list(range(chain.nbytes))
            assert all(task.stop - task.start <= _MESSAGE for task in tasks)


@pytest.mark.parametrize(("members", "m"), [(4, 1), (39, 2)])
def test_memory_for_messages_does_not_grow_with_images_or_members(members: int, m: int) -> None:
    layout = ParityLayout((1 << 40,) * members, m)

    when = schedule(encoding_chains(layout, range(members)))

    assert when.buffers * when.message_nbytes <= BUFFERS_NBYTES
