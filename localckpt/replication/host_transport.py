"""Images from host memory or files, in chunks that are answered; see ``messages.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch.distributed as dist

from localckpt.errors import PeerLostError
from localckpt.ranks.deadline import interruptible
from localckpt.ranks.failure import forget_frames
from localckpt.replication.messages import Connections, Message, Messages
from localckpt.replication.progress import (
    CHUNK_NBYTES,
    PeerFailed,
    Progress,
    Receives,
    Sends,
    chunks,
    numbered,
    raise_first,
)
from localckpt.state_dict.source import PIECE_NBYTES, views_last
from localckpt.storage.write import StagedImage
from localckpt.threads import Latch, Shielded, Task
from localckpt.waiting import Pacer

# One chunk is sent while the next is read.
_BOUNCES = 2


class HostTransport:
    """Sends and receives images at once; see :class:`Transport`.

    Every chunk that is to come is asked for at the start, so a source that is slow to read holds up
    nobody but those it is sent to. A source with a true ``views_last``, whose views stay valid
    after the next ``read``, is sent from where it lies; others are copied once. The deadline of an
    exchange is later by what ``rate_limit``, in bytes a second, makes it take.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        rate_limit: float | None = None,
    ) -> None:
        self.rank, self.ranks = connections.rank, connections.ranks
        self.broken = False
        self.progress: Progress | None = None
        self._connections = connections
        self._chunk_nbytes = chunk_nbytes
        self._pacer = Pacer(rate_limit)
        self._given_up = False
        self._cut = Latch()

    def exchange(self, sends: Sends, receives: Receives, timeout_s: float) -> None:
        sent = sum(source.nbytes for _, source in sends)
        received = sum(len(view) for _, view in receives)
        within_s = timeout_s + self.limited_s(max(sent, received))
        progress = Progress(self.rank, within_s, sends, receives)
        self.run(progress, lambda messages: self._exchange(sends, receives, messages, progress))

    def run(self, progress: Progress, work: Callable[[Messages], None]) -> None:
        if self.broken:
            raise PeerLostError(
                f"rank {self.rank} cannot exchange shards: these connections broke before"
            )
        self.progress = progress
        messages = Messages(self._connections, progress, self._pacer)
        try:
            with progress.watched():
                interruptible(lambda: work(messages), self.abort)
        except BaseException as error:
            self._disconnect()
            if not isinstance(error, PeerFailed):
                raise
            messages.count_arrived()
            forget_frames(error)
            if self._given_up:
                raise PeerLostError(
                    f"rank {self.rank} was exchanging shards, and gave it up. What was saved "
                    f"before stands."
                ) from error.__cause__
            raise progress.explain(error) from error.__cause__

    def limited_s(self, nbytes: int) -> float:
        return self._pacer.longest_s(nbytes)

    def _exchange(
        self, sends: Sends, receives: Receives, messages: Messages, progress: Progress
    ) -> None:
        failures: list[BaseException] = []
        receivers: list[tuple[Task[None], Latch]] = []
        try:
            for peer, arrivals in self._ask(receives, messages).items():
                # One each, so that a peer that is slow does not hold back answers to another.
                taken = Latch()
                receive = partial(self._receive, peer, arrivals, messages, progress)
                receiver = Task(partial(receive, failures, taken))
                receiver.start(f"localckpt-receive-{peer}", daemon=True)
                receivers.append((receiver, taken))
            self._send(sends, messages)
        except BaseException as error:  # noqa: BLE001 - raised once no thread uses the memory
            failures.append(error)
            self._disconnect()
        with Shielded():
            for receiver, taken in receivers:
                # Then it uses the memory no more. gloo may lose an answer when connections are cut.
                taken.wait()
                receiver.over.wait(None, self._cut)
        if not (failures or all(receiver.done() for receiver, _ in receivers)):
            failures.append(PeerFailed([peer for peer, _ in receives]))
        if failures:
            raise_first(failures)

    def abort(self) -> None:
        """End an exchange that is under way in another thread, with an error there."""
        self._given_up = True
        self._disconnect()

    def close(self) -> None:
        self._connections.close()
        self.broken = True

    def _ask(self, receives: Receives, messages: Messages) -> dict[int, list[Iterable[Message]]]:
        asked: dict[int, list[Iterable[Message]]] = {}
        for peer, number, view in numbered(receives):
            ask = partial(messages.ask, peer, number)
            of_peer = asked.setdefault(peer, [])
            if isinstance(view, StagedImage):
                # Each once there is memory for it.
                of_peer.append(map(ask, (piece for _, piece in view.pieces(verifies=True))))
            else:
                ends = chunks(len(view), self._chunk_nbytes)
                of_peer.append([ask(view[start:stop]) for start, stop in ends])
        return asked

    def _receive(
        self,
        peer: int,
        arrivals: Sequence[Iterable[Message]],
        messages: Messages,
        progress: Progress,
        failures: list[BaseException],
        taken: Latch,
    ) -> None:
        """Answer one peer's chunks; runs in a thread of its own."""
        answers: list[dist.Work] = []
        try:
            try:
                for chunk in chain.from_iterable(arrivals):
                    answers.append(messages.take(chunk))  # noqa: PERF401 - kept when one fails
            finally:
                taken.set()
            for answer in answers:
                progress.wait(peer, answer)
        except Exception as failure:  # noqa: BLE001 - raised by the thread that waits for this one
            failures.append(failure)
            self._disconnect()

    def _send(self, sends: Sends, messages: Messages) -> None:
        unanswered: deque[Message] = deque()
        for peer, number, view in self._read(sends, unanswered, messages):
            unanswered.append(messages.send(peer, number, view))
        while unanswered:
            messages.await_taken(unanswered.popleft())

    def _read(
        self, sends: Sends, unanswered: deque[Message], messages: Messages
    ) -> Iterator[tuple[int, int, memoryview]]:
        """Chunks in the order of sending: ``(peer, number, view)``."""
        bounces: list[memoryview] = []
        bounced = 0
        for peer, number, source in numbered(sends):
            for start, stop in chunks(source.nbytes, self._chunk_nbytes):
                view = source.read(start, stop) if views_last(source) else None
                if view is None or view.readonly:
                    while len(unanswered) >= _BOUNCES:
                        messages.await_taken(unanswered.popleft())
                    if not bounces:
                        largest = max(source.nbytes for _, source in sends)
                        nbytes = min(self._chunk_nbytes, largest)
                        bounces = [memoryview(bytearray(nbytes)) for _ in range(_BOUNCES)]
                    view = bounces[bounced % _BOUNCES][: stop - start]
                    bounced += 1
                    # In pieces, so that they are still in the processor's cache when copied.
                    for at, end in chunks(stop - start, PIECE_NBYTES):
                        view[at:end] = source.read(start + at, start + end)
                yield peer, number, view

    def _disconnect(self) -> None:
        self.broken = True
        self._pacer.stop()
        self._connections.disconnect()
        self._cut.set()
