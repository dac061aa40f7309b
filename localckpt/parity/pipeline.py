"""Carries out chains over a transport, within a bounded memory and a deadline.

One thread does everything in the order of the schedule, while the transport moves what was asked
for ahead. An answer to a message says that its memory may be used again.

A rank that is lost stops the whole pipeline, so most ranks lose peers that only gave up: which rank
is to blame is told by who does not come to the decision that follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch.distributed as dist

from localckpt.memory.host_memory import address_of, map_memory, prefer_huge_pages
from localckpt.parity.chains import (
    Chain,
    ChainStep,
    Hop,
    add_terms,
    schedule,
    sent_by_rank,
    tasks_of,
)
from localckpt.parity.gf import Bytes, Scratch
from localckpt.parity.stripes import Kind, Strip
from localckpt.replication.messages import Message, Messages
from localckpt.replication.progress import Progress
from localckpt.replication.transport import Transport
from localckpt.state_dict.source import ShardSource, views_last

Sources: TypeAlias = Mapping[tuple[Kind, int], ShardSource]
"""Sources from which a rank reads what a member keeps."""
Sinks: TypeAlias = Mapping[tuple[Kind, int], memoryview]
"""Writable memory for what a member keeps."""

# Messages that need no buffer are asked for so far ahead.
_AHEAD = 64
# Answers are sent at once where the peer waits for them; they are looked at later.
_MOST_ANSWERS = 64


class Pipeline:
    """Computes sums over a transport, the caller's, again and again with the same memory."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.memory = _MessageMemory()

    def run(
        self, chains: Sequence[Chain], sources: Sources, sinks: Sinks, timeout_s: float
    ) -> None:
        """Carry out chains; the ranks of the transport call it together; see its ``run``.

        When it returns, all that this rank sent has arrived.
        """
        rank = self.transport.rank
        slow_s = self.transport.limited_s(max(sent_by_rank(chains).values(), default=0))
        progress = Progress(rank, timeout_s + slow_s)
        for chain in chains:
            for sender, receiver in pairwise(hop.rank for hop in chain.hops):
                if rank == sender:
                    progress.expect(receiver, sent=chain.nbytes)
                if rank == receiver:
                    progress.expect(sender, received=chain.nbytes)
        job = _Job(rank, progress, chains, sources, sinks)
        self.transport.run(progress, lambda messages: job.run(messages, self.memory))


class _MessageMemory:
    """Rooms for messages under way, and what the arithmetic needs; kept from run to run."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._map: memoryview | None = None

    def buffers(self, count: int, nbytes: int) -> list[memoryview]:
        """Return buffers of a size, whose earlier contents are lost."""
        if not count * nbytes:
            return []
        if self._map is None or len(self._map) < count * nbytes:
            self._map = map_memory(count * nbytes)
            prefer_huge_pages(address_of(self._map), count * nbytes)
        whole = self._map
        return [whole[start : start + nbytes] for start in range(0, count * nbytes, nbytes)]


class _Job:
    """One run of a pipeline as this rank sees it."""

    def __init__(
        self,
        rank: int,
        progress: Progress,
        chains: Sequence[Chain],
        sources: Sources,
        sinks: Sinks,
    ) -> None:
        self._rank = rank
        self._progress = progress
        self._chains = chains
        self._sources = sources
        self._sinks = sinks
        self._ready: deque[_Ready] = deque()
        self._unanswered: deque[_Sent] = deque()
        self._answers: deque[tuple[int, dist.Work]] = deque()
        self._last_read: tuple[Strip, int, int] | None = None
        self._last_data = _NO_BYTES

    def run(self, messages: Messages, memory: _MessageMemory) -> None:
        self._messages, self._scratch = messages, memory.scratch
        when = schedule(self._chains)
        self._tasks = tasks_of(self._rank, self._chains, when)
        self._next = next(self._tasks, None)
        longest = max((chain.nbytes for chain in self._chains), default=0)
        self._free = memory.buffers(when.buffers, min(when.message_nbytes, longest))
        while True:
            self._reclaim_past_buffers()
            self._ask_ahead()
            if self._ready:
                self._do(self._ready.popleft())
            elif self._next is not None:
                # There is no buffer for it.
                self._reclaim_buffer(self._unanswered.popleft())
            else:
                break
        while self._unanswered:
            self._reclaim_buffer(self._unanswered.popleft())
        self._finish_answers(0)

    def _reclaim_past_buffers(self) -> None:
        """Reclaim the buffer of what was sent two steps ago: it was taken one step ago."""
        coming = self._ready[0].task if self._ready else self._next
        while coming and self._unanswered and self._unanswered[0].step + 1 < coming.step:
            self._reclaim_buffer(self._unanswered.popleft())

    def _ask_ahead(self) -> None:
        """Ask for the messages of the next tasks, in their order, while there are buffers."""
        while self._next is not None and len(self._ready) < _AHEAD:
            task = self._next
            ready = self._make_ready(task)
            if ready is None:
                return
            self._next = next(self._tasks, None)
            self._ready.append(ready)
            if task.hop:
                peer = self._hop(task, -1).rank
                ready.message = self._messages.ask(peer, task.chain, ready.memory)

    def _make_ready(self, task: ChainStep) -> _Ready | None:
        """Find the memory for a task's sum, if there is any."""
        chain, nbytes = self._chains[task.chain], task.stop - task.start
        if task.hop == len(chain.hops) - 1:
            start = chain.place.start + task.start
            sink = self._sinks[chain.place.kind, chain.place.member]
            return _Ready(task, sink[start : start + nbytes])
        if not task.hop and (view := self._lasting(chain.hops[0], task)) is not None:
            return _Ready(task, view, is_summed=True)
        if not self._free:
            return None
        buffer = self._free.pop()
        return _Ready(task, buffer[:nbytes], buffer)

    def _lasting(self, hop: Hop, task: ChainStep) -> memoryview | None:
        """The first hop's sum, where that lies ready to be sent."""
        if len(hop.terms) != 1 or hop.terms[0].factor != 1:
            return None
        strip = hop.terms[0].strip
        source = self._sources[strip.kind, strip.member]
        if task.stop > strip.nbytes or not views_last(source):
            return None
        view = source.read(strip.start + task.start, strip.start + task.stop)
        return None if view.readonly else view

    def _do(self, ready: _Ready) -> None:
        task, chain = ready.task, self._chains[ready.task.chain]
        if task.hop:
            self._take(ready)
        if not ready.is_summed:
            acc = np.frombuffer(ready.memory, np.uint8)
            hop = chain.hops[task.hop]
            add_terms(hop, acc, self._read, task.start, self._scratch, first=not task.hop)
        if task.hop < len(chain.hops) - 1:
            self._send(ready)

    def _take(self, ready: _Ready) -> None:
        assert ready.message is not None
        self._answers.append((ready.message.peer, self._messages.take(ready.message)))
        self._finish_answers(_MOST_ANSWERS)

    def _send(self, ready: _Ready) -> None:
        peer = self._hop(ready.task, 1).rank
        message = self._messages.send(peer, ready.task.chain, ready.memory)
        self._unanswered.append(_Sent(ready.task.step, ready.buffer, message))

    def _reclaim_buffer(self, sent: _Sent) -> None:
        self._messages.await_taken(sent.message)
        if sent.buffer is not None:
            self._free.append(sent.buffer)

    def _finish_answers(self, most_left: int) -> None:
        while len(self._answers) > most_left:
            self._progress.wait(*self._answers.popleft())

    def _hop(self, task: ChainStep, on: int) -> Hop:
        return self._chains[task.chain].hops[task.hop + on]

    def _read(self, strip: Strip, start: int, stop: int) -> Bytes:
        """Bytes of a strip; P and Q are summed one after the other, and read only once."""
        stop = min(stop, strip.nbytes)
        if start >= stop:
            return _NO_BYTES
        if self._last_read != (strip, start, stop):
            source = self._sources[strip.kind, strip.member]
            self._last_read = None
            data = source.read(strip.start + start, strip.start + stop)
            self._last_data = np.frombuffer(data, np.uint8)
            self._last_read = (strip, start, stop)
        return self._last_data


_NO_BYTES = np.empty(0, np.uint8)


@dataclass(slots=True)
class _Ready:
    """A task whose message, if it has one, has been asked for."""

    task: ChainStep
    memory: memoryview
    buffer: memoryview | None = None
    is_summed: bool = False
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class _Sent:
    step: int
    buffer: memoryview | None
    message: Message
