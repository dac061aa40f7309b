"""A job that is killed at any system call on its stores: what was complete stands, bit for bit.

Each case is a job of its own. The calls are counted in a job that nothing happens to; then one job
after another is killed just before one of them, and started again. Between two calls that change
something a store is the same, so one kill stands for all that come there.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import localckpt
from localckpt import AsyncRequest, FileSystemWriterAsync, GlobalCheckpointManager
from localckpt.storage.owner import Owner
from tests.faults.shared import Drains, assert_nothing_else, iterations_on, state_of
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
from tests.managers.jobs import MAX_S, assert_same, cliques, damage, make_manager, resume, save
from tests.managers.jobs import state_of as local_state_of
from tests.ranks import RanksFailedError, await_announced, node_store, run_ranks, start_ranks

# Several digest blocks, so that damage can lie where finding the shard does not look.
_LARGE = 2 << 20


@dataclass(frozen=True)
class _Operation:
    """What a job does when one of its ranks is killed; all that it has lies below one directory.

    Attributes:
        ranks: How many there are, each on a node of its own.
        victim: The rank that is killed.
    """

    ranks: int = 1
    victim: int = 0
    kind = "disk"

    @property
    def savers(self) -> int:
        """Number of ranks that save what is there before."""
        return self.ranks

    def nodes(self, base: Path) -> list[Path]:
        return [base / f"node{number}" for number in range(self.ranks)]

    def watched(self, base: Path) -> list[Path]:
        """Directories on which a call counts."""
        return self.nodes(base)

    def fill(self, rank: int, base: Path) -> None:
        """Save what is there before."""
        raise NotImplementedError

    def prepare(self, base: Path) -> None:
        """Change what is there before, in no rank."""

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        """Do what the victim is killed in, inside ``dangerous``."""
        raise NotImplementedError

    def apart(self, calls: Sequence[Call]) -> list[int]:
        """Places of the calls before which a kill leaves something else, the first being 1."""
        return [n for n, call in enumerate(calls, 1) if call.changes]

    def start_again(self, rank: int, base: Path) -> list[int]:
        """Load all that can be loaded, the newest first, and go on, as a new job."""
        raise NotImplementedError

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        """Check what the job has left; ``template`` is what it found."""
        raise NotImplementedError

    def stood(self, base: Path) -> list[int]:
        """What all ranks of a new job find."""
        args = (self, base)
        stood, *others = _in_ranks(_start_again, self.ranks, *args, nodes=self.nodes(base))
        assert all(other == stood for other in others)
        return list(stood)


@dataclass(frozen=True)
class _Ended:
    """How a run of a job ended: what its victim did, and whether a rank was told of success."""

    section: Section
    returned: bool


def _in_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, nodes: Sequence[Path]
) -> list[Any]:
    return run_ranks(function, ranks, *args, init_group=ranks > 1, store_per_node=nodes)


def _fill(rank: int, world_size: int, operation: _Operation, base: Path) -> None:
    operation.fill(rank, base)


def _start_again(rank: int, world_size: int, operation: _Operation, base: Path) -> list[int]:
    return operation.start_again(rank, base)


def _act(
    rank: int, world_size: int, operation: _Operation, base: Path, address: str, fault: Fault | None
) -> None:
    if rank == operation.victim:
        operation.act(rank, base, Watched(address).section(fault))
    else:
        operation.act(rank, base, nullcontext())
        await_announced("over", MAX_S)


def _run_once(operation: _Operation, template: Path, fault: Fault | None) -> _Ended:
    """Run the job on a copy of what it finds, and judge what it leaves."""
    base = template.with_name("case")
    shutil.copytree(template, base)
    run = (_act, operation.ranks, operation, base)
    # Whatever the victim left running has ended when the watch has.
    with (
        watch(*operation.watched(base)) as watching,
        start_ranks(
            *(*run, watching.address, fault),
            init_group=operation.ranks > 1,
            store_per_node=operation.nodes(base),
        ) as group,
    ):
        assert watching.over.wait(2 * MAX_S)
        killed = watching.section.hit is not None
        if killed:
            # As a launcher does when one rank of the job is gone.
            for rank in {*range(operation.ranks)} - {operation.victim}:
                group.kill(rank)
        group.announce("over")
        try:
            group.join()
        except RanksFailedError as failed:
            # What the others made of it is not looked at here.
            if not killed or failed.failures.get(operation.victim) != "died: SIGKILL":
                raise
    ended = _Ended(watching.section, any(base.glob("returned.*")))
    operation.judge(template, base, ended)
    shutil.rmtree(base)
    return ended


# On the nodes.


@dataclass(frozen=True)
class _OnNodes(_Operation):
    """Managers of nodes, which find iterations 1 and 2."""

    kind: str = "disk"
    there = (1, 2)
    nbytes = 4000
    replicates = True

    def state(self, rank: int, iteration: int) -> dict[str, Any]:
        return local_state_of(rank, iteration, self.nbytes)

    def load(self, manager: Any, rank: int) -> int:
        """Load the latest, and check every bit of it."""
        state, (iteration, *_) = manager.load()
        assert_same(state, self.state(rank, iteration))
        return int(iteration)

    def repl(self) -> Any:
        return cliques(1, 2) if self.ranks > 1 and self.replicates else nullcontext()

    def manager(self, repl: Any, **options: Any) -> Any:
        return make_manager(self.kind, node_store(), "job", repl, **options)

    def fill(self, rank: int, base: Path) -> None:
        with self.repl() as repl, self.manager(repl, keep_last=9) as manager:
            for iteration in self.there:
                manager.save(self.state(rank, iteration), iteration)

    def start_again(self, rank: int, base: Path) -> list[int]:
        root, stood = node_store(), []
        with self.repl() as repl, self.manager(repl, keep_last=99, **self.options) as manager:
            assert list(root.rglob("*.dirty")) == []
            while look_again(manager) != -1:
                stood.append(self.load(manager, rank))
                # No rank goes on before all have loaded, and have made the copies they lacked.
                look_again(manager)
                # Out of sight, to see what is behind it.
                for path in root.rglob(f"{stood[-1]:012d}.*.safetensors"):
                    path.rename(path.with_suffix(".seen"))
            manager.save(local_state_of(rank, 99), 99)
            assert resume(manager, rank, 99) == "own node"
        assert left_behind(root, (".safetensors", ".seen", ".corrupt")) == []
        return stood

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def __str__(self) -> str:
        at = f"rank {self.victim} of {self.ranks}" * (self.ranks > 1)
        return "-".join(filter(None, (type(self).__name__[1:].lower(), self.kind, at)))


@dataclass(frozen=True)
class _Save(_OnNodes):
    """A save of the next iteration.

    Attributes:
        queued: It is behind training.
        recycles: The job saves once before, so that the save overwrites a retired file.
    """

    queued: bool = False
    recycles: bool = False

    @property
    def newest(self) -> int:
        """The iteration that is complete before."""
        return 3 if self.recycles else 2

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        with (
            localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
            self.repl() as repl,
            self.manager(repl, keep_last=2) as manager,
        ):
            used = queue if self.queued else None
            resume(manager, rank, 2)
            if self.recycles:
                save(manager, local_state_of(rank, 3), 3, used)
                # All ranks have retired iteration 1 when all meet again.
                look_again(manager)
            await_memory_ahead()
            following = self.newest + 1
            with dangerous:
                save(manager, local_state_of(rank, following), following, used)

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        older, newer = self.newest, self.newest + 1
        stood, section = self.stood(base), ended.section
        hit = section.hit
        if hit is None:
            assert stood == [newer, older]
            return
        assert stood in ([older, older - 1], [newer, older, older - 1], [newer, older]), hit
        commits = [call for call in section.calls[: section.hit_at] if call.commits(newer)]
        if self.ranks > 1:
            # What a rank did not come to keep, its peer may keep for it.
            return
        if any(call.thread == hit.thread for call in commits):
            assert stood[0] == newer
        elif not commits:
            assert stood[0] == older

    def __str__(self) -> str:
        how = ("queued" * self.queued, "recycled" * self.recycles)
        return "-".join(filter(None, (super().__str__(), *how)))


def _shards(base: Path) -> Counter[str]:
    """The contents of all shards, whatever their names."""
    return Counter(
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in base.rglob("*")
        if path.suffix in (".safetensors", ".corrupt")
    )


@dataclass(frozen=True)
class _Start(_OnNodes):
    """A start, from making the manager to closing it; the newest shard is damaged."""

    there = (1, 2, 3)
    nbytes = _LARGE

    def prepare(self, base: Path) -> None:
        damage(next(base.rglob(f"{3:012d}.*.safetensors")))
        # What a process that was killed may have left.
        me, folder = Owner.me(), base / "node0" / "session-job" / "0"
        (folder / ".owner").write_text(str(Owner(me.boot, me.pid, 1)))
        for name in ("000000000009.0.1.1.safetensors.dirty", "ahead.1.dirty", "1.1.recycled"):
            (folder / name).write_bytes(bytes(5000))

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        with dangerous, self.manager(None, keep_last=2) as manager:
            assert manager.find_latest() >= 2
            self.load(manager, rank)

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        assert _shards(base) == _shards(template)
        assert self.stood(base) == [2, 1]
        assert len(list(base.rglob("*.corrupt"))) == 1


@dataclass(frozen=True)
class _Load(_OnNodes):
    """A load of which rank 1 gets its shard from rank 0, since its node was replaced."""

    nbytes = _LARGE

    def prepare(self, base: Path) -> None:
        shutil.rmtree(base / "node1")
        (base / "node1").mkdir()

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        with self.repl() as repl:
            manager = self.manager(repl, keep_last=2, **self.options)
            with dangerous, manager:
                assert manager.find_latest() == 2
                self.load(manager, rank)

    def apart(self, calls: Sequence[Call]) -> list[int]:
        """Peers may also wait for what changes nothing: the first look at each file."""
        chosen, seen = [], set()
        for n, call in enumerate(calls, 1):
            if call.changes or (call.name, call.paths) not in seen:
                chosen.append(n)
            seen.add((call.name, call.paths))
        return chosen

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        # What the peer lacks is made again, so there may be more.
        assert _shards(template) - _shards(base) == Counter()
        assert self.stood(base) == [2, 1]


@dataclass(frozen=True)
class _ElasticLoad(_Load):
    """A load on two ranks of what three have saved, each its part."""

    nbytes = 4 * _LARGE
    replicates = False
    savers = 3
    prepare = _Operation.prepare

    @property
    def options(self) -> dict[str, Any]:
        return {"elastic": True}

    def state(self, rank: int, iteration: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        whole = torch.arange(self.nbytes // 4).reshape(-1, 64) * iteration
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        return {"sharded": sharded, "iteration": iteration}

    def load(self, manager: Any, rank: int) -> int:
        state, (iteration, *_) = manager.load(into=self.state(rank, 0))
        assert_same(_local(state), _local(self.state(rank, iteration)))
        return int(iteration)

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        assert _shards(base) == _shards(template)
        assert self.stood(base) == [2, 1]


def _local(state: dict[str, Any]) -> dict[str, Any]:
    """A state with the parts of sharded tensors that this rank has."""
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}


# On shared storage.

_OLDEST, _OLDER, _NEWER, _NEXT = 1, 2, 3, 9


@dataclass(frozen=True)
class _SharedSave(_Operation):
    """A save of iteration 3, in the place of 1 and 2."""

    savers = 1

    def watched(self, base: Path) -> list[Path]:
        return [base / "shared"]

    def manager(self, base: Path, keep_last: int | None = None) -> GlobalCheckpointManager:
        return GlobalCheckpointManager(base / "shared", timeout=MAX_S, keep_last=keep_last)

    def fill(self, rank: int, base: Path) -> None:
        with self.manager(base) as manager:
            for iteration in (_OLDEST, _OLDER):
                manager.save(state_of(iteration), iteration, is_async=True)

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        manager = self.manager(base, keep_last=1)
        assert manager.find_latest() == _OLDER
        state = state_of(_NEWER, part=rank if self.ranks > 1 else None)
        with dangerous, manager:
            manager.save(state, _NEWER, is_async=True)
            manager.wait_until_finished()
            (base / f"returned.{rank}").touch()

    def stood(self, base: Path) -> list[int]:
        """What a job of one rank finds; all of it is whole, and nothing else stays."""
        (stood,) = run_ranks(_start_again, 1, self, base, init_group=False)
        return list(stood)

    def start_again(self, rank: int, base: Path) -> list[int]:
        state = state_of(0)
        with self.manager(base) as manager:
            found = manager.find_latest()
            others = sorted({*iterations_on(base / "shared")} - {found}, reverse=True)
            for iteration in (found, *others, found):
                assert manager.load(into=state, iteration=iteration)[1].iteration == iteration
                assert_same(state, state_of(iteration))
            assert all(iteration < found for iteration in others)
            manager.save(state_of(_NEXT), _NEXT, is_async=False)
        assert_nothing_else(base / "shared")
        with self.manager(base) as manager:
            assert manager.load(into=state)[1].iteration == _NEXT
        assert_same(state, state_of(_NEXT))
        return [found, *others]

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        hit, stood = ended.section.hit, self.stood(base)
        # Nobody but the first rank commits; the calls of another end before it says it has written.
        is_newer = _committed(ended.section) if self.victim == 0 else hit is None
        if is_newer:
            assert stood[0] == _NEWER, hit
        else:
            assert stood == [_OLDER, _OLDEST], hit
        assert not ended.returned or stood[0] == _NEWER, hit
        assert ended.returned or hit is not None

    def __str__(self) -> str:
        return f"{type(self).__name__[1:].lower()}-rank {self.victim} of {self.ranks}"


def _committed(section: Section) -> bool:
    """Whether a victim came to make a checkpoint of the save, by its calls."""
    name = f"iteration_{_NEWER:08d}"
    return any(
        call.name == "rename"
        and call.paths[-1].startswith(name)
        and Path(call.paths[-1]).name.startswith(name)
        for call in section.calls[: section.hit_at]
    )


@dataclass(frozen=True)
class _Drain(_SharedSave):
    """A drain of iteration 3, where shared storage has 2."""

    @property
    def savers(self) -> int:
        return self.ranks

    def watched(self, base: Path) -> list[Path]:
        return [base / "shared", *self.nodes(base)]

    def fill(self, rank: int, base: Path) -> None:
        with Drains(base / "shared", rank) as job:
            for iteration in (_OLDER, _NEWER):
                job.save(iteration)
            job.promote(_OLDER)

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        job = Drains(base / "shared", rank)
        assert job.nodes.load()[1].iteration == _NEWER
        with dangerous, job:
            job.promote(_NEWER)
            (base / f"returned.{rank}").touch()

    def start_again(self, rank: int, base: Path) -> list[int]:
        """Find what is whole, and complete the drain."""
        with Drains(base / "shared", rank) as job:
            found = job.shared.find_latest()
            job.assert_drained(found)
            state, ckpt_id = job.nodes.load()
            assert ckpt_id.iteration == _NEWER
            assert_same(state, job.state(_NEWER))
            job.promote(_NEWER)
            assert job.shared.find_latest() == _NEWER
            job.assert_drained(_NEWER)
        return [found]

    stood = _Operation.stood

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        for metadata in base.glob("shared/iteration_*/.metadata"):
            # What torch takes for a checkpoint is one.
            blank = {"losses": [0.0, 0]}
            dcp.load(blank, checkpoint_id=metadata.parent, no_dist=True)
            assert blank["losses"][1] in (_OLDER, _NEWER)
        assert self.stood(base) in ([[_NEWER]] if ended.returned else [[_OLDER], [_NEWER]])
        assert_nothing_else(base / "shared")
        assert not list(base.rglob("*.corrupt"))


@dataclass(frozen=True)
class _SaveOver(_SharedSave):
    """A save by the writer alone, over a checkpoint that is there."""

    def fill(self, rank: int, base: Path) -> None:
        _save_over(base / "shared", _OLDEST)

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        with localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue, dangerous:
            _save_over(base / "shared", _OLDER, queue)

    def start_again(self, rank: int, base: Path) -> list[int]:
        found = _loaded_by_torch(base / "shared")
        _save_over(base / "shared", _NEXT)
        assert _loaded_by_torch(base / "shared") == _NEXT
        return [found]

    def judge(self, template: Path, base: Path, ended: _Ended) -> None:
        (found,) = self.stood(base)
        assert found == _OLDER or (ended.section.hit is not None and found == _OLDEST)


def _save_over(
    folder: Path, iteration: int, queue: localckpt.AsyncCallsQueue | None = None
) -> None:
    writer = FileSystemWriterAsync(folder, overwrite=True, timeout_s=MAX_S)
    plan = localckpt.save_state_dict_async_plan(state_of(iteration), writer, timeout_s=MAX_S)
    write, stage, args = writer.get_save_function_and_args()
    finish = [lambda: localckpt.save_state_dict_async_finalize(*plan)]
    request = AsyncRequest(write, tuple(args), finish, preload_fn=stage)
    if queue is None:
        request.execute_sync()
    else:
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    writer.close()


def _loaded_by_torch(folder: Path) -> int:
    state = state_of(0)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    iteration = int(state["optimizer"]["step"])
    assert_same(state, state_of(iteration))
    return iteration


_OPERATIONS: list[_Operation] = [
    _Save(recycles=True),
    _Save(queued=True),
    _Save(kind="memory"),
    _Save(kind="memory", queued=True, recycles=True),
    # Receiving a replica.
    _Save(ranks=2, victim=1, queued=True, recycles=True),
    _Save(ranks=2, victim=1, kind="memory", recycles=True),
    *(_Start(kind=kind) for kind in ("disk", "memory")),
    _Load(ranks=2, victim=0),
    _Load(ranks=2, victim=1, kind="memory"),
    *(_ElasticLoad(ranks=2, victim=victim) for victim in (0, 1)),
    *(_SharedSave(*at) for at in ((1, 0), (2, 0), (2, 1))),
    *(_Drain(*at) for at in ((1, 0), (2, 0), (2, 1))),
    _SaveOver(),
]


@pytest.mark.rows(4)
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.fault("kill-save", "kill-load", "trainer-dies")
@pytest.mark.parametrize("operation", _OPERATIONS, ids=str)
def test_a_job_that_is_killed_anywhere_finds_what_was_complete_and_goes_on(
    operation: _Operation,
    tmp_path: Path,
    shm_roots: Callable[[int], list[Path]],
    long_form: bool,
    record_property: Callable[[str, object], None],
) -> None:
    home = shm_roots(1)[0] if operation.kind == "memory" else tmp_path
    template = home / "template"
    nodes = operation.nodes(template)
    for node in nodes:
        node.mkdir(parents=True)
    fillers = operation.savers
    _in_ranks(_fill, fillers, operation, template, nodes=nodes[:fillers])
    operation.prepare(template)
    undisturbed = _run_once(operation, template, None)
    chosen = operation.apart(undisturbed.section.calls)
    assert len(chosen) > 3
    if not long_form:
        chosen = random.Random(str(operation)).sample(chosen, 2)

    ended = [_run_once(operation, template, Fault(nth, "kill")) for nth in chosen]

    killed = sum(one.section.hit is not None for one in ended)
    record_property("cases", killed)
    # Threads may come in another order the next time, and make a call less.
    assert killed >= 0.9 * len(chosen) - 1
