"""Jobs that crash each time they resume from a checkpoint get past it by themselves."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.state_dict.replica_digests import find_not_finite
from localckpt.storage.notes import read_notes
from localckpt.storage.owner import Owner
from localckpt.waiting import wait_until
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


def _live(rank: int, world_size: int, poisons: bool) -> tuple[int, str]:
    """A start of a job, whose last rank crashes in its second step once it was poisoned."""
    # With it in the state, the next step cannot be done.
    poison = Part(False)
    with _checkpointer(node_store(), poison) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, _STEPS):
            is_crash = poison.value and step > first
            if is_crash and rank == 1:
                announce("crash")
                os._exit(3)
            if is_crash:
                time.sleep(60)
            poison.value = poison.value or (poisons and step >= 8)
            checkpointer.step(step)
            # So that it is known what there is.
            checkpointer.wait_until_finished()
        return first, str(checkpointer.manager.explain())


def _crash(nodes: list[Path], *, poisons: bool) -> None:
    """A start that ends as under torchrun: the other rank is told to stop, and killed."""
    with start_ranks(_live, 2, poisons, store_per_node=nodes) as group:
        group.await_announced("crash", 60.0)
        group.kill(0, signal.SIGTERM)
        # It has heard of it: what it noted is gone.
        assert wait_until(lambda: not _noted(nodes[0], 0), MAX_S)
        group.kill(0)
        group.join(60.0, expect_dead=range(2))


def _noted(node: Path, rank: int) -> list[Owner]:
    return [*read_notes(node / "session-" / str(rank)).starts.values()]


@pytest.mark.fault("trainer-dies")
def test_a_job_that_crashes_after_each_resume_gets_past_the_checkpoint_by_itself(
    tmp_path: Path,
) -> None:
    nodes = stores(tmp_path, 2)
    for poisons in (True, False, False):
        _crash(nodes, poisons=poisons)

    found = run_ranks(_live, 2, False, store_per_node=nodes)

    assert [first for first, _ in found] == [6, 6]
    why = "the job was resumed from it 2 times and made no progress"
    assert all(f".safetensors.corrupt: {why}" in text for _, text in found)
    quarantined = [name for name in files(*nodes) if name.endswith(".corrupt")]
    # Each shard has a copy.
    assert len(quarantined) == 4


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


def _fail_here(rank: int, world_size: int, local: Path, steps: int, options: Any) -> int:
    return _start(local, steps, RuntimeError("the loss is not finite"), **options)


def _fail(local: Path, steps: int = 1, **options: Any) -> int:
    """A start in a process of its own that does so many steps and fails; its first step."""
    (first,) = run_ranks(_fail_here, 1, local, steps, options, init_group=False)
    return int(first)


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
    assert wait_until(lambda: not _noted(tmp_path, 0), MAX_S)
    checkpointer.__exit__(RuntimeError, RuntimeError(), None)


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


def test_the_last_checkpoint_is_kept_and_the_others_are_put_back_only_on_request(
    tmp_path: Path,
) -> None:
    _start(tmp_path, 6)
    assert [_fail(tmp_path) for _ in range(4)] == [6, 6, 3, 3]

    told = _refusal(tmp_path)

    why = "the job was resumed from it 2 times and made no progress, and it is"
    assert all(f"iteration {iteration}: {why}" in told for iteration in (2, 5))
    assert "max_attempts=None" in told
    assert _refusal(tmp_path) == told
    assert "what was complete was given up" in call("explain", tmp_path).out
    # The cause is gone: the job goes on from it.
    assert _start(tmp_path, 0, max_attempts=None) == 3
    # What was given up is put back on request, and by nothing else.
    assert "left" in call("clean", "--corrupt", tmp_path).out
    assert _start(tmp_path, 0, max_attempts=None) == 3
    assert "put back 1" in call("clean", "--put-back", tmp_path).out
    assert _fail(tmp_path) == 6
    assert _start(tmp_path, 6, max_attempts=None) == 6
    assert _start(tmp_path, 0) == 12


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


_NAN, _INF = math.nan, math.inf


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
        # Masks have infinite values.
        self.register_buffer("mask", torch.full((4,), -_INF))


def _run(
    local: Path, steps: int, bad: Mapping[int, float], *, rank: int = 0, **options: Any
) -> tuple[int, list[int]]:
    """A start whose weight gets a value in some steps on rank 0; its first, and what there is."""
    model = _Model()
    state = {"model": model}
    usual = {"every": localckpt.Every(steps=2), "finite": True, "timeout_s": MAX_S}
    with localckpt.Checkpointer(state, local=local, **(usual | options)) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, first + steps):
            with torch.no_grad():
                model.layer.weight.fill_(1.0)
                if rank == 0:
                    model.layer.weight[3, 5] = bad.get(step, 1.0)
            checkpointer.step(step)
            checkpointer.wait_until_finished()
        return first, checkpointer.manager.all_iterations()


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_a_single_value_that_is_not_finite_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    # More than is looked at in one piece.
    good = torch.ones(300_000, 5)
    values = [_NAN] if dtype == torch.float8_e4m3fn else [_NAN, _INF, -_INF]

    for value in values:
        spoiled = good.clone()
        spoiled[-1, 4] = value
        told = find_not_finite({"good": good.to(dtype), "spoiled": spoiled.to(dtype)})
        assert told == f"spoiled has the value {value}"
    assert find_not_finite({"good": good.to(dtype), "none": torch.empty(0, dtype=dtype)}) is None
    assert find_not_finite({"numbers": torch.tensor([1, 2]), "flags": torch.tensor([True])}) is None


def test_a_bad_checkpoint_is_marked_and_an_older_one_is_taken_however_many_are_bad(
    tmp_path: Path, caplog: Any
) -> None:
    first, there = _run(tmp_path, 12, dict.fromkeys(range(5, 12), _NAN), keep_last=2)
    shown = call("explain", tmp_path).out

    # Of 1 to 11, the last two that are sound, and the newest of the others as the last resort.
    assert (first, there) == (0, [3, 1, 11])
    assert "iteration 5 is marked bad: rank 0: model.layer.weight has the value nan" in caplog.text
    assert "A restart loads iteration 3 " in shown
    assert "Iteration 11 is marked bad: rank 0: model.layer.weight has the value nan." in shown
    assert "1 rank) is newer, and would be taken only if there were no other." in shown
    assert "lacks" not in shown
    # A sound one that is newer makes it go.
    assert _run(tmp_path, 8, {}, keep_last=2) == (4, [11, 9])


def test_a_bad_state_does_not_go_to_shared_storage_and_gives_way_to_what_is_there(
    tmp_path: Path,
) -> None:
    shared = {"shared": tmp_path / "shared", "shared_every": localckpt.Every(steps=4)}
    _run(tmp_path / "a", 4, {}, **shared)

    _run(tmp_path / "b", 8, dict.fromkeys(range(12), _NAN), **shared)

    assert _run(tmp_path / "b", 0, {}, **shared)[0] == 4
