"""Copies from a GPU are waited for, and not for ever."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from localckpt.errors import CheckpointingException
from localckpt.memory.gpu_copies import CopiesUnderWay


class Event:
    """What happens after so many questions, as on a GPU that takes its time."""

    def __init__(self, questions: float) -> None:
        self._left = questions

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_a_wait_returns_when_the_copies_of_all_gpus_are_over() -> None:
    events = {torch.device("cuda", n): Event(10 * n) for n in range(3)}
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    copies = CopiesUnderWay([tensor], events, timeout_s=20.0)
    del tensor
    assert kept() is not None

    copies.wait()

    assert copies.over
    assert kept() is None


def test_a_gpu_that_hangs_is_an_error_in_time_and_its_tensors_stay() -> None:
    events = {torch.device("cuda", 0): Event(0), torch.device("cuda", 1): Event(float("inf"))}
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    copies = CopiesUnderWay([tensor], events, timeout_s=0.1)
    del tensor
    began = time.monotonic()

    with pytest.raises(CheckpointingException, match=r"not finished copying .* after 0\.1 s"):
        copies.wait()

    assert time.monotonic() - began < 10.0
    assert not copies.over
    assert kept() is not None
