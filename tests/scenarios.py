"""Tests as histories: a job that saves, loses nodes, starts again, and finds what is left.

``job(nodes=2, redundancy=(1, 2)).save(3).lose(0).restart().expect(3, {0: "peer rank 1"}).run()``

What stands between two restarts is one phase: real managers in real rank processes over gloo. The
verbs between phases act on the nodes' directories while no rank runs. Tests make a :class:`Job` by
the fixture ``job``, which fails a test that ends with steps not run. States are made of rank and
iteration and compared bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from localckpt.waiting import wait_until
from tests.managers.jobs import (
    MAX_S,
    Redundancy,
    assert_same,
    files,
    make_manager,
    state_of,
    strategy_of,
)
from tests.ranks import node_store, run_ranks

__all__ = ["Begin", "Job", "require_whole"]

_OWN_NODE: Mapping[int, str] = {}
MakeState = Callable[[int, int], Any]
Step = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Start:
    """How the ranks of a phase make their manager."""

    kind: str
    ranks: int
    on: tuple[int, ...]
    redundancy: Redundancy
    options: Mapping[str, Any]

    @contextmanager
    def manager(self) -> Iterator[Any]:
        with (
            strategy_of(self.redundancy, self.options.get("timeout", MAX_S)) as repl,
            make_manager(self.kind, node_store(), "job", repl, **self.options) as manager,
        ):
            yield manager


class Job:
    """One job on nodes, over its restarts.

    Args:
        nodes: The nodes' directories; verbs name a node by its number in this list.
        ranks: Of the job, dealt to the nodes in blocks; one on each node if not given.
        kind: Of manager.
        redundancy: ``(jump, factor)`` of the cliques, ``"parity m of g"``, or ``None``.
        state: Makes the state of a rank at an iteration.
        options: For the managers of every phase, until a restart gives others.
    """

    def __init__(
        self,
        nodes: Sequence[Path],
        ranks: int | None = None,
        kind: str = "disk",
        redundancy: Redundancy = None,
        state: MakeState = state_of,
        **options: Any,
    ) -> None:
        self.nodes = list(nodes)
        self._state = state
        on = tuple(range(len(nodes)))
        self._start = _Start(kind, ranks or len(nodes), on, redundancy, options)
        self.pending: list[Step] = []

    # Steps of the running ranks.

    def save(self, *iterations: int, value: int | None = None) -> Job:
        """Save each iteration; ``value`` is the iteration whose state it is, if another one's."""
        return self._then(_save, iterations, value, self._state)

    def expect(
        self,
        iteration: int,
        sources: Mapping[int, str] | None = _OWN_NODE,
        value: int | None = None,
        asked: bool = False,
    ) -> Job:
        """Find and load this iteration and no other, bit for bit.

        Args:
            sources: Where a rank's shard comes from; from its own node, if the rank is not named,
                or from anywhere if ``None``.
            value: The iteration whose state it is, if another one's.
            asked: Load the iteration by its number, without asking which is the latest.
        """
        return self._then(_expect, iteration, sources, value, asked, self._state)

    def find(self, iteration: int) -> Job:
        """This iteration is the latest; nothing is loaded, so a save may go back behind it."""
        return self._then(_find, iteration)

    def status(self, text: str) -> Job:
        """The manager says this of its newest checkpoint."""
        return self._then(_status, text)

    def lacking(self, shards: int) -> Job:
        """So many shards of the loaded checkpoint lack copies."""
        return self._then(_lacking, shards)

    def repaired(self) -> Job:
        """The missing copies are made behind training, in time."""
        return self._then(_repaired)

    def whole(self, *iterations: int) -> Job:
        """These are all checkpoints, the newest first, and soon all are replicated."""
        return self._then(require_whole, iterations)

    def call(self, fn: Callable[..., None], *args: Any, **options: Any) -> Job:
        """Run ``fn(manager, *args)`` on every rank; for what has no verb, with its assertions."""
        return self._then(partial(fn, **options), *args)

    # Between phases.

    def restart(
        self,
        ranks: int | None = None,
        on: Sequence[int] | None = None,
        redundancy: Redundancy = "as before",
        **options: Any,
    ) -> Job:
        """End all ranks; new ones start.

        Args:
            ranks: How many, if not as many as before.
            on: The nodes that they are dealt to, in this order; all in theirs if not given.
            redundancy: Another one, or none.
            options: Of the managers, beside those that they had.
        """
        self.run()
        self._start = replace(
            self._start,
            ranks=ranks or self._start.ranks,
            on=tuple(range(len(self.nodes)) if on is None else on),
            redundancy=self._start.redundancy if redundancy == "as before" else redundancy,
            options={**self._start.options, **options},
        )
        return self

    def lose(self, *nodes: int) -> Job:
        """End all ranks and empty these nodes."""
        self.run()
        for node in nodes:
            shutil.rmtree(self.nodes[node])
            self.nodes[node].mkdir()
        return self

    def remove(self, pattern: str, *nodes: int) -> Job:
        """End all ranks and remove the file of this name, on these nodes or on all."""
        self.run()
        where = [self.nodes[node] for node in nodes or range(len(self.nodes))]
        (found,) = [path for node in where for path in node.rglob(pattern)]
        found.unlink()
        return self

    def files(self) -> list[str]:
        """End all ranks; the files of all nodes."""
        self.run()
        return files(*self.nodes)

    def run(self, dead: Collection[int] = ()) -> None:
        """Run the steps that wait, as one phase, in which these ranks die."""
        steps, self.pending = self.pending, []
        if steps:
            on = [self.nodes[node] for node in self._start.on]
            # With time for ranks that import DTensors at once.
            phase = (_phase, self._start.ranks, self._start, steps)
            run_ranks(*phase, store_per_node=on, timeout_s=120.0, expect_dead=dead)

    def _then(self, fn: Callable[..., None], *args: Any) -> Job:
        self.pending.append((fn, args))
        return self


def _phase(rank: int, world_size: int, start: _Start, steps: Sequence[Step]) -> None:
    with start.manager() as manager:
        for fn, args in steps:
            fn(manager, *args)


def _save(manager: Any, iterations: Sequence[int], value: int | None, make: MakeState) -> None:
    for iteration in iterations:
        state = make(manager.rank, iteration if value is None else value)
        manager.save(state, iteration)


def _expect(
    manager: Any,
    iteration: int,
    sources: Mapping[int, str] | None,
    value: int | None,
    asked: bool,
    make: MakeState,
) -> None:
    if asked:
        state, ckpt_id = manager.load(iteration=iteration)
    else:
        assert manager.find_latest() == iteration
        state, ckpt_id = manager.load()
    assert ckpt_id == (iteration, manager.rank, manager.session_id)
    assert_same(state, make(manager.rank, iteration if value is None else value))
    assert manager.last_load.iteration == iteration
    assert manager.last_load.nbytes > 0
    if sources is not None:
        assert manager.last_load.source == sources.get(manager.rank, "own node")


def _find(manager: Any, iteration: int) -> None:
    assert manager.find_latest() == iteration


def _status(manager: Any, text: str) -> None:
    assert str(manager.status()[0]) == text


def _lacking(manager: Any, shards: int) -> None:
    assert manager.degraded == shards


def require_whole(manager: Any, iterations: Sequence[int]) -> None:
    """These are all checkpoints, the newest first, and soon all are replicated."""
    wait_until(lambda: not any(s.lacking for s in manager.status()), MAX_S)
    manager._saves.repairs.finish()
    found = [(s.iteration, s.reached.partition(",")[0], s.lacking) for s in manager.status()]
    assert found == [(iteration, "replicated", 0) for iteration in iterations]


def _repaired(manager: Any) -> None:
    assert wait_until(lambda: manager.degraded == 0, MAX_S)


Begin = Callable[..., Job]
"""Fixture ``job``, which begins a history."""
