"""Keeps shards as images in a store of this node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    RestoreError,
    StorageError,
)
from localckpt.ids import Series, ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.managers.guard import Guard
from localckpt.managers.shelf import LoadOptions, Shelf, StagedShard
from localckpt.state_dict.base import TensorAwareStateDict
from localckpt.state_dict.copying import Copier
from localckpt.state_dict.identify import read_header, verify
from localckpt.state_dict.image import Capture, ImagePlanner, seal
from localckpt.state_dict.parity_image import ParityFrame, ParityRoom
from localckpt.state_dict.parity_of import ParityOf
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.side_streams import CopiesUnderWay, SideStreams
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.state_dict.targets import find_targets
from localckpt.storage.buffers import Buffer
from localckpt.storage.store import Store
from localckpt.storage.write import Digests, ShardWrite, write_shards
from localckpt.threads import SerialThread, Task, end_all

__all__ = ["StoreShelf"]

logger = logging.getLogger(__name__)


@dataclass
class _Begun:
    """A shard whose save is not settled, and the memory it is staged in."""

    identity: ShardIdentity
    buffer: Buffer
    lease: int
    nbytes: int


class StoreShelf(Shelf):
    """One rank's shards in a store; owns the store.

    Args:
        store: Where the images are kept.
        allowed: What a skeleton may name.
        timeout_s: How long a save may wait for a free buffer.
        staging_threads: How many threads copy tensors; ``None`` for as many as help.
        guard: Optimizers whose tensors change only when they step.
    """

    def __init__(
        self,
        store: Store,
        allowed: SafeGlobals,
        timeout_s: float,
        staging_threads: int | None = None,
        guard: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.store = store
        self.failure_domain = store.claim.token
        self.owner = store.claim.owner
        self.planner = ImagePlanner(allowed)
        self._allowed = allowed
        self._timeout_s = timeout_s
        self._copier = Copier(staging_threads)
        self._guard = Guard(guard, self._hold_back_training)
        self._sealer = SerialThread("localckpt-seal")
        self._streams = SideStreams(timeout_s)
        self._copies: list[CopiesUnderWay] = []
        self._sealings: dict[ShardIdentity, Task[None]] = {}
        # Other ranks' shards are taken in by other threads.
        self._lock = threading.Lock()
        self._begun: list[_Begun] = []
        # Shards that may have left something unfinished in the store.
        self._unsettled: set[ShardIdentity] = set()
        self._arrival: Buffer | None = None
        self.image_nbytes: dict[Series, int] = {}
        """Size of the last image of each series that this rank keeps."""

    def inventory(self) -> list[ShardRecord]:
        return self.store.scan()

    def bad_copies(self) -> list[str]:
        return self.store.bad_copies()

    def newest_epoch(self) -> int:
        self.store.scan()
        return self.store.newest_epoch()

    def begin_epoch(self, epoch: int, owners: Collection[str]) -> None:
        self.store.claim.refuse_other_jobs(owners, self._timeout_s)
        self.store.claim.begin_epoch(epoch)

    def noted_lineages(self) -> list[Lineage]:
        return self.store.claim.noted_lineages()

    def note_lineage(self, lineage: Lineage) -> None:
        self.store.claim.begin_epoch(lineage.epoch.number, lineage)

    def warm_up(self, state: TensorAwareStateDict, like: ShardIdentity) -> None:
        """Lay out a state, and have the memory for it made in the background."""
        capture = self.planner.capture(state)
        nbytes = capture.nbytes(like)
        with self._lock:
            self.image_nbytes = {**self.image_nbytes, like.series: nbytes}
        self.store.prepare(like.series, nbytes, capture.gpu)

    def is_busy(self) -> bool:
        """Whether a save would have to wait for an older one."""
        # A load that failed may have left it.
        self._forget_arrival()
        return any(map(self.store.is_busy, self.image_nbytes))

    def wait_staged(self) -> None:
        for copies in self._copies:
            copies.wait()

    def was_sent(self, identity: ShardIdentity) -> None:
        # Another process may have written it, with digests of its own, before those are here that
        # nobody got to send: they would be put into the next image. Computing them waits for
        # nothing but copies of a GPU, which have a deadline.
        for sealing in tuple(self._sealings.values()):
            sealing.wait()
        with self._lock:
            sent = [begun.buffer for begun in self._begun if begun.identity == identity]
        for buffer in sent:
            buffer.is_being_sent = False

    def wait_sealed(self) -> None:
        self.wait_staged()
        # Others compute theirs while they write.
        for sealing in tuple(self._sealings.values()):
            sealing.result()

    def check(self, state: TensorAwareStateDict) -> None:
        self.planner.capture(state)

    def stage(
        self, state: TensorAwareStateDict, identity: ShardIdentity, *, travels: bool
    ) -> StagedShard:
        # A load that failed may have left it.
        self._forget_arrival()
        capture = self.planner.capture(state)
        nbytes = capture.nbytes(identity)
        buffer = self._begin(identity, nbytes)
        if capture.gpu is not None:
            buffer.pin(capture.gpu)
        image = buffer.view[:nbytes]
        written = capture.write(
            image, identity, self._copier, self._streams, self._guard.storages()
        )
        covered, copies = written.covered_nbytes, written.under_way
        self._copies = [*(c for c in self._copies if not c.over), copies]
        source = None
        if travels:
            sealing: Task[None] | None = None
            if not written.sealed:
                sealing = Task(partial(_seal_once_over, copies, image, covered, identity))
                under_way = {i: s for i, s in self._sealings.items() if not s.done()}
                # Known before it can begin: after an interrupt it is ended by `take_back`.
                self._sealings = {**under_way, identity: sealing}
                self._sealer.submit(sealing)
            source = _StagedSource(image, capture, covered, sealing)
            # Until was_sent: this node may have written it long before.
            buffer.is_being_sent = True
        digests: Digests = "done" if travels or written.sealed else "compute"
        job = self.store.write_job(buffer, identity, nbytes, covered, digests)
        self.store.prepare(identity.series, nbytes, capture.gpu)
        return StagedShard(identity, nbytes, job, source, capture.gpu is not None)

    def make_room(self, identity: ShardIdentity, nbytes: int) -> memoryview:
        return self._begin(identity, nbytes).view[:nbytes]

    def make_parity_room(
        self, identity: ShardIdentity, of: ParityOf, heads_nbytes: int, parity_nbytes: int
    ) -> ParityRoom:
        frame = ParityFrame.of(identity, of, heads_nbytes, parity_nbytes)
        return frame.put(self.make_room(identity, frame.nbytes))

    def received(self, identity: ShardIdentity) -> StagedShard:
        begun = next(b for b in self._begun if b.identity == identity)
        header = read_header(MemorySource(begun.buffer.view[: begun.nbytes]))
        if header.identity != identity:
            raise MismatchError(
                f"expected a replica of {identity}, and {header.identity} arrived: the ranks have "
                f"not called save() equally often"
            )
        digests: Digests = "compute" if identity.is_parity else "check"
        job = self.store.write_job(
            begun.buffer, identity, begun.nbytes, header.digests_start, digests
        )
        self.store.prepare(identity.series, begun.nbytes)
        return StagedShard(identity, begun.nbytes, job)

    def worker_call(
        self, shards: Sequence[StagedShard]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Training does not wait for digests that are still being computed here.
        sealed = all(s.done() and s.error is None for s in self._sealings.values())
        writes: list[ShardWrite] = [shard.payload for shard in shards]
        if not sealed:
            writes = [replace(w, digests="compute") if w.digests == "done" else w for w in writes]
        return write_shards, (writes,)

    def holds(self, identity: ShardIdentity) -> bool:
        return self.store.holds(identity)

    def settle(self, iteration: int) -> None:
        """The save of an iteration is complete: its buffers are free."""
        for begun in self._take_begun(lambda b: b.identity.iteration == iteration):
            self._unsettled.discard(begun.identity)
            if begun.buffer.lease == begun.lease:
                begun.buffer.give_back()

    def leave(self, iteration: int) -> None:
        """Free the buffers of a save that nobody finalizes; what it wrote stays until it is old."""
        with self._lock:
            identities = [b.identity for b in self._begun if b.identity.iteration == iteration]
        for identity in identities:
            # The store then knows of the shard, and retires it with others of its age.
            self.store.holds(identity)
        self.settle(iteration)

    def take_back(self, iteration: int) -> None:
        """Remove everything that the failed save of an iteration left here."""
        self._copier.settle()
        end_all([s for i, s in self._sealings.items() if i.iteration == iteration])
        failed = self._take_begun(lambda b: b.identity.iteration == iteration)
        with self._lock:
            identities = {i for i in self._unsettled if i.iteration == iteration}
        with ExitStack() as removals:
            # One that cannot be removed keeps no other from being removed.
            for identity in identities:
                removals.callback(self.store.discard, identity)
            # Memory that a GPU may still write to is neither freed nor used again.
            self._streams.synchronize()
            for identity in identities:
                # What an interrupted save has taken and did not come to note; after the others.
                removals.callback(self.store.release, identity)
            for begun in failed:
                removals.callback(self.store.abandon, begun.buffer, begun.lease, begun.identity)
        with self._lock:
            self._unsettled -= identities

    def drop_unfinished(self, identities: Collection[ShardIdentity]) -> None:
        with ExitStack() as removals:
            # One that cannot be removed keeps no other from being given back.
            for begun in self._take_begun(lambda b: b.identity in identities):
                removals.callback(self._drop, begun)

    def _drop(self, begun: _Begun) -> None:
        self.store.drop_unfinished(begun.buffer, begun.lease, begun.identity)
        self._unsettled.discard(begun.identity)

    def open(self, identity: ShardIdentity) -> ShardSource:
        return self.store.open(identity)

    def room_to_load(self, identity: ShardIdentity, nbytes: int) -> memoryview:
        self._forget_arrival()
        self._arrival = self.store.receive(nbytes, self._timeout_s)
        return self._arrival.view[:nbytes]

    def restore(
        self, identity: ShardIdentity, arrived: memoryview | None, options: LoadOptions
    ) -> tuple[Any, int]:
        source = self.store.open(identity) if arrived is None else MemorySource(arrived)
        try:
            into = None if options.into is None else find_targets(options.into, options.optional)
            reader = ImageReader(source, self._allowed, identity)
            return reader.restore(into, options.map_location), source.nbytes
        except CorruptShardError as error:
            # Bytes are compared where they were read to, which others may write into.
            verify(source, identity)
            raise RestoreError(
                f"the state cannot be rebuilt: {error}, though every byte of the shard matches its "
                f"digest when it is read by itself. Something else writes into the tensors to load "
                f"into, the memory or the bus is defective, or another program made the file"
            ) from error
        finally:
            source.close()
            self._forget_arrival()

    def set_aside(self, identity: ShardIdentity, why: str) -> None:
        self.store.set_aside(identity, why)

    @contextmanager
    def replacing(self, identity: ShardIdentity, why: str | None) -> Iterator[None]:
        """Inside, a shard is written anew; ``why`` says what is wrong with the one that is here."""
        with nullcontext() if why is None else self.store.replacing(identity, why):
            yield

    def doubt(self, identity: ShardIdentity, why: str) -> None:
        # A rank with bad memory must not talk the others out of their good copies.
        try:
            source = self.store.open(identity)
            try:
                verify(source, identity)
            finally:
                source.close()
        except CorruptShardError as error:
            self.store.set_aside(identity, str(error))
        except StorageError as error:
            logger.warning("%s could not be looked at after it was %s: %s", identity, why, error)
        else:
            logger.warning("%s is good here, but not when it was %s", identity, why)

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.store.close, self._unsettled)
            closing.callback(self._copier.close)
            closing.callback(self._sealer.close)
            closing.callback(self._guard.close)
            try:
                self.wait_staged()
            except (CheckpointingException, RuntimeError) as error:
                # A GPU that hangs, or is broken, must not keep the store from being left.
                logger.error("what a GPU was copying is given up: %s", error)

    def _hold_back_training(self) -> None:
        for copies in self._copies:
            copies.hold_back_training()

    def _forget_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.give_back()
            self._arrival = None
        # Of a load that was interrupted while it took one.
        self.store.release(Store.LOADING)

    def _begin(self, identity: ShardIdentity, nbytes: int) -> Buffer:
        with self._lock:
            self._unsettled.add(identity)
        buffer = self.store.stage(identity, nbytes, self._timeout_s)
        with self._lock:
            self.image_nbytes = {**self.image_nbytes, identity.series: nbytes}
            self._begun.append(_Begun(identity, buffer, buffer.lease, nbytes))
        return buffer

    def _take_begun(self, is_wanted: Callable[[_Begun], bool]) -> list[_Begun]:
        with self._lock:
            taken = [begun for begun in self._begun if is_wanted(begun)]
            self._begun = [begun for begun in self._begun if begun not in taken]
        return taken


def _seal_once_over(
    copies: CopiesUnderWay, image: memoryview, covered_nbytes: int, identity: ShardIdentity
) -> None:
    copies.wait()
    seal(image, covered_nbytes, identity)


class _StagedSource(MemorySource):
    """A staged image whose digests may be computed while its first bytes travel."""

    def __init__(
        self,
        image: memoryview,
        capture: Capture,
        covered_nbytes: int,
        sealing: Task[None] | None,
    ) -> None:
        super().__init__(image)
        self._capture = capture
        self._data_start = covered_nbytes - len(capture.skeleton) - capture.data_nbytes
        self._covered_nbytes = covered_nbytes
        self._sealing = sealing

    def read(self, start: int, stop: int) -> memoryview:
        if self._sealing is not None and stop > self._covered_nbytes:
            self._sealing.result()
        return super().read(start, stop)

    def fill(self, bucket: torch.Tensor, start: int, stop: int) -> None:
        """Put bytes ``[start, stop)`` into device memory."""
        self.read(start, stop)
        self._capture.fill(bucket[: stop - start], self.view, self._data_start, start)
