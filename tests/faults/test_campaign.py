"""Random sequences of faults, each of which another test makes alone: what was complete is loaded.

A job has one life after another. Every decision is drawn from the seed and the number of the life,
so that a seed takes the same steps however the timing turns out.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from localckpt import AsyncCallsQueue, CheckpointingException, parse_group_sequence
from tests.managers.jobs import NodesOf, assert_same, cliques, make_manager, save, state_of
from tests.ranks import announce, node_store, start_ranks

_SEEDS = (96, 116)
_LIVES, _LONG_LIVES = 5, 20
_LONG_S = 600.0
_LIMIT_S = 3600
_TIMEOUT_S, _PATIENT_S = 5.0, 60.0


@dataclass(frozen=True)
class _Plan:
    """One life of the job: it finds and loads, and then saves."""

    kind: str
    keep_last: int
    # By how much each is above the one before, and whether it is behind training.
    saves: tuple[tuple[int, bool], ...]
    first: int  # attempt to save
    # What a rank gets, how long after which of its saves has begun, or -1 for the load.
    signal: signal.Signals | None = None
    victim: int = -1
    hit: int = -1
    after_s: float = 0.0


def _state(rank: int, iteration: int, attempt: int) -> dict[str, Any]:
    """Another state in each attempt; one in four is larger than a block of digests, or two."""
    nbytes = 2_600_000 if attempt % 4 == 1 else 3000 + 700 * (attempt % 3)
    return {"attempt": attempt} | state_of(rank, 1000 * attempt + iteration, nbytes)


def _live(rank: int, world_size: int, plan: _Plan) -> None:
    """Announce what was found, and of which attempt, what was complete, and the error if any."""
    found, loaded, complete, error = -1, -1, list[tuple[int, int]](), ""
    # Where nobody is lost, ranks may be as slow as the machine is busy.
    timeout_s = _PATIENT_S if plan.signal is None else _TIMEOUT_S

    def may_be_hit(number: int) -> None:
        if plan.signal is not None and (rank, number) == (plan.victim, plan.hit):
            threading.Timer(plan.after_s, os.kill, (os.getpid(), plan.signal)).start()

    with (
        cliques(1, 2, timeout_s) as replicas,
        AsyncCallsQueue(timeout_s=timeout_s) as queue,
        ExitStack() as stack,
    ):
        try:
            options = {"keep_last": plan.keep_last, "timeout": timeout_s}
            manager = make_manager(plan.kind, node_store(), "job", replicas, **options)
            stack.enter_context(manager)
            may_be_hit(-1)
            found = manager.find_latest()
            if found != -1:
                state, ckpt_id = manager.load()
                found, loaded = ckpt_id.iteration, state["attempt"]
                assert_same(state, _state(rank, found, loaded))
            iteration = max(found, 0)
            for number, (step, is_async) in enumerate(plan.saves):
                may_be_hit(number)
                iteration, attempt = iteration + step, plan.first + number
                state = _state(rank, iteration, attempt)
                save(manager, state, iteration, queue if is_async else None)
                complete.append((iteration, attempt))
        except CheckpointingException as raised:
            error = f"{type(raised).__name__}: {raised}"
        announce(f"told {rank}", (found, loaded, complete, error))
        if plan.signal is not None:
            # As a launcher ends a job that has lost a rank.
            time.sleep(60.0)


@dataclass
class _Checkpoint:
    """A checkpoint that all ranks called complete, and who has copies of it: (owner, node)."""

    iteration: int
    attempt: int
    copies: set[tuple[int, Path]]


class _Campaign:
    """A job, its nodes in the order of the ranks, and what it was promised."""

    def __init__(self, kind: str, keep_last: int, nodes: list[Path]) -> None:
        self.trail: list[str] = []
        self._kind, self._keep_last, self._nodes = kind, keep_last, nodes
        self._cliques = parse_group_sequence(1, 2, len(nodes))
        self._kept: dict[Path, Path] = {}
        self._complete: list[_Checkpoint] = []
        self._attempts = 0
        # Of a save that lost a rank nobody knows what came of it, until the next start has loaded.
        self._is_unsure = False

    def live(self, choice: random.Random, peaceful: bool = False) -> None:
        """Have up to two harms come to the nodes, and then a life of the job."""
        harms = [self._lose_node, self._node_of_old, self._move_ranks, self._damage, self._swap]
        harmed = [] if self._is_unsure or peaceful else choice.choices(harms, k=choice.randrange(3))
        for harm in harmed:
            self.trail.append(harm.__name__)
            harm(choice)
        saves = tuple((choice.randint(1, 3), choice.random() < 0.5) for _ in range(3))
        plan = _Plan(self._kind, self._keep_last, saves, self._attempts)
        if self.trail and not peaceful and choice.random() < 0.5:
            sig = choice.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP])
            victim, hit = choice.randrange(len(self._nodes)), choice.randrange(-1, 3)
            plan = replace(plan, signal=sig, victim=victim, hit=hit, after_s=choice.uniform(0, 0.2))
        self.trail.append(str(plan))
        before = self._shards()
        with start_ranks(_live, len(self._nodes), plan, store_per_node=self._nodes) as group:
            asked = [rank for rank in range(len(self._nodes)) if rank != plan.victim]
            told = [group.await_announced(f"told {rank}", 90.0) for rank in asked]
            if plan.signal is None:
                group.join(60.0)
        self.trail.append(str(told))
        self._judge(plan, told)
        assert not [p for p in before if not (p.exists() or Path(f"{p}.corrupt").exists())] or any(
            complete for _, _, complete, _ in told
        )

    def _judge(self, plan: _Plan, told: list[tuple[int, int, list[tuple[int, int]], str]]) -> None:
        lost, everybody = plan.signal is not None, range(len(self._nodes))
        self._attempts += len(plan.saves)
        errors = [error for *_, error in told if error]
        assert not errors or (lost and len(errors) == len(told)), errors
        ends = [complete for _, _, complete, _ in told]
        assert lost or all(end == ends[0] for end in ends)
        # All ranks have one attempt, of no older checkpoint than there is.
        starts = {(found, loaded) for found, loaded, _, error in told if loaded != -1 or not error}
        if starts:
            ((found, loaded),) = starts
            whole = [c for c in self._complete if {o for o, _ in c.copies} == {*everybody}]
            least = max(whole, key=lambda c: c.attempt, default=None)
            assert least is None or found >= least.iteration or loaded > least.attempt, least
            older = [] if self._is_unsure else [c for c in self._complete if c.attempt <= loaded]
            kept_by = {
                (o, self._nodes[k]) for clique in self._cliques for o in clique for k in clique
            }
            # What one rank has called complete is there, whatever the others were told.
            new = [_Checkpoint(*saved, {*kept_by}) for saved in max(ends, key=len)]
            self._complete = [*older, *new][-self._keep_last :]
            for checkpoint in new[-self._keep_last :] if not lost else ():
                for owner, node in kept_by:
                    pattern = f"*/*/{checkpoint.iteration:012d}.{owner}.*.safetensors"
                    assert list(node.glob(pattern)), (checkpoint, node)
        self._is_unsure = lost

    def _lose_node(self, choice: random.Random) -> None:
        node = choice.choice(sorted(self._nodes))
        shutil.rmtree(node)
        node.mkdir()
        self._harm(node)

    def _node_of_old(self, choice: random.Random) -> None:
        """A node is remembered; or is as it was when it was."""
        node = choice.choice(sorted(self._nodes))
        if node in self._kept:
            shutil.rmtree(node)
            shutil.move(self._kept.pop(node), node)
            self._harm(node)
        else:
            self._kept[node] = node.with_name(f"{node.name}-kept")
            shutil.copytree(node, self._kept[node])

    def _move_ranks(self, choice: random.Random) -> None:
        choice.shuffle(self._nodes)

    def _damage(self, choice: random.Random) -> None:
        """Flip a bit of a shard, overwrite a part, or cut the file off."""
        for path in self._some_shards(choice, 1):
            at, way = choice.randrange(path.stat().st_size), choice.choice(("flip", "zeros", "cut"))
            with path.open("r+b") as file:
                file.seek(at)
                found = file.read(1 if way == "flip" else 5000)
                file.seek(at)
                file.write(bytes([found[0] ^ 4]) if way == "flip" else bytes(len(found)))
                if way == "cut":
                    file.truncate(at)

    def _swap(self, choice: random.Random) -> None:
        """Let two files change their names."""
        paths = self._some_shards(choice, 2)
        if len(paths) == 2:
            aside = paths[0].rename(paths[0].with_name("aside"))
            paths[1].rename(paths[0])
            aside.rename(paths[1])

    def _some_shards(self, choice: random.Random, count: int) -> list[Path]:
        there = self._shards()
        chosen = choice.sample(there, min(count, len(there)))
        for path in chosen:
            iteration, owner = map(int, re.findall(r"^(\d+)\.(\d+)\.", path.name)[0])
            self._harm(next(n for n in self._nodes if n in path.parents), iteration, owner)
        return chosen

    def _shards(self) -> list[Path]:
        return sorted(path for node in self._nodes for path in node.glob("*/*/*.safetensors"))

    def _harm(self, node: Path, iteration: int | None = None, owner: int | None = None) -> None:
        """What a node has of an iteration and a rank, or all, is no longer counted on."""
        for c in self._complete:
            if iteration in (None, c.iteration):
                c.copies -= {x for x in c.copies if x[1] == node and owner in (None, x[0])}

    def clean_up(self) -> None:
        for kept in self._kept.values():
            shutil.rmtree(kept)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without a seed a case draws one; without a number of steps it goes on for ten minutes."""
    option = metafunc.config.getoption
    seed, count = option("--seed"), option("--steps")
    courses: list[tuple[int | None, int | None]] = [(s, count or _LIVES) for s in _SEEDS]
    if seed is not None:
        courses = [(seed, count or _LONG_LIVES)]
    elif option("--faults"):
        courses = [(None, count)]
    limit = pytest.mark.timeout(_LIMIT_S if seed is count is None else 0)
    metafunc.parametrize(("seed", "count"), [pytest.param(*one, marks=limit) for one in courses])


@pytest.mark.fault("random-sequence")
def test_all_guarantees_hold_in_random_sequences_of_faults(
    seed: int | None,
    count: int | None,
    nodes_of: NodesOf,
    record_property: Callable[[str, object], None],
) -> None:
    end = time.monotonic() + _LONG_S if count is None else float("inf")
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    choice, lives = random.Random(str(seed)), 0
    kind, world_size = choice.choice(["disk", "memory"]), choice.choice([3, 4])
    nodes = nodes_of(kind, world_size)
    campaign = _Campaign(kind, choice.choice([1, 2, 3]), nodes)

    try:
        while lives != count and time.monotonic() < end:
            campaign.live(random.Random(f"{seed}/{lives}"))
            lives += 1
        # Whatever happened, the job starts, saves, and leaves in peace.
        campaign.live(choice, peaceful=True)
        assert not [path for node in nodes for path in node.rglob("*.dirty")]
    finally:
        print("\n".join(campaign.trail))
        print(f"To run it again: make faults SEED={seed} STEPS={lives}")
        campaign.clean_up()

    record_property("cases", lives)
