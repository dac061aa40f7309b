"""Replicas are made while training goes on: nobody waits for a peer; a lost one costs copies."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import pytest

import localckpt
from localckpt import SaveFailedError
from localckpt.replication.redundancy import Lacking
from localckpt.storage.buffers import buffer_nbytes
from localckpt.waiting import wait_until
from tests.managers.jobs import (
    MAX_S,
    cliques,
    files,
    in_job,
    iterations_on,
    make_manager,
    our_threads,
    resume,
    save,
    state_of,
)
from tests.ranks import announce, await_announced, node_store, on_ranks, run_ranks, start_ranks
from tests.scenarios import Begin
from tests.staging import staging_nbytes


def _standing(manager: Any) -> list[str]:
    return [str(durability) for durability in manager.status()]


def _whole(*iterations: int) -> list[str]:
    return [f"iteration {number} is replicated, 2 of 2" for number in iterations]


def _lacking(*iterations: int) -> list[str]:
    return [f"iteration {i} is local, 1 of 2: 2 shards lack copies" for i in iterations]


def _begin(manager: Any, queue: localckpt.AsyncCallsQueue, rank: int, iteration: int) -> None:
    state = state_of(rank, iteration)
    queue.schedule_async_request(manager.save(state, iteration, is_async=True))
    for tensor in state["model"].values():
        tensor.zero_()


def _left_over() -> list[str]:
    return [name for name in files(node_store()) if name.endswith((".dirty", ".recycled"))]


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


def test_saves_go_on_while_a_peer_is_stopped_and_are_whole_once_it_goes_on(job: Begin) -> None:
    running = job(nodes=2, redundancy=(1, 2))

    with start_ranks(_save_while_a_peer_is_stopped, 2, store_per_node=running.nodes) as group:
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
    running.restart(on=[1, 0]).expect(2).run()


class _Breaking(localckpt.CliqueReplicationStrategy):
    """Its connections break on rank 1 when 2 and 5 are to be sent, and cannot be made for 6."""

    repairs = False

    def lacking(self, checkpoint: Any, inventory: Any) -> Lacking:
        return super().lacking(checkpoint, inventory) if self.repairs else Lacking({})

    def _host_transport(self, announced: Any, timeout_s: float) -> Any:
        iteration = announced[0].id_.iteration if self._world().rank == 1 else None
        # After the failure before there are no connections any more.
        if iteration == 6 and not self.repairs:
            raise localckpt.PeerLostError("rank 1 has no network")
        transport = super()._host_transport(announced, timeout_s)
        if iteration in (2, 5) and not self.repairs:
            transport.abort()
        return transport


@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2, nodes=2)
def test_a_lost_peer_costs_the_copies_until_it_is_back_or_if_strict_the_save(
    rank: int, strict: bool
) -> None:
    errors, standing = [], []
    repl: Any = _Breaking.from_replication_params(1, 2, timeout_s=MAX_S)
    with in_job(repl, strict=strict, keep_last=99) as (manager, calls):
        # An error that was handled keeps no state until cycles are collected.
        gc.disable()
        save(manager, state_of(rank, 0), 0)
        for iteration in range(1, 8):
            state = state_of(rank, iteration)
            weight = weakref.ref(state["model"]["weight"])
            repl.timeout_s = 0.5 if iteration == 6 else MAX_S
            try:
                save(manager, state, iteration, calls if iteration > 3 else None)
            except SaveFailedError as error:
                errors.append(str(error))
            del state
            # The thread that saved may be about to let go of it.
            assert wait_until(lambda weight=weight: weight() is None, MAX_S)
            standing.append(_standing(manager)[0])
            assert manager.degraded == (2 if standing[-1].endswith("lack copies") else 0)
            assert not manager.store.is_busy()
            assert not [name for name in files(node_store()) if name.endswith(".dirty")]
            sizes = map(buffer_nbytes, manager.store.image_nbytes.values())
            assert staging_nbytes(manager.store) <= 2 * sum(sizes)
        assert manager.degraded_saves == (0 if strict else 3)
        assert resume(manager, rank, 7) == "own node"
        # A next save finds what was not copied, and it is copied.
        repl.repairs = True
        for iteration in range(8, 16):
            save(manager, state_of(rank, iteration), iteration)
        saved = sorted(iterations_on(node_store()), reverse=True)
        assert wait_until(lambda: _standing(manager) == _whole(*saved), MAX_S)
    assert _left_over() == []
    if not strict:
        expected = [*_whole(1), *_lacking(2), *_whole(3, 4), *_lacking(5, 6), *_whole(7)]
        assert (errors, standing) == ([], expected)
        return
    # What stands after a failed save is what stood before.
    assert standing == _whole(1, 1, 3, 4, 4, 4, 7)
    assert len(errors) == 3
    for text, iteration in zip(errors, (2, 5, 6), strict=True):
        assert f"the save of iteration {iteration} failed" in text


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
def test_a_process_ends_well_with_saves_under_way_closed_or_not(closes: bool, job: Begin) -> None:
    running = job(nodes=2, redundancy=(1, 2))
    # A rank that ends by a signal, or not in time, fails this.
    run_ranks(_close_with_saves_under_way, 2, closes, store_per_node=running.nodes)

    running.expect(0).run()


@on_ranks(2, nodes=2)
def test_saves_that_find_all_buffers_busy_on_one_rank_are_skipped_on_all_and_say_so(
    rank: int,
) -> None:
    # Two buffers, and saves that nobody carries out on rank 1 until all have been tried.
    told: list[Any] = []
    with in_job(on_busy="skip", keep_last=9) as (manager, queue):
        requests = []
        for iteration in (1, 2, 3, 4):
            requests.append(manager.save(state_of(rank, iteration), iteration, is_async=True))
            if rank != 1:
                queue.schedule_async_request(requests[-1])
            told.append((manager.last_save.skipped, manager.last_save.iteration))
        told.append(manager.skipped_saves)
        if rank == 1:
            for request in requests:
                queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        # Nothing of the saves that found no room was counted as saved.
        save(manager, state_of(rank, 3), 3, queue)
        assert resume(manager, rank, 3) == "own node"
        assert iterations_on(node_store()) == {1, 2, 3}
        assert (manager.degraded, manager.degraded_saves) == (0, 0)
    assert told == [(False, 1), (False, 2), (True, 3), (True, 4), 2]
