"""Tables and JSON of roots on shared storage, for the commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localckpt.cli.output import age, counted, say, say_table, size
from localckpt.global_tier.catalog import SharedCheckpoint, SharedSession

__all__ = ["SharedListing", "look"]


@dataclass(frozen=True, slots=True)
class SharedListing:
    """One session of a root."""

    session: SharedSession
    checkpoints: tuple[SharedCheckpoint, ...]
    leftovers: int

    @property
    def loads(self) -> SharedCheckpoint | None:
        """The checkpoint that a restart loads from it, as far as records tell."""
        return next((known for known in self.checkpoints if known.problem is None), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added."""
        return {
            "root": str(self.session.root),
            "loads": None if self.loads is None else _to_json(self.loads),
            "checkpoints": [_to_json(c) for c in self.checkpoints if c.problem is None],
            "uncounted": [
                {"path": str(c.folder.path), "why": str(c.problem)}
                for c in self.checkpoints
                if c.problem is not None
            ],
            "leftovers": self.leftovers,
        }

    def say(self) -> None:
        """Print the checkpoints as a table, and what is not counted."""
        rows = [
            (
                str(known.folder.iteration),
                str(known.folder.epoch),
                str(known.record.world_size),
                str(len(known.record.files)),
                size(known.nbytes),
                age(known.saved_at),
            )
            for known in self.checkpoints
            if known.problem is None and known.record is not None
        ]
        names = ["iteration", "epoch", "ranks", "files", "size", "age"]
        if rows:
            say_table(names, rows, right=names)
        else:
            say("no checkpoint")
        for known in self.checkpoints:
            if known.problem is not None:
                say(f"not counted: {known.folder.path}: {known.problem}", red=True)
        if self.leftovers:
            say(
                f"{counted(self.leftovers, 'unfinished save')}: under way, or cut off; the job's "
                f"next save removes what was cut off"
            )


def look(session: SharedSession) -> SharedListing:
    """List one session.

    Raises:
        StorageError: It cannot be read.
    """
    return SharedListing(session, tuple(session.checkpoints()), len(session.leftovers()))


def _to_json(known: SharedCheckpoint) -> dict[str, Any]:
    return {
        "path": str(known.folder.path),
        "iteration": known.folder.iteration,
        "epoch": known.folder.epoch,
        "world_size": None if known.record is None else known.record.world_size,
        "files": 0 if known.record is None else len(known.record.files),
        "nbytes": known.nbytes,
        "saved_at": known.saved_at,
    }
