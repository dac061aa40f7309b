"""A job that is killed at any system call on its store: what was complete stands, bit for bit.

Each case is a job of its own. The calls are counted in a job that nothing happens to; then one job
after another is killed just before one of them, and started again. Between two calls that change
something a store is the same, so one kill stands for all that come there.
"""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import localckpt
from localckpt import WorkerDiedError
from localckpt.storage.owner import Owner
from tests.faults.table import fixed_rows
from tests.faults.traced import (
    Call,
    Fault,
    Section,
    Watch,
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
    damage,
    make_manager,
    resume,
    save,
    state_of,
)
from tests.ranks import (
    RankGroup,
    RanksFailedError,
    await_announced,
    node_store,
    run_ranks,
    start_ranks,
)

Dirs = Callable[[int], list[Path]]
Record = Callable[[str, object], None]
How = Literal["kill", "kill job"]

# Several digest blocks, so that damage can lie where finding the shard does not look.
_LARGE = 2 << 20


@dataclass(frozen=True)
class _Job:
    """What a job does; it finds iterations 1 and 2, and one of its ranks is watched.

    Attributes:
        kind: Of the managers.
        does: The part that it may be killed in: the save of the next iteration, the load of the
            latest, or all of a start, from making the manager to closing it.
        worker: Who saves behind training; ``None`` for a save that is waited for.
        recycles: It saves once before that part, which then overwrites a retired file.
        ranks: How many there are, each on a node of its own.
        victim: The rank that is watched.
        nbytes: Size of the states that lie there.
        savers: How many ranks have saved what it loads, each its part; 0 for its own.
    """

    kind: str
    does: Literal["save", "load", "start"]
    worker: Literal["thread"] | None = None
    recycles: bool = False
    ranks: int = 1
    victim: int = 0
    nbytes: int = 4000
    savers: int = 0

    @property
    def newest(self) -> int:
        """The iteration that is complete when the part begins."""
        return 3 if self.recycles else 2

    @property
    def replicates(self) -> bool:
        """Whether each shard is on two nodes."""
        return self.ranks > 1 and not self.savers

    def state(self, rank: int, world_size: int, iteration: int) -> dict[str, Any]:
        """What a rank of so many has at an iteration."""
        if not self.savers:
            return state_of(rank, iteration, self.nbytes)
        mesh = init_device_mesh("cpu", (world_size,))
        whole = torch.arange(self.nbytes // 4).reshape(-1, 64) * iteration
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        return {"sharded": sharded, "iteration": iteration}

    def load(self, manager: Any, rank: int, world_size: int) -> int:
        """Load the latest, and check every bit of it."""
        into = self.state(rank, world_size, 0) if self.savers else None
        state, (iteration, *_) = manager.load(into=into)
        assert_same(_local(state), _local(self.state(rank, world_size, iteration)))
        return int(iteration)

    def __str__(self) -> str:
        how = f"{self.worker or 'sync'}-{'recycled' if self.recycles else 'new'}"
        return f"{self.kind}-{how}{'-receiving' if self.victim else ''}"


def _local(state: dict[str, Any]) -> dict[str, Any]:
    """A state with the parts of sharded tensors that this rank has."""
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}


def _run(rank: int, world_size: int, job: _Job, address: str, fault: Fault | None) -> None:
    watched = Watched(address) if rank == job.victim else None
    dangerous = watched.section(fault) if watched else nullcontext()
    repl = cliques(1, 2) if job.replicates else None
    options = {"keep_last": 2, "elastic": bool(job.savers)}
    with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queues:

        def make() -> Any:
            return make_manager(job.kind, node_store(), "job", repl, **options)

        if job.does == "start":
            with dangerous, make() as manager:
                _load_the_latest(rank, world_size, job, manager)
        elif job.does == "load":
            manager = make()
            with dangerous, manager:
                _load_the_latest(rank, world_size, job, manager)
        else:
            with make() as manager:
                _save_the_next(rank, job, manager, queues if job.worker else None, dangerous)
    if repl:
        repl.close()
    if watched is None:
        await_announced("over", MAX_S)


def _load_the_latest(rank: int, world_size: int, job: _Job, manager: Any) -> None:
    assert manager.find_latest() >= job.newest
    job.load(manager, rank, world_size)


def _save_the_next(rank: int, job: _Job, manager: Any, queue: Any, dangerous: Any) -> None:
    resume(manager, rank, 2)
    if job.recycles:
        save(manager, state_of(rank, 3), 3, queue)
        # All ranks have retired iteration 1 when all meet again.
        look_again(manager)
    await_memory_ahead()
    following = job.newest + 1
    try:
        with dangerous:
            save(manager, state_of(rank, following), following, queue)
    except WorkerDiedError:
        # It alone was killed: older iterations are there, and training goes on.
        assert resume(manager, rank, job.newest) == "own node"
        save(manager, state_of(rank, following + 1), following + 1, queue)
        assert resume(manager, rank, following + 1) == "own node"


@dataclass(frozen=True)
class _Ended:
    """How a run of a job ended: what its victim did, and whether it survived."""

    section: Section
    survived: bool
    pid: int


def _run_job(job: _Job, stores: Sequence[Path], fault: Fault | None) -> _Ended:
    # Whatever the victim left running has ended when the watch has.
    with (
        watch(*stores) as watching,
        start_ranks(
            *(_run, job.ranks, job, watching.address, fault),
            init_group=job.ranks > 1,
            store_per_node=stores,
        ) as group,
    ):
        pid = group.pids[job.victim]
        survived = _survives(group, job, watching)
    return _Ended(watching.section, survived, pid)


def _survives(group: RankGroup, job: _Job, watching: Watch) -> bool:
    assert watching.over.wait(MAX_S)
    if watching.section.hit is not None:
        # As a launcher does when one rank of the job is gone.
        for rank in {*range(job.ranks)} - {job.victim}:
            group.kill(rank)
    group.announce("over")
    try:
        group.join()
    except RanksFailedError as failed:
        # What the others made of it is not looked at here.
        if watching.section.hit is None or failed.failures[job.victim] != "died: SIGKILL":
            raise
        return False
    return True


# What is there before and after.


def _fill(rank: int, world_size: int, job: _Job, iterations: Sequence[int]) -> None:
    repl = cliques(1, 2) if job.replicates else None
    with make_manager(job.kind, node_store(), "job", repl, keep_last=9) as manager:
        for iteration in iterations:
            manager.save(job.state(rank, world_size, iteration), iteration)
    if repl:
        repl.close()


@pytest.fixture
def filled(node_dirs: Dirs, shm_roots: Dirs) -> Callable[[_Job, Sequence[int]], list[Path]]:
    """``filled(job, iterations)``: nodes with complete checkpoints."""

    def make(job: _Job, iterations: Sequence[int] = (1, 2)) -> list[Path]:
        nodes = (node_dirs if job.kind == "disk" else shm_roots)(job.ranks)
        run_ranks(_fill, job.savers or job.ranks, job, iterations, store_per_node=nodes)
        return nodes

    return make


@contextmanager
def _copies(templates: Sequence[Path]) -> Iterator[list[Path]]:
    """Nodes with the same contents, for one case."""
    stores = [root.with_name(f"{root.name}-case") for root in templates]
    try:
        for root, store in zip(templates, stores, strict=True):
            shutil.copytree(root, store)
        yield stores
    finally:
        for store in stores:
            shutil.rmtree(store, ignore_errors=True)


def _start_again(job: _Job, stores: Sequence[Path], dead: int) -> list[int]:
    """In processes that never saw these nodes; see :func:`_what_stands`."""
    if job.ranks == 1:
        return _what_stands(0, 1, job, dead, stores[0])
    stood, *others = run_ranks(_what_stands_here, job.ranks, job, dead, store_per_node=stores)
    assert all(other == stood for other in others)
    return list(stood)


def _what_stands_here(rank: int, world_size: int, job: _Job, dead: int) -> list[int]:
    return _what_stands(rank, world_size, job, dead, node_store())


def _what_stands(rank: int, world_size: int, job: _Job, dead: int, root: Path) -> list[int]:
    """Use the store again, and give all iterations that can be loaded, the newest first.

    Nothing stays behind, nor of the process that is dead.
    """
    repl = cliques(1, 2) if job.replicates else None
    options = {"keep_last": 99, "elastic": bool(job.savers)}
    stood = []
    with make_manager(job.kind, root, "job", repl, **options) as manager:
        assert list(root.rglob("*.dirty")) == []
        while look_again(manager) != -1:
            iteration = job.load(manager, rank, world_size)
            stood.append(iteration)
            # No rank goes on before all have loaded, and have made the copies they lacked.
            look_again(manager)
            # Out of sight, to see what is behind it.
            for path in root.rglob(f"{iteration:012d}.*.safetensors"):
                path.rename(path.with_suffix(".seen"))
        manager.save(state_of(rank, 99), 99)
        assert resume(manager, rank, 99) == "own node"
    if repl:
        repl.close()
    assert left_behind(root, (".safetensors", ".seen", ".corrupt")) == []
    return stood


def _kill_at_each(
    job: _Job,
    templates: Sequence[Path],
    check: Callable[[list[Path], _Ended], None],
    at_most: int | None,
    how: How = "kill job",
) -> int:
    """Kill one job after another before its n-th call, and check what it leaves.

    Args:
        at_most: How many cases; ``None`` for all that leave something else.

    Returns:
        How many jobs were killed.
    """
    with _copies(templates) as stores:
        undisturbed = _run_job(job, stores, None)
        assert undisturbed.survived
        check(stores, undisturbed)
    calls = undisturbed.section.calls
    chosen = _apart(job, calls)
    assert len(chosen) > 3
    if at_most is not None:
        # Each job begins elsewhere, so that together they are killed at all of them.
        every = -(-len(chosen) // at_most)
        chosen = chosen[zlib.crc32(repr(job).encode()) % every :: every]
    killed = 0
    for nth in chosen:
        with _copies(templates) as stores:
            ended = _run_job(job, stores, Fault(nth, how))
            killed += ended.section.hit is not None
            check(stores, ended)
    # Threads may come in another order the next time, and make a call less.
    assert killed >= 0.9 * len(chosen) - 1
    return killed


def _apart(job: _Job, calls: Sequence[Call]) -> list[int]:
    """Places of the calls before which a kill leaves something else, the first being 1.

    Beside those that change its own store, a load makes others that its peers may wait for: of
    these the first of each kind on each file.
    """
    chosen, seen = [], set()
    for n, call in enumerate(calls, 1):
        looks = (call.name, call.paths)
        if call.changes or (job.does == "load" and looks not in seen):
            chosen.append(n)
        seen.add(looks)
    return chosen


# Saving.


def _assert_older_or_newer_stands(job: _Job, stores: list[Path], ended: _Ended) -> None:
    older, newer = job.newest, job.newest + 1
    stood = _start_again(job, stores, ended.pid)
    section = ended.section
    if ended.survived:
        # Without its worker, it lost the one and saved the next.
        assert stood == [newer if section.hit is None else newer + 1, older]
        return
    assert stood in ([older, older - 1], [newer, older, older - 1], [newer, older]), section.hit
    assert section.hit is not None
    commits = [call for call in section.calls[: section.hit_at] if call.commits(newer)]
    if job.ranks > 1:
        # What a rank did not come to keep, its peer may keep for it.
        return
    if any(call.thread == section.hit.thread for call in commits):
        assert stood[0] == newer
    elif not commits:
        assert stood[0] == older


_SAVES = [
    _Job(kind, "save", worker, recycles)
    for kind in KINDS
    for worker in (None, "thread")
    for recycles in (False, True)
]
# Receiving a replica.
_SAVES += [
    _Job("disk", "save", "thread", True, ranks=2, victim=1),
    _Job("memory", "save", None, True, ranks=2, victim=1),
]
_IN_SHORT = [
    _Job("disk", "save", recycles=True),
    _Job("memory", "save", "thread"),
    _Job("disk", "save", "thread", True, ranks=2, victim=1),
]


@pytest.mark.timeout(1800)
@pytest.mark.fault("kill-save", "kill-load")
@pytest.mark.parametrize("job", fixed_rows(_SAVES, _IN_SHORT))
def test_a_job_killed_anywhere_in_a_save_finds_the_older_checkpoint_or_the_new_one(
    job: _Job, filled: Any, long_form: bool, record_property: Record
) -> None:
    templates = filled(job)
    check = partial(_assert_older_or_newer_stands, job)

    killed = _kill_at_each(job, templates, check, None if long_form else 2)

    record_property("cases", killed)


# Starting: making the manager, finding, loading, closing.


def _shards(roots: Sequence[Path]) -> Counter[str]:
    """The contents of all shards, whatever their names."""
    return Counter(
        hashlib.sha256(path.read_bytes()).hexdigest()
        for root in roots
        for path in root.rglob("*")
        if path.suffix in (".safetensors", ".corrupt")
    )


def _leave_behind(root: Path) -> None:
    """What a process that was killed may have left."""
    me = Owner.me()
    folder = root / "session-job" / "0"
    (folder / ".owner").write_text(str(Owner(me.boot, me.pid, 1)))
    for name in ("000000000009.0.1.1.safetensors.dirty", "ahead.1.dirty", "1.1.recycled"):
        (folder / name).write_bytes(bytes(5000))


@pytest.mark.timeout(1800)
@pytest.mark.fault("kill-load")
@pytest.mark.parametrize("kind", fixed_rows(KINDS, {"disk"}))
def test_a_job_killed_anywhere_in_a_start_changes_no_shard_and_can_start_again(
    kind: str, filled: Any, long_form: bool, record_property: Record
) -> None:
    job = _Job(kind, "start", nbytes=_LARGE)
    templates = filled(job, (1, 2, 3))
    # So that one is set aside on the way, and leftovers are removed.
    damage(next(templates[0].rglob(f"{3:012d}.*.safetensors")))
    _leave_behind(templates[0])
    before = _shards(templates)

    def check(stores: list[Path], ended: _Ended) -> None:
        assert _shards(stores) == before
        assert _start_again(job, stores, ended.pid) == [2, 1]
        assert len(list(stores[0].rglob("*.corrupt"))) == 1

    killed = _kill_at_each(job, templates, check, None if long_form else 5)

    record_property("cases", killed)


@pytest.mark.timeout(1800)
@pytest.mark.fault("kill-load")
@pytest.mark.parametrize(
    ("kind", "victim"), fixed_rows(product(KINDS, (0, 1)), {("disk", 0), ("memory", 1)})
)
def test_a_rank_killed_anywhere_in_a_load_from_a_peer_changes_no_shard_and_can_load_again(
    kind: str, victim: int, filled: Any, long_form: bool, record_property: Record
) -> None:
    job = _Job(kind, "load", ranks=2, victim=victim, nbytes=_LARGE)
    templates = filled(job)
    # The node of rank 1 was replaced.
    shutil.rmtree(templates[1] / "session-job")
    (templates[1] / "node-token").unlink()
    before = _shards(templates)

    def check(stores: list[Path], ended: _Ended) -> None:
        # What the peer lacks is made again, so there may be more.
        assert before - _shards(stores) == Counter()
        assert _start_again(job, stores, ended.pid) == [2, 1]

    killed = _kill_at_each(job, templates, check, None if long_form else 1)

    record_property("cases", killed)


@pytest.mark.timeout(1800)
@pytest.mark.fault("kill-load")
@pytest.mark.fault("world-size")
def test_a_rank_killed_anywhere_in_a_load_on_fewer_ranks_changes_no_shard_and_can_load_again(
    filled: Any, long_form: bool, record_property: Record
) -> None:
    jobs = [
        _Job("disk", "load", ranks=2, victim=victim, nbytes=4 * _LARGE, savers=3)
        for victim in (0, 1)
    ]
    templates = filled(jobs[0])
    before = _shards(templates)
    killed = 0

    for job in jobs if long_form else jobs[1:]:

        def check(stores: list[Path], ended: _Ended, job: _Job = job) -> None:
            assert _shards(stores) == before
            assert _start_again(job, stores, ended.pid) == [2, 1]

        killed += _kill_at_each(job, templates, check, None if long_form else 1)

    record_property("cases", killed)
