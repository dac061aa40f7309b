"""Exchange of parts of tensors between ranks, in parcels of bounded size.

Both ranks of a pair divide what one takes of the other into the same parcels, so nothing is sent
but the values. A parcel is read, sent, and taken apart before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from localckpt.memory.host_memory import round_up
from localckpt.ranks.deadline import Deadline
from localckpt.replication.transport import Transport
from localckpt.state_dict.boxes import Region, divided, volume
from localckpt.state_dict.source import MemorySource

PARCEL_NBYTES = 16 << 20
# Items of every dtype begin where memory may be viewed as that dtype.
_ALIGN = 16


class PackedPart(NamedTuple):
    """Elements of a tensor, a run of bytes in a parcel; ``item`` is the caller's number for it."""

    item: int
    region: Region
    offset: int
    nbytes: int


class Parcel(list[PackedPart]):
    """Parts that are sent in one message, by their offsets."""

    @property
    def nbytes(self) -> int:
        return round_up(self[-1].offset + self[-1].nbytes, _ALIGN)


def parcels_of(parts: Iterable[tuple[int, Region, int]]) -> list[Parcel]:
    """Divide parts among parcels, in their order: item, region and size of an element.

    Parts that are larger than a parcel are divided by rows.
    """
    parcels: list[Parcel] = []
    for item, whole, itemsize in parts:
        for region in divided(whole, PARCEL_NBYTES // itemsize):
            nbytes = volume(region) * itemsize
            offset = parcels[-1].nbytes if parcels else 0
            if not parcels or offset + nbytes > PARCEL_NBYTES:
                parcels.append(Parcel())
                offset = 0
            parcels[-1].append(PackedPart(item, region, offset, nbytes))
    return parcels


def exchange_parts(
    transport: Transport,
    outgoing: Mapping[int, Sequence[Parcel]],
    incoming: Mapping[int, Sequence[Parcel]],
    read: Callable[[Mapping[int, tuple[Parcel, memoryview]]], None],
    take: Callable[[PackedPart, int, torch.Tensor], None],
    timeout_s: float,
) -> None:
    """Send parcels to ranks, and take those that ranks send here.

    ``read`` reads a parcel for each of some ranks into memory; ``take`` takes the bytes of a part
    that a rank has sent. When it raises, the peers are to see this rank as lost.
    """
    deadline = Deadline.after(timeout_s)
    memory = {
        (peer, is_sent): memoryview(bytearray(max(parcel.nbytes for parcel in parcels)))
        for is_sent, side in enumerate((incoming, outgoing))
        for peer, parcels in side.items()
    }

    rounds = max(len(parcels) for parcels in (*outgoing.values(), *incoming.values()))
    for turn in range(rounds):
        sent, received = (
            {peer: parcels[turn] for peer, parcels in side.items() if turn < len(parcels)}
            for side in (outgoing, incoming)
        )
        to = {peer: (p, memory[peer, True][: p.nbytes]) for peer, p in sent.items()}
        come = {peer: memory[peer, False][: p.nbytes] for peer, p in received.items()}
        read(to)
        transport.exchange(
            [(peer, MemorySource(view)) for peer, (_, view) in to.items()],
            list(come.items()),
            deadline.left_s,
        )
        for peer, parcel in received.items():
            for part in parcel:
                view = come[peer][part.offset : part.offset + part.nbytes]
                take(part, peer, torch.frombuffer(view, dtype=torch.uint8))
