"""Parity groups: the arithmetic beside memcpy, encoding beside the bare ring, rebuilding beside
fetching a replica. All ranks share this machine, so what they do at once they do in turns."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import numpy as np
import torch.distributed as dist

from benchmarks.limits import HugeBuffer
from benchmarks.links import Links, links, why_not
from benchmarks.ranks import run_ranks
from benchmarks.report import Report, compare
from benchmarks.setup import Options
from localckpt.parity import gf
from localckpt.parity.chains import schedule
from localckpt.parity.encode import encode, encoding_chains
from localckpt.parity.pipeline import Pipeline
from localckpt.parity.planning import Left, plan_rebuild
from localckpt.parity.stripes import Kind, ParityLayout
from localckpt.replication.connections import HostConnections, as_tensor
from localckpt.replication.transport import connect
from localckpt.state_dict.source import MemorySource

__all__ = ["measure"]

_TIMEOUT_S = 900.0
_DEADLINE_S = 120.0
_SHAPES = ((3, 1), (4, 1), (4, 2))
# Larger than the caches, and small enough for the ranks of a group to have several.
_NBYTES = 256 << 20
# How much slower than memcpy, or than the bare exchange of as many bytes, is good.
_XOR, _XTIME, _ENCODE, _REBUILD = 1 / 0.9, 1 / 0.35, 1.3, 1.5
# Slow enough for these cores to keep all links busy.
_GBIT_S = 2


def measure(options: Options) -> Report:
    """The state that is asked for plays no part here: images are bytes."""
    report = Report("parity")
    _measure_kernels(report, options.rounds)
    for members, parity in _SHAPES:
        _measure_group(report, options.rounds, members, parity)
    if (reason := why_not()) is not None:
        report.fact("links", 0, "", f"not measured between nodes: {reason}")
        return report
    for members, parity in _SHAPES:
        with links(members, _GBIT_S) as nodes:
            _measure_group(report, options.rounds, members, parity, nodes)
    return report


def _measure_group(
    report: Report, rounds: int, members: int, parity: int, nodes: Links | None = None
) -> None:
    command = [
        *(sys.executable, "-m", "benchmarks.parity"),
        *(str(rounds), str(members), str(parity)),
    ]
    outputs = run_ranks(command, members, _TIMEOUT_S, nodes)
    samples = [json.loads(output) for output in outputs]
    shape = f"{parity} of {members}" + (f", {_GBIT_S} Gbit/s each" if nodes else "")
    encoded = report.compared(
        f"encode, {shape}", "bare ring of the same messages", parity * _NBYTES, _ENCODE
    )
    rebuilt = report.compared(
        f"rebuild one image, {shape}", "bare chain of the same messages", _NBYTES
    )
    # On one machine the survivors share its cores: what they send together is as many images as
    # they are, so there the ratio is about that.
    beside_replica = report.compared(
        f"rebuild one image, {shape}",
        *("fetch a replica of it", _NBYTES, _REBUILD if nodes else None),
    )
    for comparison, limit, ours in (
        (encoded, "ring", "encode"),
        (rebuilt, "chain", "rebuild"),
        (beside_replica, "fetch", "rebuild"),
    ):
        # The slowest rank counts.
        slowest = [
            [max(of_ranks) for of_ranks in zip(*(s[kind] for s in samples), strict=True)]
            for kind in (limit, ours)
        ]
        for limit_s, ours_s in zip(*slowest, strict=True):
            comparison.add(limit_s, ours_s)


def _measure_kernels(report: Report, rounds: int) -> None:
    """One thread; runs that start at a page."""
    buffers = [HugeBuffer(_NBYTES) for _ in range(3)]
    acc, data, copy = (np.frombuffer(buffer.view, np.uint8)[:_NBYTES] for buffer in buffers)
    random = np.random.default_rng(1)
    for run in (acc, data):
        run[:] = random.integers(0, 256, _NBYTES, dtype=np.uint8)
    scratch = gf.Scratch()
    arms: list[tuple[str, float | None, Callable[[], None]]] = [
        ("xor_into", _XOR, lambda: gf.xor_into(acc, data)),
        ("xtime_xor_into", _XTIME, lambda: gf.xtime_xor_into(acc, data, scratch)),
        ("scale_xor_into, by 0xa7", None, lambda: gf.scale_xor_into(acc, data, 0xA7, scratch)),
    ]
    compare(
        rounds,
        partial(_seconds, lambda: np.copyto(copy, data)),
        [
            (report.compared(name, "memcpy", _NBYTES, target), partial(_seconds, run))
            for name, target, run in arms
        ],
    )


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class _Rank:
    """One member of a group, and all that it measures."""

    def __init__(self, members: int, parity: int) -> None:
        self.rank = dist.get_rank()
        self.layout = ParityLayout((_NBYTES,) * members, parity)
        ranks = range(members)
        self.pipeline = Pipeline(connect("pipeline", ranks, self.rank, _DEADLINE_S))
        self.transport = connect("fetch", ranks, self.rank, _DEADLINE_S)
        self.bare = HostConnections("bare", ranks, self.rank, _DEADLINE_S)
        self.image = _buffer(_NBYTES)
        self.parity = _buffer(self.layout.parity_nbytes)
        self.sent = _buffer(parity * _NBYTES)
        self.received = _buffer(parity * _NBYTES)
        self.place = _buffer(_NBYTES)
        random = np.random.default_rng(self.rank)
        np.frombuffer(self.image, np.uint8)[:] = random.integers(0, 256, _NBYTES, dtype=np.uint8)
        self._message_nbytes = schedule(encoding_chains(self.layout, ranks)).message_nbytes
        # Rank 0 lost its image, and has it again from the others.
        left = {member: member for member in ranks if member}
        self._plan = plan_rebuild(self.layout, Left(left, left), {0: 0})

    def ring(self) -> None:
        """As many bytes as encoding sends, in the same messages."""
        self._pass_on(len(self.sent), sends=True, receives=True)

    def chain(self) -> None:
        """As many bytes as rebuilding sends: each survivor one image, the last to rank 0."""
        self._pass_on(_NBYTES, sends=self.rank != 0, receives=self.rank != 1)

    def _pass_on(self, nbytes: int, sends: bool, receives: bool) -> None:
        """To the next rank and from the one before; all is asked for at the start."""
        size, message = self.layout.members, self._message_nbytes
        after, before = (self.rank + 1) % size, (self.rank - 1) % size
        starts = range(0, nbytes, message)
        works = []
        for start in starts if receives else ():
            place = as_tensor(self.received[start : start + message])
            works.append(self.bare.receive(place, before, 0))
        for start in starts if sends else ():
            content = as_tensor(self.sent[start : start + message])
            works.append(self.bare.send(content, after, 0))
        for work in works:
            work.wait(timedelta(seconds=_DEADLINE_S))

    def encode(self) -> None:
        encode(self.layout, self.pipeline, MemorySource(self.image), self.parity, _DEADLINE_S)

    def fetch(self) -> None:
        """Rank 1 sends rank 0 what would be its replica."""
        sends = [(0, MemorySource(self.image))] if self.rank == 1 else []
        self.transport.exchange(sends, [(1, self.place)] if self.rank == 0 else [], _DEADLINE_S)

    def rebuild(self) -> None:
        sources = {
            (Kind.IMAGE, self.rank): MemorySource(self.image),
            (Kind.PARITY, self.rank): MemorySource(self.parity),
        }
        sinks = {(Kind.IMAGE, 0): self.place} if self.rank == 0 else {}
        self.pipeline.run(self._plan, sources, sinks, _DEADLINE_S)

    def check(self) -> None:
        """What was rebuilt last is what was lost."""
        place, image = (np.frombuffer(view, np.uint8) for view in (self.place, self.image))
        if self.rank == 0 and not np.array_equal(place, image):
            raise RuntimeError("what was rebuilt is not what was lost")


def _buffer(nbytes: int) -> memoryview:
    view = HugeBuffer(nbytes).view
    return view[:nbytes]


def _run_rank(rounds: int, members: int, parity: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=_DEADLINE_S))
    me = _Rank(members, parity)
    kinds = {
        "ring": me.ring,
        "encode": me.encode,
        "chain": me.chain,
        "fetch": me.fetch,
        "rebuild": me.rebuild,
    }
    samples: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, run in kinds.items():
            dist.barrier()
            took = _seconds(run)
            if turn:
                samples[kind].append(took)
        me.check()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(samples))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("rounds", "members", "parity"):
        parser.add_argument(name, type=int)
    asked = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _run_rank(asked.rounds, asked.members, asked.parity)
