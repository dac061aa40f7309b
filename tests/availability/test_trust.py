"""Decisions on trust in checkpoints: pure functions of what the nodes have noted."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import MismatchError
from localckpt.ids import Checkpoint, Generation
from localckpt.lineage import EpochId, Lineage
from localckpt.storage.notes import Notes
from localckpt.storage.owner import Owner
from localckpt.trust import Trust, Trusts, choose, is_orderly

# Few, so that the nodes have notes of what is complete.
_CHECKPOINTS = st.builds(
    Checkpoint,
    st.builds(Generation, st.just(1), st.integers(1, 2)),
    st.integers(0, 2),
    st.integers(1, 2),
)
_STARTS = st.tuples(st.integers(0, 5), st.integers(1, 4))
_TRUSTS = st.builds(
    lambda starts, mark, why, is_drained, metric: Trust(
        *starts, mark, why if mark else "", is_drained, metric
    ),
    st.just((0, 0)) | _STARTS,
    st.sampled_from([None, "bad", "good", "quarantined"]),
    st.text(max_size=5),
    st.booleans(),
    st.none()
    | st.tuples(
        st.text(min_size=1, max_size=5),
        # Zero has two signs, which are equal.
        st.floats(allow_nan=False).map(lambda value: value + 0.0),
    ),
)
_NOTED = st.dictionaries(_CHECKPOINTS, _TRUSTS, max_size=4)
_NOTES = st.lists(_NOTED, max_size=4)
_COMPLETE = st.lists(_CHECKPOINTS, unique=True, max_size=6)


@given(_NOTES, st.randoms(use_true_random=False))
def test_notes_are_merged_in_whatever_order_and_however_often_they_are_told(
    notes: list[dict[Checkpoint, Trust]], order: random.Random
) -> None:
    shuffled = [*notes, *notes[: len(notes) // 2]]
    order.shuffle(shuffled)

    merged = Trusts.of(shuffled)

    assert merged == Trusts.of(notes) == Trusts.from_json(json.loads(json.dumps(merged.to_json())))
    for noted in notes:
        for checkpoint, trust in noted.items():
            assert merged[checkpoint].failed_starts >= trust.failed_starts
            assert merged[checkpoint].is_drained >= trust.is_drained
            assert (merged[checkpoint].metric is not None) >= (trust.metric is not None)


@given(st.integers(0, 3), _NOTED)
def test_notes_are_read_as_they_were_written(epoch: int, noted: dict[Checkpoint, Trust]) -> None:
    known = Trusts({c: trust for c, trust in noted.items() if trust != Trust()})
    starts = {c: Owner("boot", 1, 2) for c, trust in known.items() if trust.most_starts}
    notes = Notes(epoch, Lineage(EpochId(epoch, 7)), known, starts)

    assert Notes.parse(notes.to_text()) == notes


@given(_COMPLETE, _NOTES, st.none() | st.integers(1, 4))
def test_each_complete_checkpoint_is_used_or_told_of_and_what_failed_leaves_another_to_load(
    complete: list[Checkpoint], notes: list[dict[Checkpoint, Trust]], most: int | None
) -> None:
    trusts = Trusts.of(notes)

    choice = choose(complete, trusts, most)

    told = [*choice.usable, *choice.quarantined, *choice.exhausted]
    assert len(told) == len(complete)
    assert set(told) == set(complete)
    bad = trusts.marked("bad")
    in_order = [c for c in complete if c in choice.usable]
    assert list(choice.usable) == sorted(in_order, key=bad.__contains__)
    for checkpoint in choice.quarantined.keys() - trusts.marked("quarantined").keys():
        assert most is not None
        assert trusts[checkpoint].failed_starts >= most
        assert any(other.world_size == checkpoint.world_size for other in choice.usable)
    for checkpoint in choice.exhausted:
        assert trusts[checkpoint].failed_starts >= (most or 0)
        assert all(other.world_size != checkpoint.world_size for other in choice.usable)
    for checkpoint in choice.usable:
        assert trusts[checkpoint].mark != "quarantined"
        assert most is None or trusts[checkpoint].failed_starts < most
    if most is None:
        assert not choice.exhausted
        assert choice.quarantined.keys() <= trusts.marked("quarantined").keys()


@given(_NOTES)
def test_a_checkpoint_is_progress_only_above_all_that_were_tried(
    notes: list[dict[Checkpoint, Trust]],
) -> None:
    frontier = Trusts.of(notes).frontier

    tried = [
        checkpoint.iteration
        for checkpoint, trust in Trusts.of(notes).items()
        if trust.failed_starts or trust.mark == "quarantined"
    ]
    assert frontier == max(tried, default=-1)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        5,
        [[]],
        [5],
        ["123456"],
        [[1, 1, 1, 1, True, 1, None, "", 0, None]],
        [[1, 1, 1, 1, 10**19, 1, None, "", 0, None]],
        [[1, 1, -1, 1, 1, 1, None, "", 0, None]],
        [[1, 1, 1, 0, 1, 1, None, "", 0, None]],
        [[1, 1, 1, 2**20 + 1, 1, 1, None, "", 0, None]],
        [[1, 1, 1, 1]],
        [[1, 1, 1, 1, 0, 0, "splendid", "", 0, None]],
        [[1, 1, 1, 1, 0, 0, "quarantined", None, 0, None]],
        [[1, "1", 1, 1, 0, 0, "quarantined", "", 0, None]],
        [[1, 1, 1, 1, 0, 0, [], "", 0, None]],
        [[1, 1, 1, 1, 0, 0, None, "", 2, None]],
        [[1, 1, 1, 1, 0, 0, None, "", [], None]],
        [[1, 1, 1, 1, 0, 0, None, "", 0, 0.5]],
        [[1, 1, 1, 1, 0, 0, None, "", 0, ["loss"]]],
        [[1, 1, 1, 1, 0, 0, None, "", 0, ["", "0.5"]]],
        [[1, 1, 1, 1, 0, 0, None, "", 0, ["loss", "nan"]]],
        [[1, 1, 1, 1, 0, 0, None, "", 0, ["loss", 10**400]]],
        [[1, 1, 1, 1, 0, 0, None, "", 0, ["l" * 201, "0.5"]]],
    ],
)
def test_what_is_no_note_is_refused(told: object) -> None:
    with pytest.raises(MismatchError):
        Trusts.from_json(told)


def test_a_job_ends_in_order_if_nobody_raised_but_to_end_it() -> None:
    assert is_orderly(None)
    assert is_orderly(KeyboardInterrupt())
    assert is_orderly(SystemExit(0))
    assert is_orderly(SystemExit())
    assert not is_orderly(SystemExit(1))
    assert not is_orderly(SystemExit("no"))
    assert not is_orderly(MemoryError())


def test_what_failed_too_often_gives_way_if_there_is_another_and_what_is_bad_comes_last() -> None:
    newer, bad, older, oldest = (Checkpoint(Generation(1, n), n, 2) for n in (4, 3, 2, 1))
    noted = {bad: Trust(mark="bad"), oldest: Trust(mark="quarantined")}
    trusts = Trusts({newer: Trust(failed_starts=3, most_starts=3), **noted})

    choice, alone = choose([newer, bad, older, oldest], trusts, 3), choose([newer], trusts, 3)

    assert (choice.usable, choice.quarantined.keys()) == ((older, bad), {newer, oldest})
    assert (alone.usable, alone.exhausted.keys()) == ((), {newer})
