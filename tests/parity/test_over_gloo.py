"""Parity is encoded and lost images are rebuilt by real ranks, or it is said who was lost."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

from localckpt.errors import PeerLostError
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.parity import chains as chaining
from localckpt.parity.encode import encode
from localckpt.parity.pipeline import Pipeline
from localckpt.parity.planning import Left, plan_rebuild
from localckpt.parity.stripes import Kind, ParityLayout
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.transport import connect
from localckpt.state_dict.source import MemorySource, ShardSource
from tests.parity.groups import Kept, group
from tests.ranks import announce, await_announced, run_ranks, start_ranks
from tests.replication.sources import ScratchSource, SignallingSource
from tests.simulated import gather

_MESSAGE, _LARGEST = 300_000, chaining._LARGEST_MESSAGE_NBYTES


def _pipeline(rank: int, world_size: int) -> Pipeline:
    return Pipeline(connect("parity", range(world_size), rank, 20.0))


def _source(number: int, content: Any) -> ShardSource:
    """Memory that is sent from where it lies, and sources that read into one buffer."""
    if number % 2:
        return ScratchSource(bytes(content))
    return MemorySource(memoryview(bytearray(content)))


def _encode(rank: int, layout: ParityLayout, pipeline: Pipeline, kept: dict[Kept, Any]) -> None:
    parity = memoryview(bytearray(b"\xee" * layout.parity_nbytes))
    source = _source(rank, kept[Kind.IMAGE, rank])

    encode(layout, pipeline, source, parity, 30.0)

    assert np.array_equal(np.asarray(parity), kept[Kind.PARITY, rank])


def _rebuild(
    rank: int,
    layout: ParityLayout,
    pipeline: Pipeline,
    kept: dict[Kept, Any],
    left: Left,
    wanted: dict[int, int],
) -> None:
    at = {Kind.IMAGE: left.images, Kind.PARITY: left.parities}
    sources = {
        (kind, member): _source(rank + member, content)
        for (kind, member), content in kept.items()
        if at[kind].get(member) == rank
    }
    mine = [(Kind.IMAGE, member) for member, target in wanted.items() if target == rank]
    sinks = {place: memoryview(bytearray(len(kept[place]))) for place in mine}
    chains = plan_rebuild(layout, left, wanted)
    pipeline.run(chains, sources, sinks, 30.0)

    for kind, member in mine:
        assert np.array_equal(np.asarray(sinks[kind, member]), kept[kind, member])


def _encode_and_lose(rank: int, world_size: int, sizes: tuple[int, ...], m: int) -> None:
    layout = ParityLayout(sizes, m)
    kept = group(layout)
    pipeline = _pipeline(rank, world_size)
    members = range(world_size)
    for message in (_LARGEST, _MESSAGE):
        chaining._LARGEST_MESSAGE_NBYTES = message
        _encode(rank, layout, pipeline, kept)
    for lost in ([0], [world_size - 1], [1, 2][:m], [0, world_size - 1][:m]):
        there = {member: member for member in members if member not in lost}
        wanted = {member: member for member in lost}
        _rebuild(rank, layout, pipeline, kept, Left(there, there), wanted)
        # Everything for a rank that is left, whose own part is added last.
        keeper = next(iter(there))
        wanted = dict.fromkeys(lost, keeper)
        _rebuild(rank, layout, pipeline, kept, Left(there, there), wanted)


@pytest.mark.parametrize(
    ("sizes", "m"),
    [
        ((3_200_001, 2_000_003, 999), 1),
        ((0, 0, 0), 1),
        ((2_500_000, 7, 2_500_001, BLOCK_NBYTES), 2),
    ],
)
def test_ranks_encode_and_bring_back_what_is_lost(sizes: tuple[int, ...], m: int) -> None:
    run_ranks(_encode_and_lose, len(sizes), sizes, m)


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
    chaining._LARGEST_MESSAGE_NBYTES = _MESSAGE
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
