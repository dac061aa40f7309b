"""Staging memory: aligned, reserved, used again, given back, and seen by the process it goes to."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from localckpt.errors import CheckpointingException, StorageError
from localckpt.memory.host_memory import address_of
from localckpt.storage.buffers import BufferPool, PrivateBuffer
from localckpt.storage.write import write_shard
from localckpt.waiting import wait_until
from tests.storage.conftest import Node
from tests.storage.shards import PATIENCE_S, assert_loads, identity, save, staged


def test_a_private_buffer_cannot_be_sent_and_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="run it in a thread"):
        pickle.dumps(PrivateBuffer(1))


def test_a_pool_has_as_many_buffers_as_saves_under_way_waits_for_one_and_gives_up_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = BufferPool(PrivateBuffer, depth=2)

    buffers = [pool.take(0, 1000, 1.0) for _ in range(2)]
    other = pool.take("another purpose", 1000, 1.0)

    assert len({id(buffer) for buffer in (*buffers, other)}) == 3
    assert pool.nbytes == 3 * len(other.view)
    started = time.monotonic()
    with pytest.raises(CheckpointingException, match=r"the saves before .* after 0\.1 s"):
        pool.take(0, 1000, 0.1)
    assert time.monotonic() - started < 5
    timer = threading.Timer(0.2, buffers[0].give_back)
    timer.start()
    started = time.monotonic()
    with caplog.at_level("INFO"):
        assert pool.take(0, 1000, 10.0) is buffers[0]
    timer.join()
    assert 0.1 < time.monotonic() - started < 5
    assert "waiting for an older save" in caplog.text
    pool.close()
    assert pool.nbytes == 0


def test_more_than_there_is_memory_for_is_an_error_before_it_is_touched() -> None:
    pool = BufferPool(PrivateBuffer)

    with pytest.raises(StorageError, match="no memory for a staging buffer"):
        pool.take(0, psutil.virtual_memory().total * 2, 1.0)

    pool.close()


def test_a_save_does_with_the_buffers_that_could_be_made(caplog: pytest.LogCaptureFixture) -> None:
    def only_one(nbytes: int) -> PrivateBuffer:
        if pool.nbytes:
            raise MemoryError("no more")
        return PrivateBuffer(nbytes)

    pool = BufferPool(only_one, depth=2)
    pool.prepare(0, 1000)

    first = pool.take(0, 1000, PATIENCE_S)
    threading.Timer(0.1, first.give_back).start()
    second = pool.take(0, 1000, PATIENCE_S)

    assert second is first
    assert "saves do with 1 staging buffers" in caplog.text
    pool.close()


def test_what_an_owner_took_without_coming_to_know_it_is_released_and_not_given_again() -> None:
    pool = BufferPool(PrivateBuffer, depth=2)
    of_another = pool.take(0, 1000, 1.0, owner="another save")
    interrupted = pool.take(0, 1000, 1.0, owner="a save that was interrupted")
    assert pool.is_busy(0)

    pool.release("a save that was interrupted")

    assert not pool.is_busy(0)
    assert of_another.in_use
    assert pool.take(0, 1000, 1.0, owner="the next save") not in (of_another, interrupted)
    interrupted.give_back()
    pool.close()


_NBYTES = 32 << 20
_PAGES = _NBYTES // resource.getpagesize()


def _in_a_fork(call: Callable[[], None]) -> None:
    """Call in a fork, and raise here if it raises there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # What other tests have left of torch's objects cannot be destructed in a fork.
            gc.disable()
            call()
            code = 0
        except BaseException as error:  # noqa: BLE001 - shown by pytest, with the output
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextmanager
def _living_fork() -> Iterator[int]:
    go, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done)
        os.read(go, 1)
        os._exit(0)
    os.close(go)
    try:
        yield pid
    finally:
        os.close(done)
        os.waitpid(pid, 0)


def _mapped_ranges(pid: int) -> list[range]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    borders = [line.split()[0].split("-") for line in lines]
    return [range(int(start, 16), int(stop, 16)) for start, stop in borders]


def test_a_fork_has_none_of_it_and_writing_on_costs_no_copies() -> None:
    buffer = PrivateBuffer(_NBYTES)
    buffer.view[:] = bytes(len(buffer.view))
    address = address_of(buffer.view)
    assert any(address in mapped for mapped in _mapped_ranges(os.getpid()))

    with _living_fork() as pid:
        assert not any(address in mapped for mapped in _mapped_ranges(pid))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ones = bytes([1]) * (1 << 20)
        for start in range(0, _NBYTES, 1 << 20):
            buffer.view[start : start + (1 << 20)] = ones
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert faults < _PAGES / 4
    buffer.close()


def test_a_fork_that_closes_a_store_or_drops_it_takes_nothing_away(node: Node) -> None:
    store = node()
    save(store, identity(1))
    job = staged(store, identity(2))

    before = set(node.root.rglob("*"))
    _in_a_fork(store.close)
    _in_a_fork(lambda: store.__dict__.clear() or (gc.collect() and None))

    # The store makes memory for later saves meanwhile.
    assert before <= set(node.root.rglob("*"))
    write_shard(job)
    assert store.holds(identity(2))
    assert_loads(store, identity(2))


def test_stores_that_are_dropped_without_close_leave_no_memory_and_no_descriptors(
    node: Node,
) -> None:
    stores = [node(rank) for rank in range(5)]
    descriptors = len(os.listdir("/proc/self/fd"))
    for store in stores:
        save(store, identity(1, store.rank), 1_000_000)

    node.stores.clear()  # type: ignore[attr-defined]
    stores.clear()
    del store

    def is_gone() -> bool:
        gc.collect()
        # A thread that makes the buffer of the next save ends with this one, and frees it. It opens
        # files of /proc to look how much memory there is.
        is_preparing = any(thread.name == "localckpt-prepare" for thread in threading.enumerate())
        return not is_preparing and len(os.listdir("/proc/self/fd")) <= descriptors

    assert wait_until(is_gone, 30.0)
