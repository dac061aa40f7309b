"""torch's own save and load with the writer and the reader of the nodes, on real ranks."""

from __future__ import annotations

import shutil
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

import localckpt
from localckpt.dcp import NodeStorageReader, NodeStorageWriter
from localckpt.errors import CheckpointingException
from tests.global_tier import models
from tests.managers.jobs import Dirs, assert_same, damage
from tests.ranks import node_store, on_ranks, run_ranks

_LONG_S = 120.0

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _state(kind: str, seed: int) -> dict[str, Any]:
    """A state that is saved, or is to be filled, of a model in FSDP2 or in DDP."""
    torch.manual_seed(seed)
    if kind == "fsdp":
        net, optimizer = models.fsdp_model(init_device_mesh("cpu", (dist.get_world_size(),)), seed)
    else:
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 5))
        optimizer = torch.optim.AdamW(net.parameters())
        models.step(net, optimizer)
    return {"app": models.states_of(net, optimizer), "step": seed, "lists": {"a": [seed, 2.5, "x"]}}


def _manager(
    world_size: int, root: Path | None = None, **options: Any
) -> localckpt.LocalCheckpointManager:
    strategy = localckpt.LazyCliqueReplicationStrategy(1, 2) if world_size > 1 else None
    return localckpt.LocalCheckpointManager(
        root or node_store(), "run", strategy, elastic=True, timeout_s=_LONG_S, **options
    )


def _save(rank: int, world_size: int, kind: str, how: str) -> Any:
    state = _state(kind, 3)
    writer = NodeStorageWriter(partial(_manager, world_size, node_store()))
    call: dict[str, Any] = {"checkpoint_id": "/any/step-3", "storage_writer": writer}
    if how == "save":
        dcp.save(state, **call)
    else:
        dcp.async_save(state, async_checkpointer_type=AsyncCheckpointerType(how), **call).result()
    writer.close()
    return models.gathered(state)


def _load(rank: int, world_size: int, kind: str, folder: Path | None = None) -> Any:
    state = _state(kind, 8)
    if folder is not None:
        dcp.load(state, checkpoint_id=folder)
    else:
        with _manager(world_size) as manager:
            dcp.load(state, storage_reader=NodeStorageReader(manager))
            assert manager.newest == 3
    return models.gathered(state)


@pytest.mark.parametrize(
    ("kind", "how"), [("fsdp", "save"), ("ddp", "save"), ("ddp", "thread"), ("fsdp", "process")]
)
def test_what_was_saved_is_loaded_after_a_node_was_lost_and_by_fewer_ranks(
    kind: str, how: str, node_dirs: Dirs
) -> None:
    nodes = node_dirs(3)
    saved = run_ranks(_save, 3, kind, how, store_per_node=nodes, timeout_s=_LONG_S)
    shutil.rmtree(nodes[1] / "session-run")

    same = run_ranks(_load, 3, kind, store_per_node=nodes, timeout_s=_LONG_S)
    fewer = run_ranks(_load, 2, kind, store_per_node=nodes[::2], timeout_s=_LONG_S)

    for loaded in (*same, *fewer):
        assert_same(loaded, saved[0])


def test_a_damaged_copy_is_quarantined_and_another_one_is_read(node_dirs: Dirs) -> None:
    nodes = node_dirs(2)
    saved = run_ranks(_save, 2, "fsdp", "save", store_per_node=nodes, timeout_s=_LONG_S)
    (own,) = nodes[0].rglob("*3.0.*.safetensors")
    damage(own)

    loaded = run_ranks(_load, 2, "fsdp", store_per_node=nodes, timeout_s=_LONG_S)

    assert_same(loaded, [saved[0]] * 2)


def _drained(rank: int, world_size: int, shared: Path) -> Any:
    state = _state("fsdp", 3)
    shared_manager = partial(localckpt.GlobalCheckpointManager, shared, "run")
    with _manager(world_size) as manager, shared_manager(local=manager) as tier:
        writer = NodeStorageWriter(manager, shared=tier, shared_every=2)
        for number in (1, 2, 3):
            dcp.save(state, checkpoint_id=str(number), storage_writer=writer)
        writer.close()
        assert tier.all_iterations() == [2]
    return models.gathered(state)


def test_every_second_save_is_drained_to_what_torch_itself_loads(
    tmp_path: Path, node_dirs: Dirs
) -> None:
    saved = run_ranks(_drained, 2, tmp_path / "shared", store_per_node=node_dirs(2))
    (folder,) = (path.parent for path in (tmp_path / "shared").rglob(".metadata"))

    loaded = run_ranks(_load, 3, "fsdp", folder, timeout_s=_LONG_S)

    assert_same(loaded, [saved[0]] * 3)


@on_ranks(2, nodes=2, timeout_s=_LONG_S)
def test_what_does_not_fit_is_an_error_on_every_rank(rank: int, world_size: int) -> None:
    full = {"a": torch.arange(6.0), "b": {"c": torch.ones(2), "d": [rank]}}
    with _manager(world_size) as manager:
        writer, reader = NodeStorageWriter(manager), NodeStorageReader(manager)
        save = partial(dcp.save, storage_writer=writer)

        def refusal(call: Any, state: Any, **kwargs: Any) -> str:
            with pytest.raises(CheckpointException) as error:
                call(state, **kwargs)
            return "; ".join(f"{type(e).__name__}: {e}" for e, _ in error.value.failures.values())

        def load(state: Any) -> str:
            return refusal(dcp.load, dict(state), storage_reader=reader)

        assert "NoReplicasAvailableError" in load(full)
        with pytest.raises(CheckpointingException, match="ends with the number"):
            save(full, checkpoint_id="last")
        assert "give dcp.save a checkpoint_id" in refusal(save, full)
        unsafe = full | {"x": Fraction(1)} if rank == 1 else full
        assert "fractions.Fraction" in refusal(save, unsafe, checkpoint_id="1")
        save(full, checkpoint_id="2")
        assert "must be above" in refusal(save, full, checkpoint_id="2")
        sparse = full | {"x": torch.eye(2).to_sparse()} if rank == 1 else full
        assert "save tensor.to_dense()" in refusal(save, sparse, checkpoint_id="3")

        assert "has b.c; b.d, and the state to load" in load({"a": torch.zeros(6)})
        part = {"a": torch.zeros(6)}
        dcp.load(part, storage_reader=NodeStorageReader(manager, partial=True))
        assert torch.equal(part["a"], full["a"])
        assert "Missing key in checkpoint state_dict: z" in load(full | {"z": torch.ones(1)})
        half = {"a": torch.zeros(6).half(), "b": {"c": torch.ones(2), "d": 0}}
        assert "was saved as torch.float32" in load(half)
        dcp.load(half, storage_reader=NodeStorageReader(manager, allow_dtype_change=True))
        assert torch.equal(half["a"], full["a"].half())
        manager.save({"model": torch.ones(3)}, 4)
        assert "was not saved by a NodeStorageWriter" in load(full)
        reader.reset("step-1")
        assert "NoReplicasAvailableError" in load(full)
        dcp.load(full, checkpoint_id="step-2", storage_reader=reader)
