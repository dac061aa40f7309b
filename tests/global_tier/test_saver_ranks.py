"""Saves of several ranks and behind training: planned once, and failed on all ranks or none."""

from __future__ import annotations

import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from localckpt import AsyncCall, AsyncCallsQueue, AsyncRequest, CheckpointingException
from localckpt.global_tier import storage_writer
from localckpt.global_tier.storage_writer import (
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from tests.global_tier.states import (
    load_with_ours,
    load_with_torch,
    save,
    tensor_of,
    told_by,
    write,
)
from tests.ranks import run_ranks
from tests.state_dict.states import Settings, assert_same

TIMEOUT_S = 10.0
_FEW = 4


def model_of(rank: int, seed: int, layers: int = 60) -> dict[str, Any]:
    """Tensors and objects of this rank's own, and some that are the same on all."""
    own: dict[str, Any] = {
        f"rank{rank}": {
            f"layer{layer}": tensor_of(torch.float32, (3, 5), 1000 * rank + layer + seed)
            for layer in range(layers)
        }
    }
    return own | {
        "shared": tensor_of(torch.float64, (40,), seed),
        "step": seed,
        f"rng{rank}": tensor_of(torch.uint8, (64,), seed + rank),
    }


def model_of_all(seed: int, layers: int = 60) -> dict[str, Any]:
    return {k: v for rank in range(2) for k, v in model_of(rank, seed, layers).items()}


def require_saved(path: Path, wanted: dict[str, Any]) -> None:
    assert_same(load_with_ours(path, wanted), wanted)
    assert_same(load_with_torch(path, wanted), wanted)


class _FailingPlanner(DefaultSavePlanner):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def fail(*_: Any) -> NoReturn:
            raise ValueError(f"{method} has no answer")

        setattr(self, method, fail)


class _FailingWriter(FileSystemWriterAsync):
    fails = False

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self.fails:
            raise OSError("nothing is finished today")
        super().finish(metadata, results)


def _save_as_a_queue_that_knows_no_errors(
    writer: FileSystemWriterAsync, state: dict[str, Any], coordinator: int, planner: Any = None
) -> None:
    planned = save_state_dict_async_plan(
        state, writer, None, coordinator, planner, timeout_s=TIMEOUT_S
    )
    try:
        write(writer)
    except CheckpointingException as error:
        print(f"the queue does not tell: {error}")
    save_state_dict_async_finalize(*planned)


# What fails on the rank that plans and finishes for all, or on the other one, and what is told.
_FAILURES = {
    "create_global_plan": (True, "create_global_plan has no answer"),
    "finish": (True, "nothing is finished today"),
    "create_local_plan": (False, "create_local_plan has no answer"),
    "finish_plan": (False, "finish_plan has no answer"),
    "resolve_data": (False, "resolve_data has no answer"),
    "unsafe": (False, "settings refers to"),
    "exists": (False, "do not speak of the same checkpoint|holds a checkpoint"),
    "write": (False, "_0.00000000.distcp"),
}


def _victim(what: str, coordinator: int) -> int:
    return coordinator if _FAILURES[what][0] else 1 - coordinator


def _fail_on_each(
    rank: int, world_size: int, root: Path, coordinator: int
) -> dict[str, tuple[str, str]]:
    return {
        what: _fail_on(rank, root / what, what, _victim(what, coordinator), coordinator)
        for what in _FAILURES
    }


def _fail_on(rank: int, root: Path, what: str, victim: int, coordinator: int) -> tuple[str, str]:
    writer = _FailingWriter(root / "0")
    _save_as_a_queue_that_knows_no_errors(writer, model_of(rank, 0, _FEW), coordinator)
    path, state, planner = root / "1", model_of(rank, 1, _FEW), None
    if rank == victim:
        if what == "unsafe":
            state["settings"] = [Settings(1.0)]
        elif what == "write":
            (path / f"__{rank}_0.00000000.distcp").mkdir(parents=True)
        elif what == "exists":
            path = root / "0"
        elif what == "finish":
            writer.fails = True
        else:
            # Without something new nobody would plan for all.
            state["new"] = torch.ones(3)
            planner = _FailingPlanner(what)
    # The save fails wherever the others are; they have not begun before what is wrong is there.
    dist.barrier()
    writer.reset(path)
    writer.save_id = "0" * 32

    told = told_by(
        lambda: _save_as_a_queue_that_knows_no_errors(writer, state, coordinator, planner)
    )

    writer.fails = False
    dist.barrier()
    writer.reset(root / "2")
    state = model_of(rank, 2, _FEW)
    told_next = told_by(lambda: _save_as_a_queue_that_knows_no_errors(writer, state, coordinator))
    writer.close()
    return told, told_next


@pytest.mark.parametrize("coordinator", [0, 1])
def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_save_works(
    tmp_path: Path, coordinator: int
) -> None:
    one, other = run_ranks(_fail_on_each, 2, tmp_path, coordinator)

    for what, (_, text) in _FAILURES.items():
        (told, told_next), root = one[what], tmp_path / what
        assert other[what] == (told, told_next), what
        assert f"rank {_victim(what, coordinator)}" in told, what
        assert any(part in told for part in text.split("|")), told
        assert told_next == "", what
        assert not (root / "1" / ".metadata").exists()
        require_saved(root / "0", model_of_all(0, _FEW))
        require_saved(root / "2", model_of_all(2, _FEW))


def _forget_on_one_rank(rank: int, world_size: int, root: Path, forgetful: int) -> list[str]:
    writers = [FileSystemWriterAsync(root / "0") for _ in range(2)]
    told = []
    for number in range(3):
        # A trainer that makes its writer anew, on one rank alone.
        writer = writers[number > 0 and rank == forgetful]
        state = model_of(rank, number)
        writer.reset(root / str(number))
        told.append(told_by(partial(save, writer, state, timeout_s=TIMEOUT_S)))
    for writer in writers:
        writer.close()
    return told


@pytest.mark.parametrize("forgetful", [0, 1])
def test_a_rank_that_has_forgotten_what_was_planned_costs_one_save_at_most(
    tmp_path: Path, forgetful: int
) -> None:
    told = run_ranks(_forget_on_one_rank, 2, tmp_path, forgetful)

    assert told[0] == told[1]
    assert [told[0][0], told[0][2]] == ["", ""]
    require_saved(tmp_path / "2", model_of_all(2))
    if not told[0][1]:
        require_saved(tmp_path / "1", model_of_all(1))


PATIENCE_S = 20.0


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


def test_a_worker_that_preloads_itself_gets_what_was_staged_and_outlives_a_failure(
    tmp_path: Path,
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "checkpoint")
    planned = save_state_dict_async_plan(model_of(0, 3, _FEW), writer, timeout_s=PATIENCE_S)

    def write_as_a_foreign_worker_does() -> None:
        function, preload, args = pickle.loads(pickle.dumps(writer.get_save_function_and_args()))
        function(args[0], preload())

    write_as_a_foreign_worker_does()
    save_state_dict_async_finalize(*planned)

    assert_same(load_with_ours(tmp_path / "checkpoint", model_of(0, 0, _FEW)), model_of(0, 3, _FEW))
    writer.reset(tmp_path / "next")
    planned = save_state_dict_async_plan(model_of(0, 4, _FEW), writer, timeout_s=PATIENCE_S)
    shutil.rmtree(tmp_path / "next")

    write_as_a_foreign_worker_does()

    with pytest.raises(CheckpointingException, match="No such file or directory"):
        save_state_dict_async_finalize(*planned)
    writer.close()


def _count_calls(owner: Any, name: str) -> list[None]:
    """One item for each call from now on."""
    calls, call = list[None](), getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return call(*args, **options)

    setattr(owner, name, counted)
    return calls


def _three_saves(
    rank: int, world_size: int, root: Path, persistent: bool
) -> tuple[int, int, list[int], list[bool]]:
    writer = FileSystemWriterAsync(root / "0", timeout_s=PATIENCE_S)
    gathered: list[int] = []
    workers: list[bool] = []
    layouts = _count_calls(storage_writer, "lay_out_files")
    plans = _count_calls(DefaultSavePlanner, "create_global_plan")
    with AsyncCallsQueue(persistent, timeout_s=PATIENCE_S) as queue:
        for number in range(3):
            writer.reset(root / str(number))
            state = model_of(rank, number, _FEW)
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
    return len(layouts), len(plans), gathered, workers


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
        require_saved(tmp_path / str(number), model_of_all(number, _FEW))
