"""Requests, and the judgement of what the ranks report."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest

from localckpt.async_save.request import (
    AsyncRequest,
    CallReport,
    function_name,
    judge,
    must_run_in_trainer,
    runs_in_trainer,
)
from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    SaveFailedError,
    StorageError,
    WorkerDiedError,
)
from tests.async_save import work


def test_the_fields_stand_in_the_order_that_other_queues_expect() -> None:
    assert AsyncRequest._fields == (
        "async_fn",
        "async_fn_args",
        "finalize_fns",
        "async_fn_kwargs",
        "preload_fn",
        "is_frozen",
        "call_idx",
        "failure_fns",
        "stop_fns",
        "then_fn",
    )


def test_a_finalize_function_can_be_added_until_the_request_is_frozen() -> None:
    request = AsyncRequest(None, (), [])

    request.add_finalize_fn(work.nothing)
    frozen = request.freeze()

    assert list(frozen.finalize_fns) == [work.nothing]
    with pytest.raises(CheckpointingException, match="frozen"):
        frozen.add_finalize_fn(work.nothing)


def test_what_is_added_after_freezing_does_not_reach_the_frozen_request() -> None:
    request = AsyncRequest(None, (), [])
    frozen = request.freeze()

    request.add_finalize_fn(work.nothing)

    assert list(frozen.finalize_fns) == []


def test_a_request_without_a_list_says_that_nothing_can_be_added() -> None:
    with pytest.raises(CheckpointingException, match="list"):
        AsyncRequest(None, (), ()).add_finalize_fn(work.nothing)


def test_execute_sync_does_everything_in_order() -> None:
    seen: list[Any] = []
    request = AsyncRequest(
        lambda a, b, *, c: seen.append(("work", a, b, c)),
        (1, 2),
        [lambda: seen.append("first"), lambda: seen.append("second")],
        {"c": 3},
        preload_fn=lambda: seen.append("preload"),
    )

    request.execute_sync()

    assert seen == ["preload", ("work", 1, 2, 3), "first", "second"]


def test_what_preload_returns_stands_in_for_the_second_argument() -> None:
    seen: list[Any] = []

    AsyncRequest(
        lambda *a: seen.append(a), (1, 2, 3), [], preload_fn=lambda: "staged"
    ).execute_sync()

    assert seen == [(1, "staged", 3)]


def test_preload_that_returns_a_value_for_an_argument_that_is_not_there_is_an_error() -> None:
    with pytest.raises(CheckpointingException, match="second argument"):
        AsyncRequest(print, (1,), [], preload_fn=lambda: "staged").execute_sync()


def test_execute_sync_without_a_function_still_finalizes() -> None:
    seen: list[str] = []

    AsyncRequest(None, (), [lambda: seen.append("finalized")]).execute_sync()

    assert seen == ["finalized"]


@pytest.mark.parametrize("where", ["preload_fn", "async_fn"])
def test_execute_sync_that_fails_tells_the_owner_and_does_not_finalize(where: str) -> None:
    seen: list[Any] = []
    functions: dict[str, Any] = {"preload_fn": None, "async_fn": work.nothing}
    functions[where] = work.fail_storage
    request = AsyncRequest(
        functions["async_fn"],
        (),
        [lambda: seen.append("finalized")],
        preload_fn=functions["preload_fn"],
        failure_fns=[seen.append],
    )

    with pytest.raises(StorageError, match="no space left") as raised:
        request.execute_sync()

    assert seen == [raised.value]
    assert isinstance(raised.value.__cause__, StorageError)


def test_a_failure_function_that_fails_does_not_hide_the_error_nor_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[BaseException] = []

    def spoil(error: BaseException) -> None:
        raise RuntimeError("spoiled")

    with pytest.raises(CheckpointingException, match="a number is wrong"):
        AsyncRequest(work.fail_value, (), [], failure_fns=[spoil, seen.append]).execute_sync()

    assert len(seen) == 1
    assert "spoiled" in caplog.text


class _Marked:
    @runs_in_trainer
    def method(self) -> None: ...

    @runs_in_trainer
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "marked"),
    [
        (work.note_pid, True),
        (functools.partial(functools.partial(work.note_pid), []), True),
        (_Marked().method, True),
        (_Marked(), True),
        (work.nothing, False),
        (functools.partial(work.nothing), False),
        (print, False),
    ],
)
def test_the_mark_is_seen_through_methods_partials_and_callable_objects(
    function: Any, marked: bool
) -> None:
    assert must_run_in_trainer(function) is marked


def test_a_function_is_named_through_a_partial() -> None:
    assert function_name(functools.partial(work.write)) == "write"
    assert function_name(_Marked()) == "_Marked"
    assert function_name(None) == "no function"


def test_a_request_of_plain_functions_can_be_pickled() -> None:
    request = AsyncRequest(work.write, (1,), [work.nothing])

    assert pickle.loads(pickle.dumps(request)) == request


GOOD = CallReport.of(3, "write", None)


def failed(error: BaseException) -> CallReport:
    return CallReport.from_json(CallReport.of(3, "write", error).to_json())


def test_a_call_that_is_good_on_all_ranks_stands() -> None:
    assert judge([GOOD, GOOD], [0, 1]) is None


def test_one_bad_rank_is_named_with_its_cause_and_keeps_its_type() -> None:
    error = judge([GOOD, failed(StorageError("disk full"))], [4, 6])

    assert type(error) is StorageError
    assert "call 3 (write) failed on rank 6: StorageError: disk full" in str(error)
    assert "rank 4" not in str(error)


def test_errors_of_different_types_become_the_root() -> None:
    error = judge([failed(StorageError("a")), failed(WorkerDiedError("b"))], [0, 1])

    assert type(error) is CheckpointingException
    assert "rank 0: StorageError: a; rank 1: WorkerDiedError: b" in str(error)


def test_an_error_that_is_not_ours_becomes_the_root_and_keeps_its_name() -> None:
    error = judge([failed(OSError(28, "No space left on device"))], [0])

    assert type(error) is CheckpointingException
    assert "OSError: [Errno 28] No space left on device" in str(error)


def test_a_subclass_that_others_do_not_know_becomes_the_nearest_that_they_do() -> None:
    class OwnError(SaveFailedError): ...

    assert type(judge([failed(OwnError("x"))], [0])) is SaveFailedError


@pytest.mark.parametrize(
    "other", [CallReport.of(4, "write", None), CallReport.of(3, "read", OSError("x"))]
)
def test_ranks_at_different_calls_are_told_where_each_is(other: CallReport) -> None:
    error = judge([GOOD, other], [0, 1])

    assert type(error) is MismatchError
    assert "rank 0 is at call 3 (write)" in str(error)
    assert f"rank 1 is at call {other.call_idx} ({other.function})" in str(error)


def test_an_endless_message_is_cut() -> None:
    assert len(str(judge([failed(OSError("x" * 1_000_000))], [0]))) < 10_000


def test_a_rank_without_a_function_takes_part_in_the_call_of_the_others() -> None:
    nothing = CallReport.of(GOOD.call_idx, function_name(None), None)

    assert judge([nothing, GOOD], [0, 1]) is None
    error = judge([nothing, failed(StorageError("disk full"))], [0, 1])
    assert type(error) is StorageError
    assert f"({GOOD.function}) failed on rank 1" in str(error)


def test_a_rank_without_a_function_must_be_at_the_same_call() -> None:
    nothing = CallReport.of(GOOD.call_idx + 1, function_name(None), None)

    assert type(judge([GOOD, nothing], [0, 1])) is MismatchError
