"""Shared storage that refuses any call: told on all ranks alike, and nothing is lost by it."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from localckpt import GlobalCheckpointManager, StorageError
from tests.faults.refused import (
    LOOKS,
    Case,
    attempt,
    codes_of,
    dangerous,
    gather,
)
from tests.faults.table import fixed_rows
from tests.faults.test_global_killed import assert_nothing_else, blank, iterations_on, state_of
from tests.faults.traced import Call, Fault, Watched, watch
from tests.managers.jobs import assert_same
from tests.ranks import run_ranks
from tests.storage.test_files import make_cold

Record = Callable[[str, object], None]

_REFUSALS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)
_NUMEL = 40_000
_MAX_S = 10.0


@dataclass(frozen=True)
class _Job:
    """A job that is refused one call after another.

    Attributes:
        ranks: How many there are.
        victim: The one that is refused.
        fresh: Every case has managers of its own, and is the first save of them.
        again: A save that failed is tried again with its own number; else with the next.
        lasts: From the n-th on, every call is refused.
        cold: Files are not in the page cache when they are loaded.
        denied: Every call is also refused with EACCES, beside the errors that come in turn.
        first, step: Only every so many calls.
    """

    ranks: int = 1
    victim: int = 0
    fresh: bool = False
    again: bool = False
    lasts: bool = False
    cold: bool = False
    denied: bool = False
    first: int = 1
    step: int = 1

    def faults(self) -> Iterator[Fault]:
        for turn in itertools.count():
            for code in codes_of(turn, _REFUSALS, self.denied):
                yield Fault(self.first + turn * self.step, "error", code, lasts=self.lasts)

    def manager(self, root: Path) -> GlobalCheckpointManager:
        return GlobalCheckpointManager(root, keep_last=2, timeout=_MAX_S)

    def __str__(self) -> str:
        told = (
            f"rank {self.victim} of {self.ranks}",
            *(name * getattr(self, name) for name in ("fresh", "again", "lasts", "cold")),
        )
        return ", ".join(filter(None, told))


def _run(what: Callable[..., Any], job: _Job, root: Path) -> list[Case]:
    with watch(root) as watching:
        refused, *_ = run_ranks(
            *(what, job.ranks, job, root, watching.address),
            init_group=job.ranks > 1,
            timeout_s=1200.0,
        )
    return list(refused)


def _case(job: _Job, fault: Fault, root: Path, section: Any, error: str | None) -> Case:
    case = Case.gather(job, section, error)
    if case.failed:
        # The same on all ranks, of the right type, and it says what happened, where, and to whom.
        assert len(set(case.errors)) == 1, case
        text = str(case.errors[0])
        assert os.strerror(fault.code) in text, case
        assert f"rank {job.victim}" in text, case
        assert str(root) in text, case
        if case.hit is not None and case.hit.name not in LOOKS:
            assert text.startswith("StorageError:"), case
    return case


# Saving.


def _save_again_and_again(
    rank: int, world_size: int, job: _Job, root: Path, address: str
) -> list[Case]:
    watched = Watched(address) if rank == job.victim else None
    refused: list[Case] = []
    newest = 0
    with job.manager(root) as shared:
        for newest in (1, 2):
            _save(shared, job, newest)
        if job.fresh:
            shared.close()
        for fault in job.faults():
            with job.manager(root) if job.fresh else nullcontext(shared) as manager:
                case, newest = _save_once(rank, job, root, manager, watched, fault, newest)
            if case.hit is None:
                break
            refused.append(case)
    return refused


def _save_once(
    rank: int,
    job: _Job,
    root: Path,
    manager: GlobalCheckpointManager,
    watched: Watched | None,
    fault: Fault,
    newest: int,
) -> tuple[Case, int]:
    before = _digests(root)
    gather(job, None)
    section, error = attempt(dangerous(watched, fault), lambda: _save(manager, job, newest + 1))
    case = _case(job, fault, root, section, error)
    if case.hit is not None and _must_be_told(case.hit):
        assert case.failed, case
    found = manager.find_latest()
    if case.failed:
        # What was there before is there; and nothing newer, unless that is whole.
        assert before.items() <= _digests(root).items(), case
        assert found == newest or (found == newest + 1 and _follows_commit(case.hit)), case
        if found != newest:
            _load(job, root, found)
    else:
        assert found == newest + 1, case
    following = newest + 1 if case.failed and job.again else newest + 2
    try:
        _save(manager, job, following)
    except Exception as failed:
        raise AssertionError(case) from failed
    assert manager.find_latest() == following, case
    _load(job, root, following)
    if rank == 0:
        # What could not be let go of then is gone now.
        assert_nothing_else(root)
        last = newest if case.failed and found == newest else newest + 1
        assert set(iterations_on(root)) - {following} <= {last, newest}, case
    gather(job, None)
    return case, following


def _save(manager: GlobalCheckpointManager, job: _Job, iteration: int) -> None:
    manager.save(state_of(iteration, _NUMEL, _part(job)), iteration, is_async=False)


def _part(job: _Job) -> int | None:
    return int(os.environ["RANK"]) if job.ranks > 1 else None


def _load(job: _Job, root: Path, iteration: int) -> None:
    """With a manager of its own, since what is saved after a load is a new attempt."""
    with job.manager(root) as manager:
        state = blank(_NUMEL, _part(job))
        assert manager.load(into=state)[1].iteration == iteration
        assert_same(state, state_of(iteration, _NUMEL, _part(job)))


def _digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.glob("iteration_*/*")
    }


def _must_be_told(hit: Call) -> bool:
    """Whether a save cannot be complete without this call."""
    written = hit.name in {"write", "pwrite64", "ftruncate", "fsync", "close"}
    return written and any(path.endswith((".distcp", ".new")) for path in hit.paths)


def _follows_commit(hit: Call | None) -> bool:
    """Whether it makes the names of a checkpoint durable, of which some may be there already."""
    if hit is None or hit.name not in {"openat", "fsync", "close"}:
        return False
    # Of the root, or of the directory itself.
    return hit.paths[-1] == "" or re.fullmatch(r"iteration_[\d.]+", hit.paths[-1]) is not None


@pytest.mark.fault("refused-io")
def test_a_root_whose_owner_cannot_be_noted_can_be_saved_to_at_once_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = tmp_path / ".localckpt.owner"
    owner.mkdir()

    with _Job().manager(tmp_path) as manager:
        # The error is kept, and with it all that its frames hold.
        with pytest.raises(StorageError, match="Is a directory") as raised:
            manager.save(state_of(1, _NUMEL), 1, is_async=False)
        owner.rmdir()
        manager.save(state_of(1, _NUMEL), 1, is_async=False)

    assert str(tmp_path) in str(raised.value)
    assert "is locked" not in caplog.text


# Finding and loading.


def _start_again_and_again(
    rank: int, world_size: int, job: _Job, root: Path, address: str
) -> list[Case]:
    watched = Watched(address) if rank == job.victim else None
    refused: list[Case] = []
    with job.manager(root) as manager:
        for iteration in (1, 2):
            _save(manager, job, iteration)
    before = _digests(root)
    for fault in job.faults():
        if job.cold and rank == 0:
            for path in root.rglob("*.distcp"):
                make_cold(path)
        gather(job, None)
        case = _start_once(job, root, watched, fault)
        assert _digests(root) == before, case
        if case.failed:
            _load(job, root, 2)
        if case.hit is None:
            break
        refused.append(case)
    return refused


def _start_once(job: _Job, root: Path, watched: Watched | None, fault: Fault) -> Case:
    state = blank(_NUMEL, _part(job))
    loaded: list[int] = []
    with job.manager(root) as manager:

        def start() -> None:
            assert manager.find_latest() in (1, 2)
            loaded.append(manager.load(into=state)[1].iteration)

        section, error = attempt(dangerous(watched, fault), start)
    case = _case(job, fault, root, section, error)
    if loaded:
        assert gather(job, loaded) == [loaded] * job.ranks, case
        assert_same(state, state_of(loaded[0], _NUMEL, _part(job)))
        # An older one only if a file of the newest could not be read.
        assert loaded[0] == 2 or any("00000002." in path for path in case.hit.paths), case
    return case


# What is done, and the job that is refused a call of it; in short, every so many calls of some.

_DOES = {"save": _save_again_and_again, "start": _start_again_and_again}
_ROWS = [
    *(("save", _Job(2, victim)) for victim in (0, 1)),
    *(("save", _Job(ranks, fresh=fresh)) for ranks, fresh in ((1, False), (1, True), (2, True))),
    ("save", _Job(again=True)),
    *(("save", _Job(ranks, lasts=True)) for ranks in (1, 2)),
    *(("start", job) for job in (_Job(cold=True), _Job(2, 0), _Job(2, 1, cold=True))),
]
_STEPS = {
    ("save", _Job(2, 1)): 7,
    ("save", _Job(fresh=True)): 11,
    ("save", _Job(again=True)): 9,
    ("save", _Job(2, lasts=True)): 23,
    ("start", _Job(2, 0)): 11,
}


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize(("does", "job"), fixed_rows(_ROWS, _STEPS))
def test_a_call_that_is_refused_is_an_error_on_all_ranks_or_none_and_loses_nothing(
    does: str, job: _Job, tmp_path: Path, long_form: bool, record_property: Record
) -> None:
    if long_form:
        job = replace(job, denied=job.ranks == 1)
    else:
        job = replace(job, first=2, step=_STEPS[does, job])

    refused = _run(_DOES[does], job, tmp_path / "root")

    # A load may take what can be read.
    assert len(refused) > 3 if does == "start" else any(c.failed for c in refused if c.hit)
    record_property("cases", len(refused))
