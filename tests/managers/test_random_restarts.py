"""Jobs with states drawn at random, saved at random cadences, and restarted in fresh processes.

Now and then an object of some rank cannot be rebuilt, or a node is lost. What is loaded is what was
saved, in all that is promised of it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split

import localckpt
from localckpt import RestoreError
from tests.managers.jobs import KINDS, MAX_S, cliques, files, make_manager
from tests.ranks import node_store, run_ranks
from tests.state_dict.states import FrozenSettings, Settings, Tagged, TaggedParameter
from tests.state_dict.zoo import Zoo, assert_same_state, tensors_of

Dirs = Callable[[int], list[Path]]

_RANKS = 2
_SEEDS = (3, 5)
_LONG_SEEDS = [seed for seed in range(40) if seed not in _SEEDS]
_LIVES = 3


class Fragile:
    """A value of a user's class, which some ranks cannot rebuild for a while."""

    is_broken = False

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Fragile and other.value == self.value

    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: dict[str, int]) -> None:
        if type(self).is_broken:
            raise KeyError("value")
        self.__dict__.update(state)


@dataclass(frozen=True)
class _Life:
    """What happens between one start of the job and the next; the same for all ranks."""

    seed: int
    kind: str
    replicated: bool
    expected: int
    """What is found at the start, -1 for nothing."""
    broken: int | None
    """The rank that cannot rebuild its state at first."""
    into: bool
    saves: tuple[tuple[int, bool], ...]
    """Iterations, and whether each is saved behind training."""
    polls_every: int


class _Draw:
    """Draws the states of one rank in one life.

    Args:
        life: What is to happen.
        rank: The rank.
        mesh: Of the job, for values that are spread over its ranks.
    """

    def __init__(self, life: _Life, rank: int, mesh: DeviceMesh) -> None:
        self._life, self._rank, self._mesh = life, rank, mesh

    def state(self, iteration: int) -> dict[str, Any]:
        local = torch.full((2, 3), 10.0 * iteration + self._rank)
        return {
            "zoo": Zoo((self._life.seed, self._rank, iteration)).state(),
            "fsdp2": DTensor.from_local(local, self._mesh, [Split(0)]),
            "fsdp1": init_from_local_shards(
                [Shard.from_tensor_and_offsets(local + 1, [2 * self._rank, 0], self._rank)], 4, 3
            ),
            "progress": {"of": [iteration, Fragile(100 * iteration + self._rank)]},
        }

    def assert_same(self, found: Any, iteration: int) -> None:
        """A state that was loaded is that of an iteration."""
        wanted = self.state(iteration)
        assert list(found) == list(wanted)
        assert_same_state(found["zoo"], wanted["zoo"])
        assert found["progress"] == wanted["progress"]
        assert found["fsdp2"].placements == wanted["fsdp2"].placements
        assert torch.equal(found["fsdp2"].to_local(), wanted["fsdp2"].to_local())
        assert found["fsdp1"].metadata() == wanted["fsdp1"].metadata()
        assert torch.equal(found["fsdp1"].local_tensor(), wanted["fsdp1"].local_tensor())


def _spoil(state: dict[str, Any]) -> None:
    local = [state["fsdp2"].to_local(), state["fsdp1"].local_tensor()]
    for tensor in [*tensors_of(state["zoo"]), *local]:
        if not tensor.is_meta:
            tensor.untyped_storage().fill_(1)


def _live(rank: int, world_size: int, life: _Life) -> None:
    draw = _Draw(life, rank, init_device_mesh("cpu", (world_size,)))
    repl = cliques(1, world_size) if life.replicated else None
    allowed = (Settings, FrozenSettings, Tagged, TaggedParameter, Fragile)
    with (
        make_manager(
            life.kind, node_store(), "job", repl, keep_last=2, safe_globals=allowed
        ) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        assert manager.find_latest() == life.expected
        if life.expected != -1:
            _resume(manager, life, rank, draw)
        for number, (iteration, is_async) in enumerate(life.saves):
            state = draw.state(iteration)
            if is_async:
                queue.schedule_async_request(manager.save(state, iteration, is_async=True))
            else:
                queue.maybe_finalize_async_calls(blocking=True)
                manager.save(state, iteration)
            # Training goes on.
            _spoil(state)
            if number % life.polls_every == 0:
                queue.maybe_finalize_async_calls()
        queue.maybe_finalize_async_calls(blocking=True)
    if repl is not None:
        repl.close()


def _resume(manager: Any, life: _Life, rank: int, draw: _Draw) -> None:
    if life.broken is not None:
        Fragile.is_broken = rank == life.broken
        before = files(node_store())
        with pytest.raises(RestoreError, match=f"rank {life.broken}: .*'progress.of.1'"):
            manager.load()
        assert [f for f in before if f not in files(node_store())] == []
        Fragile.is_broken = False
    given = None
    if life.into:
        _spoil(given := draw.state(life.expected))
    state, ckpt_id = manager.load(into=given)
    assert ckpt_id.iteration == life.expected
    draw.assert_same(state, life.expected)


def _play(seed: int, nodes: list[Path], kind: str) -> int:
    """One job; returns how often it was started."""
    draw = random.Random(seed)
    replicated = draw.random() < 0.7
    iteration, newest = 0, -1
    for _ in range(_LIVES):
        saves = []
        for _ in range(draw.randint(1, 4)):
            iteration += draw.choice([1, 1, 7])
            saves.append((iteration, draw.random() < 0.6))
        life = _Life(
            seed=seed,
            kind=kind,
            replicated=replicated,
            expected=newest,
            broken=draw.choice([None, *range(_RANKS)]),
            into=draw.random() < 0.3,
            saves=tuple(saves),
            polls_every=draw.choice([1, 2, 5]),
        )
        run_ranks(_live, _RANKS, life, store_per_node=nodes)
        newest = iteration
        if replicated and draw.random() < 0.5:
            lost = draw.choice(nodes)
            shutil.rmtree(lost)
            lost.mkdir()
    return _LIVES


@pytest.mark.fault("not-rebuilt", "hard-state", "random-sequence")
@pytest.mark.parametrize(
    "seed", [*_SEEDS, *(pytest.param(n, marks=pytest.mark.long) for n in _LONG_SEEDS)]
)
def test_a_random_job_goes_on_with_what_it_saved(
    seed: int, node_dirs: Dirs, shm_roots: Dirs, record_property: Any
) -> None:
    kind = KINDS[seed // 2 % 2]
    nodes = (node_dirs if kind == "disk" else shm_roots)(_RANKS)

    cases = _play(seed, nodes, kind)

    record_property("cases", cases)
