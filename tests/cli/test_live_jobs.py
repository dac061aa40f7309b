"""All commands may be used while a job runs: they do not disturb it, nor it them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import localckpt
from tests.cli.commands import call, run
from tests.managers.jobs import MAX_S, cliques, make_manager, resume, save, state_of
from tests.ranks import announce, node_store, start_ranks

Dirs = Callable[[int], list[Path]]

_NBYTES = 3 << 20


def _save_until_told(rank: int, world_size: int, kind: str, stop: Path) -> int:
    replicas = cliques(1, 2)
    with (
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        make_manager(kind, node_store(), "run", replicas, keep_last=1) as manager,
    ):
        iteration, told = -1, torch.zeros(1)
        while not told.item():
            iteration += 1
            save(manager, state_of(rank, iteration, _NBYTES), iteration, queue)
            if iteration == 0:
                announce(f"saves {rank}")
            # All ranks save equally often.
            told.fill_(stop.exists())
            dist.broadcast(told, 0)
        manager.save(state_of(rank, iteration + 1), iteration + 1)
        assert resume(manager, rank, iteration + 1) == "own node"
    replicas.close()
    return iteration


def test_a_job_that_saves_all_the_time_and_the_commands_do_not_disturb_each_other(
    kind: str, node_dirs: Dirs, shm_roots: Dirs, tmp_path: Path
) -> None:
    nodes = (node_dirs if kind == "disk" else shm_roots)(2)
    stop = tmp_path / "stop"
    commands = [["clean"], ["ls"], ["verify"], ["clean", "--corrupt"]]
    answers = []
    with start_ranks(_save_until_told, 2, kind, stop, store_per_node=nodes) as group:
        for rank in range(2):
            group.await_announced(f"saves {rank}")
        for _ in range(8):
            answers += [call(*command, node) for command in commands for node in nodes]
            answers.append(call("explain", *nodes))
        by_itself = [run(command, nodes[0]) for command in ("verify", "clean")]
        live = call("ls", nodes[0], "--json").json()["sessions"][0]
        stop.touch()
        saved = group.join()

    assert {(answer.status, answer.err) for answer in [*answers, *by_itself]} == {(0, "")}
    assert not [a.out for a in answers if "not counted" in a.out or "Not counted" in a.out]
    assert not [a.out for a in answers for node in nodes if f"removed {node}/" in a.out]
    assert live["checkpoints"]
    assert min(saved) > 1
