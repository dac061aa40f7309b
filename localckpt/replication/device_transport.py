"""Images from device memory, over NCCL; with a CPU device and gloo it does the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from localckpt.errors import PeerLostError
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.progress import (
    CHUNK_NBYTES,
    PeerFailed,
    Progress,
    Receives,
    Sends,
    numbered,
)
from localckpt.state_dict.source import ShardSource
from localckpt.waiting import wait_until

_POLL_S = 5e-5


class DeviceTransport:
    """Images from device memory, over NCCL, or a CPU device over gloo, through two buckets each.

    While one bucket is sent, the other is filled or copied to host memory. A source that has
    ``fill(bucket, start, stop)`` packs its bytes on the device; of others the host bytes are copied
    up. Unless it owns the group, operations that never end stay in it, as after any lost peer.
    """

    def __init__(
        self,
        group: GroupWrapper | dist.ProcessGroup | None,
        device: torch.device | str,
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
        self.broken = False

    def exchange(self, sends: Sends, receives: Receives, timeout_s: float) -> None:
        if self.broken:
            raise PeerLostError(
                f"rank {self._group.my_global_rank} cannot exchange shards: this transport broke "
                f"before"
            )
        progress = Progress(self._group.my_global_rank, timeout_s, sends, receives)
        outgoing, incoming = _Buckets(), _Buckets()
        stream = None
        if self._device.type != "cpu":
            accelerator = torch.get_device_module(self._device)
            stream = accelerator.Stream(self._device)
            stream.wait_stream(accelerator.current_stream(self._device))
        try:
            with progress.watched(), torch.get_device_module(self._device).stream(stream):
                self._connect(progress)
                self._run(sends, receives, outgoing, incoming, progress)
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
                raise progress.explain(error) from error.__cause__
            raise

    def abort(self) -> None:
        """End an exchange that is under way in another thread; without a GPU at its deadline."""
        self.broken = True

    close = abort

    def _run(
        self,
        sends: Sends,
        receives: Receives,
        outgoing: _Buckets,
        incoming: _Buckets,
        progress: Progress,
    ) -> None:
        """Step k moves bucket k of every image, on all ranks: no order of waits can form a ring."""
        sizes = [source.nbytes for _, source in sends] + [len(view) for _, view in receives]
        under_way: list[_Batch] = []
        for start in range(0, max(sizes, default=0), self._bucket_nbytes):
            batch = _Batch()
            ops: list[dist.P2POp] = []
            for place, (peer, number, view) in enumerate(numbered(receives)):
                assert isinstance(view, memoryview), "what is staged in pieces comes over the host"
                stop = min(start + self._bucket_nbytes, len(view))
                if start < stop:
                    bucket = self._bucket(incoming, start, place, stop - start)
                    ops.append(self._op(dist.irecv, bucket, peer, number))
                    batch.arrivals.append((peer, view[start:stop], bucket))
            for place, (peer, number, source) in enumerate(numbered(sends)):
                stop = min(start + self._bucket_nbytes, source.nbytes)
                if start < stop:
                    bucket = self._bucket(outgoing, start, place, stop - start)
                    _load(source, bucket, start, stop)
                    ops.append(self._op(dist.isend, bucket, peer, number))
                    batch.departures.append((peer, stop - start))
            if ops:
                with progress.blaming(*batch.peers):
                    batch.works = dist.batch_isend_irecv(ops)
                under_way.append(batch)
            if len(under_way) > 1:
                self._finish(under_way.pop(0), progress)
        for batch in under_way:
            self._finish(batch, progress)

    def _finish(self, batch: _Batch, progress: Progress) -> None:
        self._wait(batch.works, batch.peers, progress)
        for peer, place, bucket in batch.arrivals:
            torch.frombuffer(place, dtype=torch.uint8).copy_(bucket, non_blocking=True)
            progress.count(peer, received=len(place))
        for peer, nbytes in batch.departures:
            progress.count(peer, sent=nbytes)

    def _wait(self, works: Iterable[dist.Work], peers: Sequence[int], progress: Progress) -> None:
        for work in works:
            with progress.blaming(*peers):
                if self._device.type == "cpu":
                    work.wait(progress.left())
                else:
                    self._wait_on_device(work, progress)

    def _wait_on_device(self, work: dist.Work, progress: Progress) -> None:
        # NCCL's own wait only holds up the stream, so the deadline is kept by asking.
        wait_until(
            lambda: work.is_completed() or self.broken,
            progress.left().total_seconds(),
            shortest_s=_POLL_S,
            longest_s=_POLL_S,
        )
        if not work.is_completed():
            raise RuntimeError("the operation did not end")
        work.wait()

    def _connect(self, progress: Progress) -> None:
        """NCCL connects a group at its first operation, in which all members must take part."""
        if self._connected:
            return
        ranks = self._group.ranks
        with progress.blaming(*(rank for rank in ranks if rank != self._group.my_global_rank)):
            flag = torch.zeros(1, device=self._device)
            work = dist.all_reduce(flag, group=self._group.group, async_op=True)
        self._wait([cast(dist.Work, work)], ranks, progress)
        self._connected = True

    def _bucket(self, buckets: _Buckets, start: int, place: int, nbytes: int) -> torch.Tensor:
        key = (start // self._bucket_nbytes % 2, place)
        if key not in buckets:
            buckets[key] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return buckets[key][:nbytes]

    def _op(self, kind: Any, bucket: torch.Tensor, peer: int, number: int) -> dist.P2POp:
        return dist.P2POp(kind, bucket, peer, self._group.group, number)


_Buckets = dict[tuple[int, int], torch.Tensor]


class _Batch:
    def __init__(self) -> None:
        self.works: list[dist.Work] = []
        self.arrivals: list[tuple[int, memoryview, torch.Tensor]] = []
        self.departures: list[tuple[int, int]] = []

    @property
    def peers(self) -> list[int]:
        return sorted({p for p, _, _ in self.arrivals} | {p for p, _ in self.departures})


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
