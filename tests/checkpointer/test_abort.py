"""``abort()`` at any moment ends what waits, and the same process joins the ranks again."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt.errors import AbortedError, PeerLostError
from localckpt.ranks.job_store import default_store
from tests.checkpointer.loops import stores
from tests.checkpointer.slow_storage import slow_down
from tests.ranks import node_store, run_ranks

_NUMEL = 1 << 18
_TIMEOUT_S = 20.0


class _Part:
    """A tensor that is made of the number of the step."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(_NUMEL)

    def set(self, step: int) -> None:
        torch.arange(_NUMEL, out=self.tensor).mul_(step + 1).add_(dist.get_rank())

    def is_of(self, step: int) -> bool:
        expected = torch.arange(_NUMEL, dtype=torch.float32).mul_(step + 1).add_(dist.get_rank())
        return bool(torch.equal(self.tensor, expected))

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["tensor"])


def _resources() -> dict[str, int]:
    process = psutil.Process()
    # What a store in shared memory still has, it may map.
    mapped = [each.path for each in process.memory_maps() if each.path.startswith("/dev/shm/")]
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "removed shared memory": sum(not Path(path).exists() for path in mapped),
        "keys": default_store().num_keys(),
        "memory": process.memory_info().rss,
    }


def _descriptors() -> list[Path]:
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def _settled(most: dict[str, int] | None = None) -> dict[str, int]:
    """What is held once the copies that a rejoin makes again are over, or given up."""
    until = time.monotonic() + 2 * _TIMEOUT_S
    most = most or {"threads": 6, "descriptors": 18, "removed shared memory": 0}
    least = _resources()
    while time.monotonic() < until and any(least[name] > most[name] for name in most):
        time.sleep(0.05)
        # A cycle of an error and its frames may hold an image or a socket until it is collected.
        gc.collect()
        now = _resources()
        least = {name: min(least[name], now[name]) for name in least}
    return least


def _train(checkpointer: localckpt.Checkpointer, part: _Part, step: int, moves: Any) -> None:
    """Train until the end of the world."""
    while True:
        part.set(step)
        checkpointer.step(step)
        if step % 5 == 3:
            checkpointer.save(step, shared=step % 10 == 3)
        if step % 7 == 6:
            checkpointer.wait_until_finished()
        time.sleep(moves.uniform(0.0, 0.004))
        step += 1


def _abort_and_rejoin(
    rank: int, world_size: int, shared: Path, rounds: int, options: dict[str, Any]
) -> tuple[list[dict[str, int]], set[str], float]:
    moves, alike, before = random.Random(rank), random.Random(7), _resources()
    part, said, longest_s, seen = _Part(), set[str](), 0.0, list[dict[str, int]]()
    checkpointer = localckpt.Checkpointer(
        {"part": part},
        local=node_store(),
        shared=shared,
        every=3,
        timeout_s=_TIMEOUT_S,
        quiet=True,
        **options,
    )
    step = checkpointer.resume()
    for number in range(rounds):
        # One rank before the others, or each at a moment of its own; and now and then while they
        # join again.
        first, late = alike.randrange(world_size + 1), alike.random() < 0.2
        after_s = 0.3 if first not in (rank, world_size) else 0.0
        timer = threading.Timer(after_s + moves.uniform(0.0, 0.15), checkpointer.abort)
        timer.start()
        try:
            _train(checkpointer, part, step, moves)
        except PeerLostError as error:
            said.add(type(error).__name__)
        timer.join()
        began = time.monotonic()
        checkpointer.abort()
        checkpointer.abort()
        longest_s = max(longest_s, time.monotonic() - began)
        with pytest.raises(AbortedError, match="rejoin"):
            checkpointer.step(10**6)
        dist.barrier()
        if late:
            late_timer = threading.Timer(moves.uniform(0.0, 0.05), checkpointer.abort)
            late_timer.start()
            with contextlib.suppress(PeerLostError):
                checkpointer.rejoin({"part": part})
            late_timer.join()
            dist.barrier()
        rejoined = checkpointer.rejoin({"part": part})
        step = rejoined.step
        assert step == 0 or part.is_of(step - 1), f"round {number}"
        if number in (2, rounds - 1):
            seen.append(_settled())
            # Shown if the numbers are not as they should be.
            print(number, sorted(os.readlink(path) for path in _descriptors()), flush=True)
            dist.barrier()
    checkpointer.close()
    # A connection that gloo was making when it was given up ends by a deadline of gloo's own.
    held = {"threads": before["threads"] + 2, "descriptors": before["descriptors"] + 4}
    left = _settled(held | {"removed shared memory": before["removed shared memory"]})
    assert all(left[name] <= held[name] for name in held), (held, left)
    return seen, said, longest_s


@pytest.mark.rows(1)
@pytest.mark.fault("aborted")
@pytest.mark.parametrize("options", [{"replication_factor": 2}, {"memory": True}], ids=str)
def test_aborts_at_any_moment_leave_nothing_and_the_ranks_join_again(
    options: dict[str, Any], tmp_path: Path, shm_roots: Any, long_form: bool
) -> None:
    rounds = 200 if long_form else 13
    outcomes = run_ranks(
        *(_abort_and_rejoin, 2, tmp_path / "shared", rounds, options),
        store_per_node=shm_roots(2) if "memory" in options else stores(tmp_path, 2),
        timeout_s=600.0 if long_form else 240.0,
        group_timeout_s=4 * _TIMEOUT_S,
    )

    for seen, said, longest_s in outcomes:
        assert longest_s < 2.5
        assert "AbortedError" in said
        # Connections of the last exchange are kept for the next: four descriptors. Of an abort a
        # thread that is late may leave one key.
        slacks = {"threads": 2, "descriptors": 6, "removed shared memory": 0, "keys": 40 + rounds}
        for name, slack in slacks.items():
            assert seen[-1][name] <= seen[0][name] + slack, name
        assert seen[-1]["memory"] < seen[0]["memory"] + (96 << 20)


def _abort_while_storage_hangs(rank: int, world_size: int, flag: Path, call: str) -> float:
    slow_down(node_store(), flag, 8.0, hangs=True)
    part = _Part()
    checkpointer = localckpt.Checkpointer(
        {"part": part}, local=node_store(), every=10**6, timeout_s=60.0, replication_factor=2
    )
    step = checkpointer.resume()
    part.set(step)
    checkpointer.step(step)
    checkpointer.save(step)
    checkpointer.wait_until_finished()
    dist.barrier()
    calls = {
        "save": lambda: checkpointer.save(step + 1),
        "resume": checkpointer.resume,
    }
    part.set(step + 1)
    checkpointer.step(step + 1)
    dist.barrier()
    if rank == 0:
        flag.touch()
    timer = threading.Timer(1.0, checkpointer.abort)
    timer.start()
    began = time.monotonic()
    with contextlib.suppress(PeerLostError):
        calls[call]()
        # The other rank hangs, and this one has nothing to wait for.
        checkpointer.wait_until_finished()
    took_s = time.monotonic() - began
    timer.join()
    dist.barrier()
    flag.unlink(missing_ok=True)
    rejoined = checkpointer.rejoin()
    assert part.is_of(rejoined.step - 1)
    assert rejoined.step >= step + 1
    part.set(rejoined.step)
    checkpointer.step(rejoined.step)
    checkpointer.save(rejoined.step)
    checkpointer.close()
    return took_s


@pytest.mark.parametrize("call", ["save", "resume"])
def test_a_call_whose_storage_hangs_ends_when_it_is_aborted(call: str, tmp_path: Path) -> None:
    outcomes = run_ranks(
        *(_abort_while_storage_hangs, 2, tmp_path / "hangs", call),
        store_per_node=stores(tmp_path, 2),
        timeout_s=120.0,
    )

    assert max(outcomes) < 4.0
