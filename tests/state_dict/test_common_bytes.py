"""An image that comes without what its keeper has in common with its owner is complete there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localckpt.errors import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.replication.in_common import InCommon
from localckpt.state_dict import common_bytes as common
from localckpt.state_dict.common_bytes import CommonBytes, Remaining, common_bytes, complete
from localckpt.state_dict.global_view import Job
from localckpt.state_dict.image import ImagePlanner, pack
from localckpt.state_dict.replicated import Replicated
from localckpt.state_dict.source import MemorySource

_WORLD_SIZE = 6


def _image(state: Any, rank: int) -> memoryview:
    identity = ShardIdentity("run", Generation(1, 1), 3, rank, _WORLD_SIZE)
    planner = ImagePlanner(job=Job(rank, range(_WORLD_SIZE)))
    return pack(state, identity, planner).view


def _send(sender: memoryview, receiver: memoryview) -> tuple[memoryview, int]:
    """Bring an image to a rank that has another; the image there, and how many bytes came."""
    theirs, mine = common_bytes(sender), common_bytes(receiver)
    to_receiver = InCommon(sender, theirs, {name: g.digest for name, g in mine.items()})
    from_sender = InCommon(receiver, mine, {name: g.digest for name, g in theirs.items()})
    source = to_receiver.outgoing(MemorySource(sender))
    arrived = memoryview(bytearray(b"\xa5" * len(sender)))
    room = from_sender.room(arrived)
    assert len(room) == source.nbytes
    for start in range(0, source.nbytes, 1000):
        stop = min(start + 1000, source.nbytes)
        room[start:stop] = source.read(start, stop)
    from_sender.complete(arrived)
    return arrived, source.nbytes


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tensors(seed: int, sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"t{number}": _normal(seed + number, size) for number, size in enumerate(sizes)}


@st.composite
def _states(draw: st.DrawFn) -> tuple[Any, Any, int]:
    """States of ranks 0 and 3 that have parts in common, and how many bytes those are."""
    in_all = draw(st.lists(st.integers(0, 400), max_size=4))
    in_both = draw(st.lists(st.integers(0, 400), max_size=4))
    states: list[dict[str, Any]] = []
    for rank in (0, 3):
        own = draw(st.lists(st.integers(0, 400), max_size=4))
        parts: list[tuple[str, Any]] = [
            ("all", Replicated(_tensors(0, in_all), range(_WORLD_SIZE))),
            ("both", Replicated(_tensors(9, in_both), (0, 3))),
            ("own", _tensors(99 + rank, own)),
        ]
        states.append(dict(draw(st.permutations(parts))))
    return (*states, 4 * (sum(in_all) + sum(in_both)))


@settings(deadline=None)
@given(_states())
def test_what_two_ranks_have_in_common_is_not_sent_and_is_there(
    states: tuple[Any, Any, int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "LEAST_NBYTES", 1)
        sender, receiver = _image(states[0], 0), _image(states[1], 3)

        arrived, sent = _send(sender, receiver)

    assert arrived == sender
    assert sent == len(sender) - states[2]


def _marked(weight: torch.Tensor, more: int = 10) -> dict[str, Any]:
    return {"model": Replicated({"weight": weight}, range(6)), "own": _normal(1, more)}


def _with_another_value() -> torch.Tensor:
    weight = _normal(7, 200, 200)
    weight[199, 199] += 1
    return weight


@pytest.mark.parametrize(
    "other",
    [_normal(7, 200, 199), _normal(7, 200, 200).double(), _with_another_value()],
    ids=["of another size", "of another dtype", "with another value"],
)
def test_what_is_called_equal_and_is_not_is_sent(other: torch.Tensor) -> None:
    sender, receiver = _image(_marked(_normal(7, 200, 200)), 0), _image(_marked(other), 3)

    arrived, sent = _send(sender, receiver)

    assert arrived == sender
    assert sent == len(sender)


def test_little_is_not_compared() -> None:
    assert not common_bytes(_image(_marked(_normal(7, common.LEAST_NBYTES // 4 - 1)), 0))
    assert common_bytes(_image(_marked(_normal(7, common.LEAST_NBYTES // 4)), 0))


def test_an_image_that_does_not_say_where_the_parts_belong_is_refused() -> None:
    sender = _image(_marked(_normal(7, 200, 200)), 0)
    mine = _image(_marked(_normal(7, 200, 100)), 3)
    ((name, group),) = common_bytes(mine).items()
    arrived = memoryview(bytearray(len(sender)))
    source = Remaining(MemorySource(sender), [(4096, group.nbytes)])
    arrived[group.nbytes :] = source.read(0, source.nbytes)

    with pytest.raises(CorruptShardError, match="does not say where they belong"):
        complete(arrived, mine, {name: CommonBytes(group.spans, group.digest)})


def test_what_remains_of_an_image_can_be_streamed() -> None:
    image = memoryview(bytearray(range(256)) * 40_000)
    spans = [(0, 5), (3 << 20, 4 << 20), (9_999_999, 1)]
    source = Remaining(MemorySource(image), spans)
    expected = bytearray(image)
    for start, nbytes in reversed(spans):
        del expected[start : start + nbytes]
    found = memoryview(bytearray(source.nbytes))

    source.stream(source.nbytes, lambda start, stop: [found[start:stop]], lambda start, parts: None)

    assert found == expected
