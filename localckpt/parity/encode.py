"""Computation of the parity of a group's images while they are sent around the ring once.

Every stripe has its sums computed on their way: the contributors add their chunks one after
another, and the last sends P and Q to their holders. All stripes are under way at once, so every
rank sends and receives all the time: m times the longest image in all, for m parities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localckpt.parity.chains import Chain, Hop, Term
from localckpt.parity.pipeline import Pipeline
from localckpt.parity.stripes import Kind, ParityLayout
from localckpt.state_dict.source import ShardSource


def encode(
    layout: ParityLayout,
    pipeline: Pipeline,
    source: ShardSource,
    parity: memoryview,
    timeout_s: float,
) -> None:
    """Compute this member's parity; the members of the group call it together.

    That it returned says that this member's part is done, not that every other's is.
    """
    ranks = pipeline.transport.ranks
    member = ranks.index(pipeline.transport.rank)
    _clear_unused(layout, member, parity)
    pipeline.run(
        encoding_chains(layout, ranks),
        {(Kind.IMAGE, member): source},
        {(Kind.PARITY, member): parity},
        timeout_s,
    )


def encoding_chains(layout: ParityLayout, ranks: Sequence[int]) -> list[Chain]:
    """One chain for each row of each stripe; those of one stripe next to each other."""
    chains = []
    for stripe in range(layout.members):
        for number, row in enumerate(layout.rows(stripe)):
            hops = [
                Hop(ranks[member], (Term(layout.chunk(stripe, member)),), doubles=number == 1)
                for member in layout.contributors(stripe)
            ]
            hops.append(Hop(ranks[row.member], ()))
            chains.append(Chain(tuple(hops), row))
    return chains


def _clear_unused(layout: ParityLayout, member: int, parity: memoryview) -> None:
    """Zeros where no chunk of a stripe reaches, so no sum comes there."""
    for row in range(layout.parity):
        strip = layout.row((member - row) % layout.members, row)
        unused = parity[strip.start + strip.nbytes : strip.start + layout.chunk_nbytes]
        np.frombuffer(unused, np.uint8)[:] = 0
