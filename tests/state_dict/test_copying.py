"""Copies in several threads end before the memory that they use goes, also when interrupted."""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from localckpt.errors import CheckpointingException
from localckpt.memory.copying import BlockCopies, Copier
from localckpt.memory.gpu_copies import CopiesUnderWay
from localckpt.memory.host_memory import address_of
from tests.interrupts import Interrupter
from tests.ranks import run_ranks

_NBYTES = 8 << 20


def _copy_once(copier: Copier) -> None:
    """Copy between mappings that go as soon as nobody refers to them."""
    source, target = (memoryview(mmap.mmap(-1, _NBYTES)) for _ in range(2))
    # Few are small, which the calling thread copies alone.
    count = 100
    step = _NBYTES // count
    runs = [(i * step, step) for i in range(count)]
    sources = [address_of(source[offset:]) for offset, _ in runs]
    BlockCopies(runs).copy(target, 0, sources, copier, keep=source)


def _interrupt_copies(rank: int, world_size: int, rounds: int, again_s: float) -> int:
    interrupter = Interrupter(5, again_s)
    for _ in range(rounds):
        copier = Copier(4)
        interrupter.call("copy", lambda c=copier: _copy_once(c))
        # It can be used again.
        _copy_once(copier)
    return interrupter.interrupts


@pytest.mark.fault("interrupted")
@pytest.mark.parametrize("again_s", [0.0, 0.002], ids=["once", "again and again"])
def test_copies_that_are_interrupted_at_any_moment_use_no_memory_that_is_gone(
    again_s: float,
) -> None:
    (interrupts,) = run_ranks(_interrupt_copies, 1, 30, again_s, init_group=False)

    assert interrupts > 5


def test_an_interrupt_ends_the_other_threads_before_it_is_raised() -> None:
    copier = Copier(3)
    working: set[int] = set()
    done: list[int] = []

    def work(left: Iterator[int]) -> None:
        for piece in left:
            working.add(threading.get_ident())
            time.sleep(0.02)
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            done.append(piece)
            working.discard(threading.get_ident())

    with pytest.raises(KeyboardInterrupt):
        copier.share(range(1000), work)
    at_once = len(done)
    time.sleep(0.1)

    assert len(done) == at_once < 10
    assert working <= {threading.get_ident()}


class Event:
    """What happens after so many questions, as on a GPU that takes its time."""

    def __init__(self, questions: float) -> None:
        self._left = questions

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize("questions", [10, float("inf")], ids=["over", "hangs"])
def test_a_wait_for_gpus_returns_when_all_copies_are_over_or_is_an_error_in_time(
    questions: float,
) -> None:
    events = {torch.device("cuda", n): Event(n * questions if n else 0) for n in range(3)}
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    copies = CopiesUnderWay([tensor], events, timeout_s=20.0 if questions == 10 else 0.1)
    del tensor
    began = time.monotonic()

    if questions == 10:
        copies.wait()
    else:
        with pytest.raises(CheckpointingException, match=r"not finished copying .* after 0\.1 s"):
            copies.wait()

    assert time.monotonic() - began < 10.0
    assert copies.over == (kept() is None) == (questions == 10)
