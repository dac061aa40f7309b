"""Progress of an exchange with each peer, and the error of a peer that is lost.

Kept apart from the transports, which move the bytes and report each step here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import NoReturn, TypeAlias, TypeVar

import torch.distributed as dist

from localckpt.errors import PeerLostError
from localckpt.ranks.deadline import Patience
from localckpt.ranks.failure import SLOW, forget_frames
from localckpt.state_dict.source import ShardSource
from localckpt.storage.write import PIECE_NBYTES, Place

CHUNK_NBYTES = PIECE_NBYTES

T = TypeVar("T")

Sends: TypeAlias = Sequence[tuple[int, ShardSource]]
"""Images, each with the rank that it is sent to."""
Receives: TypeAlias = Sequence[tuple[int, Place]]
"""Places for images, each with the rank that they come from."""


class Progress:
    """Bytes received and sent in one exchange, by peer, and the time that is left."""

    def __init__(
        self, rank: int, timeout_s: float, sends: Sends = (), receives: Receives = ()
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        # For each peer, the bytes that came, of how many, and that it confirmed, of how many.
        self._moved: dict[int, list[int]] = {}
        self._patience = Patience(rank, "exchange shards")
        for peer, source in sends:
            self.expect(peer, sent=source.nbytes)
        for peer, view in receives:
            self.expect(peer, received=len(view))

    def expect(self, peer: int, *, received: int = 0, sent: int = 0) -> None:
        moved = self._moved.setdefault(peer, [0, 0, 0, 0])
        moved[1] += received
        moved[3] += sent

    def count(self, peer: int, *, received: int = 0, sent: int = 0) -> None:
        self._moved[peer][0] += received
        self._moved[peer][2] += sent
        self._patience.renew()

    def watched(self) -> AbstractContextManager[None]:
        """Context of the exchange: whoever sends nothing, and takes nothing, for long is logged."""
        return self._patience.beside(
            lambda: ", ".join(map(self.of, self.lacking())) or "this node's storage"
        )

    def left(self) -> timedelta:
        """Time until the deadline; never zero, which torch would take for no limit."""
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    @contextmanager
    def blaming(self, *peers: int) -> Iterator[None]:
        """Attribute what the process group, or a socket, raises inside to these peers."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise PeerFailed(peers) from error

    def wait(self, peer: int, work: dist.Work) -> None:
        """Wait for a gloo operation; once only, since a second time it would wait for another."""
        with self.blaming(peer):
            work.wait(self.left())

    def explain(self, failed: PeerFailed) -> PeerLostError:
        """Make the error for the caller, once all bytes that came are counted."""
        cause = "" if failed.__cause__ is None else f" ({first_line(failed.__cause__)})"
        is_over = time.monotonic() > self._deadline
        what = f"did not finish within {self._timeout_s:g} s" if is_over else "was lost"
        named = list(failed.peers)
        if is_over:
            named += [peer for peer in self.lacking() if peer not in named]
        progress = ", ".join(self.of(peer) for peer in named)
        return PeerLostError(
            f"rank {self._rank} was exchanging shards, and {progress} {what}{cause}. Shards kept "
            f"on this node are untouched"
        ).advised("slow", SLOW)

    def lacking(self) -> list[int]:
        """Return, in any thread, the peers that have not sent or confirmed all bytes."""
        moved = dict(self._moved).items()
        return [p for p, (came, all_in, went, all_out) in moved if came < all_in or went < all_out]

    def of(self, peer: int) -> str:
        came, coming, went, going = self._moved.get(peer, (0, 0, 0, 0))
        return (
            f"rank {peer} ({came:,} of {coming:,} bytes came from it, "
            f"it confirmed {went:,} of {going:,})"
        )


class PeerFailed(Exception):
    """Stops an exchange; becomes a PeerLostError once it is known how far each peer came."""

    def __init__(self, peers: Sequence[int]) -> None:
        super().__init__(peers)
        self.peers = peers


def raise_first(failures: list[BaseException]) -> NoReturn:
    """Raise the error that stopped an exchange, a thread's own before the failure of a peer."""
    first = next((f for f in failures if not isinstance(f, PeerFailed)), failures[0])
    try:
        for failure in failures:
            forget_frames(failure)
        raise first
    finally:
        # Threads' frames hold each other's failures, and the images.
        failures.clear()
        del first, failure


def numbered(items: Sequence[tuple[int, T]]) -> Iterator[tuple[int, int, T]]:
    """``(peer, number, item)``: the first image between two ranks is 0, the next 1."""
    seen: dict[int, int] = {}
    for peer, item in items:
        number = seen.get(peer, 0)
        seen[peer] = number + 1
        yield peer, number, item


def chunks(nbytes: int, chunk_nbytes: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of each piece of so many bytes."""
    for start in range(0, nbytes, chunk_nbytes):
        yield start, min(start + chunk_nbytes, nbytes)


def first_line(error: BaseException) -> str:
    """Return the start of a library's error text, without the place in its source."""
    return str(error).strip().split("\n", 1)[0].rsplit("] ", 1)[-1].split(". ", 1)[0][:200]
