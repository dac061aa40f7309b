"""Hostile values in the job's store: an error of ours on all ranks, and nothing of them is run."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from localckpt import (
    AsyncCallsQueue,
    AsyncRequest,
    Checkpointer,
    CheckpointingException,
    GlobalCheckpointManager,
    LocalCheckpointManager,
    Values,
)
from localckpt.errors import MismatchError
from localckpt.managers.elastic_tensors import ShardCopies
from localckpt.ranks import round as rounds
from localckpt.ranks.ranks import PerRank, Ranks
from localckpt.ranks.store_part import StorePart
from localckpt.ranks.values import Message
from tests.async_save.work import await_ends_of_threads
from tests.checkpointer.loops import stores
from tests.ranks import node_store, on_ranks, run_ranks

_MOST_NBYTES = 64 << 20
# What waits in vain for a value that was replaced; and a play that must succeed on a busy machine.
_SHORT_S, _LONG_S = 1.0, 30.0


class _Command:
    """A value whose pickle runs a command where it is read freely."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def _hostile(marker: Path) -> list[bytes]:
    run = pickle.dumps(_Command(marker))
    return [
        b"",
        b"\xff" * 64,
        # As a value of one part; as one that is said to have 2 ** 32 further ones.
        bytes(4) + run,
        b"\xff\xff\xff\xff" + run,
        b"=" + b"[" * 200_000,
        bytes(4) + b"[" * 200_000,
        # A string that is said to be of 1 TiB.
        bytes(4) + b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"),
    ]


_NESTED = json.loads("[" * 400 + "]" * 400)
_SHAPES: list[Any] = [{}, [], None, -7, "x", _NESTED, "x" * (1 << 20), {"x": 1}, [1, [2], {}]]


def _reshaped(value: bytes, number: int) -> bytes:
    """Put JSON of another shape into a value: in place of all of it, or of what it carries."""
    shape, is_inner = _SHAPES[number // 2 % len(_SHAPES)], bool(number % 2)
    for start in (1, 4):
        try:
            fields = json.loads(value[start:])
        except ValueError:
            continue
        if is_inner and isinstance(fields, list) and len(fields) > 1:
            if isinstance(fields[-1], list) and len(fields[-1]) > 2:
                # The record of a report.
                fields[-1][2] = shape
            else:
                # The value of a verdict.
                fields[0] = shape
        else:
            fields = shape
        return value[:start] + json.dumps(fields).encode()
    # A part of a verdict: the number of the round, and a record.
    start = value.index(b":") + 1
    message = Message.from_bytes(value[start:])
    record = [shape, message.record[1]] if is_inner else shape
    return value[:start] + Message(record, message.data).to_bytes()


class _Tampering:
    """A store, with a stranger who overwrites one of the values that this rank puts there."""

    at, seen = -1, 0
    make: Callable[[bytes], bytes]

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @classmethod
    def _is_hit(cls) -> bool:
        cls.seen += 1
        return cls.seen == cls.at + 1

    def _replaced(self, value: Any) -> Any:
        return self._made(value) if self._is_hit() else value

    @classmethod
    def _made(cls, value: Any) -> bytes:
        try:
            return cls.make(value.encode() if isinstance(value, str) else value)
        except (ValueError, TypeError):
            # No record is in it.
            return b"{}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, self._replaced(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if key.endswith(("/verdict", "/result")) and self._is_hit():
            self._store.set(key, self._made(desired))
        value: bytes = self._store.compare_set(key, expected, desired)
        return value


def _tamper() -> None:
    def with_stranger(
        self: Any, store: Any, *args: Any, init: Any = rounds.Round.__init__, **options: Any
    ) -> None:
        init(self, _Tampering(store), *args, **options)

    def publish(self: Any, tried: list[str], own: Any = StorePart._publish) -> str:
        name: str = own(self, tried)
        if (value := _Tampering(None)._replaced(name)) != name:
            self._shared.set("opening", value)
        return name

    rounds.Round.__init__ = with_stranger  # type: ignore[assignment]
    StorePart._publish = publish  # type: ignore[method-assign]


@contextmanager
def _left(opened: Any) -> Iterator[Any]:
    """Close it at the end as a loop does that an error ends, since the other rank may not come."""
    try:
        yield opened
    finally:
        opened.__exit__(RuntimeError, RuntimeError("left"), None)


def _decide(rank: int, number: int, root: Path, timeout_s: float) -> None:
    ranks = Ranks(f"hostile {number}", timeout_s=timeout_s)
    try:
        for what in ("one", "two"):
            ranks.decide(
                what,
                lambda: Message([rank], b"x" * 5000),
                lambda told: PerRank(1, {n: Message(None, m.data) for n, m in enumerate(told)}),
            )
    finally:
        ranks.abandon()


def _call_behind_training(rank: int, number: int, root: Path, timeout_s: float) -> None:
    queue = AsyncCallsQueue(timeout_s=timeout_s)
    # The first rank reports last, so it joins the reports: the other one waits in vain.
    time.sleep(0.2 * (rank == 0))
    queue.schedule_async_request(AsyncRequest(None, (), []))
    queue.close()


def _save_shared(rank: int, number: int, root: Path, timeout_s: float) -> None:
    with _left(GlobalCheckpointManager(root, f"run-{number}", timeout=timeout_s)) as manager:
        manager.save({"w": torch.ones(8), "n": 1, f"of {rank}": [1, (2, "x")]}, 1)
        state: dict[str, Any] = {"w": torch.zeros(8), "n": 0, f"of {rank}": None}
        manager.load(into=state)
        assert state["w"].tolist() == [1.0] * 8


def _drain(rank: int, number: int, root: Path, timeout_s: float) -> None:
    shared = GlobalCheckpointManager(root, f"drained-{number}", timeout=timeout_s)
    manager = LocalCheckpointManager(node_store(), f"drained-{number}", timeout=timeout_s)
    # A drain takes several decisions, and makes files durable in between.
    queue = AsyncCallsQueue(timeout_s=4 * timeout_s)
    with _left(shared), _left(manager), _left(queue):
        manager.save({"w": torch.ones(8), f"of {rank}": torch.ones(2)}, 1)
        queue.schedule_async_request(manager.promote(1, to=shared))
        queue.maybe_finalize_async_calls(blocking=True)
        # A stranger may say, in the form of a verdict, that there is none.
        assert {shared.find_latest(), manager.find_latest()} <= {1, -1}
        assert manager.load()[0]["w"].tolist() == [1.0] * 8


def _front_door(rank: int, number: int, root: Path, timeout_s: float) -> None:
    for first in (0, 1):
        value, own = torch.nn.Parameter(torch.zeros(8)), Values(n=0)
        parts = {"model": torch.nn.ParameterList([value]), "own": own}
        options: dict[str, Any] = {"stop_signals": (), "events": (), "timeout_s": timeout_s}
        options |= {"session_id": f"run-{number}", "every": 1000, "on_error": "raise"}
        with _left(Checkpointer(parts, local=node_store(), **options)) as checkpointer:
            resumed = checkpointer.resume()
            assert resumed in {0, first}
            assert value.tolist() == [float(resumed)] * 8
            assert own.n == resumed * (rank + 1)
            torch.nn.init.constant_(value, 1.0)
            own.n = rank + 1
            checkpointer.step(first)
            checkpointer.close()


def _elastic_manager(timeout_s: float) -> LocalCheckpointManager:
    private = {"own": lambda values, rank, _: values[rank]}
    options: dict[str, Any] = {"elastic": True, "private": private, "read_only": True}
    return LocalCheckpointManager(node_store(), "elastic", timeout=timeout_s, **options)


def _load_elastic(rank: int, number: int, root: Path, timeout_s: float) -> None:
    """Load what three ranks have saved; see :func:`_save_for_others`."""
    with _left(_elastic_manager(timeout_s)) as manager:
        assert manager.find_latest() == 1
        wanted: Any = torch.zeros_like(_sharded())
        state, _ = manager.load(into={"w": wanted, "whole": torch.zeros(4), "own": -1})
        assert wanted.to_local().tolist() == list(range(6 * rank, 6 * rank + 6))
        assert state["whole"].tolist() == [2.0] * 4
        assert state["own"] == rank


@cache
def _sharded() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(12.0), mesh, [Shard(0)], src_data_rank=None)


def _save_for_others(rank: int, world_size: int) -> None:
    with LocalCheckpointManager(node_store(), "elastic", timeout=30.0) as manager:
        manager.save({"w": _sharded(), "whole": torch.full((4,), 2.0), "own": rank}, 1)


_PROTOCOLS: dict[str, Callable[..., None]] = {
    "decide": _decide,
    "queue": _call_behind_training,
    "shared": _save_shared,
    "drain": _drain,
    "front door": _front_door,
    "elastic": _load_elastic,
}
_STRIDES = {"decide": 1, "queue": 2, "shared": 3, "drain": 6, "elastic": 6, "front door": 12}


def _play(
    rank: int, _: int, victim: int, protocol: str, kind: str, stride: int, marker: Path, root: Path
) -> tuple[int, int, list[str]]:
    """Play a protocol again and again, each time with another value replaced: how often, how many
    raised an error of ours, and what else was raised.
    """
    # A rank may take its whole deadline, while the other has had its error at once.
    patient = dist.new_group(timeout=timedelta(minutes=5))
    if rank == victim:
        _tamper()
    hostile, played, raised, foreign = _hostile(marker), 0, 0, list[str]()
    # Once untouched, so that all is imported.
    _PROTOCOLS[protocol](rank, -1, root, _LONG_S)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(0, 10_000, stride):
        _Tampering.at, _Tampering.seen = number, 0
        turn = number // stride
        value = hostile[turn % len(hostile)]
        is_json = kind == "json"
        _Tampering.make = partial(_reshaped, number=turn) if is_json else lambda _, v=value: v  # type: ignore[misc]
        dist.barrier(group=patient)
        try:
            _PROTOCOLS[protocol](rank, number, root, _SHORT_S)
        except CheckpointingException:
            raised += 1
        except Exception as error:  # noqa: BLE001 - returned
            place = traceback.extract_tb(error.__traceback__)[-1]
            foreign.append(f"value {number}: {error!r:.300} {place}")
        played += 1
        is_over = torch.tensor([rank == victim and _Tampering.seen <= number], dtype=torch.int32)
        dist.all_reduce(is_over, group=patient)
        if is_over.item():
            break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > _MOST_NBYTES:
        foreign.append(f"{grown} bytes of memory")
    _Tampering.at = -1
    # Threads that still wait for a rank until their deadline, and read what was replaced.
    await_ends_of_threads()
    dist.barrier(group=patient)
    # What was replaced has left nothing behind.
    _PROTOCOLS[protocol](rank, 10_000, root, _LONG_S)
    return played, raised, foreign


@pytest.mark.rows(6)
@pytest.mark.fault("hostile-store")
@pytest.mark.parametrize("protocol", _PROTOCOLS)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["bytes", "json"])
def test_a_hostile_value_in_the_jobs_store_is_an_error_of_ours_and_runs_nothing(
    protocol: str, victim: int, kind: str, tmp_path: Path, long_form: bool
) -> None:
    marker = tmp_path / "ran"
    stride = 1 if long_form else _STRIDES[protocol]
    nodes = stores(tmp_path, 1)
    if protocol == "elastic":
        run_ranks(_save_for_others, 3, store_per_node=nodes, timeout_s=60.0)

    ended = run_ranks(
        *(_play, 2, victim, protocol, kind, stride, marker, tmp_path / "shared"),
        store_per_node=nodes,
        timeout_s=1800.0 if long_form else 120.0,
    )

    assert not marker.exists()
    assert [foreign for _, _, foreign in ended] == [[], []]
    assert any(raised for _, raised, _ in ended)
    assert all(played > 2 for played, _, _ in ended)


@on_ranks(2, nodes=1, after=(_save_for_others, 3))
def test_values_that_a_rank_was_asked_for_and_has_not_told_are_an_error(rank: int) -> None:
    if rank == 1:
        ShardCopies.packs = lambda *_: []  # type: ignore[method-assign,assignment]
    with _elastic_manager(30.0) as manager:
        wanted: Any = torch.zeros_like(_sharded())
        with pytest.raises(MismatchError, match="have not told all values of iteration 1"):
            manager.load(into={"w": wanted, "whole": torch.zeros(4), "own": -1})
        assert not wanted.to_local().any()
