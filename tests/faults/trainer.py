"""A rank that does one command after another, and the states that it saves."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import localckpt
from localckpt import CheckpointingException, PeerLostError
from tests.managers.jobs import cliques, make_manager, state_of

__all__ = ["SESSION", "Setup", "Trainer", "state_of_attempt"]

SESSION = "job"
_GROUP_S = 30.0


@dataclass(frozen=True, slots=True)
class Setup:
    """How a job saves; the same in all of its lives."""

    kind: str
    world_size: int
    keep_last: int
    timeout_s: float
    strict: bool = False
    elastic: bool = False

    def __str__(self) -> str:
        return f"{self.world_size} ranks, {self.kind}, keep_last={self.keep_last}"


def state_of_attempt(rank: int, iteration: int, attempt: int) -> dict[str, Any]:
    """What a rank saves: another state in each attempt, though it be at the same iteration.

    One in four is larger than a block of digests, or two.
    """
    nbytes = 2_600_000 if attempt % 4 == 1 else 3000 + 700 * (attempt % 3)
    return {"attempt": attempt} | state_of(rank, 1000 * attempt + iteration, nbytes)


class Trainer:
    """One rank; its methods are the commands."""

    state = staticmethod(state_of_attempt)

    def __init__(self, rank: int, setup: Setup) -> None:
        self._rank = rank
        self._setup = setup
        self._under_way: list[int] = []
        self._settled: list[tuple[int, str | None]] = []

    def open(self, root: Path) -> None:
        setup = self._setup
        dist.init_process_group("gloo", timeout=timedelta(seconds=_GROUP_S))
        self._repl = cliques(1, 2, setup.timeout_s)
        self._queue = localckpt.AsyncCallsQueue(timeout_s=setup.timeout_s)
        self._manager = make_manager(
            *(setup.kind, root, SESSION, self._repl),
            timeout=setup.timeout_s,
            keep_last=setup.keep_last,
            strict=setup.strict,
            elastic=setup.elastic,
        )

    def find(self) -> int:
        self._manager.latest_iteration = -1
        return int(self._manager.find_latest())

    def load(self) -> tuple[tuple[int, int, str], bytes]:
        """ID and state of what is loaded."""
        state, ckpt_id = self._manager.load()
        return tuple(ckpt_id), pickle.dumps(state)

    def status(self) -> list[str]:
        return [str(durability) for durability in self._manager.status()]

    def save(self, iteration: int, attempt: int) -> None:
        self._manager.save(self.state(self._rank, iteration, attempt), iteration)

    def begin(self, iteration: int, attempt: int) -> None:
        state = self.state(self._rank, iteration, attempt)
        try:
            request = self._manager.save(state, iteration, is_async=True)
        except CheckpointingException as error:
            # To have a buffer, it finalizes older saves first, and raises the error of one.
            if self._queue.get_num_unfinalized_calls() < len(self._under_way):
                self._settle_oldest(error)
            raise
        request.add_finalize_fn(partial(self._settle, attempt, None))
        self._under_way.append(attempt)
        self._queue.schedule_async_request(request)

    def finalize(self, blocking: bool) -> list[tuple[int, str | None]]:
        """The saves that were settled, and why each failed, if it did."""
        while self._under_way:
            try:
                self._queue.maybe_finalize_async_calls(blocking=blocking)
            except CheckpointingException as error:
                self._settle_oldest(error)
                if isinstance(error, PeerLostError):
                    break
            if not blocking:
                break
        settled, self._settled = self._settled, []
        return settled

    def close(self) -> None:
        self._queue.close()
        self._manager.close()
        self._repl.close()
        dist.destroy_process_group()

    def _settle_oldest(self, error: CheckpointingException) -> None:
        """Note an error: one call at a time leaves the queue with one, the oldest."""
        self._settle(self._under_way[0], f"{type(error).__name__}: {error}")

    def _settle(self, attempt: int, error: str | None) -> None:
        self._under_way.remove(attempt)
        self._settled.append((attempt, error))
