"""Sums that are computed on their way: from rank to rank, each adding what it has.

A chain carries one sum over the ranks of its hops to the last of them, in messages of bounded size.
This says what is to be done and in which order; nothing is moved here, and all ranks derive the
same from the same chains.

The order is what makes it impossible that ranks wait for each other in a ring. Message u of a chain
is handled by hop h at step ``start + u + h``, and every rank goes through its tasks by step, then
hop, then chain. So a message always comes from an earlier task, and whichever rank is behind all
others has nobody to wait for. It always finds room, too, where the most messages that a rank sends
in one step fit twice: only what it sent in this step and the one before can be unanswered then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from localckpt.parity.gf import (
    Bytes,
    Scratch,
    scale_xor_into,
    xor_into,
    xtime_xor_into,
)
from localckpt.parity.stripes import Strip
from localckpt.replication.progress import chunks

BUFFERS_NBYTES = 64 << 20
"""The most memory that a rank needs for messages under way, whatever the size of the images."""

_LARGEST_MESSAGE_NBYTES = 8 << 20
_SMALLEST_MESSAGE_NBYTES = 512 << 10
# Rooms for each message that a rank sends in one step: fewer could lock ranks up, see above; with
# more, messages would have to be smaller, which measured slower.
_STEPS_OF_BUFFERS = 2
_MOST_AT_ONCE = BUFFERS_NBYTES // _SMALLEST_MESSAGE_NBYTES // _STEPS_OF_BUFFERS


@dataclass(frozen=True, slots=True)
class Term:
    """A factor of GF(2^8), times what a member keeps of the stripe."""

    strip: Strip
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Hop:
    """Work of one rank on the sum: ``acc = x * acc`` if it ``doubles``, then adds its terms."""

    rank: int
    terms: tuple[Term, ...]
    doubles: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """One sum over one stripe, ``place`` of a member's image or parity; the last hop keeps it."""

    hops: tuple[Hop, ...]
    place: Strip

    @property
    def nbytes(self) -> int:
        return self.place.nbytes


@dataclass(frozen=True, slots=True)
class ChainSchedule:
    """The step at which each chain starts, and messages that a rank has memory for."""

    starts: tuple[int, ...]
    message_nbytes: int
    buffers: int
    """Number of messages that a rank has memory for."""


@dataclass(frozen=True, slots=True, order=True)
class ChainStep:
    """One message at one hop; they compare in the order in which a rank does them."""

    step: int
    hop: int
    chain: int
    start: int
    stop: int


def schedule(chains: Sequence[Chain]) -> ChainSchedule:
    """Let as many chains run side by side as there is room for, the others after them."""
    waves: list[list[Chain]] = [[]]
    at_once, load = 0, dict[int, int]()
    for chain in chains:
        senders = [hop.rank for hop in chain.hops[:-1]]
        if waves[-1] and any(load.get(rank, 0) >= _MOST_AT_ONCE for rank in senders):
            waves.append([])
            load.clear()
        waves[-1].append(chain)
        for rank in senders:
            load[rank] = load.get(rank, 0) + 1
            at_once = max(at_once, load[rank])
    message_nbytes = _LARGEST_MESSAGE_NBYTES
    while _STEPS_OF_BUFFERS * at_once * message_nbytes > BUFFERS_NBYTES:
        message_nbytes //= 2
    starts, start = list[int](), 0
    for wave in waves:
        starts += [start] * len(wave)
        start += max((-(-c.nbytes // message_nbytes) + len(c.hops) for c in wave), default=0)
    return ChainSchedule(tuple(starts), message_nbytes, _STEPS_OF_BUFFERS * at_once)


def sent_by_rank(chains: Sequence[Chain]) -> dict[int, int]:
    sent: dict[int, int] = {}
    for chain in chains:
        for hop in chain.hops[:-1]:
            sent[hop.rank] = sent.get(hop.rank, 0) + chain.nbytes
    return sent


def tasks_of(rank: int, chains: Sequence[Chain], when: ChainSchedule) -> Iterator[ChainStep]:
    def tasks(number: int, hop: int) -> Iterator[ChainStep]:
        messages = chunks(chains[number].nbytes, when.message_nbytes)
        for step, (start, stop) in enumerate(messages, when.starts[number] + hop):
            yield ChainStep(step, hop, number, start, stop)

    return heapq.merge(
        *(
            tasks(number, place)
            for number, chain in enumerate(chains)
            for place, hop in enumerate(chain.hops)
            if hop.rank == rank
        )
    )


def add_terms(
    hop: Hop,
    acc: Bytes,
    read: Callable[[Strip, int, int], Bytes],
    start: int,
    scratch: Scratch,
    *,
    first: bool,
) -> None:
    """Do to part of a sum, from ``start`` in the stripe, what a hop does.

    ``acc`` holds the sum of the hops before. ``read`` returns the bytes of a strip between two
    places, fewer at its end, valid until the next call.
    """
    plain = next((term for term in hop.terms[:1] if term.factor == 1), None)
    data = acc[:0] if plain is None else read(plain.strip, start, start + len(acc))
    if first:
        acc[: len(data)] = data
        acc[len(data) :] = 0
    elif hop.doubles:
        xtime_xor_into(acc, data, scratch)
    else:
        xor_into(acc, data)
    for term in hop.terms[plain is not None :]:
        data = read(term.strip, start, start + len(acc))
        scale_xor_into(acc, data, term.factor, scratch)
