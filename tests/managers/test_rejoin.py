"""Managers join the ranks again, after their process group was made anew or they were aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt.errors import AbortedError, MismatchError
from tests.checkpointer.survivors import begin, read_nbytes
from tests.managers.jobs import Dirs
from tests.ranks import node_store, run_ranks

_NUMEL = 1 << 22


def _make(kind: str) -> localckpt.CheckpointManager:
    strategy: Any = localckpt.ParityReplicationStrategy(1, 3)
    if kind == "jump":
        strategy = localckpt.CliqueReplicationStrategy.from_replication_params(1, 2)
    return localckpt.LocalCheckpointManager(node_store(), "run", strategy, timeout=20.0)


def _value(rank: int, iteration: int) -> torch.Tensor:
    return torch.arange(_NUMEL, dtype=torch.float32).mul_(rank + 1).add_(iteration)


def _survive(home: int, world_size: int, kind: str) -> tuple[str, int]:
    """Ranks 0, 1, 2 save; then 1 is gone with its node, and a new process takes its place."""
    first, second = [0, 1, 2], [0, 3, 2]
    manager = None
    if home in first:
        begin(0, first, home)
        manager = _make(kind)
        for iteration in (1, 2):
            manager.save({"value": _value(dist.get_rank(), iteration)}, iteration)
        dist.barrier()
        dist.destroy_process_group()
    if home not in second:
        # As if it was killed: nothing is closed.
        return "", 0
    begin(1, second, home)
    read = read_nbytes()
    if manager is None:
        manager = _make(kind)
    else:
        with pytest.raises(MismatchError, match="initialised anew"):
            manager.find_latest()
        manager.rejoin()
    assert manager.find_latest() == 2
    into = {"value": torch.zeros(_NUMEL)}
    state, _ = manager.load(into=into)
    assert torch.equal(state["value"], _value(dist.get_rank(), 2))
    read = read_nbytes() - read
    assert manager.last_load is not None
    source = manager.last_load.source
    manager.save(state, 3)
    manager.save(state, 4)
    assert manager.find_latest() == 4
    manager.close()
    dist.destroy_process_group()
    return source, read


@pytest.mark.parametrize("kind", ["jump", "parity"])
def test_managers_of_survivors_load_what_they_have_in_memory(kind: str, node_dirs: Dirs) -> None:
    outcomes = run_ranks(_survive, 4, kind, init_group=False, store_per_node=node_dirs(4))

    for home in (0, 2):
        source, read = outcomes[home]
        assert source == "own memory"
        if kind != "parity":
            # Of parity, the survivors read what the lost shard is computed from. Here they look at
            # the first MiB of each file, to know what is there.
            assert read < 4 * _NUMEL
    assert outcomes[3][0] == ("parity" if kind == "parity" else "peer rank 0")


def _abort_blocked(rank: int, world_size: int, what: str) -> float:
    strategy = localckpt.CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = localckpt.LocalCheckpointManager(node_store(), "run", strategy, timeout=60.0)
    state = {"value": _value(rank, 1)}
    manager.save(state, 1)
    took_s = 0.0
    if rank == 0:
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: manager.save(state, 2),
            "load": manager.load,
        }
        aborted: list[float] = []

        def abort() -> None:
            began = time.monotonic()
            manager.abort()
            aborted.append(time.monotonic() - began)

        timer = threading.Timer(0.7, abort)
        timer.start()
        began = time.monotonic()
        with pytest.raises(AbortedError):
            calls[what]()
        took_s = time.monotonic() - began
        timer.join()
        assert aborted[0] < 2.0
        with pytest.raises(AbortedError, match=r"rejoin\(\)"):
            manager.find_latest()
    dist.barrier()
    manager.rejoin()
    assert manager.find_latest() == 1
    state, _ = manager.load()
    assert torch.equal(state["value"], _value(rank, 1))
    manager.save(state, 2)
    manager.close()
    return took_s


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_call_that_waits_for_others_ends_when_another_thread_aborts(
    what: str, node_dirs: Dirs
) -> None:
    took_s, _ = run_ranks(_abort_blocked, 2, what, store_per_node=node_dirs(2))

    assert took_s < 5.0


def _close_aborted(rank: int, world_size: int, shared: Path) -> None:
    manager = localckpt.LocalCheckpointManager(node_store(), "run", timeout=20.0)
    storage = localckpt.GlobalCheckpointManager(shared, "run", local=manager, timeout=20.0)
    queue = localckpt.AsyncCallsQueue(timeout_s=20.0)
    state = {f"value{rank}": _value(rank, 1)}
    storage.save(state, 1)
    queue.schedule_async_request(manager.save(state, 1, is_async=True))
    storage.save(state, 2, is_async=True)
    for aborted in (queue, storage, manager):
        aborted.abort()
    for call in (storage.find_latest, manager.find_latest, lambda: storage.save(state, 3)):
        with pytest.raises(AbortedError):
            call()
    queue.close()
    manager.rejoin()
    storage.rejoin()
    newest = storage.find_latest()
    assert newest in (1, 2)
    loaded = {f"value{rank}": torch.zeros(_NUMEL)}
    storage.load(into=loaded)
    assert torch.equal(loaded[f"value{rank}"], _value(rank, 1))
    storage.save(state, 3)
    storage.abort()
    storage.close()
    manager.abort()
    manager.close()
    manager.close()


def test_aborted_objects_are_closed_or_joined_again(tmp_path: Path, node_dirs: Dirs) -> None:
    run_ranks(_close_aborted, 2, tmp_path / "shared", store_per_node=node_dirs(2))


def _refuse_given_groups(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    strategy = localckpt.CliqueReplicationStrategy(localckpt.GroupWrapper(group))
    manager = localckpt.LocalCheckpointManager(node_store(), "run", strategy, timeout=20.0)
    manager.save({"value": _value(rank, 1)}, 1)
    with pytest.raises(MismatchError, match="repl_strategy"):
        manager.rejoin()
    manager.rejoin(repl_strategy=localckpt.LazyCliqueReplicationStrategy(1, 2))
    assert manager.find_latest() == 1
    manager.close()
    with pytest.raises(localckpt.CheckpointingException, match="closed"):
        manager.rejoin()


def test_a_strategy_that_was_given_groups_has_to_be_given_anew(
    node_dirs: Dirs,
) -> None:
    run_ranks(_refuse_given_groups, 2, store_per_node=node_dirs(2))
