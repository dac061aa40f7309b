"""Runs of an image's bytes go straight where they belong, unless several want the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.regions import Region, whole
from localckpt.state_dict.resharded import FilledPart, Filling, WantedTensor
from localckpt.state_dict.runs import PartReceiver, Reservation, Run, Runs, run_in
from localckpt.state_dict.source import PIECE_NBYTES

_NBYTES = 2 * PIECE_NBYTES + 1000


class _Channel:
    """Memory of one rank, which is filled when all that was reserved together is done."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reserved: list[int] = []

    def reserve(self, runs: Sequence[tuple[PartReceiver, int, int]]) -> Reservation:
        self.reserved.append(len(runs))
        memory = [memoryview(bytearray(nbytes)) for _, _, nbytes in runs]

        def done() -> None:
            for (part, offset, _), data in zip(runs, memory, strict=True):
                assert isinstance(part, _Part)
                part.got.append((offset, bytes(data)))

        return Reservation(memory, done)


class _Part:
    def __init__(self, channel: _Channel, *, is_direct: bool = True) -> None:
        self.channel = channel
        self.got: list[tuple[int, bytes]] = []
        self.copied: list[tuple[int, bytes]] = []
        self._is_direct = is_direct

    def takes_direct(self, nbytes: int) -> bool:
        return self._is_direct and nbytes > 0

    def take_run(self, offset: int, data: memoryview) -> None:
        self.copied.append((offset, bytes(data)))

    def take_cut(self, first: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        raise AssertionError("a run is no rectangle")

    def bytes(self) -> bytes:
        """All that it has got, in order; nothing twice, and nothing lacking between."""
        joined = b""
        for offset, data in sorted(self.got + self.copied):
            assert offset == len(joined)
            joined += data
        return joined


def _stream(runs: Runs, image: bytes) -> None:
    for start in sorted(runs.pieces):
        stop = min(start + PIECE_NBYTES, len(image))
        scratch = memoryview(bytearray(stop - start))
        parts, dones = runs.places(start, stop, scratch)
        done = start
        for part in parts:
            part[:] = image[done : done + len(part)]
            done += len(part)
        assert done == stop
        for call in dones:
            call()
        runs.copy(start, scratch)


_IMAGE = torch.arange(-(-_NBYTES // 4), dtype=torch.int32).numpy().tobytes()[:_NBYTES]


@given(
    st.lists(
        st.tuples(
            st.integers(0, _NBYTES), st.integers(0, _NBYTES), st.integers(0, 2), st.booleans()
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_each_receiver_gets_the_bytes_of_its_run_once(
    wanted: list[tuple[int, int, int, bool]], has_span: bool
) -> None:
    channels = [_Channel(rank) for rank in range(3)]
    runs = [
        Run(min(a, b), max(a, b), _Part(channels[rank], is_direct=is_direct))
        for a, b, rank, is_direct in wanted
    ]

    _stream(Runs(runs, [(5, PIECE_NBYTES + 5)] if has_span else []), _IMAGE)

    for start, stop, part in runs:
        assert isinstance(part, _Part)
        assert part.bytes() == _IMAGE[start:stop]


def test_runs_that_share_no_byte_are_not_copied_and_all_others_are() -> None:
    channel = _Channel(0)
    alone, first, second, beside = (_Part(channel) for _ in range(4))
    runs = [Run(0, 100, alone), Run(100, 300, first), Run(299, 400, second), Run(500, 600, beside)]

    _stream(Runs(runs, [(599, 700)]), _IMAGE)

    assert alone.got == [(0, _IMAGE[:100])]
    assert not alone.copied
    assert [part.got for part in (first, second, beside)] == [[], [], []]


def test_a_piece_reserves_memory_of_a_rank_once_and_in_the_order_of_the_ranks() -> None:
    order: list[int] = []

    class Noting(_Channel):
        def reserve(self, runs: Sequence[tuple[PartReceiver, int, int]]) -> Reservation:
            order.append(self.rank)
            return super().reserve(runs)

    channels = [Noting(rank) for rank in (2, 0, 1)]
    runs = [
        Run(100 * number, 100 * number + 50, _Part(channels[number % 3])) for number in range(12)
    ]

    _stream(Runs(runs), _IMAGE)

    # A thread that waits for memory of a rank holds none that an earlier one waits for.
    assert order == [0, 1, 2]
    assert [channel.reserved for channel in channels] == [[4]] * 3


_SAVED: Region = (((2, 4),), ((0, 3),))


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        pytest.param(_SAVED, (0, 4), id="all"),
        pytest.param((((3, 2),), ((0, 3),)), (1, 2), id="rows"),
        pytest.param((((3, 2),), ((0, 2),)), None, id="not all columns"),
        pytest.param((((2, 1), (4, 1)), ((0, 3),)), None, id="rows apart"),
    ],
)
def test_rows_are_a_run(part: Region, rows: tuple[int, int] | None) -> None:
    assert run_in(_SAVED, part) == rows


def test_a_tensor_without_a_dimension_and_one_whose_rows_lie_apart_are_runs_as_a_whole() -> None:
    apart: Region = (((0, 2), (5, 3)), ((1, 1), (4, 2)))

    assert run_in((), ()) == (0, 1)
    assert run_in(apart, apart) == (0, 5)
    assert run_in(apart, (((0, 2),), apart[1])) is None


def _flat(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int16)


def _turned(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape[::-1], dtype=torch.int16).permute(*range(len(shape))[::-1])


@pytest.mark.parametrize("make", [_flat, _turned])
@pytest.mark.parametrize("count", [1, 2])
@given(data=st.data())
def test_a_run_fills_the_part_of_every_tensor_however_it_is_cut(
    make: Callable[[tuple[int, ...]], torch.Tensor], count: int, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    first = data.draw(st.integers(0, shape[0] - 1))
    rows = data.draw(st.integers(1, shape[0] - first))
    region: Region = (((first, rows),), *whole(shape)[1:])
    tensors = [make(shape) for _ in range(count)]
    wanted = [WantedTensor("w", shape, whole(shape), tensor) for tensor in tensors]
    size = rows * torch.Size(shape[1:]).numel()
    filling = Filling(0, [(one, size) for one in wanted])
    part = FilledPart(filling, wanted, region)
    values = torch.arange(1, size + 1, dtype=torch.int16)
    borders = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})

    for begin, end in pairwise(borders):
        piece = bytearray(values[begin:end].view(torch.uint8).numpy().tobytes())
        if count == 1 and make is _flat:
            reservation = filling.reserve([(part, 2 * begin, 2 * (end - begin))])
            reservation.memory[0][:] = piece
            reservation.done()
        else:
            part.take_run(2 * begin, memoryview(piece))

    filling.require_full()
    expected = torch.zeros(shape, dtype=torch.int16)
    expected[first : first + rows] = values.view(rows, *shape[1:])
    assert part.takes_direct(2) == (count == 1 and tensors[0].is_contiguous())
    for tensor in tensors:
        for index in product(*map(range, shape)):
            assert tensor[index] == expected[index]


def test_bytes_outside_of_a_part_are_refused() -> None:
    wanted = WantedTensor("w", (4,), ((((0, 4),)),), torch.zeros(4))
    part = FilledPart(Filling(0, [(wanted, 2)]), [wanted], ((((0, 2),)),))

    for offset, nbytes in ((0, 12), (8, 4), (2, 4)):
        with pytest.raises(ValueError, match="are no items of 'w'"):
            part.take_run(offset, memoryview(bytearray(nbytes)))

    assert not wanted.tensor.any()
