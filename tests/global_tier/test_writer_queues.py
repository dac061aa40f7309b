"""The writer's function behind training: in a worker without torch, in a fork, and in a thread."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from localckpt import AsyncCall, AsyncCallsQueue, AsyncRequest, CheckpointingException
from localckpt.global_tier.storage_writer import (
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from tests.async_save import work
from tests.global_tier.states import Counts, assert_same, load_with_ours, tensor_of, told_by
from tests.ranks import run_ranks

PATIENCE_S = 20.0


def state_of(rank: int, number: int) -> dict[str, Any]:
    return {
        f"of rank {rank}": tensor_of(torch.float32, (300_000,), 10 * number + rank),
        f"small of rank {rank}": tensor_of(torch.bfloat16, (5, 7), 10 * number + rank),
        "of all": tensor_of(torch.int64, (50,), number),
        "number": number,
    }


def state_of_all(world_size: int, number: int) -> dict[str, Any]:
    return {k: v for rank in range(world_size) for k, v in state_of(rank, number).items()}


def request_of(writer: FileSystemWriterAsync, state: dict[str, Any]) -> AsyncRequest:
    """What a training loop hands to its queue."""
    planned = save_state_dict_async_plan(state, writer, timeout_s=PATIENCE_S)
    function, preload, args = writer.get_save_function_and_args()
    return AsyncRequest(
        AsyncCall(function, failure_fns=[writer.give_up], name="write"),
        tuple(args),
        [partial(save_state_dict_async_finalize, *planned)],
        preload_fn=preload,
    )


def carry_out(queue: AsyncCallsQueue, request: AsyncRequest) -> None:
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)


def _write_as_a_foreign_worker_does(writer: FileSystemWriterAsync) -> None:
    """Call what was pickled."""
    function, preload, args = pickle.loads(pickle.dumps(writer.get_save_function_and_args()))
    function(args[0], preload())


def test_a_worker_that_preloads_itself_gets_what_was_staged_and_outlives_a_failure(
    tmp_path: Path,
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "checkpoint")
    planned = save_state_dict_async_plan(state_of(0, 3), writer, timeout_s=PATIENCE_S)

    _write_as_a_foreign_worker_does(writer)
    save_state_dict_async_finalize(*planned)

    assert_same(load_with_ours(tmp_path / "checkpoint", state_of(0, 0)), state_of(0, 3))
    writer.reset(tmp_path / "next")
    planned = save_state_dict_async_plan(state_of(0, 4), writer, timeout_s=PATIENCE_S)
    shutil.rmtree(tmp_path / "next")

    _write_as_a_foreign_worker_does(writer)

    with pytest.raises(CheckpointingException, match="No such file or directory"):
        save_state_dict_async_finalize(*planned)
    writer.close()


def _three_saves(
    rank: int, world_size: int, root: Path, persistent: bool
) -> tuple[int, int, list[int], list[bool]]:
    writer = FileSystemWriterAsync(root / "0", timeout_s=PATIENCE_S)
    gathered: list[int] = []
    workers: list[bool] = []
    counts = Counts()
    with AsyncCallsQueue(persistent, timeout_s=PATIENCE_S) as queue:
        for number in range(3):
            writer.reset(root / str(number))
            state = state_of(rank, number)
            queue.schedule_async_request(request_of(writer, state))
            gathered.append(writer.plans.bytes_gathered)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            queue.maybe_finalize_async_calls(blocking=True)
            children = psutil.Process().children()
            # One that is about to end has no memory any more.
            maps = [Path(f"/proc/{child.pid}/maps").read_text() for child in children]
            workers += ["libtorch" in text for text in maps if text]
    writer.close()
    return counts.layouts, counts.plans, gathered, workers


@pytest.mark.parametrize("persistent", [True, False], ids=["worker", "forks"])
def test_three_saves_in_a_row_use_one_layout_and_one_plan_and_then_send_nothing(
    tmp_path: Path, persistent: bool
) -> None:
    told = run_ranks(_three_saves, 2, tmp_path, persistent)

    assert [layouts for layouts, *_ in told] == [1, 1]
    assert [plans for _, plans, *_ in told] == [1, 0]
    first, *later = told[0][2]
    assert first > 1000
    assert later == [0, 0]
    # A worker process has never loaded torch; a fork of the trainer is gone when it is done.
    assert [workers for *_, workers in told] == [[False] * 3 if persistent else []] * 2
    for number in range(3):
        wanted = state_of_all(2, number)
        assert_same(load_with_ours(tmp_path / str(number), wanted), wanted)


def _worker_is_killed(rank: int, world_size: int, root: Path) -> tuple[str, str, list[str]]:
    writer = FileSystemWriterAsync(root / "0", timeout_s=3.0)
    with AsyncCallsQueue(True, timeout_s=PATIENCE_S) as queue:
        request = request_of(writer, state_of(rank, 0))
        hanging = root / "hanging" if rank == 1 else None
        if hanging is not None:
            call = replace(request.call, function=partial(work.hang, hanging))
            request = request._replace(async_fn=call)
        queue.schedule_async_request(request)
        if hanging is not None:
            os.kill(int(work.await_file(hanging)), signal.SIGKILL)
        told = told_by(lambda: queue.maybe_finalize_async_calls(blocking=True))
        there = sorted(file.name for file in (root / "0").iterdir())
        writer.reset(root / "1")
        told_next = told_by(lambda: carry_out(queue, request_of(writer, state_of(rank, 1))))
    writer.close()
    return told, told_next, there


@pytest.mark.fault("worker-dies")
def test_a_worker_that_is_killed_fails_its_save_on_every_rank_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    (told, next_one, there), *others = run_ranks(_worker_is_killed, 2, tmp_path)

    assert "rank 1" in told
    assert "SIGKILL" in told
    assert [other for other, _, _ in others] == [told]
    assert ".metadata" not in there
    assert [next_one, *(other for _, other, _ in others)] == ["", ""]
    wanted = state_of_all(2, 1)
    assert_same(load_with_ours(tmp_path / "1", wanted), wanted)
