"""Decisions on trust in checkpoints: pure functions of what the nodes have noted."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import MismatchError
from localckpt.ids import Checkpoint, Generation
from localckpt.trust import Drained, Mark, Measured, Note, Resumes, Trust, choose, is_orderly

_CHECKPOINTS = st.builds(
    Checkpoint,
    st.builds(Generation, st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 5),
    st.integers(1, 2),
)
_RESUMES = st.builds(Resumes, _CHECKPOINTS, st.integers(1, 5), st.integers(1, 4))
_MARKS = st.builds(
    Mark, _CHECKPOINTS, st.sampled_from(["bad", "good", "quarantined"]), st.text(max_size=5)
)
_MEASURED = st.builds(
    Measured,
    _CHECKPOINTS,
    st.text(min_size=1, max_size=5),
    # Zero has two signs, which are equal.
    st.floats(allow_nan=False).map(lambda value: value + 0.0),
)
_NOTES = st.lists(_RESUMES | _MARKS | st.builds(Drained, _CHECKPOINTS) | _MEASURED, max_size=8)
_COMPLETE = st.lists(_CHECKPOINTS, unique=True, max_size=6)


@given(_NOTES, st.randoms(use_true_random=False))
def test_notes_are_merged_in_whatever_order_and_however_often_they_are_told(
    notes: list[Note], order: random.Random
) -> None:
    shuffled = [*notes, *notes[: len(notes) // 2]]
    order.shuffle(shuffled)

    merged = Trust.of(shuffled)

    assert merged == Trust.of(notes) == Trust.from_json(json.loads(json.dumps(merged.to_json())))
    for note in notes:
        if isinstance(note, Resumes):
            assert merged.count(note.checkpoint) >= note.count
        if isinstance(note, Drained):
            assert note.checkpoint in merged.drained
        if isinstance(note, Measured):
            assert note.checkpoint in merged.measured


@given(_COMPLETE, _NOTES, st.none() | st.integers(1, 4))
def test_every_complete_checkpoint_is_used_or_told_of_once(
    complete: list[Checkpoint], notes: list[Note], most: int | None
) -> None:
    choice = choose(complete, Trust.of(notes), most)

    told = [*choice.usable, *choice.quarantined, *choice.exhausted]
    assert len(told) == len(complete)
    assert set(told) == set(complete)
    bad = Trust.of(notes).marked("bad")
    in_order = [c for c in complete if c in choice.usable]
    assert list(choice.usable) == [
        *(c for c in in_order if c not in bad),
        *(c for c in in_order if c in bad),
    ]


@given(_COMPLETE, _NOTES, st.none() | st.integers(1, 4))
def test_what_is_quarantined_for_its_starts_leaves_another_that_as_many_ranks_can_load(
    complete: list[Checkpoint], notes: list[Note], most: int | None
) -> None:
    trust = Trust.of(notes)

    choice = choose(complete, trust, most)

    for checkpoint in choice.quarantined.keys() - trust.marked("quarantined").keys():
        assert most is not None
        assert trust.count(checkpoint) >= most
        assert any(other.world_size == checkpoint.world_size for other in choice.usable)
    for checkpoint in choice.exhausted:
        assert all(other.world_size != checkpoint.world_size for other in choice.usable)
    if most is None:
        assert not choice.exhausted
        assert choice.quarantined.keys() <= trust.marked("quarantined").keys()


@given(_NOTES)
def test_a_checkpoint_is_progress_only_above_all_that_were_tried(
    notes: list[Note],
) -> None:
    frontier = Trust.of(notes).frontier

    given_up = Trust.of(notes).marked("quarantined")
    tried = [
        note.checkpoint.iteration
        for note in notes
        if isinstance(note, Resumes) or note.checkpoint in given_up
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
        [[1, 1, 1, 1, 0, 1]],
        [[1, 1, 1, 1, True, 1]],
        [[1, 1, 1, 1, 10**19, 1]],
        [[1, 1, -1, 1, 1, 1]],
        [[1, 1, 1, 0, 1, 1]],
        [[1, 1, 1, 2**20 + 1, 1, 1]],
        [[1, 1, 1, 1]],
        [[1, 1, 1, 1, "splendid", ""]],
        [[1, 1, 1, 1, "quarantined", None]],
        [[1, "1", 1, 1, "quarantined", ""]],
        [[1, 1, 1, 1, "measured", 0.5]],
        [[1, 1, 1, 1, "measured", "loss"]],
        [[1, 1, 1, 1, "measured", "0.5"]],
        [[1, 1, 1, 1, "measured", "0.5 "]],
        [[1, 1, 1, 1, "measured", "nan loss"]],
        [[1, 1, 1, 1, "measured", f"0.5 {'l' * 201}"]],
    ],
)
def test_what_is_no_note_is_refused(told: object) -> None:
    with pytest.raises(MismatchError):
        Trust.from_json(told)


def test_a_job_ends_in_order_if_nobody_raised_but_to_end_it() -> None:
    assert is_orderly(None)
    assert is_orderly(KeyboardInterrupt())
    assert is_orderly(SystemExit(0))
    assert is_orderly(SystemExit())
    assert not is_orderly(SystemExit(1))
    assert not is_orderly(SystemExit("no"))
    assert not is_orderly(MemoryError())
