"""Replicas are kept where they are not lost with their originals, also by a user's own manager."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import localckpt
from localckpt import MismatchError, SameMachineReplicationException
from tests.checkpointer.survivors import begin
from tests.managers.jobs import (
    MAX_S,
    assert_same,
    cliques,
    error_of,
    files,
    in_job,
    make_manager,
    on_node,
    our_children,
    our_threads,
    resume,
    save,
    state_of,
    troubled,
)
from tests.managers.own_managers import DictManager
from tests.ranks import node_store, on_ranks
from tests.scenarios import Begin


@on_ranks(4, nodes=2)
def test_a_clique_on_one_node_is_refused_with_a_jump_that_works(rank: int) -> None:
    # When the manager is made, not when the first checkpoint is lost.
    with cliques(1, 2) as eager:
        make = partial(make_manager, "disk", node_store(), "job", eager)
        told = [error_of(make, SameMachineReplicationException)]
    # A strategy that is built later says so when it is used first.
    for call in ("find_latest", "save"):
        with in_job(localckpt.LazyCliqueReplicationStrategy(1, 2, timeout_s=MAX_S)) as (manager, _):
            args = (state_of(rank, 1), 1) if call == "save" else ()
            use = partial(getattr(manager, call), *args)
            told.append(error_of(use, SameMachineReplicationException))
            assert manager.last_save is None
    for text in told:
        assert all(
            words in text for words in ("ranks [0, 1]", "ranks [2, 3]", "replication_jump=2")
        )
    assert files(node_store()) == []
    dist.barrier()

    # By default as many as there are ranks on the node, as torchrun tells it.
    with in_job(localckpt.LazyCliqueReplicationStrategy(timeout_s=MAX_S)) as (manager, _):
        manager.save(state_of(rank, 1), 1)
    owners = [name.split(".")[1] for name in files(node_store()) if f"-job/{rank}/" in name]
    assert sorted(owners) == [str(rank % 2), str(rank % 2 + 2)]

    # Groups that were given have to be given anew when the ranks join again.
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    given = localckpt.CliqueReplicationStrategy(localckpt.GroupWrapper(pairs[rank % 2]))
    with in_job(given) as (manager, _):
        manager.save(state_of(rank, 2), 2)
        assert "repl_strategy" in error_of(manager.rejoin, MismatchError)
        manager.rejoin(repl_strategy=localckpt.LazyCliqueReplicationStrategy(2, 2))
        assert manager.find_latest() == 2
    assert "closed" in error_of(manager.rejoin)


@pytest.mark.fault("lost-nodes", "moved-ranks")
def test_uneven_nodes_form_cliques_by_themselves_and_one_may_be_lost(job: Begin) -> None:
    # Five ranks on three nodes: two, two and one.
    running = job(3, ranks=5, redundancy=(None, 2)).save(1).lose(1)

    # With the nodes in another order the ranks are elsewhere, too, and find their shards.
    running.restart(on=[1, 2, 0]).expect(1, None).run()


@pytest.mark.fault("survivors")
@on_ranks(4, nodes=4, init_group=False)
def test_managers_of_survivors_load_what_they_have_in_memory(home: int) -> None:
    # Ranks 0, 1, 2 save; then 1 is gone with its node, and a new process takes its place.
    manager: Any = None
    if home != 3:
        begin(0, [0, 1, 2], home)
        manager = on_node("run", localckpt.ParityReplicationStrategy(1, 3))
        manager.save(state_of(home, 1), 1)
        dist.barrier()
        dist.destroy_process_group()
    if home == 1:
        # As if it was killed: nothing is closed.
        return
    begin(1, [0, 3, 2], home)
    if manager is None:
        manager = on_node("run", localckpt.ParityReplicationStrategy(1, 3))
    else:
        with pytest.raises(MismatchError, match="initialised anew"):
            manager.find_latest()
        manager.rejoin()
    assert resume(manager, manager.rank, 1) == ("parity" if home == 3 else "own memory")
    manager.save(state_of(manager.rank, 2), 2)
    manager.close()
    dist.destroy_process_group()


@on_ranks(2)
def test_two_ranks_with_hooks_replicate_fail_and_recover_together(rank: int) -> None:
    repl = cliques(1, 2)
    options = {"session_id": "job", "repl_strategy": repl, "timeout": MAX_S}
    begin = partial(DictManager, dict[Any, Any](), **options)
    with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        with begin() as manager:
            assert manager.find_latest() == -1
            save(manager, state_of(rank, 1), 1)
            save(manager, state_of(rank, 2), 2, queue)
            owners = {i.rank for i in manager._my_ckpt_ids() if i.iteration == 2}
            assert owners == {0, 1}
        with begin() as manager:
            assert manager.find_latest() == 2
            assert_same(manager.load()[0], state_of(rank, 2))
            assert manager.last_load.source == "own node"
            _fail_on_one_rank(rank, troubled(manager), queue)
        with begin() as manager:
            # Rank 1 comes back with nothing.
            if rank == 1:
                manager._cleanup_failed_save(2)
                manager._cleanup_failed_save(1)
            assert manager.find_latest() == 2
            assert_same(manager.load()[0], state_of(rank, 2))
            assert manager.last_load.source == ("own node", "peer rank 0")[rank]
            save(manager, state_of(rank, 3), 3, queue)
            assert manager.find_latest() == 3
            assert_same(manager.load()[0], state_of(rank, 3))
    repl.close()
    assert our_threads() == []
    assert our_children() == []


def _fail_on_one_rank(rank: int, manager: Any, queue: Any) -> None:
    for trouble in ("raises", "does nothing", "forgets the replica"):
        for how in (None, queue):
            manager.trouble = trouble if rank == 1 else None
            told = error_of(lambda h=how: save(manager, state_of(rank, 5), 5, h))
            assert "rank 1" in told
            assert 5 not in {ckpt_id.iteration for ckpt_id in manager.kept}
    manager.trouble = None
    unpicklable = {"hook": lambda: None} if rank == 0 else {}
    told = error_of(lambda: manager.save(state_of(rank, 5) | unpicklable, 5))
    assert "rank 0" in told
    assert "pickled" in told
    assert manager.find_latest() == 2
