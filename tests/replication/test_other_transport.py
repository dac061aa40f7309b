"""Another transport is one module of its own and one line of ``transport.connect``.

Here messages go through the job's store: copies, parity, recovery and elastic loads need to know
nothing of it.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

import localckpt
from localckpt.ranks.job_store import default_store
from localckpt.replication import transport
from tests.managers.jobs import MAX_S, assert_same, make_manager, save, state_of
from tests.ranks import node_store, run_ranks

Dirs = Callable[[int], list[Path]]


class _StoreConnections:
    """Connections that put each message under a key of its own, which the receiver removes."""

    sent_nbytes = 0

    def __init__(self, name: str, ranks: Collection[int], rank: int, *_: Any, **__: Any) -> None:
        self.rank, self.ranks = rank, sorted({rank, *ranks})
        self.store = PrefixStore(f"other/{name}", default_store())
        self.is_cut = False
        self._counts = Counter[str]()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        content = tensor.numpy().tobytes()
        _StoreConnections.sent_nbytes += len(content)
        # An empty value would be none.
        self.store.set(self._next(f"{self.rank}-{peer}/{tag}"), content + b".")
        return _Sent()

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return _Coming(self, self._next(f"{peer}-{self.rank}/{tag}"), tensor)

    def disconnect(self) -> None:
        self.is_cut = True

    def close(self) -> None:
        self.disconnect()

    def _next(self, way: str) -> str:
        self._counts[way] += 1
        return f"{way}/{self._counts[way]}"


class _Sent:
    def wait(self, timeout: timedelta) -> None: ...


class _Coming:
    def __init__(self, connections: _StoreConnections, key: str, tensor: torch.Tensor) -> None:
        self._connections, self._key, self._tensor = connections, key, tensor

    def wait(self, timeout: timedelta) -> None:
        store, deadline = self._connections.store, time.monotonic() + timeout.total_seconds()
        while not store.check([self._key]):
            if self._connections.is_cut or time.monotonic() > deadline:
                raise RuntimeError("the message did not come")
            time.sleep(0.001)
        content = bytearray(store.get(self._key)[:-1])
        store.delete_key(self._key)
        if content:
            self._tensor.copy_(torch.frombuffer(content, dtype=torch.uint8))


def _strategy(parity: int) -> Any:
    if parity:
        return localckpt.ParityReplicationStrategy(parity, 3, timeout_s=MAX_S)
    return localckpt.CliqueReplicationStrategy.from_replication_params(1, 3, timeout_s=MAX_S)


def _save_and_load(rank: int, world_size: int, parity: int, is_first: bool) -> Any:
    transport.HostConnections = _StoreConnections  # type: ignore[assignment, misc]
    with (
        _strategy(parity) as repl,
        make_manager("disk", node_store(), "job", repl) as manager,
    ):
        if is_first:
            save(manager, state_of(rank, 3, 2_000_000), 3)
            return str(manager.status()[0]), _StoreConnections.sent_nbytes >= 1_000_000
        state, _ = manager.load()
        assert_same(state, state_of(rank, 3, 2_000_000))
        manager._await_reprotected()
        return manager.last_load.source, manager.degraded


@pytest.mark.parametrize("parity", [0, 1])
def test_what_is_lost_comes_back_over_another_transport(parity: int, node_dirs: Dirs) -> None:
    nodes = node_dirs(3)
    for status, is_sent in run_ranks(_save_and_load, 3, parity, True, store_per_node=nodes):
        assert "iteration 3 is replicated" in status
        assert is_sent
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()

    told = run_ranks(_save_and_load, 3, parity, False, store_per_node=nodes)

    assert [lacking for _, lacking in told] == [0, 0, 0]
    assert told[1][0] == ("parity" if parity else told[1][0])
    assert told[1][0] != "own node"
