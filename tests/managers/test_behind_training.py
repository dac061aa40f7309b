"""Replicas are made while training goes on: nobody waits for a peer; a lost one costs copies."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import CheckpointingException
from localckpt.ids import Generation, ShardIdentity
from localckpt.managers import capture
from localckpt.options import Options
from localckpt.replication.redundancy import Lacking
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.image import Capture, Written
from localckpt.storage.buffers import buffer_nbytes
from localckpt.storage.directory import DirectoryStore
from tests.managers.jobs import (
    MAX_S,
    Breaking,
    Dirs,
    cliques,
    context_of,
    error_of,
    files,
    in_job,
    iterations_on,
    make_manager,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.ranks import announce, await_announced, node_store, run_ranks, start_ranks
from tests.staging import staging_nbytes

# The deadline of a wait that must not be waited for, and what then counts as quick, in seconds.
_LONG_S, _QUICK_S = 60.0, 20.0


def _standing(manager: Any) -> list[str]:
    return [str(durability) for durability in manager.status()]


def _whole(*iterations: int, copies: int = 2) -> list[str]:
    return [f"iteration {number} is replicated, {copies} of {copies}" for number in iterations]


def _lacking(*iterations: int) -> list[str]:
    return [f"iteration {i} is local, 1 of 2: 2 shards lack copies" for i in iterations]


def _spoil(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, dict):
        for inner in value.values():
            _spoil(inner)


def _begin(manager: Any, queue: localckpt.AsyncCallsQueue, rank: int, iteration: int) -> None:
    state = state_of(rank, iteration)
    queue.schedule_async_request(manager.save(state, iteration, is_async=True))
    _spoil(state)


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _left_over() -> list[str]:
    return [name for name in files(node_store()) if name.endswith((".dirty", ".recycled"))]


def _resume(rank: int, world_size: int, kind: str, iteration: int) -> str:
    """Start anew; where the shard came from."""
    with in_job(kind=kind) as (manager, _):
        return resume(manager, rank, iteration)


# A peer that is late.


def _save_while_a_peer_is_stopped(rank: int, world_size: int) -> list[list[str]]:
    told = []
    with in_job() as (manager, queue):
        save(manager, state_of(rank, 0), 0)
        if rank == 1:
            _begin(manager, queue, rank, 1)
            announce("one has begun", os.getpid())
            await_announced("zero has saved")
        else:
            await_announced("one is stopped")
            _begin(manager, queue, rank, 1)
            told.append(_standing(manager))
        _begin(manager, queue, rank, 2)
        if rank == 0:
            # Polls do not wait for it, either.
            assert queue.maybe_finalize_async_calls() == []
            told.append(_standing(manager))
            announce("zero has saved")
        queue.maybe_finalize_async_calls(blocking=True)
        told.append(_standing(manager))
        assert (manager.degraded, manager.degraded_saves) == (0, 0)
        assert manager.last_save.replicate_s > 0
    assert _left_over() == []
    return told


def test_saves_go_on_while_a_peer_is_stopped_and_are_whole_once_it_goes_on(node_dirs: Dirs) -> None:
    stores = node_dirs(2)

    with start_ranks(_save_while_a_peer_is_stopped, 2, store_per_node=stores) as group:
        group.await_announced("one has begun")
        group.kill(1, signal.SIGSTOP)
        group.announce("one is stopped")
        group.await_announced("zero has saved")
        group.kill(1, signal.SIGCONT)
        told = group.join()

    captured = [f"iteration {iteration} is captured, 0 of 2" for iteration in (2, 1)]
    assert told == [
        [[captured[1], *_whole(0)], [*captured, *_whole(0)], _whole(2, 1)],
        [_whole(2, 1)],
    ]
    # On the other node a rank finds what its peer got, whose tensors were changed at once.
    assert run_ranks(_resume, 2, "disk", 2, store_per_node=stores[::-1]) == ["own node"] * 2


def _save_more_than_there_are_buffers(
    rank: int, world_size: int, kind: str, num_buffers: int
) -> list[str]:
    def is_kept() -> bool:
        return any(node_store().rglob("000000000001.0.*.safetensors"))

    with in_job(kind=kind, num_buffers=num_buffers, keep_last=9) as (manager, queue):
        save(manager, state_of(rank, 0), 0, queue)
        if rank == 1:
            await_announced("zero has written")
        for iteration in range(1, num_buffers + 3):
            if rank == 0 and iteration == num_buffers + 1:
                # This node is done with it, and the peer has not begun to get it.
                _await(is_kept)
                announce("zero has written")
            _begin(manager, queue, rank, iteration)
        queue.maybe_finalize_async_calls(blocking=True)
        return _standing(manager)


@pytest.mark.parametrize(("kind", "num_buffers"), [("disk", 1), ("memory", 2)])
def test_an_image_that_is_being_sent_is_not_overwritten_by_a_later_save(
    kind: str, num_buffers: int, node_dirs: Dirs, shm_roots: Dirs
) -> None:
    stores = (node_dirs if kind == "disk" else shm_roots)(2)

    told = run_ranks(_save_more_than_there_are_buffers, 2, kind, num_buffers, store_per_node=stores)

    newest = num_buffers + 2
    assert told == [_whole(*range(newest, -1, -1))] * 2
    assert run_ranks(_resume, 2, kind, newest, store_per_node=stores[::-1]) == ["own node"] * 2


def test_a_buffer_is_not_free_while_digests_are_still_put_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    write_digests = capture.write_digests

    def write_late(*args: Any) -> None:
        time.sleep(0.3)
        write_digests(*args)
        over.set()

    def write_as_from_a_gpu(*args: Any) -> Written:
        return write(*args)._replace(has_digests=False)

    write = Capture.write
    monkeypatch.setattr(Capture, "write", write_as_from_a_gpu)
    monkeypatch.setattr(capture, "write_digests", write_late)
    store = DirectoryStore(tmp_path, "job", 0, MAX_S, num_buffers=1)
    states = capture.StateCapture(context_of(store, Options(timeout=MAX_S)))
    identity = ShardIdentity("job", Generation(1, 1), 1, 0, 2)
    slot, _ = states.capture(wrapped(state_of(0, 1)), identity, is_sent=True)
    # Another process is done with it, and the peer was lost before all was sent.
    assert slot.buffer is not None
    slot.buffer.give_back()
    assert store.is_busy()

    slot.end_hold("replication")

    assert over.is_set()
    assert not store.is_busy()
    states.close()
    store.close()


# The order of replications.


def _schedule_in_any_order(rank: int, world_size: int) -> list[str]:
    """The ranks run what ``save`` returned at other times; one request nobody runs."""
    with in_job(cliques(1, 3), num_buffers=4, keep_last=9) as (manager, queue):
        requests = {}
        for iteration in (1, 2, 3, 4, 5):
            state = state_of(rank, iteration)
            if iteration == 3:
                if rank == 2:
                    # All ranks finalize a save that is waited for; so this one's are over.
                    queue.schedule_async_request(requests[1])
                manager.save(state, iteration)
            else:
                requests[iteration] = manager.save(state, iteration, is_async=True)
                if rank == 0 and iteration == 1:
                    queue.schedule_async_request(requests[1])
            _spoil(state)
        if rank == 1:
            queue.schedule_async_request(requests[1])
        for iteration in (5, 4):
            queue.schedule_async_request(requests[iteration])
        queue.maybe_finalize_async_calls(blocking=True)
        assert iterations_on(node_store()) - {2} == {1, 3, 4, 5}
        assert manager.degraded_saves == 0
        told = _standing(manager)
    assert iterations_on(node_store()) == {1, 3, 4, 5}
    return told


def test_whoever_runs_a_save_and_when_peers_get_the_same_one(node_dirs: Dirs) -> None:
    stores = node_dirs(3)

    told = run_ranks(_schedule_in_any_order, 3, store_per_node=stores)

    assert told == [["iteration 2 is captured, 0 of 3", *_whole(5, 4, 3, 1, copies=3)]] * 3
    moved = stores[1:] + stores[:1]
    assert run_ranks(_resume, 3, "disk", 5, store_per_node=moved) == ["own node"] * 3


def _save_to_two_managers(rank: int, world_size: int, memory: list[Path]) -> list[int]:
    with (
        cliques(1, 2) as repl,
        make_manager("memory", memory[rank], "job", repl) as in_memory,
        make_manager("disk", node_store(), "at once", repl, background=False) as at_once,
        in_job(repl, background=True) as (on_disk, queue),
    ):
        managers = (on_disk, in_memory, at_once)
        for iteration in range(8):
            for manager in managers:
                _begin(manager, queue, rank, iteration)
        queue.maybe_finalize_async_calls(blocking=True)
        return [manager.degraded_saves for manager in managers]


def test_managers_that_share_a_strategy_make_their_copies_in_one_order(
    node_dirs: Dirs, shm_roots: Dirs
) -> None:
    told = run_ranks(_save_to_two_managers, 2, shm_roots(2), store_per_node=node_dirs(2))

    assert told == [[0, 0, 0]] * 2


# A peer that is lost.


class _Breaking(Breaking):
    def lacking(self, checkpoint: Any, inventory: Any) -> Lacking:
        """Find nothing: copies that are made later, beside training, have tests of their own."""
        return Lacking({})


def _breaking(*iterations: int) -> _Breaking:
    made = _Breaking.from_replication_params(1, 2, timeout_s=MAX_S)
    made.breaking = frozenset(iterations)
    return made


def _lose_a_peer_now_and_then(
    rank: int, world_size: int, strict: bool
) -> tuple[list[str], list[str]]:
    errors, standing = [], []
    with in_job(_breaking(2, 5), strict=strict, keep_last=2) as (manager, calls):
        save(manager, state_of(rank, 0), 0)
        for iteration in range(1, 7):
            queue = calls if iteration > 3 else None
            if strict and iteration in (2, 5):
                errors.append(
                    error_of(lambda i=iteration, q=queue: save(manager, state_of(rank, i), i, q))
                )
            else:
                save(manager, state_of(rank, iteration), iteration, queue)
            standing.append(_standing(manager)[0])
            assert manager.degraded == (2 if standing[-1].endswith("lack copies") else 0)
            assert not manager.store.is_busy()
            assert not [name for name in files(node_store()) if name.endswith(".dirty")]
            sizes = map(buffer_nbytes, manager.store.image_nbytes.values())
            assert staging_nbytes(manager.store) <= 2 * sum(sizes)
        assert manager.degraded_saves == (0 if strict else 2)
        assert resume(manager, rank, 6) == "own node"
    assert _left_over() == []
    return errors, standing


def test_a_lost_peer_costs_the_copies_and_the_next_save_is_whole(node_dirs: Dirs) -> None:
    told = run_ranks(_lose_a_peer_now_and_then, 2, False, store_per_node=node_dirs(2))

    expected = [*_whole(1), *_lacking(2), *_whole(3, 4), *_lacking(5), *_whole(6)]
    assert told == [([], expected)] * 2


def test_where_copies_are_asked_for_strictly_a_lost_peer_is_an_error_on_all(
    node_dirs: Dirs,
) -> None:
    told = run_ranks(_lose_a_peer_now_and_then, 2, True, store_per_node=node_dirs(2))

    # What stands after a failed save is what stood before.
    assert [standing for _, standing in told] == [_whole(1, 1, 3, 4, 4, 6)] * 2
    assert told[0][0] == told[1][0]
    assert len(told[0][0]) == 2
    for text, iteration in zip(told[0][0], (2, 5), strict=True):
        assert text.startswith("SaveFailedError: ")
        assert f"the save of iteration {iteration} failed" in text
        assert "was lost" in text or "connections broke" in text


def _come_too_late(rank: int, world_size: int) -> tuple[list[str], int]:
    given_up, handler = threading.Event(), logging.Handler()
    handler.emit = lambda _: given_up.set()  # type: ignore[method-assign]
    logging.getLogger("localckpt.managers.copies").addHandler(handler)
    with cliques(1, 2) as repl, in_job(repl) as (manager, queue):
        save(manager, state_of(rank, 0), 0)
        repl.timeout_s = 0.5
        if rank == 1:
            await_announced("zero has given up")
        _begin(manager, queue, rank, 1)
        if rank == 0:
            assert given_up.wait(MAX_S)
            announce("zero has given up")
        queue.maybe_finalize_async_calls(blocking=True)
        told = _standing(manager)[:1]
        repl.timeout_s = MAX_S
        _begin(manager, queue, rank, 2)
        queue.maybe_finalize_async_calls(blocking=True)
        return told + _standing(manager)[:1], manager.degraded_saves


def test_a_peer_that_comes_after_the_deadline_costs_the_copies_of_that_save(
    node_dirs: Dirs,
) -> None:
    told = run_ranks(_come_too_late, 2, store_per_node=node_dirs(2))

    assert told == [([*_lacking(1), *_whole(2)], 1)] * 2


def _fail_without_collecting(rank: int, world_size: int, strict: bool) -> list[bool]:
    """Which states are still alive right after their saves."""
    states, repl = [], _breaking(1)
    # After the first failure there are no connections any more.
    repl.unreachable = frozenset([2])
    with in_job(repl, strict=strict) as (manager, queue):
        gc.disable()
        for iteration in range(4):
            state = state_of(rank, iteration)
            states.append(weakref.ref(state["model"]["weight"]))
            if iteration == 2:
                repl.timeout_s = 0.5
            with suppress(CheckpointingException):
                save(manager, state, iteration, queue)
            repl.timeout_s = MAX_S
            del state
        assert manager.degraded_saves == (0 if strict else 2)
        # The thread that saved may be about to let go of the last one.
        _await(lambda: states[-1]() is None)
        return [state() is not None for state in states]


@pytest.mark.parametrize("strict", [False, True])
def test_a_replication_that_failed_keeps_no_memory_until_cycles_are_collected(
    strict: bool, node_dirs: Dirs
) -> None:
    alive = run_ranks(_fail_without_collecting, 2, strict, store_per_node=node_dirs(2))

    assert alive == [[False] * 4] * 2


# What is kept.


def _save_degraded(rank: int, world_size: int) -> list[list[int]]:
    kept = []
    with in_job(_breaking(2, 3, 4, 5), keep_last=2) as (manager, queue):
        for iteration in range(6):
            save(manager, state_of(rank, iteration), iteration, queue if iteration % 2 else None)
            kept.append(sorted(iterations_on(node_store())))
            # One more of each shard is there, to be overwritten by the next save.
            shards = [n for n in files(node_store()) if f"/{rank}/" in n]
            assert len(shards) <= 2 * (2 + 2)
    return kept


def _go_on_whole(rank: int, world_size: int) -> list[list[str]]:
    with in_job(keep_last=2) as (manager, _):
        assert manager.find_latest() == 5
        found = _standing(manager)
        assert manager.degraded == 2
        # Nothing is loaded, which would have its copies made again.
        manager.save(state_of(rank, 6), 6)
        return [found, _standing(manager)]


@pytest.mark.fault("lost-nodes")
def test_what_survives_a_lost_node_is_kept_until_something_newer_does(node_dirs: Dirs) -> None:
    stores = node_dirs(2)

    kept = run_ranks(_save_degraded, 2, store_per_node=stores)

    assert kept == [[[0], [0, 1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5]]] * 2

    # One node is lost: what was spared is what there is.
    rest = node_dirs(2)
    shutil.copytree(stores[1], rest[1], dirs_exist_ok=True)
    sources = run_ranks(_resume, 2, "disk", 1, store_per_node=rest)
    assert sources == ["peer rank 1", "own node"]

    # None is lost: the newest, though it lacks copies.
    told = run_ranks(_go_on_whole, 2, store_per_node=stores)
    assert told == [[[*_lacking(5, 4), *_whole(1)], [*_whole(6), *_lacking(5)]]] * 2


# Ends.


def _leave_one_save_apart(rank: int, world_size: int, with_queue: bool) -> float:
    took_s = 0.0
    with cliques(1, 2, _LONG_S) as repl:
        manager = make_manager("disk", node_store(), "job", repl, timeout=_LONG_S)
        queue = localckpt.AsyncCallsQueue(timeout_s=_LONG_S)
        save(manager, state_of(rank, 0), 0, queue)
        if rank == 1:
            await_announced("zero has left")
        with pytest.raises(ValueError, match="the training failed"), manager:  # noqa: PT012
            if rank == 1:
                queue.close()
                raise ValueError("the training failed")
            request = manager.save(state_of(rank, 1), 1, is_async=True)
            began = time.monotonic()
            if not with_queue:
                queue.close()
                raise ValueError("the training failed")
            with queue:
                queue.schedule_async_request(request)
                raise ValueError("the training failed")
        if rank == 0:
            took_s = time.monotonic() - began
            announce("zero has left")
        # The strategy is open, and keeps the thread of its decisions.
        _await(lambda: set(our_threads()) <= {"localckpt-ranks"})
        # Rank 0 was one save ahead, which no later one must suffer from.
        with make_manager("disk", node_store(), "job", repl, timeout=MAX_S) as manager:
            assert resume(manager, rank, 0) == "own node"
            for iteration in (2, 3):
                save(manager, state_of(rank, iteration), iteration)
            assert (manager.degraded, manager.degraded_saves) == (0, 0)
    assert our_threads() == []
    return took_s


@pytest.mark.fault("interrupted")
@pytest.mark.parametrize("with_queue", [False, True])
def test_an_error_of_the_training_is_not_held_up_by_a_peer_that_does_not_come(
    with_queue: bool, node_dirs: Dirs
) -> None:
    stores = node_dirs(2)

    took_s, _ = run_ranks(_leave_one_save_apart, 2, with_queue, store_per_node=stores)

    assert took_s < _QUICK_S


def _close_with_saves_under_way(rank: int, world_size: int, closes: bool) -> None:
    timeout_s = 4.0
    repl = cliques(1, 2, timeout_s)
    manager = make_manager("disk", node_store(), "job", repl, timeout=timeout_s)
    queue = localckpt.AsyncCallsQueue(timeout_s=2 * timeout_s)
    save(manager, state_of(rank, 0), 0, queue)
    if rank == 1:
        manager.close()
        repl.close()
        return
    # The other one does not come. Of these one is carried out, and one by nobody.
    _begin(manager, queue, rank, 1)
    manager.save(state_of(rank, 2), 2, is_async=True)
    if closes:
        manager.close()
        repl.close()
        queue.close(abort=True)
        assert our_threads() == []
        assert _left_over() == []


@pytest.mark.fault("interrupted")
@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_well_with_saves_under_way_closed_or_not(
    closes: bool, node_dirs: Dirs
) -> None:
    # A rank that ends by a signal, or not in time, fails this.
    stores = node_dirs(2)
    run_ranks(_close_with_saves_under_way, 2, closes, store_per_node=stores)

    assert run_ranks(_resume, 2, "disk", 0, store_per_node=stores) == ["own node"] * 2


# What can be chosen, and who can use it.


def _in_the_foreground(rank: int, world_size: int) -> list[bool]:
    """Whether the copies of a save are made when it returns."""
    told = []
    for number, options in enumerate(({"background": False}, {})):
        with in_job(keep_last=1, **options) as (manager, queue):
            # A manager's first save waits for all ranks.
            save(manager, state_of(rank, 2 * number), 2 * number)
            if rank == 1 and number == 1:
                await_announced("zero has returned")
            newest = 2 * number + 1
            request = manager.save(state_of(rank, newest), newest, is_async=True)
            told.append(manager.last_save.replicate_s is not None)
            if rank == 0 and number == 1:
                announce("zero has returned")
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            assert resume(manager, rank, newest) == "own node"
            assert _standing(manager) == _whole(newest)
    return told


def test_copies_are_made_before_save_returns_where_that_is_asked_for(node_dirs: Dirs) -> None:
    told = run_ranks(_in_the_foreground, 2, store_per_node=node_dirs(2))

    assert told[0] == [True, False]
