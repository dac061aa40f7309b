"""One call into a manager at a time, whoever makes it; and what a call accepts and asks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.managers.jobs import (
    MAX_S,
    error_of,
    make_manager,
    resume,
    state_of,
)


@contextmanager
def _saving(manager: Any, iteration: int) -> Iterator[None]:
    """Inside, another thread is in the middle of a save."""
    began, go_on = threading.Event(), threading.Event()
    keep = manager.store.commit

    def held_up(*args: Any) -> None:
        began.set()
        assert go_on.wait(MAX_S)
        keep(*args)

    manager.store.commit = held_up
    saving = threading.Thread(target=manager.save, args=(state_of(0, iteration), iteration))
    saving.start()
    try:
        assert began.wait(MAX_S)
        yield
    finally:
        go_on.set()
        saving.join(MAX_S)
        manager.store.commit = keep


def test_a_call_at_once_with_a_save_is_an_error_and_the_save_is_not_disturbed(
    tmp_path: Path,
) -> None:
    with make_manager("disk", tmp_path) as manager:
        manager.save(state_of(0, 1), 1)
        assert manager.find_latest() == 1
        calls = {
            "save": lambda: manager.save(state_of(0, 3), 3),
            "find_latest": manager.find_latest,
            "load": manager.load,
            "explain": manager.explain,
            "close": manager.close,
        }

        with _saving(manager, 2):
            told = {name: error_of(call) for name, call in calls.items()}

        for name, text in told.items():
            assert f"{name}() was called while save() of the same manager is under way" in text
            assert "make one call at a time" in text
        assert resume(manager, 0, 2) == "own node"


def test_a_signal_handler_cannot_save_in_the_middle_of_a_save(tmp_path: Path) -> None:
    told: list[str] = []
    with make_manager("disk", tmp_path) as manager:
        keep = manager.store.commit

        def interrupted(*args: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)
            keep(*args)

        manager.store.commit = interrupted
        before = signal.signal(
            signal.SIGUSR1,
            lambda *_: told.append(error_of(lambda: manager.save(state_of(0, 2), 2))),
        )
        try:
            manager.save(state_of(0, 1), 1)
        finally:
            signal.signal(signal.SIGUSR1, before)

        assert len(told) == 1
        assert "save() was called while save() of the same manager is under way:" in told[0]
        assert resume(manager, 0, 1) == "own node"


@pytest.mark.parametrize("iteration", [True, np.bool_(True), 3.0, "3", -1, np.int64(-1)], ids=repr)
def test_what_is_no_iteration_is_refused(tmp_path: Path, iteration: Any) -> None:
    with make_manager("disk", tmp_path) as manager:
        assert "must be an int and not negative" in error_of(lambda: manager.save({}, iteration))
