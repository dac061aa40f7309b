"""Images from host memory or files, over gloo, with an answer for every chunk.

gloo does not tell whoever waits for a message that was half sent or half received when its
connection broke: the wait lasts until the deadline. So nobody waits for such a message here. Each
chunk is followed by an empty message, its mark, which cannot arrive in part; when the mark is there
the chunk is, and the receiver answers with another empty message.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from localckpt.errors import PeerLostError
from localckpt.ranks.failure import forget_frames
from localckpt.replication.connections import (
    NEVER,
    HostConnections,
    as_tensor,
    nothing,
    views_last,
)
from localckpt.replication.groups import GroupWrapper
from localckpt.replication.ledger import CHUNK_NBYTES, Ledger, PeerFailed, chunks, numbered
from localckpt.replication.pacing import Pacer
from localckpt.state_dict.source import PIECE_NBYTES, ShardSource
from localckpt.threads import run_interruptibly

__all__ = ["HostTransport"]

# One chunk travels while the next is read.
_BOUNCES = 2


class HostTransport:
    """Sends and receives images at once; see :class:`Transport`.

    Every chunk that is to come is asked for at the start, so a peer can send at any time; a source
    that is slow to read holds up nobody but those it is sent to.

    A source whose views stay valid after the next ``read`` says so by an attribute ``views_last``
    that is true; it is sent from where it lies. Others are copied once.

    Args:
        group: The ranks that take part; it must support host memory.
        timeout_s: Deadline of a whole exchange, in seconds.
        chunk_nbytes: Largest single message; the same on all ranks.
        rate_limit: How many bytes a second this rank sends at most, each chunk at once; the
            deadline is later by what it takes. ``None`` for as fast as it goes.
    """

    def __init__(
        self,
        group: GroupWrapper | dist.ProcessGroup | HostConnections | None = None,
        timeout_s: float = 300.0,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        rate_limit: float | None = None,
    ) -> None:
        if not isinstance(group, HostConnections):
            group = HostConnections.of(group)
        self.connections = group
        self._rank = self.connections.rank
        self._chunk_nbytes = chunk_nbytes
        self.pacer = Pacer(rate_limit)
        self.timeout_s = timeout_s
        self.broken = False

    @classmethod
    def connect(
        cls,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float = 300.0,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        rate_limit: float | None = None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> HostTransport:
        """A transport with connections of its own, so that its failure touches no other group.

        Only the ranks that take part call it, together. It works beside any default group.

        Args:
            name: Has not been used before in this job.
            ranks: The ranks of the job that take part, in the same order everywhere.
            rank: This rank of the job.
            timeout_s: Deadline for connecting, and of each exchange, in seconds.
            chunk_nbytes, rate_limit: As for the class.
            is_given_up: Asked while it connects, by another thread: whether to stop.

        Raises:
            PeerLostError: Some rank did not come.
        """
        return cls(
            HostConnections.connect(name, ranks, rank, timeout_s, is_given_up),
            timeout_s,
            chunk_nbytes=chunk_nbytes,
            rate_limit=rate_limit,
        )

    def exchange(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        receives: Sequence[tuple[int, memoryview]],
    ) -> None:
        if self.broken:
            raise PeerLostError(
                f"rank {self._rank} cannot exchange shards: these connections broke before"
            )
        run_interruptibly(lambda: self._exchange(sends, receives), self.abort)

    def _exchange(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        receives: Sequence[tuple[int, memoryview]],
    ) -> None:
        sent = sum(source.nbytes for _, source in sends)
        received = sum(len(view) for _, view in receives)
        ledger = Ledger(self._rank, self.timeout_s + self.pacer.longest_s(max(sent, received)))
        failures: list[BaseException] = []
        receivers: list[threading.Thread] = []
        try:
            for peer, source in sends:
                ledger.expect(peer, sent=source.nbytes)
            for peer, arrivals in self._ask(receives, ledger).items():
                # One each, so that a peer that is slow does not hold back answers to another.
                receiver = threading.Thread(
                    target=self._receive,
                    args=(peer, arrivals, ledger, failures),
                    name=f"localckpt-receive-{peer}",
                    daemon=True,
                )
                receiver.start()
                receivers.append(receiver)
            self._send(sends, ledger)
        except BaseException as error:  # noqa: BLE001 - raised once no thread uses the memory
            failures.append(error)
            self._disconnect()
        for receiver in receivers:
            receiver.join()
        for failure in failures:
            # Threads' frames hold each other's failures, and the images.
            forget_frames(failure)
        if failures:
            # That a peer was lost may be the consequence of what went wrong here.
            own = [failure for failure in failures if not isinstance(failure, PeerFailed)]
            first = own[0] if own else failures[0]
            if isinstance(first, PeerFailed):
                raise ledger.explain(first) from first.__cause__
            raise first

    def abort(self) -> None:
        """End an exchange that is under way in another thread, with an error there."""
        self.connections.given_up = True
        self._disconnect()

    def close(self) -> None:
        self.connections.close()
        self.broken = True

    def _ask(
        self, receives: Sequence[tuple[int, memoryview]], ledger: Ledger
    ) -> dict[int, list[_Chunk]]:
        """Ask for all that is to come; a mark always after its chunk, on both sides."""
        asked: dict[int, list[_Chunk]] = {}
        for peer, number, view in numbered(receives):
            ledger.expect(peer, received=len(view))
            for start, stop in chunks(len(view), self._chunk_nbytes):
                with ledger.blaming(peer):
                    data = self._receive_one(as_tensor(view[start:stop]), peer, number, _Kind.DATA)
                    mark = self._receive_one(nothing(), peer, number, _Kind.MARK)
                asked.setdefault(peer, []).append(_Chunk(peer, number, stop - start, data, mark))
        return asked

    def _receive(
        self, peer: int, arrivals: list[_Chunk], ledger: Ledger, failures: list[BaseException]
    ) -> None:
        """Answer one peer's chunks; runs in a thread of its own."""
        answers: list[dist.Work] = []
        arrived = 0
        try:
            for chunk in arrivals:
                ledger.wait(peer, chunk.mark)
                arrived += 1
                ledger.wait(peer, chunk.data)
                ledger.count(peer, received=chunk.nbytes)
                with ledger.blaming(peer):
                    answers.append(self._send_one(nothing(), peer, chunk.number, _Kind.ANSWER))
            for answer in answers:
                ledger.wait(peer, answer)
        except Exception as failure:  # noqa: BLE001 - raised by the thread that waits for this one
            failures.append(failure)
            self._disconnect()
            for chunk in arrivals[arrived:]:
                # Complete chunks whose mark was not looked at any more.
                if _is_done(chunk.data):
                    ledger.count(peer, received=chunk.nbytes)

    def _send(self, sends: Sequence[tuple[int, ShardSource]], ledger: Ledger) -> None:
        unanswered: deque[_Chunk] = deque()
        try:
            for peer, number, nbytes, view in self._read(sends, unanswered, ledger):
                self.pacer.wait(nbytes)
                with ledger.blaming(peer):
                    answer = self._receive_one(nothing(), peer, number, _Kind.ANSWER)
                    data = self._send_one(as_tensor(view), peer, number, _Kind.DATA)
                    mark = self._send_one(nothing(), peer, number, _Kind.MARK)
                unanswered.append(_Chunk(peer, number, nbytes, data, mark, answer))
            while unanswered:
                self._settle(unanswered.popleft(), ledger)
        except BaseException:
            self._disconnect()
            for chunk in unanswered:
                if chunk.answer is not None and _is_done(chunk.answer):
                    ledger.count(chunk.peer, sent=chunk.nbytes)
            raise

    def _read(
        self,
        sends: Sequence[tuple[int, ShardSource]],
        unanswered: deque[_Chunk],
        ledger: Ledger,
    ) -> Iterator[tuple[int, int, int, memoryview]]:
        """Chunks in the order of sending: ``(peer, number, nbytes, view)``."""
        bounces: list[memoryview] = []
        bounced = 0
        for peer, number, source in numbered(sends):
            for start, stop in chunks(source.nbytes, self._chunk_nbytes):
                view = source.read(start, stop) if views_last(source) else None
                if view is None or view.readonly:
                    while len(unanswered) >= _BOUNCES:
                        self._settle(unanswered.popleft(), ledger)
                    if not bounces:
                        largest = max(source.nbytes for _, source in sends)
                        nbytes = min(self._chunk_nbytes, largest)
                        bounces = [memoryview(bytearray(nbytes)) for _ in range(_BOUNCES)]
                    view = bounces[bounced % _BOUNCES][: stop - start]
                    bounced += 1
                    # In pieces, so that they are still in the processor's cache when copied.
                    for at, end in chunks(stop - start, PIECE_NBYTES):
                        view[at:end] = source.read(start + at, start + end)
                yield peer, number, stop - start, view

    def _settle(self, sent: _Chunk, ledger: Ledger) -> None:
        if sent.answer is not None:
            ledger.wait(sent.peer, sent.answer)
        ledger.wait(sent.peer, sent.data)
        ledger.wait(sent.peer, sent.mark)
        ledger.count(sent.peer, sent=sent.nbytes)

    def _send_one(self, tensor: torch.Tensor, peer: int, number: int, kind: _Kind) -> dist.Work:
        return self.connections.send(tensor, peer, number * len(_Kind) + kind)

    def _receive_one(self, tensor: torch.Tensor, peer: int, number: int, kind: _Kind) -> dist.Work:
        return self.connections.receive(tensor, peer, number * len(_Kind) + kind)

    def _disconnect(self) -> None:
        self.broken = True
        self.pacer.stop()
        self.connections.disconnect()


class _Kind(IntEnum):
    """Which messages of one image belong together; part of their tags."""

    DATA = 0
    MARK = 1
    ANSWER = 2
    NEVER = NEVER


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk under way. gloo drops a message whose work object is dropped before it was sent."""

    peer: int
    number: int
    nbytes: int
    data: dist.Work
    mark: dist.Work
    answer: dist.Work | None = None


def _is_done(work: dist.Work) -> bool:
    """Whether a message arrived before the connections were closed."""
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True
