"""A rank dies while the shard of another is brought to it; what it is told, and what comes next."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localckpt import PeerLostError
from tests.managers.jobs import assert_same, cliques, error_of, files, make_manager, state_of
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]

_NEWEST = 7
_NBYTES = 24 << 20
_TIMEOUT_S = 5.0
# Rank 0 sends to rank 2, whose node is empty; rank 1 has its own.
_POINTS = [
    (0, "before all"),
    (0, "read 1"),
    (0, "read 3"),
    (0, "read 6"),
    (0, "after all"),
    (1, "before all"),
    (1, "after all"),
    (2, "before all"),
    (2, "room"),
    (2, "half of it"),
    (2, "all of it"),
    (2, "after all"),
]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Dying:
    """A shard that ends the process which reads it."""

    def __init__(self, source: Any, reads: int) -> None:
        self._source = source
        self._reads_left = reads
        self.nbytes = source.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        self._reads_left -= 1
        if self._reads_left == 0:
            _die()
        view: memoryview = self._source.read(start, stop)
        return view

    def close(self) -> None:
        self._source.close()


def _dies_when_written(place: memoryview) -> threading.Thread:
    def watch() -> None:
        while not any(place):
            time.sleep(0.0005)
        _die()

    assert not any(place)
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    return watching


def _make_mortal(repl: Any, point: str) -> None:
    """Have the process die while it takes part in bringing shards to other ranks."""
    retrieve = repl.retrieve_image
    watching: list[threading.Thread] = []

    def retrieve_image(plan: Any, open_source: Any, accept: Any, timeout_s: float) -> Any:
        if point == "before all":
            _die()

        def opened(id_: Any) -> Any:
            source = open_source(id_)
            return _Dying(source, int(point.split()[1])) if "read" in point else source

        def room(id_: Any, nbytes: int) -> memoryview:
            if point == "room":
                _die()
            view: memoryview = accept(id_, nbytes)
            if point.endswith("of it"):
                stop = nbytes // 2 if "half" in point else nbytes
                watching.append(_dies_when_written(view[stop - 16 : stop]))
            return view

        received = retrieve(plan, opened, room, timeout_s)
        for thread in watching:
            thread.join(_TIMEOUT_S)
        if point == "after all":
            _die()
        return received

    repl.retrieve_image = retrieve_image


def _save_all(rank: int, world_size: int) -> None:
    repl = cliques(1, 3)
    with make_manager("disk", node_store(), "job", repl) as manager:
        manager.save(state_of(rank, _NEWEST, _NBYTES), _NEWEST)
    repl.close()


def _load_while_one_dies(rank: int, world_size: int, victim: int, point: str) -> tuple[str, float]:
    repl = cliques(1, 3, _TIMEOUT_S)
    with make_manager("disk", node_store(), "job", repl, timeout=_TIMEOUT_S) as manager:
        assert manager.find_latest() == _NEWEST
        if rank == victim:
            _make_mortal(repl, point)
        began = time.monotonic()
        text = error_of(manager.load, PeerLostError)
        took_s = time.monotonic() - began
    repl.close()
    return text, took_s


def _load_again(rank: int, world_size: int) -> str:
    repl = cliques(1, 3)
    with make_manager("disk", node_store(), "job", repl) as manager:
        assert manager.find_latest() == _NEWEST
        state, _ = manager.load()
        assert_same(state, state_of(rank, _NEWEST, _NBYTES))
        source = str(manager.last_load.source)
    repl.close()
    return source


@pytest.mark.rows(1)
@pytest.mark.fault("lost-during-recovery")
@pytest.mark.parametrize(("victim", "point"), _POINTS)
def test_who_is_lost_while_a_node_is_restored_is_named_and_the_next_start_loads(
    victim: int, point: str, node_dirs: Dirs
) -> None:
    nodes = node_dirs(3)
    run_ranks(_save_all, 3, store_per_node=nodes)
    _empty(nodes[2])
    before = [files(node) for node in nodes[:2]]

    told = run_ranks(
        *(_load_while_one_dies, 3, victim, point), store_per_node=nodes, expect_dead=[victim]
    )

    for rank in {0, 1, 2} - {victim}:
        text, took_s = told[rank]
        assert re.search(rf"\brank {victim}\b", text), text
        assert took_s < 4 * _TIMEOUT_S
    assert [files(node) for node in nodes[:2]] == before
    # Its process was restarted on the same node, or on an empty one.
    sources = {0: "own node", 1: "own node", 2: "peer rank 0"}
    others = node_dirs(3)
    for node, other in zip(nodes, others, strict=True):
        shutil.copytree(node, other, dirs_exist_ok=True)
    assert run_ranks(_load_again, 3, store_per_node=nodes) == list(sources.values())
    _empty(others[victim])
    left = min({0, 1} - {victim})
    sources |= dict.fromkeys((victim, 2), f"peer rank {left}")
    assert run_ranks(_load_again, 3, store_per_node=others) == list(sources.values())


def _empty(node: Path) -> None:
    shutil.rmtree(node)
    node.mkdir()
