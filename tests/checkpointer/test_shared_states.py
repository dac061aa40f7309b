"""States on shared storage: each rank gets what it saved, or an error says why not."""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import (
    Checkpointer,
    CheckpointingException,
    DivergenceError,
    LocalCheckpointManager,
    MismatchError,
    replicated,
)
from localckpt.checkpointer import tiers
from localckpt.global_tier.folders import find_shared_sessions
from localckpt.global_tier.manager import GlobalCheckpointManager
from tests.checkpointer.loops import resume_once, save_once, stores
from tests.managers.jobs import MAX_S, assert_same
from tests.ranks import node_store, on_ranks, run_ranks

# What several ranks have under one name.


@pytest.mark.fault("changed-program")
@pytest.mark.parametrize(
    ("kind", "world_size", "is_equal"),
    [("fsdp2", 2, True), ("fsdp1", 4, False)],
)
@on_ranks(nodes=1)
def test_sharded_stages_of_one_name_are_refused_unless_they_are_equal(
    rank: int, world_size: int, kind: str, is_equal: bool
) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    # Each half of the ranks shards a module of the same name for itself.
    half = rank * 2 // world_size
    halves = [[*range(world_size // 2)], [*range(world_size // 2, world_size)]]
    meshes = [DeviceMesh("cpu", ranks) for ranks in halves]
    torch.manual_seed(0 if is_equal else half)
    model: torch.nn.Module = torch.nn.Linear(8, 8)
    if kind == "fsdp1":
        group = meshes[half].get_group()
        model = FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=meshes[half])
    shared = node_store() / "shared"
    places: dict[str, Any] = {"local": node_store() / "nodes", "shared": shared, "events": ()}
    if is_equal:
        save_once({"model": model}, **places, timeout_s=20)
    else:
        with pytest.raises(
            CheckpointingException, match="two global tensors have one na"
        ) as caught:
            save_once({"model": model}, **places, timeout_s=20)
        assert "model.weight" in str(caught.value)
    assert len([*shared.rglob(".metadata")]) == is_equal


def _tied(is_tied: bool, seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    if is_tied:
        model["head"].weight = model["emb"].weight
    return model


@pytest.mark.fault("changed-program")
@pytest.mark.parametrize("was_tied", [False, True])
def test_weights_that_are_tied_or_apart_since_are_refused(was_tied: bool, tmp_path: Path) -> None:
    places: dict[str, Any] = {"shared": tmp_path / "shared", "events": ()}
    save_once({"model": _tied(was_tied)}, local=tmp_path / "saved", **places)
    model = _tied(not was_tied, seed=2)
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(MismatchError, match=r"sharing memory with model.head.weight"):
        resume_once({"model": model}, local=tmp_path / "none", **places)

    assert_same(model.state_dict(), before)


def _train(
    rank: int, world_size: int, steps: int, spoiled: tuple[int, int] | None, options: dict[str, Any]
) -> tuple[int, int | None, Any]:
    """A start of a job under DDP: its first step, the newest save, and the error."""
    torch.manual_seed(7)
    inner = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6))
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {
        "model": replicated(model),
        "optimizer": replicated(optimizer),
        "loss": replicated((lambda: torch.ones(2), lambda value: None)),
        "seen": (lambda: torch.tensor(rank), lambda value: None),
    }
    error: Any = None
    with Checkpointer(state, local=node_store(), every=1, timeout_s=MAX_S, **options) as made:
        first = made.resume()
        for step in range(first, first + steps):
            torch.manual_seed(100 * step + rank)
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if spoiled == (rank, step):
                # An exponent's bit of a moment, as a GPU might get it wrong.
                moment = next(iter(optimizer.state.values()))["exp_avg_sq"]
                moment.view(torch.int32)[2, 3] ^= 1 << 24
            try:
                made.step(step)
                made.wait_until_finished()
            except DivergenceError as raised:
                error = raised.iteration, raised.keys, raised.ranks, raised.is_minority
                break
        newest = made.newest
    return first, newest, error


@pytest.mark.fault("divergent-replica")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_replica_that_differs_under_ddp_ends_the_loop_or_is_not_resumed_from(
    tmp_path: Path,
) -> None:
    nodes = stores(tmp_path, 3)
    options = {"check_replicas": 1}
    warns = {**options, "on_divergence": "warn"}

    told = run_ranks(_train, 3, 6, (1, 3), options, store_per_node=nodes)
    again = run_ranks(_train, 3, 3, None, options, store_per_node=nodes)
    warned = run_ranks(_train, 3, 2, (2, 7), warns, store_per_node=nodes)
    after = run_ranks(_train, 3, 0, None, {}, store_per_node=nodes)

    key = "optimizer.state.0.exp_avg_sq"
    assert told == [(0, 2, (3, (key,), (1,), True))] * 3
    assert again == [(3, 5, None)] * 3
    # With a warning training goes on, and a restart takes what is sound.
    assert warned == [(6, 7, None)] * 3
    assert [first for first, *_ in after] == [7] * 3


@pytest.fixture(params=["directory", "memory"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory, and an object store as far as one process sees it."""
    return f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "shared")


def test_a_damaged_checkpoint_on_shared_storage_makes_way_for_the_one_before(
    tmp_path: Path, shared: str
) -> None:
    model, saved = torch.nn.Linear(50, 50), []
    with Checkpointer({"model": model}, local=tmp_path / "a", shared=shared) as checkpointer:
        checkpointer.resume()
        for step in range(2):
            torch.nn.init.normal_(model.weight)
            saved.append(model.weight.detach().clone())
            checkpointer.step(step)
            checkpointer.save(step, shared=True)
            checkpointer.wait_until_finished()
    newest = find_shared_sessions(shared)[0].whole()[0].folder.path
    data = newest / next(name for name in newest.names() if name.endswith(".distcp"))
    content = bytearray(data.read())
    content[len(content) // 2] ^= 1
    data.put(bytes(content))

    assert resume_once({"model": model}, local=tmp_path / "b", shared=shared) == 1

    assert torch.equal(model.weight, saved[0])


def test_a_drain_that_was_cut_off_and_the_one_behind_it_go_on_at_the_next_start(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: dict[str, Any] = {"local": str(tmp_path / "local"), "shared": shared, "every": 10**6}
    model = torch.nn.Linear(300, 300)
    monkeypatch.setattr(tiers, "_RATE", 1e4)
    with suppress(RuntimeError), Checkpointer({"model": model}, **places) as checkpointer:
        checkpointer.resume()
        for step in (0, 1):
            checkpointer.step(step)
            checkpointer.save(step, shared=True)
        while checkpointer.newest != 1:
            time.sleep(0.01)
            checkpointer.step()
        raise RuntimeError("the job ends while it drains")
    monkeypatch.undo()
    (session,) = find_shared_sessions(shared)
    assert not session.checkpoints()
    assert session.leftovers()

    with Checkpointer({"model": model}, **places, save_last=False) as checkpointer:
        checkpointer.resume()
        checkpointer.wait_until_finished()

    assert [known.folder.iteration for known in session.checkpoints()] == [1, 0]
    assert not session.leftovers()


@pytest.mark.parametrize("is_open", [False, True], ids=["found", "opened"])
def test_what_a_job_prunes_while_another_reads_it_makes_way_for_the_newest(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shared = torch.nn.Linear(50, 50), tmp_path / "shared"
    with Checkpointer(
        {"model": model}, local=tmp_path / "a", shared=shared, shared_keep_last=1, save_last=False
    ) as job:
        job.resume()

        def save(step: int) -> None:
            job.step(step)
            job.save(step, shared=True)
            job.wait_until_finished()

        save(0)
        owner: Any = LocalCheckpointManager if is_open else GlobalCheckpointManager
        call = "load_from" if is_open else "images"
        looked = getattr(owner, call)

        def look(*args: Any) -> Any:
            monkeypatch.undo()
            save(1)
            return looked(*args)

        monkeypatch.setattr(owner, call, look)
        read = {"model": torch.nn.Linear(50, 50)}
        assert resume_once(read, local=tmp_path / "b", shared=shared, read_only=True) == 2
