"""A store that refuses or cuts short any call: told on all ranks, and nothing is lost by it.

Each job goes through its calls one after another: the n-th is made to fail, what must hold is
checked, the work is done again undisturbed, and so on until the work makes no n-th call.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed as dist

import localckpt
from localckpt import CheckpointingException
from localckpt.storage.owner import Owner
from tests.faults.traced import (
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
    KINDS,
    MAX_S,
    assert_same,
    cliques,
    files,
    iterations_on,
    make_manager,
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.storage.test_files import make_cold

Dirs = Callable[[int], list[Path]]
Record = Callable[[str, object], None]
NodesOf = Callable[["_Job"], list[Path]]

# Several blocks, so that not all of a shard is read to find it.
_LARGE = 2 << 20

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
# Those to which the kernel may say that they would have to wait.
_MAY_HAVE_TO_WAIT = ("openat", "flock", "preadv", "preadv2")
_WRITES = {"fallocate", "pwrite64", "ftruncate", "fsync", "close"}
_MADE_AGAIN = {
    *("read", "preadv", "preadv2", "write", "pwrite64", "fsync", "fallocate", "ftruncate"),
}
_LOOKS = {"stat", "lstat", "newfstatat", "statx", "fstat", "access", "faccessat"}


@dataclass(frozen=True)
class _Job:
    """A job whose last rank is refused one call after another.

    Attributes:
        kind: Of the managers.
        worker: Who saves behind training; ``None`` for saves that are waited for.
        fresh: Every case has a manager of its own, and is the first save of it.
        ranks: How many there are, each on a node of its own.
        codes: The errors; in turn, or ``all_codes`` of them for every call.
        lasts: From the n-th on, every call is refused.
        cold: Files are not in the page cache when they are loaded.
        serves: The other node is empty, so that the one that is refused has all that is left.
        step: Only every so many calls.
        only: Names of the calls that are refused; all by default.
        orphan: A staging buffer that is there when it starts, of a process that is gone.
    """

    kind: str
    worker: Literal["thread", "process"] | None = None
    fresh: bool = False
    ranks: int = 1
    codes: tuple[int, ...] = _REFUSALS
    all_codes: bool = False
    lasts: bool = False
    cold: bool = False
    serves: bool = False
    step: int = 1
    only: tuple[str, ...] = ()
    orphan: Path | None = None

    @property
    def victim(self) -> int:
        return self.ranks - 1

    def faults(self) -> Iterator[Fault]:
        for turn in itertools.count():
            for code in self.codes if self.all_codes else [self.codes[turn % len(self.codes)]]:
                nth = 1 + turn * self.step
                yield Fault(nth, "error", code, lasts=self.lasts, only=self.only)

    def manager(self, repl: Any) -> Any:
        worker = self.worker or "thread"
        return make_manager(self.kind, node_store(), "job", repl, keep_last=2, async_worker=worker)

    def __str__(self) -> str:
        said = (self.worker, "first" * self.fresh, "cold" * self.cold, "serves" * self.serves)
        return "-".join([self.kind, *filter(None, said)])


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

    @classmethod
    def gather(cls, job: _Job, section: Section, error: str | None) -> _Case:
        told = _gather(job, (section.hit, error))
        return cls(told[job.victim][0], [text for _, text in told])

    def check(self, job: _Job, fault: Fault) -> None:
        """The error is the same on all ranks, of the right type, and says what happened where."""
        if not self.failed:
            return
        for text in self.errors:
            assert text is not None, (self.hit, self.errors)
            if self.hit is not None and self.hit.name not in {*_LOOKS, "close"}:
                assert text.startswith(("StorageError:", "SaveFailedError:")), (self.hit, text)
            assert os.strerror(fault.code) in text, (self.hit, text)
        for text in self.errors[: job.victim]:
            assert text is not None
            assert f"rank {job.victim}" in text, (self.hit, text)


def _gather(job: _Job, mine: Any) -> list[Any]:
    told = [mine] * job.ranks
    if job.ranks > 1:
        dist.all_gather_object(told, mine)
    return told


def _attempt(
    dangerous: AbstractContextManager[Section], call: Callable[[], Any]
) -> tuple[Section, str | None]:
    error = None
    with dangerous as section:
        try:
            call()
        except CheckpointingException as raised:
            error = f"{type(raised).__name__}: {raised}"
    return section, error


def _dangerous(watched: Watched | None, fault: Fault) -> AbstractContextManager[Section]:
    return nullcontext(Section()) if watched is None else watched.section(fault)


def _assert_some_were_told(refused: Sequence[_Case]) -> None:
    told = {case.hit.name for case in refused if case.hit and case.failed}
    assert told & {"openat", "fallocate", "pwrite64", "ftruncate", "fsync", "rename"}, refused


def _run(job: _Job, what: Callable[..., Any], nodes: Sequence[Path]) -> list[_Case]:
    """Run it on all ranks; what came of each call that was refused."""
    me = Owner.me()
    orphan = Path(f"/dev/shm/localckpt-staging-{Owner(me.boot, me.pid, 1)}.0.0")
    job = dataclasses.replace(job, orphan=orphan)
    try:
        with watch(nodes[job.victim], orphan) as watching:
            refused, *_ = run_ranks(
                *(what, job.ranks, job, watching.address),
                init_group=job.ranks > 1,
                store_per_node=nodes,
                timeout_s=1200.0,
            )
    finally:
        orphan.unlink(missing_ok=True)
    return list(refused)


@pytest.fixture
def nodes_of(node_dirs: Dirs, shm_roots: Dirs) -> Callable[[_Job], list[Path]]:
    return lambda job: (node_dirs if job.kind == "disk" else shm_roots)(job.ranks)


# Saving.


def _save_again_and_again(rank: int, world_size: int, job: _Job, address: str) -> list[_Case]:
    watched = Watched(address) if rank == job.victim else None
    repl = cliques(1, 2) if world_size > 1 else None
    refused: list[_Case] = []
    newest = 0
    with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queues:
        queue = queues if job.worker else None
        with job.manager(repl) as shared:
            for newest in (1, 2):
                save(shared, state_of(rank, newest), newest, queue)
            if job.fresh:
                shared.close()
            for fault in job.faults():
                with job.manager(repl) if job.fresh else nullcontext(shared) as manager:
                    if job.fresh:
                        _find_and_load(manager, rank, newest)
                    case, newest = _save_once(rank, job, manager, queue, watched, fault, newest)
                if case.hit is None:
                    break
                refused.append(case)
                # What is not retired in its turn, or not recycled, stays until the end.
                if not job.lasts:
                    _assert_space_is_used_again(job, sum(not case.failed for case in refused))
    if repl:
        repl.close()
    assert (left := left_behind(node_store(), os.getpid())) == [], left
    return refused


def _save_once(
    rank: int,
    job: _Job,
    manager: Any,
    queue: Any,
    watched: Watched | None,
    fault: Fault,
    newest: int,
) -> tuple[_Case, int]:
    await_memory_ahead()
    root = node_store()
    before, spares = _kept(root), _spares(root)
    section, error = _attempt(
        _dangerous(watched, fault),
        lambda: save(manager, state_of(rank, newest + 1), newest + 1, queue),
    )
    case = _Case.gather(job, section, error)
    case.check(job, fault)
    if case.failed and not job.lasts:
        # What was there before is there, and nothing else.
        assert _kept(root) == before, case
        assert look_again(manager) == newest
    if section.hit is not None and fault.code == errno.EINTR:
        assert not case.failed or section.hit.name not in _MADE_AGAIN, case
    elif section.hit is not None and _must_be_told(section.hit):
        assert case.failed, case
        if section.hit.name in _WRITES and section.hit.paths[0].endswith(".dirty"):
            # The file is dead, and no later save may overwrite it.
            assert _spares(root) < spares or not spares or job.kind == "memory", case
    save(manager, state_of(rank, newest + 2), newest + 2, queue)
    _find_and_load(manager, rank, newest + 2)
    # What could not be let go of then is gone now.
    last = newest if case.failed else newest + 1
    if not job.lasts:
        assert iterations_on(root) == {last, newest + 2}, case
    return case, newest + 2


def _assert_space_is_used_again(job: _Job, surplus: int) -> None:
    endings = (".safetensors", ".spare", ".dirty")
    images = [path for path in node_store().rglob("*") if path.suffix in endings]
    # Two that are kept, and two for the next saves.
    assert len(images) <= 4 * job.ranks + surplus


def _must_be_told(hit: Call) -> bool:
    """Whether a save cannot be complete without this call."""
    if hit.name in _LOOKS:
        return False
    return hit.name == "fsync" or any(p.endswith(".safetensors.dirty") for p in hit.paths)


def _spares(root: Path) -> int:
    return len(list(root.rglob("*.spare")))


def _kept(root: Path) -> list[str]:
    return [name for name in files(root) if not name.endswith(".spare")]


def _find_and_load(manager: Any, rank: int, iteration: int, nbytes: int = 4000) -> None:
    assert look_again(manager) == iteration
    state, _ = manager.load()
    assert_same(state, state_of(rank, iteration, nbytes))


_SAVES = [
    *(_Job("disk", worker) for worker in (None, "thread", "process")),
    *(_Job("disk", worker, fresh=True) for worker in (None, "process")),
    *(_Job("memory", worker) for worker in (None, "process")),
    _Job("memory", fresh=True),
]


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("job", _SAVES, ids=str)
def test_a_save_that_is_refused_any_call_keeps_what_was_there_and_the_next_one_is_good(
    job: _Job, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    job = dataclasses.replace(job, all_codes=long_form)

    refused = _run(job, _save_again_and_again, nodes_of(job))

    _assert_some_were_told(refused)
    record_property("cases", len(refused))


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("job", [_Job("disk", "thread"), _Job("memory")], ids=str)
def test_a_save_that_one_rank_is_refused_any_call_of_is_an_error_on_all_that_names_it(
    job: _Job, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    step = 1 if long_form else 2
    job = dataclasses.replace(job, ranks=2, all_codes=long_form, step=step)

    refused = _run(job, _save_again_and_again, nodes_of(job))

    _assert_some_were_told(refused)
    record_property("cases", len(refused))


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_breaks_at_any_point_of_a_save_is_used_again_once_it_works(
    kind: str, ranks: int, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    step = 1 if long_form else 3
    job = _Job(kind, ranks=ranks, lasts=True, all_codes=long_form, step=step)

    refused = _run(job, _save_again_and_again, nodes_of(job))

    _assert_some_were_told(refused)
    record_property("cases", len(refused))


# Starting: making the manager, finding, loading.


def _start_again_and_again(rank: int, world_size: int, job: _Job, address: str) -> list[_Case]:
    watched = Watched(address) if rank == job.victim else None
    repl = cliques(1, 2) if world_size > 1 else None
    refused: list[_Case] = []
    with job.manager(repl) as manager:
        for iteration in (1, 2):
            manager.save(state_of(rank, iteration, _LARGE), iteration)
    before = _digests(node_store())
    for fault in job.faults():
        if job.serves and rank != job.victim:
            for path in _shards(node_store()):
                path.unlink()
        if job.cold:
            for path in _shards(node_store()):
                make_cold(path)
        if job.orphan is not None and rank == job.victim and job.kind == "disk":
            job.orphan.touch()
        case = _start_once(rank, job, repl, watched, fault)
        if not (job.serves and rank != job.victim):
            # Nothing was removed, and nothing set aside.
            assert _digests(node_store()) == before, case
        if case.failed or case.source != "own node":
            with job.manager(repl) as manager:
                _find_and_load(manager, rank, 2, _LARGE)
        if case.hit is None:
            break
        refused.append(case)
    if repl:
        repl.close()
    assert job.orphan is None or not job.orphan.exists()
    assert (left := left_behind(node_store(), os.getpid())) == [], left
    return refused


def _start_once(rank: int, job: _Job, repl: Any, watched: Watched | None, fault: Fault) -> _Case:
    made: list[Any] = []
    loaded: list[Any] = []

    def start() -> None:
        made.append(job.manager(repl))
        made[0].find_latest()
        loaded.append(made[0].load())

    section, error = _attempt(_dangerous(watched, fault), start)
    for manager in made:
        manager.close()
    case = _Case.gather(job, section, error)
    case.check(job, fault)
    if loaded:
        state, (iteration, *_) = loaded[0]
        assert_same(state, state_of(rank, iteration, _LARGE))
        assert _gather(job, iteration) == [iteration] * job.ranks
        if iteration != 2:
            # The only copy of the newest could not be read.
            assert job.serves or job.ranks == 1, case
            assert case.hit is not None
            assert any(f"{2:012d}." in path for path in case.hit.paths), case
        case.source = _gather(job, made[0].last_load.source)[job.victim]
    return case


def _shards(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.suffix in (".safetensors", ".corrupt"))


def _digests(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in _shards(root)}


_STARTS = [_Job("disk"), _Job("disk", cold=True), _Job("memory")]


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("job", _STARTS, ids=str)
def test_a_start_that_is_refused_any_call_is_an_error_or_loads_what_can_be_read(
    job: _Job, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    job = dataclasses.replace(job, all_codes=long_form, step=1 if long_form else 3)

    refused = _run(job, _start_again_and_again, nodes_of(job))

    _assert_some_were_told(refused)
    record_property("cases", len(refused))


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("serves", [False, True], ids=["", "serves"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_one_rank_is_refused_any_call_of_loads_or_is_an_error_that_names_it(
    kind: str, serves: bool, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    job = _Job(kind, ranks=2, cold=kind == "disk", serves=serves, step=14)
    if long_form:
        # All errors are handled alike but the first of these, which pathlib makes an empty folder.
        codes = (errno.EACCES, errno.EIO)
        job = dataclasses.replace(job, codes=codes, all_codes=True, step=1)

    refused = _run(job, _start_again_and_again, nodes_of(job))

    _assert_some_were_told(refused)
    record_property("cases", len(refused))


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_a_rank_that_cannot_read_its_copy_takes_its_peers(
    cold: bool, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    reads = ("pread64", "preadv", "preadv2")
    step = 1 if long_form else 3
    job = _Job("disk", ranks=2, codes=(errno.EIO,), cold=cold, only=reads, step=step)

    refused = _run(job, _start_again_and_again, nodes_of(job))

    assert not any(case.failed for case in refused)
    assert {case.source for case in refused} == {"own node", "peer rank 0"}
    record_property("cases", len(refused))


# Calls that are interrupted, or move less than they were asked to.


@pytest.mark.timeout(1800)
@pytest.mark.fault("partial-io")
@pytest.mark.parametrize("what", [_save_again_and_again, _start_again_and_again])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_is_interrupted_or_would_wait_is_made_again_or_is_an_error(
    kind: str,
    what: Callable[..., Any],
    nodes_of: NodesOf,
    long_form: bool,
    record_property: Record,
) -> None:
    step = 1 if long_form else 5
    interrupted = _Job(kind, codes=(errno.EINTR,), step=step)
    would_wait = _Job(kind, codes=(errno.EAGAIN,), only=_MAY_HAVE_TO_WAIT, step=step)

    refused = [case for job in (interrupted, would_wait) for case in _run(job, what, nodes_of(job))]

    record_property("cases", len(refused))


def _move_in_parts(
    rank: int, world_size: int, job: _Job, address: str, faults: Sequence[Fault]
) -> list[Call]:
    watched = Watched(address)
    short: list[Call] = []
    with job.manager(None) as manager:
        for iteration, fault in enumerate(faults):
            with watched.section(fault) as section:
                manager.save(state_of(0, iteration, _LARGE), iteration)
                for path in _shards(node_store()) if job.cold else ():
                    make_cold(path)
                _find_and_load(manager, 0, iteration, _LARGE)
            short += [section.hit] if section.hit else []
    return short


@pytest.mark.fault("partial-io")
@pytest.mark.parametrize(
    "job", [_Job("disk"), _Job("disk", cold=True), _Job("disk", "process"), _Job("memory")], ids=str
)
def test_writes_and_reads_that_move_only_some_bytes_are_carried_on(
    job: _Job, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    nodes = nodes_of(job)
    sizes = (1, 4095, 4096, 4097, 1_000_000) if long_form else (1, 4097)
    faults = [Fault(nth, "short", nbytes=size) for size in sizes for nth in range(1, 12)]
    faults += [Fault(1, "short", nbytes=size, lasts=True) for size in (70_001, 4096 * 25)]
    with watch(*nodes) as watching:
        args = (job, watching.address, faults)
        (short,) = run_ranks(_move_in_parts, 1, *args, init_group=False, store_per_node=nodes)

    wanted = {"pread"} if job.kind == "memory" else {"pread", "pwrit"}
    assert {call.name[:5] for call in short} == wanted
    record_property("cases", len(short))
