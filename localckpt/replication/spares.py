"""Spares beside a job: their records in the job's store, and the transfer of shards to them.

A spare is no rank. It reaches the store of the job by its address, and ranks of the job over
connections that both find there, as ranks find each other. Keys, below one prefix a session:

    spares              the records of the spares that wait
    order/<spare>       what the job sends to a spare next, which the spare removes
    turn/<order>/<rank> the shards that a spare asks of the rank that sends a node's, which the rank
                        removes
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.availability.prefetch import SpareRecord
from localckpt.errors import PeerLostError
from localckpt.ids import MOST_RANKS, Checkpoint, Generation
from localckpt.ranks.deadline import ask_store
from localckpt.ranks.ranks import shaped
from localckpt.ranks.values import delete, if_there, look, put, take
from localckpt.replication.transport import Transport, connect
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.storage.names import session_name
from localckpt.waiting import wait_until

SPARE_RANK = MOST_RANKS
"""Number of a spare, in its connections and its folder, which no rank can have."""

LEASE_S = 30.0
"""Time without a beat after which a spare counts as dead."""

_SPARES = "spares"
_STORE_S = 10.0
# A save, which looks for spares as it ends, waits no longer for a store that does not answer.
_SAVE_WAITS_S = 1.0
# A spare that waits for a rank looks so often for another order.
_LOOK_S = 0.5
# Of records that others change at the same time.
_MOST_TRIES = 100
# A spare is asked for by so many nodes at most every quarter of a second each.
_FEW_NODES, _LONGEST_PAUSE_S = 16, 0.25
# Longest time that a spare may take for the shards of each node before.
_NODE_S = 600.0
_NAMES = re.compile("[0-9a-f]{16}")
_SIZE_NBYTES = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """Shards of one checkpoint for one spare, by node: the first rank of each sends them."""

    name: str
    checkpoint: Checkpoint
    rate_limit: float
    nodes: tuple[tuple[int, ...], ...]

    def to_bytes(self) -> bytes:
        c = self.checkpoint
        fields = [self.name, [*c.generation], c.iteration, c.world_size, self.rate_limit]
        return json.dumps([*fields, self.nodes]).encode()

    @classmethod
    def parse(cls, data: bytes) -> Order:
        """Read the result of :meth:`to_bytes`; raises ValueError for anything else."""
        shape = str, (int, int), int, int, float, [[int]]
        name, generation, iteration, world_size, rate, nodes = shaped(shape)(json.loads(data))
        ranks = [rank for node in nodes for rank in node]
        if not (_NAMES.fullmatch(name) and 0 < rate < math.inf and all(nodes) and iteration >= 0):
            raise ValueError("it is no order for a spare")
        if not all(0 <= rank < world_size <= MOST_RANKS for rank in ranks):
            raise ValueError("it names ranks that no job of that size has")
        checkpoint = Checkpoint(Generation(*generation), iteration, world_size)
        return cls(name, checkpoint, rate, tuple(map(tuple, nodes)))


class SpareRegistry:
    """Part of the job's store about the spares of one session; its methods raise PeerLostError.

    What is no record of ours there is a MismatchError.
    """

    def __init__(self, store: Store, session_id: str) -> None:
        self.store = store
        self._part = PrefixStore(f"localckpt/{_SPARES}/{session_name(session_id)}", store)
        # When the beat of each spare was seen to change.
        self._seen: dict[str, tuple[int, float]] = {}

    def put(self, record: SpareRecord) -> None:
        """Add the record of a spare, or replace it."""
        self._ask(lambda: self._change({record.name: record}))

    def withdraw(self, name: str) -> None:
        """Remove the record of a spare, which receives shards meanwhile."""
        self._ask(lambda: self._change({name: None}))

    def forget(self, name: str) -> None:
        """Remove all that is said of a spare, which has ended."""
        self.withdraw(name)
        self._ask(lambda: delete(self._part, f"order/{name}"))

    def waiting(self) -> list[SpareRecord]:
        """Return the spares that wait for shards, and remove those that have ended."""
        records, now = self._ask(self._records, _SAVE_WAITS_S), time.monotonic()
        seen = {r.name: self._seen.get(r.name, (r.beat, now)) for r in records}
        changed = {r.name: (r.beat, now) for r in records if r.beat != seen[r.name][0]}
        self._seen = seen | changed
        gone = [name for name, (_, since) in self._seen.items() if now - since > LEASE_S]
        for name in gone:
            self.forget(name)
        return [record for record in records if record.name not in gone]

    def give(self, spare: str, order: Order) -> None:
        self._ask(lambda: put(self._part, f"order/{spare}", order.to_bytes()))

    def has_order(self, spare: str) -> bool:
        return self._ask(lambda: if_there(self._part, f"order/{spare}")) is not None

    def take_order(self, spare: str) -> Order:
        return self._ask(lambda: Order.parse(take(self._part, f"order/{spare}")))

    def call(self, order: Order, sender: int, wanted: Sequence[int]) -> None:
        """Ask the rank that sends a node's shards for some of them."""
        told = json.dumps(wanted).encode()
        self._ask(lambda: put(self._part, f"turn/{order.name}/{sender}", told))

    def take_call(self, order: Order, sender: int) -> list[int] | None:
        key = f"turn/{order.name}/{sender}"

        def take_in() -> list[int] | None:
            if look(self._part, key) is None:
                return None
            wanted: list[int] = shaped([int])(json.loads(take(self._part, key)))
            return wanted

        return self._ask(take_in)

    def _ask(self, call: Callable[[], T], limit_s: float = _STORE_S) -> T:
        return ask_store("reach the spares of the job", limit_s, call)

    def _records(self) -> list[SpareRecord]:
        return _parsed(if_there(self._part, _SPARES) or b"[]")

    def _change(self, changed: dict[str, SpareRecord | None]) -> None:
        for _ in range(_MOST_TRIES):
            before = if_there(self._part, _SPARES) or b""
            try:
                records = {record.name: record for record in _parsed(before or b"[]")}
            except (ValueError, RecursionError):
                # What is no record of ours is replaced.
                records = {}
            left = {k: v for k, v in {**records, **changed}.items() if v is not None}
            after, told = json.dumps([*left.values()]), before.decode(errors="replace")
            held: bytes = self._part.compare_set(_SPARES, told, after)
            if held == after.encode():
                return
        raise TimeoutError("others change it all the time")


def _parsed(data: bytes) -> list[SpareRecord]:
    values = shaped([(str, str, int, int, float, [int])])(json.loads(data))
    records = [SpareRecord._make([*fields, tuple(ranks)]) for *fields, ranks in values]
    if not all(_NAMES.fullmatch(r.name) and 0 < r.rate_limit < math.inf for r in records):
        raise ValueError("it is no record of a spare")
    return records


class _Link:
    """One order's connections, from one end; another thread may abort them."""

    def __init__(self, registry: SpareRegistry, order: Order, timeout_s: float) -> None:
        self.order = order
        self.is_aborted = False
        self._registry, self._timeout_s = registry, timeout_s
        self._transport: Transport | None = None

    def abort(self) -> None:
        """End what is under way, with a PeerLostError there."""
        self.is_aborted = True
        if (transport := self._transport) is not None:
            transport.abort()

    def _is_superseded(self) -> bool:
        """Return whether the other end has gone on to another order, as far as this one can see."""
        return False

    @contextmanager
    def _connected(self, rank: int, peer: int) -> Iterator[Transport]:
        self._transport = transport = connect(
            f"spares/{self.order.name}",
            [peer],
            rank,
            self._timeout_s,
            in_pairs=True,
            rate_limit=self.order.rate_limit,
            is_given_up=lambda: self.is_aborted or self._is_superseded(),
            store=self._registry.store,
        )
        try:
            if self.is_aborted:
                # There was nothing to abort yet.
                raise PeerLostError("the transfer of shards to a spare was given up")
            yield transport
        finally:
            transport.close()


class Push(_Link):
    """Sending of one node's shards to a spare, by the first rank there."""

    def __init__(self, registry: SpareRegistry, order: Order, spare: str, timeout_s: float) -> None:
        super().__init__(registry, order, timeout_s)
        self.spare = spare

    def give(self) -> None:
        """Tell the spare of the order, on one rank."""
        self._registry.give(self.spare, self.order)

    def send(self, ranks: Sequence[int], open_source: Callable[[int], ShardSource]) -> int:
        """Send the shards that the spare asks for once it does; return their bytes."""
        sender, nbytes = ranks[0], 0
        wanted = [rank for rank in self._await_call(ranks) if rank in ranks]
        if not wanted:
            return 0
        with ExitStack() as opened:
            sources = []
            for rank in wanted:
                sources.append(open_source(rank))
                opened.callback(sources[-1].close)
            transport = opened.enter_context(self._connected(sender, SPARE_RANK))
            told = b"".join(s.nbytes.to_bytes(_SIZE_NBYTES, "little") for s in sources)
            for source in (MemorySource(memoryview(bytearray(told))), *sources):
                transport.exchange([(SPARE_RANK, source)], [], self._timeout_s)
                # Once it is verified, and on the disk there.
                answer = memoryview(bytearray(1))
                transport.exchange([], [(SPARE_RANK, answer)], self._timeout_s)
                nbytes += source.nbytes
        return nbytes - len(told)

    def _await_call(self, ranks: Sequence[int]) -> list[int]:
        wanted: list[int] | None = None
        nodes = self.order.nodes

        def is_called() -> bool:
            nonlocal wanted
            if self.is_aborted:
                raise PeerLostError("the transfer of shards to a spare was given up")
            wanted = self._registry.take_call(self.order, ranks[0])
            return wanted is not None

        within_s = _NODE_S * (1 + [node[0] for node in nodes].index(ranks[0]))
        longest_s = _LONGEST_PAUSE_S * max(1.0, len(nodes) / _FEW_NODES)
        if not wait_until(is_called, within_s, longest_s=longest_s):
            raise PeerLostError(f"a spare has not asked for its shards within {within_s:g} s")
        return wanted or []


class Pull(_Link):
    """Receiving of the shards of an order by a spare, node by node."""

    def __init__(self, registry: SpareRegistry, order: Order, spare: str, timeout_s: float) -> None:
        super().__init__(registry, order, timeout_s)
        self._spare, self._look_at = spare, 0.0

    def _is_superseded(self) -> bool:
        if (now := time.monotonic()) < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        return self._registry.has_order(self._spare)

    def receive(
        self,
        ranks: Sequence[int],
        sender: int,
        keep: Callable[[int, int, Callable[[memoryview], None]], None],
    ) -> None:
        """Ask for shards of a node; ``keep(rank, nbytes, fill)`` has each filled, and keeps it."""
        self._registry.call(self.order, sender, ranks)
        if not ranks:
            return
        with self._connected(SPARE_RANK, sender) as transport:

            def fill(memory: memoryview) -> None:
                transport.exchange([], [(sender, memory)], self._timeout_s)

            def answer() -> None:
                done = MemorySource(memoryview(bytearray(1)))
                transport.exchange([(sender, done)], [], self._timeout_s)

            told = memoryview(bytearray(_SIZE_NBYTES * len(ranks)))
            fill(told)
            answer()
            for place, rank in enumerate(ranks):
                at = place * _SIZE_NBYTES
                keep(rank, int.from_bytes(told[at : at + _SIZE_NBYTES], "little"), fill)
                answer()
