"""Moves the bytes of images between ranks, in chunks, with a deadline.

Host memory travels over gloo, device memory over NCCL. A transport knows neither shards nor plans:
it is told how many bytes go to and come from which rank. The other ranks must be told the matching
things; sizes are agreed beforehand.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from localckpt.coordination import _default_store
from localckpt.errors import MismatchError, PeerLostError
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.ledger import Ledger, Message, PeerFailed, first_line
from localckpt.state_dict.source import PIECE_NBYTES, MemorySource, ShardSource

__all__ = ["DeviceTransport", "HostTransport", "Transport", "choose_transport"]

CHUNK_NBYTES = 32 << 20
# One chunk travels while the next is read; more in flight make gloo no faster.
_CHUNKS_IN_FLIGHT = 2
_POLL_S = 5e-5


class Transport(Protocol):
    """Sends and receives images at once."""

    broken: bool
    """Whether an exchange failed: the connections are closed, and a new transport is needed."""

    def exchange(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        receives: Sequence[tuple[int, memoryview]],
    ) -> None:
        """Send images to ranks of the job, and receive others into writable memory.

        Ranks call it together. Several images between the same two ranks are listed in the same
        order by both. When it raises, nothing is read from or written to the memory any more.

        Raises:
            PeerLostError: A peer did not send or take all its bytes in time, or its connection
                broke. It names the peer and how far it came.
            CheckpointingException: A source failed; the peers see this rank as lost.
        """
        ...

    def close(self) -> None:
        """Give up the connections that this transport opened itself."""
        ...


class HostTransport:
    """Images from host memory or files, over gloo.

    Every chunk that is to come is asked for at the start, so a peer can send at any time; a source
    that is slow to read holds up nobody but those it is sent to.

    A source whose views stay valid after the next ``read`` says so by an attribute ``views_last``
    that is true; it is sent from where it lies. Others are copied once.

    Args:
        group: The ranks that take part; it must support host memory.
        timeout_s: Deadline of a whole exchange, in seconds.
        chunk_nbytes: Largest single message; the same on all ranks.
    """

    def __init__(
        self,
        group: GroupWrapper | dist.ProcessGroup | _OwnGloo | None = None,
        timeout_s: float = 300.0,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        members = group if isinstance(group, _OwnGloo) else GroupWrapper.wrap(group)
        self._connections: Any = members.group
        self._ranks = list(members.ranks)
        self._rank = members.my_global_rank
        self._chunk_nbytes = chunk_nbytes
        self.timeout_s = timeout_s
        self.broken = False

    @classmethod
    def connect(
        cls, name: str, ranks: Sequence[int], rank: int, timeout_s: float = 300.0
    ) -> HostTransport:
        """A transport with connections of its own, so that its failure touches no other group.

        Only the ranks that take part call it, together. It works beside any default group.

        Args:
            name: Has not been used before in this job.
            ranks: The ranks of the job that take part, in the same order everywhere.
            rank: This rank of the job.

        Raises:
            PeerLostError: Some rank did not come.
        """
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"localckpt/transport/{name}", _default_store()
        )
        try:
            gloo = dist.ProcessGroupGloo(
                store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {rank} could not connect to ranks {list(ranks)} within {timeout_s:g} s "
                f"({first_line(error)}). Shards kept on this node are untouched; restart the job "
                f"if one of these ranks has died."
            ) from error
        return cls(_OwnGloo(gloo, tuple(ranks), rank), timeout_s)

    def exchange(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        receives: Sequence[tuple[int, memoryview]],
    ) -> None:
        if self.broken:
            raise PeerLostError(
                f"rank {self._rank} cannot exchange shards: these connections broke before"
            )
        ledger = Ledger(self._rank, self.timeout_s)
        incoming: deque[Message] = deque()
        outgoing: deque[Message] = deque()
        try:
            for peer, number, view in _numbered(receives):
                ledger.expect(peer, received=len(view))
                for start, stop in _chunks(len(view), self._chunk_nbytes):
                    chunk = torch.frombuffer(view[start:stop], dtype=torch.uint8)
                    with ledger.blaming(peer):
                        work = self._connections.recv([chunk], self._place(peer), number)
                    incoming.append(Message(work, peer, chunk, received=True))
            for peer, source in sends:
                ledger.expect(peer, sent=source.nbytes)
            for peer, number, chunk in self._read_ahead(sends, outgoing, ledger):
                with ledger.blaming(peer):
                    work = self._connections.send([chunk], self._place(peer), number)
                outgoing.append(Message(work, peer, chunk, received=False))
            for queue in (outgoing, incoming):
                while queue:
                    ledger.settle(queue.popleft())
        except BaseException as error:
            self._disconnect()
            for message in (*incoming, *outgoing):
                ledger.settle_if_done(message)
            if isinstance(error, PeerFailed):
                raise ledger.explain(error) from error.__cause__
            raise

    def close(self) -> None:
        # Connections of our own end with the last reference; a caller's group is the caller's.
        self._connections = None
        self.broken = True

    def _read_ahead(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        outgoing: deque[Message],
        ledger: Ledger,
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Chunks in the order of sending, each read while the one before it travels."""
        bounces: list[memoryview] = []
        count = 0
        for peer, number, source in _numbered(sends):
            lasting = isinstance(source, MemorySource) or getattr(source, "views_last", False)
            for start, stop in _chunks(source.nbytes, self._chunk_nbytes):
                if len(outgoing) == _CHUNKS_IN_FLIGHT:
                    ledger.settle(outgoing.popleft())
                view = source.read(start, stop) if lasting else None
                if view is None or view.readonly:
                    if not bounces:
                        bounces = [
                            memoryview(bytearray(min(self._chunk_nbytes, _largest(sends))))
                            for _ in range(_CHUNKS_IN_FLIGHT)
                        ]
                    view = bounces[count % _CHUNKS_IN_FLIGHT][: stop - start]
                    # In pieces, so that they are still in the processor's cache when copied.
                    for at, end in _chunks(stop - start, PIECE_NBYTES):
                        view[at:end] = source.read(start + at, start + end)
                count += 1
                yield peer, number, torch.frombuffer(view, dtype=torch.uint8)

    def _disconnect(self) -> None:
        """Close all connections, so that peers stop waiting and late bytes go nowhere."""
        self.broken = True
        for peer in self._ranks:
            # A wait that runs out is gloo's one way to close every connection of a group; on a
            # connection that is closed already, there is no wait.
            with contextlib.suppress(RuntimeError):
                if peer != self._rank:
                    never = torch.empty(1, dtype=torch.uint8)
                    work = self._connections.recv([never], self._place(peer), _UNUSED_TAG)
                    work.wait(timedelta(milliseconds=1))

    def _place(self, peer: int) -> int:
        if peer not in self._ranks:
            raise MismatchError(f"rank {peer} is not among the ranks {self._ranks} that exchange")
        return self._ranks.index(peer)


class DeviceTransport:
    """Images from device memory, over NCCL, through buckets on the device.

    Each image has two buckets on the device on either side: while one travels, the other is filled
    or copied to host memory. A source that has ``fill(bucket, start, stop)`` packs its bytes on the
    device; of others the host bytes are copied up. Works with a CPU device over gloo, too.

    Args:
        group: The ranks that take part; it must support the device.
        device: Where the buckets are; the process's current device, if it is a GPU.
        timeout_s: Deadline of a whole exchange, in seconds.
        bucket_nbytes: The same on all ranks.
        owns_group: Whether the group may be aborted when an exchange fails. If not, operations that
            never end stay in the group, as after any lost peer.
    """

    def __init__(
        self,
        group: GroupWrapper | dist.ProcessGroup | None,
        device: torch.device | str,
        timeout_s: float = 300.0,
        *,
        bucket_nbytes: int = CHUNK_NBYTES,
        owns_group: bool = False,
    ) -> None:
        self._group = GroupWrapper.wrap(group)
        self._device = torch.device(device)
        self._bucket_nbytes = bucket_nbytes
        self._owns_group = owns_group
        self._connected = self._device.type == "cpu"
        self._abandoned: Any = None
        self.timeout_s = timeout_s
        self.broken = False

    def exchange(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        receives: Sequence[tuple[int, memoryview]],
    ) -> None:
        if self.broken:
            raise PeerLostError(
                f"rank {self._group.my_global_rank} cannot exchange shards: this transport broke "
                f"before"
            )
        ledger = Ledger(self._group.my_global_rank, self.timeout_s)
        for peer, source in sends:
            ledger.expect(peer, sent=source.nbytes)
        for peer, view in receives:
            ledger.expect(peer, received=len(view))
        outgoing, incoming = _Buckets(), _Buckets()
        stream = None
        if self._device.type != "cpu":
            accelerator = torch.get_device_module(self._device)
            stream = accelerator.Stream(self._device)
            stream.wait_stream(accelerator.current_stream(self._device))
        try:
            with torch.get_device_module(self._device).stream(stream):
                self._connect(ledger)
                self._run(sends, receives, outgoing, incoming, ledger)
            if stream is not None:
                stream.synchronize()
        except BaseException as error:
            self.broken = True
            # What is still under way writes into the buckets: they must not be used again.
            self._abandoned = (outgoing, incoming)
            # Early versions of torch have none; their groups end with the process.
            abort = getattr(self._group.group, "abort", None)
            if self._owns_group and abort is not None:
                abort()
            if stream is not None:
                stream.synchronize()
            if isinstance(error, PeerFailed):
                raise ledger.explain(error) from error.__cause__
            raise

    def close(self) -> None:
        self.broken = True

    def _run(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        receives: Sequence[tuple[int, memoryview]],
        outgoing: _Buckets,
        incoming: _Buckets,
        ledger: Ledger,
    ) -> None:
        """Step k moves bucket k of every image, on all ranks: no order of waits can form a ring."""
        sizes = [source.nbytes for _, source in sends] + [len(view) for _, view in receives]
        under_way: list[_Batch] = []
        for start in range(0, max(sizes, default=0), self._bucket_nbytes):
            batch = _Batch()
            ops: list[dist.P2POp] = []
            for place, (peer, number, view) in enumerate(_numbered(receives)):
                stop = min(start + self._bucket_nbytes, len(view))
                if start < stop:
                    bucket = self._bucket(incoming, start, place, stop - start)
                    ops.append(self._op(dist.irecv, bucket, peer, number))
                    batch.arrivals.append((peer, view[start:stop], bucket))
            for place, (peer, number, source) in enumerate(_numbered(sends)):
                stop = min(start + self._bucket_nbytes, source.nbytes)
                if start < stop:
                    bucket = self._bucket(outgoing, start, place, stop - start)
                    _load(source, bucket, start, stop)
                    ops.append(self._op(dist.isend, bucket, peer, number))
                    batch.departures.append((peer, stop - start))
            if ops:
                with ledger.blaming(*batch.peers):
                    batch.works = dist.batch_isend_irecv(ops)
                under_way.append(batch)
            if len(under_way) > 1:
                self._finish(under_way.pop(0), ledger)
        for batch in under_way:
            self._finish(batch, ledger)

    def _finish(self, batch: _Batch, ledger: Ledger) -> None:
        self._wait(batch.works, batch.peers, ledger)
        for peer, place, bucket in batch.arrivals:
            torch.frombuffer(place, dtype=torch.uint8).copy_(bucket, non_blocking=True)
            ledger.count(peer, received=len(place))
        for peer, nbytes in batch.departures:
            ledger.count(peer, sent=nbytes)

    def _wait(self, works: Iterable[dist.Work], peers: Sequence[int], ledger: Ledger) -> None:
        for work in works:
            with ledger.blaming(*peers):
                if self._device.type == "cpu":
                    work.wait(ledger.left())
                    continue
                # NCCL's own wait only holds up the stream, so the deadline is kept by asking.
                while not work.is_completed():
                    if ledger.is_over():
                        raise RuntimeError("the operation did not end")
                    time.sleep(_POLL_S)
                work.wait()

    def _connect(self, ledger: Ledger) -> None:
        """NCCL connects a group at its first operation, in which all members must take part."""
        if self._connected:
            return
        ranks = self._group.ranks
        with ledger.blaming(*(rank for rank in ranks if rank != self._group.my_global_rank)):
            flag = torch.zeros(1, device=self._device)
            work = dist.all_reduce(flag, group=self._group.group, async_op=True)
        self._wait([cast(dist.Work, work)], ranks, ledger)
        self._connected = True

    def _bucket(self, buckets: _Buckets, start: int, place: int, nbytes: int) -> torch.Tensor:
        key = (start // self._bucket_nbytes % 2, place)
        if key not in buckets:
            buckets[key] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return buckets[key][:nbytes]

    def _op(self, kind: Any, bucket: torch.Tensor, peer: int, number: int) -> dist.P2POp:
        return dist.P2POp(kind, bucket, peer, self._group.group, number)


def choose_transport(
    group: GroupWrapper | dist.ProcessGroup | None,
    tensors_on_gpu: bool,
    timeout_s: float = 300.0,
    *,
    owns_group: bool = False,
) -> Transport:
    """The transport that moves the bytes from where they are. Arguments as for the transports.

    Raises:
        MismatchError: The group can send neither host nor CUDA memory.
    """
    wrapped = GroupWrapper.wrap(group)
    if wrapped.supports("cuda") and (tensors_on_gpu or not wrapped.supports("cpu")):
        device = torch.device("cuda", torch.cuda.current_device())
        return DeviceTransport(wrapped, device, timeout_s, owns_group=owns_group)
    if wrapped.supports("cpu"):
        return HostTransport(wrapped, timeout_s)
    raise MismatchError(
        f"the group's backend {wrapped.backend!r} sends neither host nor CUDA memory; "
        f"make the group with gloo or NCCL"
    )


# As many chunk numbers as torch allows are below it; images between two ranks are far fewer.
_UNUSED_TAG = 2**31 - 1

_Buckets = dict[tuple[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _OwnGloo:
    """Connections that no torch.distributed function knows of; what GroupWrapper says of others."""

    group: Any
    ranks: tuple[int, ...]
    my_global_rank: int


class _Batch:
    """The operations of one step."""

    def __init__(self) -> None:
        self.works: list[dist.Work] = []
        self.arrivals: list[tuple[int, memoryview, torch.Tensor]] = []
        self.departures: list[tuple[int, int]] = []

    @property
    def peers(self) -> list[int]:
        return sorted({p for p, _, _ in self.arrivals} | {p for p, _ in self.departures})


def _numbered(items: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, int, Any]]:
    """``(peer, number, item)``: the first image between two ranks is 0, the next 1."""
    seen: dict[int, int] = {}
    for peer, item in items:
        number = seen.get(peer, 0)
        seen[peer] = number + 1
        yield peer, number, item


def _chunks(nbytes: int, chunk_nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, chunk_nbytes):
        yield start, min(start + chunk_nbytes, nbytes)


def _largest(sends: Sequence[tuple[int, ShardSource]]) -> int:
    return max(source.nbytes for _, source in sends)


def _load(source: ShardSource, bucket: torch.Tensor, start: int, stop: int) -> None:
    fill = getattr(source, "fill", None)
    if fill is not None:
        fill(bucket, start, stop)
        return
    view = source.read(start, stop)
    if view.readonly:
        view = memoryview(bytearray(view))
    # Blocks until the bytes are read: the view is valid until the next call only.
    bucket.copy_(torch.frombuffer(view, dtype=torch.uint8))
