"""Replicas are exact, retrieval finds them, and every rank hears of every failure."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    PeerLostError,
    SameMachineReplicationException,
    StorageError,
)
from localckpt.ids import CkptID, Group
from localckpt.replication import transport
from localckpt.replication.connections import HostConnections
from localckpt.replication.groups import GroupWrapper, parse_group_sequence
from localckpt.replication.strategies import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    NoReplication,
    ReplicationStrategy,
)
from localckpt.state_dict.source import ShardSource
from tests.ranks import announce, await_announced, run_ranks, start_ranks
from tests.replication.plans import plan_exchange
from tests.replication.sources import FailingSource, ScratchSource, SignallingSource, image

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


def _replicate(strategy: ReplicationStrategy, rank: int, iteration: int) -> None:
    """One good save: everybody in the clique gets what the others have."""
    memory = _Memory()
    mine = CkptID(iteration, rank, "s")

    received = strategy.replicate_image(ScratchSource(_image_of(mine)), mine, memory.accept)

    assert received == list(memory.images)
    assert mine not in received
    assert all(bytes(view) == _image_of(id_) for id_, view in memory.images.items())


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _replicate_twice(rank: int, world_size: int, jump: int, factor: int, lazy: bool) -> Any:
    before = _threads()
    make: Callable[..., ReplicationStrategy] = (
        LazyCliqueReplicationStrategy if lazy else CliqueReplicationStrategy.from_replication_params
    )
    strategy = make(replication_jump=jump, replication_factor=factor, timeout_s=20)
    _replicate(strategy, rank, 0)
    memory = _Memory()
    mine = CkptID(1, rank, "s")

    received = strategy.replicate_image(ScratchSource(_image_of(mine)), mine, memory.accept)

    assert all(bytes(memory.images[id_]) == _image_of(id_) for id_ in received)
    strategy.close()
    strategy.close()
    # A thread that has been joined takes the kernel a moment to end.
    deadline = time.monotonic() + 5.0
    while _threads() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert _threads() == before
    return sorted([rank, *(id_.rank for id_ in received)])


@pytest.mark.parametrize(
    ("world_size", "jump", "factor", "lazy"),
    [(2, 1, 2, False), (3, 1, 2, True), (4, 2, 2, False), (4, 1, 4, True), (5, 2, 2, False)],
)
def test_every_clique_member_gets_every_other_members_shard(
    world_size: int, jump: int, factor: int, lazy: bool
) -> None:
    cliques = run_ranks(_replicate_twice, world_size, jump, factor, lazy)

    expected = parse_group_sequence(jump, factor, world_size)
    assert cliques == [next(c for c in expected if rank in c) for rank in range(world_size)]


def _explicit_group(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    strategy = CliqueReplicationStrategy(groups[rank in (1, 2)], timeout_s=20)
    _replicate(strategy, rank, 7)
    strategy.place(["a", "a", "b", "b"])
    with pytest.raises(SameMachineReplicationException, match=r"ranks \[1, 2\].*jump=1 "):
        strategy.place(["a", "b", "b", "c"])
    strategy.close()
    dist.barrier(groups[rank in (1, 2)])

    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    strategy = CliqueReplicationStrategy(GroupWrapper(alone))
    strategy.place(["a", "a", "b", "b"])
    assert strategy.protection[rank] == Group((rank,), 0)
    strategy.close()


def test_an_explicit_group_is_used_checked_and_left_alone() -> None:
    run_ranks(_explicit_group, 4)


def _parameters(rank: int, world_size: int) -> None:
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


@pytest.mark.fault("disagreement")
def test_parameters_that_do_not_fit_are_refused_on_all_ranks_alike() -> None:
    run_ranks(_parameters, 4)


def test_without_torch_distributed_the_error_says_what_to_do() -> None:
    with pytest.raises(CheckpointingException, match="init_process_group"):
        CliqueReplicationStrategy.from_replication_params()


def _disagree(rank: int, world_size: int, case: str) -> tuple[str, str]:
    strategy = CliqueReplicationStrategy.from_replication_params(1, world_size, timeout_s=20)
    mine = CkptID(4, rank, "s")
    source: ShardSource | None = ScratchSource(_image_of(mine))
    error = None
    accept = _Memory().accept
    if rank == 1:
        if case == "staging":
            source, error = None, "out of memory"
        elif case == "iteration":
            mine = CkptID(5, rank, "s")
        elif case == "session":
            mine = CkptID(4, rank, "t")
        elif case == "owner":
            mine = CkptID(4, 0, "s")
        elif case == "disk":
            accept = _refuse(StorageError("no space left"))
        elif case == "bug":
            accept = _refuse(ZeroDivisionError("oops"))
        elif case == "size":
            accept = _too_small
        elif case == "read":
            source = FailingSource(_image_of(mine), 1000, CorruptShardError("bad block"))

    with pytest.raises(CheckpointingException) as raised:
        strategy.replicate_image(source, mine, accept, error=error)

    _replicate(strategy, rank, 6)
    dist.barrier()
    strategy.close()
    return type(raised.value).__name__, str(raised.value)


def _refuse(error: Exception) -> Callable[[CkptID, int], memoryview]:
    def accept(id_: CkptID, nbytes: int) -> memoryview:
        raise error

    return accept


def _too_small(id_: CkptID, nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes - 1))


@pytest.mark.fault("refused-io")
@pytest.mark.parametrize(
    ("case", "kind", "told"),
    [
        ("staging", "CheckpointingException", "rank 1: out of memory"),
        ("iteration", "MismatchError", "iteration: 4 on ranks 0 and 2; 5 on rank 1"),
        ("session", "MismatchError", "session: 's' on ranks 0 and 2; 't' on rank 1"),
        ("owner", "MismatchError", "rank 1 the shard of rank 0"),
        ("disk", "StorageError", "rank 1: no space left"),
        ("bug", "CheckpointingException", "rank 1: ZeroDivisionError: oops"),
        ("size", "CheckpointingException", "must be writable and have 300000 bytes"),
        ("read", "CorruptShardError", "rank 1: bad block"),
    ],
)
def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_save_works(
    case: str, kind: str, told: str
) -> None:
    results = run_ranks(_disagree, 3, case)

    assert len(set(results)) == 1
    assert results[0][0] == kind
    assert told in results[0][1]


def _lose_a_member(rank: int, world_size: int, sig: signal.Signals) -> tuple[str, float]:
    strategy = CliqueReplicationStrategy.from_replication_params(1, world_size, timeout_s=3.0)
    _replicate(strategy, rank, 0)
    mine = CkptID(1, rank, "s")
    source: ShardSource = ScratchSource(_image_of(mine))
    if rank == 1:
        source = SignallingSource(_image_of(mine), 1000, sig)
    started = time.monotonic()

    with pytest.raises(PeerLostError) as raised:
        strategy.replicate_image(source, mine, _Memory().accept)

    took = time.monotonic() - started
    if sig == signal.SIGSTOP:
        announce(f"gave up {rank}")
        await_announced("gave up 1")
        _replicate(strategy, rank, 2)
    strategy.close()
    return str(raised.value), took


@pytest.mark.fault("silent-peer")
def test_a_member_that_dies_is_named_on_the_others() -> None:
    results = run_ranks(_lose_a_member, 3, signal.SIGKILL, expect_dead=[1])

    for rank in (0, 2):
        told, took = results[rank]
        assert "rank 1 (" in told
        assert took < 15.0


@pytest.mark.fault("silent-peer")
def test_a_member_that_stops_is_named_and_the_next_save_works_once_it_is_back() -> None:
    with start_ranks(_lose_a_member, 2, signal.SIGSTOP) as group:
        group.await_announced("gave up 0")
        group.kill(1, signal.SIGCONT)
        (told, took), (peer_told, _) = group.join()

    # A process that stops itself may first finish a message, in another of its threads.
    assert re.search(r"rank 1 \((0|301,000) of 301,000 bytes came from it", told)
    assert took < 15.0
    assert "rank 0 (" in peer_told


def test_a_step_has_the_callers_deadline_or_the_strategys_if_that_is_shorter() -> None:
    plain, hurried, patient = NoReplication(), NoReplication(2.0), NoReplication(900.0)

    assert [plain.step_s(30.0), plain.step_s(30.0, of_save=True)] == [30.0, 10.0]
    assert [hurried.step_s(30.0), hurried.step_s(30.0, of_save=True)] == [2.0, 2.0]
    assert [patient.step_s(30.0), patient.step_s(30.0, of_save=True)] == [30.0, 30.0]
    assert [each.step_s(None) for each in (plain, hurried, patient)] == [300.0, 2.0, 900.0]


def _never_call(
    rank: int, world_size: int, strategy_s: float, caller_s: float | None, announces: bool
) -> float:
    strategy = CliqueReplicationStrategy.from_replication_params(1, 2, timeout_s=strategy_s)
    started = time.monotonic()
    mine = CkptID(1, rank, "s")
    source, accept = ScratchSource(_image_of(mine)), _Memory().accept
    if rank == 0:
        with pytest.raises(
            PeerLostError, match=r"rank 1 \(last seen: agree on cliques\)|rank 1 \(|ranks \[0, 1\]"
        ):
            strategy.replicate_image(source, mine, accept, timeout_s=caller_s)
    elif announces:

        def connect(*_: Any, **__: Any) -> Any:
            raise PeerLostError("this rank does not connect")

        transport.HostConnections = connect  # type: ignore[assignment, misc]
        with pytest.raises(PeerLostError):
            strategy.replicate_image(source, mine, accept, timeout_s=caller_s)
    took = time.monotonic() - started
    dist.barrier()
    strategy.close()
    return took


@pytest.mark.fault("silent-peer")
@pytest.mark.parametrize(
    ("strategy_s", "caller_s", "announces"),
    [(1.0, None, False), (60.0, 1.0, False), (60.0, 1.0, True)],
)
def test_a_member_that_never_saves_or_connects_is_named_at_the_deadline(
    strategy_s: float, caller_s: float | None, announces: bool
) -> None:
    assert 0.9 < run_ranks(_never_call, 2, strategy_s, caller_s, announces)[0] < 20.0


def _give_up_when_connected(rank: int, world_size: int) -> float:
    strategy = CliqueReplicationStrategy.from_replication_params(1, 2, timeout_s=20)

    def connected(*args: Any, **more: Any) -> HostConnections:
        connections = HostConnections(*args, **more)
        if rank == 0:
            # By another thread, which finds no connection yet that it could cut.
            strategy.give_up()
        else:
            await_announced("zero has given up")
        return connections

    transport.HostConnections = connected  # type: ignore[assignment, misc]
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        _replicate(strategy, rank, 1)
    took = time.monotonic() - started
    if rank == 0:
        announce("zero has given up")
    strategy.close()
    return took


def test_what_is_given_up_while_it_connects_waits_for_nobody() -> None:
    assert max(run_ranks(_give_up_when_connected, 2)) < 10.0


def test_limits_that_are_none_are_refused() -> None:
    with pytest.raises(CheckpointingException, match="rate_limit"):
        LazyCliqueReplicationStrategy(1, 2, rate_limit=0)


def _swap_nodes(rank: int, world_size: int, held_by: Sequence[Sequence[int]]) -> None:
    """Each rank wants its own shard; who holds which is anybody's guess."""
    strategy = NoReplication(20.0, None)
    for iteration in range(2):
        held = {r: [CkptID(iteration, o, "s") for o in held_by[r]] for r in range(world_size)}
        mine = CkptID(iteration, rank, "s")
        memory = _Memory()
        opened: list[ScratchSource] = []

        def open_source(id_: CkptID) -> ShardSource:
            assert id_ in held[rank]  # noqa: B023
            opened.append(ScratchSource(_image_of(id_)))  # noqa: B023
            return opened[-1]  # noqa: B023

        plan = plan_exchange(held, {r: [(iteration, r, "s")] for r in range(world_size)})
        received = strategy.retrieve_image(plan, open_source, memory.accept)

        assert received == ([] if mine in held[rank] else [mine])
        assert all(bytes(memory.images[id_]) == _image_of(id_) for id_ in received)
        assert all(source.closed for source in opened)
        assert len(opened) == len({entry.id_ for entry in plan.sends(rank)})
    strategy.close()


@pytest.mark.parametrize(
    "held_by",
    [
        [[1], [0]],
        [[2, 3], [3, 2], [0, 1], [1, 0]],
        [[0, 1, 2, 3], [], [], []],
        [[0], [1, 3], [2], []],
    ],
)
def test_every_rank_gets_its_shard_wherever_it_is(held_by: Sequence[Sequence[int]]) -> None:
    run_ranks(_swap_nodes, len(held_by), held_by)


def _nothing_to_move(rank: int, world_size: int) -> None:
    # A rank that ends at once must not cut off another that is still connecting.
    dist.barrier()
    if rank == 0:
        strategy = NoReplication(1.0)
        held = {0: ["a"], 1: ["b"]}
        plan = plan_exchange(held, {0: ["a"], 1: ["b"]})
        assert strategy.retrieve_image(plan, _never, _never) == []


def _never(*_: object) -> Any:
    raise AssertionError("must not be called")


def test_a_plan_that_moves_nothing_needs_no_other_rank() -> None:
    run_ranks(_nothing_to_move, 2)


def _fail_to_retrieve(rank: int, world_size: int, case: str) -> tuple[str, str]:
    strategy = NoReplication(20.0)
    held: dict[int, list[CkptID]] = {0: [], 1: [CkptID(3, 0, "s")], 2: []}
    plan = plan_exchange(held, {0: [CkptID(3, 0, "s")]})
    content = _image_of((3, 0, "s"))
    accept = _refuse(StorageError("full")) if case == "accept" else _Memory().accept

    def open_source(id_: CkptID) -> ShardSource:
        if case == "open":
            raise StorageError("gone")
        return FailingSource(
            content, 1 if case == "read" else _NBYTES * 2, CorruptShardError("bad")
        )

    with pytest.raises(CheckpointingException) as raised:
        strategy.retrieve_image(plan, open_source, accept)

    memory = _Memory()
    strategy.retrieve_image(plan, lambda _: ScratchSource(content), memory.accept)
    assert all(bytes(view) == content for view in memory.images.values())
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize(
    ("case", "kind", "told"),
    [
        ("open", "StorageError", "rank 1: gone"),
        ("accept", "StorageError", "rank 0: full"),
        ("read", "CorruptShardError", "rank 1: bad"),
    ],
)
def test_a_failed_retrieval_is_raised_on_all_ranks_and_can_be_tried_again(
    case: str, kind: str, told: str
) -> None:
    results = run_ranks(_fail_to_retrieve, 3, case)

    assert len(set(results)) == 1
    assert results[0][0] == kind
    assert told in results[0][1]


def _die_while_sending(rank: int, world_size: int) -> tuple[str, float]:
    strategy = NoReplication(3.0)
    ids = [CkptID(0, owner, "s") for owner in range(world_size)]
    plan = plan_exchange({1: ids}, {r: [ids[r]] for r in range(world_size)})
    started = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        strategy.retrieve_image(
            plan,
            lambda id_: SignallingSource(_image_of(id_), 1, signal.SIGKILL),
            _Memory().accept,
        )
    return str(raised.value), time.monotonic() - started


@pytest.mark.fault("lost-during-recovery")
def test_a_rank_that_dies_while_it_sends_is_named() -> None:
    results = run_ranks(_die_while_sending, 3, expect_dead=[1])

    for rank in (0, 2):
        told, took = results[rank]
        assert "rank 1 (" in told
        assert took < 15.0
