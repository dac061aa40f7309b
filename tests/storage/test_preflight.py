"""What a node cannot do is an error when the manager is made, at the latest at the first save."""

from __future__ import annotations

import logging
import random
import re
import resource
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import localckpt
from localckpt.errors import SaveFailedError, StorageError
from localckpt.ids import Group
from localckpt.memory import limits
from localckpt.memory.limits import MemoryLimit, cgroup_folders, parse_cgroup
from localckpt.storage.preflight import MemoryNeeds, file_system, plan_buffers
from tests.managers.jobs import MAX_S, assert_same, error_of, files, make_manager
from tests.ranks import run_ranks

MIB = 1 << 20


def state(nbytes: int = MIB) -> dict[str, torch.Tensor]:
    return {"weight": torch.rand(nbytes // 4)}


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc"])
def test_the_kind_of_file_system_is_the_one_that_is_mounted(path: str) -> None:
    told = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", path],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert file_system(Path(path)) == told.stdout.split()[-1]


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("options", ["ro", "size=4k", "nr_inodes=7"])
def test_a_store_that_cannot_be_written_is_an_error_when_the_manager_is_made(
    options: str, small_disk: Callable[[str], Path]
) -> None:
    root = small_disk(options)
    if options != "ro":
        (root / "filler").write_bytes(bytes(4096))

    with pytest.raises(StorageError, match=str(root)) as raised:
        localckpt.LocalCheckpointManager(root)

    assert ("read-only" if options == "ro" else "it is full: free space") in str(raised.value)


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize(
    "kept",
    [
        {"keep_last": 4},
        {"retention": localckpt.Retention(last=1, best=localckpt.Best("loss", count=3))},
    ],
    ids=["last", "best"],
)
def test_checkpoints_that_will_not_fit_are_an_error_at_the_first_save(
    kind: str, kept: dict[str, Any], small_disk: Callable[[str], Path]
) -> None:
    root, given = small_disk("size=12m"), state(3 * MIB)

    with make_manager(kind, root, **kept) as greedy:
        for iteration in (1, 2):
            with pytest.raises(SaveFailedError, match=r"5 checkpoints of 3\.\d MB.*keep fewer of"):
                greedy.save(given, iteration)
        assert greedy.find_latest() == -1
    assert files(root) == []
    with make_manager(kind, root, keep_last=1) as modest:
        for iteration in range(5):
            modest.save(given, iteration)
        assert modest.find_latest() == 4
        assert_same(modest.load()[0], given)


@pytest.mark.fault("unusable-store")
def test_too_few_inodes_are_an_error_at_the_first_save(small_disk: Callable[[str], Path]) -> None:
    with localckpt.LocalCheckpointManager(small_disk("size=64m,nr_inodes=16"), keep_last=20) as m:
        assert "more files, and 21 checkpoints of 1 shards" in error_of(lambda: m.save(state(), 1))


MB = 1_000_000

# The files.


def test_the_cgroups_of_a_process_and_their_parents_are_found_in_both_versions() -> None:
    v1 = "31 1 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    hybrid = "32 1 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    v2 = "33 1 0:30 / /sys/fs/a\\040cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    container = "34 1 0:28 /docker/c /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    base = Path("/sys/fs/cgroup/memory")

    assert cgroup_folders("4:memory:/job/step\n0::/", f"{v1}\n{hybrid}") == [
        *((base / "job/step", 1), (base / "job", 1), (base, 1)),
        (Path("/sys/fs/cgroup/unified"), 2),
    ]
    assert cgroup_folders("0::/job\n", v2) == [
        (Path("/sys/fs/a cgroup/job"), 2),
        (Path("/sys/fs/a cgroup"), 2),
    ]
    assert cgroup_folders("4:memory,cpu:/docker/c/x\n", container) == [(base / "x", 1), (base, 1)]
    # The process was moved out of what its container sees.
    assert cgroup_folders("0::/../other\n", v2) == [(Path("/sys/fs/a cgroup"), 2)]
    assert cgroup_folders("5:cpu:/\n", v1) == []


def test_page_cache_and_swap_count_as_available_and_shared_memory_does_not() -> None:
    v2 = {
        "memory.max": f"{1600 * MB}\n",
        "memory.current": f"{1000 * MB}\n",
        "memory.stat": f"file {700 * MB}\nshmem {500 * MB}\nactive_file {150 * MB}\n"
        f"inactive_file {50 * MB}\nslab_reclaimable 0\n",
    }
    swap = {"memory.swap.max": f"{30 * MB}", "memory.swap.current": f"{10 * MB}"}
    v1 = {
        "memory.limit_in_bytes": f"{1600 * MB}\n",
        "memory.usage_in_bytes": f"{1000 * MB}\n",
        "memory.stat": f"total_active_file {150 * MB}\ntotal_inactive_file {50 * MB}\n",
        "memory.memsw.limit_in_bytes": "9223372036854771712\n",
        "memory.memsw.usage_in_bytes": f"{1000 * MB}\n",
    }
    both = v1 | {"memory.memsw.limit_in_bytes": f"{1610 * MB}"}

    def parse(files: dict[str, str], version: int, free_swap: int) -> tuple[int, int] | None:
        return parse_cgroup(lambda name: files.get(name, ""), version, free_swap)

    assert parse(v2, 2, 0) == (1600 * MB, 800 * MB)
    assert parse(v2, 2, 100 * MB) == (1600 * MB, 900 * MB)
    assert parse(v2 | swap, 2, 100 * MB) == (1600 * MB, 820 * MB)
    assert parse(v2 | {"memory.max": "max\n"}, 2, 0) is None
    assert parse(v1, 1, 100 * MB) == (1600 * MB, 900 * MB)
    assert parse(both, 1, 100 * MB) == (1600 * MB, 810 * MB)
    assert parse(v1 | {"memory.limit_in_bytes": "9223372036854771712"}, 1, 0) is None
    assert parse({}, 1, 0) is None
    assert parse({}, 2, 0) is None


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """Files of a cgroup of version 1 that leaves its processes 35 MB of 45."""
    job = tmp_path / "cgroups" / "job"
    job.mkdir(parents=True)
    for name, nbytes in (("limit", 45 * MB), ("usage", 10 * MB)):
        for memory in ("memory", "memory.memsw"):
            (job / f"{memory}.{name}_in_bytes").write_text(f"{nbytes}\n")
    (job / "memory.stat").write_text("total_active_file 0\ntotal_inactive_file 0\n")
    return job


def _enter(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = limits._read
    told = {
        "/proc/self/cgroup": "4:memory:/job\n",
        "/proc/self/mountinfo": f"31 1 0:28 / {job.parent} rw - cgroup cgroup rw,memory",
    }
    monkeypatch.setattr(limits, "_read", lambda *path: told.get(str(path[0])) or read(*path))


# The decision.


def test_replicas_and_checkpoints_in_memory_are_counted_and_what_is_there_already_is_not() -> None:
    needs = [
        MemoryNeeds(200 * MB, 2, 2, 0, [MemoryLimit("node", str(n), 900 * MB)]) for n in (0, 1)
    ]
    copies = {0: Group((0, 1), 1), 1: Group((1, 0), 1)}

    assert plan_buffers(needs, {})[0] == 2
    with pytest.raises(StorageError, match="keep fewer checkpoints"):
        plan_buffers(needs, copies)
    before = [MemoryNeeds(200 * MB, 2, 2, 400 * MB, of.limits) for of in needs]
    assert plan_buffers(before, copies)[0] == 1
    # Staged in pieces, each of two images a rank has half of what is left.
    staged = [replace(of, kept=0, least_nbytes=100 * MB) for of in needs]
    tight = [replace(of, nbytes=500 * MB) for of in staged]
    assert plan_buffers(staged, copies)[:2] == (2, 0)
    assert plan_buffers(tight, copies)[:2] == (1, 450 * MB)
    for refused in (
        [replace(of, least_nbytes=460 * MB) for of in tight],
        [replace(tight[0], least_nbytes=0), tight[1]],
    ):
        with pytest.raises(StorageError, match="in pieces"):
            plan_buffers(refused, copies)
    with pytest.raises(StorageError, match=r"computed pieces \(repl_strategy\) need it whole"):
        plan_buffers(
            [replace(of, nbytes=950 * MB) for of in tight], {0: Group((0, 1), 1, "parity")}
        )


def test_a_plan_fits_all_limits_and_is_refused_only_where_one_buffer_does_not() -> None:
    chosen = random.Random(21)
    for _ in range(3000):
        ranks = chosen.randrange(1, 5)
        limits = [chosen.randrange(1, 4000) * MB for _ in range(ranks)]
        needs = []
        for rank in range(ranks):
            mine = [MemoryLimit("a", f"node {rank % 2}", limits[rank % 2 if ranks > 1 else 0])]
            if chosen.random() < 0.5:
                mine.append(MemoryLimit("own", "", limits[rank]))
            had = chosen.randrange(500) * MB
            needs.append(
                MemoryNeeds(chosen.randrange(1, 900) * MB, 3, chosen.randrange(3), had, mine)
            )

        def fits(buffers: int, needs: list[MemoryNeeds] = needs) -> bool:
            """Return whether no limit is exceeded, added up one rank at a time."""
            taken: dict[str, int] = {}
            left: dict[str, int] = {}
            for rank, of in enumerate(needs):
                for limit in of.limits:
                    key = limit.scope or f"rank {rank}"
                    more = max(0, of.nbytes * (of.kept + buffers) - of.had_nbytes)
                    taken[key] = taken.get(key, 0) + more
                    left[key] = limit.available_nbytes
            return all(taken[key] <= left[key] for key in taken)

        try:
            buffers, _, _ = plan_buffers(needs, {})
        except StorageError:
            assert not fits(1)
        else:
            assert 1 <= buffers <= 3
            assert fits(buffers)


# The limits of a process.


def _save(
    rank: int, world_size: int, root: Path, nbytes: int, limit: int | Path
) -> tuple[str, str]:
    """Save four times within an address space, or a container; the outcome, and the log."""
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("localckpt").addHandler(handler)
    if isinstance(limit, Path):
        _enter(limit, pytest.MonkeyPatch())
    else:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (taken + limit, -1))
    state = {"w": torch.ones(nbytes // 4)}
    with (
        make_manager("disk", root, keep_last=1) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        for iteration in range(1, 5):
            state["w"].fill_(float(iteration))
            try:
                queue.schedule_async_request(manager.save(state, iteration, is_async=True))
            except StorageError as error:
                return str(error), "\n".join(log)
        queue.maybe_finalize_async_calls(blocking=True)
        return f"newest: {manager.find_latest()}", "\n".join(log)


def test_ranks_in_one_container_are_planned_together(container: Path, tmp_path: Path) -> None:
    ended = run_ranks(_save, 2, tmp_path, 10 * MB, container)

    assert [newest for newest, _ in ended] == ["newest: 4"] * 2
    assert all("saves of ranks 0, 1 take" in log for _, log in ended)
    assert all("with 1 staging buffers for each image" in log for _, log in ended)
    assert all(f"{container}/memory.limit_in_bytes, 45.0 MB" in log for _, log in ended), ended


def test_within_an_address_space_saves_go_on_with_one_buffer_and_with_none_in_pieces(
    tmp_path: Path,
) -> None:
    ((ended, log),) = run_ranks(_save, 1, tmp_path / "one", 200 * MB, 850 * MB, init_group=False)
    assert ended == "newest: 4"
    assert "with 1 staging buffers for each image" in log
    assert "RLIMIT_AS" in log

    ((ended, log),) = run_ranks(_save, 1, tmp_path / "none", 400 * MB, 850 * MB, init_group=False)
    assert ended == "newest: 4"
    assert re.search(r"saves of rank 0 take .*RLIMIT_AS.*: each image is staged in", log)
