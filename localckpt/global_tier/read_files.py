"""Reads of runs of bytes of data files, several at a time, each block verified, within a budget."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from localckpt.errors import CorruptShardError
from localckpt.global_tier.trailer import FileIdentity, Trailer, read_trailer
from localckpt.memory.copying import Copier
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher
from localckpt.memory.host_memory import PAGE_NBYTES, round_up
from localckpt.storage.buffers import PrivateBuffer
from localckpt.storage.failures import storage_errors
from localckpt.storage.open_file import OpenFile, close_read
from localckpt.threads import run_interruptibly

__all__ = ["READ_NBYTES", "FileReads", "Run"]

READ_NBYTES = 4 << 20
"""Runs between two multiples of it are best: whole blocks, and few enough for the cache."""

# A disk is busy with 4 requests under way, and half of these threads are copying and hashing.
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes ``[start, stop)`` of a file, and who takes them.

    ``use`` is called with them, in any thread; they are gone when it returns.
    """

    start: int
    stop: int
    use: Callable[[memoryview], None]


@dataclass(slots=True)
class _Budget:
    """Bytes that are in flight; more than the limit only if it is a single run."""

    limit: int
    used: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        with self.changed:
            self.changed.wait_for(lambda: not self.used or self.used + nbytes <= self.limit)
            self.used += nbytes
        try:
            yield
        finally:
            with self.changed:
                self.used -= nbytes
                self.changed.notify_all()


class FileReads:
    """Reads of one load.

    Args:
        folder: Where the files are.
        concurrent_bytes: How many bytes are in flight at most; a larger run goes alone.
        save_id: The save that all files must belong to; ``None`` for files of any writer, which
            are verified if they can be.
    """

    def __init__(self, folder: Path, concurrent_bytes: int, save_id: str | None) -> None:
        self._folder = folder
        self._save_id = save_id
        self._budget = _Budget(concurrent_bytes)
        self._waiting: list[tuple[_DataFile, Run]] = []
        self._lock = threading.Lock()
        self._is_stopped = False
        self.nbytes = 0
        """Bytes that were read."""

    def add(self, name: str, runs: Iterable[Run]) -> None:
        """Have these runs of a file read; in the order of their offsets it goes fastest."""
        file = _DataFile(self._folder / name, self._save_id)
        for run in runs:
            file.pending += 1
            self._waiting.append((file, run))

    def carry_out(self) -> None:
        """Read all that was added since the last time; the caller's thread takes part.

        Raises:
            CorruptShardError: A file is damaged, or of another save.
            StorageError: A file cannot be read.
        """
        waiting, self._waiting = self._waiting, []
        try:
            run_interruptibly(lambda: Copier(_THREADS).share(waiting, self._work), self._stop)
        finally:
            for file, _ in waiting:
                file.close()

    def _stop(self) -> None:
        self._is_stopped = True

    def _work(self, left: Iterator[tuple[_DataFile, Run]]) -> None:
        with contextlib.closing(PrivateBuffer(READ_NBYTES + 2 * BLOCK_NBYTES)) as scratch:
            for file, run in left:
                if self._is_stopped:
                    break
                self._read(file, run, scratch.view)
                with self._lock:
                    file.pending -= 1
                if not file.pending:
                    file.close()

    def _read(self, file: _DataFile, run: Run, scratch: memoryview) -> None:
        file.open()
        start, stop = file.span(run)
        nbytes = round_up(stop - start, PAGE_NBYTES)
        with self._budget.taken(nbytes), contextlib.ExitStack() as own:
            if nbytes > len(scratch):
                with storage_errors("read", file.path):
                    scratch = own.enter_context(contextlib.closing(PrivateBuffer(nbytes))).view
            file.read(start, stop, scratch[:nbytes])
            run.use(scratch[run.start - start : run.stop - start])
        with self._lock:
            self.nbytes += stop - start


class _DataFile:
    """One file while runs of it are waiting."""

    def __init__(self, path: Path, save_id: str | None) -> None:
        self.path = path
        self.pending = 0
        self._save_id = save_id
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._direct: io.FileIO | None = None
        self._trailer: Trailer | None = None
        self._hasher: BlockHasher | None = None

    def open(self) -> None:
        with self._lock:
            if self._file is not None:
                return
            file = OpenFile(self.path)
            try:
                with storage_errors("read", self.path):
                    self._trailer = self._read_trailer(file)
                    self._direct = None if file.is_cached() else file.open_direct()
            except BaseException:
                file.close()
                raise
            if self._trailer is not None:
                identity = FileIdentity(self.path.name, self._trailer.save_id)
                self._hasher = BlockHasher(identity)
            self._file = file

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            if self._direct is not None:
                close_read(self._direct)
            self._file = self._direct = None

    def span(self, run: Run) -> tuple[int, int]:
        """Return the bytes to read for a run: whole blocks, if they are verified."""
        if self._trailer is None:
            return run.start // PAGE_NBYTES * PAGE_NBYTES, run.stop
        if run.stop > self._trailer.covered_nbytes:
            raise CorruptShardError(
                f"{self.path} holds {self._trailer.covered_nbytes} bytes of values, and those from "
                f"{run.start} to {run.stop} are wanted"
            )
        start = run.start // BLOCK_NBYTES * BLOCK_NBYTES
        return start, min(round_up(run.stop, BLOCK_NBYTES), self._trailer.covered_nbytes)

    def read(self, start: int, stop: int, view: memoryview) -> None:
        """Read and verify ``[start, stop)`` into whole pages."""
        assert self._file is not None
        with storage_errors("read", self.path):
            wanted = stop - start
            if self._direct is None:
                self._file.read_into(start, view[:wanted])
            else:
                self._file.read_into(start, view, wanted, fd=self._direct.fileno())
        if self._trailer is not None:
            assert self._hasher is not None
            digests = memoryview(self._trailer.digests)
            self._hasher.check(start, [view[:wanted]], digests)

    def _read_trailer(self, file: OpenFile) -> Trailer | None:
        trailer = read_trailer(file)
        if trailer is None:
            if self._save_id is not None:
                raise CorruptShardError(
                    f"{self.path} is cut short or damaged: it does not end as it was written"
                )
            return None
        if self._save_id not in (None, trailer.save_id):
            raise CorruptShardError(f"{self.path} belongs to another save than its checkpoint")
        return trailer
