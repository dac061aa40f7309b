"""Errors keep no memory once they are handled; Python's garbage collector may be off, or late.

Trainers switch it off so that its pauses do not stall other ranks. An error that is part of a
reference cycle then keeps the variables of all calls that it came through, the state among them.
"""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CheckpointingException
from localckpt.storage.buffers import Buffer
from tests.managers.jobs import damage, files, make_manager, save

_MIB = 1 << 20


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("a mistake of the user's")


def _small() -> dict[str, Any]:
    return {"weight": torch.ones(_MIB // 4)}


def _larger() -> dict[str, Any]:
    return {"weight": torch.ones(3 * _MIB // 4)}


def _not_to_be_pickled() -> dict[str, Any]:
    return _small() | {"callback": _Unpicklable()}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()

    yield

    gc.enable()


def _fill_up(root: Path) -> None:
    with open(root / "filler", "wb") as filler:
        while True:
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            try:
                os.posix_fallocate(filler.fileno(), 0, max(1, free - _MIB // 2))
            except OSError as error:
                # The manager makes memory for the next save meanwhile.
                if error.errno != errno.ENOSPC:
                    raise
            else:
                return


def _kept_after_error(call: Callable[[Any], object], argument: Callable[[], Any]) -> bool:
    """Whether the state that a call is given lives on when its error has been handled."""

    def handle() -> weakref.ref[Any]:
        state = argument()
        told = weakref.ref(state["weight"])
        try:
            call(state)
        except CheckpointingException:
            return told
        raise AssertionError("it did not fail")

    return handle()() is not None


@pytest.mark.parametrize(("state", "is_async"), [(_larger, True), (_not_to_be_pickled, False)])
def test_a_failed_save_keeps_neither_the_state_nor_a_buffer(
    state: Callable[[], dict[str, Any]],
    is_async: bool,
    small_disk: Callable[[str], Path],
    no_collector: None,
) -> None:
    root = small_disk("size=8m")

    def fail(state: dict[str, Any]) -> None:
        with localckpt.AsyncCallsQueue() as queue, make_manager("disk", root) as manager:
            manager.save(_small(), 1)
            _fill_up(root)
            save(manager, state, 2, queue if is_async else None)

    assert not _kept_after_error(fail, state)
    assert sum(len(o.view) for o in gc.get_objects() if type(o).__mro__[1:2] == (Buffer,)) == 0


def test_a_load_that_fails_keeps_nothing_of_the_state_that_it_was_to_fill(
    small_disk: Callable[[str], Path], no_collector: None
) -> None:
    root = small_disk("size=8m")
    with make_manager("disk", root) as manager:
        manager.save(_small(), 1)
    with make_manager("disk", root) as manager:
        assert manager.find_latest() == 1
        for path in files(root):
            damage(root / path)

        kept = _kept_after_error(lambda state: manager.load(into=state), _small)

    assert not kept
