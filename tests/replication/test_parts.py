"""Messages of parts: filled and sent, taken apart, and refused where they are forged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localckpt.errors import CorruptShardError
from localckpt.replication.parts import HEAD, MESSAGE_NBYTES, Outlet, SentPart, take_apart
from localckpt.state_dict.boxes import whole
from localckpt.state_dict.resharded import FilledPart, WantedTensor, require_full


def _filled(size: int) -> tuple[torch.Tensor, FilledPart]:
    tensor = torch.zeros(size)
    wanted = WantedTensor("w", (size,), whole((size,)), tensor)
    return tensor, FilledPart([wanted], whole((size,)))


class _Messages:
    """Messages to a rank that takes them only when they are waited for, or never."""

    def __init__(self, part: FilledPart | None) -> None:
        self._part = part
        self.lengths: list[int] = []
        self.most_under_way = self._under_way = 0

    def send(self, peer: int, number: int, memory: memoryview) -> tuple[int, memoryview]:
        if number == 0:
            self.lengths.append(int.from_bytes(memory, "little"))
        else:
            assert len(memory) == self.lengths[-1]
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
        return number, memory

    def await_taken(self, message: tuple[int, memoryview]) -> None:
        number, memory = message
        if self._part is None:
            raise ConnectionError(f"message {len(self.lengths)} was not taken")
        if number == 1:
            self._under_way -= 1
            take_apart(0, memory, lambda *_: self._part)  # type: ignore[arg-type, return-value]


def _outlet(messages: Any) -> Outlet:
    return Outlet(1, messages)


def test_parts_are_taken_where_they_belong() -> None:
    # More than all messages of a pair of ranks have room for at a time.
    size = 8 * MESSAGE_NBYTES // 4
    values = torch.arange(float(size))
    tensor, part = _filled(size)
    messages = _Messages(part)
    outlet = _outlet(messages)

    sent = SentPart(outlet, 0, 0)
    sent.take(400, values[100 : size // 2])
    sent.take(0, values[:100])
    sent.take(size * 2, values.view(2, -1)[1])
    outlet.end()
    outlet.await_taken()

    require_full([part])
    assert torch.equal(tensor, values)
    assert messages.lengths[-1] == 0
    assert messages.most_under_way == 2


def test_every_thread_that_waits_for_a_lost_rank_hears_what_became_of_it() -> None:
    outlet = _outlet(_Messages(None))
    values = torch.zeros(MESSAGE_NBYTES // 4 // 2)
    part = SentPart(outlet, 0, 0)
    for _ in range(2):
        part.take(0, values)
    outlet.end()

    told = []
    for _ in range(3):
        with pytest.raises(ConnectionError) as caught:
            outlet.await_taken()
        told.append(str(caught.value))

    assert len(set(told)) == 1


@pytest.mark.parametrize("head", [HEAD.pack(0, 0, 3999, 4), HEAD.pack(0, 0, 0, 1 << 40)])
def test_a_part_that_reaches_out_of_its_tensor_is_refused(head: bytes) -> None:
    tensor, part = _filled(1000)

    with pytest.raises(CorruptShardError):
        take_apart(0, memoryview(bytearray(head + b"\xff" * 4)), lambda *_: part)

    assert not tensor.any()
