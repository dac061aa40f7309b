"""Images and plans for the tests of replication, and sources that behave badly."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.replication.exchange import ExchangePlan, plan_among_nodes


def image(seed: object, nbytes: int) -> bytes:
    """The same bytes for the same seed, in every process."""
    return random.Random(repr(seed)).randbytes(nbytes)


@dataclass
class ScratchSource:
    """Reads into one buffer again and again, as a file does."""

    threads = 1
    content: bytes
    delay_s: float = 0.0
    closed: bool = False

    def __post_init__(self) -> None:
        self._scratch = bytearray()

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def read(self, start: int, stop: int) -> memoryview:
        time.sleep(self.delay_s)
        if len(self._scratch) < stop - start:
            self._scratch = bytearray(stop - start)
        self._scratch[: stop - start] = self.content[start:stop]
        return memoryview(self._scratch)[: stop - start]

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            part[:] = self.content[start : start + len(part)]
            start += len(part)

    def close(self) -> None:
        self.closed = True


class FailingSource(ScratchSource):
    """Raises once it is asked for the bytes from ``at`` on."""

    def __init__(self, content: bytes, at: int, error: Exception) -> None:
        super().__init__(content)
        self._at = at
        self._error = error

    def read(self, start: int, stop: int) -> memoryview:
        if stop > self._at:
            raise self._error
        return super().read(start, stop)


class SignallingSource(ScratchSource):
    """Sends its own process one signal, when it is asked for the bytes from ``at`` on."""

    def __init__(self, content: bytes, at: int, number: signal.Signals) -> None:
        super().__init__(content)
        self._at = at
        self._number = number

    def read(self, start: int, stop: int) -> memoryview:
        if stop > self._at:
            self._at = self.nbytes
            os.kill(os.getpid(), self._number)
        return super().read(start, stop)


def plan_exchange(
    available: Mapping[int, Collection[Any]], wanted: Mapping[int, Sequence[Any]]
) -> ExchangePlan[Any]:
    """Plan among ranks that share no node."""
    holders: dict[Any, list[int]] = {}
    for rank, ids in available.items():
        for id_ in ids:
            holders.setdefault(id_, []).append(rank)
    return plan_among_nodes(holders, {rank: (rank,) for rank in available}, wanted)
