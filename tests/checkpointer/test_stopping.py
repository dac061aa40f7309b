"""How a loop ends: what asks it to stop, its last step, signals, and errors."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    Best,
    Checkpointer,
    CheckpointingException,
    GlobalCheckpointManager,
    Retention,
)
from localckpt.checkpointer.stopping import StopRequests
from localckpt.waiting import wait_until
from tests.checkpointer.loops import resume_once, slow_down
from tests.managers.jobs import MAX_S
from tests.ranks import node_store, on_ranks, run_ranks, same_on_all, start_ranks


def _state() -> dict[str, Any]:
    return {"m": torch.nn.Linear(1, 1)}


def _nothing_asked(**given_: Any) -> StopRequests:
    nothing = {"signals": (), "file": None, "ask": None, "on_signal": lambda _: None}
    return StopRequests(**nothing | given_)


def test_a_signal_asks_to_stop_and_handlers_before_and_after_are_kept() -> None:
    reached: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: reached.append(number))
    try:
        requests = _nothing_asked(signals=[signal.SIGUSR2])
        assert requests.why() is None

        signal.raise_signal(signal.SIGUSR2)

        assert requests.why() == "signal SIGUSR2"
        assert reached == [signal.SIGUSR2]
        requests.close()
        requests.close()
        signal.raise_signal(signal.SIGUSR2)
        assert reached == [signal.SIGUSR2] * 2
        requests = _nothing_asked(signals=[signal.SIGUSR2])
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        requests.close()
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_file_and_a_function_ask_to_stop(tmp_path: Path) -> None:
    file, told = tmp_path / "stop", [""]
    one, other = (_nothing_asked(file=file, ask=lambda: told[0]) for _ in range(2))

    assert one.why() is None
    told[0] = "maintenance at 9"
    assert one.why() == "maintenance at 9"
    file.touch()
    assert other.why() == f"{file} is there"
    file.unlink()
    told[0] = ""
    # What was told once holds.
    assert [one.why(), other.why()] == ["maintenance at 9", f"{file} is there"]

    # A function that does not answer holds nothing up, and is heard later.
    gate = threading.Event()

    def ask() -> str:
        gate.wait(60.0)
        return "maintenance at 9"

    requests = _nothing_asked(ask=ask)

    assert requests.why() is None
    gate.set()
    assert wait_until(lambda: requests.why() == "maintenance at 9", MAX_S)


def test_outside_of_the_main_thread_no_handler_is_set_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    thread = threading.Thread(target=lambda: _nothing_asked(signals=[signal.SIGTERM]))
    thread.start()
    thread.join(10.0)

    assert signal.getsignal(signal.SIGTERM) == before
    assert "SIGTERM will not stop this job" in caplog.text


def test_of_two_the_open_one_hears_a_signal_that_the_closed_one_left_to_it(tmp_path: Path) -> None:
    with Checkpointer(_state(), local=tmp_path / "b", events=()) as inner:
        first = inner._stop_requests
        with Checkpointer(_state(), local=tmp_path / "a", events=()) as outer:
            second = outer._stop_requests
            first.close()
            signal.raise_signal(signal.SIGTERM)

            assert (first.why(), second.why()) == (None, "signal SIGTERM")


@pytest.fixture
def pythons_ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, whatever a framework that was used before has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    yield

    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_ctrl_c")
def test_ctrl_c_among_the_stop_signals_stops_in_order_and_interrupts_when_it_comes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "localckpt")
    with Checkpointer(
        _state(), local=tmp_path, stop_signals=[signal.SIGINT], events=()
    ) as checkpointer:
        step = checkpointer.resume()
        checkpointer.poll_stop()
        signal.raise_signal(signal.SIGINT)
        while not checkpointer.step(step):
            step += 1
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert checkpointer.stopped
    # Once, by the stop, and not by the end as well.
    saved = [text for text in caplog.messages if text.startswith("saved iteration")]
    assert len(saved) == 1
    assert saved[0].startswith(f"saved iteration {step}:")


def test_an_interrupt_in_a_call_is_said_by_the_next_and_nothing_on_disk_is_lost(
    tmp_path: Path,
) -> None:
    steps: list[int] = []

    def give() -> int:
        if len(steps) == 2:
            raise KeyboardInterrupt
        return len(steps)

    parts = {**_state(), "own": (give, lambda _: None)}
    with Checkpointer(parts, local=tmp_path, every=1, events=()) as checkpointer:
        steps.append(checkpointer.resume())
        checkpointer.step(0)
        checkpointer.wait_until_finished()
        steps.append(1)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.step(1)

        for call in (checkpointer.step, checkpointer.wait_until_finished):
            with pytest.raises(CheckpointingException, match=r"step\(\) of this Checkpointer was"):
                call()
        checkpointer.close()

    steps.clear()
    assert resume_once(parts, local=tmp_path, events=()) == 1


def _train(local: Path, steps: int, **options: Any) -> tuple[int, list[int]]:
    """Train to a step; the first step, and the steps that were saved to the nodes."""
    usual = {"every": 5, "timeout_s": MAX_S}
    with Checkpointer(_state(), local=local, **(usual | options)) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, steps):
            checkpointer.step(step, metrics={"loss": step})
    with Checkpointer(_state(), local=local, read_only=True, timeout_s=MAX_S) as reader:
        reader.find_latest()
        return first, sorted(reader.manager.all_iterations())


def test_a_loop_that_ended_is_resumed_after_its_last_step(tmp_path: Path) -> None:
    assert _train(tmp_path, 23) == (0, [19, 22])
    assert _train(tmp_path, 23) == (23, [19, 22])
    assert _train(tmp_path, 28, save_last=False) == (23, [22, 24])


def test_the_last_step_goes_to_both_tiers_with_its_metrics(tmp_path: Path) -> None:
    nodes, shared = tmp_path / "nodes", tmp_path / "shared"
    best = {"every": 100, "retention": Retention(last=1, best=Best("loss", "max"))}
    kept = {"shared_every": 10, "shared_retention": Retention(best=Best("loss", "max"))}

    _train(nodes, 23, shared=shared, **best, **kept)

    with GlobalCheckpointManager(shared, read_only=True) as manager:
        assert manager.all_iterations() == [22]
    with Checkpointer(_state(), local=nodes, **best) as checkpointer:
        for step in range(checkpointer.resume(), 26):
            checkpointer.step(step, metrics={"loss": 0})
            checkpointer.save(step, metrics={"loss": 0})
            checkpointer.wait_until_finished()
        assert checkpointer.manager.all_iterations() == [25, 22]


_WORLD = 2
_GRACE_S = 2.0
_STEP_S = 0.05
_SLOW_FROM = 22
"""From here on storage becomes slow, in a step in which no save begins or ends."""
# A step, 2 s to hear of the signal, the grace time and 2 s, beside what ranks take to start, to
# resume and to end, here and now.
_ENDED_S = _STEP_S + 2 + _GRACE_S + 2
# Of ranks on a machine that is busy.
_PATIENCE_S = 120.0


def _program(
    rank: int, world_size: int, folder: Path, slow: str, tier: str, steps: int = 1000
) -> tuple[int, int, int | None]:
    """Train weights that are the number of the step; the first one, the last, and the newest."""
    dist.init_process_group("gloo")
    if slow:
        slow_down(folder / tier, folder / "slow", 60.0, hangs=slow != "fsync")
    model = torch.nn.Linear(300, 100, bias=False)
    options: dict[str, Any] = {"shared": folder / "shared", "shared_every": 10}
    with Checkpointer(
        {"model": model}, local=folder / "nodes" / str(rank), every=5, grace_s=_GRACE_S, **options
    ) as checkpointer:
        first = checkpointer.resume()
        assert first == 0 or bool((model.weight == first - 1).all())
        if (folder / "slow at resume").exists():
            (folder / "slow").touch()
        print(f"resumed {first}", flush=True)
        was_newest = None
        for step in range(first, first + steps):
            dist.barrier()
            time.sleep(_STEP_S)
            torch.nn.init.constant_(model.weight, step)
            if checkpointer.step(step):
                break
            # The save before is over, with what it does in the loop.
            is_quiet, was_newest = was_newest == step - (step + 1) % 5, checkpointer.newest
            is_quiet = is_quiet and not checkpointer._shared.is_busy  # type: ignore[union-attr]
            if slow and rank == 0 and step >= _SLOW_FROM and is_quiet:
                (folder / "slow").touch()
    dist.destroy_process_group()
    return first, step, checkpointer.newest


@pytest.mark.rows(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("tier", ["nodes", "shared"])
@pytest.mark.parametrize("slow", ["fsync", "hangs"])
def test_it_ends_in_time_on_storage_that_does_not_answer_and_resumes_what_was_complete(
    tier: str, slow: str, tmp_path: Path
) -> None:
    program = (_program, _WORLD, tmp_path, slow, tier)
    with start_ranks(*program, init_group=False) as group:
        group.await_(lambda: (tmp_path / "slow").exists(), _PATIENCE_S)
        # Some save, or step, begins, and is in the way of the next.
        time.sleep(20 * _STEP_S)
        began = time.monotonic()
        group.kill(1, signal.SIGTERM)
        ends = group.join(_PATIENCE_S)
        took_s, texts = time.monotonic() - began, [group.output(rank) for rank in range(_WORLD)]
    (stopped,) = {last for _, last, _ in ends}
    newest = min(newest for *_, newest in ends)
    where = "safe on the nodes" if tier == "nodes" else "on shared storage"
    assert all(f"step {stopped} is not {where}" in text for text in texts)
    (tmp_path / "slow").unlink()

    if tier == "shared":
        assert newest == stopped
        shutil.rmtree(tmp_path / "nodes")
    began = time.monotonic()
    again = run_ranks(_program, _WORLD, tmp_path, "", tier, 1, init_group=False)
    assert took_s < _ENDED_S + time.monotonic() - began, texts
    # It has looked whether the state is that of the step before.
    assert min(again)[0] - 1 >= (newest if tier == "nodes" else 19)


@pytest.mark.rows(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("slow_from", ["resume", "first save"])
def test_a_start_on_storage_that_does_not_answer_hears_a_signal_at_once(
    slow_from: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    run_ranks(_program, _WORLD, tmp_path, "", "nodes", 2, init_group=False)
    ended_s = _ENDED_S + time.monotonic() - began
    if slow_from == "resume":
        # The first step notes that this start is counted.
        (tmp_path / "slow at resume").touch()
    with start_ranks(_program, _WORLD, tmp_path, "fsync", "nodes", init_group=False) as group:
        group.await_printed(0, "resumed 2\n", _PATIENCE_S)
        (tmp_path / "slow").touch()
        time.sleep(20 * _STEP_S)
        began = time.monotonic()
        group.kill(1, signal.SIGTERM)
        group.join(_PATIENCE_S)
        assert time.monotonic() - began < ended_s
        for rank in range(_WORLD):
            assert "is not safe on the nodes" in group.output(rank)


@pytest.mark.parametrize(("steps", "told"), [(3, 1), (0, 0)])
@on_ranks(2, nodes=2)
def test_a_poll_between_steps_stops_all_ranks_in_one_call_with_the_last_step_safe(
    rank: int, steps: int, told: int
) -> None:
    # Some steps, and a long evaluation.
    model, polls = torch.nn.Linear(2, 2), 0
    options: dict[str, Any] = {"every": 1000, "timeout_s": 30.0}
    with Checkpointer({"model": model}, local=node_store(), **options) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            torch.nn.init.constant_(model.weight, step)
            assert not checkpointer.step(step)
        until = time.monotonic() + 30
        while checkpointer.poll_stop() is None and time.monotonic() < until:
            polls += 1
            if polls == 100 and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005)
        stopped = checkpointer.stopped
        assert stopped == checkpointer.poll_stop()
        assert checkpointer.step(steps) == (stopped is not None)
    first = resume_once({"model": model}, local=node_store(), **options)
    assert first == 0 or bool((model.weight == first - 1).all())
    assert same_on_all(polls) >= 100
    assert stopped == f"rank {told}: signal SIGTERM"
    assert first == steps
