"""What a way to save has to do so that it can be measured beside the others."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

__all__ = ["Peer", "join_group_of_one"]


class Peer(ABC):
    """One way to save a state under a directory, used in a process of its own.

    The harness calls ``start`` and ``finish`` in turn, fsyncs what :meth:`files` names and calls
    ``retire``; the seconds until durable include the fsync and leave ``retire`` out.
    """

    behind: ClassVar[bool] = False
    """Whether training goes on while ``start``'s save is under way."""
    in_place: ClassVar[bool] = False
    """Whether ``load`` reads into the state's tensors; the others make new ones, then copied."""
    note: ClassVar[str] = ""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        self.directory = directory
        self.state = state
        self.saves = 0

    @property
    def target(self) -> Path:
        """The folder of the newest save, for peers that have one for each."""
        return self.directory / f"save-{self.saves}"

    def next_target(self) -> Path:
        self.saves += 1
        return self.target

    def prepare(self) -> None:  # noqa: B027 - most have nothing to make ready
        """What a trainer can do once, before its first save."""

    @abstractmethod
    def start(self) -> None:
        """Begin a save; return when training may change the state again."""

    def done(self) -> bool:
        """Whether the save is over, without waiting; what training calls between its steps."""
        return True

    def finish(self) -> None:  # noqa: B027 - a save in the foreground is over already
        """Wait until the save is over."""

    @abstractmethod
    def load(self) -> None:
        """Bring the newest save back into the tensors of the state."""

    def files(self) -> list[Path]:
        """The files of the newest save."""
        return [path for path in self.directory.rglob("*") if path.is_file()]

    def retire(self) -> None:
        """Remove what the newest save makes old."""
        for path in self.directory.glob("save-*"):
            if path != self.target:
                shutil.rmtree(path)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back threads, processes and memory."""


def join_group_of_one(directory: Path) -> None:
    """Some peers ask for a process group even of a single rank; ``close`` leaves it."""
    meeting = directory.with_name(f"{directory.name}.group").absolute()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
