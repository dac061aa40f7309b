"""What all ranks make of how a call ended on each; no text that goes to other ranks is long."""

from __future__ import annotations

import json

import pytest

from localckpt.availability.coverage import SaveOutcome, save_problems
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    PeerLostError,
    RestoreError,
    SaveFailedError,
    StorageError,
    WorkerDiedError,
)
from localckpt.failure_texts import ranks_named
from localckpt.ids import Generation
from localckpt.ranks.failure import NO_FUNCTION, Attempt, CallEnd, Failure, failure_of
from localckpt.ranks.ranks import Ranks
from tests.ranks import on_ranks, same_on_all
from tests.simulated import gather

_GOOD = CallEnd(3, "write")
_LONG = "x" * (9 << 20)


class _OwnError(SaveFailedError): ...


def _failed(error: BaseException) -> CallEnd:
    """As it comes from another rank."""
    return CallEnd.from_json(json.loads(json.dumps(CallEnd.of(3, "write", error).to_json())))


def _error_of(*ends: CallEnd) -> CheckpointingException:
    failure = failure_of(ends, range(len(ends)))
    assert failure is not None
    return failure.error()


@pytest.mark.parametrize(
    ("ends", "kind", "text"),
    [
        (
            [_GOOD, _failed(StorageError("full"))],
            StorageError,
            "failed on rank 1: StorageError: full",
        ),
        (
            [_failed(StorageError("a")), _failed(WorkerDiedError("b"))],
            CheckpointingException,
            "rank 0: StorageError: a; rank 1: WorkerDiedError: b",
        ),
        # Ranks that lost the one that failed say nothing more.
        (
            [_failed(PeerLostError("rank 1 is lost")), _failed(StorageError("a"))],
            StorageError,
            "failed on rank 1: StorageError: a",
        ),
        (
            [_failed(OSError(28, "No space"))],
            CheckpointingException,
            "OSError: [Errno 28] No space",
        ),
        # Others do not know the class.
        ([_failed(_OwnError("x"))], SaveFailedError, "x"),
        ([_GOOD, CallEnd(4, "write")], MismatchError, "rank 1 is at call 4 (write)"),
        ([_GOOD, CallEnd.of(3, "read", OSError("x"))], MismatchError, "rank 1 is at call 3 (read)"),
        # A rank without a function takes part in the call of the others.
        ([CallEnd(3, NO_FUNCTION), _failed(StorageError("a"))], StorageError, "(write) failed on"),
        ([_GOOD, CallEnd(4, NO_FUNCTION)], MismatchError, "is at call 4"),
    ],
)
def test_what_failed_is_named_with_its_ranks_and_keeps_its_type(
    ends: list[CallEnd], kind: type[Exception], text: str
) -> None:
    error = _error_of(*ends)

    assert type(error) is kind
    assert text in str(error)


def test_an_error_keeps_its_fields_and_not_all_of_its_text_also_one_of_a_report() -> None:
    def report() -> None:
        raise CorruptShardError("bad bytes")

    reported = _error_of(CallEnd.of(3, "write", None, report), _GOOD)
    assert type(reported) is CorruptShardError
    assert "failed on rank 0: CorruptShardError: bad bytes" in str(reported)

    error = _error_of(_GOOD, _failed(RestoreError("x" * 1_000_000, class_name="C", path="a.b")))

    assert isinstance(error, RestoreError)
    assert (error.class_name, error.path) == ("C", "a.b")
    assert len(str(error)) < 10_000


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

    joint = _error_of(*ends)

    assert "failed on ranks 0 to 1023: StorageError: the disk is full" in str(joint)
    assert len(str(joint)) < 1000
    assert len("".join(save_problems(outcomes))) < 1000
    assert len(str(_error_of(*odd))) < 5000
    assert ranks_named([9, 0, 1, 2, 3, 5, 6, 9]) == "ranks 0 to 3, 5, 6 and 9"


@on_ranks(2)
def test_an_error_of_more_than_8_mib_is_raised_on_all_and_breaks_no_store(rank: int) -> None:
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
    assert same_on_all(told)[0].startswith("could not try: ranks 0 and 1: ValueError: xxx")
    assert all(len(text) < 20_000 for text in told)
