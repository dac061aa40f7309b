"""``abort()`` ends what waits, and survivors join again, back at their newest checkpoint."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt.cli.account import account
from localckpt.cli.starts import starts_of
from localckpt.errors import AbortedError, PeerLostError
from localckpt.events.jsonl import read_events
from localckpt.ranks.job_store import default_store
from tests.checkpointer.loops import slow_down, stores
from tests.checkpointer.survivors import begin, digest, make_state, survive, train_step
from tests.ranks import announce, await_announced, node_store, on_ranks, run_ranks, start_ranks

# For each life of the job its processes, by rank, and the mesh of the model.
_WORLDS: dict[str, tuple[list[list[int]], tuple[int, ...]]] = {
    "the first rank replaced": ([[0, 1, 2], [3, 1, 2]], ()),
    "shrunk, without the first": ([[0, 1, 2], [2, 1]], (-1,)),
    "shrunk and grown": ([[0, 1, 2], [1, 2], [1, 2, 3]], (-1,)),
    "twice in a row": ([[0, 1], [0, 2], [3, 2]], ()),
}


@pytest.mark.rows(5)
@pytest.mark.fault("survivors")
@pytest.mark.parametrize(
    "in_place",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not hasattr(dist, "_reconfigure"), reason="needs torch 2.14 or later"
            ),
        ),
    ],
    ids=["made anew", "changed in place"],
)
@pytest.mark.parametrize("name", _WORLDS)
def test_survivors_go_back_to_the_newest_checkpoint_bit_for_bit(
    name: str, in_place: bool, tmp_path: Path
) -> None:
    worlds, shape = _WORLDS[name]
    survivors = survive(worlds, tmp_path, shape, in_place=in_place)

    for home, seen in survivors.items():
        lives = [number for number, world in enumerate(worlds) if home in world]
        assert [life.rank for life in seen] == [worlds[n].index(home) for n in lives]
        assert all(life.is_as_saved for life in seen)
        for number, life in zip(lives, seen, strict=True):
            assert life.first > 0 or number == 0


def test_survivors_read_their_own_memory_and_nothing_from_disk(tmp_path: Path) -> None:
    survivors = survive([[0, 1], [2, 1]], tmp_path, width=1 << 16)

    rejoined = survivors[1][1].rejoined
    assert rejoined is not None
    assert rejoined.source == "own memory"
    assert rejoined.nbytes > 1 << 20
    assert rejoined.lost_steps == 7 - rejoined.step
    # No more than directories and notes.
    assert survivors[1][1].read_nbytes < 1 << 16
    assert survivors[2][0].rejoined is None
    # A start like any other, in the record of what happened.
    events = read_events(sorted(tmp_path.glob("nodes/*/events")))
    (starts,) = starts_of(events).values()
    first, second = account(starts).restarts
    assert (first.start.world_size, second.start.world_size) == (2, 2)
    assert second.start.resumed_step == rejoined.step - 1
    assert second.lost_steps == 1
    assert second.sources == {"local": 1, "replicated": 1}
    assert 0 < second.recovery_s < 60


def _train_steps(
    checkpointer: localckpt.Checkpointer, state: dict[str, Any], first: int, count: int = 10**6
) -> None:
    for step in range(first, first + count):
        train_step(state, step)
        checkpointer.step(step)
        if step == 6:
            checkpointer.wait_until_finished()
            announce(f"at of {dist.get_rank()}")


def _be_stopped(home: int, world_size: int) -> str:
    """Rank 1 is stopped in the middle of a step; the others go on, and it comes back late."""
    life = int(home == 2)
    begin(life, [0, 2] if life else [0, 1], home, limit_s=20.0 if life else 3.0)
    state = make_state()
    checkpointer = localckpt.Checkpointer(
        state, local=node_store(), every=2, on_resize="drop", replication_factor=2, timeout_s=5.0
    )
    first = checkpointer.resume()
    if life == 0:
        with pytest.raises((RuntimeError, localckpt.PeerLostError)) as caught:
            _train_steps(checkpointer, state, first)
        if home == 1:
            with contextlib.suppress(RuntimeError):
                checkpointer.step(10**7)
            with contextlib.suppress(localckpt.CheckpointingException):
                checkpointer.close()
            return str(caught.value)
        checkpointer.abort()
        dist.destroy_process_group()
        begin(1, [0, 2], home)
        state = make_state()
        first = checkpointer.rejoin(state).step
    assert first > 4
    _train_steps(checkpointer, state, first, 4)
    checkpointer.wait_until_finished()
    if home == 0:
        announce("rejoined")
    await_announced("is back")
    time.sleep(1.0)
    newest = checkpointer.newest
    rejoined = checkpointer.rejoin()
    assert rejoined.step - 1 == newest
    _train_steps(checkpointer, state, rejoined.step, 4)
    text = digest(state)
    checkpointer.close()
    dist.destroy_process_group()
    return text


@pytest.mark.fault("survivors")
def test_a_rank_that_was_stopped_and_comes_back_late_harms_nothing(tmp_path: Path) -> None:
    with start_ranks(_be_stopped, 3, init_group=False, store_per_node=stores(tmp_path, 3)) as group:
        group.await_announced("at of 1", 60.0)
        group.kill(1, signal.SIGSTOP)
        group.await_announced("rejoined", 60.0)
        group.kill(1, signal.SIGCONT)
        group.announce("is back")
        first, late, second = group.join(60.0)

    assert first == second
    assert late


@on_ranks(2, nodes=2)
def test_a_rejoin_that_failed_is_done_again_or_the_object_is_closed(
    rank: int, tmp_path: Path
) -> None:
    state = make_state()
    guard = [state["optimizer"]]
    places: dict[str, Any] = {"local": node_store(), "shared": tmp_path / "shared"}
    checkpointer = localckpt.Checkpointer(
        state, **places, every=2, replication_factor=2, timeout_s=2.0, guard=guard
    )
    first = checkpointer.resume()
    for step in range(first, first + 3):
        train_step(state, step)
        checkpointer.step(step)
    with pytest.raises(localckpt.CheckpointingException, match="guard="):
        checkpointer.rejoin(make_state())
    # Nothing was aborted.
    checkpointer.wait_until_finished()
    dist.barrier()
    if rank == 0:
        for _ in range(2):
            # The other rank does not come.
            with pytest.raises(localckpt.PeerLostError):
                checkpointer.rejoin()
            with pytest.raises(localckpt.AbortedError):
                checkpointer.step(step + 1)
    dist.barrier()
    rejoined = checkpointer.rejoin(state, guard=guard)
    assert (rejoined.step, rejoined.source) == (step, "own memory")
    checkpointer.abort()
    if rank == 0:
        with pytest.raises(localckpt.PeerLostError):
            checkpointer.rejoin()
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(localckpt.CheckpointingException, match="closed"):
        checkpointer.rejoin()
    dist.barrier()
    again = localckpt.Checkpointer(state, **places, timeout_s=20.0)
    assert again.resume() == step
    again.close()


@on_ranks(2, nodes=2)
def test_without_a_checkpoint_no_state_of_the_life_before_passes_for_a_new_one(rank: int) -> None:
    state = make_state()
    untrained = digest(state)
    checkpointer = localckpt.Checkpointer(
        state, local=node_store(), every=10**6, save_last=False, timeout_s=20.0
    )
    train_step(state, checkpointer.resume())
    checkpointer.step(0)
    for _ in range(2):
        checkpointer.abort()
        dist.barrier()
        with pytest.raises(localckpt.NoReplicasAvailableError, match="made anew"):
            checkpointer.rejoin()
        dist.barrier()
    state = make_state()
    assert checkpointer.rejoin(state).step == 0
    assert digest(state) == untrained
    checkpointer.abort()
    dist.barrier()
    # It is not known that no step was begun.
    with pytest.raises(localckpt.NoReplicasAvailableError, match="made anew"):
        checkpointer.rejoin()
    checkpointer.close()


# Aborts at any moment.

_NUMEL = 1 << 18
_TIMEOUT_S = 20.0


class _Part(torch.nn.Module):
    """A tensor that is made of the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tensor", torch.zeros(_NUMEL))

    def set(self, step: int) -> None:
        torch.arange(_NUMEL, out=self.tensor).mul_(step + 1).add_(dist.get_rank())

    def is_of(self, step: int) -> bool:
        expected = torch.arange(_NUMEL, dtype=torch.float32).mul_(step + 1).add_(dist.get_rank())
        return bool(torch.equal(self.tensor, expected))


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
        # Connections of the last exchange are kept for the next: four descriptors. The keys of
        # some parts that were aborted wait until all ranks come to the next of their name.
        slacks = {"threads": 2, "descriptors": 6, "removed shared memory": 0, "keys": 40}
        for name, slack in slacks.items():
            assert seen[-1][name] <= seen[0][name] + slack, name
        assert seen[-1]["memory"] < seen[0]["memory"] + (96 << 20)


@pytest.mark.parametrize("call", ["save", "resume"])
@on_ranks(2, nodes=2, timeout_s=120.0)
def test_a_call_whose_storage_hangs_ends_when_it_is_aborted(
    rank: int, call: str, tmp_path: Path
) -> None:
    flag = tmp_path / "hangs"
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
    assert time.monotonic() - began < 4.0
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
