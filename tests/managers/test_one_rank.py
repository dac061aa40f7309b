"""A job of one rank, without torch.distributed, and one call at a time."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import localckpt
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    error_of,
    files,
    iterations_on,
    make_manager,
    resume,
    save,
    state_of,
)


def test_two_threads_that_save_at_random_moments_mix_no_values(tmp_path: Path) -> None:
    saved: dict[int, dict[str, torch.Tensor]] = {}
    refused: list[int] = []

    def save_some(manager: Any, thread: int) -> None:
        for iteration in range(thread, 40, 2):
            state = {f"w{n}": torch.full((20_000,), 100.0 * iteration + n) for n in range(20)}
            try:
                manager.save(state, iteration)
                saved[iteration] = state
            except localckpt.CheckpointingException:
                refused.append(iteration)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with make_manager("disk", tmp_path) as manager:
            threads = [threading.Thread(target=save_some, args=(manager, n)) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(MAX_S)
            newest = manager.find_latest()
            found, _ = manager.load()
    finally:
        sys.setswitchinterval(interval)

    assert newest == max(saved)
    assert_same(found, saved[newest])
    assert len(saved) + len(refused) == 40


@pytest.mark.parametrize(("kind", "is_async"), [("disk", False), ("memory", True)])
def test_what_was_saved_comes_back_in_the_next_process_life(
    kind: str, is_async: bool, tmp_path: Path
) -> None:
    with (
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        make_manager(kind, tmp_path) as manager,
    ):
        assert manager.find_latest() == -1
        for iteration in (0, 3):
            save(manager, state_of(0, iteration), iteration, queue if is_async else None)
        report = manager.last_save
    with make_manager(kind, tmp_path) as manager:
        source = resume(manager, 0, 3)
        loaded = manager.last_load

    assert source == "own node"
    assert (report.iteration, loaded.iteration) == (3, 3)
    assert report.nbytes == loaded.nbytes == (tmp_path / files(tmp_path)[-1]).stat().st_size
    assert 0 <= report.stage_s <= report.stall_s <= report.durable_s
    assert loaded.seconds > 0
    with pytest.raises(FrozenInstanceError):
        report.iteration = 4


@pytest.mark.parametrize(("kind", "keep_last"), [("disk", 1), ("disk", 3), ("memory", 2)])
def test_as_many_checkpoints_as_asked_for_are_kept(
    kind: str, keep_last: int, tmp_path: Path
) -> None:
    with make_manager(kind, tmp_path, keep_last=keep_last) as manager:
        for iteration in range(5):
            manager.save(state_of(0, iteration), iteration)
            assert iterations_on(tmp_path) == set(range(iteration + 1)[-keep_last:])
        resume(manager, 0, 4)
        in_use = [name for name in files(tmp_path) if not name.endswith(".recycled")]
        recycled = len(files(tmp_path)) - len(in_use)

        # One file more than is kept: the one that the next save writes into.
        assert (len(in_use), recycled) == (keep_last, 1)
    assert files(tmp_path) == in_use


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_retired_checkpoints_are_written_into_again(kind: str, tmp_path: Path) -> None:
    seen = []
    with make_manager(kind, tmp_path, keep_last=1) as manager:
        for iteration in range(6):
            manager.save(state_of(0, iteration, 4000 + 900 * (iteration % 3)), iteration)
            seen.append({path.stat().st_ino for path in tmp_path.rglob("*.s*")})
            manager.find_latest()
            found, _ = manager.load()
            assert_same(found, state_of(0, iteration, 4000 + 900 * (iteration % 3)))

    assert len(set().union(*seen)) == 2
    assert all(len(inodes) <= 2 for inodes in seen)


def test_a_long_load_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = {"w": torch.zeros(3 << 20)}
    with make_manager("disk", tmp_path) as manager:
        manager.save(state, 1)
        assert manager.find_latest() == 1
        manager.load()
        assert not [text for text in caplog.messages if text.startswith("reading")]
        # No load of a test takes ten seconds.
        monkeypatch.setattr("localckpt.state_dict.source._EVERY_S", 0.0)
        manager.load(into=state)

    lines = [text for text in caplog.messages if text.startswith("reading")]
    assert lines
    assert all(" of 0.0 GB after " in text and "iteration 1" in text for text in lines)


def test_what_was_found_while_a_save_was_under_way_is_looked_for_again(tmp_path: Path) -> None:
    with (
        make_manager("disk", tmp_path, keep_last=2) as manager,
        localckpt.AsyncCallsQueue() as queue,
    ):
        manager.save(state_of(0, 1), 1)
        manager.save(state_of(0, 2), 2)
        request = manager.save(state_of(0, 3), 3, is_async=True)
        before = manager.find_latest()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)

        assert (before, manager.find_latest()) == (2, 3)
        resume(manager, 0, 3)

    assert len(files(tmp_path)) == 2


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("session_id", ["", "a/../../b", "..", "ü ñ %2F"])
def test_any_text_can_name_a_session_and_stays_inside_the_directory(
    tmp_path: Path, session_id: str
) -> None:
    tmp_path = tmp_path / "store"
    with make_manager("disk", tmp_path, session_id) as manager:
        manager.save(state_of(0, 1), 1)
    with make_manager("disk", tmp_path, session_id) as manager:
        resume(manager, 0, 1)

    assert len(files(tmp_path)) == 1
    assert list(tmp_path.parent.iterdir()) == [tmp_path]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("keep_last", 0), ("timeout", -1.0), ("on_busy", "drop"), ("num_buffers", 0)),
        *(("staging_threads", 0), ("check_replicas", True), ("on_divergence", "ignore")),
        ("iteration_file", 3),
    ],
)
def test_options_that_make_no_sense_are_named(option: str, value: Any, tmp_path: Path) -> None:
    refused = error_of(lambda: make_manager("disk", tmp_path, **{option: value}))

    assert f"{option} is {value!r}" in refused
    assert list(tmp_path.iterdir()) == []


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
