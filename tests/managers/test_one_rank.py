"""Saves and loads of one rank without torch.distributed: options, retention, one call at a time."""

from __future__ import annotations

import copy
import logging
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import localckpt
from localckpt import Best, Retention
from localckpt.ids import Piece
from localckpt.storage.notes import read_notes
from tests.cli.commands import call
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    error_of,
    files,
    is_ahead,
    iterations_on,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.staging import staging_nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_last", [1, 3])
def test_as_many_checkpoints_as_asked_for_are_kept_in_files_that_are_used_again(
    kind: str, keep_last: int, tmp_path: Path
) -> None:
    seen = set()
    with make_manager(kind, tmp_path, keep_last=keep_last) as manager:
        for iteration in range(2 * keep_last + 4):
            state = state_of(0, iteration, 4000 + 900 * (iteration % 3))
            manager.save(state, iteration)
            assert iterations_on(tmp_path) == set(range(iteration + 1)[-keep_last:])
            seen |= {path.stat().st_ino for path in tmp_path.rglob("*.s*")}
            manager.find_latest()
            assert_same(manager.load()[0], state)
        in_use = [name for name in files(tmp_path) if not name.endswith(".recycled")]
        recycled = len(files(tmp_path)) - len(in_use)

        # One file more than is kept: the one that the next save writes into.
        assert (len(in_use), recycled, len(seen)) == (keep_last, 1, keep_last + 1)
        report, loaded = manager.last_save, manager.last_load
    assert files(tmp_path) == in_use
    assert report.iteration == loaded.iteration == iteration
    assert report.nbytes == loaded.nbytes == (tmp_path / in_use[-1]).stat().st_size
    assert 0 <= report.stage_s <= report.stall_s <= report.durable_s
    assert loaded.seconds > 0
    with make_manager(kind, tmp_path) as manager:
        manager.find_latest()
        # Who trains on with what was loaded changes no checkpoint.
        manager.load()[0]["model"]["weight"].zero_()
        assert_same(manager.load()[0], state)


_LEAST = Retention(last=2, best=Best("loss"))


def _save_losses(manager: Any, values: dict[int, Any]) -> list[int]:
    """Save iterations with a loss each, ``None`` for none; what is there then."""
    for iteration, value in values.items():
        metrics = {} if value is None else {"loss": value}
        manager.save(state_of(0, iteration), iteration, metrics=metrics)
    return list(manager.all_iterations())


def test_the_best_stays_beside_the_last_also_after_restarts(tmp_path: Path) -> None:
    def start() -> Any:
        return make_manager("disk", tmp_path, "job", retention=_LEAST)

    with start() as manager:
        losses = {1: 3.0, 2: torch.tensor(0.5), 3: math.nan, 4: None, 5: 2, 6: 1.0}
        assert _save_losses(manager, losses) == [6, 5, 2]
        for metrics, told in (
            ({"loss": torch.ones(2)}, "the metric 'loss' is a Tensor, and must be a number"),
            (0.5, "metrics is a float: give numbers by name, as {'loss': 0.5}"),
        ):
            given: Any = metrics
            assert told in error_of(lambda m=given: manager.save({}, 7, metrics=m))  # type: ignore[misc]
    with start() as manager:
        manager.load()
        assert _save_losses(manager, {7: 4.0, 8: 5.0, 9: 6.0}) == [9, 8, 2]
        assert_same(manager.load(iteration=2)[0], state_of(0, 2))
    told = call("explain", tmp_path).out
    assert "Iteration 2 was saved with loss 0.5, by which the job keeps" in told
    with start() as manager:
        manager.load()
        assert _save_losses(manager, {10: 0.25, 11: 7.0, 12: 8.0}) == [12, 11, 10]
    # Notes of checkpoints that are gone are gone.
    (folder,) = tmp_path.glob("session-job/*")
    noted = read_notes(folder).noted
    assert sorted(c.iteration for c, trust in noted.items() if trust.metric) == [10, 11, 12]


def test_a_long_load_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # No load of a test takes ten seconds.
    monkeypatch.setattr("localckpt.state_dict.source._EVERY_S", 0.0)
    with make_manager("disk", tmp_path) as manager:
        manager.save({"w": torch.zeros(3 << 20)}, 1)
        manager.load()

    lines = [text for text in caplog.messages if text.startswith("reading")]
    assert lines
    assert all(" of 0.0 GB after " in text and "iteration 1" in text for text in lines)


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


@pytest.mark.parametrize("iteration", [True, np.bool_(True), 3.0, "3", -1, np.int64(-1)], ids=repr)
def test_what_is_no_iteration_is_refused(tmp_path: Path, iteration: Any) -> None:
    with make_manager("disk", tmp_path) as manager:
        assert "must be an int and not negative" in error_of(lambda: manager.save({}, iteration))


def test_a_call_at_once_with_a_save_is_an_error_and_the_save_is_not_disturbed(
    tmp_path: Path,
) -> None:
    told: dict[str, str] = {}
    with make_manager("disk", tmp_path) as manager:
        manager.save(state_of(0, 1), 1)
        commit = manager.store.commit
        calls = {
            "save": lambda: manager.save(state_of(0, 3), 3),
            "find_latest": manager.find_latest,
            "load": manager.load,
            "explain": manager.explain,
            "close": manager.close,
        }

        def from_a_handler(*_: Any) -> None:
            told["save in a handler"] = error_of(calls["save"])

        def from_a_thread() -> None:
            told.update({name: error_of(call) for name, call in calls.items()})

        def disturbed(*args: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)
            thread = threading.Thread(target=from_a_thread)
            thread.start()
            thread.join(MAX_S)
            commit(*args)

        manager.store.commit = disturbed
        before = signal.signal(signal.SIGUSR1, from_a_handler)
        try:
            manager.save(state_of(0, 2), 2)
        finally:
            signal.signal(signal.SIGUSR1, before)
            manager.store.commit = commit

        assert told.keys() == {*calls, "save in a handler"}
        for name, text in told.items():
            assert f"{name.partition(' ')[0]}() was called while save() of the same man" in text
            assert "make one call at a time" in text
        assert resume(manager, 0, 2) == "own node"


def test_requests_that_nobody_scheduled_are_an_error_of_the_next_save_which_then_works(
    tmp_path: Path,
) -> None:
    with make_manager("disk", tmp_path, keep_last=2) as manager:
        manager.save(state_of(0, 1), 1, is_async=True)
        told = error_of(lambda: manager.save(state_of(0, 2), 2, is_async=True))
        assert "the request that save() returned for iteration 1 was never scheduled" in told
        assert not manager.status()

        # Requests that are kept are an error when they have all buffers.
        kept = [manager.save(state_of(0, i), i, is_async=True) for i in (1, 2)]
        began = time.monotonic()
        told = error_of(lambda: manager.save(state_of(0, 3), 3, is_async=True))
        assert time.monotonic() - began < MAX_S / 4
        assert "save() returned for iterations 1, 2 were never scheduled" in told
        assert "nothing was begun of iteration 3" in told
        for request in kept:
            request.execute_sync()
        # What was found while a save was under way is looked for again.
        request = manager.save(state_of(0, 3), 3, is_async=True)
        assert manager.find_latest() == 2
        request.execute_sync()
        assert resume(manager, 0, 3) == "own node"
    assert iterations_on(tmp_path) == {2, 3}


def test_the_memory_of_the_first_saves_is_made_ahead_of_them(
    tmp_path: Path, layouts: list[Any]
) -> None:
    with make_manager("disk", tmp_path) as manager:
        state = state_of(0, 1, 40_000_000)
        manager.warm_up(state)
        image_nbytes = manager.store.image_nbytes[Piece(0)]
        before = staging_nbytes(manager.store)
        assert before >= 2 * image_nbytes

        manager.save(state, 1)

        assert len(layouts) == 1
        assert before <= staging_nbytes(manager.store) <= 1.1 * 2 * image_nbytes
        assert_same(manager.load()[0], state)
    assert not any(map(is_ahead, tmp_path.rglob("*")))


@pytest.mark.fault("changed-state")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_guarded", [False, True])
def test_training_on_while_a_save_is_written_does_not_change_what_is_saved(
    kind: str, is_guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An optimizer's first step makes torch's compiler cache, among the temporary files if not here.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()

    step()
    guard = {"guard": optimizer} if is_guarded else {}
    with (
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        make_manager(kind, tmp_path / "node", keep_last=9, **guard) as manager,
    ):
        # The second and later saves go into buffers and files that are used again.
        for iteration in range(4):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
                "view": model[0].weight.detach()[1::2, ::3],
                "history": [iteration, {"loss": 0.1}],
            }
            expected = copy.deepcopy(state)

            request = manager.save(state, iteration, is_async=True)

            # Before anything of the request has been carried out.
            step()
            manager.wait_staged()
            state["random"].add_(1)
            state["history"].clear()
            queue.schedule_async_request(request)
            step()
            state["optimizer"]["param_groups"][0]["lr"] = 7.0
            queue.maybe_finalize_async_calls(blocking=True)
            optimizer.param_groups[0]["lr"] = 0.1
            manager.find_latest()
            assert_same(manager.load()[0], expected)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_save_that_failed_or_is_bad_is_no_progress(tmp_path: Path) -> None:
    def check(tensors: Any) -> str | None:
        if tensors["model.weight"].isnan().any():
            raise ValueError("it cannot be judged")
        return "it is infinite" if tensors["model.weight"].isinf().any() else None

    file = tmp_path / "iteration"
    with make_manager("disk", tmp_path, "job", check=check, iteration_file=file) as manager:
        save(manager, state_of(0, 1), 1)
        failing, bad = state_of(0, 2), state_of(0, 3)
        failing["model"]["weight"].fill_(float("nan"))
        bad["model"]["weight"].fill_(float("inf"))
        assert "it cannot be judged" in error_of(lambda: save(manager, failing, 2))
        save(manager, bad, 3)
        assert int(file.read_text().strip()) == 1
        save(manager, state_of(0, 4), 4)

    assert int(file.read_text().strip()) == 4
