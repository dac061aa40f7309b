"""A checkpoint is read outside of its job: its tensors whole, and bit for bit those of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from localckpt import (
    Checkpointer,
    CorruptShardError,
    Every,
    LocalCheckpointManager,
    MismatchError,
    NoReplicasAvailableError,
    SavedCheckpoint,
    StorageError,
    UnsafeGlobalError,
    open_checkpoint,
)
from tests.cli.commands import call
from tests.managers.jobs import damage
from tests.ranks import node_store, run_ranks

Wanted = dict[str, torch.Tensor]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([1.5, -2.25], dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x) + self.last(x)


@dataclass
class _Note:
    text: str = "mine"


def _train(rank: int, _: int, shared: Path) -> Wanted:
    """Save after each of three steps; return all of the model and optimizer as they ended."""
    torch.manual_seed(0)
    model = _Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35, dtype=torch.float64).view(7, 5)
    extra = {"grid": distribute_tensor(whole, mesh, [Shard(1), Shard(0)]), "rank": rank}
    parts = {"model": model, "optimizer": optimizer, "extra": (lambda: extra, extra.update)}
    options: dict[str, Any] = {"every": Every(steps=1), "shared_every": Every(steps=1)}
    options |= {"local": node_store(), "shared": shared, "keep_last": 3, "timeout_s": 60}
    with Checkpointer(parts, **options) as checkpointer:
        for step in range(checkpointer.resume(), 3):
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    for number, parameter in enumerate(model.parameters()):
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.state.{number}.{key}"] = value
    found = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    return {**found, "extra.value.grid": whole}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Wanted]:
    """Folder of two nodes, root on shared storage, and the values of the newest checkpoint."""
    base = tmp_path_factory.mktemp("trained")
    nodes = [base / "nodes" / name for name in "AB"]
    for node in nodes:
        node.mkdir(parents=True)
    wanted = run_ranks(_train, 4, base / "shared", store_per_node=nodes, timeout_s=120)
    return base / "nodes", base / "shared", wanted[0]


def _assert_holds(checkpoint: SavedCheckpoint, wanted: Wanted) -> None:
    for key, value in wanted.items():
        told, read = checkpoint.describe(key), checkpoint[key]
        assert (read.dtype, tuple(read.shape)) == (told.dtype, told.shape) == told[:2]
        assert torch.equal(read, value), key


def test_tensors_that_were_sharded_are_whole_from_all_nodes_one_node_and_shared_storage(
    trained: tuple[Path, Path, Wanted],
) -> None:
    nodes, shared, wanted = trained

    for directories in ([nodes], [nodes / "A", nodes / "B"], [nodes / "B"]):
        with open_checkpoint(*directories) as checkpoint:
            assert (checkpoint.iteration, checkpoint.world_size) == (2, 4)
            _assert_holds(checkpoint, wanted)
            first, last = (checkpoint.describe(f"model.{n}.weight") for n in ("first", "last"))
            assert first == last
            assert checkpoint.value("optimizer.param_groups")[0]["lr"] == 1e-3
    with open_checkpoint(shared) as checkpoint:
        # Shared storage names what an optimizer has by its parameters, and has each rank's own
        # values for a job that resumes alone.
        _assert_holds(checkpoint, {k: v for k, v in wanted.items() if k.startswith("model.")})
        assert checkpoint.value("optimizer.param_groups.0.lr") == 1e-3
    with open_checkpoint(nodes, iteration=0) as older:
        assert not torch.equal(older["model.first.weight"], wanted["model.first.weight"])


def _save_own(rank: int, _: int) -> None:
    with LocalCheckpointManager(node_store(), "own", safe_globals=[_Note]) as manager:
        manager.save({"same": torch.ones(2_400_000), "own": torch.full((3,), rank)}, 1)
        manager.save({"shape": torch.ones(3 + rank), "note": _Note()}, 2)


def test_tensors_of_single_ranks_are_compared_and_a_bad_copy_gives_way_or_is_an_error(
    tmp_path: Path, node_dirs: Callable[[int], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    nodes = node_dirs(1)
    run_ranks(_save_own, 2, store_per_node=nodes)

    with open_checkpoint(*nodes, iteration=1) as checkpoint:
        assert torch.equal(checkpoint["same"], torch.ones(2_400_000))
        with pytest.raises(MismatchError, match="'own' is each rank's own: rank 1"):
            checkpoint["own"]
    with open_checkpoint(*nodes, iteration=1, rank=1) as checkpoint:
        assert checkpoint["own"].tolist() == [1, 1, 1]
    with pytest.raises(UnsafeGlobalError, match="_Note"):
        open_checkpoint(*nodes)
    with pytest.raises(MismatchError, match=r"'shape'.*\[3\].*\[4\]"):
        open_checkpoint(*nodes, safe_globals=[_Note])

    (first,) = nodes[0].rglob("000000000001.0.*.safetensors")
    copy = first.with_name(f"{first.name.removesuffix('.safetensors')}.x.safetensors")
    copy.write_bytes(first.read_bytes())
    bad = min(first, copy)
    damage(bad, 0.6)  # Not in the block that every listing verifies.
    with open_checkpoint(*nodes, iteration=1, rank=0) as checkpoint:
        assert torch.equal(checkpoint["same"], torch.ones(2_400_000))
    assert f"another copy than {bad}" in caplog.text
    max(first, copy).unlink()
    with open_checkpoint(*nodes, iteration=1, rank=0) as checkpoint:
        for _ in range(2):
            with pytest.raises(CorruptShardError, match="do not match their digest"):
                checkpoint["same"]


def test_what_is_each_ranks_own_is_given_for_a_rank_and_what_is_not_there_is_said(
    trained: tuple[Path, Path, Wanted], tmp_path: Path
) -> None:
    nodes, _, _ = trained

    with open_checkpoint(nodes) as checkpoint, pytest.raises(MismatchError, match=r"0-3.*rank="):
        checkpoint.value("extra.value.rank")
    with open_checkpoint(nodes, rank=2) as checkpoint:
        assert checkpoint.value("extra.value.rank") == 2
    with pytest.raises(MismatchError, match="4 ranks"):
        open_checkpoint(nodes, rank=4)
    with pytest.raises(NoReplicasAvailableError, match=r"no complete iteration 7; .* 2, 1, 0\."):
        open_checkpoint(nodes, iteration=7)
    with pytest.raises(NoReplicasAvailableError, match="session 'other'"):
        open_checkpoint(nodes, session="other")
    with pytest.raises(StorageError, match="no store of localckpt"):
        open_checkpoint(tmp_path)
    with open_checkpoint(nodes) as checkpoint, pytest.raises(KeyError):
        checkpoint["model"]


def test_an_export_is_what_safetensors_and_from_pretrained_read_and_overwrites_nothing(
    trained: tuple[Path, Path, Wanted], tmp_path: Path
) -> None:
    nodes, _, wanted = trained
    out = tmp_path / "model.safetensors"
    model = {k.removeprefix("model."): v for k, v in wanted.items() if k.startswith("model.")}

    said = call("export", nodes, "--part", "model", "--out", out)
    again = call("export", nodes, "--part", "model", "--out", out)
    one = call("export", nodes, "--keys", "*.scale", "--out", tmp_path / "x.safetensors", "--json")
    many = ("--max-file-size", "0.0000001", "--out", tmp_path / "many.safetensors")
    tiny = call("export", nodes, "--part", "model", *many)
    none = call("export", nodes, "--part", "modle", "--out", tmp_path / "y.safetensors")

    assert said.status == one.status == tiny.status == 0
    assert "no tensors, so not written: " in said.out
    assert again.status == none.status == 2
    assert "is there already, and was left as it is" in again.err
    assert "the parts of iteration 2 are" in none.err
    read = load_file(out)
    assert read.keys() == model.keys()
    assert all(torch.equal(read[key], value) for key, value in model.items())
    assert one.json()["tensors"] == 1
    index = json.loads((tmp_path / "many.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.values())
    assert index["weight_map"].keys() == model.keys()
    for key, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[key], model[key])
    assert not list(tmp_path.glob(".*"))


def test_one_tensor_is_printed_or_written_for_numpy(
    trained: tuple[Path, Path, Wanted], tmp_path: Path
) -> None:
    nodes, _, wanted = trained

    listed = call("get", nodes, "--json").json()
    printed = call("get", nodes, "model.scale")
    written = call("get", nodes, "model.scale", "--out", tmp_path / "scale.npy")
    unknown = call("get", nodes, "scale")

    keys = [tensor["key"] for tensor in listed["tensors"]]
    assert wanted.keys() <= set(keys)
    assert "extra.value.rank" in listed["values"]
    assert printed.out.startswith("model.scale: bfloat16 [2]\n")
    assert call("get", nodes, "model.scale", "--json").json()["values"] == [1.5, -2.25]
    assert "float32" in written.out
    assert numpy.load(tmp_path / "scale.npy").tolist() == [1.5, -2.25]
    assert (unknown.status, "it has model.scale" in unknown.err) == (2, True)


def test_two_checkpoints_are_compared_by_keys_shapes_and_largest_difference(
    trained: tuple[Path, Path, Wanted],
) -> None:
    nodes, shared, wanted = trained

    same = call("diff", nodes, nodes / "A")
    older = call("diff", nodes, nodes, "--other-iteration", "1", "--json")
    tiers = call("diff", nodes, shared, "--json")

    assert same.status == 0
    assert "0 different" in same.out
    rows = {row["key"]: row["largest"] for row in older.json()["different"]}
    with open_checkpoint(nodes, iteration=1) as before:
        change = (wanted["model.first.bias"] - before["model.first.bias"]).abs().max()
    assert older.status == 1
    assert rows["model.first.bias"] == pytest.approx(float(change))
    assert "model.scale" not in rows
    assert tiers.json()["different"] == []
    assert "optimizer.state.0.step" in tiers.json()["only_in_a"]
