"""How far checkpoints have climbed: pure functions against plain counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.coverage import SaveOutcome, Standing
from localckpt.availability.durability import (
    Durability,
    SaveVerdict,
    durability_found,
    durability_saved,
    judge_save,
)
from localckpt.availability.inventory import Inventory, ranks_by_node
from localckpt.availability.prefetch import Prefetch, SpareRecord, plan_prefetches
from localckpt.ids import Checkpoint, Generation, Group

_GENERATION = Generation(1, 1)


# For each rank the other ranks that keep a copy of its shard, and how many nodes it wants it on.
_KEEPERS = st.integers(1, 6).flatmap(
    lambda world: st.tuples(
        *(
            st.tuples(st.sets(st.integers(0, world - 1).filter(lambda k, r=rank: k != r)), _WANTED)
            if world > 1
            else st.tuples(st.just(set[int]()), _WANTED)
            for rank in range(world)
        )
    )
)
_WANTED = st.integers(1, 4)


def _assert_counted(told: Durability, copies: Sequence[int], wanted: Sequence[int]) -> None:
    """By the number of nodes that each shard is on, and is to be on."""
    assert told.copies == min(copies)
    assert told.lacking == len(
        [1 for has, wants in zip(copies, wanted, strict=True) if has < wants]
    )
    assert told.survives_node_loss == all(has >= 2 for has in copies)
    assert told.level == ("replicated" if told.survives_node_loss else "local")
    # What is said of how many are wanted is said of a shard that has fewest.
    assert told.wanted == max(
        w for w, has in zip(wanted, copies, strict=True) if has == min(copies)
    )


@given(_KEEPERS)
def test_a_save_has_climbed_as_far_as_the_shard_with_the_fewest_copies(
    shards: Sequence[tuple[set[int], int]],
) -> None:
    outcomes = [
        SaveOutcome(
            iteration=7,
            generation=_GENERATION,
            error=None,
            missing=(),
            kept=tuple(owner for owner, (keepers, _) in enumerate(shards) if rank in keepers),
            wanted=wanted,
        )
        for rank, (_, wanted) in enumerate(shards)
    ]

    told = durability_saved(7, outcomes)

    assert told.iteration == 7
    _assert_counted(told, [1 + len(keepers) for keepers, _ in shards], [w for _, w in shards])


@st.composite
def _found(draw: st.DrawFn) -> tuple[list[str], dict[int, list[int]], dict[int, set[str]]]:
    """The node of each rank, who keeps whose copies, and the nodes that hold each shard."""
    world = draw(st.integers(1, 6))
    nodes = [draw(st.sampled_from("abc")) for _ in range(world)]
    others = st.lists(st.integers(0, world - 1), unique=True, max_size=3)
    keepers = {
        rank: [keeper for keeper in draw(others) if keeper != rank]
        for rank in range(world)
        if draw(st.booleans())
    }
    held = {r: draw(st.sets(st.sampled_from(nodes), min_size=1)) for r in range(world)}
    return nodes, keepers, held


@given(_found())
def test_what_is_found_has_climbed_as_far_as_the_nodes_that_hold_it_tell(
    found: tuple[list[str], dict[int, list[int]], dict[int, set[str]]],
) -> None:
    nodes, keepers, held = found
    checkpoint = Checkpoint(_GENERATION, 7, len(nodes))
    inventory = Inventory(ranks_by_node(nodes))
    for owner, on in held.items():
        for node in on:
            inventory.add(checkpoint, owner, node, 4096)

    protection = {rank: Group((rank, *kept), len(kept)) for rank, kept in keepers.items()}
    told = durability_found(checkpoint, inventory, protection)

    wanted = [1 + len(keepers[rank]) if rank in keepers else 1 for rank in range(len(nodes))]
    _assert_counted(told, [len(held[rank]) for rank in range(len(nodes))], wanted)


def test_a_level_is_told_with_the_copies_on_the_nodes() -> None:
    for durability, reached, survives in (
        (Durability(5, "captured", 0, 1), "captured", False),
        (Durability(5, "local", 1, 1), "local", False),
        (Durability(5, "local", 1, 2, 3), "local, 1 of 2", False),
        (Durability(5, "replicated", 2, 2), "replicated, 2 of 2", True),
        # Of the loss of a node, whatever shared storage has.
        (Durability(5, "drained", 1, 1), "drained", False),
        (Durability(5, "drained", 2, 2), "drained, 2 of 2", True),
    ):
        assert (durability.reached, durability.survives_node_loss) == (reached, survives)


def _verdict(*outcomes: SaveOutcome) -> SaveVerdict:
    told = json.loads(json.dumps([outcome.to_json() for outcome in outcomes]))
    return SaveVerdict.from_json(json.loads(json.dumps(judge_save(told))))


def test_what_any_rank_lacks_is_repaired_and_the_worst_that_any_has_found_holds() -> None:
    older, oldest = Checkpoint(_GENERATION, 5, 3), Checkpoint(_GENERATION, 3, 3)
    outcome = SaveOutcome(7, _GENERATION, None, ())

    verdict = _verdict(
        replace(outcome, lacking=(older,), found=(Standing(oldest, 2, 2, 0),)),
        replace(outcome, lacking=(oldest, older), found=(Standing(oldest, 1, 2, 3),)),
        replace(outcome, found=(Standing(oldest, 1, 2, 1), Standing(older, 0, 2, 1))),
    )

    assert set(verdict.lacking) == {older, oldest}
    assert set(verdict.found) == {Standing(oldest, 1, 2, 3), Standing(older, 0, 2, 1)}
    assert _verdict(outcome, outcome).lacking == _verdict(outcome, outcome).found == ()


def _spare(number: int, nbytes: int, ranks: tuple[int, ...] = ()) -> SpareRecord:
    return SpareRecord(f"{number:016x}", "host", 1, nbytes, 8.0, ranks)


def _numbers(plan: Prefetch) -> list[int]:
    return [number for first, last in plan.nodes for number in range(first, last + 1)]


@given(st.data())
def test_each_spare_gets_whole_nodes_as_many_as_fit_and_spares_share_the_rate(data: Any) -> None:
    places = [
        n for n, size in enumerate(data.draw(st.lists(st.integers(1, 3)))) for _ in range(size)
    ]
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(places), max_size=len(places)))
    on_node = [sum(s for p, s in zip(places, sizes, strict=True) if p == n) for n in set(places)]
    spares = [_spare(i, room) for i, room in enumerate(data.draw(st.lists(st.integers(0, 40))))]

    planned = {plan.spare: plan for plan in plan_prefetches(spares, places, sizes)}

    for spare in spares:
        took = _numbers(planned[spare.name]) if spare.name in planned else []
        left = spare.nbytes - sum(on_node[n] for n in took)
        assert left >= 0
        # What is left out has no room.
        assert all(on_node[n] > left for n in set(range(len(on_node))) - set(took))
    assert sum(plan.rate_limit for plan in planned.values()) <= 8.0 + 1e-9


def test_a_second_spare_takes_what_the_first_has_no_room_for_and_a_plan_for_many_is_short() -> None:
    spares = [_spare(0, 20), _spare(1, 20), _spare(2, 99, (2, 7))]

    planned = plan_prefetches(spares, [0, 0, 1, 1, 2, 2, 3, 3], [5] * 8)
    (many,) = plan_prefetches([_spare(0, 1 << 60)], [r // 8 for r in range(16384)], [9] * 16384)

    assert [_numbers(plan) for plan in planned] == [[0, 1], [2, 3], [1, 3]]
    assert many.nodes == ((0, 2047),)
