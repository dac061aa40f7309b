"""A store that refuses or cuts short any call: told on all ranks, and nothing is lost by it."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import localckpt
from tests.faults.refused import (
    LOOKS,
    Case,
    Job,
    attempt,
    dangerous,
    gather,
    run,
)
from tests.faults.table import fixed_rows
from tests.faults.traced import (
    Call,
    Fault,
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
    save,
    state_of,
)
from tests.ranks import node_store, run_ranks
from tests.storage.test_files import make_cold

Dirs = Callable[[int], list[Path]]
Record = Callable[[str, object], None]
NodesOf = Callable[[Job], list[Path]]

# Several blocks, so that not all of a shard is read to find it.
_LARGE = 2 << 20

# Those to which the kernel may say that they would have to wait.
_MAY_HAVE_TO_WAIT = ("openat", "flock", "preadv", "preadv2")
_WRITES = {"fallocate", "pwrite64", "ftruncate", "fsync", "close"}
_MADE_AGAIN = {
    *("read", "preadv", "preadv2", "write", "pwrite64", "fsync", "fallocate", "ftruncate"),
}


@pytest.fixture
def nodes_of(node_dirs: Dirs, shm_roots: Dirs) -> Callable[[Job], list[Path]]:
    return lambda job: (node_dirs if job.kind == "disk" else shm_roots)(job.ranks)


# Saving.


def _save_again_and_again(rank: int, world_size: int, job: Job, address: str) -> list[Case]:
    watched = Watched(address) if rank == job.victim else None
    repl = cliques(1, 2) if world_size > 1 else None
    refused: list[Case] = []
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
    assert (left := left_behind(node_store())) == [], left
    return refused


def _save_once(
    rank: int,
    job: Job,
    manager: Any,
    queue: Any,
    watched: Watched | None,
    fault: Fault,
    newest: int,
) -> tuple[Case, int]:
    await_memory_ahead()
    root = node_store()
    before, recycled = _kept(root), _recycled(root)
    section, error = attempt(
        dangerous(watched, fault),
        lambda: save(manager, state_of(rank, newest + 1), newest + 1, queue),
    )
    case = Case.gather(job, section, error)
    case.check(job, fault)
    if case.failed and not job.lasts:
        # What was there before is there, and nothing else.
        assert _kept(root) == before, case
        assert look_again(manager) == newest
    if section.hit is not None and fault.code == errno.EINTR:
        assert not case.failed or section.hit.name not in _MADE_AGAIN, case
    elif section.hit is not None and _must_be_told(job, section.hit):
        assert case.failed, case
        if section.hit.name in _WRITES and section.hit.paths[0].endswith(".dirty"):
            # The file is dead, and no later save may overwrite it.
            assert _recycled(root) < recycled or not recycled or job.kind == "memory", case
    save(manager, state_of(rank, newest + 2), newest + 2, queue)
    _find_and_load(manager, rank, newest + 2)
    # What could not be let go of then is gone now.
    last = newest if case.failed else newest + 1
    if not job.lasts:
        assert iterations_on(root) == {last, newest + 2}, case
    return case, newest + 2


def _assert_space_is_used_again(job: Job, surplus: int) -> None:
    endings = (".safetensors", ".recycled", ".dirty")
    images = [path for path in node_store().rglob("*") if path.suffix in endings]
    # Two that are kept, and two for the next saves.
    assert len(images) <= 4 * job.ranks + surplus


def _must_be_told(job: Job, hit: Call) -> bool:
    """Whether a save cannot be complete without this call."""
    # Memory is not written through what is closed: that may be the descriptor of an old mapping.
    if hit.name in LOOKS or (hit.name == "close" and job.kind == "memory"):
        return False
    return hit.name == "fsync" or any(p.endswith(".safetensors.dirty") for p in hit.paths)


def _recycled(root: Path) -> int:
    return len(list(root.rglob("*.recycled")))


def _kept(root: Path) -> list[str]:
    return [name for name in files(root) if not name.endswith(".recycled")]


def _find_and_load(manager: Any, rank: int, iteration: int, nbytes: int = 4000) -> None:
    assert look_again(manager) == iteration
    state, _ = manager.load()
    assert_same(state, state_of(rank, iteration, nbytes))


# Starting: making the manager, finding, loading.


def _start_again_and_again(rank: int, world_size: int, job: Job, address: str) -> list[Case]:
    watched = Watched(address) if rank == job.victim else None
    repl = cliques(1, 2) if world_size > 1 else None
    refused: list[Case] = []
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
    assert (left := left_behind(node_store())) == [], left
    return refused


def _start_once(rank: int, job: Job, repl: Any, watched: Watched | None, fault: Fault) -> Case:
    made: list[Any] = []
    loaded: list[Any] = []

    def start() -> None:
        made.append(job.manager(repl))
        made[0].find_latest()
        loaded.append(made[0].load())

    section, error = attempt(dangerous(watched, fault), start)
    for manager in made:
        manager.close()
    case = Case.gather(job, section, error)
    case.check(job, fault)
    if loaded:
        state, (iteration, *_) = loaded[0]
        assert_same(state, state_of(rank, iteration, _LARGE))
        assert gather(job, iteration) == [iteration] * job.ranks
        if iteration != 2:
            # The only copy of the newest could not be read.
            assert job.serves or job.ranks == 1, case
            assert case.hit is not None
            assert any(f"{2:012d}." in path for path in case.hit.paths), case
        case.source = gather(job, made[0].last_load.source)[job.victim]
    return case


def _shards(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.suffix in (".safetensors", ".corrupt"))


def _digests(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in _shards(root)}


# Calls that are interrupted, or move less than they were asked to.


def _move_in_parts(
    rank: int, world_size: int, job: Job, address: str, faults: Sequence[Fault]
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
    "job",
    fixed_rows([Job("disk"), Job("disk", cold=True), Job("memory")], {Job("disk", cold=True)}),
)
def test_writes_and_reads_that_move_only_some_bytes_are_carried_on(
    job: Job, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    nodes = nodes_of(job)
    sizes = (1, 4095, 4096, 4097, 1_000_000) if long_form else (1, 4097)
    faults = [Fault(nth, "short", nbytes=size) for size in sizes for nth in range(1, 12)]
    faults += [Fault(1, "short", nbytes=size, lasts=True) for size in (70_001, 4096 * 25)]
    with watch(*nodes) as watching:
        args = (job, watching.address, faults)
        (short,) = run_ranks(_move_in_parts, 1, *args, init_group=False, store_per_node=nodes)

    # In memory, only the notes are written.
    assert {call.name[:5] for call in short} == {"pread", "pwrit"}
    record_property("cases", len(short))


# Leaving.


def _close_again_and_again(rank: int, world_size: int, job: Job, address: str) -> list[Case]:
    watched = Watched(address)
    refused: list[Case] = []
    for number, fault in enumerate(job.faults()):
        manager = job.manager(None)
        for iteration in (3 * number, 3 * number + 1):
            manager.save(state_of(rank, iteration), iteration)
        # One that nobody carries out.
        manager.save(state_of(rank, 3 * number + 2), 3 * number + 2, is_async=True)
        await_memory_ahead()
        section, error = attempt(dangerous(watched, fault), manager.close)
        case = Case.gather(job, section, error)
        case.check(job, fault)
        with job.manager(None) as manager:
            _find_and_load(manager, rank, 3 * number + 1)
        if case.hit is None:
            break
        refused.append(case)
        if job.lasts and section.hit is not None and section.hit.name == "unlink":
            assert case.failed
    assert (left := left_behind(node_store())) == [], left
    return refused


# What is done, and the job that is refused a call of it; in short, some calls of some.

_DOES = {
    "save": _save_again_and_again,
    "start": _start_again_and_again,
    "close": _close_again_and_again,
}
_ROWS = [
    *(("save", Job("disk", worker)) for worker in (None, "thread")),
    *(("save", Job(kind, fresh=True)) for kind in KINDS),
    ("save", Job("memory")),
    *(
        ("save", Job(kind, worker, ranks=2))
        for kind, worker in (("disk", "thread"), ("memory", None))
    ),
    *(("save", Job(kind, ranks=ranks, lasts=True)) for kind in KINDS for ranks in (1, 2)),
    *(("start", job) for job in (Job("disk"), Job("disk", cold=True), Job("memory"))),
    *(
        ("start", Job(kind, ranks=2, cold=kind == "disk", serves=serves))
        for kind in KINDS
        for serves in (False, True)
    ),
    *(("close", Job(kind, lasts=lasts)) for kind in KINDS for lasts in (False, True)),
]
_IN_SHORT: dict[Any, dict[str, Any]] = {
    ("save", Job("disk")): {"only": (*_WRITES, "rename")},
    ("save", Job("disk", "thread", ranks=2)): {"step": 6},
    ("save", Job("memory", lasts=True)): {"step": 4},
    ("start", Job("disk", cold=True)): {"step": 9},
    ("start", Job("memory", ranks=2)): {"step": 9},
    ("close", Job("disk", lasts=True)): {},
}


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize(("does", "job"), fixed_rows(_ROWS, _IN_SHORT))
def test_a_call_that_is_refused_loses_nothing_and_is_told_on_all_ranks_if_it_matters(
    does: str, job: Job, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    changes = {"denied": True} if long_form else _IN_SHORT[does, job]
    job = dataclasses.replace(job, **changes)

    refused = run(job, _DOES[does], nodes_of(job))

    # Which calls a sample of them hits differs from run to run.
    assert any(case.failed for case in refused if case.hit), refused
    record_property("cases", len(refused))


@pytest.mark.timeout(1800)
@pytest.mark.fault("refused-io")
@pytest.mark.parametrize("cold", fixed_rows([False, True], {True}))
def test_a_rank_that_cannot_read_its_copy_takes_its_peers(
    cold: bool, nodes_of: NodesOf, record_property: Record
) -> None:
    reads = ("pread64", "preadv", "preadv2")
    # Every one: of a sample none may be a read of the own copy.
    job = Job("disk", ranks=2, codes=(errno.EIO,), cold=cold, only=reads, step=1)

    refused = run(job, _start_again_and_again, nodes_of(job))

    assert not any(case.failed for case in refused)
    assert {case.source for case in refused} == {"own node", "peer rank 0"}
    record_property("cases", len(refused))


@pytest.mark.timeout(1800)
@pytest.mark.fault("partial-io")
@pytest.mark.parametrize(
    ("does", "kind"),
    fixed_rows(product(("save", "start"), KINDS), {("save", "disk"), ("start", "memory")}),
)
def test_a_call_that_is_interrupted_or_would_wait_is_made_again_or_is_an_error(
    does: str, kind: str, nodes_of: NodesOf, long_form: bool, record_property: Record
) -> None:
    step = 1 if long_form else 5
    interrupted = Job(kind, codes=(errno.EINTR,), step=step)
    would_wait = Job(kind, codes=(errno.EAGAIN,), only=_MAY_HAVE_TO_WAIT, step=step)

    refused = [
        case for job in (interrupted, would_wait) for case in run(job, _DOES[does], nodes_of(job))
    ]

    record_property("cases", len(refused))
