"""What a section is given, and the saves and loads that several sections time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

import localckpt
from benchmarks.limits import HugeBuffer
from benchmarks.state import (
    GPT2_WIDTH,
    KINDS,
    Training,
    build_state,
    state_nbytes,
    state_tensors,
)
from localckpt.managers.reports import SaveReport

__all__ = ["Options", "Saver", "Setting", "closing_all", "largest_file", "make_setting"]

# Room for the header, the skeleton and the digests of an image, which are less than 1 MB.
_IMAGE_EXTRA = 8 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    directory: Path
    rounds: int
    width: int
    state: str = "gpt2"

    @staticmethod
    def add_to(parser: argparse.ArgumentParser, default_directory: Path) -> None:
        parser.add_argument(
            "--dir", type=Path, default=default_directory, help="where files are written"
        )
        parser.add_argument("--rounds", type=int, default=9, help="pairs of samples (default 9)")
        parser.add_argument(
            "--width",
            type=int,
            default=GPT2_WIDTH,
            help=f"width of the model: {GPT2_WIDTH} is 1.49 GB, less is quicker and says less",
        )
        parser.add_argument(
            "--state",
            choices=KINDS,
            default="gpt2",
            help="what save, load and peers save: "
            + "; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
        )


@dataclass(slots=True)
class Setting:
    """One state, and buffers of its size that the limits use."""

    state: dict[str, Any]
    flat: torch.Tensor
    buffer: HugeBuffer
    nbytes: int

    def copy_flat_s(self) -> float:
        """One-thread copy of as many bytes that lie in one piece into the reused buffer."""
        return self.buffer.copy_from_s([self.flat])

    def copy_in_s(self) -> float:
        """One-thread copy of the state into the reused buffer."""
        return self.buffer.copy_from_s(state_tensors(self.state))

    def copy_out_s(self) -> float:
        """One-thread copy of the reused buffer into the state."""
        return self.buffer.copy_to_s(state_tensors(self.state))


def make_setting(options: Options) -> Setting:
    state = build_state(options.width, kind=options.state)
    nbytes = state_nbytes(state)
    flat = torch.ones(nbytes, dtype=torch.uint8)
    setting = Setting(state, flat, HugeBuffer(nbytes + _IMAGE_EXTRA), nbytes)
    setting.copy_in_s()
    return setting


class Saver:
    """Saves one state again and again behind training, and waits for each save to be finished."""

    def __init__(self, manager: localckpt.CheckpointManager, state: dict[str, Any]) -> None:
        self.manager = manager
        self.queue = localckpt.AsyncCallsQueue()
        self._state, self._training = state, Training(state)
        self._iterations = count()

    def start(self) -> float:
        """Seconds that training waits."""
        iteration = next(self._iterations)
        self._training.step()
        # As in a training loop, in which no two states are equal around their tensors.
        self._state["iteration"] = iteration
        began = time.perf_counter()
        request = self.manager.save(self._state, iteration, is_async=True)
        if request is None:
            raise RuntimeError("an asynchronous save gave no request back")
        self.queue.schedule_async_request(request)
        return time.perf_counter() - began

    def finish(self) -> float:
        """Wait for all ranks; seconds from the call of save until the bytes were durable here."""
        self.queue.maybe_finalize_async_calls(blocking=True)
        durable_s = self.last_save.durable_s
        if durable_s is None:
            raise RuntimeError("the save was finalized and its time until durable is not known")
        return durable_s

    @property
    def last_save(self) -> SaveReport:
        if self.manager.last_save is None:
            raise RuntimeError("nothing was saved yet")
        return self.manager.last_save

    def warm_up(self, saves: int = 4) -> None:
        """Until both buffers are there and a retired file can be recycled."""
        for _ in range(saves):
            self.start()
            self.finish()

    def close(self) -> None:
        self.queue.close()
        self.manager.close()


@contextmanager
def closing_all(savers: list[Saver]) -> Iterator[None]:
    """Close every saver, also when a measurement failed."""
    try:
        yield
    finally:
        for saver in savers:
            saver.close()


def largest_file(root: Path) -> Path:
    """The shard that a manager wrote under its root."""
    return max((p for p in root.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)
