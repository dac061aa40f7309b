"""Lost shards are computed by the ranks of whatever job reads the checkpoint."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.availability.coverage import complete_checkpoints
from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import groups_to_compute
from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import Checkpoint, Generation, Group, Piece
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.parity.gf import Bytes
from localckpt.parity.image import ParityOf
from localckpt.parity.planning import Repair, Seen, plan_rebuild, plan_repairs, take_together
from localckpt.parity.stripes import PARITY_KIND, Kind, ParityLayout
from localckpt.replication.redundancy import Lost
from localckpt.replication.schemes import SCHEMES
from tests.parity.groups import Kept, carry_out, group

_SHAPES = [(3, 1), (4, 1), (4, 2), (5, 2)]


@cache
def _kept(size: int, tolerated: int) -> tuple[ParityLayout, dict[Kept, Bytes]]:
    layout = ParityLayout(
        ((size - tolerated) * BLOCK_NBYTES + 99, *[70_001] * (size - 1)), tolerated
    )
    return layout, group(layout)


@st.composite
def _situations(draw: st.DrawFn) -> tuple[Checkpoint, list[Group], Inventory]:
    """Groups of a checkpoint, and pieces of them on the nodes of a job of any size."""
    shapes = draw(st.lists(st.sampled_from(_SHAPES), min_size=1, max_size=2))
    saved_by = sum(size for size, _ in shapes)
    numbers = iter(draw(st.permutations(range(saved_by))))
    groups = [
        Group(tuple(next(numbers) for _ in range(size)), tolerated, PARITY_KIND)
        for size, tolerated in shapes
    ]
    checkpoint = Checkpoint(Generation(1, 2), 3, saved_by)
    node_of = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=7))
    ranks_on: dict[str, list[int]] = {}
    for rank, node in enumerate(node_of):
        ranks_on.setdefault(node, []).append(rank)
    inventory = Inventory(ranks_on, SCHEMES)
    for of in groups:
        pieces = draw(st.permutations([Piece(r, k) for r in of.ranks for k in ("shard", "parity")]))
        # Up to two more than can be spared.
        there = pieces[draw(st.integers(0, 2 * of.tolerated + 2)) :]
        for piece in there:
            node = draw(st.sampled_from(sorted(ranks_on)))
            if piece.is_shard:
                inventory.add(checkpoint, piece.rank, node, 5)
            else:
                inventory.add_piece(checkpoint, piece.rank, node, of)
    return checkpoint, groups, inventory


def _compute(repair: Repair) -> None:
    """Do what the ranks would, each with what it reads, and compare with what was saved."""
    layout, kept = _kept(len(repair.group.ranks), repair.group.tolerated)
    place = {member: number for number, member in enumerate(repair.group.ranks)}
    of = ParityOf(repair.group, layout.image_nbytes)
    seen = []
    held: dict[int, dict[Kept, Bytes]] = {rank: {} for rank in repair.ranks}
    for rank in repair.ranks:
        for kind, member in repair.reads(rank):
            nbytes = layout.image_nbytes[place[member]]
            is_image = kind is Kind.IMAGE
            report = Seen(kind, member, nbytes=nbytes)
            if not is_image:
                report = Seen(kind, member, of=of.to_json())
            seen.append((rank, Seen(*json.loads(json.dumps(report)))))
            held[rank][kind, place[member]] = kept[kind, place[member]]
    problems, _, remains = take_together(repair, seen)
    sinks = {(Kind.IMAGE, place[m]): np.zeros_like(kept[Kind.IMAGE, place[m]]) for m in place}
    wanted = {place[member]: rank for member, rank in repair.wanted.items()}

    chains = plan_rebuild(layout, remains, wanted)
    carry_out(chains, held, sinks)

    assert not problems
    for member, rank in repair.wanted.items():
        assert np.array_equal(sinks[Kind.IMAGE, place[member]], kept[Kind.IMAGE, place[member]])
        ends = [chain.hops[-1].rank for chain in chains if chain.place.member == place[member]]
        assert set(ends) <= {rank}
    for chain in chains:
        # No rank sends to itself, however many members it plays.
        assert all(one.rank != other.rank for one, other in pairwise(chain.hops))


@settings(max_examples=120, deadline=None)
@given(_situations(), st.data())
def test_any_ranks_compute_what_is_lost_of_groups_of_any_other_ranks(
    situation: tuple[Checkpoint, list[Group], Inventory], data: st.DataObject
) -> None:
    checkpoint, groups, inventory = situation
    job = [rank for ranks in inventory.ranks_on.values() for rank in ranks]
    is_complete = checkpoint in complete_checkpoints(inventory)
    try:
        wanted = groups_to_compute(checkpoint, inventory, ())
    except NoReplicasAvailableError:
        assert not is_complete
        return
    assert is_complete
    computed_by = {member: data.draw(st.sampled_from(job)) for member in wanted}

    repairs = plan_repairs(Lost(checkpoint, "run", inventory, wanted, computed_by))

    assert {r.group for r in repairs} == set(wanted.values()) <= set(groups)
    held = inventory.holders(checkpoint)
    for repair in repairs:
        assert set(repair.ranks) <= set(job)
        assert repair.wanted == {
            m: computed_by[m] for m, of in wanted.items() if of == repair.group
        }
        for member, reader in repair.images.items():
            assert inventory.node_of(reader) in held[member]
        for member, reader in repair.parities.items():
            nodes = inventory.groups(checkpoint)[repair.group][member]
            assert inventory.node_of(reader) in nodes
        _compute(repair)
