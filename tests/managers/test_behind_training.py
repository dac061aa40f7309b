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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt import (
    CheckpointingException,
    CliqueReplicationStrategy,
    PeerLostError,
    SaveFailedError,
    StorageError,
)
from localckpt.ids import Generation, ShardIdentity
from localckpt.managers import capture
from localckpt.options import Options
from localckpt.replication.redundancy import Lacking
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.image import Capture, Written
from localckpt.storage.buffers import buffer_nbytes
from localckpt.storage.directory import DirectoryStore
from tests.managers.jobs import (
    KINDS,
    MAX_S,
    assert_same,
    cliques,
    context_of,
    error_of,
    files,
    iterations_on,
    make_manager,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.managers.own_managers import DictManager, TroubledDictManager
from tests.ranks import DeadRank, announce, await_announced, node_store, run_ranks, start_ranks
from tests.staging import staging_nbytes

Dirs = Callable[[int], list[Path]]

# The deadline of a wait that must not be waited for, and what then counts as quick, in seconds.
_LONG_S, _QUICK_S = 60.0, 20.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nodes(kind: str, node_dirs: Dirs, shm_roots: Dirs) -> Callable[[int], list[Path]]:
    return node_dirs if kind == "disk" else shm_roots


def _standing(manager: Any) -> list[str]:
    return [str(durability) for durability in manager.status()]


def _spoil(value: Any) -> None:
    """Change every tensor in place."""
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, dict):
        for inner in value.values():
            _spoil(inner)


def _begin(manager: Any, queue: localckpt.AsyncCallsQueue, rank: int, iteration: int) -> None:
    """Save behind training, and train on."""
    state = state_of(rank, iteration)
    queue.schedule_async_request(manager.save(state, iteration, is_async=True))
    _spoil(state)


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _own_is_kept(rank: int, iteration: int) -> bool:
    return any(node_store().rglob(f"{iteration:012d}.{rank}.*.safetensors"))


def _left_over() -> list[str]:
    return [name for name in files(node_store()) if name.endswith((".dirty", ".recycled"))]


def _resume(rank: int, world_size: int, kind: str, iteration: int) -> str:
    """Start anew; where the shard came from."""
    with cliques(1, 2) as repl, make_manager(kind, node_store(), "job", repl) as manager:
        return resume(manager, rank, iteration)


# A peer that is late.


def _save_while_a_peer_is_stopped(rank: int, world_size: int, kind: str) -> list[list[str]]:
    told = []
    with (
        cliques(1, 2) as repl,
        make_manager(kind, node_store(), "job", repl) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
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


def test_saves_go_on_while_a_peer_is_stopped_and_are_whole_once_it_goes_on(
    kind: str, nodes: Dirs
) -> None:
    stores = nodes(2)

    with start_ranks(_save_while_a_peer_is_stopped, 2, kind, store_per_node=stores) as group:
        group.await_announced("one has begun")
        group.kill(1, signal.SIGSTOP)
        group.announce("one is stopped")
        group.await_announced("zero has saved")
        group.kill(1, signal.SIGCONT)
        told = group.join()

    captured = [f"iteration {iteration} is captured, 0 of 2" for iteration in (2, 1)]
    before = "iteration 0 is replicated, 2 of 2"
    kept = 2 if kind == "disk" else 1
    whole = [f"iteration {number} is replicated, 2 of 2" for number in (2, 1)][:kept]
    assert told == [[[captured[1], before], [*captured, before], whole], [whole]]
    # On the other node a rank finds what its peer got, whose tensors were changed at once.
    assert run_ranks(_resume, 2, kind, 2, store_per_node=stores[::-1]) == ["own node"] * 2


def _save_more_than_there_are_buffers(
    rank: int, world_size: int, kind: str, num_buffers: int
) -> list[str]:
    options = {"num_buffers": num_buffers, "keep_last": 9}
    with (
        cliques(1, 2) as repl,
        make_manager(kind, node_store(), "job", repl, **options) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        save(manager, state_of(rank, 0), 0, queue)
        if rank == 1:
            await_announced("zero has written")
        for iteration in range(1, num_buffers + 3):
            if rank == 0 and iteration == num_buffers + 1:
                # This node is done with it, and the peer has not begun to get it.
                _await(lambda: _own_is_kept(0, 1))
                announce("zero has written")
            _begin(manager, queue, rank, iteration)
        queue.maybe_finalize_async_calls(blocking=True)
        return _standing(manager)


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_an_image_that_is_being_sent_is_not_overwritten_by_a_later_save(
    kind: str, num_buffers: int, nodes: Dirs
) -> None:
    stores = nodes(2)

    told = run_ranks(_save_more_than_there_are_buffers, 2, kind, num_buffers, store_per_node=stores)

    newest = num_buffers + 2
    assert (
        told
        == [[f"iteration {number} is replicated, 2 of 2" for number in range(newest, -1, -1)]] * 2
    )
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


def _schedule_in_any_order(rank: int, world_size: int, kind: str) -> list[str]:
    """The ranks run what ``save`` returned at other times; one request nobody runs."""
    with (
        cliques(1, 3) as repl,
        make_manager(kind, node_store(), "job", repl, num_buffers=4, keep_last=9) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
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


def test_whoever_runs_a_save_and_when_peers_get_the_same_one(kind: str, nodes: Dirs) -> None:
    stores = nodes(3)

    told = run_ranks(_schedule_in_any_order, 3, kind, store_per_node=stores)

    assert (
        told
        == [
            [
                "iteration 2 is captured, 0 of 3",
                *(f"iteration {number} is replicated, 3 of 3" for number in (5, 4, 3, 1)),
            ]
        ]
        * 3
    )
    moved = stores[1:] + stores[:1]
    assert run_ranks(_resume, 3, kind, 5, store_per_node=moved) == ["own node"] * 3


def _save_to_two_managers(rank: int, world_size: int, memory: list[Path]) -> list[int]:
    with (
        cliques(1, 2) as repl,
        make_manager("disk", node_store(), "job", repl, background=True) as on_disk,
        make_manager("memory", memory[rank], "job", repl) as in_memory,
        make_manager("disk", node_store(), "at once", repl, background=False) as at_once,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
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


class _Breaking(CliqueReplicationStrategy):
    """Its connections break on rank 1 when these iterations are to be sent, or cannot be made."""

    breaking: frozenset[int] = frozenset()
    unreachable: frozenset[int] = frozenset()

    def _host_transport(self, announced: Any, timeout_s: float) -> Any:
        iteration = announced[0].id_.iteration if self._world().rank == 1 else None
        if iteration in self.unreachable:
            raise PeerLostError("rank 1 has no network")
        transport = super()._host_transport(announced, timeout_s)
        if iteration in self.breaking:
            transport.abort()
        return transport

    def lacking(self, checkpoint: Any, inventory: Any) -> Lacking:
        """Find nothing: copies that are made later, beside training, have tests of their own."""
        return Lacking({})


@contextmanager
def _breaking(*iterations: int) -> Iterator[_Breaking]:
    with _Breaking.from_replication_params(1, 2, timeout_s=MAX_S) as made:
        made.breaking = frozenset(iterations)
        yield made


def _lose_a_peer_now_and_then(
    rank: int, world_size: int, kind: str, strict: bool
) -> tuple[list[str], list[str]]:
    errors, standing = [], []
    options = {"strict": strict, "keep_last": 2}
    with (
        _breaking(2, 5) as repl,
        make_manager(kind, node_store(), "job", repl, **options) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as calls,
    ):
        save(manager, state_of(rank, 0), 0)
        for iteration in range(1, 7):
            queue = calls if iteration > 3 else None
            if strict and iteration in repl.breaking:
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
            assert staging_nbytes(manager.store) <= (2 if kind == "disk" else 4) * sum(sizes)
        assert manager.degraded_saves == (0 if strict else 2)
        assert resume(manager, rank, 6) == "own node"
    assert _left_over() == []
    return errors, standing


def test_a_lost_peer_costs_the_copies_and_the_next_save_is_whole(kind: str, nodes: Dirs) -> None:
    told = run_ranks(_lose_a_peer_now_and_then, 2, kind, False, store_per_node=nodes(2))

    whole = "iteration {} is replicated, 2 of 2"
    lacking = "iteration {} is local, 1 of 2: 2 shards lack copies"
    expected = [(lacking if i in (2, 5) else whole).format(i) for i in range(1, 7)]
    assert told == [([], expected)] * 2


def test_where_copies_are_asked_for_strictly_a_lost_peer_is_an_error_on_all(
    kind: str, nodes: Dirs
) -> None:
    told = run_ranks(_lose_a_peer_now_and_then, 2, kind, True, store_per_node=nodes(2))

    # What stands after a failed save is what stood before.
    expected = [f"iteration {i} is replicated, 2 of 2" for i in (1, 1, 3, 4, 4, 6)]
    assert [standing for _, standing in told] == [expected] * 2
    assert told[0][0] == told[1][0]
    assert len(told[0][0]) == 2
    for text, iteration in zip(told[0][0], (2, 5), strict=True):
        assert text.startswith("SaveFailedError: ")
        assert f"the save of iteration {iteration} failed" in text
        assert "was lost" in text or "connections broke" in text


def _come_too_late(rank: int, world_size: int) -> tuple[list[str], int]:
    given_up = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            given_up.set()

    logging.getLogger("localckpt.managers.copies").addHandler(Listener())
    with (
        CliqueReplicationStrategy.from_replication_params(1, 2) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
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
        repl.timeout_s = None
        _begin(manager, queue, rank, 2)
        queue.maybe_finalize_async_calls(blocking=True)
        return told + _standing(manager)[:1], manager.degraded_saves


def test_a_peer_that_comes_after_the_deadline_costs_the_copies_of_that_save(
    node_dirs: Dirs,
) -> None:
    told = run_ranks(_come_too_late, 2, store_per_node=node_dirs(2))

    lacking = "iteration 1 is local, 1 of 2: 2 shards lack copies"
    assert told == [([lacking, "iteration 2 is replicated, 2 of 2"], 1)] * 2


def _fail_before_a_late_peer_comes(rank: int, world_size: int) -> str:
    given_up = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            given_up.set()

    logging.getLogger("localckpt.managers.copies").addHandler(Listener())
    with (
        CliqueReplicationStrategy.from_replication_params(1, 2) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        # A manager's first save waits for all ranks.
        save(manager, state_of(rank, 0), 0)
        repl.timeout_s = 0.5
        if rank == 1:
            await_announced("zero has given up")
        else:

            def stage(*_: Any, **__: Any) -> Any:
                raise StorageError("no memory is left")

            manager._saves.capture.capture = stage
        _begin(manager, queue, rank, 1)
        if rank == 0:
            assert given_up.wait(MAX_S)
            announce("zero has given up")
        return error_of(lambda: queue.maybe_finalize_async_calls(blocking=True), SaveFailedError)


def test_the_first_thing_that_went_wrong_is_what_all_ranks_raise(node_dirs: Dirs) -> None:
    told = run_ranks(_fail_before_a_late_peer_comes, 2, store_per_node=node_dirs(2))

    assert told[0] == told[1]
    assert "rank 0: StorageError: no memory is left" in told[0]


def _fail_without_collecting(rank: int, world_size: int, strict: bool) -> list[bool]:
    """Which states are still alive right after their saves."""
    states = []
    with (
        _breaking(1, 2) as repl,
        make_manager("disk", node_store(), "job", repl, strict=strict) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        # After the first failure there are no connections any more.
        repl.breaking, repl.unreachable = frozenset([1]), frozenset([2])
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


def _save_degraded(rank: int, world_size: int, kind: str, keep_last: int) -> list[list[int]]:
    kept = []
    with (
        _breaking(2, 3, 4, 5) as repl,
        make_manager(kind, node_store(), "job", repl, keep_last=keep_last) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        for iteration in range(6):
            save(manager, state_of(rank, iteration), iteration, queue if iteration % 2 else None)
            kept.append(sorted(iterations_on(node_store())))
            # One more of each shard is there, to be overwritten by the next save.
            shards = [n for n in files(node_store()) if f"/{rank}/" in n]
            assert len(shards) <= 2 * (keep_last + 2)
    return kept


def _go_on_whole(rank: int, world_size: int, kind: str, keep_last: int) -> list[list[str]]:
    with (
        cliques(1, 2) as repl,
        make_manager(kind, node_store(), "job", repl, keep_last=keep_last) as manager,
    ):
        assert manager.find_latest() == 5
        found = _standing(manager)
        assert manager.degraded == 2
        # Nothing is loaded, which would have its copies made again.
        manager.save(state_of(rank, 6), 6)
        return [found, _standing(manager)]


@pytest.mark.fault("lost-nodes")
@pytest.mark.parametrize("keep_last", [1, 2])
def test_what_survives_a_lost_node_is_kept_until_something_newer_does(
    kind: str, keep_last: int, nodes: Dirs
) -> None:
    stores = nodes(2)

    kept = run_ranks(_save_degraded, 2, kind, keep_last, store_per_node=stores)

    degraded = [[1, *range(max(2, i + 1 - keep_last), i + 1)] for i in range(2, 6)]
    assert kept == [[[0], [0, 1][-keep_last:], *degraded]] * 2

    # One node is lost: what was spared is what there is.
    rest = nodes(2)
    for node, copy in zip(stores, rest, strict=True):
        shutil.copytree(node, copy, dirs_exist_ok=True)
    shutil.rmtree(rest[0])
    rest[0].mkdir()
    sources = run_ranks(_resume, 2, kind, 1, store_per_node=rest)
    assert sources == ["peer rank 1", "own node"]

    # None is lost: the newest, though it lacks copies.
    told = run_ranks(_go_on_whole, 2, kind, keep_last, store_per_node=stores)
    lacking = [
        f"iteration {i} is local, 1 of 2: 2 shards lack copies" for i in range(5, 5 - keep_last, -1)
    ]
    spared = "iteration 1 is replicated, 2 of 2"
    whole = "iteration 6 is replicated, 2 of 2"
    assert told == [[[*lacking, spared], [whole, *lacking][:keep_last]]] * 2


def _save_once(rank: int, world_size: int, kind: str) -> None:
    with cliques(1, 2) as repl, make_manager(kind, node_store(), "job", repl) as manager:
        manager.save(state_of(rank, 0), 0)


def _save_without_looking(rank: int, world_size: int, kind: str) -> list[list[int]]:
    kept = []
    with (
        _breaking(1, 2) as repl,
        make_manager(kind, node_store(), "job", repl, keep_last=1) as manager,
    ):
        for iteration in (1, 2, 3):
            manager.save(state_of(rank, iteration), iteration)
            kept.append(sorted(iterations_on(node_store())))
    return kept


@pytest.mark.fault("lost-nodes")
def test_who_never_looked_keeps_what_an_earlier_attempt_left_until_something_survives(
    kind: str, nodes: Dirs
) -> None:
    stores = nodes(2)
    run_ranks(_save_once, 2, kind, store_per_node=stores)

    kept = run_ranks(_save_without_looking, 2, kind, store_per_node=stores)

    assert kept == [[[0, 1], [0, 2], [3]]] * 2


# Ends.


def _leave_one_save_apart(rank: int, world_size: int, with_queue: bool) -> float:
    took_s = 0.0
    with cliques(1, 2, _LONG_S) as repl:
        options = {"timeout": _LONG_S}
        manager = make_manager("disk", node_store(), "job", repl, **options)
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
        until = time.monotonic() + MAX_S
        while not set(our_threads()) <= {"localckpt-ranks"} and time.monotonic() < until:
            time.sleep(0.01)
        assert set(our_threads()) <= {"localckpt-ranks"}
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


def _give_up_a_queue_and_go_on(rank: int, world_size: int) -> int:
    with (
        cliques(1, 2, _LONG_S) as repl,
        make_manager("disk", node_store(), "job", repl, timeout=_LONG_S) as manager,
    ):
        queue = localckpt.AsyncCallsQueue(timeout_s=_LONG_S)
        save(manager, state_of(rank, 0), 0, queue)
        if rank == 1:
            await_announced("zero has given up")
        _begin(manager, queue, rank, 1)
        queue.close(abort=True)
        if rank == 0:
            announce("zero has given up")
        with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as another:
            save(manager, state_of(rank, 2), 2, another)
        assert iterations_on(node_store()) == {0, 2}
        return int(manager.degraded)


def test_saves_after_a_queue_that_was_given_up_are_whole(node_dirs: Dirs) -> None:
    assert run_ranks(_give_up_a_queue_and_go_on, 2, store_per_node=node_dirs(2)) == [0, 0]


def _close_with_saves_under_way(rank: int, world_size: int, closes: bool) -> None:
    timeout_s = 4.0
    repl = cliques(1, 2, timeout_s)
    options = {"timeout": timeout_s}
    manager = make_manager("disk", node_store(), "job", repl, **options)
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


def _fork_meanwhile(rank: int, world_size: int) -> list[int]:
    with (
        cliques(1, 2) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        save(manager, state_of(rank, 0), 0)
        if rank == 1:
            await_announced("zero has forked")
        _begin(manager, queue, rank, 1)
        status = 0
        if rank == 0:
            child = os.fork()
            if child == 0:
                # As a loader of training data, which closes what it has and does not use.
                manager.close()
                repl.close()
                os._exit(0)
            announce("zero has forked")
            _, status = os.waitpid(child, 0)
        queue.maybe_finalize_async_calls(blocking=True)
        assert resume(manager, rank, 1) == "own node"
        return [status, manager.degraded]


def test_a_fork_that_closes_everything_takes_nothing_from_a_replication(node_dirs: Dirs) -> None:
    assert run_ranks(_fork_meanwhile, 2, store_per_node=node_dirs(2)) == [[0, 0]] * 2


def _die_while_sending(rank: int, world_size: int) -> tuple[str, list[str]]:
    repl = cliques(1, 2, timeout_s=2.0)
    manager = make_manager("disk", node_store(), "job", repl, timeout=2.0)
    queue = localckpt.AsyncCallsQueue(timeout_s=2.0)
    save(manager, state_of(rank, 0), 0, queue)
    _begin(manager, queue, rank, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
    queue.close(abort=True)
    manager.close()
    repl.close()
    return lost, our_threads()


@pytest.mark.fault("silent-peer")
def test_a_peer_that_dies_meanwhile_is_an_error_in_time(node_dirs: Dirs) -> None:
    stores = node_dirs(2)

    (lost, threads), dead = run_ranks(_die_while_sending, 2, expect_dead=[1], store_per_node=stores)

    assert isinstance(dead, DeadRank)
    assert "rank 1" in lost
    assert threads == []
    for source in run_ranks(_resume_either, 2, store_per_node=stores):
        assert source == "own node"


class _Hesitating(CliqueReplicationStrategy):
    """Waits until a word comes from the other rank before a step of the replication."""

    before = ""

    def _announce(self, *args: Any, **options: Any) -> Any:
        return self._at("announce", super()._announce, *args, **options)

    def _host_transport(self, *args: Any, **options: Any) -> Any:
        return self._at("connect", super()._host_transport, *args, **options)

    def _exchange(self, *args: Any, **options: Any) -> None:
        self._at("exchange", super()._exchange, *args, **options)

    def _at(self, step: str, go_on: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if step == self.before:
            await_announced("told")
        return go_on(*args, **options)


def _hesitate(rank: int, world_size: int, before: str) -> str:
    repl = _Hesitating.from_replication_params(1, 2, timeout_s=1.5)
    manager = make_manager("disk", node_store(), "job", repl, timeout=MAX_S)
    queue = localckpt.AsyncCallsQueue(timeout_s=1.0)
    if before == "exchange":
        # The connections that the exchange is to use.
        manager.save(state_of(rank, 0), 0)
    repl.before = before if rank == 1 else ""
    _begin(manager, queue, rank, 1)
    told = ""
    if rank == 0:
        told = error_of(
            lambda: queue.maybe_finalize_async_calls(blocking=True, no_dist=True), PeerLostError
        )
        announce("told")
    await_announced("told")
    queue.close(abort=True)
    manager.close()
    repl.close()
    return told


@pytest.mark.rows(1)
@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("announce", "rank 1 to announce iteration 1 for replication"),
        ("connect", "rank 1 to connect"),
        ("exchange", "rank 1 (0 of "),
    ],
)
def test_a_queue_that_waits_less_than_the_replication_says_for_whom_it_was(
    before: str, says: str, node_dirs: Dirs
) -> None:
    told, _ = run_ranks(_hesitate, 2, before, store_per_node=node_dirs(2))

    assert "was not over after a wait of 0.7 s" in told
    assert f"rank 0 was replicating iteration 1, and waited for {says}" in told


def _resume_either(rank: int, world_size: int) -> str:
    with cliques(1, 2) as repl, make_manager("disk", node_store(), "job", repl) as manager:
        return resume(manager, rank, manager.find_latest())


# What can be chosen, and who can use it.


def _in_the_foreground(rank: int, world_size: int) -> list[bool]:
    """Whether the copies of a save are made when it returns."""
    told = []
    for number, options in enumerate(
        (
            {"background": False},
            {"background": True},
            {},
        )
    ):
        with (
            cliques(1, 2) as repl,
            make_manager(
                "disk", node_store(), f"job {number}", repl, keep_last=1, **options
            ) as manager,
            localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
        ):
            # A manager's first save waits for all ranks.
            save(manager, state_of(rank, 0), 0)
            if rank == 1 and number >= 1:
                await_announced(f"zero has returned {number}")
            request = manager.save(state_of(rank, 1), 1, is_async=True)
            told.append(manager.last_save.replicate_s is not None)
            if rank == 0 and number >= 1:
                announce(f"zero has returned {number}")
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            assert resume(manager, rank, 1) == "own node"
            assert _standing(manager) == ["iteration 1 is replicated, 2 of 2"]
    return told


def test_copies_are_made_before_save_returns_where_that_is_asked_for(node_dirs: Dirs) -> None:
    told = run_ranks(_in_the_foreground, 2, store_per_node=node_dirs(2))

    assert told[0] == [True, False, False]


def _save_by_hooks(rank: int, world_size: int, background: bool) -> list[str]:
    with (
        _breaking(2) as repl,
        TroubledDictManager(
            {}, session_id="job", repl_strategy=repl, timeout=MAX_S, background=background
        ) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        told = []
        for iteration in (1, 2, 3):
            _begin(manager, queue, rank, iteration)
            queue.maybe_finalize_async_calls(blocking=True)
            told.append(_standing(manager)[0])
        replica = manager.kept[localckpt.CkptID(3, 1 - rank, "job")]
        assert_same(replica.state_dict, state_of(1 - rank, 3))
        manager.trouble = "raises for the replica" if rank == 1 else None
        _begin(manager, queue, rank, 4)
        told.append(error_of(lambda: queue.maybe_finalize_async_calls(blocking=True)))
        manager.trouble = None
        assert manager.find_latest() == 3
        assert_same(manager.load()[0], state_of(rank, 3))
        assert manager.store.slots == []
        assert (manager.degraded, manager.degraded_saves) == (0, 1)
        return told


@pytest.mark.parametrize("background", [False, True])
def test_managers_of_five_hooks_replicate_either_way(background: bool) -> None:
    told = run_ranks(_save_by_hooks, 2, background)

    assert told[0] == told[1]
    assert told[0][:3] == [
        "iteration 1 is replicated, 2 of 2",
        "iteration 2 is local, 1 of 2: 2 shards lack copies",
        "iteration 3 is replicated, 2 of 2",
    ]
    assert "no place for it" in told[0][3]
    assert "rank 1" in told[0][3]


class _NoRoom(CliqueReplicationStrategy):
    """Rank 1 cannot make room for what comes."""

    def replicate_image(self, source: Any, ckpt_id: Any, accept: Any, **options: Any) -> Any:
        def refuse(peer: localckpt.CkptID, nbytes: int) -> memoryview:
            accept(peer, nbytes)
            raise localckpt.StorageError("there is no room")

        refuses = self._world().rank == 1 and ckpt_id.iteration == 1
        return super().replicate_image(source, ckpt_id, refuse if refuses else accept, **options)


def _fail_to_make_room(rank: int, world_size: int) -> str:
    kept: dict[localckpt.CkptID, Any] = {}
    with (
        _NoRoom.from_replication_params(1, 2, timeout_s=MAX_S) as repl,
        DictManager(kept, session_id="job", repl_strategy=repl, timeout=MAX_S) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        _begin(manager, queue, rank, 1)
        told = error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        assert manager.store.slots == []
        save(manager, state_of(rank, 2), 2, queue)
        assert (manager.degraded, manager.find_latest()) == (0, 2)
    return told


def test_a_node_without_room_fails_the_save_on_all_ranks_and_gives_back_the_room() -> None:
    told = run_ranks(_fail_to_make_room, 2)

    assert told[0] == told[1]
    assert "there is no room" in told[0]


# Nodes with unequal numbers of ranks.


def _save_on_uneven_nodes(rank: int, world_size: int) -> list[str]:
    with (
        CliqueReplicationStrategy.from_replication_params(timeout_s=MAX_S) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        for iteration in (1, 2):
            _begin(manager, queue, rank, iteration)
        queue.maybe_finalize_async_calls(blocking=True)
        return _standing(manager)


def _restart_on_uneven_nodes(rank: int, world_size: int) -> list[str]:
    with (
        CliqueReplicationStrategy.from_replication_params(timeout_s=MAX_S) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
    ):
        resume(manager, rank, 2)
        _await(lambda: manager.degraded == 0)
        return _standing(manager)[:1]


@pytest.mark.fault("lost-nodes")
def test_uneven_nodes_are_lost_one_after_the_other_without_a_save_between(
    node_dirs: Dirs,
) -> None:
    # Two ranks on the one, and one on the other.
    stores = node_dirs(2)

    told = run_ranks(_save_on_uneven_nodes, 3, store_per_node=stores)

    whole = [f"iteration {number} is replicated, 2 of 2" for number in (2, 1)]
    assert told == [whole] * 3
    for lost in (0, 1, 0):
        shutil.rmtree(stores[lost])
        stores[lost].mkdir()
        told = run_ranks(_restart_on_uneven_nodes, 3, store_per_node=stores)
        assert told == [whole[:1]] * 3
