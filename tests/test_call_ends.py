"""What all ranks make of how a call ended on each of them."""

from __future__ import annotations

import json

import pytest

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
from localckpt.ranks.failure import NO_FUNCTION, CallEnd, failure_of

GOOD = CallEnd(3, "write")


def failed(error: BaseException) -> CallEnd:
    """As it comes from another rank."""
    return CallEnd.from_json(json.loads(json.dumps(CallEnd.of(3, "write", error).to_json())))


def error_of(ends: list[CallEnd], ranks: list[int]) -> CheckpointingException:
    failure = failure_of(ends, ranks)
    assert failure is not None
    return failure.error()


def test_a_call_that_is_good_on_all_ranks_stands() -> None:
    assert failure_of([GOOD, GOOD], [0, 1]) is None


def test_one_bad_rank_is_named_with_its_cause_and_keeps_its_type() -> None:
    error = error_of([GOOD, failed(StorageError("disk full"))], [4, 6])

    assert type(error) is StorageError
    assert "call 3 (write) failed on rank 6: StorageError: disk full. It was" in str(error)
    assert "rank 4" not in str(error)


def test_errors_of_different_types_become_the_root() -> None:
    error = error_of([failed(StorageError("a")), failed(WorkerDiedError("b"))], [0, 1])

    assert type(error) is CheckpointingException
    assert "rank 0: StorageError: a; rank 1: WorkerDiedError: b" in str(error)


def test_ranks_that_lost_the_one_that_failed_say_nothing_more() -> None:
    error = error_of([failed(PeerLostError("rank 1 is lost")), failed(StorageError("a"))], [0, 1])

    assert type(error) is StorageError
    assert "failed on rank 1: StorageError: a" in str(error)


def test_an_error_keeps_its_fields() -> None:
    error = error_of([GOOD, failed(RestoreError("no", class_name="C", path="a.b"))], [0, 1])

    assert isinstance(error, RestoreError)
    assert (error.class_name, error.path) == ("C", "a.b")


def test_an_error_that_is_not_ours_becomes_the_root_and_keeps_its_name() -> None:
    error = error_of([failed(OSError(28, "No space left on device"))], [0])

    assert type(error) is CheckpointingException
    assert "OSError: [Errno 28] No space left on device" in str(error)


def test_a_subclass_that_others_do_not_know_becomes_the_nearest_that_they_do() -> None:
    class OwnError(SaveFailedError): ...

    assert type(error_of([failed(OwnError("x"))], [0])) is SaveFailedError


@pytest.mark.parametrize("other", [CallEnd(4, "write"), CallEnd.of(3, "read", OSError("x"))])
def test_ranks_at_different_calls_raise_where_each_is(other: CallEnd) -> None:
    error = error_of([GOOD, other], [0, 1])

    assert type(error) is MismatchError
    assert "rank 0 is at call 3 (write)" in str(error)
    assert f"rank 1 is at call {other.number} ({other.name})" in str(error)


def test_an_endless_message_is_cut() -> None:
    assert len(str(error_of([failed(OSError("x" * 1_000_000))], [0]))) < 10_000


def test_a_rank_without_a_function_takes_part_in_the_call_of_the_others() -> None:
    nothing = CallEnd(GOOD.number, NO_FUNCTION)

    assert failure_of([nothing, GOOD], [0, 1]) is None
    error = error_of([nothing, failed(StorageError("disk full"))], [0, 1])
    assert type(error) is StorageError
    assert f"({GOOD.name}) failed on rank 1" in str(error)


def test_a_rank_without_a_function_must_be_at_the_same_call() -> None:
    assert type(error_of([GOOD, CallEnd(4, NO_FUNCTION)], [0, 1])) is MismatchError


def test_what_a_report_fails_with_is_what_the_call_failed_with() -> None:
    def report() -> None:
        raise CorruptShardError("bad bytes")

    error = error_of([CallEnd.of(3, "write", None, report), GOOD], [0, 1])

    assert type(error) is CorruptShardError
    assert "failed on rank 0: CorruptShardError: bad bytes" in str(error)
