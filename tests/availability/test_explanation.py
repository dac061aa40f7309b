"""What an explanation says is what ``coverage`` decides, for any inventory."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.coverage import complete_checkpoints
from localckpt.availability.explanation import Explanation, explain
from localckpt.availability.inventory import Inventory, Nodes
from localckpt.availability.recoverable import least_losses
from localckpt.ids import Checkpoint, Generation, Group, ShardRecord
from localckpt.lineage import EpochId, Lineage, Point
from localckpt.replication.schemes import SCHEMES
from localckpt.storage.catalog import Problem
from localckpt.storage.store import Stored
from tests.availability.test_coverage import Found, record_of

_records = st.builds(
    record_of,
    epoch=st.integers(1, 2),
    sequence=st.integers(1, 2),
    iteration=st.integers(0, 2),
    owner=st.integers(0, 2),
    world_size=st.integers(1, 3),
)
_any_inventory = st.dictionaries(st.text(max_size=5), st.lists(_records, max_size=20), max_size=5)


@st.composite
def _jobs(draw: st.DrawFn) -> dict[str, list[ShardRecord]]:
    """Inventory of one or two checkpoints, each shard on any of up to five nodes."""
    world_size = draw(st.integers(1, 4))
    nodes = [f"node {number}" for number in range(draw(st.integers(1, 5)))]
    inventory: dict[str, list[ShardRecord]] = {node: [] for node in nodes}
    for sequence in range(1, draw(st.integers(2, 3))):
        for rank in range(world_size):
            for node in draw(st.sets(st.sampled_from(nodes))):
                inventory[node].append(record_of(1, sequence, sequence, rank, world_size))
    return inventory


_CHECKPOINT = Checkpoint(Generation(1, 2), 3, 4)


class _Sums:
    """A code of which each member keeps the sum of all images: any one of them can be lost."""

    def fits(self, group: Group) -> bool:
        return group.tolerated == 1

    def rebuilds(
        self, group: Group, rank: int, images: Collection[int], pieces: Collection[int]
    ) -> bool:
        others = [other for other in group.ranks if other != rank]
        return all(other in images for other in others) and any(r in pieces for r in group.ranks)

    def losses(
        self,
        group: Group,
        rank: int,
        holders: Mapping[int, Collection[str]],
        pieces: Mapping[int, Collection[str]],
    ) -> Iterable[Nodes]:
        own = frozenset(holders.get(rank, ()))
        for other in group.ranks:
            if other != rank:
                yield own.union(holders.get(other, ()))
        yield own.union(*(pieces.get(r, ()) for r in group.ranks))


_CODES = {**SCHEMES, "sum": _Sums()}


@st.composite
def _recoverable_jobs(draw: st.DrawFn) -> dict[str, list[ShardRecord]]:
    """Shards of four ranks on four nodes, and pieces of two kinds."""
    found: dict[str, list[ShardRecord]] = {node: [] for node in "abcd"}
    for rank in range(4):
        for node in draw(st.sets(st.sampled_from("abcd"), max_size=2)):
            found[node].append(ShardRecord(_CHECKPOINT.shard(rank, "run"), 5))
    for group in (
        Group((0, 1, 2), 1, "sum"),
        Group((3, 1, 0, 2), draw(st.integers(1, 2)), "parity"),
    ):
        for rank in draw(st.sets(st.sampled_from(group.ranks))):
            piece = _CHECKPOINT.shard(rank, "run").of_kind(group.kind)
            found[draw(st.sampled_from("abcd"))].append(ShardRecord(piece, 7, group))
    return found


def _newest(inventory: Found, without: Collection[str] = ()) -> Checkpoint | None:
    kept = {node: records for node, records in inventory.items() if node not in without}
    complete = complete_checkpoints(Inventory.found(kept, codes=_CODES))
    return complete[0] if complete else None


def _explain(
    inventory: Found, world_size: int | None = None, bad: Mapping[str, Sequence[str]] | None = None
) -> Explanation:
    files = {node: [_bad(text) for text in texts] for node, texts in (bad or {}).items()}
    return explain(Inventory.found(inventory, codes=_CODES), world_size, files)


def _bad(text: str) -> Stored:
    """A file that cannot be used, from its name and what is wrong with it."""
    name, _, why = text.partition(": ")
    return Stored(name, problem=Problem("damaged", why))


@given(_any_inventory | _jobs())
def test_an_explanation_says_what_coverage_finds_and_who_holds_each_shard(inventory: Found) -> None:
    explanation = _explain(inventory)

    standings = explanation.checkpoints
    found = [standing.checkpoint for standing in standings if standing.is_complete]
    assert found == complete_checkpoints(Inventory.found(inventory))
    assert explanation.newest == explanation.loads == _newest(inventory)
    # None of them says what it resumed from.
    versions = [
        (c.iteration, *c.generation, c.world_size) for c in (s.checkpoint for s in standings)
    ]
    assert versions == sorted(versions, reverse=True)
    told = {
        (node, standing.checkpoint.shard(rank, "run"))
        for standing in standings
        for rank, nodes in enumerate(standing.holders)
        for node in nodes
    }
    held = {(node, record.identity) for node, records in inventory.items() for record in records}
    assert told == {(node, i) for node, i in held if i.rank < i.world_size}


@given(_any_inventory | _jobs() | _recoverable_jobs())
def test_the_breaking_sets_are_exactly_the_smallest_whose_loss_changes_the_newest(
    inventory: Found,
) -> None:
    explanation, newest = _explain(inventory), _newest(inventory)

    smallest: list[set[str]] = []
    for count in range(1, len(inventory) + 1):
        for lost in map(set, combinations(inventory, count)):
            breaks = newest is not None and _newest(inventory, lost) != newest
            if breaks and not any(known <= lost for known in smallest):
                smallest.append(lost)
    assert sorted(map(sorted, explanation.breaking)) == sorted(map(sorted, smallest))
    assert explanation.survives_any == min((len(lost) - 1 for lost in smallest), default=0)
    if newest is not None:
        losses = least_losses(newest, Inventory.found(inventory, codes=_CODES))
        assert min(losses.values()) == explanation.survives_any + 1
    alone = {node for node in inventory if {node} not in smallest and newest is not None}
    assert set(explanation.may_be_lost_alone) == alone


@given(_any_inventory | _jobs())
def test_any_explanation_can_be_printed_and_sent(inventory: Found) -> None:
    explanation = _explain(inventory, bad={"elsewhere": ["nonsense", "1.2.3.4.safetensors: bad"]})

    told = json.loads(json.dumps(explanation.to_json()))

    assert [c["iteration"] for c in told["checkpoints"]] == [
        s.checkpoint.iteration for s in explanation.checkpoints
    ]
    assert all(len(line) <= 100 for line in _matrix_of(explanation))
    assert "elsewhere" in told["nodes"]


def _matrix_of(explanation: Explanation) -> list[str]:
    lines = str(explanation).splitlines()
    return [line for line in lines if line.startswith("iteration ") or line[:1].isdigit()]


def test_the_matrix_tells_who_holds_what_and_why_the_newest_is_not_loaded() -> None:
    went_back = Lineage(EpochId(3, 0), "elsewhere", 1100, given_up=(Point(EpochId(2, 0), 1200),))
    old, new = (
        [
            ShardRecord(replace(record.identity, lineage=went_back), record.nbytes)
            for record in (record_of(3, sequence, iteration, rank, 4) for rank in range(4))
        ]
        for sequence, iteration in ((1, 1150), (2, 1200))
    )
    inventory = {
        "/gathered/node0": [*old[:2], *new[:2]],
        "/gathered/node1": [*old[:2], *new[:2]],
        "/gathered/node2": [*old[2:], record_of(2, 9, 1200, 2, 4)],
        "/gathered/node3": [*old[2:]],
    }
    bad = {"/gathered/node2": ["000000001200.3.3.2.safetensors: its header is damaged"]}

    told = str(_explain(inventory, bad=bad))

    assert (
        told
        == """\
A   /gathered/node0
B   /gathered/node1
C   /gathered/node2
D   /gathered/node3

iteration  generation  complete  rank 0-1  rank 2  rank 3
1200       3.2         no        A+B       none    C!
1150       3.1         yes       A+B       C+D     C+D
1200       2.9         no        none      C       none

A restart loads iteration 1150 (generation 3.1, 4 ranks).
Iteration 1200 (generation 3.2, 4 ranks) is newer, and lacks:
  rank 2: only of another attempt, generation 2.9 (C)
  rank 3: 1 copy, its header is damaged (C)
Iteration 1200 (generation 2.9, 4 ranks) is of an earlier attempt: the job went back, and saved \
iteration 1150 later.
Iteration 1150 survives the loss of any one node. It is lost together with A+B, or C+D.
Not counted, on C: 000000001200.3.3.2.safetensors: its header is damaged"""
    )


@pytest.mark.parametrize("inventory", [{}, {"a": []}])
def test_nodes_that_hold_nothing_are_said_to(inventory: Found) -> None:
    explanation = _explain(inventory)

    assert explanation.loads is None
    assert "no node holds a shard" in str(explanation)
