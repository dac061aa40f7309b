"""Jobs that crash each time they resume from a checkpoint get past it by themselves."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.storage.notes import read_notes
from localckpt.storage.owner import Owner
from tests.checkpointer.loops import Part, stores
from tests.cli.commands import call
from tests.managers.jobs import MAX_S, error_of, files
from tests.ranks import announce, node_store, run_ranks, start_ranks

_STEPS = 15


def _checkpointer(
    local: Path, poison: Part | None = None, **options: Any
) -> localckpt.Checkpointer:
    state = {"layer": torch.nn.Linear(4, 4), "poison": poison or Part(False)}
    usual = {"every": localckpt.Every(steps=3), "timeout_s": MAX_S, "max_attempts": 2}
    # So that a start ends in order, and makes no progress.
    usual["save_last"] = False
    return localckpt.Checkpointer(state, local=local, **(usual | options))


# Ranks that are processes of their own.


def _live(rank: int, world_size: int, poisons: bool) -> tuple[int, str]:
    """A start of a job, whose last rank crashes in its second step once it was poisoned."""
    # With it in the state, the next step cannot be done.
    poison, is_last = Part(False), rank == world_size - 1
    with _checkpointer(node_store(), poison) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, _STEPS):
            is_crash = poison.value and step > first
            if is_crash and is_last:
                announce("crash")
                os._exit(3)
            if is_crash:
                _await(lambda: False)
            poison.value = poison.value or (poisons and step >= 8)
            checkpointer.step(step)
            # So that it is known what there is.
            checkpointer.wait_until_finished()
        return first, str(checkpointer.manager.explain())


def _crash(nodes: list[Path], world_size: int, *, poisons: bool) -> None:
    """A start that ends as under torchrun: the others are told to stop, and killed."""
    arguments = (_live, world_size, poisons)
    with start_ranks(*arguments, store_per_node=nodes, init_group=world_size > 1) as group:
        group.await_announced("crash", 60.0)
        for rank in range(world_size - 1):
            group.kill(rank, signal.SIGTERM)
            # It has heard of it: what it noted is gone.
            _await(lambda rank=rank: not _noted(nodes[rank], rank))
            group.kill(rank)
        group.join(60.0, expect_dead=range(world_size))


def _noted(node: Path, rank: int) -> list[Owner]:
    return [*read_notes(node / "session-" / str(rank)).starts.values()]


def _await(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.fault("trainer-dies")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_job_that_crashes_after_each_resume_gets_past_the_checkpoint_by_itself(
    world_size: int, tmp_path: Path
) -> None:
    nodes = stores(tmp_path, world_size)
    for poisons in (True, False, False):
        _crash(nodes, world_size, poisons=poisons)

    found = run_ranks(*(_live, world_size, False), store_per_node=nodes, init_group=world_size > 1)

    assert [first for first, _ in found] == [6] * world_size
    why = "the job was resumed from it 2 times and made no progress"
    assert all(f".safetensors.corrupt: {why}" in text for _, text in found)
    quarantined = [name for name in files(*nodes) if name.endswith(".corrupt")]
    # On two nodes each shard has a copy.
    assert len(quarantined) == world_size**2


# One rank, whose starts end by what leaves the block.


def _start(local: Path, steps: int, ends_by: BaseException | None = None, **options: Any) -> int:
    """A start that does so many steps and ends, or fails; its first step."""
    with (
        suppress(() if ends_by is None else type(ends_by)),
        _checkpointer(local, **options) as checkpointer,
    ):
        first = checkpointer.resume()
        for step in range(first, first + steps):
            checkpointer.step(step)
            checkpointer.wait_until_finished()
        if ends_by is not None:
            raise ends_by
    return first


def _start_of_a_process(
    rank: int, world_size: int, local: Path, steps: int, options: dict[str, Any]
) -> int:
    return _start(local, steps, RuntimeError("the loss is not finite"), **options)


def _fail(local: Path, steps: int = 1, **options: Any) -> int:
    """A start in a process of its own that does so many steps and fails; its first step."""
    first: int
    (first,) = run_ranks(_start_of_a_process, 1, local, steps, options, init_group=False)
    return first


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0)], ids=["Ctrl-C", "sys.exit"])
def test_a_start_that_somebody_ends_does_not_count(error: BaseException, tmp_path: Path) -> None:
    _start(tmp_path, 6)

    for _ in range(3):
        assert _start(tmp_path, 1, error) == 6
        assert _start(tmp_path, 1) == 6
    assert _noted(tmp_path, 0) == []


@pytest.mark.parametrize("tier", ["nodes", "shared"])
def test_a_start_that_ends_before_its_first_step_does_not_count(tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if tier == "shared":
        options = {"shared": tmp_path / "shared", "shared_every": localckpt.Every(steps=3)}
    local = tmp_path / "local"
    _start(local, 6, **options)
    looks = []

    for _ in range(4):
        if tier == "shared":
            shutil.rmtree(local)
        looks.append(_fail(local, 0, **options))

    assert looks == [6, 6, 6, 6]
    assert all(not read_notes(path.parent).starts for path in tmp_path.rglob(".notes"))


def test_resuming_again_in_a_living_process_counts_once_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "localckpt.resuming")
    _start(tmp_path, 6)
    left = []

    for _ in range(4):
        left.append(_checkpointer(tmp_path))
        assert left[-1].resume() == 6
        assert left[-1].resume() == 6
        left[-1].step(6)
        left[-1].__exit__(RuntimeError, RuntimeError(), None)

    assert len(_noted(tmp_path, 0)) == 1
    assert "this start counts against iteration 5, as 1 of at most 2" in caplog.text
    assert "as 2 of" not in caplog.text


def _use_a_manager(rank: int, world_size: int, local: Path, saves: bool) -> int:
    """Load with a manager, save again or not, and fail."""
    options = {"timeout": MAX_S, "max_attempts": 2}
    with (
        suppress(RuntimeError),
        localckpt.LocalCheckpointManager(local, **options) as manager,
    ):
        found = manager.find_latest()
        manager.load()
        if saves:
            manager.save({"value": 1}, found + 1, is_async=True)
        raise RuntimeError
    return found


def test_a_start_of_a_manager_counts_from_its_first_save_on(tmp_path: Path) -> None:
    with localckpt.LocalCheckpointManager(tmp_path) as manager:
        manager.save({"value": 1}, 1)
        manager.save({"value": 1}, 2)

    found = [
        run_ranks(_use_a_manager, 1, tmp_path, saves, init_group=False)[0]
        for saves in (False, False, False, True, True, False)
    ]

    assert found == [2, 2, 2, 2, 2, 1]


def test_a_load_from_shared_storage_that_failed_does_not_count(tmp_path: Path) -> None:
    options = {"shared": tmp_path / "shared", "shared_every": localckpt.Every(steps=3)}
    _start(tmp_path / "local", 6, **options)
    shutil.rmtree(tmp_path / "local")

    for _ in range(3):
        state = {"layer": torch.nn.Linear(4, 5)}
        changed = localckpt.Checkpointer(state, local=tmp_path / "local", max_attempts=2, **options)
        with changed, pytest.raises(localckpt.MismatchError):
            changed.resume()

    assert _start(tmp_path / "local", 0, **options) == 6


@pytest.mark.parametrize("told_by", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_is_told_to_stop_does_not_count_even_if_it_is_killed_then(
    told_by: signal.Signals, tmp_path: Path
) -> None:
    _start(tmp_path, 6)
    checkpointer = _checkpointer(tmp_path)
    checkpointer.step(checkpointer.resume())
    noted = _noted(tmp_path, 0)

    with suppress(KeyboardInterrupt):
        signal.raise_signal(told_by)

    assert len(noted) == 1
    _await(lambda: not _noted(tmp_path, 0))
    checkpointer.__exit__(RuntimeError, RuntimeError(), None)


def test_close_in_a_finally_block_counts_a_start_that_failed(tmp_path: Path) -> None:
    _start(tmp_path, 6)
    checkpointer = _checkpointer(tmp_path)
    checkpointer.step(checkpointer.resume())

    with pytest.raises(RuntimeError), closing(checkpointer):
        raise RuntimeError

    assert len(_noted(tmp_path, 0)) == 1


def test_a_later_checkpoint_that_is_complete_ends_the_count(tmp_path: Path) -> None:
    _start(tmp_path, 6)
    _fail(tmp_path)
    told = "Of iteration 5: the job was resumed from it 1 time and made no progress"
    assert told in call("explain", tmp_path).out

    assert _fail(tmp_path, 3) == 6

    assert _noted(tmp_path, 0) == []
    assert [_fail(tmp_path), _fail(tmp_path), _fail(tmp_path)] == [9, 9, 6]


def _refusal(local: Path, **options: Any) -> str:
    with _checkpointer(local, **options) as checkpointer:
        return error_of(checkpointer.resume, localckpt.NoReplicasAvailableError)


def test_the_last_checkpoint_is_kept_and_the_job_says_that_nothing_else_is_left(
    tmp_path: Path,
) -> None:
    _start(tmp_path, 6)
    assert [_fail(tmp_path) for _ in range(4)] == [6, 6, 3, 3]

    told = _refusal(tmp_path)

    assert (
        "iteration 2: the job was resumed from it 2 times and made no progress, and it is" in told
    )
    assert (
        "iteration 5: the job was resumed from it 2 times and made no progress, and it is" in told
    )
    assert "max_attempts=None" in told
    assert _refusal(tmp_path) == told
    assert "what was complete was given up" in call("explain", tmp_path).out
    # The cause is gone: the job goes on from it, and that is progress.
    assert _start(tmp_path, 6, max_attempts=None) == 3
    assert _start(tmp_path, 0) == 9


def test_what_was_given_up_is_put_back_on_request_and_by_nothing_else(tmp_path: Path) -> None:
    _start(tmp_path, 6)
    assert [_fail(tmp_path) for _ in range(3)] == [6, 6, 3]

    kept = call("clean", "--corrupt", tmp_path)
    put_back = call("clean", "--put-back", tmp_path)

    assert "left" in kept.out
    assert "put back 1" in put_back.out
    assert _fail(tmp_path) == 6


def test_shared_storage_comes_after_the_nodes_and_then_what_is_older_there(tmp_path: Path) -> None:
    options = {
        "shared": tmp_path / "shared",
        "shared_every": localckpt.Every(steps=3),
        "every": localckpt.Every(steps=6),
    }
    local = tmp_path / "local"
    _start(local, 6, **options)
    shutil.rmtree(local)

    found = [_fail(local, **options) for _ in range(4)]
    shown = call("explain", tmp_path / "shared").out
    told = _refusal(local, **options)

    assert "of iteration 5: the job was resumed from it 2 times and made no progress" in shown
    assert "From shared storage a restart finds nothing to load." in shown
    # 5 and 2 on shared storage; the nodes have nothing.
    assert found == [6, 6, 3, 3]
    assert "no checkpoint on shared storage is left" in told
    assert _start(local, 3, **options, max_attempts=None) == 6
    assert _start(local, 0, **options) == 9


# Marks.


def _do(checkpointer: localckpt.Checkpointer, steps: range) -> None:
    for step in steps:
        checkpointer.step(step)
        checkpointer.wait_until_finished()


def test_the_newest_good_checkpoint_is_kept_beside_the_newest_over_restarts(
    tmp_path: Path,
) -> None:
    with _checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.resume()
        _do(checkpointer, range(6))
        assert checkpointer.mark_good("the loss is as it should be") == 5
        _do(checkpointer, range(6, 12))
        before = checkpointer.manager.all_iterations()
    with _checkpointer(tmp_path, keep_last=1) as checkpointer:
        _do(checkpointer, range(checkpointer.resume(), 15))
        after = checkpointer.manager.all_iterations()
        shown = call("explain", tmp_path).out
        checkpointer.mark_good()
        _do(checkpointer, range(15, 18))
        last = checkpointer.manager.all_iterations()

    assert [before, after, last] == [[11, 5], [14, 5], [17, 14]]
    assert "Iteration 5 is marked good: the loss is as it should be." in shown


def test_a_good_checkpoint_ends_the_count(tmp_path: Path) -> None:
    _start(tmp_path, 6)
    _fail(tmp_path)
    checkpointer = _checkpointer(tmp_path)
    checkpointer.resume()

    assert checkpointer.mark_good() == 5

    checkpointer.__exit__(RuntimeError, RuntimeError(), None)
    assert _noted(tmp_path, 0) == []
