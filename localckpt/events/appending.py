"""Files of one run of one rank that only grow, by one ``write`` each time."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from localckpt.errors import StorageError
from localckpt.events.event import Event

__all__ = ["AppendedFile", "file_name", "file_prefix"]


class AppendedFile:
    """A new file, to which whole lines are appended; raises OSError if it cannot be made."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, mode)
        self.nbytes = 0

    def append(self, lines: bytes) -> None:
        """Append lines; raises OSError.

        StorageError: they were not written to their end, so nothing may come behind a torn line.
        """
        written = os.write(self._file, lines)
        self.nbytes += written
        if written != len(lines):
            raise StorageError(f"{self._path} took {written} of {len(lines)} bytes: is it full?")

    def close(self) -> None:
        """Close the file. To be called once."""
        os.close(self._file)


def file_name(first: Event) -> str:
    """Beginning of the names of a run's files, from an event of it that is the same for all.

    In the order of the names, the files of a rank are in the order of time.
    """
    began = datetime.fromtimestamp(first.start, UTC).strftime("%Y%m%dT%H%M%S")
    return f"{file_prefix(first.rank)}{began}.{first.run}"


def file_prefix(rank: int) -> str:
    """Beginning of the names of a rank's files."""
    return f"rank{rank:05d}."
