"""Texts that many ranks share are said once, and no text that goes to other ranks is long."""

from __future__ import annotations

import pytest

from localckpt.availability.coverage import SaveOutcome, save_problems
from localckpt.errors import CheckpointingException, MismatchError, StorageError
from localckpt.failure_texts import (
    Mismatches,
    described,
    ranks_named,
    said_by,
    short,
    with_short_texts,
)
from localckpt.ids import Generation
from localckpt.ranks.failure import Attempt, CallEnd, Failure, failure_of
from localckpt.ranks.ranks import Ranks
from tests.ranks import run_ranks
from tests.simulated import gather

_LONG = "x" * (9 << 20)


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([9, 0, 1, 2, 3, 5, 6, 9], "ranks 0 to 3, 5, 6 and 9"),
        (range(16_384), "ranks 0 to 16383"),
    ],
)
def test_ranks_are_named_in_few_words(ranks: list[int], named: str) -> None:
    assert ranks_named(ranks) == named


def test_texts_that_ranks_share_are_given_once() -> None:
    assert said_by({0: "a.", 2: "b", 1: "a"}) == "ranks 0 and 1: a; rank 2: b"


def test_errors_on_one_topic_are_one_error_with_its_advice_once() -> None:
    found = Mismatches()
    for text in ("a differs", "b differs", "b differs"):
        found.note(MismatchError(text).advised("structure", "Give partial=True"))
    found.note(MismatchError("c is old").advised("age", "Save it again"))

    with pytest.raises(MismatchError) as raised:
        found.raise_all()

    texts = ["a differs", "b differs", "c is old. Save it again"]
    assert raised.value.text == ". Besides, ".join(texts)
    assert str(raised.value).endswith(". Give partial=True")


def test_an_error_that_was_noted_alone_is_raised_itself() -> None:
    found, error = Mismatches(), MismatchError("a differs").advised("structure", "Look")
    found.note(error)

    with pytest.raises(MismatchError) as raised:
        found.raise_all()

    assert raised.value is error
    assert raised.value.__cause__ is None


def test_an_error_with_an_empty_text_is_described_by_its_class() -> None:
    assert described(MemoryError()) == "MemoryError"
    assert described(ValueError("why")) == "ValueError: why"
    assert described(StorageError("full")) == "full"
    assert described(StorageError()) == "StorageError"
    end = CallEnd.of(1, "f", MemoryError())
    assert end.failure is not None
    assert end.failure.text == "MemoryError"


@pytest.mark.parametrize(
    "told", [["annotations", "why", {}], ["OSError", "why", {}], ["StorageError", 5, {}]]
)
def test_what_is_no_error_of_ours_is_made_of_no_report(told: list[object]) -> None:
    with pytest.raises(ValueError, match="is no error of localckpt"):
        Failure.from_json(told)


def test_an_error_that_a_thousand_ranks_have_is_a_short_text() -> None:
    told = "StorageError: " + "the disk is full " * 20
    ends = [CallEnd(3, "write", Failure("StorageError", told))] * 1024
    outcomes = [SaveOutcome(7, Generation(1, 1), told, ())] * 1024
    odd = [CallEnd(3, "write", Failure("StorageError", f"{told} {rank}")) for rank in range(1024)]

    joint = failure_of(ends, range(1024))
    problems = save_problems(outcomes)
    odd_joint = failure_of(odd, range(1024))

    assert joint is not None
    assert odd_joint is not None
    assert "failed on ranks 0 to 1023: StorageError: the disk is full" in joint.text
    assert type(joint.error()) is StorageError
    assert len(joint.text) < 1000
    assert len("".join(problems)) < 1000
    assert len(odd_joint.text) < 5000


def test_texts_are_cut_wherever_they_stand_in_a_record() -> None:
    record = {"a": [1, ("x" * 5000, None)], "b": "y"}

    assert with_short_texts(record) == {"a": [1, [short("x" * 5000), None]], "b": "y"}
    assert len(short(_LONG)) == 4000


def _tell_long_texts(rank: int, world_size: int) -> list[str]:
    coordinator = Ranks("long", None, timeout_s=30.0)
    told = []
    with Attempt() as trying:
        raise ValueError(_LONG)
    with pytest.raises(CheckpointingException) as joint:
        coordinator.decide("try", trying)
    told.append(str(joint.value))
    told.append(str(gather(coordinator, "tell", {"rank": rank, "text": _LONG})))
    with pytest.raises(MismatchError, match=r"rank 0: .* bytes to tell the others"):
        gather(coordinator, "tell too much", list(range(2 << 20)) if rank == 0 else 1)
    gather(coordinator, "the store answers", None)
    return told


def test_an_error_of_more_than_8_mib_is_raised_on_all_and_breaks_no_store() -> None:
    told = run_ranks(_tell_long_texts, 2)

    assert told[0] == told[1]
    assert told[0][0].startswith("could not try: ranks 0 and 1: ValueError: xxx")
    assert all(len(text) < 20_000 for text in told[0])
