"""A job that is killed in a save to shared storage, or whose power is cut.

A new job, of any size, finds the older checkpoint or the new one, whole, and goes on from it.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import localckpt
from localckpt import AsyncRequest, FileSystemWriterAsync, GlobalCheckpointManager, WorkerDiedError
from localckpt.global_tier import data_files
from localckpt.global_tier.folders import CommitRecord
from tests.faults.loop_disk import LoopDisk, loop_disk
from tests.faults.stops import stops_of
from tests.faults.table import fixed_rows
from tests.faults.traced import Fault, Section, Watched, watch
from tests.managers.jobs import MAX_S, assert_same
from tests.ranks import (
    RankGroup,
    RanksFailedError,
    announce,
    await_announced,
    start_ranks,
)

__all__ = ["assert_nothing_else", "blank", "iterations_on", "loop_disk", "state_of"]

Record = Callable[[str, object], None]

_OLDEST, _OLDER, _NEWER, _NEXT = 1, 2, 3, 9
_ADMINISTRATION = {".localckpt.lock", ".localckpt.owner"}
_CHANGES = (
    *("write", "pwrite64", "ftruncate", "fsync"),
    *("mkdir", "rename", "unlink", "unlinkat", "rmdir"),
)
_NUMEL = 600_000


@dataclass(frozen=True)
class _Job:
    """A job that finds iterations 1 and 2, and saves 3 in their place.

    Attributes:
        ranks: How many there are.
        victim: The one that is killed.
        numel: Of the largest tensor.
        thread_count: Files of a rank.
    """

    ranks: int = 1
    victim: int = 0
    numel: int = _NUMEL
    thread_count: int = 2

    def manager(self, root: Path, keep_last: int | None = None) -> GlobalCheckpointManager:
        return GlobalCheckpointManager(
            root,
            keep_last=keep_last,
            timeout=MAX_S,
            thread_count=self.thread_count,
        )

    def __str__(self) -> str:
        return f"rank {self.victim} of {self.ranks}{', large' if self.numel > _NUMEL else ''}"


def state_of(iteration: int, numel: int = _NUMEL, part: int | None = None) -> dict[str, Any]:
    """A state of which every value tells the iteration.

    Args:
        part: The rank of a job of two, each of which has a half of the weights and all of the rest;
            ``None`` for all.
    """
    random = torch.Generator().manual_seed(iteration)
    halves = torch.randn(numel, generator=random).chunk(2)
    return {
        "weights": {f"{i}": half for i, half in enumerate(halves) if part in (None, i)},
        "bias": torch.randn(numel, generator=random),
        "optimizer": {"step": torch.tensor(float(iteration))},
        "losses": [1.5, iteration],
    }


def blank(numel: int = _NUMEL, part: int | None = None) -> dict[str, Any]:
    """A state to be filled, unlike any that is saved."""
    return state_of(0, numel, part)


def _run(
    rank: int, world_size: int, job: _Job, root: Path, told: Path, address: str, fault: Fault | None
) -> None:
    dangerous = Watched(address).section(fault) if rank == job.victim else nullcontext()
    manager = job.manager(root, keep_last=1)
    assert manager.find_latest() == _OLDER
    state = state_of(_NEWER, job.numel, rank if world_size > 1 else None)
    with dangerous, manager:
        manager.save(state, _NEWER, is_async=True)
        manager.wait_until_finished()
        (told / f"{rank}").touch()
    if rank != job.victim:
        await_announced("over", MAX_S)


@dataclass(frozen=True)
class _Ended:
    """How a job ended.

    Attributes:
        section: What its victim did.
        survived: Nobody was killed.
        returned: Some rank was told that the new checkpoint is committed.
    """

    section: Section
    survived: bool
    returned: bool


def _run_job(job: _Job, root: Path, told: Path, fault: Fault) -> _Ended:
    with (
        watch(root) as watching,
        start_ranks(
            *(_run, job.ranks, job, root, told, watching.address, fault),
            init_group=job.ranks > 1,
        ) as group,
    ):
        assert watching.over.wait(2 * MAX_S)
        killed = watching.section.hit is not None
        survived = _end(group, {*range(job.ranks)} - {job.victim} if killed else set(), job.victim)
    assert survived == (watching.section.hit is None)
    return _Ended(watching.section, survived, any(told.iterdir()))


def _end(group: RankGroup, others: set[int], victim: int) -> bool:
    """Have a job end as a launcher does when one rank is gone; whether that one is not."""
    for rank in others:
        group.kill(rank)
    group.announce("over")
    try:
        group.join()
    except RanksFailedError as failed:
        if failed.failures.get(victim) != "died: SIGKILL":
            raise
        return False
    return True


# What is there before and after.


def _fill(root: Path, job: _Job) -> None:
    with job.manager(root) as manager:
        for iteration in (_OLDEST, _OLDER):
            manager.save(state_of(iteration, job.numel), iteration, is_async=True)


@contextmanager
def _copy(template: Path) -> Iterator[tuple[Path, Path]]:
    """A root with the same contents, and a folder to tell things in, for one case."""
    case = template.with_name(f"{template.name}-case")
    root, told = case / "root", case / "told"
    try:
        shutil.copytree(template, root)
        told.mkdir()
        yield root, told
    finally:
        shutil.rmtree(case, ignore_errors=True)


def _start_again(job: _Job, root: Path) -> list[int]:
    """As a new job: what is found, the newest first; all of it is whole, and nothing else stays."""
    with job.manager(root) as manager:
        found = manager.find_latest()
        state = blank(job.numel)
        assert manager.load(into=state)[1].iteration == found
        assert_same(state, state_of(found, job.numel))
        others = set(iterations_on(root)) - {found}
        for iteration in others:
            assert manager.load(into=state, iteration=iteration)[1].iteration == iteration
            assert_same(state, state_of(iteration, job.numel))
        assert all(iteration < found for iteration in others)
        assert manager.load(into=state, iteration=found)[1].iteration == found
        manager.save(state_of(_NEXT, job.numel), _NEXT, is_async=False)
    assert_nothing_else(root)
    with job.manager(root) as manager:
        assert manager.load(into=state)[1].iteration == _NEXT
    assert_same(state, state_of(_NEXT, job.numel))
    return [found, *sorted(others, reverse=True)]


def iterations_on(root: Path) -> list[int]:
    """Of all directories that are committed."""
    return [CommitRecord.read(path.parent).iteration for path in root.glob("iteration_*/*.json")]


def assert_nothing_else(root: Path) -> None:
    """There are committed checkpoints, and the files of a root's administration."""
    folders = {path for path in root.iterdir() if path.name not in _ADMINISTRATION}
    for folder in folders:
        record = CommitRecord.read(folder)
        assert record is not None, sorted(root.rglob("*"))
        names = {path.name for path in folder.iterdir()}
        assert names == {*record.files, ".metadata", "localckpt.json"}


def _committed(section: Section, job: _Job) -> bool:
    """Whether a victim came to make a checkpoint of the save, by its calls."""
    done = section.calls if section.hit_at is None else section.calls[: section.hit_at]
    name = f"iteration_{_NEWER:08d}"
    return any(
        call.name == "rename"
        and call.paths[-1].startswith(name)
        and Path(call.paths[-1]).name.startswith(name)
        for call in done
    )


def _assert_older_or_newer_stands(job: _Job, root: Path, ended: _Ended) -> None:
    hit = ended.section.hit
    stood = _start_again(job, root)
    if job.victim == 0:
        # Nobody else commits.
        newer = _committed(ended.section, job)
    else:
        # Its calls end before it says that it has written.
        newer = ended.survived
    if newer:
        assert stood[0] == _NEWER, hit
    else:
        assert stood == [_OLDER, _OLDEST], hit
    assert not ended.returned or stood[0] == _NEWER, hit
    assert ended.returned or not ended.survived


_JOBS = [_Job(ranks, victim) for ranks, victim in ((1, 0), (2, 0), (2, 1))]
# More than one write a file.
_JOBS.append(_Job(numel=10_000_000, thread_count=1))
_IN_SHORT = [_Job(), _Job(2, 1), _JOBS[-1]]


@pytest.mark.timeout(1800)
@pytest.mark.fault("kill-save")
@pytest.mark.parametrize("job", fixed_rows(_JOBS, _IN_SHORT))
def test_a_job_killed_anywhere_in_a_global_save_finds_the_older_checkpoint_or_the_new_one(
    job: _Job, tmp_path: Path, long_form: bool, record_property: Record
) -> None:
    template = tmp_path / "root"
    _fill(template, job)
    killed = 0

    for fault in _faults(long_form, job):
        with _copy(template) as (root, told):
            ended = _run_job(job, root, told, fault)
            _assert_older_or_newer_stands(job, root, ended)
        if ended.survived:
            break
        killed += 1

    record_property("cases", killed)
    assert killed > (5 if long_form else 0)


def _faults(long_form: bool, job: _Job) -> Iterator[Fault]:
    """Killed before every call that changes something; in short, before some of those.

    Between two of them the root is the same.
    """
    if long_form:
        yield from (Fault(nth, "kill job", only=_CHANGES) for nth in itertools.count(1))
    elif job.victim:
        yield Fault(4, "kill job", only=_CHANGES)
    elif job.numel > _NUMEL:
        yield Fault(7, "kill job", only=_CHANGES)
    else:
        # While it commits; and while it removes what is not kept.
        yield from (Fault(nth, "kill job", only=_CHANGES) for nth in (16, 21))


# The power is cut.


def _take_no_direct_files() -> None:
    """Open files as on a file system that takes no O_DIRECT, so that they are in its cache."""
    open_owned = data_files.open_owned

    def refuse(path: Path, flags: int, *mode: int) -> io.FileIO:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_owned(path, flags, *mode)

    data_files.open_owned = refuse  # type: ignore[assignment]


def _train(rank: int, world_size: int, job: _Job, root: Path, told: Path, written: str) -> None:
    if written == "buffered":
        _take_no_direct_files()
    announce("ready")
    await_announced("go")
    with job.manager(root, keep_last=1) as manager:
        for iteration in (_OLDEST, _OLDER, _NEWER):
            (told / f"begun.{iteration}").touch()
            manager.save(state_of(iteration, job.numel), iteration, is_async=True)
            threads = [t.native_id for t in threading.enumerate() if t.name == "localckpt-global"]
            manager.wait_until_finished()
            (told / f"saved.{iteration}").touch()
            _await_gone(threads)


def _await_gone(threads: list[int]) -> None:
    """Wait until the kernel has let go of them: strace may lose a thread that ends in a stop."""
    deadline = time.monotonic() + MAX_S
    while any(Path(f"/proc/self/task/{thread}").exists() for thread in threads):
        assert time.monotonic() < deadline
        time.sleep(0.001)


_STOPPED_AFTER = {
    "?rename,?renameat,?renameat2,?unlink,?unlinkat,?rmdir,?mkdir,?mkdirat,ftruncate,pwrite64": "",
    "fsync": "",
}


@pytest.mark.fault("power-cut")
@pytest.mark.usefixtures("can_attach")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("written", "names"),
    fixed_rows(
        product(("direct", "buffered"), ("when asked", "at once")),
        {("direct", "when asked"), ("buffered", "at once")},
    ),
)
def test_what_was_saved_to_shared_storage_when_the_power_went_is_there_and_else_the_one_before(
    written: str,
    names: str,
    loop_disk: LoopDisk,
    tmp_path: Path,
    long_form: bool,
    record_property: Record,
) -> None:
    job = _Job(numel=2000, thread_count=1)
    told = tmp_path / "told"
    told.mkdir()
    cuts = 0

    run = (_train, 1, job, loop_disk.root / "root", told, written)
    with start_ranks(*run, init_group=False) as group:
        group.await_announced("ready")
        with stops_of(group.pids[0], _STOPPED_AFTER, tmp_path / "trace") as stops:
            group.announce("go")
            for number, call in enumerate(stops):
                # The first call of a save follows what the one before has promised.
                if not long_form and number % 5 and "mkdir(" not in call:
                    continue
                if names == "at once":
                    loop_disk.commit_names()
                begun, saved = (_last_told(told, what) for what in ("begun", "saved"))
                with loop_disk.cut_power().mounted() as disk:
                    found = _found_on(job, disk / "root")
                assert saved <= found <= begun, call
                cuts += 1
        group.join()

    record_property("cases", cuts)
    assert cuts > 10


def _last_told(told: Path, what: str) -> int:
    return max((int(path.suffix[1:]) for path in told.glob(f"{what}.*")), default=-1)


def _found_on(job: _Job, root: Path) -> int:
    with job.manager(root) as manager:
        found = manager.find_latest()
        if found != -1:
            state = blank(job.numel)
            assert manager.load(into=state)[1].iteration == found
            assert_same(state, state_of(found, job.numel))
        manager.save(state_of(_NEXT, job.numel), _NEXT, is_async=False)
    assert_nothing_else(root)
    return found


# The writer on its own, over a checkpoint that is there.


def _save_over(
    folder: Path, iteration: int, queue: localckpt.AsyncCallsQueue | None = None
) -> None:
    writer = FileSystemWriterAsync(folder, overwrite=True, timeout_s=MAX_S)
    plan = localckpt.save_state_dict_async_plan(state_of(iteration), writer, timeout_s=MAX_S)
    write, stage, args = writer.get_save_function_and_args()

    def finish() -> None:
        localckpt.save_state_dict_async_finalize(*plan)

    try:
        if queue is None:
            write(args[0], stage())
            finish()
        else:
            request = AsyncRequest(write, tuple(args), [finish], preload_fn=stage)
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    finally:
        writer.close()


def _run_over(rank: int, world_size: int, folder: Path, address: str, fault: Fault) -> None:
    watched = Watched(address)
    with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        try:
            with watched.section(fault):
                _save_over(folder, _OLDER, queue)
        except WorkerDiedError:
            assert _loaded(folder) in (_OLDEST, _OLDER)
            _save_over(folder, _NEWER, queue)


def _loaded(folder: Path) -> int:
    """Whose state torch loads."""
    state = blank()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    iteration = int(state["optimizer"]["step"])
    assert_same(state, state_of(iteration))
    return iteration


@pytest.mark.timeout(1800)
@pytest.mark.fault("kill-save", "worker-dies", "trainer-dies")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ["kill", "kill job"])
def test_a_writer_killed_over_a_checkpoint_leaves_the_old_one_or_the_new(
    how: Literal["kill", "kill job"], tmp_path: Path, long_form: bool, record_property: Record
) -> None:
    template = tmp_path / "root"
    _save_over(template, _OLDEST)
    in_short = {"kill": (10, 22), "kill job": (4, 14)}[how]
    only = _CHANGES if long_form else ()
    killed = 0

    for nth in itertools.count(1) if long_form else in_short:
        with _copy(template) as (folder, _):
            section, survived = _run_over_once(folder, Fault(nth, how, only=only))
            loaded = _loaded(folder)
            if survived:
                assert loaded == (_OLDER if section.hit is None else _NEWER), section.hit
            else:
                assert loaded in (_OLDEST, _OLDER), section.hit
            _save_over(folder, _NEXT)
            assert _loaded(folder) == _NEXT, section.hit
        if section.hit is None:
            break
        killed += 1

    record_property("cases", killed)
    assert killed >= (10 if long_form else len(in_short))


def _run_over_once(folder: Path, fault: Fault) -> tuple[Section, bool]:
    with (
        watch(folder) as watching,
        start_ranks(_run_over, 1, folder, watching.address, fault, init_group=False) as group,
    ):
        assert watching.over.wait(2 * MAX_S)
        survived = _end(group, set(), 0)
    # What was staged goes when the next writer starts.
    FileSystemWriterAsync(folder).close()
    return watching.section, survived


def _write_when_told(write: Callable[..., None], *args: Any) -> None:
    announce("worker", psutil.Process().pid)
    await_announced("go on", MAX_S)
    write(*args)


def _begin_to_save_over(rank: int, world_size: int, folder: Path) -> None:
    writer = FileSystemWriterAsync(folder, overwrite=True, timeout_s=MAX_S)
    localckpt.save_state_dict_async_plan(state_of(_OLDER), writer, timeout_s=MAX_S)
    write, stage, args = writer.get_save_function_and_args()
    args = [args[0], stage()]
    with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue:
        queue.schedule_async_request(AsyncRequest(_write_when_told, (write, *args), []))
        queue.maybe_finalize_async_calls(blocking=True)


@pytest.mark.fault("late-writer", "trainer-dies")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_worker_that_outlives_its_trainer_is_not_mixed_into_what_the_next_job_saves(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "root"

    with start_ranks(_begin_to_save_over, 1, folder, init_group=False) as group:
        worker = psutil.Process(group.await_announced("worker"))
        group.kill(0)
        group.join(expect_dead=[0])
        _save_over(folder, _NEWER)
        group.announce("go on")
        psutil.wait_procs([worker], timeout=MAX_S)
        loaded = _loaded(folder)
        FileSystemWriterAsync(folder).close()

    assert loaded in (None, _NEWER)
