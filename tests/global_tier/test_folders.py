"""Names of checkpoints on shared storage, their order, and the record that makes them ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localckpt import CorruptShardError
from localckpt.global_tier.folders import (
    RECORD_NAME,
    CommitRecord,
    Folder,
    folders_in,
)
from localckpt.global_tier.places import FilePlace

NUMBERS = st.integers(0, 10**12)
SAVE_IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
# Tests of names share a directory, which each example empties.
on_disk = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50
)

RECORD = CommitRecord(
    "my run", 7, 2, "0123456789abcdef" * 2, 4, {"__0_0.distcp": 123, "__3_1.distcp": 0}, 2**64 - 1
)


def empty(root: Path) -> None:
    for path in root.iterdir():
        path.rmdir()


@on_disk
@given(NUMBERS, NUMBERS, SAVE_IDS)
def test_what_is_unfinished_is_no_checkpoint_and_tells_what_it_would_be(
    tmp_path: Path, iteration: int, epoch: int, save_id: str
) -> None:
    empty(tmp_path)
    folder = Folder(FilePlace(tmp_path), iteration, epoch)
    unfinished = [folder.unfinished(save_id, is_drain=is_drain) for is_drain in (False, True)]
    removed = replace(folder, label="old.removed")
    for made in (*unfinished, removed):
        made.path.mkdir()

    found, leftovers = folders_in(FilePlace(tmp_path))

    assert found == []
    assert set(leftovers) == {*unfinished, removed}
    assert {of.finished for of in leftovers} == {folder}
    assert [of.is_drain for of in unfinished] == [False, True]


def test_a_directory_without_a_record_has_none(tmp_path: Path) -> None:
    assert CommitRecord.read(FilePlace(tmp_path, RECORD_NAME)) is None
    assert CommitRecord.read(FilePlace(tmp_path, "missing", RECORD_NAME)) is None


def _damaged(data: bytes) -> list[bytes]:
    """Each byte changed and dropped, and each length that it can be cut to."""
    found = []
    for i in range(len(data)):
        found += [data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :]]
        found += [data[:i] + data[i + 1 :], data[:i]]
    return found


@pytest.mark.fault("flipped-bit", "torn-file")
def test_damage_to_any_byte_of_a_record_is_seen(tmp_path: Path) -> None:
    path = tmp_path / RECORD_NAME
    cases = _damaged(RECORD.to_bytes())

    for damaged in cases:
        path.write_bytes(damaged)
        try:
            found = CommitRecord.read(FilePlace(tmp_path, RECORD_NAME))
        except CorruptShardError:
            continue
        # Only the line's end may be missing.
        assert found in (None, RECORD)

    assert len(cases) == 3 * len(RECORD.to_bytes())


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(b"[" * 100_000, id="nested without end"),
        pytest.param(b"{", id="no JSON"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="empty"),
        {"iteration": "7"},
        {"epoch": -1},
        {"world_size": None},
        {"files": ["__0_0.distcp"]},
        {"files": {"../../etc/passwd": 5}},
        {"files": {"..": 5}},
        {"files": {"__0_0.distcp": "5"}},
        {"save_id": "../x"},
        {"metadata_digest": 1.5},
        {"metrics": [1]},
        {"metrics": {"loss": "low"}},
        {"retention": 3},
        {"retention": {"last": 0, "every": None, "best": None}},
        {"retention": {"last": 1, "every": None, "best": {"name": "loss"}}},
        {"unequal": 5},
        {"lineage": [1, 2]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_that_somebody_made_up_is_damaged(
    forged: bytes | dict[str, object], tmp_path: Path
) -> None:
    text = forged
    if isinstance(text, dict):
        whole = json.loads(RECORD.to_bytes().splitlines()[0])
        text = json.dumps(whole | text).encode()
    digest = xxhash.xxh3_64_intdigest(text)
    (tmp_path / RECORD_NAME).write_bytes(b"%s\n%016x\n" % (text, digest))

    with pytest.raises(CorruptShardError):
        CommitRecord.read(FilePlace(tmp_path, RECORD_NAME))
