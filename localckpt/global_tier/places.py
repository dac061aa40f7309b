"""Places on shared storage: files and folders by their names, and all that is done with them.

A place is in a directory or in an object store. Nothing else of this room calls a file system, but
for the lock of a directory.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PosixPath
from typing import TypeAlias

from localckpt.global_tier.objects import ObjectPlace, ObjectSource, Pieces, Retries, open_place
from localckpt.memory.host_memory import PAGE_NBYTES, map_memory
from localckpt.own_folders import file_mode, folder_mode
from localckpt.storage.files import FileSource, open_owned
from localckpt.storage.names import NOTES_NAME, shared_path
from localckpt.storage.notes import Notes, NotesFile, parsed
from localckpt.storage.write import replace_file, sync_folder, write_range


class FilePlace(PosixPath):
    """Place in a directory, of a file system with rename, fsync and locks.

    The methods here, which raise OSError, are those of all places.
    """

    def names(self) -> list[str]:
        """List a folder; empty if it is not there."""
        return sorted(os.listdir(self)) if self.is_dir() else []

    def size(self) -> int | None:
        """Bytes of a file, of a folder any number; ``None`` if it is not there."""
        # ``Path.exists`` of some versions of Python takes an error for no.
        try:
            return self.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those files of a folder that are there."""
        found = {name: (self / name).size() for name in names}
        return {name: nbytes for name, nbytes in found.items() if nbytes is not None}

    def modified_at(self) -> float:
        return self.stat().st_mtime

    def read(self) -> bytes:
        return self.read_bytes()

    def source(self) -> FileSource:
        return FileSource(self)

    def write(self, pieces: Pieces, *, sync: bool, retries: Retries | None) -> None:
        """Write a file in place of what is there, durable with ``sync``; after an error none is.

        Each piece begins on a page of memory, and is not needed any more when the next is asked
        for. All but the last are whole pages.
        """
        try:
            self._write(pieces(), sync, os.O_DIRECT)
        except OSError as error:
            # Who does not take O_DIRECT says so when the file is opened, or at a write.
            if error.errno != errno.EINVAL:
                raise
            self._write(pieces(), sync, 0)

    def put(self, data: bytes, retries: Retries | None = None) -> None:
        """Write a small file durably, which is there whole or as it was before."""
        # The umask says who may read it.
        replace_file(self, data, file_mode(self.parent))
        sync_folder(self.parent)

    def make(self) -> None:
        """Make a folder, and those above it."""
        # To stay there after the power failed.
        missing = [path for path in (self, *self.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(folder_mode(path.parent), exist_ok=True)
            sync_folder(path.parent)

    def sync(self) -> None:
        """Make the names in a folder durable."""
        sync_folder(self)

    def remove(self) -> None:
        """Remove a file, or a folder with all that is in it; nothing if it is not there."""
        if self.is_symlink() or not self.is_dir():
            # Nothing of what a link leads to.
            self.unlink(missing_ok=True)
        else:
            shutil.rmtree(self)

    def _write(self, pieces: Iterable[memoryview], sync: bool, flag: int) -> None:
        self.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flag
        # The umask says who may read it: it outlives the job, and others load it.
        file = open_owned(self, flags, file_mode(self.parent))
        try:
            with file:
                fd, direct = file.fileno(), bool(flag)
                end, rest = 0, b""
                for piece in pieces:
                    whole = len(piece) // PAGE_NBYTES * PAGE_NBYTES
                    write_range(fd, piece, 0, whole, direct=direct, base=end)
                    end += whole
                    rest = bytes(piece[whole:])
                if rest:
                    # With O_DIRECT the last page is written whole, and cut off.
                    page = map_memory(PAGE_NBYTES)
                    page[: len(rest)] = rest
                    write_range(fd, page, 0, len(rest), direct=direct, base=end)
                os.ftruncate(fd, end + len(rest))
                if sync:
                    os.fsync(fd)
        except BaseException:
            self.unlink(missing_ok=True)
            raise


Place: TypeAlias = FilePlace | ObjectPlace
OpenedFile: TypeAlias = FileSource | ObjectSource


def place_of(given: str | os.PathLike[str] | Place) -> Place:
    """Return the place that a user names by a path or a URL; raises StorageError."""
    if isinstance(given, ObjectPlace):
        return given
    path = shared_path(given)
    return open_place(path) if isinstance(path, str) else FilePlace(path)


def notes_in(folder: Place) -> NotesFile:
    """Return the notes on trust of a folder."""
    return NotesFile(folder) if isinstance(folder, FilePlace) else _PlaceNotes(folder)


class _PlaceNotes(NotesFile):
    """Notes in a file that is written as a whole, wherever it is."""

    def __init__(self, folder: Place) -> None:
        super().__init__(Path(NOTES_NAME))
        self._place: Place = folder / NOTES_NAME

    def _read(self) -> Notes:
        is_there = self._place.size() is not None
        return parsed(self._place.read().decode(errors="replace") if is_there else "", self._place)

    def _write(self, data: bytes | None) -> None:
        if data is None:
            self._place.remove()
        else:
            self._place.put(data)
