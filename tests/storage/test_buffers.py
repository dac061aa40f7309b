"""Staging memory: aligned, reserved, used again, given back, and seen by the process it goes to."""

from __future__ import annotations

import pickle
import threading
import time

import psutil
import pytest

from localckpt.errors import CheckpointingException, StorageError
from localckpt.memory.host_memory import address_of
from localckpt.storage.buffers import BufferPool, PrivateBuffer
from tests.storage.shards import PATIENCE_S

MIB = 1 << 20


def test_a_private_buffer_begins_on_a_huge_page_and_is_all_zero() -> None:
    for nbytes in (0, 1, 2 * MIB, 2 * MIB + 1, 9 * MIB):
        buffer = PrivateBuffer(nbytes)

        assert address_of(buffer.view) % (2 * MIB) == 0
        assert len(buffer.view) >= max(nbytes, 1)
        assert len(buffer.view) % (2 * MIB) == 0
        assert not buffer.view.readonly
        assert not any(buffer.view[:4096])
        buffer.close()


def test_a_slice_of_a_closed_buffer_stays_good() -> None:
    buffer = PrivateBuffer(MIB)
    piece = buffer.view[100:104]
    piece[:] = b"kept"

    buffer.close()

    assert bytes(piece) == b"kept"
    assert len(buffer.view) == 0


def test_a_private_buffer_cannot_be_sent_and_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="run it in a thread"):
        pickle.dumps(PrivateBuffer(1))


def test_a_pool_has_at_most_as_many_buffers_as_saves_under_way() -> None:
    pool = BufferPool(PrivateBuffer, depth=2)

    buffers = [pool.take(0, 1000, 1.0) for _ in range(2)]
    other = pool.take("another purpose", 1000, 1.0)

    assert len({id(buffer) for buffer in (*buffers, other)}) == 3
    assert pool.nbytes == 3 * len(other.view)
    pool.close()
    assert pool.nbytes == 0


def test_a_pool_waits_for_an_older_save(caplog: pytest.LogCaptureFixture) -> None:
    pool = BufferPool(PrivateBuffer, depth=1)
    first = pool.take(0, 1000, 1.0)
    timer = threading.Timer(0.2, first.give_back)
    timer.start()
    started = time.monotonic()

    with caplog.at_level("INFO"):
        second = pool.take(0, 1000, 10.0)

    timer.join()
    assert second is first
    assert 0.1 < time.monotonic() - started < 5
    assert "waiting for an older save" in caplog.text
    pool.close()


def test_a_pool_whose_buffers_stay_busy_gives_up_in_time_and_says_why() -> None:
    pool = BufferPool(PrivateBuffer, depth=2)
    for _ in range(2):
        pool.take(0, 1000, 1.0)
    started = time.monotonic()

    with pytest.raises(CheckpointingException, match=r"the saves before .* after 0\.1 s"):
        pool.take(0, 1000, 0.1)

    assert time.monotonic() - started < 5
    pool.close()


def test_a_pool_grows_a_buffer_that_is_too_small_without_keeping_both() -> None:
    process = psutil.Process()
    pool = BufferPool(PrivateBuffer)
    pool.take(0, 64 * MIB, 1.0).give_back()
    before = process.memory_info().rss

    larger = pool.take(0, 96 * MIB, 1.0)

    assert len(larger.view) >= 96 * MIB
    assert pool.nbytes == len(larger.view)
    assert process.memory_info().rss - before < 50 * MIB
    pool.close()


def test_more_than_there_is_memory_for_is_an_error_before_it_is_touched() -> None:
    pool = BufferPool(PrivateBuffer)

    with pytest.raises(StorageError, match="no memory for a staging buffer"):
        pool.take(0, psutil.virtual_memory().total * 2, 1.0)

    pool.close()


def test_what_is_prepared_is_there_for_as_many_saves_as_can_be_under_way() -> None:
    pool = BufferPool(PrivateBuffer, depth=3)

    pool.prepare(0, 1000)
    before = pool.nbytes
    taken = [pool.take(0, 1000, PATIENCE_S) for _ in range(3)]

    assert len({id(buffer) for buffer in taken}) == 3
    assert pool.nbytes == before == 3 * len(taken[0].view)
    assert pool.is_busy(0)
    assert not pool.is_busy("another purpose")
    taken[1].give_back()
    assert not pool.is_busy(0)
    pool.close()
    assert pool.nbytes == 0


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


def test_the_owner_determines_whether_a_buffer_was_taken_again() -> None:
    pool = BufferPool(PrivateBuffer, depth=1)
    buffer = pool.take(0, 1000, 1.0, owner="a save")
    buffer.give_back()

    again = pool.take(0, 1000, 1.0, owner="the next save")

    assert again is buffer
    assert again.owner == "the next save"
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


def test_a_buffer_that_was_offered_is_not_used_while_somebody_reads_it() -> None:
    pool, offered = BufferPool(PrivateBuffer), PrivateBuffer(1 << 20)
    offered.readers.add("a load")
    pool.offer(offered)

    taken = pool.take("shards", 1 << 20, PATIENCE_S)

    assert taken is not offered
    pool.close()
