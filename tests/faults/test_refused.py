"""A store that refuses or cuts short any call: told on all ranks, and nothing is lost by it.

The n-th call is made to fail, what must hold is checked, the work is done again undisturbed, and so
on until the work makes no n-th call.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import AsyncCallsQueue, CheckpointingException, GlobalCheckpointManager, StorageError
from tests.faults import shared
from tests.faults.shared import Drains, assert_nothing_else
from tests.faults.traced import (
    CHANGES,
    Call,
    Fault,
    Section,
    Watched,
    await_memory_ahead,
    left_behind,
    look_again,
    watch,
)
from tests.managers.jobs import (
    IN_PIECES_NBYTES,
    KINDS,
    MAX_S,
    Dirs,
    NodesOf,
    assert_same,
    cliques,
    error_of,
    files,
    iterations_on,
    make_manager,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.storage.test_files import make_cold

Record = Callable[[str, object], None]

pytestmark = pytest.mark.timeout(1800)
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
_LOOKS = {"stat", "lstat", "newfstatat", "statx", "fstat", "access", "faccessat"}
_WRITES = {"write", "fallocate", "pwrite64", "ftruncate", "fsync", "close"}
# Calls that Python, or the product, makes again when a signal interrupts them.
_MADE_AGAIN = {"read", "preadv", "preadv2", "write", "pwrite64", "fsync", "fallocate", "ftruncate"}
_READS = ("pread64", "preadv", "preadv2")
# Several blocks, so that not all of a shard is read to find it.
_LARGE = 2 << 20
_NUMEL = 40_000
_CASES_IN_SHORT = 7


@dataclass(frozen=True)
class _Job:
    """A job of which one rank is refused one call after another."""

    does: str
    kind: str = "disk"
    ranks: int = 1
    victim: int = -1
    queued: bool = False
    fresh: bool = False  # Every case has a manager of its own, and is the first save of it.
    again: bool = False  # A save that failed is tried again with its own number.
    lasts: bool = False  # From the n-th on, every call is refused.
    cold: bool = False  # Files are not in the page cache when they are loaded.
    serves: bool = False  # The other node is empty: the one that is refused has all that is left.
    codes: tuple[int, ...] = field(default=_REFUSALS, repr=False)
    only: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "victim", self.victim % self.ranks)

    @property
    def is_shared(self) -> bool:
        return self.kind == "shared"


@dataclass
class _Case:
    """What came of one call that was refused, as all ranks know it."""

    hit: Call | None
    errors: list[str | None]
    source: str = ""  # of what the rank that was refused has loaded

    @property
    def failed(self) -> bool:
        return any(self.errors)

    def check(self, job: _Job, code: int, root: Path) -> None:
        """The error is the same on all ranks, of the right type, and says what happened where."""
        may_be_another = _LOOKS if job.is_shared else {*_LOOKS, "close"}
        for rank, text in enumerate(self.errors if self.failed else []):
            assert text is not None, self
            assert os.strerror(code) in text, self
            if job.is_shared:
                assert text == self.errors[0], self
                assert str(root) in text, self
            if job.is_shared or rank < job.victim:
                assert f"rank {job.victim}" in text, self
            if self.hit is not None and self.hit.name not in may_be_another:
                kinds = ("StorageError:", "SaveFailedError:")
                assert text.startswith(kinds[: 2 - job.is_shared]), self


class _Refusals:
    """On one rank: refuses one call after another; so many, or each with each error in turn."""

    def __init__(self, job: _Job, rank: int, root: Path, address: str, cases: int | None) -> None:
        self.job, self.rank, self.root = job, rank, root if job.is_shared else node_store()
        self.refused: list[_Case] = []
        self.is_over = False
        self.repl: Any = None
        self.queue: AsyncCallsQueue | None = None
        self._cases = cases
        self._watched = Watched(address) if rank == job.victim else None
        self._faults: Iterator[Fault] | None = None

    def manager(self) -> Any:
        if self.job.is_shared:
            return GlobalCheckpointManager(self.root, keep_last=2, timeout=10.0)
        return make_manager(self.job.kind, self.root, "job", self.repl, keep_last=2)

    def state(self, iteration: int) -> dict[str, Any]:
        if self.job.is_shared:
            part = self.rank if self.job.ranks > 1 else None
            return shared.state_of(iteration, _NUMEL, part)
        if self.job.kind == "pieces":
            return state_of(self.rank, iteration, IN_PIECES_NBYTES)
        return state_of(self.rank, iteration, 4000 if self.job.does == "save" else _LARGE)

    def save(self, manager: Any, iteration: int) -> None:
        save(manager, self.state(iteration), iteration, self.queue)

    def load(self, manager: Any) -> int:
        """Load bit for bit what was saved; the iteration."""
        into = self.state(0) if self.job.is_shared else None
        state, (iteration, *_) = manager.load(into=into)
        assert_same(state, self.state(iteration))
        return int(iteration)

    def find_and_load(self, manager: Any, iteration: int) -> None:
        assert look_again(manager) == iteration
        assert self.load(manager) == iteration

    def load_anew(self, iteration: int) -> None:
        """With a manager of its own, since what is saved after a load is a new attempt."""
        with self.manager() as manager:
            self.find_and_load(manager, iteration)

    def digests(self) -> dict[str, str]:
        """Contents of the shards, or of the files of all checkpoints, by their names."""
        paths = self.root.glob("iteration_*/*")
        if not self.job.is_shared:
            paths = (p for p in self.root.rglob("*") if p.suffix in (".safetensors", ".corrupt"))
        return {
            str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in paths
        }

    def attempt(self, call: Callable[[], Any]) -> _Case:
        """Make a call of the product; after the first time, one system call is refused."""
        fault = None if self._faults is None else next(self._faults)
        watched, section, error = self._watched, Section(), None
        self.gather(None)
        with watched.section(fault) if watched else nullcontext(section) as section:
            try:
                call()
            except CheckpointingException as raised:
                error = f"{type(raised).__name__}: {raised}"
        told = self.gather((section.hit, error, [call.name for call in section.calls]))
        hit, _, calls = told[self.job.victim]
        case = _Case(hit, [text for _, text, _ in told])
        if fault is None:
            assert not case.failed, case
            self._faults = self._spread(calls)
            return case
        case.check(self.job, fault.code, self.root)
        if hit is None:
            self.is_over = True
        else:
            self.refused.append(case)
        return case

    def gather(self, mine: Any) -> list[Any]:
        """What all ranks say."""
        told = [mine] * self.job.ranks
        if self.job.ranks > 1:
            dist.all_gather_object(told, mine)
        return told

    def _spread(self, calls: list[str]) -> Iterator[Fault]:
        job, only, first, step = self.job, self.job.only, 1, 1
        if self._cases is not None:
            # Of a save, those that a save cannot do without.
            only = only or (tuple({*CHANGES, "close"}) if job.does == "save" else ())
            count = sum(name in only for name in calls) if only else len(calls)
            step = max(1, count // self._cases)
            first = 1 + random.Random(str(job)).randrange(step)
        for turn in itertools.count():
            codes = [job.codes[turn % len(job.codes)]]
            if self._cases is None and job.ranks == 1 and job.codes == _REFUSALS:
                # pathlib makes an empty folder of some calls that are denied.
                codes = list(dict.fromkeys([*codes, errno.EACCES]))
            for code in codes:
                yield Fault(first + turn * step, "error", code, lasts=job.lasts, only=only)


def _save_again_and_again(refusals: _Refusals) -> None:
    job, newest = refusals.job, 2
    save_once = _save_shared_once if job.is_shared else _save_once
    with refusals.manager() as kept:
        for iteration in (1, 2):
            refusals.save(kept, iteration)
        if job.fresh:
            kept.close()
        while not refusals.is_over:
            with refusals.manager() if job.fresh else nullcontext(kept) as manager:
                if job.fresh:
                    refusals.find_and_load(manager, newest)
                newest = save_once(refusals, manager, newest)


def _save_once(refusals: _Refusals, manager: Any, newest: int) -> int:
    job, root = refusals.job, refusals.root

    def kept() -> list[str]:
        return [name for name in files(root) if not name.endswith(".recycled")]

    await_memory_ahead()
    before, recycled = kept(), len(list(root.rglob("*.recycled")))
    case = refusals.attempt(lambda: refusals.save(manager, newest + 1))
    if case.failed and not job.lasts:
        # What was there before is there, and nothing else.
        assert kept() == before, case
        assert look_again(manager) == newest
    if case.hit is not None and job.codes == (errno.EINTR,):
        assert not case.failed or case.hit.name not in _MADE_AGAIN, case
    elif case.hit is not None and _must_be_told(job, case.hit):
        assert case.failed, case
        is_own = refusals.rank == job.victim and case.hit.paths[0].endswith(".dirty")
        if is_own and case.hit.name in _WRITES and recycled and job.kind != "memory":
            # The file is dead, and no later save may overwrite it.
            assert len(list(root.rglob("*.recycled"))) < recycled, case
    refusals.save(manager, newest + 2)
    refusals.find_and_load(manager, newest + 2)
    if not job.lasts:
        # What could not be let go of then is gone now.
        last = newest if case.failed else newest + 1
        assert iterations_on(root) == {last, newest + 2}, case
        images = [p for p in root.rglob("*") if p.suffix in (".safetensors", ".recycled", ".dirty")]
        # Two that are kept, two for the next saves; what is not retired in its turn stays.
        surplus = sum(not case.failed for case in refusals.refused)
        assert len(images) <= 4 * job.ranks + surplus
    return newest + 2


def _must_be_told(job: _Job, hit: Call) -> bool:
    """Whether a save cannot be complete without this call."""
    if job.is_shared:
        is_written = any(path.endswith((".distcp", ".new")) for path in hit.paths)
        return hit.name in _WRITES - {"fallocate"} and is_written
    # Memory is not written through what is closed: that may be the descriptor of an old mapping.
    if hit.name in {*_LOOKS, *_READS} or (hit.name == "close" and job.kind == "memory"):
        return False
    return hit.name == "fsync" or any(p.endswith(".safetensors.dirty") for p in hit.paths)


def _save_shared_once(refusals: _Refusals, manager: Any, newest: int) -> int:
    job, before = refusals.job, refusals.digests()
    case = refusals.attempt(lambda: refusals.save(manager, newest + 1))
    if case.hit is not None and _must_be_told(job, case.hit):
        assert case.failed, case
    found = manager.find_latest()
    if case.failed:
        # What was there before is there; and nothing newer, unless that is whole.
        assert before.items() <= refusals.digests().items(), case
        assert found == newest or (
            found == newest + 1 and case.hit and _follows_commit(case.hit)
        ), case
        if found != newest:
            refusals.load_anew(found)
    else:
        assert found == newest + 1, case
    following = newest + 1 if case.failed and job.again else newest + 2
    refusals.save(manager, following)
    assert manager.find_latest() == following, case
    refusals.load_anew(following)
    if refusals.rank == 0:
        # What could not be let go of then is gone now.
        assert_nothing_else(refusals.root)
        last = newest if case.failed and found == newest else newest + 1
        assert set(shared.iterations_on(refusals.root)) - {following} <= {last, newest}, case
    return following


def _follows_commit(hit: Call) -> bool:
    """Whether it makes the names of a checkpoint durable, of which some may be there already."""
    is_folder = re.fullmatch(r"(iteration_[\d.]+)?", hit.paths[-1]) is not None
    return is_folder and hit.name in {"openat", "fsync", "close"}


def _start_again_and_again(refusals: _Refusals) -> None:
    job, rank, root = refusals.job, refusals.rank, refusals.root
    is_emptied = job.serves and rank != job.victim
    with refusals.manager() as manager:
        for iteration in (1, 2):
            refusals.save(manager, iteration)
    refusals.gather(None)
    before = refusals.digests()
    while not refusals.is_over:
        for name in refusals.digests() if not job.is_shared or rank == 0 else ():
            if is_emptied:
                (root / name).unlink()
            elif job.cold:
                make_cold(root / name)
        case = _start_once(refusals)
        # Nothing was removed, and nothing set aside.
        assert is_emptied or refusals.digests() == before, case
        if case.failed or case.source != "own node":
            refusals.load_anew(2)


def _start_once(refusals: _Refusals) -> _Case:
    job, made, loaded = refusals.job, list[Any](), list[int]()

    def start() -> None:
        made.append(refusals.manager())
        assert made[0].find_latest() in (1, 2)
        loaded.append(refusals.load(made[0]))

    case = refusals.attempt(start)
    for manager in made:
        manager.close()
    if loaded:
        assert refusals.gather(loaded) == [loaded] * job.ranks
        if loaded != [2]:
            # The only copy of the newest could not be read.
            assert job.is_shared or job.serves or job.ranks == 1, case
            newest = "00000002."
            assert case.hit is not None
            assert any(newest in path for path in case.hit.paths), case
        if not job.is_shared:
            case.source = refusals.gather(made[0].last_load.source)[job.victim]
    return case


def _drain_again_and_again(refusals: _Refusals) -> None:
    root, iteration = refusals.root, 10
    with Drains(root, refusals.rank) as job:
        while not refusals.is_over:
            iteration += 1
            job.save(iteration)
            (image,) = node_store().rglob(f"{iteration:012d}.*.safetensors")
            before = image.read_bytes()
            case = refusals.attempt(lambda: job.promote(iteration))  # noqa: B023
            if case.failed:
                assert job.shared.find_latest() < iteration
                # Its space is given back.
                assert not list(root.glob(".iteration*/*"))
            elif case.hit is not None:
                assert case.hit.name not in ("pwrite64", "ftruncate"), case
            assert image.read_bytes() == before
            job.promote(iteration)
            job.assert_drained(iteration)


_DOES: dict[str, Callable[[_Refusals], None]] = {
    "save": _save_again_and_again,
    "start": _start_again_and_again,
    "drain": _drain_again_and_again,
}
_JOBS = [
    *(_Job("save", kind) for kind in ("disk", "memory")),
    *(_Job("save", kind, queued=True) for kind in ("disk", "pieces")),
    *(_Job("save", kind, fresh=True) for kind in ("disk", "memory")),
    *(_Job("save", kind, 2, queued=kind == "disk") for kind in ("disk", "memory")),
    *(_Job("save", kind, n, lasts=True) for kind, n in (("disk", 1), ("disk", 2), ("memory", 1))),
    *(_Job("start", kind, cold=kind == "disk") for kind in ("disk", "memory")),
    *(_Job("start", serves=serves, ranks=2, cold=True) for serves in (False, True)),
    *(_Job("start", "memory", serves=serves, ranks=2) for serves in (False, True)),
    *(_Job("save", "shared", 2, victim) for victim in (0, 1)),
    *(_Job("save", "shared", fresh=fresh, again=not fresh) for fresh in (False, True)),
    *(_Job("save", "shared", ranks, lasts=True) for ranks in (1, 2)),
    *(_Job("start", "shared", 2, victim, cold=victim == 1) for victim in (0, 1)),
    _Job("drain", "shared", only=tuple(sorted(CHANGES))),
]


def _again_and_again(
    rank: int, world_size: int, job: _Job, root: Path, address: str, cases: int | None
) -> list[_Case]:
    refusals = _Refusals(job, rank, root, address, cases)
    with (
        AsyncCallsQueue(timeout_s=MAX_S) if job.queued else nullcontext() as refusals.queue,
        cliques(1, 2) if job.ranks > 1 and not job.is_shared else nullcontext() as refusals.repl,
    ):
        _DOES[job.does](refusals)
    if job.is_shared:
        assert_nothing_else(root)
    else:
        assert (left := left_behind(node_store())) == [], left
    return refusals.refused


@pytest.fixture
def refuse(nodes_of: NodesOf, tmp_path: Path, long_form: bool, record_property: Record) -> Any:
    """``refuse(job)``: what came of each call that was refused, or of some in the short form."""

    def run(job: _Job, cases: int | None = None if long_form else _CASES_IN_SHORT) -> list[_Case]:
        nodes = nodes_of(job.kind, job.ranks)
        root = tmp_path / "shared"
        with watch(root if job.is_shared else nodes[job.victim]) as watching:
            refused, *_ = run_ranks(
                *(_again_and_again, job.ranks, job, root, watching.address, cases),
                init_group=job.ranks > 1,
                store_per_node=nodes,
                timeout_s=1200.0,
            )
        record_property("cases", len(refused))
        return list(refused)

    return run


@pytest.mark.rows(6)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("job", _JOBS, ids=str)
def test_a_call_that_is_refused_loses_nothing_and_is_told_on_all_ranks_if_it_matters(
    job: _Job, refuse: Any
) -> None:
    refused = refuse(job)

    assert len(refused) > 3
    # A load may take what can be read.
    assert job.does == "start" or any(case.failed for case in refused), refused


@pytest.mark.fault("refused-io")
def test_a_rank_that_cannot_read_its_copy_takes_its_peers(refuse: Any) -> None:
    # Every one: of a sample none may be a read of the own copy.
    refused = refuse(_Job("start", ranks=2, codes=(errno.EIO,), cold=True, only=_READS), None)

    assert not any(case.failed for case in refused)
    assert {case.source for case in refused} == {"own node", "peer rank 0"}


@pytest.mark.rows(2)
@pytest.mark.fault("partial-io")
@pytest.mark.parametrize("does", ["save", "start"])
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_a_call_that_is_interrupted_or_would_wait_is_made_again_or_is_an_error(
    does: str, code: int, refuse: Any
) -> None:
    # Those to which the kernel may say that they would have to wait.
    only = ("openat", "flock", "preadv", "preadv2") if code == errno.EAGAIN else ()

    assert refuse(_Job(does, codes=(code,), only=only))


@pytest.mark.fault("partial-io")
@pytest.mark.parametrize("kind", KINDS)
def test_writes_and_reads_that_move_only_some_bytes_are_carried_on(
    kind: str,
    nodes_of: NodesOf,
    long_form: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    (root,) = nodes_of(kind, 1)
    draw, moved, pwrite, preadv = random.Random(1), Counter[str](), os.pwrite, os.preadv

    def part_of(call: str, fd: int, buffer: Any) -> memoryview:
        moved[call] += 1
        nbytes = draw.choice((4096, 70_001, 1 << 20) if draw.random() < 0.9 else (1, 4095, 4097))
        # Past the page cache, a call ends at a whole block.
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            nbytes = max(4096, nbytes // 4096 * 4096)
        return memoryview(buffer)[:nbytes]

    def read_some(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if flags:
            return preadv(fd, buffers, offset, *flags)
        return preadv(fd, [part_of("preadv", fd, buffers[0])], offset)

    def write_some(fd: int, data: Any, offset: int) -> int:
        return pwrite(fd, part_of("pwrite", fd, data), offset)

    monkeypatch.setattr(os, "pwrite", write_some)
    monkeypatch.setattr(os, "preadv", read_some)
    with make_manager(kind, root, "job", keep_last=2) as manager:
        for iteration in range(50 if long_form else 5):
            manager.save(state_of(0, iteration, _LARGE), iteration)
            for path in root.rglob("*.safetensors") if iteration % 2 else ():
                make_cold(path)
            assert look_again(manager) == iteration
            assert_same(manager.load()[0], state_of(0, iteration, _LARGE))

    assert min(moved["pwrite"], moved["preadv"]) > 0
    record_property("cases", sum(moved.values()))


def _full_on_one(rank: int, world_size: int, root: Path, address: str) -> tuple[str, float]:
    # What the others write takes 40 s at this rate, from file to file.
    state = {f"of {rank}": [torch.full((250_000,), float(rank))] * (3 if rank == 1 else 1)}
    if rank != 1:
        state |= {f"{n} of {rank}": torch.full((250_000,), float(n)) for n in range(40)}
    with Drains(root, rank) as job:
        job.nodes.save(state, 5)
        fault = Fault(2, "error", errno.ENOSPC, only=("pwrite64",), lasts=True)
        began = time.monotonic()
        with Watched(address).section(fault) if rank == 1 else nullcontext():
            text = error_of(lambda: job.promote(5, rate_limit=1e6), StorageError)
        seconds = time.monotonic() - began
        assert job.shared.find_latest() == -1
        assert_same(job.nodes.load(iteration=5)[0], state)
        job.promote(5)
        blank = {key: torch.zeros(250_000) for key in state if key != f"of {rank}"}
        job.shared.load(into=blank, iteration=5, partial=True)
        assert_same(blank, {key: value for key, value in state.items() if key in blank})
    return text, seconds


@pytest.mark.fault("refused-io")
def test_shared_storage_that_is_full_for_one_rank_is_told_to_all_at_once(
    tmp_path: Path, node_dirs: Dirs
) -> None:
    root = tmp_path / "shared"
    with watch(root) as watching:
        args = (root, watching.address)
        told = run_ranks(_full_on_one, 3, *args, store_per_node=node_dirs(3), timeout_s=120.0)

    texts, seconds = zip(*told, strict=True)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]
    assert os.strerror(errno.ENOSPC) in texts[0]
    assert max(seconds) < 20.0
    assert_nothing_else(root)
