"""Saves of several ranks: planned once, right after any change, and failed on all ranks or none."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from localckpt import CheckpointingException
from localckpt.global_tier.storage_writer import (
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from tests.global_tier.states import (
    Settings,
    assert_same,
    load_with_ours,
    load_with_torch,
    save,
    tensor_of,
    told_by,
    write,
)
from tests.ranks import run_ranks

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
    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def create_local_plan(self) -> SavePlan:
        self._fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._fail("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._fail("resolve_data")
        return super().resolve_data(write_item)

    def _fail(self, method: str) -> None:
        if method == self._method:
            raise ValueError(f"{method} has no answer")


class _FailingWriter(FileSystemWriterAsync):
    fails = False

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self.fails:
            raise OSError("nothing is finished today")
        super().finish(metadata, results)


def _save_as_a_queue_that_knows_no_errors(
    writer: FileSystemWriterAsync, state: dict[str, Any], coordinator: int, planner: Any
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
    _save_as_a_queue_that_knows_no_errors(writer, model_of(rank, 0, _FEW), coordinator, None)
    path, state, planner = root / "1", model_of(rank, 1, _FEW), None
    if rank == victim:
        if what == "unsafe":
            state["settings"] = [Settings("adam", 1.0)]
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
    told_next = told_by(
        lambda: _save_as_a_queue_that_knows_no_errors(
            writer, model_of(rank, 2, _FEW), coordinator, None
        )
    )
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
