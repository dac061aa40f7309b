"""The plan of a load on another number of ranks covers each element once, as a gather would."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.inventory import Inventory, ranks_by_node
from localckpt.availability.reshard import (
    Keys,
    ReshardPlan,
    TensorGroup,
    Unsettled,
    assign_readers,
    group_tensors,
    plan_reshard,
    require_equal,
)
from localckpt.errors import MismatchError, NoReplicasAvailableError
from localckpt.ids import Checkpoint, Generation
from localckpt.state_dict.boxes import Region, whole
from localckpt.state_dict.saved_shard import PRIVATE
from tests.state_dict.states import elements_of, runs_of

Element = tuple[int, ...]


@st.composite
def _worlds(draw: Any) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    """Boxes of some tensors on some ranks, saved and wanted, however they lie."""
    shapes = {
        f"t{number}": tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        for number in range(draw(st.integers(1, 4)))
    }

    def runs(size: int) -> tuple[tuple[int, int], ...]:
        chosen = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        return runs_of(index for index, is_in in enumerate(chosen) if is_in)

    def side(most: int) -> dict[int, list[Any]]:
        return {
            rank: [
                (key, "float32", shape, tuple(runs(size) for size in shape))
                for key, shape in shapes.items()
                if draw(st.booleans())
            ]
            for rank in range(draw(st.integers(1, most)))
        }

    return side(4), side(3)


def _grouped(*sides: dict[int, list[Any]]) -> tuple[list[dict[int, list[TensorGroup]]], Any]:
    tables: dict[str, Keys] = {}
    groups: list[dict[int, list[TensorGroup]]] = []
    for side in sides:
        groups.append({})
        for rank, rows in side.items():
            found, named = group_tensors([row if len(row) > 4 else (*row, "") for row in rows])
            groups[-1][rank] = list(found)
            tables |= named
    return groups, tables


def _planned(
    saved: dict[int, list[Any]], wanted: dict[int, list[Any]], nodes: int = 2
) -> dict[int, dict[str, list[tuple[int, Element]]]]:
    """For each rank and key the elements that it takes, with the shard of each."""
    groups, tables = _grouped(saved, wanted)
    readers = {shard: shard % len(wanted) for shard in saved}
    where = [f"node{rank % nodes}" for rank in wanted]
    plan = plan_reshard(*groups, tables, readers, where)
    taken: dict[int, dict[str, list[tuple[int, Element]]]] = {rank: {} for rank in wanted}
    for take in plan.takes:
        assert take.wanted in groups[1][take.receiver]
        assert take.saved in groups[0][take.shard]
        keys = take.keys if take.keys is not None else tables[take.wanted.name].keys
        for key in keys:
            assert key in tables[take.saved.name].keys
            mine = taken[take.receiver].setdefault(key, [])
            mine += [(take.shard, element) for element in elements_of(take.region)]
    return taken


@given(_worlds())
def test_each_element_is_taken_once_from_a_shard_that_has_it_or_the_plan_is_refused(
    worlds: tuple[dict[int, list[Any]], dict[int, list[Any]]],
) -> None:
    saved, wanted = worlds
    held: dict[tuple[int, str], set[Element]] = {}
    for shard, rows in saved.items():
        for key, _, _, region in rows:
            held.setdefault((shard, key), set()).update(elements_of(region))
    everything: dict[str, set[Element]] = {}
    for (_, key), elements in held.items():
        everything.setdefault(key, set()).update(elements)
    given_keys = {key for rows in wanted.values() for key, *_ in rows}
    can = given_keys == everything.keys() and all(
        elements_of(region) <= everything[key]
        for rows in wanted.values()
        for key, _, _, region in rows
    )

    if not can:
        with pytest.raises(MismatchError, match="left as it is"):
            _planned(saved, wanted)
        return
    taken = _planned(saved, wanted)

    for rank, rows in wanted.items():
        for key, _, _, region in rows:
            elements = [element for _, element in taken[rank].get(key, [])]
            assert sorted(elements) == sorted(elements_of(region))
            assert all(
                element in held.get((shard, key), set())
                for shard, element in taken[rank].get(key, [])
            )


def test_a_rank_takes_equal_parts_from_what_it_reads_itself_or_its_node_else_in_turns() -> None:
    shape = (8,)
    saved = {shard: [("w", "float32", shape, whole(shape))] for shard in range(4)}
    wanted = {rank: [("w", "float32", shape, whole(shape))] for rank in range(8)}

    taken = _planned(saved, wanted, nodes=8)

    sources = [{shard for shard, _ in taken[rank]["w"]} for rank in range(8)]
    assert sources[:4] == [{0}, {1}, {2}, {3}]
    assert sorted(shard for those in sources[4:] for shard in those) == [0, 1, 2, 3]


_EVEN, _ODD = (((0, 4),),), (((4, 4),),)


def _plan(saved: dict[int, list[Any]]) -> ReshardPlan:
    groups, tables = _grouped(saved, {0: [(key, "float32", (8,), whole((8,))) for key in "vw"]})
    return plan_reshard(*groups, tables, dict.fromkeys(saved, 0), ["a"])


def _unsettled(saved: dict[int, list[Any]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Keys that are to be compared, with one shard for each set of ranks."""
    unsettled = _plan(saved).unsettled
    return [(keys, [shard for shard, _ in holders]) for keys, _, holders in unsettled]


def _rows(region: Region, equal_on: str, keys: str = "vw") -> list[Any]:
    return [(key, "float32", (8,), region, equal_on) for key in keys]


@pytest.mark.parametrize(
    ("saved", "unsettled"),
    [
        # One mesh, replicas on two, and what nobody says anything of.
        ({0: _rows(_EVEN, "0"), 1: _rows(_ODD, "1")}, []),
        ({s: _rows((_EVEN, _ODD)[s // 2], str(s // 2)) for s in range(4)}, []),
        ({s: _rows(whole((8,)), "all") for s in range(2)}, []),
        # Two meshes of one key each, and a key that is on one of them.
        (
            {s: _rows((_EVEN, _ODD)[s % 2], str(s)) for s in range(4)},
            [(("v", "w"), [0, 2]), (("v", "w"), [1, 3])],
        ),
        ({0: _rows(whole((8,)), "0"), 1: _rows(whole((8,)), "1", "w")}, [(("w",), [0, 1])]),
    ],
)
def test_what_shards_do_not_say_is_equal_is_to_be_compared(
    saved: dict[int, list[Any]], unsettled: list[Any]
) -> None:
    assert _unsettled(saved) == unsettled


def test_where_parts_overlap_that_are_not_said_to_be_equal_what_both_have_is_compared() -> None:
    saved = {0: _rows(_EVEN, "0"), 1: _rows(_ODD, "1"), 2: _rows((((2, 6),),), "2")}

    compared = [
        (item.region, [shard for shard, _ in item.holders]) for item in _plan(saved).unsettled
    ]

    assert compared == [((((2, 2),),), [0, 2]), ((((4, 4),),), [1, 2])]


def test_tensors_of_one_key_that_differ_are_named_with_the_shards() -> None:
    group = TensorGroup("g", whole((8,)))
    unsettled = [Unsettled(("v", "w"), whole((8,)), ((0, group), (3, group)))]

    require_equal(unsettled, {0: {"0": ["a", "b"]}, 3: {"0": ["a", "b"]}})
    with pytest.raises(MismatchError, match="w: differs between the shards of ranks 0 and 3"):
        require_equal(unsettled, {0: {"0": ["a", "b"]}, 3: {"0": ["a", "c"]}})


def _inventory(world_size: int, saved_by: int, held: list[list[int]], ranks: int) -> Inventory:
    """Nodes with ``ranks`` ranks each, and what each node holds."""
    inventory = Inventory(ranks_by_node([str(rank // ranks) for rank in range(world_size)]))
    for node, shards in enumerate(held):
        for shard in shards:
            inventory.add(_checkpoint(saved_by), shard, str(node), 100)
    return inventory


def _checkpoint(saved_by: int) -> Checkpoint:
    return Checkpoint(Generation(7, 1), 3, saved_by)


@given(st.data())
def test_each_shard_is_read_on_a_node_that_holds_it_or_else_its_rank_is_named(
    data: st.DataObject,
) -> None:
    saved_by, world_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    ranks = data.draw(st.integers(1, 3))
    nodes = -(-world_size // ranks)
    shards = st.lists(st.integers(0, saved_by - 1), unique=True)
    held = data.draw(st.lists(shards, min_size=nodes, max_size=nodes))
    inventory = _inventory(world_size, saved_by, held, ranks)
    lost = set(range(saved_by)) - {shard for of_node in held for shard in of_node}

    if lost:
        with pytest.raises(NoReplicasAvailableError, match=f"the shard of rank {min(lost)} "):
            assign_readers(_checkpoint(saved_by), inventory)
        return
    readers = assign_readers(_checkpoint(saved_by), inventory)

    assert list(readers) == list(range(saved_by))
    for shard, reader in readers.items():
        assert shard in held[reader // ranks]
        # The rank with the middle of the shard, of which it wants the most in an even division.
        middle = floor(Fraction(2 * shard + 1, 2 * saved_by) * world_size)
        assert reader == middle or shard not in held[middle // ranks]


@pytest.mark.parametrize(("nodes", "reader"), [(["a", "a"], 0), (["a", "b"], 1)])
@pytest.mark.parametrize("equal_on", ["all", PRIVATE])
def test_a_rank_reads_what_it_wants_by_itself_if_its_node_has_the_shard(
    equal_on: str, nodes: list[str], reader: int
) -> None:
    whole = ((0, 8),), ((0, 4),)
    wanted, tables = group_tensors([("w", "float32", (8, 4), (((0, 3),), ((1, 2),)), "")])
    saved, _ = group_tensors([("w", "float32", (8, 4), whole, equal_on)])

    plan = plan_reshard(
        *({7: list(saved)}, {0: list(wanted)}, tables, {7: 1}, nodes), held={7: [nodes[1]]}
    )

    assert [take.reader for take in plan.takes] == [reader]
