"""Notes of a rank's folder on trust in checkpoints: small files beside the shards.

Each counted start of the job is one file, so that a signal handler can remove it by one system
call. It names its process: as long as that lives, the start is not in vain. All marks are in one
file, and all drained checkpoints in another. The metric of each checkpoint is one file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from localckpt.errors import MismatchError
from localckpt.ids import Checkpoint
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import DRAINED_NAME, MARKS_NAME, MEASURED_PREFIX, RESUME_PREFIX
from localckpt.storage.owner import Owner, Running, read_note, write_note
from localckpt.storage.write import sync_folder
from localckpt.trust import Drained, Mark, Measured, Note, Resumes, Trust, parse_note

__all__ = ["TrustNotes"]

_RESUME = re.compile(rf"{re.escape(RESUME_PREFIX)}[\d.]+")
_MEASURED = re.compile(rf"{re.escape(MEASURED_PREFIX)}[\d.]+")


class TrustNotes:
    """Notes in one folder.

    Args:
        folder: The folder, which may be missing until the first note is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Trust:
        """Read all notes, and ignore damaged ones; raises StorageError."""
        with storage_errors("read", self._folder):
            resumes = _counted(_resumes_in(self._folder).values())
            marks, drained = _marks_in(self._folder), _drained_in(self._folder)
            return Trust.of([*resumes, *marks, *drained, *_measured_in(self._folder).values()])

    def note_resume(self, resumes: Resumes) -> None:
        """Note durably that the job resumes from a checkpoint; raises StorageError."""
        with storage_errors("write to", self._folder):
            note = [*resumes.to_json(), str(Owner.me())]
            write_note(_resume_path(self._folder, resumes), json.dumps(note))
            sync_folder(self._folder)

    def take_back_resume(self, resumes: Resumes) -> None:
        """Remove one note of :meth:`note_resume` by one system call; raises StorageError."""
        with storage_errors("clean up", self._folder):
            _resume_path(self._folder, resumes).unlink(missing_ok=True)

    def forget_resumes(self) -> None:
        """Remove all notes of :meth:`note_resume`; raises StorageError."""
        with storage_errors("clean up", self._folder):
            for path in _paths(self._folder, _RESUME):
                path.unlink(missing_ok=True)

    def note_mark(self, mark: Mark) -> None:
        """Note a mark durably, and replace another one of its checkpoint; raises StorageError."""
        with storage_errors("write to", self._folder):
            others = [m for m in _marks_in(self._folder) if m.checkpoint != mark.checkpoint]
            _write_lines(self._folder, MARKS_NAME, [*others, mark])

    def note_drained(self, drained: Collection[Checkpoint]) -> None:
        """Note durably which checkpoints were drained, and no others; raises StorageError."""
        with storage_errors("write to", self._folder):
            _write_lines(
                self._folder, DRAINED_NAME, [Drained(checkpoint) for checkpoint in drained]
            )

    def note_measured(self, measured: Measured) -> None:
        """Note the metric of a checkpoint durably, unless it is noted; raises StorageError."""
        path = self._folder / f"{MEASURED_PREFIX}{_numbers(measured.checkpoint)}"
        with storage_errors("write to", self._folder):
            if not path.exists():
                write_note(path, json.dumps(measured.to_json()))
                sync_folder(self._folder)

    def forget_measured(self, is_over: Callable[[Checkpoint], bool]) -> None:
        """Remove the metrics of checkpoints that are over; raises StorageError."""
        with storage_errors("clean up", self._folder):
            for path, note in _measured_in(self._folder).items():
                if is_over(note.checkpoint):
                    path.unlink(missing_ok=True)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Remove all notes on a checkpoint; raises StorageError."""
        with storage_errors("clean up", self._folder):
            for path, (resumes, _) in _resumes_in(self._folder).items():
                if resumes.checkpoint == checkpoint:
                    path.unlink(missing_ok=True)
            marks = _marks_in(self._folder)
            kept = [mark for mark in marks if mark.checkpoint != checkpoint]
            if kept != marks:
                _write_lines(self._folder, MARKS_NAME, kept)
            drained = _drained_in(self._folder)
            left = [note for note in drained if note.checkpoint != checkpoint]
            if left != drained:
                _write_lines(self._folder, DRAINED_NAME, left)
        self.forget_measured(checkpoint.__eq__)


def _resume_path(folder: Path, resumes: Resumes) -> Path:
    return folder / f"{RESUME_PREFIX}{_numbers(resumes.checkpoint)}.{resumes.count}"


def _numbers(checkpoint: Checkpoint) -> str:
    epoch, sequence = checkpoint.generation
    return f"{checkpoint.iteration}.{epoch}.{sequence}.{checkpoint.world_size}"


def _counted(noted: Iterable[tuple[Resumes, Owner | None]]) -> list[Resumes]:
    """Count the starts that are over: one process may resume from a checkpoint again and again."""
    running = Running()
    ended = (replace(note, count=note.count - (owner in running)) for note, owner in noted)
    return [note for note in ended if note.count > 0]


def _resumes_in(folder: Path) -> dict[Path, tuple[Resumes, Owner | None]]:
    found: dict[Path, tuple[Resumes, Owner | None]] = {}
    for path in _paths(folder, _RESUME):
        with suppress(MismatchError, ValueError, RecursionError, TypeError):
            *fields, owner = json.loads(read_note(path))
            note = parse_note(fields)
            if isinstance(note, Resumes):
                found[path] = note, Owner.parse(str(owner))
    return found


def _measured_in(folder: Path) -> dict[Path, Measured]:
    notes = {path: _parsed(read_note(path)) for path in _paths(folder, _MEASURED)}
    return {path: note for path, note in notes.items() if isinstance(note, Measured)}


def _paths(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _write_lines(folder: Path, name: str, notes: Sequence[Mark | Drained]) -> None:
    in_order = sorted(notes, key=lambda note: note.checkpoint.iteration)
    lines = [json.dumps(note.to_json()) for note in in_order]
    # Drop the notes of the lowest iterations, since a file is read up to one page.
    while len("\n".join(lines)) > PAGE_NBYTES:
        del lines[0]
    write_note(folder / name, "\n".join(lines))
    sync_folder(folder)


def _marks_in(folder: Path) -> list[Mark]:
    notes = map(_parsed, read_note(folder / MARKS_NAME).splitlines())
    return [note for note in notes if isinstance(note, Mark)]


def _drained_in(folder: Path) -> list[Drained]:
    notes = map(_parsed, read_note(folder / DRAINED_NAME).splitlines())
    return [note for note in notes if isinstance(note, Drained)]


def _parsed(text: str) -> Note | None:
    try:
        return parse_note(json.loads(text))
    except (MismatchError, ValueError, RecursionError):
        return None
