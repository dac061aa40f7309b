"""Carries out chains over gloo, within a bounded memory and a deadline.

As in :class:`HostTransport`, and for the same reason, each message is followed by an empty one, its
mark, and answered by another: gloo lets whoever waits for a message that was half sent or half
received when its connection broke wait until the deadline, and an empty message cannot be. The
answer also says that the message's memory may be used again. One thread does everything in the
order of the schedule, while gloo's own threads move what was asked for ahead.

A rank that is lost stops the whole relay, so most ranks lose peers that only gave up: see
:mod:`localckpt.replication.last_words` for how the one to blame is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch.distributed as dist

from localckpt.errors import MismatchError, PeerLostError
from localckpt.failure_texts import with_class
from localckpt.replication.connections import HostConnections, as_tensor, nothing, views_last
from localckpt.replication.last_words import LastWord, ask_whom_to_blame, leave_word
from localckpt.replication.ledger import Ledger, PeerFailed, first_line
from localckpt.replication.pacing import Pacer
from localckpt.replication.parity.chains import (
    Chain,
    Hop,
    Task,
    add_terms,
    schedule,
    sent_by_rank,
    tasks_of,
)
from localckpt.replication.parity.gf import Bytes, Scratch
from localckpt.replication.parity.stripes import Kind, Strip
from localckpt.state_dict.host_memory import address_of, map_memory, prefer_huge_pages
from localckpt.state_dict.source import ShardSource
from localckpt.threads import run_interruptibly

__all__ = ["Landed", "Relay", "Sinks", "Sources"]

Sources: TypeAlias = Mapping[tuple[Kind, int], ShardSource]
"""Where a rank reads what a member keeps."""
Sinks: TypeAlias = Mapping[tuple[Kind, int], memoryview]
"""Writable memory for what a member keeps."""
Landed: TypeAlias = Callable[[Strip, int, int], None]
"""``landed(place, start, stop)``: these bytes of the stripe are now in their sink."""

# Tags of a chain's messages; connections keep the fourth for themselves.
_DATA, _MARK, _ANSWER, _TAGS = 0, 1, 2, 4
# Messages that need no room are asked for so far ahead.
_AHEAD = 64
# Answers are sent at once where the peer waits for them; they are looked at later.
_MOST_ANSWERS = 64


class Relay:
    """Computes sums on their way over some connections, again and again with the same memory.

    Args:
        connections: Made by :meth:`HostConnections.connect`. They stay the caller's.
        pacer: Says when this rank may send; ``None`` for always.
    """

    def __init__(self, connections: HostConnections, pacer: Pacer | None = None) -> None:
        if connections.store is None:
            raise MismatchError(
                "a relay needs connections of its own, made by HostConnections.connect"
            )
        self.connections = connections
        self.broken = False
        self._pacer = pacer or Pacer()
        self._memory = _Memory()

    def run(
        self,
        what: str,
        chains: Sequence[Chain],
        sources: Sources,
        sinks: Sinks,
        timeout_s: float,
        *,
        landed: Landed = lambda place, start, stop: None,
        message_nbytes: int | None = None,
    ) -> None:
        """Carry out chains; the ranks of the connections call it together.

        When it raises, the connections are cut, and nothing is read from or written to the memory
        any more. When it returns, this rank has done its part and all that it sent has arrived.

        Args:
            what: What this is for, as "encoding parity", for messages.
            chains: The same on all ranks.
            sources: What this rank's hops read.
            sinks: Where the sums go that end on this rank.
            timeout_s: Deadline of it all, in seconds, later by what a limit of its rate makes it
                take. Finding out who is to blame takes at most eight more.
            landed: Told of every part of a sum that has come to its sink, each chain's in order.
            message_nbytes: Size of a message, if it is not to be chosen; the same on all ranks.

        Raises:
            PeerLostError: A peer died, stopped or failed. It is named, and how far it came.
            CheckpointingException: A source failed; the peers hear the reason.
        """
        if self.broken:
            raise PeerLostError(
                f"rank {self.connections.rank} was {what}, and cannot: these connections broke "
                f"before"
            )
        job = _Job(
            *(chains, self.connections, sources, sinks, landed),
            *(self._memory, self._pacer, timeout_s, message_nbytes),
        )
        try:
            run_interruptibly(job.run, self._give_up)
        except BaseException as error:
            self.broken = True
            if self.connections.given_up and isinstance(error, PeerFailed):
                # No peer is to blame, and nobody waits until it is known who would be.
                why = f"rank {self.connections.rank} was {what}, and gave it up"
                _leave(self.connections, LastWord(reason=why), error)
                raise PeerLostError(f"{why}. What was saved before stands.") from error.__cause__
            if not isinstance(error, PeerFailed):
                word = LastWord(reason=with_class(error))
                _leave(self.connections, word, error)
                raise
            raise _give_up(what, self.connections, job.ledger, error) from error.__cause__

    def _give_up(self) -> None:
        self.connections.given_up = True
        self.connections.disconnect()

    def close(self) -> None:
        """Give the memory back."""
        self.broken = True
        self._memory = _Memory()


class _Memory:
    """Rooms for messages under way, and what the arithmetic needs; kept from run to run."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._map: memoryview | None = None

    def rooms(self, count: int, nbytes: int) -> list[memoryview]:
        """So many rooms of so many bytes; what they held before is lost."""
        if not count * nbytes:
            return []
        if self._map is None or len(self._map) < count * nbytes:
            self._map = map_memory(count * nbytes)
            prefer_huge_pages(address_of(self._map), count * nbytes)
        whole = self._map
        return [whole[start : start + nbytes] for start in range(0, count * nbytes, nbytes)]


class _Job:
    """One run of a relay as this rank sees it."""

    def __init__(
        self,
        chains: Sequence[Chain],
        connections: HostConnections,
        sources: Sources,
        sinks: Sinks,
        landed: Landed,
        memory: _Memory,
        pacer: Pacer,
        timeout_s: float,
        message_nbytes: int | None,
    ) -> None:
        self._pacer = pacer
        slow_s = pacer.longest_s(max(sent_by_rank(chains).values(), default=0))
        self.ledger = Ledger(connections.rank, timeout_s + slow_s)
        self._chains = chains
        self._connections = connections
        self._sources = sources
        self._sinks = sinks
        self._landed = landed
        self._scratch = memory.scratch
        when = schedule(chains, message_nbytes)
        self._tasks = tasks_of(connections.rank, chains, when)
        self._next = next(self._tasks, None)
        longest = max((c.spans[-1][1] for c in chains if c.spans), default=0)
        self._free = memory.rooms(when.rooms, min(when.message_nbytes, longest))
        self._ready: deque[_Ready] = deque()
        self._unanswered: deque[_Sent] = deque()
        self._answers: deque[tuple[int, dist.Work]] = deque()
        self._last_read: tuple[Strip, int, int] | None = None
        self._last_data = _NO_BYTES
        for chain in chains:
            for sender, receiver in pairwise(hop.rank for hop in chain.hops):
                if connections.rank == sender:
                    self.ledger.expect(receiver, sent=chain.nbytes)
                if connections.rank == receiver:
                    self.ledger.expect(sender, received=chain.nbytes)

    def run(self) -> None:
        while True:
            self._settle_what_is_past()
            self._ask_ahead()
            if self._ready:
                self._do(self._ready.popleft())
            elif self._next is not None:
                # There is no room for it.
                self._settle(self._unanswered.popleft())
            else:
                break
        while self._unanswered:
            self._settle(self._unanswered.popleft())
        self._finish_answers(0)

    def _settle_what_is_past(self) -> None:
        """Have back the room of what was sent two steps ago: it was taken one step ago."""
        coming = self._ready[0].task if self._ready else self._next
        while coming and self._unanswered and self._unanswered[0].step + 1 < coming.step:
            self._settle(self._unanswered.popleft())

    def _ask_ahead(self) -> None:
        """Ask for the messages of the next tasks, in their order, while there is room."""
        while self._next is not None and len(self._ready) < _AHEAD:
            task = self._next
            ready = self._make_ready(task)
            if ready is None:
                return
            self._next = next(self._tasks, None)
            self._ready.append(ready)
            if task.hop:
                peer, tag = self._hop(task, -1).rank, _TAGS * task.chain
                with self.ledger.blaming(peer):
                    data = as_tensor(ready.memory)
                    ready.data = self._connections.receive(data, peer, tag + _DATA)
                    ready.mark = self._connections.receive(nothing(), peer, tag + _MARK)

    def _make_ready(self, task: Task) -> _Ready | None:
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
        room = self._free.pop()
        return _Ready(task, room[:nbytes], room)

    def _lasting(self, hop: Hop, task: Task) -> memoryview | None:
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
        if task.hop == len(chain.hops) - 1:
            self._landed(chain.place, task.start, task.stop)
        else:
            self._send(ready)

    def _take(self, ready: _Ready) -> None:
        """Wait for a task's message, and answer it."""
        peer = self._hop(ready.task, -1).rank
        assert ready.mark is not None
        assert ready.data is not None
        self.ledger.wait(peer, ready.mark)
        self.ledger.wait(peer, ready.data)
        self.ledger.count(peer, received=len(ready.memory))
        with self.ledger.blaming(peer):
            tag = _TAGS * ready.task.chain + _ANSWER
            self._answers.append((peer, self._connections.send(nothing(), peer, tag)))
        self._finish_answers(_MOST_ANSWERS)

    def _send(self, ready: _Ready) -> None:
        peer, tag = self._hop(ready.task, 1).rank, _TAGS * ready.task.chain
        self._pacer.wait(len(ready.memory))
        with self.ledger.blaming(peer):
            answer = self._connections.receive(nothing(), peer, tag + _ANSWER)
            data = self._connections.send(as_tensor(ready.memory), peer, tag + _DATA)
            mark = self._connections.send(nothing(), peer, tag + _MARK)
        self._unanswered.append(
            _Sent(ready.task.step, peer, ready.memory, ready.room, (answer, data, mark))
        )

    def _settle(self, sent: _Sent) -> None:
        for work in sent.works:
            self.ledger.wait(sent.peer, work)
        self.ledger.count(sent.peer, sent=len(sent.memory))
        if sent.room is not None:
            self._free.append(sent.room)

    def _finish_answers(self, most_left: int) -> None:
        while len(self._answers) > most_left:
            self.ledger.wait(*self._answers.popleft())

    def _hop(self, task: Task, on: int) -> Hop:
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

    task: Task
    memory: memoryview
    room: memoryview | None = None
    is_summed: bool = False
    data: dist.Work | None = None
    mark: dist.Work | None = None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message under way. gloo drops it if its work object is dropped before it was sent."""

    step: int
    peer: int
    memory: memoryview
    room: memoryview | None
    works: tuple[dist.Work, ...]


def _give_up(
    what: str, connections: HostConnections, ledger: Ledger, failed: PeerFailed
) -> PeerLostError:
    """Cut the connections, and say who is to blame."""
    own = LastWord(tuple(failed.peers), late=ledger.is_over())
    _leave(connections, own, failed)
    words: Mapping[int, LastWord | None] = dict.fromkeys(failed.peers)
    try:
        assert connections.store is not None
        words = ask_whom_to_blame(connections.store, connections.ranks, connections.rank, own)
    except PeerLostError as unreachable:
        failed.add_note(str(unreachable))
    cause = "" if failed.__cause__ is None else f" ({first_line(failed.__cause__)})"
    told = []
    for peer, word in words.items():
        if word is None:
            how = "did not answer in time" if ledger.is_over() else "was lost"
            told.append(f"{ledger.progress(peer)} {how}{cause}")
        elif word.reason is not None:
            told.append(f"rank {peer} failed: {word.reason}")
        else:
            told.append(f"{ledger.progress(peer)} waited in vain, too{cause}")
    return PeerLostError(
        f"rank {connections.rank} was {what}, and {', '.join(told)}. What was saved before stands. "
        f"If the rank is alive but slow, use a longer timeout; else restart the job."
    )


def _leave(connections: HostConnections, word: LastWord, failure: BaseException) -> None:
    try:
        assert connections.store is not None
        leave_word(connections.store, connections.rank, word)
    except PeerLostError as unreachable:
        failure.add_note(str(unreachable))
    finally:
        connections.disconnect()
