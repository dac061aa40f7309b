"""What is easily got wrong: small states, partial loads, retention after going back, interrupts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
)
from tests.global_tier.models import checkpoints_in, manager_on
from tests.managers.jobs import damage
from tests.ranks import run_ranks


def _saves_one_tensor_between_two(rank: int, world_size: int, root: Path) -> list[int]:
    state = {"x": torch.ones(4)}
    with manager_on(root) as manager:
        for iteration in range(3):
            manager.save(state, iteration, is_async=False)
        manager.save({}, 3, is_async=False)
        manager.save({}, 4, is_async=False)
        return [manager.find_latest(), manager.load(into={}, partial=True)[1].iteration]


def test_ranks_that_have_nothing_to_write_save_again_and_again(tmp_path: Path) -> None:
    assert run_ranks(_saves_one_tensor_between_two, 2, tmp_path) == [[4, 4]] * 2


def test_a_partial_load_never_mixes_two_checkpoints(tmp_path: Path) -> None:
    with manager_on(tmp_path, thread_count=1) as manager:
        manager.save({"b": torch.ones(9)}, 1, is_async=False)
        manager.save({"a": torch.ones(1 << 20), "b": torch.ones(9)}, 2, is_async=False)
        # In the tail of "b", which comes last.
        file = tmp_path / "iteration_00000002.0001" / "__0_0.distcp"
        damage(file, 1 - 600 / file.stat().st_size)

        with pytest.raises(CorruptShardError):
            manager.load(into={"b": torch.zeros(9)}, partial=True)

        with pytest.raises(MismatchError, match="1 values that the state has not: a"):
            manager.load(into={"b": torch.zeros(9)})
        assert manager.load(into={"b": torch.zeros(9)}, iteration=1)[1].iteration == 1


def _save(manager: Any, *iterations: int) -> None:
    for iteration in iterations:
        manager.save({"w": torch.full((9,), float(iteration))}, iteration, is_async=False)


def test_a_copy_under_another_name_and_one_that_lacks_a_file_are_not_found(
    tmp_path: Path,
) -> None:
    with manager_on(tmp_path) as manager:
        _save(manager, 1, 2)
        shutil.copytree(tmp_path / "iteration_00000001.0001", tmp_path / "iteration_00000900.0001")
        min((tmp_path / "iteration_00000002.0001").glob("*.distcp")).unlink()

        assert manager.find_latest() == 1
        with pytest.raises(CorruptShardError, match="give it its name again"):
            manager.load(into={"w": torch.zeros(9)}, iteration=900)


class _Collective:
    """A state that all ranks make, and take, together."""

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sum()

    @staticmethod
    def _sum() -> torch.Tensor:
        one = torch.ones(1)
        dist.all_reduce(one)
        return one


def _load_what_one_rank_cannot_read(rank: int, world_size: int, root: Path) -> int:
    def state(value: float) -> dict[str, Any]:
        return {f"w{rank}": torch.full((1 << 18,), value), "all": _Collective()}

    with manager_on(root, thread_count=1) as manager:
        for iteration in (1, 2):
            manager.save(state(float(iteration)), iteration, is_async=False)
        if rank == 1:
            damage(root / "iteration_00000002.0001" / "__1_0.distcp")
        dist.barrier()
        loaded = manager.load(into=(target := state(0.0)))[1].iteration
        assert bool((target[f"w{rank}"] == loaded).all())
        return loaded


def test_states_that_are_taken_together_are_taken_when_all_ranks_have_read(tmp_path: Path) -> None:
    assert run_ranks(_load_what_one_rank_cannot_read, 2, tmp_path) == [1, 1]


def test_tied_tensors_are_loaded_if_one_value_was_saved_of_them(tmp_path: Path) -> None:
    tied, whole = torch.zeros(3), torch.zeros(5)
    with manager_on(tmp_path) as manager:
        manager.save({"a": torch.ones(3), "b": torch.ones(3)}, 1)
        manager.save({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, 2)
        manager.save({"a": torch.ones(5), "b": torch.full((3,), 2.0)}, 3)

        for iteration, state in ((2, {"a": tied, "b": tied}), (3, {"a": whole, "b": whole[1:4]})):
            with pytest.raises(MismatchError, match="a and b share memory now"):
                manager.load(into=state, iteration=iteration)
        assert not tied.any()
        assert not whole.any()
        manager.load(into={"a": tied, "b": tied}, iteration=1)

    assert torch.equal(tied, torch.ones(3))


def _of_one_buffer(fill: float) -> dict[str, torch.Tensor]:
    """Tensors whose elements lie between each other's, and such as have elements in common."""
    qkv, kv = torch.full((4, 6), fill), torch.full((3, 2), fill)
    both, flat = torch.full((3,), fill, dtype=torch.complex64), torch.full((8,), fill)
    return {
        **dict(zip("qkv", qkv.chunk(3, dim=1), strict=True)),
        "key": kv[:, 0],
        "value": kv[:, 1],
        "real": both.real,
        "imag": both.imag,
        "flat": flat,
        "head": flat[:3],
        "tail": flat[3:],
        "w": qkv,
        "turned": qkv.t(),
    }


def test_views_of_one_buffer_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    saved, given = _of_one_buffer(0.0), _of_one_buffer(-1.0)
    for number, tensor in enumerate(saved.values()):
        tensor.add_(torch.arange(tensor.numel()).reshape(tensor.shape), alpha=number + 1)
    with manager_on(tmp_path) as manager:
        manager.save(saved, 1)
        manager.load(into=given)

    for name, tensor in saved.items():
        assert torch.equal(given[name], tensor), name


def test_a_lock_that_cannot_be_taken_is_an_error_and_nothing_is_saved_without_it(
    tmp_path: Path,
) -> None:
    (tmp_path / ".localckpt.lock").mkdir()

    with (
        manager_on(tmp_path) as manager,
        pytest.raises(CheckpointingException, match="could not lock"),
    ):
        _save(manager, 1)

    assert checkpoints_in(tmp_path) == []


def test_a_manager_that_is_called_by_its_own_on_commit_says_so_at_once(tmp_path: Path) -> None:
    with manager_on(tmp_path) as manager:
        manager.save(
            {"w": torch.ones(3)}, 1, on_commit=lambda: print(manager.find_latest()), is_async=True
        )

        with pytest.raises(CheckpointingException, match="on_commit called the manager"):
            manager.wait_until_finished()

        assert manager.find_latest() == 1
