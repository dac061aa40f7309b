"""Shards and tensors of one rank in a load with another sharding.

The rank reads some of the shards, of which there may be several copies. Its tensors, and those of
the shards, are described in groups, and moved by the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from localckpt.availability.reshard import Keys, Take, TensorGroup, group_tensors, tuples_of
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import described
from localckpt.ids import Piece, ShardIdentity
from localckpt.managers.context import Context
from localckpt.managers.elastic_judge import Packed, ValueImages, kind_of
from localckpt.managers.recovery import Recovery
from localckpt.managers.restoring import incurable
from localckpt.memory.tensor_bytes import copy_values
from localckpt.options import PrivateRule
from localckpt.ranks.failure import forget_frames
from localckpt.replication.parts import PARCEL_NBYTES, exchange_parts
from localckpt.replication.transport import connect
from localckpt.state_dict.boxes import Rectangle, rectangles_of
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.reader import OpenImages
from localckpt.state_dict.resharded import WantedTensor
from localckpt.state_dict.saved_shard import PRIVATE, SavedShard
from localckpt.state_dict.stateful import Freedom
from localckpt.state_dict.values import Unit, with_tensors

_Groups = dict[TensorGroup, list[list[int]]]
"""For each group the numbers of its tensors, by key."""


class Transfer(NamedTuple):
    """Rectangle that a rank takes from a tensor of a shard, which it or another rank reads.

    The reader knows the ``number`` of the saved tensor, and the receiver the ``targets``: several,
    where they are the same part.
    """

    shard: int
    reader: int
    receiver: int
    number: int
    targets: Sequence[WantedTensor]
    rectangle: Rectangle
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.rectangle.sizes) * self.dtype.itemsize

    def values_in(self, memory: memoryview) -> torch.Tensor:
        """View memory as the values that are taken, in their order."""
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(self.dtype).view(self.rectangle.sizes)


class DescribedTensors:
    """Tensors that this rank wants, and those of the shards that it reads.

    With ``is_doubted``, what shards say is equal may differ.
    """

    def __init__(
        self,
        wanted: Sequence[WantedTensor],
        shards: Mapping[int, SavedShard],
        *,
        is_doubted: bool,
    ) -> None:
        self._shards = shards
        self._is_doubted = is_doubted
        self.tensors = wanted
        self.tables: dict[str, Keys] = {}
        rows = [(w.key, w.dtype, w.box.shape, w.box.runs, "") for w in wanted]
        self.wanted = self._grouped(rows, range(len(rows)))
        self._saved: dict[int, _Groups] = {}

    def transfers_of(self, take: Take, rank: int) -> Iterator[Transfer]:
        """Yield this rank's part in what a rank takes, for each key."""
        saved, wanted = list[int](), list[list[WantedTensor]]()
        if take.receiver == rank:
            found = self._find(self.wanted, take.wanted, take.keys)
            wanted = [[self.tensors[number] for number in of_key] for of_key in found]
        if take.reader == rank:
            found = self._find(self.saved(take.shard), take.saved, take.keys)
            saved = [of_key[0] for of_key in found]
        name = (take.saved if saved else take.wanted).name
        dtype: torch.dtype = getattr(torch, self.tables[name].dtype)
        rectangles = list(rectangles_of(take.region, PARCEL_NBYTES // dtype.itemsize))
        ranks = take.shard, take.reader, take.receiver
        for number, targets in zip_longest(saved, wanted):
            for rectangle in rectangles:
                yield Transfer(*ranks, number, targets or (), rectangle, dtype)

    def digests(self, shard: int, group: Any, keys: Sequence[str], fields: Any) -> list[str]:
        found = self._find(self.saved(shard), TensorGroup(*tuples_of(group)), keys)
        region = tuples_of(fields)
        return [self._shards[shard].digest_of_part(of_key[0], region) for of_key in found]

    def saved(self, shard: int) -> _Groups:
        saved = self._shards[shard]

        def equal_on(number: int) -> str:
            # What is equal on one rank only is compared with what others have of it.
            told = saved.equal_on(number)
            return f"rank {shard}" if self._is_doubted and told != PRIVATE else told

        if shard not in self._saved:
            rows = [
                (box.key, saved.entries[n].dtype, box.shape, box.runs, equal_on(n))
                for n, box in saved.tensors.items()
            ]
            self._saved[shard] = self._grouped(rows, list(saved.tensors))
        return self._saved[shard]

    def _grouped(self, rows: Sequence[Any], numbers: Sequence[int]) -> _Groups:
        groups, tables = group_tensors(rows)
        self.tables |= tables
        return {
            group: [[numbers[row] for row in of_key] for of_key in of_keys]
            for group, of_keys in groups.items()
        }

    def _find(
        self, groups: _Groups, group: TensorGroup, keys: Sequence[str] | None
    ) -> list[list[int]]:
        if keys is None:
            return groups[group]
        of_key = dict(zip(self.tables[group.name].keys, groups[group], strict=True))
        return [of_key[key] for key in keys]


def move_tensors(
    name: str, rank: int, copies: ShardCopies, transfers: Sequence[Transfer], timeout_s: float
) -> None:
    """Fill the tensors with what this rank reads, and exchange parts with ranks of other nodes.

    ``name`` is the same on all ranks, and of no other transfer. Shards that turn out bad are noted
    in ``copies``.
    """
    local = (one for one in transfers if one.reader == one.receiver)
    copies.read((one, to.place_of(one.rectangle)) for one in local for to in one.targets)
    # Both ranks of a pair have what is sent between them in the order of the plan.
    sent: dict[int, list[Transfer]] = {}
    received: dict[int, list[Transfer]] = {}
    for one in transfers:
        if one.receiver != rank:
            sent.setdefault(one.receiver, []).append(one)
        elif one.reader != rank:
            received.setdefault(one.reader, []).append(one)

    def read(parts: list[tuple[Transfer, memoryview]]) -> None:
        copies.read((one, one.values_in(memory)) for one, memory in parts)

    def take(one: Transfer, memory: memoryview) -> None:
        values = one.values_in(memory)
        with torch.no_grad():
            for to in one.targets:
                copy_values(to.place_of(one.rectangle), values)

    if peers := sent.keys() | received.keys():
        outgoing, incoming = (dict(sorted(side.items())) for side in (sent, received))
        with closing(connect(name, peers, rank, timeout_s, in_pairs=True)) as transport:
            exchange_parts(transport, outgoing, incoming, read, take, timeout_s)


class ShardCopies:
    """Copies of the shards of one checkpoint that this rank reads, in one round.

    ``shards`` are those that are open.
    """

    def __init__(
        self,
        context: Context,
        recovery: Recovery,
        rules: Mapping[str, PrivateRule],
        images: OpenImages,
        *,
        only_boxes: bool = False,
    ) -> None:
        self._only_boxes = only_boxes
        self._context = context
        self._recovery = recovery
        self._rules = rules
        self._images = images
        self.values = ValueImages(self._identity(0), context.allowed)
        self.shards: dict[int, SavedShard] = {}

    def describe(self, shards: Iterable[int], free: Freedom) -> None:
        """Open the shards that this rank describes, and note the copies that are bad."""

        def read(saved: SavedShard) -> None:
            if not self._only_boxes:
                saved.read_values(self._rules, free)
            # They read private tensors.
            _ = saved.digests, saved.ruled_digests

        for shard in shards:
            self.open_one(shard, read)

    def open(self, takes: Iterable[Take], free: Freedom) -> None:
        """Open the shards of this node that a plan takes from, too; as :meth:`describe`."""
        equal_on: dict[int, set[str]] = {}
        for take in takes:
            equal_on.setdefault(take.shard, set()).add(take.saved.equal_on)

        def read(saved: SavedShard) -> None:
            # Of a tensor that no table of boxes has, only who reads the values knows.
            if PRIVATE in equal_on[saved.identity.rank]:
                saved.read_values(self._rules, free)

        for shard in equal_on.keys() - self.shards.keys():
            self.open_one(shard, read)

    def noting(self, shard: int) -> AbstractContextManager[None]:
        """Context in which a shard is read: that its copy is bad is noted, and raised."""
        return self._images.noting(self._identity(shard))

    def read(self, parts: Iterable[tuple[Transfer, torch.Tensor]]) -> None:
        """Read what is taken of shards into tensors."""
        of_shards: dict[int, list[tuple[int, Rectangle, torch.Tensor]]] = {}
        for one, out in parts:
            of_shards.setdefault(one.shard, []).append((one.number, one.rectangle, out))
        for shard, of_shard in of_shards.items():
            with self.noting(shard):
                self.shards[shard].read_parts(of_shard)

    @property
    def bad(self) -> list[list[Any]]:
        """Shards whose copies were found bad, each with the reason."""
        for error in self._images.bad.values():
            forget_frames(error)
        return [[shard.rank, described(error)] for shard, error in self._images.bad.items()]

    def is_bad(self, shard: int) -> bool:
        return self._identity(shard) in self._images.bad

    def take_out(self, bad: Sequence[Sequence[Any]]) -> bool:
        """Leave bad copies, each of a rank and an item of its report, out of the next round.

        Returns whether there are any.
        """
        for reader, shard, why in bad:
            self._recovery.take_out(Piece(shard), reader, why)
        return bool(bad)

    def _identity(self, shard: int) -> ShardIdentity:
        return self._recovery.checkpoint.shard(shard, self._context.session_id)

    def open_one(self, shard: int, read: Callable[[SavedShard], None]) -> None:
        """Open a shard, and have something read of it; note a copy that is bad."""
        identity = self._identity(shard)
        try:
            source = self._images.source(identity)
            like = next(iter(self.shards.values()), None)
            saved = SavedShard(source, self._context.allowed, identity, like)
            read(saved)
        except CorruptShardError as error:
            # With good digests another copy says the same.
            self._find_bad(identity, error)
            forget_frames(error)
        except StorageError as error:
            self._images.bad[identity] = error
            forget_frames(error)
        except CheckpointingException:
            raise
        except Exception as error:
            raise incurable(error) from error
        else:
            self.shards[shard] = saved

    def _find_bad(self, identity: ShardIdentity, error: CorruptShardError) -> None:
        try:
            self._images.find_bad(error, identity)
        except RestoreError as of_no_copy:
            raise incurable(of_no_copy) from error

    # Values that are no part of a global tensor.

    def sections(self, shard: int) -> dict[str, dict[str, str]]:
        """Digests of values that no rule is for, by the first key of their places, and by key."""
        saved = self.shards[shard]
        sections: dict[str, dict[str, str]] = {}
        for unit in saved.others:
            sections.setdefault(_section_of(unit), {})[unit.key] = saved.digests[unit.key]
        return sections

    def packs(self, asked: Mapping[str, Sequence[Any]], unequal: Sequence[str]) -> list[Packed]:
        rank, world_size = self._context.ranks.rank, self._context.ranks.world_size
        told: list[tuple[str, int, list[Unit]]] = []
        for shard, names in asked["sections"]:
            units = [unit for unit in self.shards[shard].others if _section_of(unit) in names]
            told.append(("all", shard, SavedShard.values(units)))
        for shard, keys in asked["equal"]:
            units = [unit for unit in self.shards[shard].ruled if unit.key in set(keys)]
            told.append(("all", shard, SavedShard.values(units)))
        for shard in self.shards:
            told.append(("rule", shard, self.unequal_of(shard, unequal, "function")))
            if shard != rank and shard < world_size:
                told.append(("keep", shard, self.unequal_of(shard, unequal, "keep")))
        return [
            Packed(kind, shard, self.values.pack(units) if units else "")
            for kind, shard, units in told
            if units or kind == "all"
        ]

    def unequal_of(self, shard: int, unequal: Sequence[str], kind: str) -> list[Unit]:
        """Values of a shard that not all shards have alike, and that a kind of rule is for."""
        if shard not in self.shards:
            return []
        saved, rules, those = self.shards[shard], self._rules, set(unequal)
        return [
            Unit(unit.place, with_tensors(unit.value, saved.tensor_of))
            for unit in saved.ruled
            if unit.key in those and kind_of(rules[prefix_in(unit.key, rules) or ""]) == kind
        ]


def _section_of(unit: Unit) -> str:
    return str(unit.place[0]) if unit.place else ""
