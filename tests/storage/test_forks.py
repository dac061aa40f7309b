"""Forks of a trainer have no staging memory, cost it none, and take nothing away from it."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localckpt.errors import CheckpointingException
from localckpt.memory.host_memory import address_of
from localckpt.storage.buffers import Buffer, PrivateBuffer
from localckpt.storage.write import write_shard
from tests.storage.conftest import Node
from tests.storage.shards import assert_loads, identity, save, staged

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


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    made = PrivateBuffer(_NBYTES)
    yield made
    made.close()


def _mapped_ranges(pid: int) -> list[range]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    borders = [line.split()[0].split("-") for line in lines]
    return [range(int(start, 16), int(stop, 16)) for start, stop in borders]


def test_a_fork_has_none_of_it_and_writing_on_costs_no_copies(buffer: Buffer) -> None:
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


def test_a_fork_raises_that_private_memory_is_not_its_own() -> None:
    buffer = PrivateBuffer(_NBYTES)

    def look() -> None:
        with pytest.raises(CheckpointingException, match="run it in a thread"):
            buffer.view  # noqa: B018 - the property raises

    _in_a_fork(look)
    buffer.close()


def test_what_a_fork_drops_unmaps_nothing_of_its_own() -> None:
    kept = [PrivateBuffer(_NBYTES)]

    def drop() -> None:
        # It is given the hole that the buffer has left.
        others = [bytearray(_NBYTES) for _ in range(4)]
        kept.clear()
        for other in others:
            other[:] = bytes(_NBYTES)

    _in_a_fork(drop)


def test_a_fork_that_closes_a_store_or_drops_it_takes_nothing_away(node: Node) -> None:
    store = node()
    save(store, identity(1))
    job = staged(store, identity(2))

    def close() -> None:
        store.close()

    before = set(node.root.rglob("*"))
    _in_a_fork(close)
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

    # A thread that makes the buffer of the save after this one ends with it, and frees it.
    deadline = time.monotonic() + 30
    while _is_left(descriptors) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def _is_left(descriptors: int) -> bool:
    gc.collect()
    # Such a thread opens files of /proc to look how much memory there is.
    is_preparing = any(thread.name == "localckpt-prepare" for thread in threading.enumerate())
    return is_preparing or len(os.listdir("/proc/self/fd")) > descriptors
