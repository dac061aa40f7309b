"""Bytes arrive as they were sent, and a peer that is gone ends in an error in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt.errors import MismatchError, PeerLostError
from localckpt.ranks import deadline
from localckpt.replication.connections import HostConnections
from localckpt.replication.device_transport import DeviceTransport
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.transport import connect
from localckpt.state_dict.source import MemorySource, ShardSource
from tests.ranks import announce, await_announced, logged, on_ranks, run_ranks, start_ranks
from tests.replication.sources import ScratchSource, SignallingSource, image

_CHUNK = 1000
_TIMEOUT_S = 20.0
_numbers = count()


def _transport(kind: str) -> DeviceTransport | HostTransport:
    if kind == "device":
        return DeviceTransport(None, "cpu", bucket_nbytes=_CHUNK)
    return _host_transport(_CHUNK)


def _host_transport(chunk_nbytes: int) -> HostTransport:
    """Connect all ranks; each calls it as often."""
    ranks, name = range(dist.get_world_size()), f"transport {next(_numbers)}"
    connections = HostConnections(name, ranks, dist.get_rank(), _TIMEOUT_S)
    return HostTransport(connections, chunk_nbytes=chunk_nbytes)


class _PackingSource(ScratchSource):
    """Puts its bytes into a bucket by itself, as a state in device memory does."""

    def read(self, start: int, stop: int) -> memoryview:
        raise AssertionError("should have been asked to fill the bucket")

    def fill(self, bucket: torch.Tensor, start: int, stop: int) -> None:
        part = bytearray(self.content[start:stop])
        bucket.copy_(torch.frombuffer(part, dtype=torch.uint8))


def _source(kind: str, number: int, content: bytes) -> ShardSource:
    variants: list[ShardSource] = [
        MemorySource(memoryview(bytearray(content))),
        MemorySource(memoryview(content)),
        ScratchSource(content, delay_s=0.001 * number),
    ]
    if kind == "device":
        variants.append(_PackingSource(content))
    return variants[number % len(variants)]


def _nbytes(sender: int, receiver: int, number: int) -> int:
    """Sizes around the borders of chunks, nothing at all included; different for every transfer."""
    borders = [0, 1, _CHUNK - 1, _CHUNK, _CHUNK + 1, 2 * _CHUNK, 5 * _CHUNK + 7]
    return borders[(sender + 2 * receiver + 3 * number) % len(borders)]


@pytest.mark.parametrize(("kind", "world_size", "images"), [("host", 4, 2), ("device", 3, 7)])
@on_ranks()
def test_every_image_arrives_where_it_belongs(
    rank: int, world_size: int, kind: str, images: int
) -> None:
    transport = _transport(kind)
    peers = [peer for peer in range(world_size) if peer != rank]
    for turn in range(3):
        sends = []
        receives = []
        expected = []
        for number in range(images):
            for peer in peers:
                content = image((turn, rank, peer, number), _nbytes(rank, peer, number))
                sends.append((peer, _source(kind, number + rank, content)))
                coming = image((turn, peer, rank, number), _nbytes(peer, rank, number))
                receives.append((peer, memoryview(bytearray(len(coming)))))
                expected.append(coming)

        transport.exchange(sends, receives, _TIMEOUT_S)

        assert [bytes(view) for _, view in receives] == expected
    assert not transport.broken
    # Once it was aborted, it sends nothing more.
    dist.barrier()
    transport.abort()
    assert transport.broken
    with pytest.raises(PeerLostError, match="broke before"):
        transport.exchange([(peers[0], MemorySource(memoryview(b"more")))], [], _TIMEOUT_S)
    transport.close()


@on_ranks(5, expect_dead=[4])
def test_ranks_connect_to_those_they_send_to_or_receive_from_and_to_no_others(
    rank: int, world_size: int
) -> None:
    if rank == world_size - 1:
        # It has no part, and nobody waits for it.
        os.kill(os.getpid(), signal.SIGKILL)
    last = world_size - 2
    before, behind = ({rank - 1} - {-1}, {rank + 1} - {last + 1})
    transport = connect("chain", before | behind, rank, 20.0, in_pairs=True)
    mine, coming = image(rank, 3 * _CHUNK), memoryview(bytearray(3 * _CHUNK))

    transport.exchange(
        [(peer, MemorySource(memoryview(mine))) for peer in behind],
        [(peer, coming) for peer in before],
        _TIMEOUT_S,
    )

    assert all(bytes(coming) == image(peer, 3 * _CHUNK) for peer in before)
    with pytest.raises(MismatchError, match="not among the ranks"):
        transport.exchange(
            [((rank + 2) % world_size, MemorySource(memoryview(mine)))], [], _TIMEOUT_S
        )
    transport.close()


def _lose_a_peer(rank: int, world_size: int, kind: str, sig: signal.Signals) -> Any:
    # Long waits are those of 0.3 s.
    deadline._SILENT_S = 0.3
    transport, told = _transport(kind), logged()
    timeout_s = 2.0 if sig == signal.SIGSTOP else _TIMEOUT_S
    content = image(rank, 50 * _CHUNK)
    source: ShardSource = ScratchSource(content)
    if rank == 1:
        source = SignallingSource(content, 20 * _CHUNK, sig)
    peers = [peer for peer in range(world_size) if peer != rank]
    place = bytearray(len(content) * len(peers))
    views = [memoryview(place)[i * len(content) :][: len(content)] for i in range(len(peers))]
    started = time.monotonic()
    sends = [(peer, source) for peer in peers]
    with pytest.raises(PeerLostError) as raised:
        transport.exchange(sends, list(zip(peers, views, strict=True)), timeout_s)
    took = time.monotonic() - started

    assert transport.broken
    with pytest.raises(PeerLostError, match="before"):
        transport.exchange([], [], _TIMEOUT_S)
    if rank != 1 and sig == signal.SIGSTOP:
        then = bytes(place)
        announce("gave up")
        await_announced("resumed")
        time.sleep(0.2)
        assert bytes(place) == then, "a late peer wrote into memory that was given back"
    transport.close()
    if rank == 0 and sig == signal.SIGSTOP:
        assert any("s to exchange shards, for rank 1 (" in line for line in told), told
    return str(raised.value), took


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize(("kind", "world_size"), [("host", 3), ("device", 2)])
def test_a_peer_that_dies_is_named_with_how_far_it_came(kind: str, world_size: int) -> None:
    results = run_ranks(_lose_a_peer, world_size, kind, signal.SIGKILL, expect_dead=[1])

    survivors = {rank: result for rank, result in enumerate(results) if rank != 1}
    # One that sees it first cuts its connections, and another may see that first.
    assert any(
        f"rank {rank} was exchanging shards, and rank 1 (" in told
        for rank, (told, _) in survivors.items()
    )
    for told, took in survivors.values():
        assert " of 50,000 bytes came from it" in told
        assert "restart the job" in told
        assert took < 15.0, "a broken connection is seen before the deadline"


@pytest.mark.fault("silent-peer")
def test_a_peer_that_stops_is_named_at_the_deadline_and_writes_nothing_later() -> None:
    with start_ranks(_lose_a_peer, 2, "host", signal.SIGSTOP) as group:
        group.await_announced("gave up")
        group.kill(1, signal.SIGCONT)
        group.announce("resumed")
        (told, took), (peer_told, _) = group.join()

    assert "rank 1 (" in told
    assert "did not finish within 2 s" in told
    assert 1.5 < took < 10.0
    assert "rank 0 (" in peer_told


@pytest.mark.fault("silent-peer")
@on_ranks(3)
def test_a_peer_that_never_connects_or_gives_up_ends_in_an_error(rank: int) -> None:
    deadline._SILENT_S = 0.3
    lines = logged()
    dist.barrier()
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"could not connect to ranks \[0, 1\] within 1 s"):
            HostConnections("alone", [0, 1], rank, 1.0)
        assert any("s to connect, for rank 1" in line for line in lines), lines
    dist.barrier()
    if rank == 2:
        return
    began = time.monotonic()

    def is_given_up() -> bool:
        # Not at once: the other rank may know its address by then.
        return rank == 1 and time.monotonic() > began + 0.5

    with pytest.raises(PeerLostError) as raised:
        HostConnections("given up", [0, 1, 2], rank, 20.0, is_given_up=is_given_up)
    told = str(raised.value)
    assert f"rank {rank} could not connect to ranks [0, 1, 2]" in told
    assert rank == 1 or "rank 1 has given up" in told


class _LosingConnections(HostConnections):
    """Connections that lose what this rank answers, and whose waits for it last."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return _Lost() if tensor.numel() == 0 else super().send(tensor, peer, tag)


class _Lost:
    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())


@on_ranks(2)
def test_an_exchange_that_is_aborted_waits_for_no_answer_that_was_lost(rank: int) -> None:
    connections = (HostConnections, _LosingConnections)[rank]("lost", [0, 1], rank, 60.0)
    transport = HostTransport(connections)
    room = memoryview(bytearray(_CHUNK))
    sends = [(1, MemorySource(memoryview(b"\x01" * _CHUNK)))] if rank == 0 else []

    def abort() -> None:
        deadline = time.monotonic() + 30.0
        while room[-1] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        transport.abort()

    aborting = threading.Thread(target=abort)
    if rank == 1:
        aborting.start()
    began = time.monotonic()
    with pytest.raises(PeerLostError):
        transport.exchange(sends, [] if rank == 0 else [(0, room)], 60.0)
    assert time.monotonic() - began < 20.0
    if rank == 1:
        aborting.join(20.0)
    transport.close()
