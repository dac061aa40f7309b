"""Hostile values in the job's store: an error of ours on all ranks, and nothing of them is run."""

from __future__ import annotations

import json
import os
import pickle
import resource
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    AsyncCallsQueue,
    CheckpointingException,
    GlobalCheckpointManager,
    LocalCheckpointManager,
)
from localckpt.ranks import round as rounds
from localckpt.ranks.ranks import PerRank, Ranks
from localckpt.ranks.values import Message
from tests.checkpointer.loops import stores
from tests.ranks import node_store, run_ranks

_MOST_NBYTES = 64 << 20
_SHORT_S = 1.0


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


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


_SHAPES: list[Any] = [{}, [], None, -7, "x", _nested(400), "x" * (1 << 20), {"x": 1}, [1, [2], {}]]


def _reshaped(value: bytes, number: int) -> bytes:
    """Put JSON of another shape into a value: in place of all of it, or of what it carries."""
    shape, is_inner = _SHAPES[number // 2 % len(_SHAPES)], bool(number % 2)
    for start in (1, 4):
        try:
            fields = json.loads(value[start:])
        except ValueError:
            continue
        if is_inner and isinstance(fields, list) and len(fields) > 1:
            if isinstance(fields[1], list) and len(fields[1]) > 2:
                # The record of a report.
                fields[1][2] = shape
            else:
                # The value of a verdict.
                fields[0] = shape
        else:
            fields = shape
        return value[:start] + json.dumps(fields).encode()
    # A part of a verdict: the number of the round, and a record.
    head, message = value[:12], Message.from_bytes(value[12:])
    record = [shape, message.record[1]] if is_inner else shape
    return head + Message(record, message.data).to_bytes()


def _instead(_: bytes, value: bytes) -> bytes:
    return value


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

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._store.multi_set(keys, [self._replaced(v) for v in values])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if key.endswith("/verdict") and self._is_hit():
            self._store.set(key, self._made(desired))
        value: bytes = self._store.compare_set(key, expected, desired)
        return value


def _tamper() -> None:
    init = rounds.Round.__init__

    def with_stranger(self: rounds.Round, store: Any, *args: Any) -> None:
        init(self, _Tampering(store), *args)

    rounds.Round.__init__ = with_stranger  # type: ignore[method-assign]


def _decide(rank: int, number: int) -> None:
    ranks = Ranks(f"hostile {number}", timeout_s=_SHORT_S)
    try:
        for what in ("one", "two"):
            ranks.decide(
                what,
                lambda: Message([rank], b"x" * 5000),
                lambda told: PerRank(1, {n: Message(None, m.data) for n, m in enumerate(told)}),
            )
    finally:
        ranks.abandon()


def _save_shared(rank: int, number: int, root: Path) -> None:
    # Left alone, since the other rank may not come.
    manager = GlobalCheckpointManager(root, f"run-{number}", timeout=_SHORT_S)
    try:
        manager.save({"w": torch.ones(8), "n": 1, f"of {rank}": [1, (2, "x")]}, 1)
        state: dict[str, Any] = {"w": torch.zeros(8), "n": 0, f"of {rank}": None}
        manager.load(into=state)
        assert state["w"].tolist() == [1.0] * 8
    finally:
        _leave(manager)


def _save_local(rank: int, number: int, root: Path) -> None:
    manager = LocalCheckpointManager(node_store(), f"run-{number}", timeout=_SHORT_S)
    try:
        manager.save({"w": torch.full((8,), float(rank))}, 1)
        assert manager.find_latest() == 1
        state, _ = manager.load()
        assert state["w"].tolist() == [float(rank)] * 8
    finally:
        _leave(manager)


def _drain(rank: int, number: int, root: Path) -> None:
    shared = GlobalCheckpointManager(root, f"drained-{number}", timeout=_SHORT_S)
    manager = LocalCheckpointManager(node_store(), f"drained-{number}", timeout=_SHORT_S)
    queue = AsyncCallsQueue(timeout_s=_SHORT_S)
    try:
        manager.save({"w": torch.ones(8), f"of {rank}": torch.ones(2)}, 1)
        queue.schedule_async_request(manager.promote(1, to=shared))
        queue.maybe_finalize_async_calls(blocking=True)
        assert shared.find_latest() == 1
    finally:
        for part in (queue, manager, shared):
            _leave(part)


def _leave(manager: Any) -> None:
    """Close a manager as a loop does that an error ends."""
    manager.__exit__(RuntimeError, RuntimeError("left"), None)


_PROTOCOLS: dict[str, Callable[..., None]] = {
    "decide": lambda rank, number, root: _decide(rank, number),
    "shared": _save_shared,
    "local": _save_local,
    "drain": _drain,
}


def _play(
    rank: int,
    world_size: int,
    victim: int,
    protocol: str,
    kind: str,
    stride: int,
    marker: Path,
    root: Path,
) -> tuple[int, int, list[str]]:
    """Play a protocol again and again, each time with another value replaced.

    Returns:
        How often, how often an error was raised, and what was raised that is no error of ours.
    """
    if rank == victim:
        _tamper()
    hostile, played, raised, foreign = _hostile(marker), 0, 0, []
    # Once untouched, so that all is imported.
    _PROTOCOLS[protocol](rank, -1, root)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(0, 10_000, stride):
        _Tampering.at, _Tampering.seen = number, 0
        turn = number // stride
        _Tampering.make = partial(_reshaped, number=turn)
        if kind == "bytes":
            _Tampering.make = partial(_instead, value=hostile[turn % len(hostile)])
        dist.barrier()
        try:
            _PROTOCOLS[protocol](rank, number, root)
        except CheckpointingException:
            raised += 1
        except Exception as error:  # noqa: BLE001 - returned
            place = traceback.extract_tb(error.__traceback__)[-1]
            foreign.append(f"value {number}: {error!r:.300} {place}")
        played += 1
        is_over = torch.tensor([rank == victim and _Tampering.seen <= number], dtype=torch.int32)
        dist.all_reduce(is_over)
        if is_over.item():
            break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > _MOST_NBYTES:
        foreign.append(f"{grown} bytes of memory")
    return played, raised, foreign


@pytest.mark.fault("hostile-store")
@pytest.mark.parametrize("kind", ["bytes", "json"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("protocol", list(_PROTOCOLS))
def test_a_hostile_value_in_the_jobs_store_is_an_error_of_ours_and_runs_nothing(
    protocol: str, victim: int, kind: str, tmp_path: Path, long_form: bool
) -> None:
    marker = tmp_path / "ran"
    stride = 1 if long_form else {"decide": 1, "shared": 3, "local": 4, "drain": 5}[protocol]

    ended = run_ranks(
        *(_play, 2, victim, protocol, kind, stride, marker, tmp_path / "shared"),
        store_per_node=stores(tmp_path, 1),
        timeout_s=1800.0 if long_form else 120.0,
    )

    assert not marker.exists()
    assert [foreign for _, _, foreign in ended] == [[], []]
    assert any(raised for _, raised, _ in ended)
    assert all(played > 2 for played, _, _ in ended)
