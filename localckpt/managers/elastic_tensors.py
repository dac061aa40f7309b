"""Shards and tensors of one rank in a load with another sharding.

The rank reads some of the shards, of which there may be several copies. Its tensors, and those of
the shards, are described in groups, and moved by the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import torch

from localckpt.availability.reshard import Keys, TensorGroup, group_tensors
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import described
from localckpt.ids import Piece, ShardIdentity
from localckpt.managers.context import Context
from localckpt.managers.elastic_judge import Packed, ValueImages, kind_of
from localckpt.managers.recovery import Recovery
from localckpt.managers.restoring import ReadProgress, incurable
from localckpt.memory.tensor_bytes import integer_view
from localckpt.options import PrivateRule
from localckpt.ranks.failure import forget_frames
from localckpt.replication.connections import HostConnections
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.parts import PackedPart, Parcel, exchange_parts, parcels_of
from localckpt.state_dict.boxes import Region, volume
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.resharded import Target, WantedTensor, copy_part
from localckpt.state_dict.saved_shard import PRIVATE, SavedShard, SavedTensor
from localckpt.state_dict.source import ImageBytes, MemorySource, ShardSource
from localckpt.state_dict.stateful import Freedom
from localckpt.state_dict.values import Unit, digest_of

_Groups = dict[TensorGroup, list[list[int]]]
"""For each group the numbers of its tensors, by key."""


class Taken(NamedTuple):
    """Elements that this rank takes from a shard, which ``reader`` reads.

    ``numbers`` are its tensors, by the number of the key; several where they are the same part.
    """

    reader: int
    numbers: list[list[int]]
    region: Region
    nbytes: int


class Given(NamedTuple):
    """Elements that this rank gives; ``item`` is their number among all that the receiver takes."""

    shard: int
    receiver: int
    item: int
    numbers: list[int]
    region: Region
    nbytes: int


class DescribedTensors:
    """Tensors that this rank wants, and those of the shards that it reads.

    With ``is_doubted``, what shards say is equal may differ.
    """

    def __init__(
        self,
        wanted: Sequence[WantedTensor],
        shards: Mapping[int, SavedShard],
        *,
        is_doubted: bool = False,
    ) -> None:
        self._shards = shards
        self._is_doubted = is_doubted
        self.tensors = wanted
        self._tables: dict[str, Keys] = {}
        rows = [(w.key, w.dtype, w.shape, w.region, "") for w in wanted]
        self._wanted = self._grouped(rows, range(len(rows)))
        self._saved: dict[int, _Groups] = {}

    @property
    def wanted(self) -> list[TensorGroup]:
        return list(self._wanted)

    def saved(self, shard: int) -> list[TensorGroup]:
        return list(self._groups_of(shard))

    def tables(self, names: Sequence[str]) -> list[Keys]:
        return [self._tables[name] for name in names]

    def take_of(self, reader: int, group: Any, keys: Sequence[str] | None, fields: Any) -> Taken:
        numbers, region = self._find(self._wanted, group, keys), _region_of(fields)
        itemsize = self.tensors[numbers[0][0]].tensor.itemsize
        return Taken(reader, numbers, region, volume(region) * itemsize * len(numbers))

    def give_of(
        self,
        shard: int,
        receiver: int,
        item: int,
        group: Any,
        keys: Sequence[str] | None,
        fields: Any,
    ) -> Given:
        found, region = self._find(self._groups_of(shard), group, keys), _region_of(fields)
        numbers = [of_key[0] for of_key in found]
        itemsize = self._shards[shard].tensors[numbers[0]].itemsize
        nbytes = volume(region) * itemsize * len(numbers)
        return Given(shard, receiver, item, numbers, region, nbytes)

    def digests(self, shard: int, group: Any, keys: Sequence[str], fields: Any) -> list[str]:
        numbers, region = self._find(self._groups_of(shard), group, keys), _region_of(fields)
        return [self._shards[shard].digest_of_part(of_key[0], region) for of_key in numbers]

    def _groups_of(self, shard: int) -> _Groups:
        def equal_on(tensor: SavedTensor) -> str:
            # What is equal on one rank only is compared with what others have of it.
            is_alone = self._is_doubted and tensor.equal_on != PRIVATE
            return f"rank {shard}" if is_alone else tensor.equal_on

        if shard not in self._saved:
            tensors = self._shards[shard].tensors
            rows = [
                (t.key, t.entry.dtype, t.shape, t.region, equal_on(t)) for t in tensors.values()
            ]
            self._saved[shard] = self._grouped(rows, list(tensors))
        return self._saved[shard]

    def _grouped(self, rows: Sequence[Any], numbers: Sequence[int]) -> _Groups:
        groups, tables = group_tensors(rows)
        self._tables |= tables
        return {
            group: [[numbers[row] for row in of_key] for of_key in of_keys]
            for group, of_keys in groups.items()
        }

    def _find(self, groups: _Groups, group: Any, keys: Sequence[str] | None) -> list[list[int]]:
        found = TensorGroup.from_json(group)
        if keys is None:
            return groups[found]
        of_key = dict(zip(self._tables[found.name].keys, groups[found], strict=True))
        return [of_key[key] for key in keys]


def _region_of(fields: Any) -> Region:
    return TensorGroup.from_json(["", fields, ""]).region


def move_tensors(
    name: str,
    rank: int,
    copies: ShardCopies,
    targets: Sequence[WantedTensor],
    takes: Sequence[Taken],
    gives: Sequence[Given],
    timeout_s: float,
) -> tuple[int, int]:
    """Fill the tensors with what this rank reads, and exchange parts with ranks of other nodes.

    ``name`` is the same on all ranks, and of no other transfer. Shards that turn out bad are noted
    in ``copies``. Returns the bytes that came from other ranks, and those sent.
    """

    def targets_of(item: int, index: int) -> list[Target]:
        return [targets[number].target for number in takes[item].numbers[index]]

    copies.read(
        (give.shard, number, give.region, targets_of(give.item, index))
        for give in gives
        if give.receiver == rank
        for index, number in enumerate(give.numbers)
    )
    given = {(give.receiver, give.item): give for give in gives if give.receiver != rank}
    taken = {(take.reader, item): take for item, take in enumerate(takes) if take.reader != rank}
    outgoing, incoming = _parcels(given), _parcels(taken)

    def read(parcels: Mapping[int, tuple[Parcel, memoryview]]) -> None:
        parts = []
        for peer, (parcel, memory) in parcels.items():
            for part in parcel:
                give = given[peer, part.item]
                number = give.numbers[part.number]
                to = copies.shards[give.shard].target_in(memory[part.offset :], number, part.region)
                parts.append((give.shard, number, part.region, [to]))
        copies.read(parts)

    def take(part: PackedPart, peer: int, values: torch.Tensor) -> None:
        to = targets_of(part.item, part.number)
        sizes = [sum(count for _, count in runs) for runs in part.region]
        items = integer_view(values, to[0].tensor.itemsize).view(sizes)
        copy_part(part.region, items, part.region, to)

    if peers := outgoing.keys() | incoming.keys():
        connections = HostConnections.connect_to(name, peers, rank, timeout_s)
        with closing(HostTransport(connections)) as transport:
            exchange_parts(transport, outgoing, incoming, read, take, timeout_s)
    came, sent = (sum(moved.nbytes for moved in side.values()) for side in (taken, given))
    return came, sent


def _parcels(moved: Mapping[tuple[int, int], Taken | Given]) -> dict[int, list[Parcel]]:
    """Divide what is sent between this rank and others into parcels, by rank."""
    of_peers: dict[int, list[tuple[int, int, Region, int]]] = {}
    for (peer, item), one in sorted(moved.items()):
        itemsize = one.nbytes // (volume(one.region) * len(one.numbers))
        parts = [(item, index, one.region, itemsize) for index in range(len(one.numbers))]
        of_peers.setdefault(peer, []).extend(parts)
    return {peer: parcels_of(parts) for peer, parts in of_peers.items()}


class ShardCopies:
    """Copies of the shards of one checkpoint that this rank reads, in one round after another.

    Attributes:
        shards: Shards that are open.
        found_bad: Shards whose copies were found bad in this round, with the reason.
    """

    def __init__(
        self, context: Context, recovery: Recovery, rules: Mapping[str, PrivateRule]
    ) -> None:
        self._context = context
        self._recovery = recovery
        self._rules = rules
        self.images = ValueImages(self._identity(0), context.allowed)
        self.shards: dict[int, SavedShard] = {}
        self.found_bad: dict[int, str] = {}

    def plan_recovery(self) -> dict[int, int] | None:
        """Begin a round: choose the ranks that compute shards which no node holds, in turn.

        Returns the rank for each shard; ``None`` if some shard cannot be computed.
        """
        self.shards, self.found_bad = {}, {}
        world_size = self._context.ranks.world_size
        try:
            return {shard: shard % world_size for shard in self._recovery.plan()}
        except NoReplicasAvailableError:
            return None

    def describe(self, shards: Iterable[int], free: Freedom, opened: ExitStack) -> None:
        """Open the shards that this rank describes, and note the copies that are bad."""

        def read(saved: SavedShard) -> None:
            saved.read_values(self._rules, free)
            # They read private tensors.
            _ = saved.digests, saved.ruled_digests

        for shard in shards:
            self._open(shard, opened, read)

    def open(self, groups: Iterable[tuple[int, Any]], free: Freedom, opened: ExitStack) -> None:
        """Open the shards of this node that a plan takes groups of, too; as :meth:`describe`."""
        equal_on: dict[int, set[str]] = {}
        for shard, group in groups:
            equal_on.setdefault(shard, set()).add(TensorGroup.from_json(group).equal_on)

        def read(saved: SavedShard) -> None:
            # Of a tensor that no table of boxes has, only who reads the values knows.
            if PRIVATE in equal_on[saved.identity.rank]:
                saved.read_values(self._rules, free)

        for shard in equal_on.keys() - self.shards.keys():
            self._open(shard, opened, read)

    @contextmanager
    def noting(self, shard: int) -> Iterator[None]:
        """Context in which a shard is read: that its copy is bad is noted, and raised."""
        try:
            yield
        except (StorageError, CorruptShardError) as error:
            self._note_bad(shard, error)
            raise

    def read(self, parts: Iterable[tuple[int, int, Region, Sequence[Target]]]) -> None:
        """Read parts of tensors: shard, number of the tensor, elements, and what takes them."""
        wanted: dict[int, list[tuple[int, Region, Sequence[Target]]]] = {}
        for shard, number, region, targets in parts:
            wanted.setdefault(shard, []).append((number, region, targets))
        for shard, of_shard in wanted.items():
            with self.noting(shard):
                self.shards[shard].read_parts(of_shard)

    @property
    def bad(self) -> list[list[Any]]:
        return [[shard, why] for shard, why in self.found_bad.items()]

    def take_out(self, bad: Sequence[Sequence[Any]]) -> bool:
        """Leave bad copies, each of a rank and an item of its report, out of the next round.

        Returns whether there are any.
        """
        for reader, shard, why in bad:
            self._recovery.take_out(Piece(shard), reader, why)
        return bool(bad)

    def _identity(self, shard: int) -> ShardIdentity:
        return self._recovery.checkpoint.shard(shard, self._context.session_id)

    def _open(self, shard: int, opened: ExitStack, read: Callable[[SavedShard], None]) -> None:
        identity, computed = self._identity(shard), self._recovery.slots.get(shard)
        source: ShardSource | None = None
        try:
            source = (
                self._context.store.open(identity)
                if computed is None
                else MemorySource(computed.image)
            )
            opened.callback(source.close)
            on_read = ReadProgress(f"reading {identity}", source.nbytes).add
            like = next(iter(self.shards.values()), None)
            allowed = self._context.allowed
            saved = SavedShard(source, allowed, identity, like, on_read)
            read(saved)
        except CorruptShardError as error:
            # With good digests another copy says the same.
            self._require_damaged(shard, source, error)
            self._note_bad(shard, error)
        except StorageError as error:
            self._note_bad(shard, error)
        except CheckpointingException:
            raise
        except Exception as error:
            raise incurable(error) from error
        else:
            self.shards[shard] = saved

    def _require_damaged(
        self, shard: int, source: ShardSource | None, error: CorruptShardError
    ) -> None:
        """Raise an error for a shard that contradicts itself, though its bytes are good."""
        if source is None:
            return
        try:
            ImageBytes(source, self._identity(shard)).verify()
        except (StorageError, CorruptShardError):
            return
        raise incurable(RestoreError(f"{self._identity(shard)}: {error}")) from error

    def _note_bad(self, shard: int, error: CheckpointingException) -> None:
        forget_frames(error)
        self.found_bad[shard] = described(error)

    # Values that are no part of a global tensor.

    def described_values(self, shard: int) -> dict[str, str]:
        return {name: digest_of(those, str) for name, those in self.sections(shard).items()}

    def sections(self, shard: int) -> dict[str, dict[str, str]]:
        """Digests of values that no rule is for, by the first key of their places, and by key."""
        saved = self.shards[shard]
        sections: dict[str, dict[str, str]] = {}
        for unit in saved.others:
            sections.setdefault(_section_of(unit), {})[unit.key] = saved.digests[unit.key]
        return sections

    def packs(self, asked: Mapping[str, Sequence[Any]], unequal: Sequence[str]) -> list[Packed]:
        rank, world_size = self._context.ranks.rank, self._context.ranks.world_size
        packs = []
        for shard, names in asked["sections"]:
            units = [unit for unit in self.shards[shard].others if _section_of(unit) in names]
            packs.append(Packed("all", shard, self.images.pack_units(SavedShard.values(units))))
        for shard, keys in asked["equal"]:
            told = set(keys)
            units = [unit for unit in self.shards[shard].ruled if unit.key in told]
            packs.append(Packed("all", shard, self.images.pack_units(SavedShard.values(units))))
        for shard in self.shards:
            if of_function := self.unequal_of(shard, unequal, "function"):
                packs.append(Packed("rule", shard, self.images.pack_units(of_function)))
            kept = self.unequal_of(shard, unequal, "keep")
            if kept and shard != rank and shard < world_size:
                packs.append(Packed("keep", shard, self.images.pack_units(kept)))
        return packs

    def unequal_of(self, shard: int, unequal: Sequence[str], kind: str) -> list[Unit]:
        """Values of a shard that not all shards have alike, and that a kind of rule is for."""
        if shard not in self.shards:
            return []
        saved, rules, those = self.shards[shard], self._rules, set(unequal)
        return saved.whole_values(
            unit
            for unit in saved.ruled
            if unit.key in those and kind_of(rules[prefix_in(unit.key, rules) or ""]) == kind
        )


def _section_of(unit: Unit) -> str:
    return str(unit.place[0]) if unit.place else ""
