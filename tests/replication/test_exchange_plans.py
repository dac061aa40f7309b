"""Who sends what to whom: pure functions, on random worlds."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import NoReplicasAvailableError
from localckpt.ids import CkptID
from localckpt.replication.exchange import ExchangePlanEntry, plan_exchange

_RANKS = st.integers(0, 7)
_IDS = st.integers(0, 9).map(lambda rank: CkptID(5, rank, "s"))


@st.composite
def _worlds(
    draw: st.DrawFn,
) -> tuple[dict[int, list[CkptID]], dict[int, list[CkptID]]]:
    available = draw(st.dictionaries(_RANKS, st.lists(_IDS, unique=True), min_size=1))
    held = sorted({id_ for ids in available.values() for id_ in ids})
    wish = st.lists(st.sampled_from(held), unique=True) if held else st.just([])
    return available, draw(st.dictionaries(_RANKS, wish))


@given(_worlds())
def test_every_wish_is_met_once_by_a_rank_that_holds_the_shard(
    world: tuple[dict[int, list[CkptID]], dict[int, list[CkptID]]],
) -> None:
    available, wanted = world

    plan = plan_exchange(available, wanted)

    met = Counter((entry.receiver, entry.id_) for entry in plan.entries)
    assert met == Counter((rank, id_) for rank, ids in wanted.items() for id_ in ids)
    assert all(entry.id_ in available[entry.sender] for entry in plan.entries)


@given(_worlds())
def test_an_own_copy_is_never_fetched_from_another_rank(
    world: tuple[dict[int, list[CkptID]], dict[int, list[CkptID]]],
) -> None:
    available, wanted = world

    plan = plan_exchange(available, wanted)

    for entry in plan.entries:
        holds_it = entry.id_ in available.get(entry.receiver, [])
        assert (entry.sender == entry.receiver) == holds_it


@given(_worlds(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_told_makes_no_difference(
    world: tuple[dict[int, list[CkptID]], dict[int, list[CkptID]]], chance: random.Random
) -> None:
    available, wanted = world
    ranks = list(available)
    chance.shuffle(ranks)
    shuffled = {rank: set(available[rank]) for rank in ranks}
    as_tuples: dict[int, Any] = {
        rank: [tuple(id_) for id_ in ids] for rank, ids in sorted(wanted.items(), reverse=True)
    }

    assert plan_exchange(shuffled, as_tuples) == plan_exchange(available, wanted)


@given(_worlds())
def test_sends_and_receives_and_required_ids_are_views_of_the_plan(
    world: tuple[dict[int, list[CkptID]], dict[int, list[CkptID]]],
) -> None:
    available, wanted = world

    plan = plan_exchange(available, wanted)

    assert list(chain.from_iterable(map(plan.sends, range(8)))) == sorted(
        plan.transfers, key=lambda entry: entry.sender
    )
    assert list(chain.from_iterable(map(plan.receives, range(8)))) == plan.transfers
    for rank in range(8):
        required = plan.required_ids(rank)
        assert len(required) == len(set(required))
        assert {entry.id_ for entry in plan.sends(rank)} <= set(required)


@given(st.integers(1, 6), st.integers(0, 20))
def test_holders_of_everything_share_the_sending_evenly(holders: int, shards: int) -> None:
    ids = [CkptID(1, rank, "") for rank in range(shards)]
    available = dict.fromkeys(range(holders), ids)

    plan = plan_exchange(available, {99: ids})

    loads = [len(plan.sends(rank)) for rank in range(holders)]
    assert max(loads) - min(loads) <= 1


def test_the_lowest_rank_sends_when_loads_are_equal() -> None:
    plan = plan_exchange({3: ["a", "b"], 1: ["a", "b"]}, {0: ["a", "b"], 1: ["b"]})

    assert plan.entries == (
        ExchangePlanEntry(1, 0, "a"),
        ExchangePlanEntry(3, 0, "b"),
        ExchangePlanEntry(1, 1, "b"),
    )


def test_all_shards_that_nobody_holds_are_named() -> None:
    gone = [(5, 1, "run"), (5, 2, "run")]

    with pytest.raises(NoReplicasAvailableError) as raised:
        plan_exchange({0: [(5, 0, "run")], 1: []}, {0: [gone[0]], 1: [*gone, (5, 0, "run")]})

    assert all(str(id_) in str(raised.value) for id_ in gone)
    assert "(5, 0, 'run')" not in str(raised.value)
    assert "wanted by rank 0, 1" in str(raised.value)
