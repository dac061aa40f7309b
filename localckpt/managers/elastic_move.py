"""Transfer of planned parts of tensors: from shards that this rank reads, and between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from localckpt.errors import CorruptShardError
from localckpt.managers.elastic_copies import ShardCopies
from localckpt.managers.elastic_tensors import Give, Take
from localckpt.replication.connections import HostConnections
from localckpt.replication.parts import Accept, Put, exchange_parts
from localckpt.state_dict.direct_runs import RunTarget
from localckpt.state_dict.regions import Cut, Region, volume
from localckpt.state_dict.resharded import Filling, WantedTensor

__all__ = ["Transfer"]


@dataclass(frozen=True)
class Transfer:
    """One rank's part of the transfer.

    Attributes:
        name: Name of the transfer, the same on all ranks, and of no other one.
        rank: This rank.
        readers: For each shard the rank that reads it.
        copies: Shards that this rank reads; gets those that turn out bad.
        targets: Tensors of this rank.
        takes: What this rank takes.
        gives: What this rank gives to ranks, to itself among them.
    """

    name: str
    rank: int
    readers: dict[int, int]
    copies: ShardCopies
    targets: Sequence[WantedTensor]
    takes: Sequence[Take]
    gives: Sequence[Give]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank takes."""
        return sum(take.nbytes for take in self.takes)

    @property
    def senders(self) -> dict[int, int]:
        """Other ranks that this one gets parts from, with their bytes."""
        nbytes: dict[int, int] = {}
        for take in self.takes:
            if (reader := self.readers[take.shard]) != self.rank:
                nbytes[reader] = nbytes.get(reader, 0) + take.nbytes
        return nbytes

    @property
    def receivers(self) -> dict[int, int]:
        """Other ranks that this one sends parts to, with their bytes."""
        nbytes: dict[int, int] = {}
        for give in self.gives:
            if give.receiver != self.rank:
                nbytes[give.receiver] = nbytes.get(give.receiver, 0) + give.nbytes
        return nbytes

    def run(self, timeout_s: float) -> None:
        """Read what this rank gives, send what others take, and fill the tensors.

        Args:
            timeout_s: Deadline for connecting, and for the transfer, in seconds.

        Raises:
            CorruptShardError, StorageError: A copy is bad; it is noted.
            PeerLostError: A rank was lost, or has found a copy bad.
            MismatchError: A tensor did not get all its elements.
        """
        receivers, senders = self.receivers, self.senders
        expected: dict[int, int] = {}
        for take in self.takes:
            for number in (number for numbers in take.numbers for number in numbers):
                expected[number] = expected.get(number, 0) + volume(take.region)
        filling = Filling([(self.targets[number], count) for number, count in expected.items()])

        def accept(
            peer: int,
            item: int,
            index: int,
            first: Sequence[int],
            sizes: Sequence[int],
            values: torch.Tensor,
        ) -> None:
            if not item < len(self.takes) or not index < len(self.takes[item].numbers):
                raise CorruptShardError(f"rank {peer} sent what rank {self.rank} does not take")
            for number in self.takes[item].numbers[index]:
                filling.fill(self.targets[number], first, sizes, values)

        with ExitStack() as opened:
            connections = None
            if peers := receivers.keys() | senders.keys():
                connections = HostConnections.connect_to(self.name, peers, self.rank, timeout_s)
                opened.callback(connections.close)
            exchange_parts(
                *(connections, receivers, senders),
                lambda put: self._read(put, accept, filling),
                accept,
                timeout_s,
            )
        filling.require_full()

    def _read(self, put: Put, accept: Accept, filling: Filling) -> None:
        """Read the parts that this rank gives, and hand them on."""
        wanted: dict[int, dict[int, list[tuple[Any, Region]]]] = {}
        for give in self.gives:
            of_shard = wanted.setdefault(give.shard, {})
            for index, number in enumerate(give.numbers):
                receiver = give.receiver, give.item, index
                of_shard.setdefault(number, []).append((receiver, give.region))

        def deliver(receiver: tuple[int, int, int], _: int, cut: Cut, values: torch.Tensor) -> None:
            to, item, index = receiver
            if to == self.rank:
                accept(self.rank, item, index, cut.first, cut.sizes, values)
            else:
                put(to, item, index, cut.first, values)

        def direct(receiver: tuple[int, int, int]) -> RunTarget | None:
            to, item, index = receiver
            numbers = self.takes[item].numbers[index] if to == self.rank else []
            return filling.target(self.targets[numbers[0]]) if len(numbers) == 1 else None

        for shard, of_shard in wanted.items():
            with self.copies.noting(shard):
                self.copies.shards[shard].stream(of_shard, deliver, direct)
