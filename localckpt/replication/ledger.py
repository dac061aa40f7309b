"""How far each peer came in one exchange, and whom to name when it fails.

Kept apart from the transports, which move the bytes and report each step here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from localckpt.errors import PeerLostError

__all__ = ["Ledger", "Message", "PeerFailed", "first_line"]


class Ledger:
    """How far each peer came in one exchange, and how long it has left."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._received: dict[int, list[int]] = {}
        self._sent: dict[int, list[int]] = {}

    def expect(self, peer: int, *, received: int = 0, sent: int = 0) -> None:
        self._received.setdefault(peer, [0, 0])[1] += received
        self._sent.setdefault(peer, [0, 0])[1] += sent

    def count(self, peer: int, *, received: int = 0, sent: int = 0) -> None:
        self._received[peer][0] += received
        self._sent[peer][0] += sent

    def left(self) -> timedelta:
        # Zero would mean no limit, to torch.
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    def is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def blaming(self, *peers: int) -> _Blaming:
        return _Blaming(peers)

    def settle(self, message: Message) -> None:
        """Wait for a message. Once only: gloo would wait for another one the second time."""
        with self.blaming(message.peer):
            message.work.wait(self.left())
        self._count(message)

    def settle_if_done(self, message: Message) -> None:
        """Count a message that was complete when the connections were closed."""
        try:
            message.work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return
        self._count(message)

    def explain(self, failed: PeerFailed) -> PeerLostError:
        cause = "" if failed.__cause__ is None else f" ({first_line(failed.__cause__)})"
        what = f"did not finish within {self._timeout_s:g} s" if self.is_over() else "was lost"
        named = list(failed.peers)
        if self.is_over():
            named += [peer for peer in self._received if self._lacks(peer) and peer not in named]
        progress = ", ".join(self._progress(peer) for peer in named)
        return PeerLostError(
            f"rank {self._rank} was exchanging shards, and {progress} {what}{cause}. Shards kept "
            f"on this node are untouched. If the rank is alive but slow, use a longer timeout; "
            f"else restart the job."
        )

    def _count(self, message: Message) -> None:
        nbytes = message.chunk.numel()
        if message.received:
            self.count(message.peer, received=nbytes)
        else:
            self.count(message.peer, sent=nbytes)

    def _lacks(self, peer: int) -> bool:
        return any(done < total for done, total in (self._received[peer], self._sent[peer]))

    def _progress(self, peer: int) -> str:
        came, of_came = self._received.get(peer, (0, 0))
        went, of_went = self._sent.get(peer, (0, 0))
        return (
            f"rank {peer} ({came:,} of {of_came:,} bytes came from it, "
            f"it took {went:,} of {of_went:,})"
        )


class _Blaming:
    """Turns an error of the process group into one that says which peers it is about."""

    def __init__(self, peers: Sequence[int]) -> None:
        self._peers = peers

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerFailed(self._peers) from error


class PeerFailed(Exception):
    """Stops an exchange; becomes a PeerLostError once it is known how far each peer came."""

    def __init__(self, peers: Sequence[int]) -> None:
        super().__init__(peers)
        self.peers = peers


@dataclass(frozen=True, slots=True)
class Message:
    """A chunk under way; keeps the memory it is read from or written to alive."""

    work: dist.Work
    peer: int
    chunk: torch.Tensor
    received: bool


def first_line(error: BaseException) -> str:
    """The start of a library's error text, without the place in its source."""
    return str(error).strip().split("\n", 1)[0].rsplit("] ", 1)[-1][:200]
