"""Parity groups in one process: images, their parity, and chains carried out at once."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np

from localckpt.parity.chains import Chain, add_terms
from localckpt.parity.encode import encoding_chains
from localckpt.parity.gf import Bytes, Scratch
from localckpt.parity.stripes import Kind, ParityLayout, Strip
from tests.replication.sources import image

Kept = tuple[Kind, int]


def image_of(member: int, nbytes: int) -> Bytes:
    """The same for the same member, everywhere."""
    return np.frombuffer(bytearray(image(("member", member), nbytes)), np.uint8)


def carry_out(
    chains: Sequence[Chain],
    held: Mapping[int, Mapping[Kept, Bytes]],
    sinks: MutableMapping[Kept, Bytes],
) -> None:
    """Do what the ranks would, each reading only what it holds."""
    scratch = Scratch()
    for chain in chains:
        acc = np.full(chain.nbytes, 0xEE, np.uint8)
        for number, hop in enumerate(chain.hops):

            def read(strip: Strip, at: int, end: int, rank: int = hop.rank) -> Bytes:
                kept = held[rank][strip.kind, strip.member]
                return kept[strip.start + at : strip.start + max(at, min(end, strip.nbytes))]

            add_terms(hop, acc, read, 0, scratch, first=number == 0)
        sink = sinks[chain.place.kind, chain.place.member]
        sink[chain.place.start : chain.place.start + chain.nbytes] = acc


def group(layout: ParityLayout) -> dict[Kept, Bytes]:
    """The images of all members, and their parity as :func:`encoding_chains` gives it."""
    members = range(layout.members)
    kept = {(Kind.IMAGE, m): image_of(m, layout.image_nbytes[m]) for m in members}
    parities = {(Kind.PARITY, m): np.zeros(layout.parity_nbytes, np.uint8) for m in members}
    held = {m: {(Kind.IMAGE, m): kept[Kind.IMAGE, m]} for m in members}
    carry_out(encoding_chains(layout, members), held, parities)
    return kept | parities
