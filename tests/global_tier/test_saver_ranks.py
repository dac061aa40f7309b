"""Saves of several ranks: planned once, right after any change, and failed on all ranks or none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
    Counts,
    Settings,
    assert_same,
    load_with_ours,
    load_with_torch,
    save,
    tensor_of,
)
from tests.ranks import announce, await_announced, run_ranks

TIMEOUT_S = 10.0


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


def model_of_all(world_size: int, seed: int) -> dict[str, Any]:
    return {k: v for rank in range(world_size) for k, v in model_of(rank, seed).items()}


def error_of(call: Callable[[], Any]) -> str:
    """What a call raised; empty if nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what is not ours is told to one rank only
        return f"{type(error).__name__}: {error}"
    return ""


def require_saved(path: Path, wanted: dict[str, Any]) -> None:
    assert_same(load_with_ours(path, wanted), wanted)
    assert_same(load_with_torch(path, wanted), wanted)


def metadata_of(path: Path) -> Metadata:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def _save_three_times(rank: int, world_size: int, root: Path) -> list[tuple[int, int, int]]:
    writer, told, counts = FileSystemWriterAsync(root / "0"), [], Counts()
    for number in range(3):
        writer.reset(root / str(number))
        save(writer, model_of(rank, number), timeout_s=TIMEOUT_S)
        told.append((writer.plans.bytes_gathered, counts.plans, counts.layouts))
    writer.close()
    return told


@pytest.mark.parametrize("world_size", [2, 4])
def test_saves_of_one_structure_are_planned_once_and_then_send_nothing(
    tmp_path: Path, world_size: int
) -> None:
    coordinator, *others = run_ranks(_save_three_times, world_size, tmp_path)

    gathered = [nbytes for nbytes, _, _ in coordinator]
    assert gathered[0] > 10_000 * world_size
    assert gathered[1:] == [0, 0]
    assert [made for _, made, _ in coordinator] == [1, 1, 1]
    for told in others:
        assert [made for _, made, _ in told] == [0, 0, 0]
    assert all(layouts == 1 for told in (coordinator, *others) for _, _, layouts in told)
    for number in range(3):
        require_saved(tmp_path / str(number), model_of_all(world_size, number))


def _nothing(own: dict[str, Any]) -> None:
    return


def _new_tensor(own: dict[str, Any]) -> None:
    own["grown"] = tensor_of(torch.int16, (9,), 1)


def _other_shape(own: dict[str, Any]) -> None:
    own["layer0"] = tensor_of(torch.float32, (5, 3), 2)


def _other_dtype(own: dict[str, Any]) -> None:
    own["layer1"] = tensor_of(torch.int32, (3, 5), 3)


def _removed(own: dict[str, Any]) -> None:
    del own["layer2"]


def _object_for_a_tensor(own: dict[str, Any]) -> None:
    own["layer3"] = "a text"


# Each is made once and stays; nothing in between is a save that finds its plan.
_CHANGES = [
    *(_nothing, _new_tensor, _nothing, _other_shape, _other_dtype, _nothing),
    *(_removed, _nothing, _object_for_a_tensor, _nothing),
]


def _changed(rank: int, number: int, changing: int) -> dict[str, Any]:
    state = model_of(rank, number)
    if rank == changing:
        for change in _CHANGES[: number + 1]:
            change(state[f"rank{rank}"])
    return state


def _save_changes(rank: int, world_size: int, root: Path, changing: int) -> list[tuple[int, int]]:
    writer, told, counts = FileSystemWriterAsync(root / "0"), [], Counts()
    for number in range(len(_CHANGES)):
        writer.reset(root / str(number))
        save(writer, _changed(rank, number, changing), timeout_s=TIMEOUT_S)
        told.append((counts.plans, counts.layouts))
    writer.close()
    return told


@pytest.mark.parametrize(("world_size", "changing"), [(2, 0), (2, 1), (4, 2)])
def test_a_change_on_one_rank_is_planned_and_what_is_loaded_is_right(
    tmp_path: Path, world_size: int, changing: int
) -> None:
    told = run_ranks(_save_changes, world_size, tmp_path, changing)

    made = [plans for plans, _ in told[0]]
    changes = [change is not _nothing for change in _CHANGES]
    assert made == [1 + sum(changes[: number + 1]) for number in range(len(changes))]
    assert [layouts for _, layouts in told[changing]] == made
    for number in range(len(_CHANGES)):
        wanted = {
            key: value
            for rank in range(world_size)
            for key, value in _changed(rank, number, changing).items()
        }
        require_saved(tmp_path / str(number), wanted)
        names = {name.split(".")[0] for name in metadata_of(tmp_path / str(number)).planner_data}
        assert names == set(wanted)


def _save_dtypes(rank: int, world_size: int, root: Path) -> None:
    writer = FileSystemWriterAsync(root / "0")
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        writer.reset(root / str(number))
        state = {"w": torch.ones(8, dtype=dtype), f"v{rank}": torch.ones(8, dtype=dtype)}
        save(writer, state, timeout_s=TIMEOUT_S)
    writer.close()


def test_a_model_that_was_converted_is_described_as_it_is(tmp_path: Path) -> None:
    run_ranks(_save_dtypes, 2, tmp_path)

    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        described = metadata_of(tmp_path / str(number)).state_dict_metadata
        assert {entry.properties.dtype for entry in described.values()} == {dtype}
        ones = torch.ones(8, dtype=dtype)
        require_saved(tmp_path / str(number), {"w": ones, "v0": ones, "v1": ones})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_cache_of_torch_describes_a_converted_model_as_it_was(tmp_path: Path) -> None:
    # Why the plans are kept by ours: this is what torch's does. When it fails, torch has learned.
    class OfThisTest(DefaultSavePlanner):
        """torch keeps plans by the name of the planner's class."""

    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        writer = dcp.FileSystemWriter(tmp_path / str(number))
        planner = OfThisTest(enable_plan_caching=True)
        dcp.save({"w": torch.ones(8, dtype=dtype)}, storage_writer=writer, planner=planner)

    described = metadata_of(tmp_path / "1").state_dict_metadata["w"]
    assert described.properties.dtype is torch.float32  # type: ignore[union-attr]


class _FailingPlanner(DefaultSavePlanner):
    """Fails in one of its methods."""

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
    """Fails to finish, if told to."""

    fails = False

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self.fails:
            raise OSError("nothing is finished today")
        super().finish(metadata, results)


class _FailingState:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("this state is not to be had")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded here")


def _save_as_a_queue_that_knows_no_errors(
    writer: FileSystemWriterAsync, state: dict[str, Any], coordinator: int, planner: Any
) -> None:
    planned = save_state_dict_async_plan(
        state, writer, None, coordinator, planner, timeout_s=TIMEOUT_S
    )
    function, preload, args = writer.get_save_function_and_args()
    if function is not None:
        assert preload is not None
        args[1] = preload()
        try:
            function(*args)
        except CheckpointingException as error:
            print(f"the queue does not tell: {error}")
    save_state_dict_async_finalize(*planned)


def _fail_on(
    rank: int, world_size: int, root: Path, what: str, victim: int, coordinator: int
) -> tuple[str, str]:
    writer = _FailingWriter(root / "0")
    _save_as_a_queue_that_knows_no_errors(writer, model_of(rank, 0), coordinator, None)
    path, state, planner = root / "1", model_of(rank, 1), None
    if rank == victim:
        if what == "stateful":
            state["failing"] = _FailingState()
        elif what == "unsafe":
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

    told = error_of(
        lambda: _save_as_a_queue_that_knows_no_errors(writer, state, coordinator, planner)
    )

    writer.fails = False
    dist.barrier()
    writer.reset(root / "2")
    told_next = error_of(
        lambda: _save_as_a_queue_that_knows_no_errors(writer, model_of(rank, 2), coordinator, None)
    )
    writer.close()
    return told, told_next


@pytest.mark.parametrize(
    ("what", "victim", "coordinator", "text"),
    [
        ("create_local_plan", 1, 0, "create_local_plan has no answer"),
        ("create_local_plan", 0, 0, "create_local_plan has no answer"),
        ("create_global_plan", 0, 0, "create_global_plan has no answer"),
        ("create_global_plan", 1, 1, "create_global_plan has no answer"),
        ("finish_plan", 1, 0, "finish_plan has no answer"),
        ("resolve_data", 1, 0, "resolve_data has no answer"),
        ("unsafe", 1, 0, "settings refers to"),
        ("unsafe", 0, 0, "settings refers to"),
        ("stateful", 1, 0, "this state is not to be had"),
        ("exists", 1, 0, "do not speak of the same checkpoint|holds a checkpoint"),
        ("write", 1, 0, "__1_0.00000000.distcp"),
        ("write", 0, 1, "__0_0.00000000.distcp"),
        ("finish", 0, 0, "nothing is finished today"),
        ("finish", 1, 1, "nothing is finished today"),
    ],
)
def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_save_works(
    tmp_path: Path, what: str, victim: int, coordinator: int, text: str
) -> None:
    told = run_ranks(_fail_on, 2, tmp_path, what, victim, coordinator)

    first, second = (error for error, _ in told)
    assert first == second
    assert f"rank {victim}" in first
    assert any(part in first for part in text.split("|"))
    assert not (tmp_path / "1" / ".metadata").exists()
    require_saved(tmp_path / "0", model_of_all(2, 0))
    assert [error for _, error in told] == ["", ""]
    require_saved(tmp_path / "2", model_of_all(2, 2))


class _SlowWriter(FileSystemWriterAsync):
    """Finishes when the other rank has given up waiting."""

    slow = False

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self.slow:
            await_announced("given up")
        super().finish(metadata, results)


def _be_slow(rank: int, world_size: int, root: Path) -> tuple[str, str]:
    writer = _SlowWriter(root / "0")
    save(writer, model_of(rank, 0))
    writer.reset(root / "1")
    writer.slow = rank == 0
    planned = save_state_dict_async_plan(model_of(rank, 1), writer)
    function, preload, args = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    args[1] = preload()
    function(*args)
    planned[2].timeout_s = 1.0
    dist.barrier()
    told = error_of(lambda: save_state_dict_async_finalize(*planned))
    if rank == 1:
        announce("given up")
    writer.slow = False
    dist.barrier()
    writer.reset(root / "2")
    told_next = error_of(lambda: save(writer, model_of(rank, 2), timeout_s=TIMEOUT_S))
    writer.close()
    return told, told_next


def test_the_save_after_one_that_only_some_ranks_took_for_lost_works(tmp_path: Path) -> None:
    (told, next_one), (told_other, next_other) = run_ranks(_be_slow, 2, tmp_path)

    assert told == ""
    assert "Whether it was done is not known" in told_other
    assert [next_one, next_other] == ["", ""]
    require_saved(tmp_path / "2", model_of_all(2, 2))


def _forget_on_one_rank(rank: int, world_size: int, root: Path, forgetful: int) -> list[str]:
    writers = [FileSystemWriterAsync(root / "0") for _ in range(2)]
    told = []
    for number in range(3):
        # A trainer that makes its writer anew, on one rank alone.
        writer = writers[number > 0 and rank == forgetful]
        state = model_of(rank, number)
        writer.reset(root / str(number))
        told.append(error_of(partial(save, writer, state, timeout_s=TIMEOUT_S)))
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
    require_saved(tmp_path / "2", model_of_all(2, 2))
    if not told[0][1]:
        require_saved(tmp_path / "1", model_of_all(2, 1))


def _save_in_a_group(rank: int, world_size: int, path: Path) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        writer = FileSystemWriterAsync(path)
        save(
            writer,
            model_of(rank, 0),
            process_group=group,
            coordinator_rank=1,
            timeout_s=TIMEOUT_S,
        )
        writer.close()
    dist.barrier()


def test_some_of_the_ranks_can_save_together(tmp_path: Path) -> None:
    run_ranks(_save_in_a_group, 4, tmp_path / "checkpoint")

    require_saved(tmp_path / "checkpoint", model_of(1, 0) | model_of(3, 0))
    names = {file.name.split(".")[0] for file in (tmp_path / "checkpoint").glob("*.distcp")}
    assert names == {"__0_0", "__0_1", "__1_0", "__1_1"}
