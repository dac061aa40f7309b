"""Which checkpoints are complete, by what the nodes report: pure functions of plain data."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.availability.coverage import (
    JoinRecord,
    SaveOutcome,
    Standing,
    complete_checkpoints,
    describe_incomplete,
    judge_join,
    judge_newest,
    judge_nodes,
    judge_resumed,
    save_problems,
)
from localckpt.availability.inventory import Inventory, unpacked
from localckpt.errors import MismatchError
from localckpt.failure_texts import ranks_named
from localckpt.ids import MOST_RANKS, Checkpoint, CkptID, Generation, ShardIdentity, ShardRecord

_SESSION = "run"


def record_of(
    epoch: int, sequence: int, iteration: int, owner: int, world_size: int
) -> ShardRecord:
    identity = ShardIdentity(_SESSION, Generation(epoch, sequence), iteration, owner, world_size)
    return ShardRecord(identity, 4096)


_records = st.builds(
    record_of,
    epoch=st.integers(1, 3),
    sequence=st.integers(1, 2),
    iteration=st.integers(0, 2),
    owner=st.integers(0, 2),
    world_size=st.integers(1, 3),
)
Found = Mapping[str, Sequence[ShardRecord]]
_found = st.dictionaries(st.sampled_from("abc"), st.lists(_records, max_size=20), max_size=3)


def _held(found: Found) -> set[ShardIdentity]:
    return {record.identity for records in found.values() for record in records}


@given(_found)
def test_a_checkpoint_is_complete_exactly_when_every_rank_has_a_shard_of_its_generation(
    found: Found,
) -> None:
    held = _held(found)

    complete = complete_checkpoints(Inventory.found(found))

    for identity in held:
        checkpoint = Checkpoint(identity.generation, identity.iteration, identity.world_size)
        needed = {checkpoint.shard(rank, _SESSION) for rank in range(identity.world_size)}
        assert (checkpoint in complete) == (needed <= held)
    assert len(complete) == len(set(complete))


def test_an_empty_job_is_said_to_have_nothing() -> None:
    inventory = Inventory.found({"a": [], "b": []})

    assert complete_checkpoints(inventory) == []
    assert "no shard" in describe_incomplete(inventory)


def _joining(**changes: object) -> JoinRecord:
    values = {"session_id": "a", "world_size": 3, "format_version": "1", "failure_domain": "x"}
    return JoinRecord(**(values | {"newest_epoch": 0} | changes))  # type: ignore[arg-type]


@pytest.mark.fault("disagreement")
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("session_id", "b", "session_id: 'a' on ranks 0 and 2, 'b' on rank 1"),
        ("world_size", 4, "world size: 3 on ranks 0 and 2, 4 on rank 1"),
        ("format_version", "2", "format version: '1' on ranks 0 and 2, '2' on rank 1"),
        ("is_elastic", True, "elastic: False on ranks 0 and 2, True on rank 1"),
    ],
)
def test_a_rank_that_does_not_belong_is_named(field: str, value: object, named: str) -> None:
    with pytest.raises(MismatchError) as raised:
        judge_join([_joining(), _joining(**{field: value}), _joining()])

    assert named in str(raised.value)


@pytest.mark.fault("world-size")
def test_another_number_of_ranks_or_fewer_than_nodes_is_refused_with_what_can_be_done() -> None:
    checkpoint = Checkpoint(Generation(1, 1), 7, 4)

    judge_newest([], 2)
    judge_newest([checkpoint], 4)
    with pytest.raises(MismatchError, match=r"saved by 4 ranks, and this job has 2") as raised:
        judge_newest([checkpoint], 2)

    assert "Start with 4 ranks" in str(raised.value)
    assert "session_id" in str(raised.value)
    judge_nodes(checkpoint, 2, least_nodes=2)
    with pytest.raises(MismatchError, match="spread over 2 nodes at least, 1 rank cannot be on"):
        judge_nodes(checkpoint, 1, least_nodes=2)


def test_ranks_that_resume_from_different_points_are_named() -> None:
    judge_resumed([[7, None], [7, None]])
    for other in ([8, None], [7, [3, 1, 0, -1, [], [], 0]]):
        with pytest.raises(MismatchError, match="the same iteration of the same lineage: 7 on"):
            judge_resumed([[7, None], other, [7, None]])


def _outcome(**changes: object) -> SaveOutcome:
    values = {"iteration": 5, "generation": Generation(1, 2), "error": None, "missing": ()}
    return SaveOutcome(**(values | changes))  # type: ignore[arg-type]


_CHECKPOINTS = st.builds(
    Checkpoint,
    st.builds(Generation, st.integers(0), st.integers(0)),
    st.integers(0),
    st.integers(1),
)


@given(
    st.builds(
        SaveOutcome,
        iteration=st.integers(0),
        generation=st.builds(Generation, st.integers(0), st.integers(0)),
        error=st.none() | st.text(),
        missing=st.lists(st.builds(CkptID, st.integers(0), st.integers(0), st.text())).map(tuple),
        lacking=st.lists(_CHECKPOINTS).map(tuple),
        found=st.lists(st.builds(Standing, _CHECKPOINTS, *[st.integers(0)] * 3)).map(tuple),
    )
)
def test_outcomes_survive_the_way_to_the_other_ranks(outcome: SaveOutcome) -> None:
    fields = json.loads(json.dumps(outcome.to_json()))

    assert SaveOutcome.from_json(fields) == outcome
    for count in range(len(fields)):
        with pytest.raises(ValueError, match="not enough values"):
            SaveOutcome.from_json(fields[:count])


@given(st.integers(2, 9), st.data())
def test_exactly_the_ranks_on_which_a_save_failed_are_named(ranks: int, data) -> None:
    failed = data.draw(st.sets(st.integers(0, ranks - 1)))
    outcomes = [_outcome(error="disk full" if r in failed else None) for r in range(ranks)]

    named = [f"{ranks_named(failed)}: disk full"] if failed else []
    assert save_problems(outcomes) == named


def test_a_shard_that_is_not_there_is_named_and_so_are_ranks_that_saved_different_things() -> None:
    assert save_problems([_outcome(), _outcome(missing=(CkptID(5, 0, "s"),))]) == [
        "rank 1 was to keep rank 0's shard of iteration 5, and does not have it"
    ]
    assert save_problems([_outcome(), _outcome(iteration=6), _outcome()]) == [
        "the ranks saved different iterations: '5' on ranks 0 and 2, '6' on rank 1"
    ]
    assert save_problems([_outcome(), _outcome(generation=Generation(1, 3))]) == [
        "the ranks saved different save numbers: '1.2' on rank 0, '1.3' on rank 1"
    ]


def _packed(content: bytes) -> str:
    return base64.b85encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    "pack",
    [
        lambda: "not compressed",
        lambda: _packed(b"[" * 100_000),
        lambda: _packed(bytes(1 << 28)),
        lambda: _packed(b"[1, 2"),
    ],
    ids=["text", "nested", "bomb", "cut"],
)
def test_reports_that_no_rank_has_packed_are_refused(pack: Callable[[], str]) -> None:
    with pytest.raises(MismatchError, match="cannot be read"):
        unpacked(pack())


_NUMBERS = st.integers(0, 10**19 - 1)
_RANKS_ON = {"a": [0, 1, 4], "b": [2], "c": [3, 5]}


@pytest.mark.parametrize(
    "lineage",
    [
        *(None, {}, [1, 1, 4, -1, [], [], 0], [1, 1, -1, 5, [], [], 0], [1, 1, 0, -2, [], [], 0]),
        *([1, 1, 0, 5, [[1, 1]], [], 0], [1, 1, 0, 5, [[1, 1, "5"]], [], 0]),
        *([1, 1, 0, 5, [[0, 0, 0]] * 9, [], 0], [1, 1, 0, 5, [], [[0, 0, 0]] * 9, 0]),
        *([1, 1, 0, 5, [], [], 2], [10**20, 1, 0, 5, [], [], 0]),
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
        *(None, "text", [7], [[1, 1, 5, 2, [0], [9], 0]], [[1, 1, 5, 2, [0, 1], [9]]]),
        *([[1, 1, 5, 2, [], []]], [[1, 1, 5, 2, [0, 0], [9, 9]]]),
        *([[1, 1, 5, 2, [0], [9]], [1, 1, 5, 2, [1], [9]]], [[1, 1, 10**19, 2, [0], [9]]]),
        *([[1, 1, 5, 2, [MOST_RANKS], [9]]], [[1, 1, 5, MOST_RANKS + 1, [0], [9]]]),
        *([[1, 1, True, 2, [0], [9]]], [[1, 1, 5, 2, [0], [-9]]], [[1, 1, 5, 2, [0], [9.0]]]),
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
