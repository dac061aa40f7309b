"""Values in saved shards that are no part of a global tensor, on their way to other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localckpt.ids import ShardIdentity
from localckpt.managers.elastic_judge import Packed, kind_of
from localckpt.options import PrivateRule
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.saved_shard import SavedShard
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.value_digests import digest_of
from localckpt.state_dict.values import Unit

__all__ = ["SavedValues", "ValueImages"]


class ValueImages:
    """Images of values, as they travel.

    Args:
        identity: Identity that the images bear.
        allowed: Classes and functions that they may name.
    """

    def __init__(self, identity: ShardIdentity, allowed: SafeGlobals) -> None:
        self._identity = identity
        self._allowed = allowed

    def pack(self, values: Any) -> bytes:
        """Make an image of values."""
        return bytes(pack(values, self._identity, ImagePlanner(self._allowed)).view)

    def unpack(self, image: bytes) -> Any:
        """Make the values of an image again."""
        source = MemorySource(memoryview(bytearray(image)))
        return unpack(source, allowed=self._allowed)

    def units(self, image: bytes) -> Iterator[Unit]:
        """Make the values again of the image of a :class:`Packed`."""
        for place, value in self.unpack(image):
            yield Unit(tuple(place), value)


class SavedValues:
    """Values of the shards that one rank reads.

    Args:
        shards: The shards.
        rules: Rules for values of single ranks, by key prefix.
        images: Packs the values.
    """

    def __init__(
        self,
        shards: Mapping[int, SavedShard],
        rules: Mapping[str, PrivateRule],
        images: ValueImages,
    ) -> None:
        self._shards = shards
        self._rules = rules
        self._images = images

    def described(self, shard: int) -> dict[str, str]:
        """Digests of the sections of a shard."""
        return {name: digest_of(those, str) for name, those in self.sections(shard).items()}

    def sections(self, shard: int) -> dict[str, dict[str, str]]:
        """Digests of values that no rule is for, by the first key of their places, and by key."""
        saved = self._shards[shard]
        sections: dict[str, dict[str, str]] = {}
        for unit in saved.others:
            sections.setdefault(_section_of(unit), {})[unit.key] = saved.digests[unit.key]
        return sections

    def packs(
        self, asked: Mapping[str, Sequence[Any]], unequal: Sequence[str], rank: int, world_size: int
    ) -> list[Packed]:
        """Pack the values that other ranks get.

        Args:
            asked: What the judge asks of this rank.
            unequal: Keys of the values that not all shards have alike, and that a rule is for.
            rank, world_size: This rank, and the number of ranks.
        """
        packs = []
        for shard, names in asked["sections"]:
            units = [unit for unit in self._shards[shard].others if _section_of(unit) in names]
            packs.append(self._pack_of("all", shard, SavedShard.values(units)))
        for shard, keys in asked["equal"]:
            told = set(keys)
            units = [unit for unit in self._shards[shard].ruled if unit.key in told]
            packs.append(self._pack_of("all", shard, SavedShard.values(units)))
        for shard in self._shards:
            if of_function := self.unequal_of(shard, unequal, "function"):
                packs.append(self._pack_of("rule", shard, of_function))
            kept = self.unequal_of(shard, unequal, "keep")
            if kept and shard != rank and shard < world_size:
                packs.append(self._pack_of("keep", shard, kept))
        return packs

    def pack_outlines(self, shard: int) -> Packed:
        """Pack the outlines of the free parts of a shard."""
        return self._pack_of("all", shard, self._shards[shard].outlines)

    def unequal_of(self, shard: int, unequal: Sequence[str], kind: str) -> list[Unit]:
        """Values of a shard that not all shards have alike, and that a kind of rule is for."""
        if shard not in self._shards:
            return []
        saved, rules, those = self._shards[shard], self._rules, set(unequal)
        return saved.whole_values(
            unit
            for unit in saved.ruled
            if unit.key in those and kind_of(rules[prefix_in(unit.key, rules) or ""]) == kind
        )

    def _pack_of(self, kind: str, shard: int, units: Sequence[Unit]) -> Packed:
        return Packed(kind, shard, self._images.pack([[list(u.place), u.value] for u in units]))


def _section_of(unit: Unit) -> str:
    return str(unit.place[0]) if unit.place else ""
