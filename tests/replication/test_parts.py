"""Parcels of parts: both ranks divide the same way, and what is sent fills the same elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.replication import parts
from localckpt.replication.parts import PackedPart, exchange_parts, parcels_of
from localckpt.state_dict.boxes import Region, volume, whole

_SMALL = 256


@pytest.fixture(autouse=True)
def _small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARCEL_NBYTES", _SMALL)


_shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@given(st.lists(st.tuples(_shapes, st.sampled_from([1, 2, 4, 8, 16])), max_size=9))
def test_parcels_have_all_elements_each_once_and_are_of_bounded_size(
    tensors: list[tuple[tuple[int, ...], int]],
) -> None:
    regions: list[Region] = [whole(shape) for shape, _ in tensors]
    wanted = [(n, regions[n], size) for n, (_, size) in enumerate(tensors)]

    parcels = parcels_of(wanted)

    found = [0] * len(tensors)
    for parcel in parcels:
        assert 0 < parcel.nbytes <= _SMALL
        end = 0
        for part in parcel:
            assert end <= part.offset
            assert part.offset % 16 == 0
            assert part.nbytes == volume(part.region) * tensors[part.item][1]
            end = part.offset + part.nbytes
            found[part.item] += volume(part.region)
    assert found == [volume(region) for region in regions]


class _Mirror:
    """Transport of which every rank sends what it receives itself."""

    broken = False

    def __init__(self) -> None:
        self.rounds = 0

    def exchange(self, sends: Any, receives: Any, timeout_s: float) -> None:
        self.rounds += 1
        for (peer, source), (sender, view) in zip(sends, receives, strict=True):
            assert peer == sender
            view[:] = source.read(0, source.nbytes)

    def abort(self) -> None: ...

    def close(self) -> None: ...


def test_what_is_read_on_one_side_is_taken_on_the_other() -> None:
    values = {peer: torch.arange(peer * 1000.0, peer * 1000 + count) for peer, count in _COUNTS}
    taken = {peer: torch.zeros(len(of_peer)) for peer, of_peer in values.items()}
    parcels = {peer: parcels_of([(3, whole(v.shape), 4)]) for peer, v in values.items()}
    transport = _Mirror()

    def rows(part: PackedPart) -> slice:
        ((start, count),) = part.region[0]
        return slice(start, start + count)

    def read(to: Any) -> None:
        for peer, (parcel, memory) in to.items():
            for part in parcel:
                data = values[peer][rows(part)].numpy().tobytes()
                memory[part.offset : part.offset + part.nbytes] = data

    def take(part: PackedPart, peer: int, data: torch.Tensor) -> None:
        taken[peer][rows(part)] = data.view(torch.float32)

    exchange_parts(transport, parcels, parcels, read, take, 9.0)

    for peer, of_peer in values.items():
        assert torch.equal(taken[peer], of_peer)
    assert transport.rounds == max(map(len, parcels.values()))


_COUNTS = (1, 10), (2, 1000)
