"""What nodes hold: how it is told, and what is known of it then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.coverage import complete_checkpoints, describe_incomplete
from localckpt.availability.inventory import Inventory, node_report, ranks_by_node
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.ids import (
    MOST_RANKS,
    SAVES_AN_ATTEMPT,
    Checkpoint,
    CkptID,
    Generation,
    Piece,
    ShardRecord,
)
from localckpt.lineage import MOST_ANCESTORS, EpochId, Lineage, Point
from localckpt.ranks.failure import Attempt
from tests.managers.jobs import cliques, error_of, make_manager, resume, state_of
from tests.managers.own_managers import DictManager
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

_NUMBERS = st.integers(0, 10**19 - 1)
_ANY_CHECKPOINT = st.builds(
    Checkpoint,
    generation=st.builds(Generation, _NUMBERS, _NUMBERS),
    iteration=_NUMBERS,
    world_size=st.integers(1, MOST_RANKS),
)
_FEW_CHECKPOINTS = st.builds(
    Checkpoint,
    generation=st.builds(Generation, st.integers(1, 2), st.integers(1, 2)),
    iteration=st.integers(0, 2),
    world_size=st.integers(1, 3),
)
_NODES = st.sampled_from("abc")
_RANKS_ON = {"a": [0, 1, 4], "b": [2], "c": [3, 5]}


def _record(checkpoint: Checkpoint, owner: int, nbytes: int = 4096) -> ShardRecord:
    return ShardRecord(checkpoint.shard(owner, "run"), nbytes)


def _told(records: Sequence[ShardRecord]) -> Any:
    return json.loads(json.dumps(node_report(records)))


@given(
    st.dictionaries(
        st.tuples(_ANY_CHECKPOINT, st.integers(0, MOST_RANKS - 1)), _NUMBERS, max_size=20
    )
)
def test_the_report_of_a_node_is_what_the_others_have(
    shards: Mapping[tuple[Checkpoint, int], int],
) -> None:
    inventory = Inventory(_RANKS_ON)

    inventory.merge("b", _told([_record(c, owner, size) for (c, owner), size in shards.items()]))

    known = {
        (checkpoint, owner): nbytes
        for checkpoint in inventory.checkpoints
        for owner, nbytes in inventory.shards_on(checkpoint, "b").items()
    }
    assert known == shards


def test_a_node_of_a_large_job_reports_less_than_32_bytes_a_shard() -> None:
    ranks, size = 16384, 20_000_000_000
    owners = [*range(ranks - 24, ranks - 16), *range(ranks - 8, ranks)]
    checkpoints = [
        Checkpoint(Generation(1234, 2**60 - number), 10**7 + number, ranks) for number in (1, 2)
    ]
    records = [_record(c, owner, size + owner) for c in checkpoints for owner in owners]

    assert len(json.dumps(node_report(records))) < 32 * len(records)


@pytest.mark.parametrize("shards", [1, 2, 1000])
def test_the_widest_numbers_take_as_much_as_is_documented(shards: int) -> None:
    widest = 10**19 - 1
    checkpoint = Checkpoint(Generation(widest, widest), widest, MOST_RANKS)
    owners = range(MOST_RANKS - shards, MOST_RANKS)

    nbytes = len(json.dumps(node_report([_record(checkpoint, owner, widest) for owner in owners])))

    assert nbytes <= 100 + 30 * shards


def test_a_shard_that_a_node_has_twice_is_reported_once() -> None:
    checkpoint = Checkpoint(Generation(1, 2), 3, 2)

    twice = [_record(checkpoint, 1, 5), _record(checkpoint, 1, 5)]

    assert node_report(twice) == [[[1, 2, 3, 2, [1], [5]]], []]


def _lineages(epochs: int) -> list[Lineage]:
    """As long as they get, but for numbers of more digits than there are."""
    ids = [EpochId(1234 - place, 2**32 - 1 - place) for place in range(MOST_ANCESTORS)]
    return [
        Lineage(
            EpochId(1235 + number, 2**32 - 1),
            "local",
            10**7,
            tuple(Point(epoch, 10**7 - place) for place, epoch in enumerate(ids)),
            is_cut=True,
        )
        for number in range(epochs)
    ]


def test_a_lineage_is_reported_once_for_each_epoch_and_in_less_than_300_bytes() -> None:
    lineages = _lineages(2)
    records, without = [], []
    for lineage in lineages:
        generation = Generation(lineage.epoch.number, lineage.epoch.draw * SAVES_AN_ATTEMPT)
        for iteration, owner in product((1, 2, 3), range(16)):
            without.append(_record(Checkpoint(generation, iteration, 64), owner))
            identity = replace(without[-1].identity, lineage=lineage)
            records.append(replace(without[-1], identity=identity))
    inventory = Inventory(_RANKS_ON)

    inventory.merge("a", _told(records))

    assert inventory.lineages == {lineage.epoch: lineage for lineage in lineages}
    more = len(json.dumps(node_report(records))) - len(json.dumps(node_report(without)))
    assert more < len(lineages) * 300


@pytest.mark.parametrize(
    "lineage",
    [
        *(
            None,
            7,
            {},
            [],
            [1, 1, 0, -1, [], []],
            [1, 1, 4, -1, [], [], 0],
            [1, 1, -1, 5, [], [], 0],
        ),
        *([1, 1, 0, -2, [], [], 0], [1, 1, 0, True, [], [], 0], [1, -1, 0, 5, [], [], 0]),
        *(
            [1, 1, 0, 5, [[1, 1]], [], 0],
            [1, 1, 0, 5, [[1, 1, "5"]], [], 0],
            [1, 1, 0, 5, 7, [], 0],
        ),
        *([1, 1, 0, 5, [[0, 0, 0]] * 9, [], 0], [1, 1, 0, 5, [], [[0, 0, 0]] * 9, 0]),
        *([1, 1, 0, 5, [], [], 2], [1, 1, 0, 5, [], [], [0]], [10**20, 1, 0, 5, [], [], 0]),
    ],
    ids=str,
)
def test_a_lineage_that_cannot_be_is_refused_and_nothing_is_taken_in(lineage: Any) -> None:
    inventory = Inventory(_RANKS_ON)

    with pytest.raises(MismatchError, match="what rank 3 tells of its node's shards"):
        inventory.merge("c", [[[1, 1, 9, 1, [0], [8]]], [lineage]])

    assert not inventory.checkpoints
    assert not inventory.lineages


@pytest.mark.parametrize(
    "told",
    [
        *(None, {}, 7, "text", [7], [[]], [[1, 1, 5, 2, [0], [9], 0]], [{"a": 1}]),
        *([[1, 1, 5, 2, [0, 1], [9]]], [[1, 1, 5, 2, 0, 9]], [[1, 1, 5, 2, [], []]]),
        *([[1, 1, 5, 2, [0, 0], [9, 9]]], [[1, 1, 5, 2, [0], [9]], [1, 1, 5, 2, [1], [9]]]),
        *([[-1, 1, 5, 2, [0], [9]]], [[1, 1, 10**19, 2, [0], [9]]], [[1, 1, 5, 2, [0], [-9]]]),
        *([[1, 1, 5, 2, [-1], [9]]], [[1, 1, 5, 2, [MOST_RANKS], [9]]], [[1, 1, 5, 0, [0], [9]]]),
        *([[1, 1, 5, MOST_RANKS + 1, [0], [9]]], [[1, 1, True, 2, [0], [9]]]),
        *([[1, 1, 5, 2, [True], [9]]], [[1, 1, 5, 2, [0], [9.0]]], [[1, 1, 5, 2, [[0]], [9]]]),
        *([[1, 1, None, 2, [0], [9]]], [[1, 1, "5", 2, ["0"], ["9"]]], [[1, 1, 5, 2, "0", "9"]]),
        [[1, 1, 5, [2], [0], [9]]],
    ],
    ids=str,
)
def test_a_report_that_cannot_be_read_is_refused_and_its_rank_named(told: Any) -> None:
    inventory = Inventory(_RANKS_ON)
    shards = [[1, 1, 9, 1, [0], [8]], *told] if isinstance(told, list) else told

    with pytest.raises(MismatchError, match="what rank 3 tells of its node's shards") as raised:
        inventory.merge("c", [shards, []])

    assert len(str(raised.value)) < 500
    assert not inventory.checkpoints


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.just("a"), inner),
    max_leaves=8,
)
_NEARLY_TOLD = st.lists(
    st.tuples(*[_NUMBERS | _JSON] * 4, *[st.lists(_NUMBERS, max_size=3) | _JSON] * 2).map(list),
    max_size=2,
).map(lambda shards: [shards, []])


@given(_JSON | _NEARLY_TOLD)
def test_every_report_is_either_refused_or_taken_as_it_is(told: Any) -> None:
    inventory = Inventory(_RANKS_ON)

    try:
        inventory.merge("a", told)
    except MismatchError:
        assert not inventory.checkpoints
        return

    heard = {
        (*c.generation, c.iteration, c.world_size, *inventory.shards_on(c, "a").items())
        for c in inventory.checkpoints
    }
    assert heard == {(*held[:4], *zip(held[4], held[5], strict=True)) for held in told[0]}


_CHANGES = st.lists(
    st.tuples(st.booleans(), _FEW_CHECKPOINTS, st.integers(0, 2), _NODES), max_size=40
)


@given(_CHANGES)
def test_an_inventory_knows_what_was_added_and_not_removed(
    changes: Sequence[tuple[bool, Checkpoint, int, str]],
) -> None:
    inventory = Inventory(_RANKS_ON)
    held: set[tuple[Checkpoint, int, str]] = set()

    for added, checkpoint, owner, node in changes:
        if added:
            inventory.add(checkpoint, owner, node, 10 + owner)
            held.add((checkpoint, owner, node))
        else:
            inventory.remove(checkpoint, Piece(owner), node)
            held.discard((checkpoint, owner, node))

    assert set(inventory.checkpoints) == {checkpoint for checkpoint, _, _ in held}
    for asked in {checkpoint for _, checkpoint, _, _ in changes}:
        of_it = {(owner, node) for checkpoint, owner, node in held if checkpoint == asked}
        owners = {owner for owner, _ in of_it}
        assert inventory.shards(asked) == {owner: 10 + owner for owner in owners}
        assert inventory.holders(asked).keys() == owners
        for owner in range(3):
            nodes = {node for node in "abc" if (owner, node) in of_it}
            assert sorted(inventory.holders(asked).get(owner, [])) == sorted(nodes)
        for node in "abc":
            there = {owner for owner in owners if (owner, node) in of_it}
            assert inventory.shards_on(asked, node) == {owner: 10 + owner for owner in there}


@given(st.lists(_NODES, min_size=1, max_size=9))
def test_the_first_rank_of_each_node_speaks_for_it(nodes: list[str]) -> None:
    inventory = Inventory(ranks_by_node(nodes))

    assert [inventory.node_of(rank) for rank in range(len(nodes))] == nodes
    for node in set(nodes):
        assert inventory.leader(node) == nodes.index(node)
        assert all(nodes[rank] == node for rank in inventory.ranks_on[node])
    assert sorted(chain.from_iterable(inventory.ranks_on.values())) == list(range(len(nodes)))


@given(
    st.dictionaries(_NODES, st.lists(st.tuples(_FEW_CHECKPOINTS, st.integers(0, 2)), max_size=20))
)
def test_what_is_complete_is_what_a_search_of_all_reports_finds(
    found: Mapping[str, Sequence[tuple[Checkpoint, int]]],
) -> None:
    inventory = Inventory(_RANKS_ON)
    for node, shards in found.items():
        inventory.merge(node, _told([_record(checkpoint, owner) for checkpoint, owner in shards]))

    complete, described = complete_checkpoints(inventory), describe_incomplete(inventory)

    told = {shard for shards in found.values() for shard in shards}
    lacks = {
        checkpoint: [
            rank for rank in range(checkpoint.world_size) if (checkpoint, rank) not in told
        ]
        for checkpoint, _ in told
    }
    # None of them says what it resumed from.
    order = sorted(lacks, key=lambda c: (c.iteration, *c.generation, c.world_size), reverse=True)
    assert complete == [checkpoint for checkpoint in order if not lacks[checkpoint]]
    said = [text.rpartition(" ranks ")[2] for text in described.split("; ") if "lacks" in text]
    assert said == [", ".join(map(str, lacks[c])) for c in order if lacks[c]]


def _listen(manager: Any, told: dict[str, Any]) -> None:
    """Note what this rank reports in each of a manager's decisions."""
    decide = manager._context.ranks.decide

    def decide_and_note(what: str, work: Any, *args: Any, **options: Any) -> Any:
        attempt = work if isinstance(work, Attempt) else Attempt.at(work)
        told[what] = attempt._result
        return decide(what, attempt, *args, **options)

    manager._context.ranks.decide = decide_and_note


def _restart_and_listen(rank: int, world_size: int, kind: str) -> list[Any]:
    with cliques(2, 2) as repl, make_manager(kind, node_store(), "job", repl) as manager:
        if manager.find_latest() == -1:
            manager.save(state_of(rank, 7), 7)
        told: dict[str, Any] = {}
        _listen(manager, told)
        manager.latest_iteration = -1
        assert resume(manager, rank, 7) == "own node"
        manager.explain()
        return [told["find the latest checkpoint"], *told["explain what the nodes hold"]]


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_one_rank_of_each_node_reports_the_shards_of_both(
    kind: str, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)
    run_ranks(_restart_and_listen, 4, kind, store_per_node=nodes)
    # What is no good of it is told by one rank, too.
    (nodes[1] / "session-job" / "2" / "000000000009.0.1.1.safetensors").write_bytes(b"torn")

    told = run_ranks(_restart_and_listen, 4, kind, store_per_node=nodes)

    for leader, silent in ((0, 1), (2, 3)):
        found, explained, _ = told[leader]
        assert found == explained
        ((_, _, iteration, ranks, owners, _),), lineages = found
        assert len(lineages) == 1
        assert (iteration, ranks, sorted(owners)) == (7, 4, [0, 1, 2, 3])
        assert told[silent] == [None, None, []]
    assert [len(bad) for _, _, bad in told] == [0, 0, 1, 0]


class _Odd(DictManager):
    """Its catalogue has a number that no shard can have."""

    def _my_ckpt_ids(self) -> list[CkptID]:
        odd = [CkptID(-5, self.rank, "")] if self.rank == 1 else []
        return [*super()._my_ckpt_ids(), *odd]


def _find_with_an_odd_catalogue(rank: int, world_size: int) -> str:
    with _Odd({}, timeout=20.0) as manager:
        return error_of(manager.find_latest, CheckpointingException)


def test_a_catalogue_with_impossible_numbers_is_an_error_on_every_rank() -> None:
    told = run_ranks(_find_with_an_odd_catalogue, 2)

    assert told[0] == told[1]
    assert told[0].startswith("MismatchError: could not find the latest checkpoint: rank 1: ")
    assert "-5" in told[0]
