"""Exchange of parts of tensors between ranks, in parcels of bounded size.

Both ranks of a pair divide what one takes of the other into the same parcels, so nothing is sent
but the values. A parcel is read, sent, and taken apart before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

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
    sides = [
        {peer: parcels_of(parts) for peer, parts in side.items()} for side in (outgoing, incoming)
    ]
    memory = [
        {peer: memoryview(bytearray(max(map(_nbytes_of, of)))) for peer, of in side.items()}
        for side in sides
    ]
    for turn in range(max(len(parcels) for side in sides for parcels in side.values())):
        sent, received = (
            {
                peer: (parcels[turn], memory[number][peer][: _nbytes_of(parcels[turn])])
                for peer, parcels in side.items()
                if turn < len(parcels)
            }
            for number, side in enumerate(sides)
        )
        read([placed for parcel in sent.values() for placed in _placed(*parcel)])
        transport.exchange(
            [(peer, MemorySource(view)) for peer, (_, view) in sent.items()],
            [(peer, view) for peer, (_, view) in received.items()],
            deadline.left_s,
        )
        for parcel in received.values():
            for part, view in _placed(*parcel):
                take(part, view)


def _nbytes_of(parcel: Sequence[_Sized]) -> int:
    return sum(round_up(part.nbytes, _ALIGN) for part in parcel)


def _placed(parcel: Sequence[PartT], memory: memoryview) -> list[tuple[PartT, memoryview]]:
    placed, at = [], 0
    for part in parcel:
        placed.append((part, memory[at : at + part.nbytes]))
        at += round_up(part.nbytes, _ALIGN)
    return placed
