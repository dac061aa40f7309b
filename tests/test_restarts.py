"""Attempts of a job that share one key-value store: what dead ranks left there misleads nobody.

The default group's backend is torch's fake one, which says nothing over the store, since gloo's own
keys of a dead attempt would stop torch before anything of ours begins.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    AsyncCallsQueue,
    CliqueReplicationStrategy,
    GlobalCheckpointManager,
    LocalCheckpointManager,
    MismatchError,
    PeerLostError,
)
from tests.managers.jobs import error_of
from tests.ranks import die, node_store, on_ranks, run_ranks

_TIMEOUT_S = 20.0


def _join(rank: int, world_size: int, port: int) -> None:
    # Registers the backend.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)


@pytest.fixture
def job_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _save(rank: int, world_size: int, port: int, shared: Path, dies: str | None) -> int:
    _join(rank, world_size, port)
    timeout_s = 2.0 if dies else _TIMEOUT_S
    state = {"w": torch.full((100,), float(rank)), "rank": rank}
    try:
        if dies == "before its manager" and rank == 1:
            die()
        strategy = CliqueReplicationStrategy.from_replication_params(None, 2, timeout_s=timeout_s)
        local = LocalCheckpointManager(node_store(), "run", strategy, timeout=timeout_s)
        shared_tier = GlobalCheckpointManager(shared, timeout=timeout_s)
        queue = AsyncCallsQueue(timeout_s=timeout_s)
        if dies == "before its first save" and rank == 1:
            die()
        found = max(local.find_latest(), shared_tier.find_latest())
        queue.schedule_async_request(local.save(state, found + 2, is_async=True))
        if dies == "in its first save" and rank == 1:
            die()
        queue.maybe_finalize_async_calls(blocking=True)
        if dies == "before its shared save" and rank == 1:
            die()
        shared_tier.save({f"of {rank}": state}, found + 2, is_async=False)
    except PeerLostError:
        die()
    assert torch.equal(local.load()[0]["w"], state["w"]) if local.find_latest() > 0 else True
    queue.close()
    local.close()
    shared_tier.close()
    return found


@pytest.mark.fault("silent-peer")
def test_both_tiers_save_and_load_after_attempts_in_which_a_rank_died(
    job_store: dist.TCPStore, tmp_path: Path
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    points = ("before its manager", "before its first save", "in its first save")
    for dies in (*points, "before its shared save"):
        run_ranks(
            *(_save, 2, job_store.port, tmp_path / "shared", dies),
            init_group=False,
            expect_dead=(0, 1),
            store_per_node=nodes,
        )

    found = partial(
        *(run_ranks, _save, 2, job_store.port, tmp_path / "shared", None),
        init_group=False,
        store_per_node=nodes,
    )
    first = found()
    # The rank that died in its save may have written all of it before, and the other one, too.
    assert first in ([1, 1], [3, 3])
    assert found() == [first[0] + 2] * 2


@on_ranks(2, nodes=2, init_group=False)
def test_a_manager_made_before_the_process_group_is_an_error_and_no_world_of_one(
    rank: int, tmp_path: Path
) -> None:
    local = partial(LocalCheckpointManager, node_store(), "run", timeout=_TIMEOUT_S)
    global_ = partial(GlobalCheckpointManager, tmp_path, timeout=_TIMEOUT_S)
    for make in (local, global_):
        assert "call torch.distributed.init_process_group()" in error_of(make, MismatchError)
    assert not any(node_store().glob("*"))

    # Launched in a way that does not say how many ranks there are.
    world = os.environ.pop("WORLD_SIZE")
    managers = [local(), global_()]
    os.environ["WORLD_SIZE"] = world
    dist.init_process_group("gloo")
    for manager in managers:
        calls = [lambda m=manager: m.save({"a": 1}, 1, is_async=False), manager.find_latest]
        for call in calls:
            assert "made before torch.distributed.init_process_group()" in (
                error_of(call, MismatchError)
            )
        manager.close()

    with local() as again:
        again.save({"a": rank}, 1)
        assert again.find_latest() == 1
