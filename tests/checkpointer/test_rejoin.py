"""Survivors of a lost rank keep their processes, and go back to their newest checkpoint."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt.checkpointer.epochs import Epochs
from localckpt.cli.account import account
from localckpt.cli.starts import starts_of
from localckpt.events.jsonl import read_events
from tests.checkpointer.loops import stores
from tests.checkpointer.survivors import (
    Survivor,
    begin,
    connect,
    digest,
    make_state,
    train_step,
    train_through,
)
from tests.ranks import (
    DeadRank,
    announce,
    await_announced,
    node_store,
    run_ranks,
    start_ranks,
)

# For each life of the job its processes, by rank, and whether the model is sharded.
_WORLDS = {
    "a rank replaced": ([[0, 1], [0, 2]], True),
    "the first rank replaced": ([[0, 1, 2], [3, 1, 2]], False),
    "shrunk, without the first": ([[0, 1, 2], [2, 1]], True),
    "grown": ([[0, 1], [0, 1, 2]], False),
    "shrunk and grown": ([[0, 1, 2], [1, 2], [1, 2, 3]], True),
    "twice in a row": ([[0, 1], [0, 2], [3, 2]], False),
}


def _survive(
    worlds: list[list[int]], tmp_path: Path, *args: Any, **options: Any
) -> dict[int, Survivor]:
    homes = 1 + max(home for world in worlds for home in world)
    digests = tmp_path / "digests"
    digests.mkdir()
    lost = [home for home in range(homes) if home not in worlds[-1]]
    outcomes = run_ranks(
        *(train_through, homes, digests, worlds, {"replication_factor": 2, **options}, *args),
        init_group=False,
        store_per_node=stores(tmp_path / "nodes", homes),
        expect_dead=lost,
        timeout_s=120.0,
    )
    return {n: seen for n, seen in enumerate(outcomes) if not isinstance(seen, DeadRank)}


@pytest.mark.rows(8)
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
    worlds, sharded = _WORLDS[name]
    survivors = _survive(worlds, tmp_path, sharded, 64, in_place)

    for home, seen in survivors.items():
        lives = [number for number, world in enumerate(worlds) if home in world]
        assert [life.rank for life in seen.lives] == [worlds[n].index(home) for n in lives]
        assert all(life.is_as_saved for life in seen.lives)
        for number, life in zip(lives, seen.lives, strict=True):
            assert life.first > 0 or number == 0


def test_survivors_read_their_own_memory_and_nothing_from_disk(tmp_path: Path) -> None:
    survivors = _survive([[0, 1], [2, 1]], tmp_path, False, 1 << 16)

    rejoined = survivors[1].lives[1].rejoined
    assert rejoined is not None
    assert rejoined.source == "own memory"
    assert rejoined.nbytes > 1 << 20
    assert rejoined.lost_steps == 7 - rejoined.step
    # No more than directories and notes.
    assert survivors[1].lives[1].read_nbytes < 1 << 16
    assert survivors[2].lives[0].rejoined is None
    # A start like any other, in the record of what happened.
    events = read_events(sorted(tmp_path.glob("nodes/*/events")))
    (starts,) = starts_of(events).values()
    first, second = account(starts).restarts
    assert (first.start.world_size, second.start.world_size) == (2, 2)
    assert second.start.resumed_step == rejoined.step - 1
    assert second.lost_steps == 1
    assert second.sources == {"local": 1, "replicated": 1}
    assert 0 < second.recovery_s < 60


def _train_until_stopped(checkpointer: localckpt.Checkpointer, state: dict[str, Any]) -> None:
    for step in range(10**6):
        train_step(state, step)
        checkpointer.step(step)
        if step == 6:
            checkpointer.wait_until_finished()


def _be_stopped(home: int, world_size: int) -> str:
    """Rank 1 is stopped in the middle of a step; the others go on, and it comes back late."""
    life, world, seconds = (1, [0, 2], 20) if home == 2 else (0, [0, 1], 3)
    dist.init_process_group(
        "gloo",
        store=connect(f"life{life}"),
        rank=world.index(home),
        world_size=2,
        timeout=timedelta(seconds=seconds),
    )
    state = make_state(sharded=False)
    checkpointer = localckpt.Checkpointer(
        state, local=node_store(), every=2, on_resize="drop", replication_factor=2, timeout_s=5.0
    )
    first = checkpointer.resume()
    if home == 1:
        try:
            for step in range(10**6):
                train_step(state, step)
                checkpointer.step(step)
                if step == 6:
                    checkpointer.wait_until_finished()
                    announce("at", os.getpid())
        except (RuntimeError, localckpt.PeerLostError) as error:
            with contextlib.suppress(RuntimeError):
                checkpointer.step(10**7)
            try:
                checkpointer.close()
            except localckpt.CheckpointingException as late:
                return f"{error} {late}"
            return str(error)
    if home == 0:
        with pytest.raises(RuntimeError):
            _train_until_stopped(checkpointer, state)
        checkpointer.abort()
        dist.destroy_process_group()
        begin(1, [0, 2], home)
        state = make_state(sharded=False)
        first = checkpointer.rejoin(state).step
    assert first > 4
    for step in range(first, first + 4):
        train_step(state, step)
        checkpointer.step(step)
    checkpointer.wait_until_finished()
    if home == 0:
        announce("rejoined")
    await_announced("is back")
    time.sleep(1.0)
    newest = checkpointer.newest
    rejoined = checkpointer.rejoin()
    assert rejoined.step - 1 == newest
    for step in range(rejoined.step, rejoined.step + 4):
        train_step(state, step)
        checkpointer.step(step)
    text = digest(state)
    checkpointer.close()
    dist.destroy_process_group()
    return text


@pytest.mark.fault("survivors")
def test_a_rank_that_was_stopped_and_comes_back_late_harms_nothing(tmp_path: Path) -> None:
    with start_ranks(_be_stopped, 3, init_group=False, store_per_node=stores(tmp_path, 3)) as group:
        group.await_announced("at", 60.0)
        group.kill(1, signal.SIGSTOP)
        group.await_announced("rejoined", 60.0)
        group.kill(1, signal.SIGCONT)
        group.announce("is back")
        first, late, second = group.join(60.0)

    assert first == second
    assert late


def _fail_and_close(rank: int, world_size: int, shared: Path) -> None:
    state = make_state(sharded=False)
    checkpointer = localckpt.Checkpointer(
        state, local=node_store(), shared=shared, every=2, replication_factor=2, timeout_s=2.0
    )
    first = checkpointer.resume()
    for step in range(first, first + 3):
        train_step(state, step)
        checkpointer.step(step)
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
    rejoined = checkpointer.rejoin()
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
    again = localckpt.Checkpointer(state, local=node_store(), shared=shared, timeout_s=20.0)
    assert again.resume() == step
    again.close()


def test_a_rejoin_that_failed_is_done_again_or_the_object_is_closed(tmp_path: Path) -> None:
    run_ranks(_fail_and_close, 2, tmp_path / "shared", store_per_node=stores(tmp_path, 2))


def _rejoin_before_a_save(rank: int, world_size: int) -> None:
    state = make_state(sharded=False)
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
    state = make_state(sharded=False)
    assert checkpointer.rejoin(state).step == 0
    assert digest(state) == untrained
    checkpointer.abort()
    dist.barrier()
    # It is not known that no step was begun.
    with pytest.raises(localckpt.NoReplicasAvailableError, match="made anew"):
        checkpointer.rejoin()
    checkpointer.close()


def test_without_a_checkpoint_no_state_of_the_life_before_passes_for_a_new_one(
    tmp_path: Path,
) -> None:
    run_ranks(_rejoin_before_a_save, 2, store_per_node=stores(tmp_path, 2))


def _give_states_anew(rank: int, world_size: int) -> list[bool]:
    state = make_state(sharded=False)
    checkpointer = localckpt.Checkpointer(state, local=node_store(), every=1, timeout_s=20.0)
    step, models = checkpointer.resume(), []
    for _ in range(3):
        train_step(state, step)
        checkpointer.step(step)
        checkpointer.wait_until_finished()
        checkpointer.abort()
        dist.barrier()
        models.append(weakref.ref(state["model"]))
        state = make_state(sharded=False)
        step = checkpointer.rejoin(state).step
    gc.collect()
    checkpointer.close()
    return [model() is not None for model in models]


def test_a_state_that_was_given_anew_frees_the_one_before(tmp_path: Path) -> None:
    outcomes = run_ranks(_give_states_anew, 2, store_per_node=stores(tmp_path, 2))

    assert outcomes == [[False] * 3] * 2


def _guard_anew(rank: int, world_size: int) -> None:
    state = make_state(sharded=False)
    checkpointer = localckpt.Checkpointer(
        state, local=node_store(), every=1, guard=[state["optimizer"]], timeout_s=20.0
    )
    train_step(state, checkpointer.resume())
    checkpointer.step(0)
    checkpointer.wait_until_finished()
    state = make_state(sharded=False)
    with pytest.raises(localckpt.CheckpointingException, match="guard="):
        checkpointer.rejoin(state)
    # Nothing was aborted.
    train_step(state, 1)
    checkpointer.step(1)
    dist.barrier()
    assert checkpointer.rejoin(state, guard=[state["optimizer"]]).step > 0
    checkpointer.close()


def test_optimizers_that_are_guarded_are_given_anew_with_the_state(tmp_path: Path) -> None:
    run_ranks(_guard_anew, 2, store_per_node=stores(tmp_path, 2))


def test_a_place_that_an_aborted_load_has_given_is_forgotten() -> None:
    epochs = Epochs(lambda: None, lambda: False, 2)
    epochs.load_state_dict(epochs.state_dict())

    epochs.rejoin(3)

    assert epochs.saved_at is None
