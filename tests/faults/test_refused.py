"""A store that refuses or cuts short any call: told on all ranks, and nothing is lost by it.

The n-th call is made to fail, what must hold is checked, the work is done again undisturbed, and so
on until the work makes no n-th call.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    AsyncCallsQueue,
    CheckpointingException,
    GlobalCheckpointManager,
    StorageError,
)
from tests.faults import shared
from tests.faults.shared import Drains, assert_loads, assert_nothing_else
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
    MAX_S,
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
Roots = Callable[[int], list[Path]]

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
_LOOKS = {"stat", "lstat", "newfstatat", "statx", "fstat", "access", "faccessat"}
_WRITES = {"fallocate", "pwrite64", "ftruncate", "fsync", "close"}
# Calls that Python, or the product, makes again when a signal interrupts them.
_MADE_AGAIN = {"read", "preadv", "preadv2", "write", "pwrite64", "fsync", "fallocate", "ftruncate"}
# Several blocks, so that not all of a shard is read to find it.
_LARGE = 2 << 20
_NUMEL = 40_000
_CASES_IN_SHORT = 7


@dataclass(frozen=True)
class _Job:
    """A job of which one rank is refused one call after another.

    Attributes:
        does: What it does again and again.
        kind: Of the managers: ``"shared"`` for those of shared storage.
        ranks: How many there are, each on a node of its own.
        victim: The one that is refused; the last if negative.
        queued: It saves behind training.
        fresh: Every case has a manager of its own, and is the first save of it.
        again: A save that failed is tried again with its own number; else with the next.
        lasts: From the n-th on, every call is refused.
        cold: Files are not in the page cache when they are loaded.
        serves: The other node is empty, so that the one that is refused has all that is left.
        codes: The errors, in turn.
        only: Names of the calls that are refused; all by default.
    """

    does: str
    kind: str = "disk"
    ranks: int = 1
    victim: int = -1
    queued: bool = False
    fresh: bool = False
    again: bool = False
    lasts: bool = False
    cold: bool = False
    serves: bool = False
    codes: tuple[int, ...] = _REFUSALS
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "victim", self.victim % self.ranks)

    def manager(self, repl: Any) -> Any:
        return make_manager(self.kind, node_store(), "job", repl, keep_last=2)

    def shared_manager(self, root: Path) -> GlobalCheckpointManager:
        return GlobalCheckpointManager(root, keep_last=2, timeout=10.0)

    def __str__(self) -> str:
        flags = ("queued", "fresh", "again", "lasts", "cold", "serves")
        at = f"rank {self.victim} of {self.ranks}"
        return "-".join([self.does, self.kind, at, *(f for f in flags if getattr(self, f))])


@dataclass
class _Case:
    """What came of one call that was refused, as all ranks know it.

    Attributes:
        hit: The call; ``None`` when there was none left.
        errors: What each rank raised.
        source: Where the rank that was refused has loaded from.
    """

    hit: Call | None
    errors: list[str | None]
    source: str = ""

    @property
    def failed(self) -> bool:
        return any(self.errors)

    def check(self, job: _Job, code: int, root: Path) -> None:
        """The error is the same on all ranks, of the right type, and says what happened where."""
        is_shared, kinds = job.kind == "shared", ("StorageError:", "SaveFailedError:")
        may_be_another = _LOOKS if is_shared else {*_LOOKS, "close"}
        for rank, text in enumerate(self.errors if self.failed else []):
            assert text is not None, self
            assert os.strerror(code) in text, self
            if is_shared:
                assert text == self.errors[0], self
                assert str(root) in text, self
            if is_shared or rank < job.victim:
                assert f"rank {job.victim}" in text, self
            if self.hit is not None and self.hit.name not in may_be_another:
                assert text.startswith(kinds[: 2 - is_shared]), self


class _Refusals:
    """On one rank: refuses one call after another.

    The first attempt is undisturbed: its calls are counted.

    Args:
        cases: How many calls, spread over all that there are; ``None`` for each, with each error
            in turn and, of a rank that is alone, with EACCES too: pathlib makes an empty folder of
            some calls that are denied.
    """

    def __init__(self, job: _Job, rank: int, root: Path, address: str, cases: int | None) -> None:
        self.job, self.rank, self.root = job, rank, root
        self.refused: list[_Case] = []
        self.is_over = False
        self._cases = cases
        self._watched = Watched(address) if rank == job.victim else None
        self._faults: Iterator[Fault] | None = None

    def attempt(self, call: Callable[[], Any]) -> _Case:
        """Make a call of the product, of which one system call is refused."""
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
                codes = list(dict.fromkeys([*codes, errno.EACCES]))
            for code in codes:
                yield Fault(first + turn * step, "error", code, lasts=job.lasts, only=only)


def _repl(job: _Job) -> Any:
    return cliques(1, 2) if job.ranks > 1 else nullcontext()


def _find_and_load(manager: Any, rank: int, iteration: int, nbytes: int = 4000) -> None:
    assert look_again(manager) == iteration
    assert_same(manager.load()[0], state_of(rank, iteration, nbytes))


# Saves on the nodes.


def _save_again_and_again(refusals: _Refusals) -> None:
    job, rank, newest = refusals.job, refusals.rank, 2
    with AsyncCallsQueue(timeout_s=MAX_S) as queues, _repl(job) as repl:
        queue = queues if job.queued else None
        with job.manager(repl) as kept:
            for iteration in (1, 2):
                save(kept, state_of(rank, iteration), iteration, queue)
            if job.fresh:
                kept.close()
            while not refusals.is_over:
                with job.manager(repl) if job.fresh else nullcontext(kept) as manager:
                    if job.fresh:
                        _find_and_load(manager, rank, newest)
                    newest = _save_once(refusals, manager, queue, newest)
                # What is not retired in its turn, or not recycled, stays until the end.
                if not job.lasts:
                    surplus = sum(not case.failed for case in refusals.refused)
                    _assert_space_is_used_again(job, surplus)


def _save_once(refusals: _Refusals, manager: Any, queue: Any, newest: int) -> int:
    job, rank, root = refusals.job, refusals.rank, node_store()
    await_memory_ahead()
    before, recycled = _kept(root), _recycled(root)
    state = state_of(rank, newest + 1)
    case = refusals.attempt(lambda: save(manager, state, newest + 1, queue))
    if case.failed and not job.lasts:
        # What was there before is there, and nothing else.
        assert _kept(root) == before, case
        assert look_again(manager) == newest
    if case.hit is not None and job.codes == (errno.EINTR,):
        assert not case.failed or case.hit.name not in _MADE_AGAIN, case
    elif case.hit is not None and _must_be_told(job, case.hit):
        assert case.failed, case
        is_own = rank == job.victim and case.hit.paths[0].endswith(".dirty")
        if is_own and case.hit.name in _WRITES:
            # The file is dead, and no later save may overwrite it.
            assert _recycled(root) < recycled or not recycled or job.kind == "memory", case
    save(manager, state_of(rank, newest + 2), newest + 2, queue)
    _find_and_load(manager, rank, newest + 2)
    # What could not be let go of then is gone now.
    last = newest if case.failed else newest + 1
    if not job.lasts:
        assert iterations_on(root) == {last, newest + 2}, case
    return newest + 2


def _assert_space_is_used_again(job: _Job, surplus: int) -> None:
    endings = (".safetensors", ".recycled", ".dirty")
    images = [path for path in node_store().rglob("*") if path.suffix in endings]
    # Two that are kept, and two for the next saves.
    assert len(images) <= 4 * job.ranks + surplus


def _must_be_told(job: _Job, hit: Call) -> bool:
    """Whether a save cannot be complete without this call."""
    # Memory is not written through what is closed: that may be the descriptor of an old mapping.
    if hit.name in _LOOKS or (hit.name == "close" and job.kind == "memory"):
        return False
    return hit.name == "fsync" or any(p.endswith(".safetensors.dirty") for p in hit.paths)


def _recycled(root: Path) -> int:
    return len(list(root.rglob("*.recycled")))


def _kept(root: Path) -> list[str]:
    return [name for name in files(root) if not name.endswith(".recycled")]


# Starts on the nodes: making the manager, finding, loading.


def _start_again_and_again(refusals: _Refusals) -> None:
    job, rank, root = refusals.job, refusals.rank, node_store()
    is_emptied = job.serves and rank != job.victim
    with _repl(job) as repl:
        with job.manager(repl) as manager:
            for iteration in (1, 2):
                manager.save(state_of(rank, iteration, _LARGE), iteration)
        before = _digests(root)
        while not refusals.is_over:
            for path in _shards(root):
                if is_emptied:
                    path.unlink()
                elif job.cold:
                    make_cold(path)
            case = _start_once(refusals, repl)
            # Nothing was removed, and nothing set aside.
            assert is_emptied or _digests(root) == before, case
            if case.failed or case.source != "own node":
                with job.manager(repl) as manager:
                    _find_and_load(manager, rank, 2, _LARGE)


def _start_once(refusals: _Refusals, repl: Any) -> _Case:
    made: list[Any] = []
    loaded: list[Any] = []

    def start() -> None:
        made.append(refusals.job.manager(repl))
        made[0].find_latest()
        loaded.append(made[0].load())

    case = refusals.attempt(start)
    for manager in made:
        manager.close()
    if loaded:
        state, (iteration, *_) = loaded[0]
        assert_same(state, state_of(refusals.rank, iteration, _LARGE))
        assert refusals.gather(iteration) == [iteration] * refusals.job.ranks
        if iteration != 2:
            # The only copy of the newest could not be read.
            assert refusals.job.serves or refusals.job.ranks == 1, case
            assert case.hit is not None
            assert any(f"{2:012d}." in path for path in case.hit.paths), case
        case.source = refusals.gather(made[0].last_load.source)[refusals.job.victim]
    return case


def _shards(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.suffix in (".safetensors", ".corrupt"))


def _digests(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in _shards(root)}


# Leaving a node.


def _close_again_and_again(refusals: _Refusals) -> None:
    job, rank, number = refusals.job, refusals.rank, 0
    while not refusals.is_over:
        manager, number = job.manager(None), number + 3
        for iteration in (number, number + 1):
            manager.save(state_of(rank, iteration), iteration)
        # One that nobody carries out.
        manager.save(state_of(rank, number + 2), number + 2, is_async=True)
        await_memory_ahead()
        case = refusals.attempt(manager.close)
        with job.manager(None) as manager:
            _find_and_load(manager, rank, number + 1)
        if job.lasts and case.hit is not None and case.hit.name == "unlink":
            assert case.failed


# Saves to shared storage.


def _save_shared_again_and_again(refusals: _Refusals) -> None:
    job, root, newest = refusals.job, refusals.root, 2
    with job.shared_manager(root) as kept:
        for iteration in (1, 2):
            _save_shared(kept, refusals, iteration)
        if job.fresh:
            kept.close()
        while not refusals.is_over:
            with job.shared_manager(root) if job.fresh else nullcontext(kept) as manager:
                newest = _save_shared_once(refusals, manager, newest)


def _save_shared(manager: GlobalCheckpointManager, refusals: _Refusals, iteration: int) -> None:
    state = shared.state_of(iteration, _NUMEL, _part(refusals))
    manager.save(state, iteration, is_async=False)


def _part(refusals: _Refusals) -> int | None:
    return refusals.rank if refusals.job.ranks > 1 else None


def _load_shared(refusals: _Refusals, iteration: int) -> None:
    """With a manager of its own, since what is saved after a load is a new attempt."""
    with refusals.job.shared_manager(refusals.root) as manager:
        assert manager.find_latest() == iteration
        assert_loads(manager, iteration, _NUMEL, _part(refusals))


def _save_shared_once(refusals: _Refusals, manager: GlobalCheckpointManager, newest: int) -> int:
    job, root = refusals.job, refusals.root
    before = _shared_digests(root)
    case = refusals.attempt(lambda: _save_shared(manager, refusals, newest + 1))
    if case.hit is not None and _must_be_told_of_shared(case.hit):
        assert case.failed, case
    found = manager.find_latest()
    if case.failed:
        # What was there before is there; and nothing newer, unless that is whole.
        assert before.items() <= _shared_digests(root).items(), case
        assert found == newest or (found == newest + 1 and _follows_commit(case.hit)), case
        if found != newest:
            _load_shared(refusals, found)
    else:
        assert found == newest + 1, case
    following = newest + 1 if case.failed and job.again else newest + 2
    try:
        _save_shared(manager, refusals, following)
    except Exception as failed:
        raise AssertionError(case) from failed
    assert manager.find_latest() == following, case
    _load_shared(refusals, following)
    if refusals.rank == 0:
        # What could not be let go of then is gone now.
        assert_nothing_else(root)
        last = newest if case.failed and found == newest else newest + 1
        assert set(shared.iterations_on(root)) - {following} <= {last, newest}, case
    return following


def _shared_digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.glob("iteration_*/*")
    }


def _must_be_told_of_shared(hit: Call) -> bool:
    """Whether a save cannot be complete without this call."""
    written = hit.name in {"write", "pwrite64", "ftruncate", "fsync", "close"}
    return written and any(path.endswith((".distcp", ".new")) for path in hit.paths)


def _follows_commit(hit: Call | None) -> bool:
    """Whether it makes the names of a checkpoint durable, of which some may be there already."""
    if hit is None or hit.name not in {"openat", "fsync", "close"}:
        return False
    # Of the root, or of the directory itself.
    return hit.paths[-1] == "" or re.fullmatch(r"iteration_[\d.]+", hit.paths[-1]) is not None


# Starts from shared storage.


def _start_shared_again_and_again(refusals: _Refusals) -> None:
    job, root = refusals.job, refusals.root
    with job.shared_manager(root) as manager:
        for iteration in (1, 2):
            _save_shared(manager, refusals, iteration)
    before = _shared_digests(root)
    while not refusals.is_over:
        if job.cold and refusals.rank == 0:
            for path in root.rglob("*.distcp"):
                make_cold(path)
        case = _start_shared_once(refusals)
        assert _shared_digests(root) == before, case
        if case.failed:
            _load_shared(refusals, 2)


def _start_shared_once(refusals: _Refusals) -> _Case:
    state = shared.state_of(0, _NUMEL, _part(refusals))
    loaded: list[int] = []
    with refusals.job.shared_manager(refusals.root) as manager:

        def start() -> None:
            assert manager.find_latest() in (1, 2)
            loaded.append(manager.load(into=state)[1].iteration)

        case = refusals.attempt(start)
    if loaded:
        assert refusals.gather(loaded) == [loaded] * refusals.job.ranks, case
        assert_same(state, shared.state_of(loaded[0], _NUMEL, _part(refusals)))
        # An older one only if a file of the newest could not be read.
        assert loaded[0] == 2 or any("00000002." in path for path in case.hit.paths), case
    return case


# Drains.


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


# What is done again and again, and the jobs that are refused a call of it.

_DOES: dict[tuple[str, bool], Callable[[_Refusals], None]] = {
    ("save", False): _save_again_and_again,
    ("start", False): _start_again_and_again,
    ("close", False): _close_again_and_again,
    ("save", True): _save_shared_again_and_again,
    ("start", True): _start_shared_again_and_again,
    ("drain", True): _drain_again_and_again,
}
_JOBS = [
    *(_Job("save", kind) for kind in ("disk", "memory")),
    _Job("save", queued=True),
    *(_Job("save", kind, fresh=True) for kind in ("disk", "memory")),
    *(_Job("save", kind, 2, queued=kind == "disk") for kind in ("disk", "memory")),
    *(_Job("save", kind, n, lasts=True) for kind, n in (("disk", 1), ("disk", 2), ("memory", 1))),
    *(_Job("start", kind, cold=kind == "disk") for kind in ("disk", "memory")),
    *(_Job("start", serves=serves, ranks=2, cold=True) for serves in (False, True)),
    *(_Job("start", "memory", serves=serves, ranks=2) for serves in (False, True)),
    *(_Job("close", kind, lasts=lasts) for kind, lasts in (("disk", True), ("memory", False))),
    *(_Job("save", "shared", 2, victim) for victim in (0, 1)),
    *(_Job("save", "shared", fresh=fresh, again=not fresh) for fresh in (False, True)),
    *(_Job("save", "shared", ranks, lasts=True) for ranks in (1, 2)),
    *(_Job("start", "shared", 2, victim, cold=victim == 1) for victim in (0, 1)),
    _Job("drain", "shared", only=tuple(CHANGES)),
]


def _again_and_again(
    rank: int, world_size: int, job: _Job, root: Path, address: str, cases: int | None
) -> list[_Case]:
    refusals = _Refusals(job, rank, root, address, cases)
    _DOES[job.does, job.kind == "shared"](refusals)
    if job.kind == "shared":
        assert_nothing_else(root)
    else:
        assert (left := left_behind(node_store())) == [], left
    return refusals.refused


@pytest.fixture
def refuse(node_dirs: Roots, shm_roots: Roots, tmp_path: Path, long_form: bool) -> Any:
    """``refuse(job)``: what came of each call that was refused, or of some in the short form."""

    def run(job: _Job, cases: int | None = None if long_form else _CASES_IN_SHORT) -> list[_Case]:
        nodes = (shm_roots if job.kind == "memory" else node_dirs)(job.ranks)
        root = tmp_path / "shared"
        with watch(root if job.kind == "shared" else nodes[job.victim]) as watching:
            refused, *_ = run_ranks(
                *(_again_and_again, job.ranks, job, root, watching.address, cases),
                init_group=job.ranks > 1,
                store_per_node=nodes,
                timeout_s=1200.0,
            )
        return list(refused)

    return run


@pytest.mark.rows(6)
@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("job", _JOBS, ids=str)
def test_a_call_that_is_refused_loses_nothing_and_is_told_on_all_ranks_if_it_matters(
    job: _Job, refuse: Any, record_property: Record
) -> None:
    refused = refuse(job)

    record_property("cases", len(refused))
    assert len(refused) > 3
    # A load may take what can be read.
    assert job.does == "start" or any(case.failed for case in refused), refused


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
def test_a_rank_that_cannot_read_its_copy_takes_its_peers(
    refuse: Any, record_property: Record
) -> None:
    reads = ("pread64", "preadv", "preadv2")

    # Every one: of a sample none may be a read of the own copy.
    refused = refuse(_Job("start", ranks=2, codes=(errno.EIO,), cold=True, only=reads), None)

    assert not any(case.failed for case in refused)
    assert {case.source for case in refused} == {"own node", "peer rank 0"}
    record_property("cases", len(refused))


@pytest.mark.rows(2)
@pytest.mark.timeout(1800)
@pytest.mark.fault("partial-io")
@pytest.mark.parametrize("does", ["save", "start"])
@pytest.mark.parametrize(
    ("code", "only"),
    # Those to which the kernel may say that they would have to wait.
    [(errno.EINTR, ()), (errno.EAGAIN, ("openat", "flock", "preadv", "preadv2"))],
)
def test_a_call_that_is_interrupted_or_would_wait_is_made_again_or_is_an_error(
    does: str, code: int, only: tuple[str, ...], refuse: Any, record_property: Record
) -> None:
    refused = refuse(_Job(does, codes=(code,), only=only))

    assert refused
    record_property("cases", len(refused))


# Calls that move less than they were asked to.


def _move_in_parts(
    rank: int, world_size: int, job: _Job, address: str, faults: list[Fault]
) -> list[str]:
    watched = Watched(address)
    short: list[str] = []
    with job.manager(None) as manager:
        for iteration, fault in enumerate(faults):
            with watched.section(fault) as section:
                manager.save(state_of(0, iteration, _LARGE), iteration)
                for path in _shards(node_store()) if job.cold else ():
                    make_cold(path)
                _find_and_load(manager, 0, iteration, _LARGE)
            short += [section.hit.name] if section.hit else []
    return short


@pytest.mark.rows(1)
@pytest.mark.fault("partial-io")
@pytest.mark.parametrize("job", [_Job("move"), _Job("move", cold=True), _Job("move", "memory")])
def test_writes_and_reads_that_move_only_some_bytes_are_carried_on(
    job: _Job, node_dirs: Roots, shm_roots: Roots, long_form: bool, record_property: Record
) -> None:
    nodes = (shm_roots if job.kind == "memory" else node_dirs)(1)
    sizes = (1, 4095, 4096, 4097, 1_000_000) if long_form else (1, 4097)
    faults = [Fault(nth, "short", nbytes=size) for size in sizes for nth in range(1, 12)]
    faults += [Fault(1, "short", nbytes=size, lasts=True) for size in (70_001, 4096 * 25)]
    with watch(*nodes) as watching:
        args = (job, watching.address, faults)
        (short,) = run_ranks(_move_in_parts, 1, *args, init_group=False, store_per_node=nodes)

    # In memory, only the notes are written.
    assert {name[:5] for name in short} == {"pread", "pwrit"}
    record_property("cases", len(short))


# What is told at once, and again.


@pytest.mark.fault("refused-io")
def test_a_root_whose_owner_cannot_be_noted_can_be_saved_to_at_once_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = tmp_path / ".localckpt.owner"
    owner.mkdir()

    with GlobalCheckpointManager(tmp_path) as manager:
        # The error is kept, and with it all that its frames hold.
        with pytest.raises(StorageError, match="Is a directory") as raised:
            manager.save(shared.state_of(1, _NUMEL), 1, is_async=False)
        owner.rmdir()
        manager.save(shared.state_of(1, _NUMEL), 1, is_async=False)

    assert str(tmp_path) in str(raised.value)
    assert "is locked" not in caplog.text


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
            text = error_of(lambda: job.promote(5, 1e6), StorageError)
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
    tmp_path: Path, node_dirs: Roots
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
