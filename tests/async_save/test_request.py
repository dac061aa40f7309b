"""Requests, and what hangs on their functions."""

from __future__ import annotations

import functools
import pickle
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from localckpt.async_save.request import (
    _FOREIGN_MODULES,
    AsyncCall,
    AsyncRequest,
    must_run_in_trainer,
    runs_in_trainer,
)
from localckpt.errors import CheckpointingException, StorageError
from tests.async_save import work


class _OtherTuple(NamedTuple):
    """Named fields, of which none is a request's."""

    number: int
    name: str


def test_a_frozen_request_takes_no_more_finalize_functions_and_has_what_can_be_sent() -> None:
    request = AsyncRequest(None, (), [])

    request.add_finalize_fn(work.nothing)
    frozen = request.freeze()

    assert list(frozen.finalize_fns) == [work.nothing]
    with pytest.raises(CheckpointingException, match="frozen"):
        frozen.add_finalize_fn(work.nothing)
    with pytest.raises(CheckpointingException, match="list"):
        AsyncRequest(None, (), ()).add_finalize_fn(work.nothing)
    # Frozen for another process, a call is what that can run.
    handed = AsyncRequest(AsyncCall(print, hand_over=lambda: work.nothing), (1,), []).freeze()
    plain = AsyncRequest(AsyncCall(print), (1,), []).freeze()
    assert (handed.async_fn, handed.async_fn_args) == (work.nothing, ())
    assert (plain.async_fn, plain.async_fn_args) == (print, (1,))
    assert pickle.loads(pickle.dumps(AsyncCall(work.write, failure_fns=[print]))) is work.write


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
    request._replace(async_fn=None, preload_fn=None).execute_sync()

    assert seen == ["preload", ("work", 1, 2, 3), *["first", "second"] * 2]


def test_preload_that_returns_a_value_for_an_argument_that_is_not_there_is_an_error() -> None:
    with pytest.raises(CheckpointingException, match="second argument"):
        AsyncRequest(print, (1,), [], preload_fn=lambda: "staged").execute_sync()


@pytest.mark.parametrize("where", ["preload_fn", "async_fn"])
def test_execute_sync_that_fails_runs_all_failure_functions_and_does_not_finalize(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def spoil(error: BaseException) -> None:
        raise RuntimeError("spoiled")

    functions: dict[str, Any] = {"preload_fn": None, "async_fn": work.nothing}
    functions[where] = work.fail_storage
    request = AsyncRequest(
        AsyncCall(functions["async_fn"], failure_fns=[spoil, seen.append]),
        (),
        [lambda: seen.append("finalized")],
        preload_fn=functions["preload_fn"],
    )

    with pytest.raises(StorageError, match="no space left") as raised:
        request.execute_sync()

    assert seen == [raised.value]
    assert isinstance(raised.value.__cause__, StorageError)
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
        (functools.partial(AsyncCall(_Marked().method)), True),
        (AsyncCall(None), False),
        (print, False),
    ],
)
def test_the_mark_is_seen_through_methods_partials_and_callable_objects(
    function: Any, marked: bool
) -> None:
    assert must_run_in_trainer(function) is marked


class _OtherRequest(NamedTuple):
    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    async_fn_kwargs: Any = None
    preload_fn: Any = None
    is_frozen: bool = False
    call_idx: int = 0


def test_a_request_that_was_pickled_passes_as_one_of_each_library_that_is_loaded_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = ModuleType("core")
    core.AsyncRequest = _OtherRequest  # type: ignore[attr-defined]
    request = AsyncRequest(work.write, (1,), [])
    sent = pickle.dumps(request)
    assert pickle.loads(sent) == request

    monkeypatch.setitem(sys.modules, _FOREIGN_MODULES[0], core)
    there = pickle.loads(sent)

    assert isinstance(there, AsyncRequest)
    assert isinstance(there, _OtherRequest)
    # The fields are in the order that other queues expect.
    assert there._fields == _OtherRequest._fields == AsyncRequest._fields
    assert tuple(there) == tuple(request)
    assert pickle.loads(pickle.dumps(there._replace(call_idx=3))).call_idx == 3


def test_a_request_of_another_library_is_taken_for_its_fields_and_what_is_none_refused() -> None:
    ours = AsyncRequest.of(_OtherRequest(work.write, (1,), [], call_idx=4))

    assert type(ours) is AsyncRequest
    assert ours == AsyncRequest(work.write, (1,), [], call_idx=4)
    others: list[Any] = [None, (work.write, (), []), _OtherTuple(1, "write")]
    for other in others:
        with pytest.raises(CheckpointingException, match="async_fn_args, finalize_fns"):
            AsyncRequest.of(other)
