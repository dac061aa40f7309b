"""A spare: a process beside a job that holds shards of the nodes whose place it may take.

``python -m localckpt.spare`` is the same as a command. The job sends each complete checkpoint
behind training; whoever begins as a rank on this node finds its shard here.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Self, TypeAlias

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from localckpt.availability.prefetch import SpareRecord
from localckpt.errors import CheckpointingException, PeerLostError, StorageError
from localckpt.failure_texts import described, ranks_named
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.ranks.failure import forget_frames
from localckpt.replication.spares import LEASE_S, SPARE_RANK, Order, Pull, SpareRegistry
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.owner import Running, owner_of
from localckpt.threads import Latch, Task
from localckpt.waiting import Pacer

logger = logging.getLogger(__name__)

StrPath: TypeAlias = str | os.PathLike[str]

RATE_LIMIT = 256e6
"""Bytes a second that a spare receives by default."""

# How often a spare looks whether ranks begin here, and in the store, and tries again to reach that.
_PAUSE_S, _RETRY_S = 0.1, 2.0
# Deadline of each step with a rank, and of leaving.
_TIMEOUT_S, _LEAVING_S = 60.0, 2.0
# So many rounds of a rendezvous are looked at.
_ROUNDS = 64
# Share of the free space that is used. The older checkpoint stays until the newer one is there.
_SHARE, _CHECKPOINTS = 0.9, 2


class Held(NamedTuple):
    """Shards that a spare holds of one checkpoint."""

    iteration: int
    ranks: tuple[int, ...]
    nbytes: int


class Spare:
    """Receives the shards of a running job's newest complete checkpoint into a node's directory.

    A manager that is made on this node later, after :meth:`close`, or by another process, finds
    them as its own. It leaves by itself as soon as ranks begin in the directory.

    Args:
        store: The store of the job, as this process reaches it: a torch ``Store``; its address,
            ``"host:port"``; or ``"host:port/id"`` of torchrun's rendezvous, where it is found.
        local: Directory on this node that a rank here is going to have as its own.
        session_id: That of the job.
        ranks: Ranks whose nodes this one may replace; all by default.
        max_nbytes: Most bytes on the disk, half of them for each of two checkpoints; by default
            most of what is free. Nodes whose shards do not fit are left out, the last ones first.
        rate_limit: Bytes a second that it receives at most.

    Attributes:
        held: What it holds completely, and ``None`` before that.

    Raises:
        CheckpointingException: An argument has an impossible value.
        StorageError: The directory cannot be used, or ranks of a running job, or another spare,
            use it.
    """

    def __init__(
        self,
        store: Store | str,
        local: StrPath,
        session_id: str = "",
        *,
        ranks: Collection[int] = (),
        max_nbytes: int | None = None,
        rate_limit: float = RATE_LIMIT,
    ) -> None:
        self._address = _address(store) if isinstance(store, str) else None
        if not 0 < rate_limit < math.inf or (max_nbytes is not None and max_nbytes < 1):
            raise CheckpointingException(
                f"rate_limit={rate_limit!r} and max_nbytes={max_nbytes!r} of a spare must be "
                f"above 0"
            )
        if not all(type(rank) is int and 0 <= rank < SPARE_RANK for rank in ranks):
            raise CheckpointingException(f"ranks={ranks!r} of a spare must be ranks of a job")
        self.held: Held | None = None
        self._given, self._session_id = store, session_id
        self._ranks, self._max_nbytes, self._rate = tuple(ranks), max_nbytes, float(rate_limit)
        self._name, self._beat, self._beat_at = secrets.token_hex(8), 0, 0.0
        self._round = 0
        self._received: set[Checkpoint] = set()
        self._pull: Pull | None = None
        self._leaving, self._has_left = Latch(), Latch()
        self._has_warned = False
        # Ranks limit what they send, each by itself, and at most a chunk at once.
        self._pacer = Pacer(rate_limit)
        # Held while shards are received; the directory is left when it is free.
        self._using = threading.Lock()
        self._store = DirectoryStore(local, session_id, SPARE_RANK, _TIMEOUT_S)
        try:
            if self._ranks_here():
                raise StorageError(
                    f"ranks of a running job use {self._store.root}: give a spare a directory on a "
                    f"node that has none"
                )
            self._work, self._watch = Task(self._receive_all), Task(self._leave_in_time)
            self._work.start("localckpt-spare", daemon=True)
            self._watch.start("localckpt-spare-watch", daemon=False)
            # Before the exit waits for that thread.
            atexit.register(self._leaving.set)
        except BaseException:
            self._leaving.set()
            self._store.close()
            raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until ranks have begun in the directory, or it was closed; return whether so."""
        return self._has_left.wait(timeout_s)

    def close(self) -> None:
        """Stop receiving, and leave the directory to ranks. May be called twice.

        Raises:
            StorageError: The storage does not answer.
        """
        self._leaving.set()
        atexit.unregister(self._leaving.set)
        self._watch.result(_TIMEOUT_S)
        # It says in the store that it has ended, if that answers.
        self._work.wait(_LEAVING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ranks_here(self) -> list[int]:
        """Return the ranks, of any live process, that have claimed folders of the session."""
        running = Running()
        folders = {r: self._store.folder.with_name(str(r)) for r in self._store.claim.ranks()}
        return sorted(r for r, f in folders.items() if r != SPARE_RANK and owner_of(f) in running)

    def _leave_in_time(self) -> None:
        """Leave the directory when asked, or when ranks begin there, which wait for that."""
        try:
            while not self._leaving.wait(_PAUSE_S):
                if ranks := self._ranks_here():
                    logger.info("%s begin in %s", ranks_named(ranks), self._store.root)
                    break
        finally:
            self._leaving.set()
            try:
                self._leave()
            finally:
                self._has_left.set()

    def _leave(self) -> None:
        self._pacer.stop()
        if (pull := self._pull) is not None:
            pull.abort()
        if not self._using.acquire(timeout=_TIMEOUT_S):
            raise StorageError(
                f"a spare cannot leave {self._store.root}, which has not answered for "
                f"{_TIMEOUT_S:g} s"
            )
        try:
            self._store.close()
        finally:
            self._using.release()

    # In a thread: what goes over the job's store.

    def _receive_all(self) -> None:
        registry: SpareRegistry | None = None
        try:
            next_at = 0.0
            while not self._leaving.wait(max(_PAUSE_S, next_at - time.monotonic())):
                try:
                    if registry is None:
                        registry, self._beat_at = SpareRegistry(self._open(), self._session_id), 0.0
                    self._receive_next(registry)
                except Exception as error:  # noqa: BLE001 - the next one may come
                    if not self._leaving.is_set():
                        self._warn(error)
                    # Whoever hosts the store may come again at its address.
                    registry = registry if self._address is None else None
                    next_at = time.monotonic() + _RETRY_S
        finally:
            if registry is not None:
                with suppress(CheckpointingException):
                    registry.forget(self._name)

    def _warn(self, error: Exception) -> None:
        forget_frames(error)
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        logger.log(level, "the spare in %s goes on trying: %s", self._store.root, described(error))

    def _open(self) -> Store:
        if self._address is None:
            assert isinstance(self._given, Store), "it is no address"
            return self._given
        host, port, run = self._address
        store = _connect(host, port)
        if not run:
            return store
        # torchrun's agents meet in rounds, each with the address of a store for the ranks, in some
        # versions only where that has changed.
        for number in range(self._round + _ROUNDS, self._round - 1, -1):
            place = PrefixStore(f"torch.rendezvous.{run}.{number}", store)
            if place.check(["MASTER_ADDR", "MASTER_PORT"]):
                self._round = number
                return _connect(place.get("MASTER_ADDR").decode(), int(place.get("MASTER_PORT")))
        raise PeerLostError(f"no round of the rendezvous {run!r} at {host}:{port} has ended yet")

    def _receive_next(self, registry: SpareRegistry) -> None:
        if registry.has_order(self._name):
            # Nothing else is sent meanwhile.
            registry.withdraw(self._name)
            self._beat_at = 0.0
            with self._using:
                self._receive(registry, registry.take_order(self._name))
        if time.monotonic() >= self._beat_at:
            self._beat, self._beat_at = self._beat + 1, time.monotonic() + LEASE_S / 4
            registry.put(
                SpareRecord(
                    *(self._name, socket.gethostname(), self._beat),
                    *(self._room(), self._rate, self._ranks),
                )
            )

    def _room(self) -> int:
        """Return the bytes that the shards of one checkpoint may have."""
        status = os.statvfs(self._store.folder)
        there = sum(path.stat().st_blocks * 512 for path in self._store.images())
        free = int(_SHARE * (status.f_bavail * status.f_frsize + there))
        return min(free, self._max_nbytes or free) // _CHECKPOINTS

    def _receive(self, registry: SpareRegistry, order: Order) -> None:
        began, checkpoint, store = time.monotonic(), order.checkpoint, self._store
        self._pull = pull = Pull(registry, order, self._name, _TIMEOUT_S)
        if self._leaving.is_set():
            # Whoever leaves may have looked for this pull before it was there.
            return
        store.repaired = frozenset({checkpoint})
        records = [stored.record for stored in store.list_stored() if stored.record]
        sizes = {r.identity: r.nbytes for r in records if r.identity.checkpoint == checkpoint}
        room, came_nbytes = self._room(), 0

        def keep(rank: int, nbytes: int, fill: Callable[[memoryview], None]) -> None:
            nonlocal came_nbytes
            if sum(sizes.values()) + nbytes > room:
                raise StorageError(
                    f"iteration {checkpoint.iteration} of rank {rank} has {nbytes} bytes, and the "
                    f"spare has {room} for all shards"
                )
            self._keep(checkpoint.shard(rank, self._session_id), nbytes, fill)
            sizes[checkpoint.shard(rank, self._session_id)] = nbytes
            came_nbytes += nbytes

        self._received.add(checkpoint)
        for ranks in order.nodes:
            named = {rank: checkpoint.shard(rank, self._session_id) for rank in ranks}
            pull.receive([r for r, of in named.items() if of not in sizes], ranks[0], keep)
        held = sorted(rank for node in order.nodes for rank in node)
        self.held = Held(checkpoint.iteration, tuple(held), sum(sizes.values()))
        self._prune(checkpoint)
        self._has_warned = False
        logger.info(
            "the spare holds iteration %d of %s in %s: %d bytes, of which %d came in %.3f s",
            *(checkpoint.iteration, ranks_named(held), store.root, self.held.nbytes, came_nbytes),
            time.monotonic() - began,
        )

    def _keep(
        self, identity: ShardIdentity, nbytes: int, fill: Callable[[memoryview], None]
    ) -> None:
        """Receive a shard, verify it, and commit it under its identity, or keep nothing of it."""
        self._pacer.wait(nbytes)
        slot = self._store.reserve(identity, nbytes, _TIMEOUT_S)
        try:
            fill(slot.image)
            slot.arrived()
            self._store.commit([slot])
        except BaseException:
            self._store.discard([slot])
            raise
        self._store.release([slot])

    def _prune(self, newest: Checkpoint) -> None:
        """Prune what is older, or was sent before and is not the newest any more, of this folder.

        What ranks have left in theirs is for the ranks that come.
        """

        def is_over(identity: ShardIdentity) -> bool:
            of = identity.checkpoint
            return of != newest and (of.iteration < newest.iteration or of in self._received)

        self._store.prune(is_over, ())
        self._received = {newest}


def _connect(host: str, port: int) -> Store:
    deadline = timedelta(seconds=_RETRY_S)
    return TCPStore(host, port, None, False, deadline, wait_for_workers=False)


def _address(store: str) -> tuple[str, int, str]:
    """Parse the address of a store; the third value is the id of torchrun's rendezvous there."""
    place, _, run = store.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise CheckpointingException(
            f"the job's store is {store!r}; give its address as HOST:PORT, or torchrun's "
            f"--rdzv-endpoint and --rdzv-id as HOST:PORT/ID"
        )
    return host.strip("[]"), int(port), run


def main(arguments: Sequence[str]) -> int:
    """Run a spare beside a command, or until ranks begin in its directory; return the status."""
    parser = argparse.ArgumentParser(prog="python -m localckpt.spare", description=__doc__)
    parser.add_argument(
        "--store",
        required=True,
        help="HOST:PORT of the job's store, or HOST:PORT/ID of torchrun's rendezvous",
    )
    parser.add_argument("--local", required=True, help="directory of ranks on this node")
    parser.add_argument("--session", default="", help="session_id of the job")
    parser.add_argument(
        "--rank", type=int, action="append", default=[], help="rank whose node it may replace"
    )
    parser.add_argument("--max-bytes", type=int, help="most bytes on the disk")
    parser.add_argument(
        "--rate-limit", type=float, default=RATE_LIMIT, help="bytes a second (%(default)s)"
    )
    parser.add_argument(
        "command", nargs="*", help="what waits in the job's rendezvous here, as torchrun ..."
    )
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Ended as by Ctrl-C, so that the directory is left.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        spare = Spare(
            *(given.store, given.local, given.session),
            ranks=given.rank,
            max_nbytes=given.max_bytes,
            rate_limit=given.rate_limit,
        )
    except CheckpointingException as error:
        parser.error(str(error))
    with spare:
        if not given.command:
            spare.wait()
            return 0
        with subprocess.Popen(given.command) as process:
            # The terminal's Ctrl-C is the command's as well, which ends by it in its own way.
            signal.signal(signal.SIGINT, lambda *_: None)
            signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
            status = process.wait()
        return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
