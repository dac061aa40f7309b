"""``localckpt verify`` finds every damage, and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from localckpt.storage.catalog import UncountedFile, find_sessions
from tests.cli.commands import call, only_shards, run
from tests.managers.jobs import make_manager, reads_fail, state_of


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
