"""A header that does not describe its file is refused, before anything large is allocated."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.errors import CorruptShardError
from localckpt.ids import Generation, ShardIdentity
from localckpt.lineage import MOST_ANCESTORS, EpochId, Lineage, Point
from localckpt.state_dict.header import DIGESTS, SKELETON
from localckpt.state_dict.image import unpack
from localckpt.state_dict.source import read_header, read_verified_record
from tests.state_dict.states import IDENTITY, image_of, source_of

STATE = {"a": torch.arange(6.0), "b": torch.arange(5, dtype=torch.int16)}


def with_header(change: Callable[[dict[str, Any]], Any]) -> bytearray:
    """An image whose header somebody edited; its size and its data stay."""
    image = image_of(STATE)
    start = 8 + int.from_bytes(image[:8], "little")
    entries = json.loads(image[8:start])
    changed = change(entries)
    text = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
    assert len(text) <= start - 8
    image[8:start] = text.ljust(start - 8)
    return image


def entry(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entries: entries[name].update(fields)


def metadata(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entries: entries["__metadata__"].update(fields)


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        for key in path[:-1]:
            entries = entries[key]
        del entries[path[-1]]

    return change


def shift(name: str, nbytes: int) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        entries[name]["data_offsets"] = [n + nbytes for n in entries[name]["data_offsets"]]

    return change


def swap_tail(entries: dict[str, Any]) -> None:
    skeleton, digests = entries[SKELETON], entries[DIGESTS]
    start, size = skeleton["data_offsets"][0], digests["shape"][0]
    digests["data_offsets"] = [start, start + size]
    skeleton["data_offsets"] = [start + size, start + size + skeleton["shape"][0]]


def one_digest_more(entries: dict[str, Any]) -> None:
    skeleton, digests = entries[SKELETON], entries[DIGESTS]
    skeleton["shape"][0] -= 8
    skeleton["data_offsets"][1] -= 8
    digests["shape"][0] += 8
    digests["data_offsets"][0] -= 8


def extra_after_digests(entries: dict[str, Any]) -> None:
    end = entries[DIGESTS]["data_offsets"][1]
    entries["extra"] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}
    entries["more"] = {"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}


BAD = {
    "overlap": shift("a", -4),
    "hole": shift("a", 4),
    "outside": entry("b", data_offsets=[24, 10**15], shape=[(10**15 - 24) // 2]),
    "negative begin": entry("a", data_offsets=[-24, 0]),
    "end before begin": entry("a", data_offsets=[24, 0]),
    "negative shape": entry("a", shape=[-6]),
    "two negatives": entry("a", shape=[-2, -3]),
    "bool in shape": entry("a", shape=[True, 6]),
    "bool as offset": entry("a", data_offsets=[False, 24]),
    "float as offset": entry("a", data_offsets=[0.0, 24.0]),
    "text as offset": entry("a", data_offsets=["0", "24"]),
    "three offsets": entry("a", data_offsets=[0, 24, 24]),
    "no offsets": drop("a", "data_offsets"),
    "no shape": drop("a", "shape"),
    "wrong nbytes": entry("a", shape=[7]),
    "huge shape": entry("a", shape=[2**62, 2**62]),
    "unknown dtype": entry("a", dtype="F128"),
    "dtype is no text": entry("a", dtype=4),
    "entry is a list": lambda entries: entries.update(a=[]),
    "missing digests": drop(DIGESTS),
    "missing skeleton": drop(SKELETON),
    "skeleton behind digests": swap_tail,
    "too many digests": one_digest_more,
    "a tensor behind the digests": extra_after_digests,
    "no metadata": drop("__metadata__"),
    "metadata is a list": lambda entries: entries.update(__metadata__=[]),
    "metadata is null": lambda entries: entries.update(__metadata__=None),
    "another version": metadata(format="localckpt-9"),
    "version is a number": metadata(format=1),
    "no version": drop("__metadata__", "format"),
    "no session": drop("__metadata__", "session"),
    "session is a number": metadata(session=5),
    "no iteration": drop("__metadata__", "iteration"),
    "iteration is a number": metadata(iteration=40),
    "negative iteration": metadata(iteration="-40"),
    "iteration with a blank": metadata(iteration=" 40"),
    "iteration in other digits": metadata(iteration="٤"),
    "iteration is a power": metadata(iteration="²"),
    "endless rank": metadata(rank="9" * 400),
    "empty epoch": metadata(epoch=""),
    "not JSON": lambda _: b"{",
    "only spaces": lambda _: b"",
    "not text": lambda _: b'{"\xff\xfe": 1}',
    "deep nesting": lambda _: b"[" * 2000,
    "two values": lambda _: b"{}{}",
    "an endless number": lambda _: b'{"a":' + b"9" * 3000 + b"}",
}


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_a_header_that_contradicts_itself_is_refused(change: Callable[[Any], Any]) -> None:
    image = with_header(change)

    for read in (read_header, read_verified_record, unpack):
        with pytest.raises(CorruptShardError):
            read(source_of(image))


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("claimed", [10 * 10**9, 2**63, 2**64 - 1, 5000])
def test_a_header_longer_than_the_file_is_refused_and_nothing_is_allocated(claimed: int) -> None:
    image = image_of(STATE)[:4200]
    image[:8] = claimed.to_bytes(8, "little")
    source = source_of(image)
    tracemalloc.start()

    with pytest.raises(CorruptShardError, match="its header would take"):
        unpack(source)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


_PLACES = st.integers(1, 1 << 20).flatmap(
    lambda ranks: st.tuples(st.integers(0, ranks - 1), st.just(ranks))
)


@given(st.text(max_size=30), st.tuples(*[st.integers(0, 10**18)] * 3), _PLACES)
def test_every_identity_comes_back_from_a_header(
    session: str, numbers: tuple[int, ...], place: tuple[int, int]
) -> None:
    epoch, sequence, iteration = numbers
    identity = ShardIdentity(session, Generation(epoch, sequence), iteration, *place)

    image = image_of({"a": torch.ones(1)}, identity)

    assert read_verified_record(source_of(image)).identity == identity


@pytest.mark.fault("wrong-place")
def test_a_shard_that_is_not_the_one_expected_is_refused() -> None:
    other = ShardIdentity("a session", Generation(2, 7), 41, 3, 8)

    with pytest.raises(CorruptShardError, match=r"expected iteration 41 .* found iteration 40"):
        unpack(source_of(image_of(STATE)), expect=other)


_LINEAGE = Lineage(
    IDENTITY.generation.epoch_id, "shared", 39, (Point(EpochId(1, 5), 39),), (), is_cut=True
)


def test_the_lineage_is_read_as_it_was_written_and_moves_no_tensor() -> None:
    longest = Point(EpochId(10**19 - 1, 10**19 - 1), 10**19 - 1)
    lineages = [
        _LINEAGE,
        replace(_LINEAGE, ancestors=(longest,) * MOST_ANCESTORS, given_up=(longest,) * 8),
    ]
    without = image_of(STATE)

    for lineage in lineages:
        image = image_of(STATE, replace(IDENTITY, lineage=lineage))

        identity = read_header(source_of(image)).identity
        assert identity.lineage == lineage
        assert identity == IDENTITY
        record = read_verified_record(source_of(image))
        assert record.identity.lineage == lineage
        assert unpack(source_of(image), expect=IDENTITY)["a"].tolist() == STATE["a"].tolist()
        assert len(image) - len(without) in (0, 4096)
    assert len(image_of(STATE, replace(IDENTITY, lineage=_LINEAGE))) == len(without)
    assert read_header(source_of(without)).identity.lineage is None


@pytest.mark.parametrize(
    "lineage",
    [
        *(None, 7, "", "no JSON", "{}", "[]", "[2, 0]", "[" * 2000),
        json.dumps(replace(_LINEAGE, epoch=EpochId(3, 0)).to_json()),
        json.dumps([*_LINEAGE.to_json(), 0]),
    ],
    ids=lambda lineage: f"{lineage!s:.20}",
)
def test_a_lineage_that_cannot_be_read_or_is_of_another_epoch_is_refused(lineage: Any) -> None:
    with pytest.raises(CorruptShardError, match="lineage"):
        read_header(source_of(with_header(metadata(lineage=lineage))))


@pytest.mark.fault("torn-file")
@pytest.mark.parametrize("extra", [b"\0", b"\0" * 4096, b"garbage"])
def test_bytes_behind_the_end_are_refused(extra: bytes) -> None:
    with pytest.raises(CorruptShardError, match="its header describes"):
        unpack(source_of(image_of(STATE) + extra))
