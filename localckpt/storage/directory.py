"""Store in a directory with a folder for each rank of the node.

Every rank reads all folders and writes only its own. ``root/<session>/<rank>/`` holds one file for
each piece that the rank keeps. File names only need to differ; a piece's identity is read from its
header. A retired file is renamed to a recycled file, which a later save overwrites. Images are
written from a pool of staging buffers. In shared memory, which outlives the process, they are
staged in place: straight into the mapped file that will hold them, so a commit is a hash and a
rename. Retired files stay mapped there, and later saves are staged into them.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from localckpt.errors import CheckpointingException, CorruptShardError, StorageError
from localckpt.ids import Checkpoint, Piece, ShardIdentity, ShardRecord
from localckpt.memory.digests import LEAST_COMPARED_NBYTES, covered_nbytes
from localckpt.memory.limits import MemoryLimit, memory_limits
from localckpt.state_dict.source import ImageBytes, MemorySource, ShardSource, held_blocks
from localckpt.storage.buffers import (
    Buffer,
    BufferPool,
    PrivateBuffer,
    allocate,
    buffer_nbytes,
    wait_until_free,
)
from localckpt.storage.catalog import KnownFiles, Problem, SessionFolder, quarantine
from localckpt.storage.failures import storage_errors
from localckpt.storage.files import FileSource, MappedFile
from localckpt.storage.names import (
    DIRTY,
    RECYCLED,
    SHARD,
    is_recycled_from,
    local_path,
    shard_name,
)
from localckpt.storage.owner import Running, owner_of
from localckpt.storage.preflight import (
    IN_MEMORY,
    MemoryNeeds,
    check_space,
    file_system,
    try_out,
)
from localckpt.storage.rank_folder import RankFolder, SeenFolder
from localckpt.storage.store import Slot, Store, Stored
from localckpt.storage.write import PIECE_NBYTES, Digests, ShardWrite, StagedImage, write_shard

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_IMAGES = (SHARD, RECYCLED, DIRTY)

Method = TypeVar("Method", bound=Callable[..., Any])


def one_at_a_time(method: Method) -> Method:
    """Decorate a method of a store so that only one thread at a time runs it."""

    @wraps(method)
    def guarded(self: DirectoryStore, /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Method, guarded)


class DirectoryStore(Store):
    """Store of one rank for the pieces of one session on this node.

    A root that is missing is made with access for this user alone. ``timeout_s`` is the deadline of
    a wait for another process that starts or ends here. Pieces of checkpoints in ``repaired`` get
    memory of their own, so that no save waits for it. ``keep_last`` is the number of checkpoints
    that are kept, which a store in place has memory for. Raises StorageError if the directory
    cannot be used, or a live process of another job owns the rank's folder.
    """

    in_place = False
    """Whether images are staged in the files that will hold them."""
    claim: SeenFolder
    piece_nbytes = PIECE_NBYTES
    """Of what is staged in pieces; a peer sends as many at a time."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str,
        rank: int,
        timeout_s: float,
        *,
        num_buffers: int = 2,
        keep_last: int = 1,
        staging_limit: int | None = None,
    ) -> None:
        self.num_buffers, self._keep_last = num_buffers, keep_last
        self._staging_limit, self.most_nbytes = staging_limit, 0
        self.root = local_path(root)
        self.session_id = session_id
        self.rank = rank
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self._shards: dict[ShardIdentity, Path] = {}
        self._sizes: dict[Piece, int] = {}
        self._times_restored = 0
        self._known: dict[ShardIdentity, Path] = {}
        self.repaired = frozenset[Checkpoint]()
        self.on_quarantine: Callable[[Path, Problem], None] | None = None
        # Mapped files: dirty and committed ones by identity, recycled ones by file name.
        self._staged: dict[ShardIdentity, MappedFile] = {}
        self._recycled: dict[str, MappedFile] = {}
        claim = self._take_folder(timeout_s)
        super().__init__(claim.token, claim)
        self.folder, self._session = claim.path, claim.session
        self._pool = BufferPool(PrivateBuffer, num_buffers)
        # Committed images that are in memory still, until this rank saves.
        self._adopted: dict[ShardIdentity, Buffer] = {}
        self._files = KnownFiles()
        self._try_out()

    def _try_out(self) -> None:
        """Find out how the claimed folder can be written; raises StorageError if it cannot."""
        self._direct, kind = try_out(self.folder, DIRTY), file_system(self.folder)
        if self.in_place:
            if kind not in IN_MEMORY:
                logger.warning("%s is on %s, which is not memory", self.root, kind or "a disk")
            return
        if not self._direct:
            logger.info("%s does not take O_DIRECT: writing through the page cache", self.root)
        if kind in IN_MEMORY:
            logger.warning(
                "%s is on %s: checkpoints there outlive processes, but not a reboot of the node",
                self.root,
                kind,
            )

    def _take_folder(self, timeout_s: float) -> SeenFolder:
        return RankFolder(self.root, self.session_id, self.rank, timeout_s)

    # Slots.

    @property
    def image_nbytes(self) -> Mapping[Piece, int]:
        """Size of the last image of each piece that this rank keeps."""
        # A copy, since other threads reserve slots at the same time.
        return dict(self._sizes)

    # Images in memory, for the store that follows when the ranks join again.

    def hand_over(self) -> KeptImages:
        """Close the store, and return what it has of committed images for :meth:`adopt`."""
        unread = [buffer for buffer in self._adopted.values() if not buffer.readers]
        kept = [*self._pool.hand_over(), *unread]
        self._adopted = {}
        self.close()
        return KeptImages(kept, self._files)

    def adopt(self, kept: KeptImages) -> None:
        """Read images from the memory of the store before this one, until something is saved.

        Each is verified before it is read; one that turns out bad is read from its file.
        """
        self._files = kept.known
        for buffer in kept.buffers:
            assert buffer.content is not None, "it was handed over"
            self._adopted[cast(ShardIdentity, buffer.content[0])] = buffer

    def is_in_memory(self, identity: ShardIdentity) -> bool:
        """Return whether a piece is read from this process's memory."""
        return identity in self._adopted

    @contextmanager
    def held_in_memory(
        self, identity: ShardIdentity, nbytes: int, fill: Callable[[memoryview], None]
    ) -> Iterator[None]:
        """Context in which an image that is in memory alone is read as one that was adopted."""
        with self._lock:
            if len(self._adopted) > 1:
                # The newest may be loaded yet.
                oldest = min(self._adopted, key=lambda adopted: adopted.iteration)
                self._pool.offer(self._adopted.pop(oldest))
            buffer = self._pool.take(identity.piece, nbytes, 0.0)
            self._pool.forget(buffer)
            buffer.give_back()
            try:
                fill(buffer.view[:nbytes])
                buffer.content = identity, nbytes
                self._adopted[identity] = buffer
            except BaseException:
                buffer.close()
                raise
        try:
            yield
        finally:
            with self._lock:
                # One that is bad is given up where it is read.
                if self._adopted.pop(identity, None) is not None:
                    self._pool.offer(buffer)

    def _open_adopted(self, identity: ShardIdentity) -> MemorySource | None:
        if (buffer := self._adopted.get(identity)) is None or buffer.content is None:
            return None
        source = _AdoptedImage(buffer, buffer.content[1])
        try:
            ImageBytes(source, identity).verify()
        except CorruptShardError as error:
            source.close()
            self._pool.offer(self._adopted.pop(identity))
            logger.error("%s in memory is bad, and is read from its file: %s", identity, error)
            return None
        return source

    @one_at_a_time
    def _offer_adopted(self) -> None:
        """Let saves use the memory of images that were adopted, and are not being read."""
        for identity, buffer in tuple(self._adopted.items()):
            if not buffer.readers:
                self._pool.offer(self._adopted.pop(identity))

    @one_at_a_time
    def _restore(self) -> None:
        """Make this rank's folder again if it was removed, and forget the files that it held."""
        self.claim.restore()
        if self._times_restored != self.claim.times_restored:
            self._times_restored = self.claim.times_restored
            self._shards = {i: path for i, path in self._shards.items() if path.exists()}
            # Mapped files of saves under way are given back with their slots.
            gone = self._staged.keys() - {slot.identity for slot in self._slots}
            for buffer in (*map(self._staged.pop, gone), *self._recycled.values()):
                buffer.close()
            self._recycled.clear()

    def limit_buffers(self, count: int, most_nbytes: int) -> None:
        self.num_buffers = min(self.num_buffers, count)
        self._pool.limit(count)
        self.most_nbytes = most_nbytes

    def memory_needs(self, nbytes: int) -> MemoryNeeds:
        kept, had_nbytes = 0, self._pool.nbytes
        if self.in_place:
            kept = self._keep_last
            had_nbytes = sum(path.lstat().st_blocks * 512 for path in self.images())
        else:
            nbytes = buffer_nbytes(nbytes)
        limits = [*memory_limits(), *self._own_limit(had_nbytes)]
        least_nbytes = 0 if self.in_place else buffer_nbytes(2 * self.piece_nbytes)
        return MemoryNeeds(nbytes, self.num_buffers, kept, had_nbytes, limits, least_nbytes)

    def _own_limit(self, had_nbytes: int) -> Iterator[MemoryLimit]:
        if (limit := self._staging_limit) is not None:
            name = f"staging_limit, {limit / 1e6:.1f} MB"
            yield MemoryLimit(name, "", max(0, limit - had_nbytes))

    def commit(self, slots: Sequence[Slot]) -> None:
        writes = iter(self.writes(slots))
        for slot in slots:
            staged = slot.staged
            slot.written_nbytes = staged.commit() if staged else write_shard(next(writes))

    @one_at_a_time
    def writes(self, slots: Sequence[Slot]) -> list[ShardWrite]:
        """Return the writes that commit slots filled as a whole; raises as :meth:`commit`."""
        # All of them first: a slot that was given up is an error before anything is changed.
        buffers = [slot.required() for slot in slots]
        self._restore()
        return [
            self._write(slot, buffer, slot.covered_nbytes, slot.digests)
            for slot, buffer in zip(slots, buffers, strict=True)
            if slot.staged is None
        ]

    def _write(self, slot: Slot, buffer: Buffer, covered: int, digests: Digests) -> ShardWrite:
        identity = slot.identity
        final = self._path(identity)
        # A shard that somebody gave this name is overwritten, and not looked for there.
        self._shards = {i: p for i, p in self._shards.items() if p != final or i == identity}
        options = self._write_options(slot)
        return ShardWrite(
            buffer,
            slot.nbytes,
            covered,
            identity,
            digests,
            dirty=self._dirty(identity),
            final=final,
            **options,
        )

    @one_at_a_time
    def _stage(self, slot: Slot, buffer: Buffer, timeout_s: float) -> None:
        """Let a slot be filled piece by piece, in a buffer that is smaller than its image."""
        self._restore()
        covered = covered_nbytes(slot.nbytes)
        if slot.is_kept:
            write = self._write(slot, buffer, covered, "done")
        else:
            # Of a load, which reads the image from a file that has no name.
            path = self.folder / f"load.{secrets.token_hex(4)}{DIRTY}"
            of_image = slot.nbytes, covered, slot.identity
            write = ShardWrite(buffer, *of_image, "done", path, path, direct=self._direct)
        slot.staged = StagedImage(write, timeout_s, self.piece_nbytes, is_kept=slot.is_kept)

    def _memory_for(self, nbytes: int, *, is_planned: bool) -> int:
        """Return the bytes of memory for an image: fewer than it has where memory is short.

        By the ranks' plan there may be enough; else it is what there is at the moment that counts.
        """
        if is_planned and not self.most_nbytes:
            return nbytes
        limits = [*memory_limits(), *self._own_limit(0)]
        most = min(limit.available_nbytes for limit in limits)
        most = min(most, self.most_nbytes or most)
        if buffer_nbytes(nbytes) <= most:
            return nbytes
        pieces = most * 63 // 64 // self.piece_nbytes
        return max(2, pieces) * self.piece_nbytes

    @one_at_a_time
    def _remove(self, identity: ShardIdentity) -> None:
        path = self._path(identity)
        # The dirty file first, so that a writer that is still running cannot commit it.
        with storage_errors("remove", path):
            self._dirty(identity).unlink(missing_ok=True)
        self._recycle(identity, path)

    @one_at_a_time
    def _remove_unfinished(self, identity: ShardIdentity) -> bool:
        path = self._path(identity)
        with storage_errors("clean up", self.folder):
            # Not by the unfinished file: of a directory that is out of reach now neither is there,
            # and that one may be back later.
            if is_committed := path.is_file():
                # Listed, so that prune() retires the file later.
                self._shards[identity] = path
            # Most pieces are committed by then, and need no write to the disk here.
            if os.path.lexists(self._dirty(identity)):
                self._dirty(identity).unlink(missing_ok=True)
        return not is_committed

    def _write_options(self, slot: Slot) -> dict[str, bool]:
        """Return the fields of a slot's :class:`ShardWrite` that differ from store to store."""
        if self.in_place:
            return {"in_place": True}
        with storage_errors("recycle a file in", self.folder):
            recycled = self._claim_recycled(slot.identity, slot.nbytes) is not None
        return {"recycled": recycled, "direct": self._direct}

    def prepare(self, piece: Piece, nbytes: int, gpu: torch.device | None = None) -> None:
        """Make memory for saves of a piece, if it is missing; raises StorageError."""
        self._sizes[piece] = nbytes
        if self.in_place:
            self._map_ahead(nbytes, gpu)
        elif self._staging_limit is None:
            # How a limit is divided among buffers is known when the ranks have planned.
            self._pool.prepare(piece, self._memory_for(nbytes, is_planned=False), gpu)

    @one_at_a_time
    def _map_ahead(self, nbytes: int, gpu: torch.device | None) -> None:
        while len(self.images()) < (self._keep_last + 1) * len(self._sizes):
            ready = self.folder / f"ahead.{secrets.token_hex(4)}{RECYCLED}"
            self._recycled[ready.name] = buffer = MappedFile(ready, nbytes, create=True)
            if gpu is not None:
                buffer.pin(gpu)

    def is_busy(self) -> bool:
        """Return whether a new save would have to wait for an older one's memory."""
        return any(map(self._is_busy if self.in_place else self._pool.is_busy, self.image_nbytes))

    @one_at_a_time
    def _is_busy(self, piece: Piece) -> bool:
        """Return whether a piece would have to wait for a mapped file."""
        own = (i for i in self._staged if i.piece == piece and i.checkpoint not in self.repaired)
        return sum(self._staged[identity].in_use for identity in own) >= self.num_buffers

    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        identity, is_repair = slot.identity, slot.identity.checkpoint in self.repaired
        # Copies of a loaded checkpoint are made from what is in memory.
        if slot.is_kept and identity.rank == self.rank:
            self._offer_adopted()
        buffer = self._take_buffer(slot, timeout_s, is_repair=is_repair)
        if slot.is_kept and not is_repair:
            self._sizes[identity.piece] = slot.nbytes
        return buffer

    def _take_buffer(self, slot: Slot, timeout_s: float, *, is_repair: bool) -> Buffer:
        if self.in_place and slot.is_kept:
            if not is_repair:
                wait_until_free(lambda: not self._is_busy(slot.identity.piece), timeout_s)
            self._restore()
            return self._map(slot)
        nbytes = slot.nbytes
        if slot.may_stage and not self.in_place:
            nbytes = self._memory_for(nbytes, is_planned=slot.is_kept and not is_repair)
        if is_repair:
            buffer = allocate(PrivateBuffer, nbytes)
            buffer.take(slot)
        else:
            # A load also takes a staging buffer, since this rank's next save needs one anyway.
            buffer = self._pool.take(slot.identity.piece, nbytes, timeout_s, slot)
        if nbytes < slot.nbytes:
            self._stage(slot, buffer, timeout_s)
        else:
            self._look_for_held(slot, buffer.view[: buffer.held_nbytes])
        return buffer

    def _look_for_held(self, slot: Slot, image: memoryview) -> None:
        """Note the older image in a slot's memory, if a peer is to send what it has changed."""
        if slot.identity.rank != self.rank and len(image) >= LEAST_COMPARED_NBYTES:
            slot.held = held_blocks(MemorySource(image))

    @one_at_a_time
    def _map(self, slot: Slot) -> Buffer:
        identity, nbytes = slot.identity, slot.nbytes
        path = self._dirty(identity)
        with storage_errors("recycle a file in", self.folder):
            claimed = self._claim_recycled(identity, nbytes)
        buffer = self._recycled.pop(claimed, None) if claimed is not None else None
        try:
            if buffer is None:
                buffer = MappedFile(path, nbytes, create=claimed is None)
            else:
                self._look_for_held(slot, buffer.view)
                buffer.resize(path, nbytes)
        except StorageError:
            # Free the file's memory, since the node has too little.
            if buffer is not None:
                buffer.close()
            with storage_errors("remove", path):
                path.unlink(missing_ok=True)
            raise
        buffer.take(slot)
        self._staged[identity] = buffer
        return buffer

    def _give_back(self, slot: Slot, *, was_unfinished: bool) -> None:
        buffer = slot.buffer
        if self.in_place and slot.is_kept:
            if was_unfinished and buffer is not None:
                self._staged.pop(slot.identity, None)
                buffer.close()
            return
        # No save of this rank needs memory of the size of another rank's shard again.
        is_own = slot.is_kept or (slot.identity.rank == self.rank and not self.in_place)
        if is_own and slot.identity.checkpoint not in self.repaired and buffer is not None:
            if slot.identity in self._shards and not (was_unfinished or slot.staged):
                buffer.content = slot.identity, slot.nbytes
            buffer.give_back()
            self._pool.close_offered()
        else:
            self._drop_memory(slot)

    def _drop_memory(self, slot: Slot) -> None:
        if self.in_place and slot.is_kept:
            self._drop_mapped(slot.identity)
            return
        if slot.identity.checkpoint in self.repaired and (buffer := slot.buffer) is not None:
            buffer.close()
        # By owner, since an interrupt may have come before slot.take() recorded the buffer.
        self._pool.release(slot)

    @one_at_a_time
    def _drop_mapped(self, identity: ShardIdentity) -> None:
        # By identity, since an interrupt may have come before slot.take() recorded the buffer.
        if (buffer := self._staged.pop(identity, None)) is not None:
            buffer.close()
        with storage_errors("remove", self._dirty(identity)):
            self._dirty(identity).unlink(missing_ok=True)
            self._path(identity).unlink(missing_ok=True)

    # Stored pieces.

    @one_at_a_time
    def list_stored(self) -> list[Stored]:
        """List all ranks' pieces here, and files that cannot be used; quarantine damaged ones."""
        self._restore()
        with storage_errors("read", self._session):
            os.scandir(self._session).close()
        session = SessionFolder(self._session, self._files)
        good, bad = session.shards()
        self._files.keep([shard.path for shard in good])
        shards: dict[ShardIdentity, Path] = {}
        stored = []
        for shard in good:
            if shard.record.identity not in shards:
                shards[shard.record.identity] = shard.path
                stored.append(Stored(shard.path.name, shard.record))
        for file in bad:
            if file.problem.kind == "damaged":
                # With its name, a damaged file would be read at every start and never be retired.
                # A file of another version keeps its name, since that version can read it.
                self._quarantine(file.path, file.problem)
            else:
                logger.warning("%s is not counted: %s", file.path, file.problem)
                stored.append(Stored(file.path.name, problem=file.problem))
        # Assigned at the end: after an interrupt, pieces missing here would never be retired.
        self._shards = shards
        quarantined = session.quarantined().items()
        return stored + [Stored(path.name, problem=problem) for path, problem in quarantined]

    @one_at_a_time
    def open(self, identity: ShardIdentity) -> ShardSource:
        if (adopted := self._open_adopted(identity)) is not None:
            return adopted
        if identity not in self._shards:
            # Another rank may have written the piece since the last listing.
            self.list_stored()
        path = self._shards.get(identity)
        if path is None:
            raise StorageError(f"this node does not hold {identity}")
        return FileSource(path)

    @one_at_a_time
    def holds(self, identity: ShardIdentity) -> bool:
        path = self._path(identity)
        try:
            status = path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        self._shards[identity] = path
        if identity.is_shard:
            # A header says more of other pieces.
            self._files.add(path, ShardRecord(identity, status.st_size), status)
        return True

    @one_at_a_time
    def lost(self) -> set[Checkpoint]:
        """Return the checkpoints of which pieces that were here are gone since the last call.

        That is known by names, and pruned checkpoints are among them. No file is opened.
        """
        before = self._known | self._shards
        self._known = {i: path for i, path in before.items() if not _is_gone(path)}
        self._shards = {i: path for i, path in self._shards.items() if i in self._known}
        return {identity.checkpoint for identity in before.keys() - self._known.keys()}

    @one_at_a_time
    def prune(self, is_over: Callable[[ShardIdentity], bool], adopted_ranks: Iterable[int]) -> int:
        """Turn shards that are over into recycled files; return the number of all.

        In the folders of ``adopted_ranks``, which nobody on this node writes any more, shards and
        recycled files are removed.
        """
        old = [(identity, path) for identity, path in self._shards.items() if is_over(identity)]
        for identity, path in old:
            if path.parent == self.folder:
                self._recycle(identity, path)
        running = Running()
        for rank in adopted_ranks:
            folder = self._session / str(rank)
            there = [(identity, path) for identity, path in old if path.parent == folder]
            with storage_errors("clean up", folder):
                # This rank's saves overwrite recycled files of this rank's folder only.
                recycled = list(folder.glob(f"*{RECYCLED}"))
                if (there or recycled) and owner_of(folder) not in running:
                    for path in (*(path for _, path in there), *recycled):
                        path.unlink(missing_ok=True)
                    self._shards = {i: p for i, p in self._shards.items() if (i, p) not in there}
        return len(old)

    @one_at_a_time
    def quarantine(self, identity: ShardIdentity, problem: Problem) -> None:
        path = self._shards.pop(identity, None)
        if path is not None:
            self._quarantine(path, problem)

    @one_at_a_time
    def probe(self) -> None:
        """Make and remove a file: return only if the storage answers; raises StorageError."""
        path = self.folder / f"probe{DIRTY}"
        with storage_errors("write to", self.folder):
            path.touch(0o600)
            path.unlink()

    def images(self) -> list[Path]:
        """List the image files of this rank's folder: committed, unfinished and recycled."""
        with storage_errors("read", self.folder):
            return [path for path in self.folder.iterdir() if path.name.endswith(_IMAGES)]

    def check_space(self, checkpoints: int, ranks: int) -> None:
        """Check that checkpoints like the last one fit here; see :func:`preflight.check_space`."""
        with storage_errors("look at", self.folder):
            # Before the files: a file made between the two calls then counts twice, not never.
            status = os.statvfs(self.folder)
        # Listed twice, since one listing may miss a file that is renamed meanwhile.
        there = {**self._nbytes_by_inode(), **self._nbytes_by_inode()}
        check_space(self.folder, status, there, self.image_nbytes.values(), checkpoints, ranks)

    def _nbytes_by_inode(self) -> dict[int, int]:
        """Return the disk space of each image file of the session, by inode."""
        found = {}
        with storage_errors("read", self._session):
            for path in self._session.glob("*/*"):
                if path.name.endswith(_IMAGES):
                    with suppress(FileNotFoundError):
                        status = path.lstat()
                        found[status.st_ino] = status.st_blocks * 512
        return found

    def close(self) -> None:
        """Remove recycled and unfinished files, and release the folder. Does nothing in a fork."""
        if self._process != os.getpid():
            return
        self._closed = True
        self._pool.close()
        for mapped in (self._adopted, self._staged, self._recycled):
            for buffer in mapped.values():
                buffer.close()
            mapped.clear()
        for slot in self._slots:
            # Else the images would stay mapped until the cycles of a manager are collected.
            slot.forget_content()
        with storage_errors("clean up", self.folder):
            for slot in self._slots:
                if slot.is_kept:
                    self._dirty(slot.identity).unlink(missing_ok=True)
            if self.claim.is_ours:
                for path in self.folder.glob(f"*{RECYCLED}"):
                    path.unlink(missing_ok=True)
                self.claim.leave()

    def _quarantine(self, path: Path, problem: Problem) -> None:
        if quarantine(path, problem) and self.on_quarantine is not None:
            self.on_quarantine(path, problem)

    def _path(self, identity: ShardIdentity) -> Path:
        return self.folder / shard_name(identity)

    def _dirty(self, identity: ShardIdentity) -> Path:
        return self._path(identity).with_suffix(f"{SHARD}{DIRTY}")

    def _claim_recycled(self, identity: ShardIdentity, nbytes: int) -> str | None:
        """Rename a recycled file to a shard's dirty name; return its old name.

        The file is one of the same piece, which may have unchanged blocks, or the nearest in size.
        """
        sizes = {}
        for path in sorted(self.folder.glob(f"*{RECYCLED}")):
            with suppress(FileNotFoundError):
                sizes[path] = path.lstat()
        owner = self.folder.stat().st_uid if sizes else -1

        def unlike(one: tuple[Path, os.stat_result]) -> tuple[bool, int]:
            return not is_recycled_from(one[0].name, identity), abs(one[1].st_size - nbytes)

        for path, status in sorted(sizes.items(), key=unlike):
            try:
                # With a second name, perhaps a backup's, its bytes must not change; and what
                # another user may open is not for the next image.
                is_private = stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == owner
                is_ours = status.st_nlink == 1 and is_private
                if stat.S_ISREG(status.st_mode) and not is_ours:
                    path.unlink()
                    continue
                if stat.S_ISFIFO(status.st_mode):
                    continue
                os.rename(path, self._dirty(identity))
            except FileNotFoundError:
                continue
            return path.name
        return None

    def _recycle(self, identity: ShardIdentity, path: Path) -> None:
        recycled = self.folder / f"{path.stem}.{secrets.token_hex(4)}{RECYCLED}"
        with storage_errors("retire", path):
            if self._closed:
                # No later save of this rank could overwrite it.
                path.unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):
                    os.rename(path, recycled)
                    self._keep_mapped(identity, recycled)
        self._shards.pop(identity, None)

    def _keep_mapped(self, identity: ShardIdentity, recycled: Path) -> None:
        buffer = self._staged.pop(identity, None)
        if buffer is not None and buffer.readers:
            # Its readers go on with the mapped pages, which no later save may overwrite.
            buffer.close()
            recycled.unlink(missing_ok=True)
        elif buffer is not None:
            self._recycled[recycled.name] = buffer


def _is_gone(path: Path) -> bool:
    """Return whether it is known that there is no file; storage may refuse to tell."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


@dataclass(frozen=True, slots=True)
class KeptImages:
    """Committed images of a store that was left: those in memory, and what its files are."""

    buffers: list[Buffer] = field(default_factory=list)
    known: KnownFiles = field(default_factory=KnownFiles)

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()


class _AdoptedImage(MemorySource):
    """Image in a buffer, which is not reused before the source is closed."""

    def __init__(self, buffer: Buffer, nbytes: int) -> None:
        super().__init__(buffer.view[:nbytes])
        self._buffer = buffer
        buffer.readers.add(self)

    def close(self) -> None:
        super().close()
        self._buffer.readers.discard(self)


class ReadOnlyStore(DirectoryStore):
    """Store for reading a session's pieces on this node, which makes, renames and claims nothing.

    A job may write there at the same time: to read a file that it retires meanwhile raises.
    """

    is_written = False

    def _take_folder(self, timeout_s: float) -> SeenFolder:
        return SeenFolder(self.root, self.session_id, self.rank)

    def _try_out(self) -> None:
        """Do nothing: nothing is written."""

    def list_stored(self) -> list[Stored]:
        return super().list_stored() if self._session.is_dir() else []

    def _write_options(self, slot: Slot) -> NoReturn:
        raise CheckpointingException(f"{slot.identity} cannot be saved: {self.root} is only read")

    def _quarantine(self, path: Path, problem: Problem) -> None:
        logger.warning("%s stays as it is, and is not used: %s", path, problem)


class MemoryStore(DirectoryStore):
    """Store in a directory in shared memory."""

    in_place = True
