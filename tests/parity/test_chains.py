"""Whatever the chains are, no order of waiting locks the ranks up, and nothing is done twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.errors import PeerLostError
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
from localckpt.parity.encode import encode, encoding_chains
from localckpt.parity.pipeline import Pipeline
from localckpt.parity.stripes import Kind, ParityLayout, Strip
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.transport import connect
from localckpt.state_dict.source import ShardSource
from tests.ranks import announce, await_announced, start_ranks
from tests.replication.sources import ScratchSource, SignallingSource
from tests.simulated import gather

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


def _pipeline(rank: int, world_size: int) -> Pipeline:
    return Pipeline(connect("parity", range(world_size), rank, 20.0))


def _encode_while_rank_1_stops(rank: int, world_size: int, timeout_s: float) -> tuple[str, float]:
    layout = ParityLayout((4_000_000,) * world_size, 1)
    content = bytes(layout.image_nbytes[rank])
    source: ShardSource = ScratchSource(content)
    if rank == 1:
        source = SignallingSource(content, 2_000_000, signal.SIGSTOP)
    pipeline = _pipeline(rank, world_size)
    parity = memoryview(bytearray(layout.parity_nbytes))
    ranks = Ranks("clique", timeout_s=60.0)
    gather(ranks, "begin", None)
    chaining._LARGEST_MESSAGE_NBYTES = 300_000
    started = time.monotonic()
    with Attempt() as encoding:
        encode(layout, pipeline, source, parity, timeout_s)
    with pytest.raises(PeerLostError) as raised:
        ranks.decide("encode parity", encoding, grace_s=timeout_s)
    took = time.monotonic() - started
    with pytest.raises(PeerLostError, match="broke before"):
        encode(layout, pipeline, source, parity, timeout_s)
    if rank != 1:
        then = bytes(parity)
        announce(f"gave up {rank}")
        await_announced("resumed")
        assert bytes(parity) == then, "a late peer wrote into memory that was given back"
    return str(raised.value), took


@pytest.mark.fault("silent-peer")
def test_a_member_that_stops_is_named_by_every_other_after_the_deadline() -> None:
    with start_ranks(_encode_while_rank_1_stops, 4, 2.0) as ranks:
        for rank in (0, 2, 3):
            ranks.await_announced(f"gave up {rank}")
        ranks.kill(1, signal.SIGCONT)
        ranks.announce("resumed")
        results = ranks.join()

    for rank in (0, 2, 3):
        told, took = results[rank]
        assert "and rank 1 (last seen: begin) did not come" in told
        assert 1.5 < took < 20.0
