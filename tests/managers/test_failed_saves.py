"""A save that fails on one rank is an exception on all, and changes nothing but that."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt import (
    CheckpointingException,
    PeerLostError,
)
from localckpt.ranks.round import Round
from localckpt.storage.buffers import Buffer
from tests.managers.jobs import (
    MAX_S,
    Dirs,
    before_commit,
    cliques,
    error_of,
    files,
    in_job,
    iterations_on,
    make_manager,
    our_threads,
    resume,
    save,
    state_of,
    troubled,
)
from tests.ranks import (
    announce,
    await_announced,
    init_group_with_store_on,
    node_store,
    on_ranks,
    run_ranks,
    same_on_all,
)
from tests.scenarios import Begin

_SAID = {
    "refuses": "this disk is bad",
    "raises": "a mistake of the user's",
    "does nothing": "does not have it",
    "forgets the replica": "does not have it",
    "cannot be pickled": "cannot be pickled",
    "another iteration": "different iterations: '",
}


_KINDS = {"refuses": "StorageError", "raises": "CheckpointingException"}


def _kept() -> list[str]:
    return [name for name in files(node_store()) if not name.endswith(".recycled")]


@pytest.mark.fault("refused-io", "disagreement")
@pytest.mark.parametrize(("is_async", "replicated"), [(False, False), (True, True)])
@on_ranks(2, nodes=2)
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_the_next_one_is_good(
    rank: int, world_size: int, is_async: bool, replicated: bool
) -> None:
    repl = cliques(1, 2) if replicated else nullcontext()
    with in_job(repl, keep_last=2) as (manager, calls):
        troubled(manager)
        queue = calls if is_async else None
        save(manager, state_of(rank, 0), 0, queue)
        saved = [0]
        for how in _SAID:
            if how == "forgets the replica" and not replicated:
                continue
            for bad_rank in range(world_size):
                failing, kept_before = saved[-1] + 1, _kept()
                state, asked = state_of(rank, failing), failing
                if rank == bad_rank:
                    manager.trouble = how
                    asked += how == "another iteration"
                    if how == "cannot be pickled":
                        state["model"]["hook"] = lambda: None

                text = error_of(lambda i=asked, s=state: save(manager, s, i, queue))

                manager.trouble = None
                if how == "another iteration":
                    assert f"'{failing + 1}' on rank {bad_rank}" in text
                    text = text.replace(f"of iteration {asked} failed", "failed")
                assert f"rank {bad_rank}" in same_on_all(text)
                assert _SAID[how] in text
                assert is_async or "Older checkpoints are as they were; training can go" in text
                assert text.partition(":")[0] == _KINDS.get(how, "SaveFailedError")
                assert _kept() == kept_before
                if bad_rank == 0:
                    assert resume(manager, rank, saved[-1]) == "own node"
                # What failed can be saved again, and so can what comes after it.
                for iteration in (failing, failing + 1):
                    save(manager, state_of(rank, iteration), iteration, queue)
                    saved.append(iteration)
                assert iterations_on(node_store()) == set(saved[-2:])
                assert resume(manager, rank, saved[-1]) == "own node"
    # Nothing that failed counts for those who come after.
    with make_manager("disk", node_store(), "job") as manager:
        assert resume(manager, rank, saved[-1]) == "own node"
    assert our_threads() == []


def _save_on_rank_0_only(manager: Any) -> None:
    if manager.rank == 0:
        manager._context.ranks.timeout_s = 0.5
        error_of(lambda: manager.save(state_of(0, 2), 2), PeerLostError)
        announce("lost")
    await_announced("lost")


@pytest.mark.fault("silent-peer")
def test_a_save_whose_peer_was_lost_leaves_nothing_and_is_not_found(job: Begin) -> None:
    running = job(nodes=2, keep_last=1).save(1).call(_save_on_rank_0_only)
    running.run()

    # The verdict is that the peer is lost, and it cannot get another one when it comes.
    assert [iterations_on(node) for node in running.nodes] == [{1}, {1}]
    running.restart().expect(1).save(3, 4).expect(4).run()
    assert [iterations_on(node) for node in running.nodes] == [{4}, {4}]


def _cut_off_from_the_store(store: dist.TCPStore) -> None:
    """Shut this process's connections to the job's store down, as a network that fails does."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.getpeername()[1:2] == (store.port,):
                connection.shutdown(socket.SHUT_RDWR)


def _miss_the_verdict(rank: int, world_size: int, aborts: bool) -> tuple[str, set[int]]:
    store = init_group_with_store_on(0, rank, world_size)
    manager = make_manager("disk", node_store(), "job", keep_last=1)
    queue = localckpt.AsyncCallsQueue(timeout_s=MAX_S)
    save(manager, state_of(rank, 1), 1, queue)
    request, told = manager.save(state_of(rank, 2), 2, is_async=True), ""
    if rank == 1 and not aborts:
        report = Round.report

        def report_and_be_cut_off(round_: Round, *args: Any, **options: Any) -> None:
            report(round_, *args, **options)
            # The last report of this rank: that it will not pass a certain poll.
            if threading.current_thread() is not threading.main_thread() and round_.number == 3:
                _cut_off_from_the_store(store)

        Round.report = report_and_be_cut_off  # type: ignore[method-assign]
    queue.schedule_async_request(request)
    # From now on the ranks agree, each in a thread.
    queue.maybe_finalize_async_calls()
    poll = lambda: queue.maybe_finalize_async_calls(blocking=True)  # noqa: E731
    if rank == 0:
        poll()
        announce("completed")
        await_announced("missed")
    else:
        if aborts:
            await_announced("completed")
            queue.close(abort=True)
        else:
            told = error_of(poll, PeerLostError)
        announce("missed")
    queue.close()
    manager.close()
    return told, iterations_on(node_store())


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize("aborts", [False, True])
def test_a_save_of_which_one_rank_read_no_verdict_is_whole_if_the_others_completed_it(
    aborts: bool, job: Begin
) -> None:
    running = job(nodes=2)

    (_, kept), (told, left) = run_ranks(
        _miss_the_verdict, 2, aborts, init_group=False, store_per_node=running.nodes
    )

    assert aborts or "key-value store does not answer" in told
    assert (kept, left) == ({2}, {1, 2})
    running.expect(2).run()


@pytest.mark.fault("late-writer")
def test_a_writer_that_comes_late_leaves_nothing_and_does_no_harm(node_dirs: Dirs) -> None:
    root = node_dirs(1)[0]
    manager = make_manager("disk", root, keep_last=5)
    go, written = threading.Event(), list[int]()

    def hold_up_the_first(ckpt_id: localckpt.CkptID) -> None:
        written.append(ckpt_id.iteration)
        if len(written) == 1:
            go.wait(MAX_S)

    before_commit(manager, hold_up_the_first)
    queue = localckpt.AsyncCallsQueue(timeout_s=0.5)
    late = error_of(lambda: save(manager, state_of(0, 1), 1, queue))
    writers = [t for t in threading.enumerate() if "AsyncCaller" in t.name]

    # It gets the buffer's and the file's names back to write to while others are written.
    for iteration in (2, 3):
        save(manager, state_of(0, iteration), iteration)
    go.set()
    for writer in writers:
        writer.join(5.0)
    alive = [writer.name for writer in writers if writer.is_alive()]

    assert "was not over" in late
    assert writers
    assert alive == []
    assert iterations_on(root) == {2, 3}
    assert resume(manager, 0, 3) == "own node"
    queue.close()
    manager.close()
    assert [name for name in files(root) if "000001." in name] == []


_MIB = 1 << 20


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("a mistake of the user's")


# An error that is part of a cycle would keep the variables of all calls that it came through.
@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()

    yield

    gc.enable()


def _fill_up(root: Path) -> None:
    with open(root / "filler", "wb") as filler:
        while True:
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            try:
                os.posix_fallocate(filler.fileno(), 0, max(1, free - _MIB // 2))
            except OSError as error:
                # The manager makes memory for the next save meanwhile.
                if error.errno != errno.ENOSPC:
                    raise
            else:
                return


@pytest.mark.parametrize(
    ("mibs", "more", "is_async"), [(3, {}, True), (1, {"callback": _Unpicklable()}, False)]
)
def test_a_failed_save_keeps_neither_the_state_nor_a_buffer(
    mibs: int,
    more: dict[str, Any],
    is_async: bool,
    small_disk: Callable[[str], Path],
    no_collector: None,
) -> None:
    root = small_disk("size=8m")

    def fail() -> weakref.ref[Any]:
        state = {"weight": torch.ones(mibs * _MIB // 4), **more}
        told = weakref.ref(state["weight"])
        try:
            with localckpt.AsyncCallsQueue() as queue, make_manager("disk", root) as manager:
                manager.save({"weight": torch.ones(_MIB // 4)}, 1)
                _fill_up(root)
                save(manager, state, 2, queue if is_async else None)
        except CheckpointingException:
            return told
        raise AssertionError("it did not fail")

    assert fail()() is None
    assert sum(len(o.view) for o in gc.get_objects() if type(o).__mro__[1:2] == (Buffer,)) == 0
