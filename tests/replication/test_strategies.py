"""Replicas are exact, retrieval finds them, and every rank hears of every failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    SameMachineReplicationException,
    StorageError,
)
from localckpt.ids import CkptID
from localckpt.replication.strategies import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    NoReplication,
    ReplicationStrategy,
)
from localckpt.state_dict.source import ShardSource
from tests.ranks import on_ranks, same_on_all
from tests.replication.sources import FailingSource, ScratchSource, image, plan_exchange

_NBYTES = 300_000


class _Memory:
    """Keeps what comes, as a store does."""

    def __init__(self) -> None:
        self.images: dict[Any, memoryview] = {}

    def accept(self, id_: Any, nbytes: int) -> memoryview:
        self.images[id_] = memoryview(bytearray(nbytes))
        return self.images[id_]


def _image_of(id_: tuple[int, int, str]) -> bytes:
    return image(tuple(id_), _NBYTES + 1000 * id_[1])


def _replicate(strategy: ReplicationStrategy, rank: int, iteration: int) -> list[int]:
    """One good save: everybody in the clique gets what the others have; the ranks of these."""
    memory = _Memory()
    mine = CkptID(iteration, rank, "s")

    received = strategy.replicate_image(ScratchSource(_image_of(mine)), mine, memory.accept)

    assert received == list(memory.images)
    assert mine not in received
    assert all(bytes(view) == _image_of(id_) for id_, view in memory.images.items())
    return [id_.rank for id_ in received]


@pytest.mark.fault("disagreement")
@on_ranks(4)
def test_parameters_that_do_not_fit_are_refused_on_all_ranks_alike(rank: int) -> None:
    build = CliqueReplicationStrategy.from_replication_params
    with pytest.raises(MismatchError, match=r"factor=2 on rank 0; .*factor=3 on ranks 1 to 3"):
        build(1, 2 + (rank > 0), timeout_s=20)
    with pytest.raises(MismatchError, match="What fits: replication_jump up to 2"):
        build(4, 2, timeout_s=20)
    with pytest.raises(SameMachineReplicationException, match="replication_jump=2 with"):
        build(1, 2, timeout_s=20, failure_domain="ab"[rank // 2])
    lazy = LazyCliqueReplicationStrategy(1, 2, timeout_s=20)
    with pytest.raises(SameMachineReplicationException, match="pass repl_strategy=None"):
        lazy.place(["a"] * 4)
    lazy.close()
    # LOCAL_WORLD_SIZE of this test is 4: as far as a strategy alone knows, they are on one node.
    alone = build(timeout_s=20)
    with pytest.raises(MismatchError, match="replication_jump=4"):
        _replicate(alone, rank, 0)
    with pytest.raises(SameMachineReplicationException, match="pass repl_strategy=None"):
        alone.place(["a"] * 4)
    alone.place(["a", "a", "b", "b"])
    _replicate(alone, rank, 0)
    alone.close()
    with pytest.raises(MismatchError, match=r"ranks \[0, 2\] were given no failure_domain"):
        build(timeout_s=20, failure_domain="x" if rank % 2 else None)
    strategy = build(2, 2, timeout_s=20, failure_domain="ab"[rank // 2])
    _replicate(strategy, rank, 0)
    strategy.close()


def _refuse(error: Exception) -> Callable[[CkptID, int], memoryview]:
    def accept(id_: CkptID, nbytes: int) -> memoryview:
        raise error

    return accept


_FAILURES = {
    "staging": ("CheckpointingException", "rank 1: out of memory"),
    "iteration": ("MismatchError", "iteration: 4 on ranks 0 and 2; 5 on rank 1"),
    "session": ("MismatchError", "session: 's' on ranks 0 and 2; 't' on rank 1"),
    "owner": ("MismatchError", "rank 1 the shard of rank 0"),
    "disk": ("StorageError", "rank 1: no space left"),
    "bug": ("CheckpointingException", "rank 1: ZeroDivisionError: oops"),
    "size": ("CheckpointingException", "must be writable and have 300000 bytes"),
    "read": ("CorruptShardError", "rank 1: bad block"),
}


@pytest.mark.fault("refused-io")
@on_ranks(3)
def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_save_works(
    rank: int, world_size: int
) -> None:
    strategy = CliqueReplicationStrategy.from_replication_params(1, world_size, timeout_s=20)
    mine = CkptID(4, rank, "s")
    ids = {"iteration": CkptID(5, 1, "s"), "session": CkptID(4, 1, "t"), "owner": CkptID(4, 0, "s")}
    accepts = {
        "disk": _refuse(StorageError("no space left")),
        "bug": _refuse(ZeroDivisionError("oops")),
        "size": lambda _, nbytes: memoryview(bytearray(nbytes - 1)),
    }
    for case, (kind, told) in _FAILURES.items():
        at = case if rank == 1 else ""
        source: ShardSource | None = ScratchSource(_image_of(mine))
        if at == "read":
            source = FailingSource(_image_of(mine), 1000, CorruptShardError("bad block"))
        elif at == "staging":
            source = None
        error = "out of memory" if at == "staging" else None
        accept = accepts.get(at, _Memory().accept)

        with pytest.raises(CheckpointingException) as raised:
            strategy.replicate_image(source, ids.get(at, mine), accept, error=error)

        assert told in same_on_all(str(raised.value))
        assert type(raised.value).__name__ == kind
        _replicate(strategy, rank, 6)
    strategy.close()


_NOT_RETRIEVED = {
    "open": ("StorageError", "rank 1: gone"),
    "accept": ("StorageError", "rank 0: full"),
    "read": ("CorruptShardError", "rank 1: bad"),
}


@on_ranks(3)
def test_a_failed_retrieval_is_raised_on_all_ranks_and_can_be_tried_again(rank: int) -> None:
    strategy = NoReplication(20.0)
    if rank == 0:
        # A plan that moves nothing needs no other rank.
        never: Any = _refuse(AssertionError("must not be called"))
        plan = plan_exchange({0: ["a"], 1: ["b"]}, {0: ["a"], 1: ["b"]})
        assert NoReplication(1.0).retrieve_image(plan, never, never) == []
    held: dict[int, list[CkptID]] = {0: [], 1: [CkptID(3, 0, "s")], 2: []}
    plan = plan_exchange(held, {0: [CkptID(3, 0, "s")]})
    content = _image_of((3, 0, "s"))
    for case, (kind, told) in _NOT_RETRIEVED.items():

        def open_source(id_: CkptID, case: str = case) -> ShardSource:
            if case == "open":
                raise StorageError("gone")
            at = 1 if case == "read" else _NBYTES * 2
            return FailingSource(content, at, CorruptShardError("bad"))

        accept = _refuse(StorageError("full")) if case == "accept" else _Memory().accept
        with pytest.raises(CheckpointingException) as raised:
            strategy.retrieve_image(plan, open_source, accept)

        assert told in same_on_all(str(raised.value))
        assert type(raised.value).__name__ == kind
        memory = _Memory()
        strategy.retrieve_image(plan, lambda _: ScratchSource(content), memory.accept)
        assert all(bytes(view) == content for view in memory.images.values())
