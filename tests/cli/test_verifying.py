"""``localckpt verify`` finds every damage, and nothing else."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from localckpt.storage.catalog import UncountedFile, find_sessions
from tests.cli.commands import call, only_shards, run
from tests.managers.jobs import damage, make_manager, reads_fail, state_of


def test_a_good_store_is_status_0_and_says_how_much_was_read(kind: str, root: Path) -> None:
    with make_manager(kind, root, "run", keep_last=2) as manager:
        for iteration in range(2):
            manager.save(state_of(0, iteration), iteration)
    nbytes = sum(path.stat().st_size for path in only_shards(root))

    answer, told = run("verify", root), call("verify", root, "--json").json()

    assert (answer.status, answer.err) == (0, "")
    assert answer.out == f"{root}: 2 good ({nbytes / 1000:.1f} kB), 0 bad\n"
    assert (told["verified"], told["nbytes"], told["bad"]) == (2, nbytes, [])


@pytest.mark.fault("flipped-bit")
def test_a_flipped_bit_is_found_wherever_it_is(
    store: Path, long_form: bool, record_property: pytest.RecordProperty
) -> None:
    good, path = only_shards(store)
    content = path.read_bytes()
    step = 37 if long_form else 997
    positions = [*range(0, len(content), step), len(content) - 1]
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)

        answer = call("verify", store)

        assert answer.status == 1, position
        lines = answer.out.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith(f"bad: {path}: ")
        assert f"1 good ({good.stat().st_size / 1000:.1f} kB), 1 bad" in lines[1]
    record_property("cases", len(positions))


@pytest.mark.fault("torn-file")
def test_a_file_that_was_cut_or_ends_in_zeros_is_found(
    store: Path, long_form: bool, record_property: pytest.RecordProperty
) -> None:
    path = only_shards(store)[-1]
    content = path.read_bytes()
    # Its last bytes are of a digest, and may be zeros as they are.
    end = len(content.rstrip(b"\0")) - 1
    lengths = [0, 1, 8, *range(100, end, 100 if long_form else 2500), end]
    for length in lengths:
        for torn in (content[:length], content[:length] + bytes(len(content) - length)):
            path.write_bytes(torn)

            answer = call("verify", store, "--json")

            assert answer.status == 1, length
            assert [bad["path"] for bad in answer.json()["bad"]] == [str(path)]
            assert answer.json()["verified"] == 1
    record_property("cases", 2 * len(lengths))


def test_each_of_several_bad_files_has_its_line_and_keeps_its_name(store: Path) -> None:
    for path in only_shards(store):
        damage(path)
    before = only_shards(store)

    answer = call("verify", store)

    assert answer.status == 1
    assert [line.split(": ")[1] for line in answer.out.splitlines()[:-1]] == list(map(str, before))
    assert only_shards(store) == before


@pytest.mark.fault("wrong-place")
def test_a_good_file_under_another_session_is_bad(store: Path) -> None:
    folder = store / "session-other" / "0"
    folder.mkdir(parents=True)
    shutil.copy(only_shards(store)[0], folder)

    answer = call("verify", store)

    assert answer.status == 1
    assert "it belongs to session 'run'" in answer.out


def test_a_file_of_another_version_is_not_called_good(store: Path) -> None:
    path = only_shards(store)[0]
    path.write_bytes(path.read_bytes().replace(b"localckpt-6", b"localckpt-9"))

    answer = call("verify", store)

    assert answer.status == 2
    assert f"not readable: {path}: its format is localckpt-9" in answer.out
    assert "1 good" in answer.out


@pytest.mark.fault("refused-io")
@pytest.mark.usefixtures("can_attach")
def test_a_file_that_the_disk_refuses_to_read_is_not_called_good(store: Path) -> None:
    path = only_shards(store)[0]

    with reads_fail(path):
        verified, listed = call("verify", store), call("ls", store)

    assert verified.status == 2
    assert f"not readable: {path}: Input/output error\n" in verified.out
    assert "1 good" in verified.out
    assert listed.status == 0
    assert f"not counted: {path}: Input/output error\n" in listed.out


def test_what_was_quarantined_before_is_mentioned_and_not_read(store: Path) -> None:
    path = only_shards(store)[0]
    path.rename(f"{path}.corrupt")

    answer = call("verify", store)

    assert answer.status == 0
    assert "0 bad, 1 in quarantine, not looked at" in answer.out


def test_a_file_that_the_job_lets_go_before_it_is_read_is_no_error(store: Path) -> None:
    (session,) = find_sessions(store)
    shard, other = session.shards()[0]
    shard.path.rename(shard.path.with_suffix(".recycled"))
    other.path.unlink()

    assert session.verify(shard, lambda _: None) is None
    assert session.verify(other, lambda _: None) is None


@pytest.mark.parametrize("is_retired", [True, False], ids=["retired", "damaged"])
def test_a_file_that_is_overwritten_while_it_is_read_is_bad_only_if_it_kept_its_name(
    is_retired: bool, tmp_path: Path
) -> None:
    with make_manager("disk", tmp_path, "run") as manager:
        # Several threads read ahead of what is overwritten.
        manager.save({"large": torch.arange(8_000_000)}, 1)
    (session,) = find_sessions(tmp_path)
    (shard,) = session.shards()[0]
    reads: list[int] = []
    is_first = threading.Lock()

    def overwrite(nbytes: int) -> None:
        reads.append(nbytes)
        if is_first.acquire(blocking=False):
            path = shard.path
            if is_retired:
                path = shard.path.rename(shard.path.with_suffix(".dirty"))
            with open(path, "r+b") as file:
                file.seek(63_000_000)
                file.write(bytes(100))

    outcome = session.verify(shard, overwrite)

    assert sum(reads) > 63_000_000
    assert outcome is None if is_retired else isinstance(outcome, UncountedFile)


def test_a_person_at_a_terminal_sees_how_far_it_is(tmp_path: Path) -> None:
    with make_manager("disk", tmp_path, "run") as manager:
        manager.save({"large": torch.zeros(5_000_000)}, 1)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "localckpt.cli", "verify", tmp_path],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 4096):
                seen += piece
        except OSError:
            pass
        finally:
            os.close(ours)
        out, _ = process.communicate(timeout=60)

    assert b"/20.0 MB" in seen
    assert process.returncode == 0
    assert out.decode().endswith("1 good (20.0 MB), 0 bad\n")
