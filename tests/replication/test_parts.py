"""Parcels of parts: both ranks divide the same way, and what is sent fills the same elements."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt.replication import parts
from localckpt.replication.parts import exchange_parts, parcels_of

_SMALL = 256


@pytest.fixture(autouse=True)
def _small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARCEL_NBYTES", _SMALL)


class _Part(NamedTuple):
    start: int
    nbytes: int


@given(st.lists(st.integers(1, _SMALL), max_size=20))
def test_parcels_have_all_parts_each_once_and_are_of_bounded_size(sizes: list[int]) -> None:
    wanted = [_Part(n, nbytes) for n, nbytes in enumerate(sizes)]

    parcels = parcels_of(wanted)

    assert [part for parcel in parcels for part in parcel] == wanted
    for parcel in parcels:
        assert 0 < sum(-(-part.nbytes // 16) * 16 for part in parcel) <= _SMALL


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
    values = {peer: bytes(range(count)) for peer, count in _COUNTS}
    taken = {peer: bytearray(len(of_peer)) for peer, of_peer in values.items()}
    parts_of = {
        peer: [(peer, _Part(at, min(5, len(v) - at))) for at in range(0, len(v), 5)]
        for peer, v in values.items()
    }
    outgoing = {peer: [_OfPeer(*part) for part in those] for peer, those in parts_of.items()}
    transport = _Mirror()

    def read(to: list[tuple[_OfPeer, memoryview]]) -> None:
        for (peer, part), memory in to:
            memory[:] = values[peer][part.start : part.start + part.nbytes]

    def take(of: _OfPeer, memory: memoryview) -> None:
        peer, part = of
        taken[peer][part.start : part.start + part.nbytes] = memory

    exchange_parts(transport, outgoing, outgoing, read, take, 9.0)

    assert taken == values
    assert transport.rounds == max(len(parcels_of(those)) for those in outgoing.values())


class _OfPeer(NamedTuple):
    peer: int
    part: _Part

    @property
    def nbytes(self) -> int:
        return self.part.nbytes


_COUNTS = (1, 10), (2, 250)
