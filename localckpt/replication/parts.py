"""Exchange of parts of tensors between ranks, in parcels of bounded size.

Both ranks of a pair divide what one takes of the other into the same parcels, so nothing is sent
but the values. A parcel is read, sent, and taken apart before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol, TypeAlias, TypeVar

from localckpt.memory.host_memory import round_up
from localckpt.ranks.deadline import Deadline
from localckpt.replication.transport import Transport
from localckpt.state_dict.source import MemorySource

PARCEL_NBYTES = 16 << 20
# Items of every dtype begin where memory may be viewed as that dtype.
_ALIGN = 16


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


PartT = TypeVar("PartT", bound=_Sized)


def parcels_of(parts: Iterable[PartT]) -> list[list[PartT]]:
    """Divide parts, none of which is larger than a parcel, among parcels, in their order."""
    parcels: list[list[PartT]] = []
    used = PARCEL_NBYTES
    for part in parts:
        nbytes = round_up(part.nbytes, _ALIGN)
        if used + nbytes > PARCEL_NBYTES:
            parcels.append([])
            used = 0
        parcels[-1].append(part)
        used += nbytes
    return parcels


def exchange_parts(
    transport: Transport,
    outgoing: Mapping[int, Sequence[PartT]],
    incoming: Mapping[int, Sequence[PartT]],
    read: Callable[[list[tuple[PartT, memoryview]]], None],
    take: Callable[[PartT, memoryview], None],
    timeout_s: float,
) -> None:
    """Send parts that ``read`` reads to ranks, and ``take`` those that ranks send here.

    When it raises, the peers are to see this rank as lost.
    """
    deadline = Deadline.after(timeout_s)
    for sent, received in zip_longest(_turns(outgoing), _turns(incoming), fillvalue=()):
        read([placed for _, _, parcel in sent for placed in parcel])
        transport.exchange(
            [(peer, MemorySource(memory)) for peer, memory, _ in sent],
            [(peer, memory) for peer, memory, _ in received],
            deadline.left_s,
        )
        for _, _, parcel in received:
            for part, memory in parcel:
                take(part, memory)


_Parcel: TypeAlias = list[tuple[PartT, memoryview]]


def _turns(
    side: Mapping[int, Sequence[PartT]],
) -> Iterator[Sequence[tuple[int, memoryview, _Parcel[PartT]]]]:
    """Yield, turn by turn, a parcel of each peer that has one: its memory, and each part's."""
    parcels = {peer: parcels_of(parts) for peer, parts in side.items()}
    memory = {
        peer: memoryview(bytearray(min(PARCEL_NBYTES, sum(p.nbytes + _ALIGN for p in parts))))
        for peer, parts in side.items()
    }
    for turn in range(max(map(len, parcels.values()), default=0)):
        coming = []
        for peer, of_peer in parcels.items():
            if turn < len(of_peer):
                parcel: _Parcel[PartT] = []
                at = 0
                for part in of_peer[turn]:
                    parcel.append((part, memory[peer][at : at + part.nbytes]))
                    at += round_up(part.nbytes, _ALIGN)
                coming.append((peer, memory[peer][:at], parcel))
        yield coming
