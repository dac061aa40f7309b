"""Transfer of planned parts of tensors: from shards that this rank reads, and between ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from localckpt.errors import CorruptShardError
from localckpt.managers.elastic_copies import ShardCopies
from localckpt.managers.elastic_tensors import Give, Take
from localckpt.ranks.deadline import Deadline
from localckpt.replication.connections import HostConnections
from localckpt.replication.links import Links
from localckpt.replication.parts.exchange import Find, To, exchange_parts
from localckpt.state_dict.regions import Region, volume
from localckpt.state_dict.resharded import FilledPart, Filling, WantedTensor
from localckpt.state_dict.runs import PartReceiver

__all__ = ["Transfer"]


@dataclass(frozen=True)
class Transfer:
    """One rank's part of the transfer.

    Attributes:
        name: Name of the transfer, the same on all ranks, and of no other one.
        rank: This rank.
        links: Links to ranks of this node that this one sends to.
        linked: Ranks of this node that have links to this one, if they send to it.
        copies: Shards that this rank reads; gets those that turn out bad.
        targets: Tensors of this rank.
        takes: What this rank takes.
        gives: What this rank gives to ranks, to itself among them.
    """

    name: str
    rank: int
    links: Links
    linked: Collection[int]
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
            if take.reader != self.rank:
                nbytes[take.reader] = nbytes.get(take.reader, 0) + take.nbytes
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
        filling = Filling(
            self.rank, [(self.targets[number], count) for number, count in expected.items()]
        )
        taken = [
            [
                FilledPart(filling, [self.targets[number] for number in numbers], take.region)
                for numbers in take.numbers
            ]
            for take in self.takes
        ]

        def find(peer: int, item: int, index: int) -> PartReceiver:
            if not item < len(taken) or not index < len(taken[item]):
                raise CorruptShardError(f"rank {peer} sent what rank {self.rank} does not take")
            return taken[item][index]

        with ExitStack() as opened:
            self.links.accept(senders.keys() & set(self.linked), Deadline.after(timeout_s))
            linked = {*self.links.outgoing, *self.links.incoming}
            connections = None
            if peers := (receivers.keys() | senders.keys()) - linked:
                connections = HostConnections.connect_to(self.name, peers, self.rank, timeout_s)
                opened.callback(connections.close)
            exchange_parts(
                *(self.rank, self.links, connections, receivers, senders),
                lambda to: self._read(to, find),
                *(find, timeout_s),
            )
        filling.require_full()

    def _read(self, to: To, find: Find) -> None:
        """Read the parts that this rank gives, to where they go."""
        wanted: dict[int, dict[int, list[tuple[PartReceiver, Region]]]] = {}
        for give in self.gives:
            of_shard = wanted.setdefault(give.shard, {})
            receiver_of = find if give.receiver == self.rank else to
            for index, number in enumerate(give.numbers):
                receiver = receiver_of(give.receiver, give.item, index)
                of_shard.setdefault(number, []).append((receiver, give.region))
        for shard, of_shard in wanted.items():
            with self.copies.noting(shard):
                self.copies.shards[shard].stream(of_shard)
