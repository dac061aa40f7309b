"""A job that is killed at any system call on its stores: what was complete stands, bit for bit.

The calls are counted in a job that nothing happens to; then one job after another is killed just
before one that changes something, and started again.
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
import torch.distributed.checkpoint as dcp

from localckpt import AsyncCallsQueue, GlobalCheckpointManager
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
from tests.managers.jobs import (
    IN_PIECES_NBYTES,
    MAX_S,
    assert_same,
    cliques,
    damage,
    make_manager,
    resume,
    save,
)
from tests.managers.jobs import state_of as local_state_of
from tests.ranks import RanksFailedError, await_announced, node_store, run_ranks, start_ranks


@dataclass(frozen=True)
class _Operation:
    """What a job does when one rank, the victim, is killed; all of it lies below one directory."""

    kind: str = "disk"
    ranks: int = 1
    victim: int = 0

    def nodes(self, base: Path) -> list[Path]:
        return [base / f"node{number}" for number in range(self.ranks)]

    def watched(self, base: Path) -> list[Path]:
        """Directories on which a call counts."""
        return self.nodes(base)

    def in_ranks(self, call: Callable[..., Any], base: Path) -> list[Any]:
        nodes = self.nodes(base)
        return run_ranks(call, self.ranks, base, init_group=self.ranks > 1, store_per_node=nodes)

    def fill(self, rank: int, world_size: int, base: Path) -> None:
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

    def start_again(self, rank: int, world_size: int, base: Path) -> list[int]:
        """Load all that can be loaded, the newest first, and go on, as a new job."""
        raise NotImplementedError

    def judge(self, template: Path, base: Path, section: Section, returned: bool) -> None:
        """Check what the job has left of ``template``; a rank may have been told of success."""
        raise NotImplementedError

    def stood(self, base: Path) -> list[int]:
        """What all ranks of a new job find."""
        stood, *others = self.in_ranks(self.start_again, base)
        assert all(other == stood for other in others)
        return list(stood)


def _act(
    rank: int, world_size: int, operation: _Operation, base: Path, address: str, fault: Fault | None
) -> None:
    if rank == operation.victim:
        operation.act(rank, base, Watched(address).section(fault))
    else:
        operation.act(rank, base, nullcontext())
        await_announced("over", MAX_S)


def _run_once(operation: _Operation, template: Path, fault: Fault | None) -> Section:
    """Run the job on a copy of what it finds, and judge what it leaves."""
    base = template.with_name("case")
    shutil.copytree(template, base)
    # Whatever the victim left running has ended when the watch has.
    with (
        watch(*operation.watched(base)) as watching,
        start_ranks(
            *(_act, operation.ranks, operation, base, watching.address, fault),
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
    operation.judge(template, base, watching.section, any(base.glob("returned.*")))
    shutil.rmtree(base)
    return watching.section


@dataclass(frozen=True)
class _OnNodes(_Operation):
    """Managers of nodes, which find iterations 1 and 2."""

    there = (1, 2)
    nbytes = 4000

    def state(self, rank: int, iteration: int) -> dict[str, Any]:
        return local_state_of(rank, iteration, self.nbytes)

    def load(self, manager: Any, rank: int) -> int:
        """Load the latest, and check every bit of it."""
        state, (iteration, *_) = manager.load()
        assert_same(state, self.state(rank, iteration))
        return int(iteration)

    def repl(self) -> Any:
        return cliques(1, 2) if self.ranks > 1 else nullcontext()

    def manager(self, repl: Any, **options: Any) -> Any:
        return make_manager(self.kind, node_store(), "job", repl, **options)

    def fill(self, rank: int, world_size: int, base: Path) -> None:
        with self.repl() as repl, self.manager(repl, keep_last=9) as manager:
            for iteration in self.there:
                manager.save(self.state(rank, iteration), iteration)

    def start_again(self, rank: int, world_size: int, base: Path) -> list[int]:
        root, stood = node_store(), []
        with self.repl() as repl, self.manager(repl, keep_last=99) as manager:
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


@dataclass(frozen=True)
class _Save(_OnNodes):
    """A save of the next iteration, behind training or not; it may overwrite a retired file."""

    queued: bool = False
    recycles: bool = False

    @property
    def newest(self) -> int:
        """The iteration that is complete before."""
        return 3 if self.recycles else 2

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        with (
            AsyncCallsQueue(timeout_s=MAX_S) as queue,
            self.repl() as repl,
            self.manager(repl, keep_last=2) as manager,
        ):
            used = queue if self.queued else None
            assert self.load(manager, rank) == 2
            if self.recycles:
                save(manager, self.state(rank, 3), 3, used)
                # All ranks have retired iteration 1 when all meet again.
                look_again(manager)
            await_memory_ahead()
            following = self.newest + 1
            with dangerous:
                save(manager, self.state(rank, following), following, used)

    def judge(self, template: Path, base: Path, section: Section, returned: bool) -> None:
        older, newer = self.newest, self.newest + 1
        stood, hit = self.stood(base), section.hit
        if hit is None:
            assert stood == [newer, older]
            return
        assert stood in ([older, older - 1], [newer, older, older - 1], [newer, older]), hit
        commits = [
            call
            for call in section.calls[: section.hit_at]
            if call.name.startswith("rename")
            and Path(call.paths[-1]).match(f"{newer:012d}.*.safetensors")
        ]
        # What a rank of several did not come to keep, its peer may keep for it.
        if self.ranks == 1 and any(call.thread == hit.thread for call in commits):
            assert stood[0] == newer
        elif self.ranks == 1 and not commits:
            assert stood[0] == older


@dataclass(frozen=True)
class _SaveInPieces(_Save):
    kind: str = "pieces"
    nbytes = IN_PIECES_NBYTES


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
    # Several digest blocks, so that damage can lie where finding the shard does not look.
    nbytes = 2 << 20

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

    def judge(self, template: Path, base: Path, section: Section, returned: bool) -> None:
        assert _shards(base) == _shards(template)
        assert self.stood(base) == [2, 1]
        assert len(list(base.rglob("*.corrupt"))) == 1


@dataclass(frozen=True)
class _Load(_OnNodes):
    """A load of which rank 1 gets its shard from rank 0, since its node was replaced."""

    nbytes = 2 << 20

    def prepare(self, base: Path) -> None:
        shutil.rmtree(base / "node1")
        (base / "node1").mkdir()

    def act(self, rank: int, base: Path, dangerous: Any) -> None:
        with self.repl() as repl:
            manager = self.manager(repl, keep_last=2)
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

    def judge(self, template: Path, base: Path, section: Section, returned: bool) -> None:
        # What the peer lacks is made again, so there may be more.
        assert _shards(template) - _shards(base) == Counter()
        assert self.stood(base) == [2, 1]


_OLDEST, _OLDER, _NEWER, _NEXT = 1, 2, 3, 9


@dataclass(frozen=True)
class _SharedSave(_Operation):
    """A save of iteration 3, in the place of 1 and 2, which one rank has saved."""

    def watched(self, base: Path) -> list[Path]:
        return [base / "shared"]

    def in_ranks(self, call: Callable[..., Any], base: Path) -> list[Any]:
        return run_ranks(call, 1, base, init_group=False)

    def manager(self, base: Path, keep_last: int | None = None) -> GlobalCheckpointManager:
        return GlobalCheckpointManager(base / "shared", timeout=MAX_S, keep_last=keep_last)

    def fill(self, rank: int, world_size: int, base: Path) -> None:
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

    def start_again(self, rank: int, world_size: int, base: Path) -> list[int]:
        """All of what is found is whole, and nothing else stays."""
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

    def judge(self, template: Path, base: Path, section: Section, returned: bool) -> None:
        hit, stood = section.hit, self.stood(base)
        # Nobody but the first rank commits; the calls of another end before it says it has written.
        is_newer = hit is None
        if self.victim == 0:
            targets = [c.paths[-1] for c in section.calls[: section.hit_at] if c.name == "rename"]
            folder = f"iteration_{_NEWER:08d}"
            is_newer = any(path.startswith(folder) and "/" not in path for path in targets)
        if is_newer:
            assert stood[0] == _NEWER, hit
        else:
            assert stood == [_OLDER, _OLDEST], hit
        assert not returned or stood[0] == _NEWER, hit
        assert returned or hit is not None


@dataclass(frozen=True)
class _Drain(_SharedSave):
    """A drain of iteration 3, where shared storage has 2."""

    in_ranks = _Operation.in_ranks

    def watched(self, base: Path) -> list[Path]:
        return [base / "shared", *self.nodes(base)]

    def fill(self, rank: int, world_size: int, base: Path) -> None:
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

    def start_again(self, rank: int, world_size: int, base: Path) -> list[int]:
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

    def judge(self, template: Path, base: Path, section: Section, returned: bool) -> None:
        for metadata in base.glob("shared/iteration_*/.metadata"):
            # What torch takes for a checkpoint is one.
            blank = {"losses": [0.0, 0]}
            dcp.load(blank, checkpoint_id=metadata.parent, no_dist=True)
            assert blank["losses"][1] in (_OLDER, _NEWER)
        assert self.stood(base) in ([[_NEWER]] if returned else [[_OLDER], [_NEWER]])
        assert_nothing_else(base / "shared")
        assert not list(base.rglob("*.corrupt"))


_OPERATIONS: list[_Operation] = [
    _Save(recycles=True),
    _Save(queued=True),
    _SaveInPieces(queued=True, recycles=True),
    _Save("memory"),
    _Save("memory", queued=True, recycles=True),
    # Receiving a replica.
    _Save(ranks=2, victim=1, queued=True, recycles=True),
    _Save("memory", 2, 1, recycles=True),
    *(_Start(kind) for kind in ("disk", "memory")),
    _Load("disk", 2, 0),
    _Load("memory", 2, 1),
    *(made("disk", *at) for made in (_SharedSave, _Drain) for at in ((1, 0), (2, 0), (2, 1))),
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
    for node in operation.nodes(template):
        node.mkdir(parents=True)
    operation.in_ranks(operation.fill, template)
    operation.prepare(template)
    chosen = operation.apart(_run_once(operation, template, None).calls)
    assert len(chosen) > 3
    if not long_form:
        chosen = random.Random(str(operation)).sample(chosen, 2)

    ended = [_run_once(operation, template, Fault(nth, "kill")) for nth in chosen]

    killed = sum(section.hit is not None for section in ended)
    record_property("cases", killed)
    # Threads may come in another order the next time, and make a call less.
    assert killed >= 0.9 * len(chosen) - 1
