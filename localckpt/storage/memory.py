"""Store in shared memory, which outlives the process.

An image is staged straight into the file that will hold it, so a commit is a hash and a rename.
Retired files stay mapped, and later saves are staged into them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from localckpt.errors import CheckpointingException, StorageError
from localckpt.ids import Piece, ShardIdentity
from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.memory.limits import memory_limits
from localckpt.storage.buffers import Buffer, check_memory, map_file, wait_until_free
from localckpt.storage.directory import DirectoryStore, one_at_a_time
from localckpt.storage.failures import storage_errors
from localckpt.storage.files import open_owned
from localckpt.storage.names import DIRTY, RECYCLED
from localckpt.storage.preflight import IN_MEMORY, MemoryNeeds, file_system, try_out
from localckpt.storage.store import Slot

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_FULL = "it is full: free space, keep fewer checkpoints, or enlarge it (shared memory)"


def default_root() -> Path:
    """Return the default directory of this user's store on this node."""
    return Path(f"/dev/shm/localckpt-{os.getuid()}")


def default_session() -> str:
    """Name a session in :func:`default_root`, which all programs of this user share on this node.

    The name stands for the main script (or the code of ``python -c``), its arguments and the
    working directory, so two programs never meet, and a restart finds its checkpoints. A program
    without a script, as a notebook, is a CheckpointingException.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    command = sys.orig_argv[1:]
    if script is not None:
        path = Path(script).absolute()
        label = path.parent.name if path.stem == "__main__" else path.stem
        program = [str(path), *sys.argv[1:]]
    elif "-c" in command and "--multiprocessing-fork" not in command:
        label, program = "command", command[command.index("-c") :]
    else:
        raise CheckpointingException(
            f"the checkpoints of this program would be in {default_root()}, which all programs of "
            f"this user share, and it has no script by which they could be named (as a notebook or "
            f"a prompt): give session_id=. Nothing was made"
        )
    place = json.dumps([*program, os.getcwd()])
    return f"{label}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


class MemoryStore(DirectoryStore):
    """Store in a directory in shared memory, which keeps at most ``keep_last`` checkpoints."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        session_id: str,
        rank: int,
        timeout_s: float,
        *,
        num_buffers: int = 2,
        keep_last: int = 1,
    ) -> None:
        super().__init__(root, session_id, rank, timeout_s, num_buffers=num_buffers)
        self._keep_last = keep_last
        # Mapped files: dirty and committed ones by identity, recycled ones by file name.
        self._staged: dict[ShardIdentity, _MappedFile] = {}
        self._recycled: dict[str, _MappedFile] = {}

    def _try_out(self) -> None:
        try_out(self.folder, DIRTY)
        if (kind := file_system(self.folder)) not in IN_MEMORY:
            logger.warning("%s is on %s, which is not memory", self.root, kind or "a disk")

    def _take_memory(self, slot: Slot, timeout_s: float) -> Buffer:
        if not slot.is_kept:
            return super()._take_memory(slot, timeout_s)
        if slot.identity.checkpoint not in self.repaired:
            wait_until_free(lambda: not self._is_busy(slot.identity.piece), timeout_s)
        self._restore()
        return self._mapped(slot)

    @one_at_a_time
    def _mapped(self, slot: Slot) -> Buffer:
        identity, nbytes = slot.identity, slot.nbytes
        path = self._dirty(identity)
        with storage_errors("recycle a file in", self.folder):
            claimed = self._claim_recycled(identity, nbytes)
        buffer = self._recycled.pop(claimed, None) if claimed is not None else None
        try:
            if buffer is None:
                buffer = _MappedFile(path, nbytes, create=claimed is None)
            else:
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

    @one_at_a_time
    def prepare(self, piece: Piece, nbytes: int, gpu: torch.device | None = None) -> None:
        self._sizes[piece] = nbytes
        while len(self.images()) < (self._keep_last + 1) * len(self._sizes):
            ready = self.folder / f"ahead.{secrets.token_hex(4)}{RECYCLED}"
            self._recycled[ready.name] = buffer = _MappedFile(ready, nbytes, create=True)
            if gpu is not None:
                buffer.pin(gpu)

    def is_busy(self) -> bool:
        return any(map(self._is_busy, self.image_nbytes))

    @one_at_a_time
    def _is_busy(self, piece: Piece) -> bool:
        own = (i for i in self._staged if i.piece == piece and i.checkpoint not in self.repaired)
        return sum(self._staged[identity].in_use for identity in own) >= self.num_buffers

    def memory_needs(self, nbytes: int) -> MemoryNeeds:
        status = [path.lstat() for path in self.images()]
        had_nbytes = sum(file.st_blocks * 512 for file in status)
        return MemoryNeeds(nbytes, self.num_buffers, self._keep_last, had_nbytes, memory_limits())

    def _write_options(self, slot: Slot) -> dict[str, bool]:
        return {"in_place": True}

    def _give_back(self, slot: Slot, *, was_unfinished: bool) -> None:
        if not slot.is_kept:
            self._drop_memory(slot)
        elif was_unfinished and (buffer := slot.buffer) is not None:
            self._staged.pop(slot.identity, None)
            buffer.close()

    def _forget_files(self) -> None:
        super()._forget_files()
        # Those of saves under way are given back with their slots.
        kept = {slot.identity for slot in self._slots}
        gone = {i: buffer for i, buffer in self._staged.items() if i not in kept}
        self._staged = {i: buffer for i, buffer in self._staged.items() if i in kept}
        for buffer in (*gone.values(), *self._recycled.values()):
            buffer.close()
        self._recycled.clear()

    @one_at_a_time
    def _drop_memory(self, slot: Slot) -> None:
        if not slot.is_kept:
            super()._drop_memory(slot)
            return
        # By identity, since an interrupt may have come before slot.take() recorded the buffer.
        if (buffer := self._staged.pop(slot.identity, None)) is not None:
            buffer.close()
        with storage_errors("remove", self._dirty(slot.identity)):
            self._dirty(slot.identity).unlink(missing_ok=True)
            self._path(slot.identity).unlink(missing_ok=True)

    def close(self) -> None:
        if self._process != os.getpid():
            return
        for buffer in (*self._staged.values(), *self._recycled.values()):
            buffer.close()
        self._staged.clear()
        self._recycled.clear()
        super().close()

    def _was_recycled(self, identity: ShardIdentity, recycled: Path) -> None:
        buffer = self._staged.pop(identity, None)
        if buffer is not None and buffer.readers:
            # Its readers go on with the mapped pages, which no later save may overwrite.
            buffer.close()
            recycled.unlink(missing_ok=True)
        elif buffer is not None:
            self._recycled[recycled.name] = buffer


class _MappedFile(Buffer):
    """Mapped file of a shard in shared memory. Closing the buffer keeps the file."""

    _path: Path
    _nbytes: int
    _map: memoryview | None = None

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        super().__init__()
        self._open(path, nbytes, create=create)

    @property
    def in_use(self) -> bool:
        # A commit, in any process, renames the file from this name.
        with storage_errors("look at", self._path):
            return self._path.exists()

    def give_back(self) -> None:
        """Do nothing: the commit's rename marks the buffer as free."""

    def resize(self, path: Path, nbytes: int) -> None:
        """Adapt the buffer to another image: a new path, and a new size."""
        if self._map is None or nbytes > len(self._map):
            self.close()
            self._open(path, nbytes, create=False)
            return
        before = self._nbytes
        if nbytes != before:
            # CUDA would go on to copy into the pages that the file had when it was pinned.
            self._unpin()
        self._path, self._nbytes = path, nbytes
        with (
            storage_errors("reserve shared memory in", path, _FULL),
            open_owned(path, os.O_RDWR | os.O_NOFOLLOW) as file,
        ):
            if nbytes > before:
                # Only the new range, since the kernel visits every page of the range.
                os.posix_fallocate(file.fileno(), before, nbytes - before)
            os.ftruncate(file.fileno(), nbytes)
        self._view = self._map[:nbytes]

    def close(self) -> None:
        self._unpin()
        self._view = memoryview(b"")
        # The pages are unmapped with the last view, even if this object lives longer.
        self._map = None

    def _open(self, path: Path, nbytes: int, *, create: bool) -> None:
        if create:
            check_memory(nbytes)
        else:
            check_memory(nbytes - path.stat().st_size)
        self._path, self._nbytes = path, nbytes
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        with storage_errors("map shared memory in", path, _FULL), open_owned(path, flags) as file:
            try:
                # Whole pages, so that a slightly larger image fits the next time.
                mapped = map_file(file.fileno(), round_up(nbytes, PAGE_NBYTES))
                self._map, self._view = mapped, mapped[:nbytes]
                os.ftruncate(file.fileno(), nbytes)
            except BaseException:
                if create:
                    path.unlink(missing_ok=True)
                raise
