"""Who sends what to whom: pure functions, on random worlds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import NoReplicasAvailableError
from localckpt.replication import parts
from localckpt.replication.exchange import ExchangePlan, plan_among_nodes
from localckpt.replication.parts import parcels_of
from tests.replication.sources import plan_exchange

_RanksOn = dict[str, list[int]]
_HeldOn = dict[int, list[str]]


@st.composite
def _worlds_of_nodes(draw: st.DrawFn) -> tuple[_HeldOn, _RanksOn, dict[int, list[int]]]:
    """Shards on any nodes, of one rank or more, and any wishes."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    ranks = iter(range(sum(counts)))
    ranks_on = {f"node {n}": [next(ranks) for _ in range(c)] for n, c in enumerate(counts)}
    on_some = st.lists(st.sampled_from(sorted(ranks_on)), min_size=1, unique=True)
    held_on = dict(enumerate(draw(st.lists(on_some, min_size=1, max_size=12))))
    wish = st.lists(st.sampled_from(sorted(held_on)), unique=True)
    wanted = draw(st.dictionaries(st.integers(0, sum(counts) - 1), wish))
    return held_on, ranks_on, wanted


def _loads(plan: ExchangePlan[int], ranks_on: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """For each node how many shards each of its ranks sends."""
    return {node: [len(plan.sends(rank)) for rank in on] for node, on in ranks_on.items()}


@given(_worlds_of_nodes())
def test_any_rank_of_a_node_reads_what_the_node_holds(
    world: tuple[_HeldOn, _RanksOn, dict[int, list[int]]],
) -> None:
    held_on, ranks_on, wanted = world
    node_of = {rank: node for node, on in ranks_on.items() for rank in on}

    plan = plan_among_nodes(held_on, ranks_on, wanted)

    met = Counter((entry.receiver, entry.id_) for entry in plan.entries)
    assert met == Counter((rank, id_) for rank, ids in wanted.items() for id_ in ids)
    for entry in plan.entries:
        assert node_of[entry.sender] in held_on[entry.id_]
        has_it = node_of[entry.receiver] in held_on[entry.id_]
        assert (entry.sender == entry.receiver) == has_it


@pytest.mark.parametrize("copies", [2, 3, 4])
@given(
    cliques=st.integers(1, 4),
    ranks_each=st.integers(1, 8),
    makes_copies=st.booleans(),
    data=st.data(),
)
def test_after_lost_nodes_no_rank_sends_more_than_its_fair_share(
    copies: int, cliques: int, ranks_each: int, makes_copies: bool, data: st.DataObject
) -> None:
    # Cliques of nodes hold each other's shards; of each, all but one at most come back empty. The
    # ideal is reached since a node that holds one of a clique's shards holds all of them.
    ranks_on = {
        f"{clique}.{member}": [
            (member * cliques + clique) * ranks_each + place for place in range(ranks_each)
        ]
        for clique in range(cliques)
        for member in range(copies)
    }
    lost = [
        data.draw(st.sets(st.integers(0, copies - 1), max_size=copies - 1)) for _ in range(cliques)
    ]
    held_on: dict[int, list[str]] = {}
    wanted: dict[int, list[int]] = {}
    for node, on in ranks_on.items():
        clique, member = map(int, node.split("."))
        left = [f"{clique}.{m}" for m in range(copies) if m not in lost[clique]]
        peers = [ranks_on[f"{clique}.{m}"] for m in range(copies)]
        for place, rank in enumerate(on):
            held_on[rank] = left
            everything = makes_copies and member in lost[clique]
            wanted[rank] = [peer[place] for peer in peers] if everything else [rank]

    loads = _loads(plan_among_nodes(held_on, ranks_on, wanted), ranks_on)

    ideal = 0
    for clique in range(cliques):
        sent = [sum(loads[f"{clique}.{m}"]) for m in range(copies) if m not in lost[clique]]
        transfers = ranks_each * len(lost[clique]) * (copies if makes_copies else 1)
        assert sum(sent) == transfers
        assert max(sent) - min(sent) <= 1
        ideal = max(ideal, math.ceil(transfers / (ranks_each * len(sent))))
    assert max(chain.from_iterable(loads.values())) == ideal


def test_all_shards_that_nobody_holds_are_named() -> None:
    gone = [(5, 1, "run"), (5, 2, "run")]

    with pytest.raises(NoReplicasAvailableError) as raised:
        plan_exchange({0: [(5, 0, "run")], 1: []}, {0: [gone[0]], 1: [*gone, (5, 0, "run")]})

    assert all(str(id_) in str(raised.value) for id_ in gone)
    assert "(5, 0, 'run')" not in str(raised.value)
    assert "wanted by rank 0, 1" in str(raised.value)


_SMALL = 256


class _Part(NamedTuple):
    start: int
    nbytes: int


@given(st.lists(st.integers(1, _SMALL), max_size=20))
def test_parcels_have_all_parts_each_once_and_are_of_bounded_size(sizes: list[int]) -> None:
    wanted = [_Part(n, nbytes) for n, nbytes in enumerate(sizes)]

    with mock.patch.object(parts, "PARCEL_NBYTES", _SMALL):
        parcels = parcels_of(wanted)

    assert [part for parcel in parcels for part in parcel] == wanted
    for parcel in parcels:
        assert 0 < sum(-(-part.nbytes // 16) * 16 for part in parcel) <= _SMALL
