"""Training loops on GPUs, over NCCL alone where there are several ranks, go on bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt.replication.device_transport import DeviceTransport
from localckpt.state_dict.source import MemorySource
from tests.managers.jobs import KINDS, assert_same, make_manager
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_S = 120.0


def _device_of(rank: int) -> torch.device:
    """The rank's GPU; NCCL refuses two ranks on one GPU of one host, so each is its own host."""
    os.environ |= {
        "NCCL_HOSTID": f"test-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _model(sharding: str, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(33, 33) for _ in range(3)]
    model = torch.nn.Sequential(
        layers[0], torch.nn.BatchNorm1d(33), torch.nn.Dropout(0.1), *layers[1:]
    ).to(device)
    if sharding == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if sharding == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    return model


def _train(
    rank: int, world_size: int, sharding: str, steps: int, options: dict[str, Any]
) -> tuple[int, list[str], str]:
    """Its first step, its losses from there on, and its whole parameters and moments."""
    device = _device_of(rank)
    model = _model(sharding, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=sharding != "ddp")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cuda", enabled=sharding == "plain")
    torch.manual_seed(100 + rank)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    options = options | {"guard": [optimizer] if options.get("guard") else []}
    losses = []
    with localckpt.Checkpointer(state, local=node_store(), timeout_s=_S, **options) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, steps):
            loss = model(torch.randn(8, 33, device=device)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            checkpointer.step(step)
        moments = [v for values in optimizer.state.values() for v in values.values()]
        whole = [
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for tensor in [*model.parameters(), *moments]
        ]
        text = str([tensor.detach().cpu().double().flatten().tolist() for tensor in whole])
    return first, losses, text


def _run(nodes: list[Path], sharding: str, steps: int, options: dict[str, Any]) -> list[Any]:
    args = (_train, len(nodes), sharding, steps, options)
    return run_ranks(*args, store_per_node=nodes, backend="nccl", timeout_s=_S)


@pytest.mark.parametrize("guard", [False, True], ids=["alone", "guarded"])
@pytest.mark.parametrize("sharding", ["plain", "ddp", "fsdp2"])
def test_a_loop_goes_on_with_the_losses_it_would_have_had(
    sharding: str, guard: bool, tmp_path: Path
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"][: 1 if sharding == "plain" else 2]
    options = {"every": localckpt.Every(steps=2), "guard": guard}

    whole = _run([tmp_path / f"{node.name} whole" for node in nodes], sharding, 8, options)
    _run(nodes, sharding, 4, options)
    if len(nodes) == 2:
        # A node is lost, and the other one is another rank's now.
        shutil.rmtree(nodes[0])
        nodes[0].mkdir()
        nodes.reverse()
    resumed = _run(nodes, sharding, 8, options)

    for (first, losses, weights), (_, all_losses, all_weights) in zip(resumed, whole, strict=True):
        assert first == 4
        assert losses == all_losses[4:]
        assert weights == all_weights


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_a_sharded_model(
    before: int, after: int, tmp_path: Path
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    options = {"every": localckpt.Every(steps=2), "on_resize": "drop", "rng": False}

    saved = _run(nodes[:before], "fsdp2", 4, options)
    found = _run(nodes[:after], "fsdp2", 4, options)

    assert [(first, losses) for first, losses, _ in found] == [(4, [])] * after
    assert {weights for _, _, weights in found} == {saved[0][2]}


def _save_on(device: torch.device, iteration: int) -> dict[str, Any]:
    random = torch.Generator(device).manual_seed(1000 * iteration + dist.get_rank())
    return {
        "weight": torch.randn(3_000_000, generator=random, device=device),
        "host": torch.full((1000,), float(dist.get_rank())),
    }


def _lose_a_node(rank: int, world_size: int, kind: str, base: Path, background: bool) -> str:
    device = _device_of(rank)
    root = base / f"node{rank}"
    strategy = localckpt.CliqueReplicationStrategy.from_replication_params(timeout_s=60.0)
    with (
        make_manager(kind, root, "job", strategy, timeout=60.0, background=background) as manager,
        localckpt.AsyncCallsQueue(timeout_s=60.0) as queue,
    ):
        for iteration in (1, 2):
            state = _save_on(device, iteration)
            request = manager.save(state, iteration, is_async=True)
            state["weight"].zero_()
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root)
        root.mkdir()
    dist.barrier()
    with make_manager(kind, root, "job", strategy, timeout=60.0) as manager:
        assert manager.find_latest() == 2
        found, _ = manager.load()
        source = str(manager.last_load.source)
    assert_same(found, _save_on(device, 2))
    strategy.close()
    return source


@pytest.mark.parametrize("background", [False, True], ids=["from the GPU", "behind"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_node_comes_back_from_its_peer(
    kind: str, background: bool, node_dirs: Any, shm_roots: Any
) -> None:
    base = (node_dirs if kind == "disk" else shm_roots)(1)[0]

    sources = run_ranks(_lose_a_node, 2, kind, base, background, backend="nccl", timeout_s=_S)

    assert "peer" in sources[0]
    assert "peer" not in sources[1]


def _exchange(rank: int, world_size: int) -> None:
    device = _device_of(rank)
    transport = DeviceTransport(None, device)
    sizes = [100 * 2**20 + sender for sender in range(world_size)]
    contents = [bytes([sender + 1]) * sizes[sender] for sender in range(world_size)]
    place = memoryview(bytearray(sizes[rank - 1]))

    transport.exchange(
        [((rank + 1) % world_size, MemorySource(memoryview(contents[rank])))],
        [((rank - 1) % world_size, place)],
        60.0,
    )

    assert place == contents[rank - 1]


def test_images_are_sent_between_gpus_over_nccl() -> None:
    run_ranks(_exchange, 2, backend="nccl", timeout_s=_S)


def _load_with_torch(rank: int, world_size: int, shared: Path) -> str:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = _model("fsdp2", _device_of(rank))
    state = {"model": get_model_state_dict(model)}
    (folder,) = {path.parent for path in shared.rglob(".metadata") if "3" in path.parent.name}
    dcp.load(state, checkpoint_id=folder)
    whole = [tensor.full_tensor() for tensor in model.parameters()]  # type: ignore[attr-defined]
    return str([tensor.detach().cpu().double().flatten().tolist() for tensor in whole])


def test_what_a_sharded_loop_drains_torch_loads_on_one_gpu(tmp_path: Path) -> None:
    nodes, shared = [tmp_path / "a", tmp_path / "b"], tmp_path / "shared"
    saved = _run(nodes, "fsdp2", 4, {"every": localckpt.Every(steps=2), "shared": shared})

    (found,) = run_ranks(_load_with_torch, 1, shared, backend="nccl", timeout_s=_S)

    assert saved[0][2].startswith(found[:-1])
