"""Tensors of a load with another sharding: described in groups, and found again in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localckpt.availability.reshard import Keys, TensorGroup, group_tensors
from localckpt.state_dict.part_stream import PRIVATE, SavedTensor
from localckpt.state_dict.regions import Region, volume
from localckpt.state_dict.resharded import WantedTensor
from localckpt.state_dict.saved_shard import SavedShard

__all__ = ["DescribedTensors", "Give", "Take"]


@dataclass(frozen=True, slots=True)
class Take:
    """Elements that this rank takes from a shard, which ``reader`` reads."""

    reader: int
    numbers: list[list[int]]
    """Its tensors, by the number of the key; several where they are the same part."""
    region: Region
    nbytes: int


@dataclass(frozen=True, slots=True)
class Give:
    """Elements that this rank gives; ``item`` is their number among all that the receiver takes."""

    shard: int
    receiver: int
    item: int
    numbers: list[int]
    region: Region
    nbytes: int


class DescribedTensors:
    """Tensors that this rank wants, and those of the shards that it reads.

    Args:
        wanted: Tensors that are to be filled.
        shards: Shards that this rank reads; :meth:`add_opened` adds those that are opened later.
        is_doubted: Whether what shards say is equal may differ.
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
        self._wanted = self._grouped(rows)
        self._saved: dict[int, dict[TensorGroup, list[list[int]]]] = {}
        self.add_opened()

    def add_opened(self) -> None:
        """Describe the shards that were opened since."""
        for shard, saved in self._shards.items():
            if shard not in self._saved:
                self._saved[shard] = self._groups_of(shard, saved)

    @property
    def wanted(self) -> list[TensorGroup]:
        """Groups of the tensors that are to be filled."""
        return list(self._wanted)

    def saved(self, shard: int) -> list[TensorGroup]:
        """Groups of the tensors of a shard."""
        return list(self._saved[shard])

    def tables(self, names: Sequence[str]) -> list[Keys]:
        """Keys of the groups of some names."""
        return [self._tables[name] for name in names]

    def take_of(self, reader: int, group: Any, keys: Sequence[str] | None, fields: Any) -> Take:
        """Return what an item of the plan has this rank take."""
        wanted, region = TensorGroup.from_json(group), _region_of(fields)
        numbers = self._of_keys(wanted, self._wanted[wanted], keys)
        itemsize = self.tensors[numbers[0][0]].tensor.itemsize
        return Take(reader, numbers, region, volume(region) * itemsize * len(numbers))

    def give_of(
        self,
        shard: int,
        receiver: int,
        item: int,
        group: Any,
        keys: Sequence[str] | None,
        fields: Any,
    ) -> Give:
        """Return what an item of the plan has this rank give."""
        saved, region = TensorGroup.from_json(group), _region_of(fields)
        numbers = [of[0] for of in self._of_keys(saved, self._saved[shard][saved], keys)]
        itemsize = self._shards[shard].tensors[numbers[0]].itemsize
        nbytes = volume(region) * itemsize * len(numbers)
        return Give(shard, receiver, item, numbers, region, nbytes)

    def digests(self, shard: int, group: Any, keys: Sequence[str], fields: Any) -> list[str]:
        """Return the digests of elements that a shard has of tensors."""
        saved = TensorGroup.from_json(group)
        numbers = self._of_keys(saved, self._saved[shard][saved], keys)
        region = _region_of(fields)
        return [self._shards[shard].digest_of_part(of[0], region) for of in numbers]

    def _groups_of(self, shard: int, saved: SavedShard) -> dict[TensorGroup, list[list[int]]]:
        numbers, tensors = list(saved.tensors), saved.tensors.values()

        def equal_on(tensor: SavedTensor) -> str:
            # What is equal on one rank only is compared with what others have of it.
            is_alone = self._is_doubted and tensor.equal_on != PRIVATE
            return f"rank {shard}" if is_alone else tensor.equal_on

        groups = self._grouped(
            [(t.key, t.entry.dtype, t.shape, t.region, equal_on(t)) for t in tensors]
        )
        return {
            group: [[numbers[row] for row in rows] for rows in of_keys]
            for group, of_keys in groups.items()
        }

    def _grouped(self, rows: Sequence[Any]) -> dict[TensorGroup, list[list[int]]]:
        groups, tables = group_tensors(rows)
        self._tables |= tables
        return groups

    def _of_keys(
        self, group: TensorGroup, numbers: list[list[int]], keys: Sequence[str] | None
    ) -> list[list[int]]:
        if keys is None:
            return numbers
        of_key = dict(zip(self._tables[group.name].keys, numbers, strict=True))
        return [of_key[key] for key in keys]


def _region_of(fields: Any) -> Region:
    return TensorGroup.from_json(["", fields, ""]).region
