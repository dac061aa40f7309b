"""Names of checkpoints on shared storage, their order, and the record that makes them ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from localckpt import CorruptShardError, FormatVersionError
from localckpt.availability.retention import Best, Retention
from localckpt.global_tier.folders import (
    RECORD_NAME,
    CommitRecord,
    Folder,
    folders_in,
    session_root,
)
from localckpt.global_tier.places import FilePlace

NUMBERS = st.integers(0, 10**12)
FILE_NAMES = st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)
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
@given(st.sets(st.tuples(NUMBERS, NUMBERS), max_size=20))
@example({(99_999_999, 1), (100_000_000, 1), (5, 9_999), (5, 10_000)})
def test_folders_are_found_by_their_names_from_new_to_old(
    tmp_path: Path, numbers: set[tuple[int, int]]
) -> None:
    empty(tmp_path)
    made = [Folder(FilePlace(tmp_path), iteration, epoch) for iteration, epoch in numbers]
    for folder in made:
        folder.path.mkdir()

    found, leftovers = folders_in(FilePlace(tmp_path))

    # A later attempt is newer, whatever its numbers.
    assert found == sorted(made, key=lambda one: (one.epoch, one.iteration), reverse=True)
    assert leftovers == []


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


@pytest.mark.parametrize(
    "name",
    [
        "iteration_1.0001",
        "iteration_00000001.1",
        "iteration_000000001.0001",
        "iteration_00000001.00001",
        "iteration_00000001",
        "iteration_00000001.0001.partial",
        "iteration_00000001.0001.01234567.partial",
        ".iteration_00000001.0001",
        "Iteration_00000001.0001",
        "iteration_00000001.0001 ",
        "iteration_0000000\u0661.0001",
        "iteration_-0000001.0001",
        "session-other",
    ],
)
def test_no_other_name_is_taken_for_a_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()

    assert folders_in(FilePlace(tmp_path)) == ([], [])


@given(st.text(max_size=30))
@example("")
@example("..")
@example("a/b")
def test_sessions_of_a_root_are_apart(session_id: str) -> None:
    root = Path("/root")

    path = session_root(root, session_id)

    if session_id:
        assert path.parent == root
        assert path.name not in ("", ".", "..")
        assert not path.name.startswith("iteration_")
        assert path != session_root(root, session_id + "x")
    else:
        assert path == root


@on_disk
@given(
    st.builds(
        CommitRecord,
        st.text(max_size=10),
        NUMBERS,
        NUMBERS,
        SAVE_IDS,
        st.integers(1, 10_000),
        st.dictionaries(FILE_NAMES, NUMBERS, max_size=5),
        st.integers(0, 2**64 - 1),
        st.none(),
        st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2),
        st.builds(Retention, st.none() | st.integers(1), st.none(), st.builds(Best, st.just("x"))),
    )
)
@example(RECORD)
def test_a_record_is_read_as_it_was_written(tmp_path: Path, record: CommitRecord) -> None:
    (tmp_path / RECORD_NAME).write_bytes(record.to_bytes())

    found = CommitRecord.read(FilePlace(tmp_path, RECORD_NAME))

    assert found == record
    assert record.nbytes == sum(record.files.values())


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


def test_a_record_of_another_format_is_an_error_that_says_so(tmp_path: Path) -> None:
    text, _, _ = RECORD.to_bytes().rstrip(b"\n").rpartition(b"\n")
    older = json.dumps({**json.loads(text), "format": 2}).encode()
    digest = b"%016x" % xxhash.xxh3_64_intdigest(older)

    with pytest.raises(FormatVersionError, match="the version of localckpt that saved it"):
        CommitRecord.parse(tmp_path, b"%s\n%s\n" % (older, digest))
