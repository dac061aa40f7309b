"""Computes what members of a parity group lost, on its way to the ranks that want it.

What is left must have been verified before: a sum tells that one of its parts is wrong, not which.
So the blocks that come out are checked by the caller, who has the digests of what was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from localckpt.errors import CorruptShardError, MismatchError
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.replication.parity.chains import Chain
from localckpt.replication.parity.pipeline import Pipeline, Sinks, Sources
from localckpt.replication.parity.stripes import Kind, ParityLayout, Strip

__all__ = ["Verify", "rebuild"]

Verify: TypeAlias = Callable[[Kind, int, int, memoryview], bool]
"""``verify(kind, member, block, content)``: whether a block is what was lost.

Blocks come in any order, each whole, the last as long as it is. Digests that are in the image
themselves are not there before the end: whoever has no others checks all when it is over.
"""

# Of blocks that are not what was lost, so many are named.
_NAMED = 10


def rebuild(
    layout: ParityLayout,
    chains: Sequence[Chain],
    pipeline: Pipeline,
    sources: Sources,
    sinks: Sinks,
    timeout_s: float,
    *,
    verify: Verify | None = None,
    message_nbytes: int | None = None,
) -> None:
    """Carry out a plan; all ranks of the pipeline call it together, also those with nothing to do.

    Args:
        layout: As the parity was encoded.
        chains: From :func:`plan_rebuild`; the same on all ranks.
        sources: All images and parities that the plan reads on this rank.
        sinks: Writable memory for the whole image of each member that this rank wants.
        timeout_s: Deadline of it all, in seconds.
        verify: Asked about every block that is rebuilt here.
        message_nbytes: Size of a message, if it is not to be chosen; the same on all ranks.

    Raises:
        MismatchError: Sources or sinks do not fit the layout, or the plan.
        PeerLostError: A rank died, stopped or failed; see :meth:`Pipeline.run`.
        CorruptShardError: Blocks were rebuilt here that are not what was lost: something that was
            read was corrupt. All others are good, and the connections too, so that it can be
            planned again with what is found to be bad.
    """
    rank = pipeline.connections.rank
    _require_fit(layout, chains, rank, sources, sinks)
    sinks = {place: sink.cast("B") for place, sink in sinks.items()}
    refused: list[tuple[int, str]] = []

    def completed(place: Strip, start: int, stop: int) -> None:
        if verify is None:
            return
        sink = sinks[place.kind, place.member]
        end, last = place.start + stop, place.start + place.nbytes
        # A message may end within a block; it is looked at with the message that completes it.
        for first in range((place.start + start) // BLOCK_NBYTES * BLOCK_NBYTES, end, BLOCK_NBYTES):
            until = min(first + BLOCK_NBYTES, last)
            block = first // BLOCK_NBYTES
            if until <= end and not verify(place.kind, place.member, block, sink[first:until]):
                what = f"{place.kind.name.lower()} of member {place.member}"
                refused.append((block, what))

    pipeline.run(
        "rebuilding lost shards",
        *(chains, sources, sinks, timeout_s),
        completed=completed,
        message_nbytes=message_nbytes,
    )
    if refused:
        refused.sort()
        named = ", ".join(f"block {block} of the {what}" for block, what in refused[:_NAMED])
        more = f", and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        raise CorruptShardError(
            f"rank {rank} rebuilt what is not what was lost: {named}{more}. Something that it was "
            f"computed from is corrupt; verify what the other ranks hold, and rebuild without it"
        )


def _require_fit(
    layout: ParityLayout, chains: Sequence[Chain], rank: int, sources: Sources, sinks: Sinks
) -> None:
    def nbytes_of(kind: Kind, member: int) -> int:
        return layout.parity_nbytes if kind is Kind.PARITY else layout.image_nbytes[member]

    read = {
        (term.strip.kind, term.strip.member)
        for chain in chains
        for hop in chain.hops
        for term in hop.terms
        if hop.rank == rank
    }
    written = {(c.place.kind, c.place.member) for c in chains if c.hops[-1].rank == rank}
    for kind, member in sorted(read):
        source = sources.get((kind, member))
        if source is None or source.nbytes != nbytes_of(kind, member):
            raise MismatchError(
                f"rank {rank} is to read the {kind.name.lower()} of member {member}, of "
                f"{nbytes_of(kind, member)} bytes, and has "
                f"{'none' if source is None else source.nbytes}"
            )
    for kind, member in sorted(written | set(sinks)):
        sink = sinks.get((kind, member))
        if sink is None or sink.readonly or sink.nbytes != nbytes_of(kind, member):
            raise MismatchError(
                f"rank {rank} needs writable memory of {nbytes_of(kind, member)} bytes for the "
                f"{kind.name.lower()} of member {member}"
            )
