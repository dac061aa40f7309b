"""Directories that play nodes, and what happens to nodes and to the files on them."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.campaign.job import SESSION

__all__ = ["Node", "damage", "swap"]


class Node:
    """One node of the job. What it holds is lost, comes back, or is in the way.

    Args:
        name: Its name in messages.
        home: Directory for what it holds.
        aside: Directory for what is away.
        can_fill: Whether ``home`` is a small file system of its own.
    """

    def __init__(self, name: str, home: Path, aside: Path, can_fill: bool = False) -> None:
        self.name = name
        self.can_fill = can_fill
        self._home = home
        self._away = aside / f"{name}-away"
        self._kept = aside / f"{name}-kept"
        self._number = 0
        self.store = self._fresh()

    @property
    def is_away(self) -> bool:
        """Whether another node stands in for it."""
        return self._away.exists()

    @property
    def is_kept(self) -> bool:
        """Whether there is a copy of how it was."""
        return self._kept.exists()

    def lose(self) -> None:
        """The node is gone, and replaced by an empty one."""
        shutil.rmtree(self.store)
        self.store = self._fresh()

    def send_away(self) -> None:
        """An empty node stands in, until it comes back."""
        shutil.move(self.store, self._away)
        self.store = self._fresh()

    def come_back(self) -> None:
        self._replace_by(self._away)

    def keep(self) -> None:
        """Remember how it is."""
        if self.is_kept:
            shutil.rmtree(self._kept)
        shutil.copytree(self.store, self._kept)

    def go_back(self) -> None:
        """It is again as it was when it was kept."""
        self._replace_by(self._kept)

    @contextmanager
    def full(self) -> Iterator[None]:
        """There is no room on it."""
        ballast = self._home / "ballast"
        try:
            with open(ballast, "wb") as file:
                # Somebody may be writing at the same time.
                while (status := os.statvfs(self._home)).f_bavail:
                    end, nbytes = file.seek(0, os.SEEK_END), status.f_bavail * status.f_frsize
                    with suppress(OSError):
                        os.posix_fallocate(file.fileno(), end, nbytes)
            yield
        finally:
            ballast.unlink()

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Its directory is not where it was, and something else is."""
        session = self.store / f"session-{SESSION}"
        hidden = session.with_name("hidden")
        session.rename(hidden)
        session.write_text("in the way")
        try:
            yield
        finally:
            session.unlink()
            hidden.rename(session)

    def clean_up(self) -> None:
        for path in (self.store, self._away, self._kept):
            shutil.rmtree(path, ignore_errors=True)

    def _fresh(self) -> Path:
        self._number += 1
        store = self._home / f"{self.name}.{self._number}"
        store.mkdir()
        return store

    def _replace_by(self, other: Path) -> None:
        shutil.rmtree(self.store)
        self._number += 1
        self.store = self._home / f"{self.name}.{self._number}"
        shutil.move(other, self.store)


def damage(path: Path, how: str, where: float) -> None:
    """Spoil a file: ``flip`` a bit, overwrite a part with ``zeros``, or ``cut`` it off.

    Args:
        where: The place, as a fraction of the file.
    """
    size = path.stat().st_size
    position = min(int(where * size), size - 1)
    if how == "cut":
        os.truncate(path, position)
        return
    # In place: whoever has mapped the file must not find it shorter.
    with open(path, "r+b") as file:
        file.seek(position)
        found = file.read(1 if how == "flip" else 5000)
        file.seek(position)
        file.write(bytes([found[0] ^ 0x04]) if how == "flip" else bytes(len(found)))


def swap(paths: list[Path], choice: random.Random) -> tuple[Path, Path]:
    """Let two files change their names."""
    first, second = choice.sample(paths, 2)
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return first, second
