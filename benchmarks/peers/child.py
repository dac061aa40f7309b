"""Measures one peer once, in this process: ``python -m benchmarks.peers.child TASK``.

Nothing is caught here: a peer that cannot run ends the process, and its last line on stderr is the
reason that is told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash

from benchmarks.footprint import family_bytes, sampled_peak
from benchmarks.limits import (
    RecycledFile,
    drop_from_page_cache,
    read_direct_s,
    read_warm_s,
    settle,
)
from benchmarks.loops import LOOPS, lost_in, running
from benchmarks.peers.base import Peer
from benchmarks.peers.catalogue import peer_class
from benchmarks.setup import Options, Setting, make_setting
from benchmarks.state import Training, state_tensors

__all__ = ["Samples", "Task"]

# For each thing that is measured, so that the fast ways get more samples and the slow ones still
# leave time for another round.
_SAVES_S = 10.0
_LOADS_S = 1.0
_LOOP_S = 6.0
# Where each save has new files, and removing the old ones slows whatever is written beside it.
_SAVES_AT_REST, _REST_S = 4, 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """What the parent asks for."""

    name: str
    directory: str
    limit_file: str
    result: str
    width: int
    state: str
    with_memory: bool
    with_loops: bool
    at_rest: bool
    """Whether saves wait until the disk has removed what is old."""


@dataclass(slots=True)
class Samples:
    """Seconds, and beside each those of the limit measured right before."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)
    extra_bytes: list[int] = field(default_factory=list)
    behind: bool = False
    in_place: bool = False
    note: str = ""
    nbytes: int = 0

    def add(self, metric: str, seconds: float, limit_s: float | None = None) -> None:
        self.seconds.setdefault(metric, []).append(seconds)
        if limit_s is not None:
            self.limits.setdefault(metric, []).append(limit_s)


def _measure(task: Task) -> Samples:
    directory = Path(task.directory)
    directory.mkdir()
    setting = make_setting(Options(directory, 1, task.width, task.state))
    file = RecycledFile(Path(task.limit_file), setting.buffer)
    memory_before = family_bytes()
    kind = peer_class(task.name)
    samples = Samples(
        behind=kind.behind, in_place=kind.in_place, note=kind.note, nbytes=setting.nbytes
    )
    peer, training = kind(directory, setting.state), Training(setting.state)
    try:
        peer.prepare()
        copy_s = setting.copy_flat_s()
        with sampled_peak() if task.with_memory else nullcontext([0]) as peak:
            stall_s = _saved_s(peer, training)[0]
        samples.add("first stall", stall_s, copy_s)
        if task.with_memory:
            samples.extra_bytes.append(peak[0] - memory_before)
        _measure_saves(samples, peer, training, setting, file, task.at_rest)
        _measure_loads(samples, peer, setting, file.path)
        if peer.behind and task.with_loops:
            _measure_loops(samples, peer, training)
    finally:
        peer.close()
        file.close()
    return samples


def _measure_saves(
    samples: Samples,
    peer: Peer,
    training: Training,
    setting: Setting,
    file: RecycledFile,
    at_rest: bool,
) -> None:
    for _ in range(_SAVES_AT_REST) if at_rest else _for_a_while(_SAVES_S):
        if at_rest:
            settle(_REST_S)
        write_s = file.write_s()
        copy_s = setting.copy_flat_s()
        stall_s, durable_s = _saved_s(peer, training)
        samples.add("stall", stall_s, copy_s)
        samples.add("durable", durable_s, copy_s + write_s)


def _for_a_while(seconds: float) -> Iterator[None]:
    """Once at least."""
    began = time.perf_counter()
    yield
    while time.perf_counter() - began < seconds:
        yield


def _saved_s(peer: Peer, training: Training) -> tuple[float, float]:
    """Seconds that training waits, and from the same moment until the bytes are on the disk."""
    training.step()
    began = time.perf_counter()
    peer.start()
    stall_s = time.perf_counter() - began
    peer.finish()
    for path in peer.files():
        _fsync(path)
    durable_s = time.perf_counter() - began
    peer.retire()
    return stall_s, durable_s


def _fsync(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # an older save's file, which the peer removes behind training
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _measure_loads(samples: Samples, peer: Peer, setting: Setting, limit: Path) -> None:
    expected = _digest(setting)
    for tensor in state_tensors(setting.state):
        tensor.zero_()
    for _ in _for_a_while(_LOADS_S):
        for path in [limit, *peer.files()]:
            drop_from_page_cache(path)
        limit_s = read_direct_s(limit, setting.buffer)
        samples.add("load, cold", _loaded_s(peer), limit_s)
    if _digest(setting) != expected:
        raise RuntimeError("what was loaded is not what was saved")
    for path in [limit, *peer.files()]:
        _read_into_page_cache(path)
    for _ in _for_a_while(_LOADS_S):
        limit_s = read_warm_s(limit, setting.buffer)
        samples.add("load, warm", _loaded_s(peer), limit_s)


def _read_into_page_cache(path: Path) -> None:
    """What was written past the page cache is not in it."""
    piece = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def _loaded_s(peer: Peer) -> float:
    began = time.perf_counter()
    peer.load()
    return time.perf_counter() - began


def _digest(setting: Setting) -> str:
    digest = xxhash.xxh3_128()
    for tensor in state_tensors(setting.state):
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _measure_loops(samples: Samples, peer: Peer, training: Training) -> None:
    for name, loop in LOOPS.items():
        with running(loop) as (step, steps):
            for _ in _for_a_while(_LOOP_S):
                training.step()
                lost = lost_in(step, steps, peer)
                peer.retire()
                samples.add(f"lost, {name}", lost.lost_s)
                samples.add(f"stall, {name}", lost.stall_s)


if __name__ == "__main__":
    asked = Task(**json.loads(sys.argv[1]))
    Path(asked.result).write_text(json.dumps(asdict(_measure(asked))))
