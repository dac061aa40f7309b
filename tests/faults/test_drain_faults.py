"""A drain that is killed, or refused, at a system call: all there is stands, and it goes on.

A half-written drain is never found; the checkpoint on the nodes is untouched; the next attempt
completes it; and nothing is left behind.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from localckpt import (
    AsyncCallsQueue,
    GlobalCheckpointManager,
    LocalCheckpointManager,
    StorageError,
)
from localckpt.global_tier import staging
from tests.faults.test_global_killed import assert_nothing_else
from tests.faults.traced import Fault, Section, Watched, watch
from tests.managers.jobs import MAX_S, assert_same, error_of
from tests.ranks import (
    RankGroup,
    RanksFailedError,
    await_announced,
    run_ranks,
    start_ranks,
)

Record = Callable[[str, object], None]

_OLDER, _NEWER = 2, 3
_CHANGES = (
    *("write", "pwrite64", "ftruncate", "fsync"),
    *("mkdir", "rename", "unlink", "unlinkat", "rmdir"),
)


@dataclass(frozen=True)
class _Job:
    """A job that has iteration 2 on shared storage, and drains 3.

    Attributes:
        ranks: How many there are.
        victim: The one that something happens to.
    """

    ranks: int = 1
    victim: int = 0

    def __str__(self) -> str:
        return f"rank {self.victim} of {self.ranks}"


class _Managers:
    """Managers of one rank; files of a drain are small, so that there are several."""

    def __init__(self, root: Path, rank: int) -> None:
        staging.FILE_NBYTES = 1 << 20  # type: ignore[misc]
        self.nodes = LocalCheckpointManager(root / f"node{rank}", timeout=MAX_S)
        self.shared = GlobalCheckpointManager(root / "shared", timeout=MAX_S, local=self.nodes)
        self.queue = AsyncCallsQueue(timeout_s=2 * MAX_S)

    def promote(self, iteration: int, rate_limit: float | None = None) -> None:
        request = self.nodes.promote(iteration, to=self.shared, rate_limit=rate_limit)
        self.queue.schedule_async_request(request)
        self.queue.wait_until_finished()

    def __enter__(self) -> _Managers:
        return self

    def __exit__(self, *error: Any) -> None:
        # In the order of a program that opens the queue last.
        for opened in (self.queue, self.shared, self.nodes):
            opened.__exit__(*error)


def _state_of(iteration: int, rank: int) -> dict[str, Any]:
    common = torch.Generator().manual_seed(iteration)
    own = torch.Generator().manual_seed(1000 * iteration + rank)
    return {
        "common": {f"{n}": torch.randn(200_000, generator=common) for n in range(4)},
        f"of {rank}": torch.randn(300_000, generator=own),
        "losses": [1.5, iteration],
    }


def _fill(rank: int, world_size: int, root: Path) -> None:
    with _Managers(root, rank) as job:
        for iteration in (_OLDER, _NEWER):
            job.nodes.save(_state_of(iteration, rank), iteration)
        job.promote(_OLDER)


def _drain(
    rank: int, world_size: int, job: _Job, root: Path, told: Path, address: str, fault: Fault
) -> None:
    dangerous = Watched(address).section(fault) if rank == job.victim else nullcontext()
    managers = _Managers(root, rank)
    assert managers.nodes.load()[1].iteration == _NEWER
    with dangerous, managers:
        managers.promote(_NEWER)
        (told / f"{rank}").touch()
    if rank != job.victim:
        await_announced("over", MAX_S)


def _drain_again(rank: int, world_size: int, root: Path, finds: list[int]) -> int:
    """As a new job: what is found is whole, and the drain is completed."""
    with _Managers(root, rank) as job:
        found = job.shared.find_latest()
        assert found in finds
        _assert_loads(job.shared, rank, found)
        state, ckpt_id = job.nodes.load()
        assert ckpt_id.iteration == _NEWER
        assert_same(state, _state_of(_NEWER, rank))
        job.promote(_NEWER)
        assert job.shared.find_latest() == _NEWER
        _assert_loads(job.shared, rank, _NEWER)
    return found


def _assert_loads(shared: GlobalCheckpointManager, rank: int, iteration: int) -> None:
    blank = _state_of(0, rank)
    shared.load(into=blank, iteration=iteration)
    expected = _state_of(iteration, rank)
    assert_same(blank, expected)


def _run_job(job: _Job, root: Path, told: Path, fault: Fault) -> tuple[Section, bool]:
    roots = (root / "shared", *(root / f"node{rank}" for rank in range(job.ranks)))
    with (
        watch(*roots) as watching,
        start_ranks(
            *(_drain, job.ranks, job, root, told, watching.address, fault),
            init_group=job.ranks > 1,
        ) as group,
    ):
        assert watching.over.wait(2 * MAX_S)
        killed = watching.section.hit is not None
        _end(group, {*range(job.ranks)} - {job.victim} if killed else set(), job.victim)
    return watching.section, any(told.iterdir())


def _end(group: RankGroup, others: set[int], victim: int) -> None:
    for rank in others:
        group.kill(rank)
    group.announce("over")
    try:
        group.join()
    except RanksFailedError as failed:
        if failed.failures.get(victim) != "died: SIGKILL":
            raise


@pytest.mark.timeout(1800)
@pytest.mark.fault("kill-save")
@pytest.mark.parametrize("job", [_Job(), _Job(2, 0), _Job(2, 1)], ids=str)
def test_a_job_killed_anywhere_in_a_drain_goes_on_with_it(
    job: _Job, tmp_path: Path, long_form: bool, record_property: Record
) -> None:
    template = tmp_path / "template"
    run_ranks(_fill, job.ranks, template, init_group=job.ranks > 1)
    killed = 0

    for fault in _kills(job, long_form):
        root, told = tmp_path / "job", tmp_path / "told"
        shutil.copytree(template, root)
        told.mkdir()
        section, returned = _run_job(job, root, told, fault)
        finds = [_NEWER] if returned else [_OLDER, _NEWER]
        _assert_torch_finds_none_or_all(root / "shared")
        run_ranks(_drain_again, job.ranks, root, finds, init_group=job.ranks > 1)
        assert_nothing_else(root / "shared")
        assert not list(root.rglob("*.corrupt"))
        shutil.rmtree(root)
        shutil.rmtree(told)
        if section.hit is None:
            break
        killed += 1

    record_property("cases", killed)
    assert killed > (5 if long_form else 0)


def _kills(job: _Job, long_form: bool) -> Iterator[Fault]:
    if long_form:
        yield from (Fault(nth, "kill job", only=_CHANGES) for nth in itertools.count(1))
    elif job.victim:
        yield Fault(4, "kill job", only=_CHANGES)
    elif job.ranks > 1:
        yield Fault(15, "kill job", only=_CHANGES)
    else:
        # It makes its directory, writes its files, and commits.
        yield from (Fault(nth, "kill job", only=_CHANGES) for nth in (2, 9, 22, 27))


def _assert_torch_finds_none_or_all(root: Path) -> None:
    """What torch takes for a checkpoint is one."""
    for metadata in root.glob("iteration_*/.metadata"):
        blank = {"losses": [0.0, 0]}
        dcp.load(blank, checkpoint_id=metadata.parent, no_dist=True)
        assert blank["losses"][1] in (_OLDER, _NEWER)


# Refused.


def _drain_refused(
    rank: int, world_size: int, root: Path, address: str, step: int
) -> list[tuple[str, str]]:
    watched = Watched(address)
    told = []
    with _Managers(root, rank) as job:
        for turn in itertools.count():
            iteration = 10 + turn
            code = (errno.ENOSPC, errno.EIO, errno.EDQUOT)[turn % 3]
            fault = Fault(1 + turn * step, "error", code, only=_CHANGES)
            job.nodes.save(_state_of(iteration, rank), iteration)
            (image,) = root.rglob(f"{iteration:012d}.*.safetensors")
            before = image.read_bytes()
            text = ""
            with watched.section(fault) as section:
                try:
                    job.promote(iteration)
                except StorageError as error:
                    text = str(error)
            if section.hit is None:
                assert not text
                break
            told.append((str(section.hit), text))
            if text:
                assert os.strerror(code) in text
                assert str(root / "shared") in text
                assert job.shared.find_latest() < iteration
                # Its space is given back.
                assert not list(root.glob("shared/.iteration*/*"))
            assert image.read_bytes() == before
            job.promote(iteration)
            _assert_loads(job.shared, rank, iteration)
    return told


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
def test_shared_storage_that_refuses_ends_a_drain_with_an_error_and_the_nodes_keep_theirs(
    tmp_path: Path, long_form: bool, record_property: Record
) -> None:
    with watch(tmp_path / "shared") as watching:
        (told,) = run_ranks(
            *(_drain_refused, 1, tmp_path, watching.address, 1 if long_form else 4),
            init_group=False,
            timeout_s=1200.0,
        )

    record_property("cases", len(told))
    assert len(told) > 3
    assert all(text for call, text in told if call.startswith(("pwrite64", "ftruncate"))), told
    assert_nothing_else(tmp_path / "shared")


def _full_on_one(rank: int, world_size: int, root: Path, address: str) -> tuple[str, float]:
    # What the others write takes 40 s at this rate, from file to file.
    state = {f"of {rank}": [torch.full((250_000,), float(rank))] * (3 if rank == 1 else 1)}
    if rank != 1:
        state |= {f"{n} of {rank}": torch.full((250_000,), float(n)) for n in range(40)}
    with _Managers(root, rank) as job:
        job.nodes.save(state, 5)
        fault = Fault(2, "error", errno.ENOSPC, only=("pwrite64",), lasts=True)
        began = time.monotonic()
        with Watched(address).section(fault) if rank == 1 else nullcontext():
            text = error_of(lambda: job.promote(5, 1e6), StorageError)
        seconds = time.monotonic() - began
        assert job.shared.find_latest() == -1
        found, _ = job.nodes.load(iteration=5)
        assert_same(found, state)
        job.promote(5)
        blank = {key: torch.zeros(250_000) for key in state if key != f"of {rank}"}
        job.shared.load(into=blank, iteration=5, partial=True)
        assert_same(blank, {key: value for key, value in state.items() if key in blank})
    return text, seconds


@pytest.mark.fault("refused-io")
def test_shared_storage_that_is_full_for_one_rank_is_told_to_all_at_once(tmp_path: Path) -> None:
    with watch(tmp_path / "shared") as watching:
        told = run_ranks(_full_on_one, 3, tmp_path, watching.address, timeout_s=120.0)

    texts, seconds = zip(*told, strict=True)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]
    assert os.strerror(errno.ENOSPC) in texts[0]
    assert max(seconds) < 20.0
    assert_nothing_else(tmp_path / "shared")
