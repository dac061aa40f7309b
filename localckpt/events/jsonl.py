"""Record of a rank in files of JSON lines, which survives the kill of its process.

Each event is one line, appended by one ``write``: what was written stays when the process is
killed, and only the last line of a file can be torn.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from localckpt.errors import CheckpointingException, StorageError
from localckpt.events.event import Event
from localckpt.own_folders import make_own_folders

logger = logging.getLogger(__name__)

_ENDING = ".jsonl"
# A record that failed, as on a full disk, is tried again after a pause, which doubles.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# A job that fails at once, again and again, leaves files that are nearly empty.
_MOST_FILES = 1000
# No event is as long; who writes to the folder may be a stranger.
_LONGEST_NBYTES = 1 << 20


class JsonLines:
    """Sink that appends events to files of one rank.

    A file ends at ``file_nbytes``. The next one begins with the run's first event again, so each
    file says of which run it is. The oldest files of the rank, of earlier runs too, are removed.
    Where it cannot write, it tries again with later events, and warns of how many are lost.

    Args:
        folder: Directory of the files, which ranks and runs may share; made when it is not there.
        file_nbytes: Size at which a file ends.
        files: Number of files of that size that a rank's records may take.
        below: Name of a directory in it, for the files of this rank; empty for none.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        file_nbytes: int = 4 << 20,
        files: int = 8,
        below: str = "",
    ) -> None:
        if file_nbytes < 1 or files < 1:
            raise CheckpointingException(
                f"JsonLines(file_nbytes={file_nbytes}, files={files}): both must be above 0"
            )
        self._named, self._below = Path(folder).absolute(), [below] if below else []
        self._folder = self._named.joinpath(*self._below)
        self._file_nbytes = file_nbytes
        self._files = files
        self._first: Event | None = None
        self._index = 0
        self._file: int | None = None
        self._nbytes = 0
        self._lost = 0
        self._pause_s = self._again_at = 0.0

    def write(self, event: Event) -> None:
        """Append one event; while that fails, count the events that are lost, and try again."""
        if self._first is None:
            make_own_folders(self._named, *self._below, shares=True)
            self._first = event
        if time.monotonic() < self._again_at:
            self._lost += 1
            return
        try:
            self._append(event)
        except (OSError, StorageError) as error:
            # Nothing may come behind a torn line: the next event begins another file.
            self._end_file()
            self._lost += 1
            if not self._pause_s:
                logger.warning(
                    "the record of events takes none, and is tried again meanwhile: %s", error
                )
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._again_at = time.monotonic() + self._pause_s
        else:
            self._note_lost()
            self._pause_s = 0.0

    def _append(self, event: Event) -> None:
        if self._nbytes >= self._file_nbytes:
            self._end_file()
        if self._file is None:
            assert self._first is not None, "write() came before"
            self._file = self._next_file(self._first)
            if self._first is not event:
                self._append_line(self._file, self._first)
        self._append_line(self._file, event)

    def _append_line(self, file: int, event: Event) -> None:
        line = json.dumps(event.to_json(), separators=(",", ":")).encode() + b"\n"
        written = os.write(file, line)
        self._nbytes += written
        if written != len(line):
            raise StorageError(
                f"{self._folder} took {written} of {len(line)} bytes of an event: is it full?"
            )

    def flush(self) -> None:
        """Do nothing: every line was written by itself."""

    def close(self) -> None:
        """Close the file, and say how many events are lost."""
        self._note_lost()
        self._end_file()

    def _note_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            logger.warning("the record of events in %s lacks %d events", self._folder, lost)

    def _end_file(self) -> None:
        if (file := self._file) is not None:
            self._file, self._nbytes = None, 0
            os.close(file)

    def _next_file(self, first: Event) -> int:
        rank = f"rank{first.rank:05d}."
        self._remove_oldest(rank)
        # In the order of the names, the files of a rank are in the order of time.
        began = datetime.fromtimestamp(first.start, UTC).strftime("%Y%m%dT%H%M%S")
        path = self._folder / f"{rank}{began}.{first.run}.{self._index:04d}{_ENDING}"
        self._index += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(path, flags, 0o600)

    def _remove_oldest(self, rank: str) -> None:
        left = (self._files - 1) * self._file_nbytes
        newest_first = sorted(self._folder.glob(f"{rank}*{_ENDING}"), reverse=True)
        for number, path in enumerate(newest_first, 1):
            # Somebody else may remove them, too.
            with suppress(FileNotFoundError):
                left -= path.stat().st_size
                if left < 0 or number >= _MOST_FILES:
                    path.unlink()


def read_events(paths: Iterable[str | os.PathLike[str]]) -> list[Event]:
    """Read the events of files, and of directories of ``.jsonl`` files, in their order, each once.

    The torn last line of a process that was killed is left out. Raises StorageError, and
    CheckpointingException for a line that is no event, or of a newer schema.
    """
    found: dict[tuple[str, int], Event] = {}
    for path in map(Path, paths):
        try:
            is_folder = path.is_dir()
            for file in sorted(path.rglob(f"*{_ENDING}")) if is_folder else [path]:
                # A job that runs may have removed its oldest file since.
                with suppress(FileNotFoundError) if is_folder else nullcontext():
                    for event in _read(file):
                        found.setdefault((event.run, event.number), event)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
    return sorted(found.values(), key=lambda event: (event.start, event.run, event.number))


def _read(file: Path) -> Iterator[Event]:
    with file.open("rb") as stream:
        for number in count(1):
            line = stream.readline(_LONGEST_NBYTES)
            if line.endswith(b"\n"):
                yield _event(line, file, number)
            elif len(line) == _LONGEST_NBYTES:
                raise CheckpointingException(
                    f"{file}, line {number}: no event takes {_LONGEST_NBYTES} bytes"
                )
            else:
                # The end, or a torn line.
                return


def _event(line: bytes, file: Path, number: int) -> Event:
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise CheckpointingException("this is no event of localckpt: it is no object")
        return Event.from_json(fields)
    except (ValueError, RecursionError, CheckpointingException) as error:
        raise CheckpointingException(f"{file}, line {number}: {error}") from error
