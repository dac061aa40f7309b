"""Values of single ranks on shared storage, on their way to another number of ranks.

What becomes of each is decided as on the nodes. Every rank reads what it gets by itself; only what
functions of the caller make comes from the root.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from localckpt.availability.private_values import judge_rules, judge_tables, judge_values
from localckpt.checkpointer.shared_saved import SavedState
from localckpt.checkpointer.state import of_one_rank
from localckpt.errors import MismatchError
from localckpt.managers.elastic_judge import (
    Packed,
    joined_packs,
    kind_of,
    ruled_values,
    split_packs,
)
from localckpt.options import PrivateRule
from localckpt.ranks.ranks import PerRank, Ranks, shaped
from localckpt.ranks.values import Message
from localckpt.state_dict.basic import places_in
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.value_digests import digest_of
from localckpt.state_dict.values import Unit, left_as_given, placed, units_of

__all__ = ["PrivateValues"]

logger = logging.getLogger(__name__)


class PrivateValues:
    """Values of single ranks in a checkpoint that another number of ranks loads.

    Args:
        saved: The checkpoint.
        parts: Parts that this rank loads, by the names that they were saved under.
        keys: Names of the parts that any rank may load.
        rules: Rules for values that differ, by key prefix.
        ranks: The ranks of the job.
        pack, unpack: Make an image of values, and values of an image.
    """

    def __init__(
        self,
        saved: SavedState,
        parts: Mapping[str, Any],
        keys: Collection[str],
        rules: Mapping[str, PrivateRule],
        ranks: Ranks,
        pack: Callable[[Any], bytes],
        unpack: Callable[[bytes], Any],
    ) -> None:
        self._saved = saved
        self._parts = parts
        self._keys = keys
        self._rules = rules
        self._ranks = ranks
        self._pack, self._unpack = pack, unpack

    def described(self) -> list[Any]:
        """Describe the rules, and what some of the ranks have saved, for :meth:`judge`."""
        rules = [[key, kind_of(rule)] for key, rule in sorted(self._rules.items())]
        shards = []
        for shard in self._share:
            both = units_of(self._read(shard, self._keys), _boxed, self._rules)
            digests = [{unit.key: digest_of(unit.value, str) for unit in units} for units in both]
            shards.append([shard, *digests])
        return [rules, sorted(places_in(self._parts)), shards]

    def judge(self, about: str, told_by: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Judge what all ranks have described.

        Returns:
            By its key the number of a rank that has saved a value which every rank gets; and the
            keys of the values that rules are for.

        Raises:
            MismatchError: Values differ, or are places in the data, that no rule is for.
        """
        judge_rules([rules for rules, _, _ in told_by])
        places = {place for _, those, _ in told_by for place in those}
        shards = sorted(shard for _, _, those in told_by for shard in those)
        ruled = judge_values(
            {number: digests for number, digests, _ in shards},
            lambda key: self._rule_of(key) == "keep",
            places,
        )
        others = {number: digests for number, _, digests in shards}
        judge_tables(about, others, {}, places)
        equal = dict(ruled.equal)
        for number, digests in others.items():
            for key in digests:
                equal.setdefault(key, number)
        return {"equal": equal, "unequal": list(ruled.unequal)}

    def states(self, verdict: Mapping[str, Any], own: Callable[[str], Any]) -> dict[str, Any]:
        """Return the states of this rank's parts; all ranks call it.

        Args:
            verdict: Verdict of :meth:`judge`.
            own: Returns the state that a part has.

        Returns:
            By the name of a part its state; of modules of all ranks the buffers. Parts that stay
            as they are have none.

        Raises:
            MismatchError: A function of the caller's failed, or there is no place for a value.
        """
        wanted: dict[int, set[str]] = {}
        for key, shard in verdict["equal"].items():
            wanted.setdefault(shard, set()).add(key)
        unequal, functions = set(verdict["unequal"]), set[str]()
        rank, saved_by = self._ranks.rank, self._saved.world_size
        for key in unequal:
            rule = self._rule_of(key)
            if rule == "keep" or rule is of_one_rank:
                wanted.setdefault(rank if rule == "keep" else rank % saved_by, set()).add(key)
            elif rule != "drop":
                functions.add(key)
        units: list[Unit] = []
        above: dict[str, Any] = {}
        for shard, keys in wanted.items():
            if shard < saved_by:
                read = self._read(shard, self._parts)
                above = read | above
                units += self._units(read, keys)
        if functions:
            units += self._made(functions)
        left = unequal - {unit.key for unit in units}
        stays, makes = (
            {part for key in keys if (part := prefix_in(key, self._parts)) is not None}
            for keys in (left, functions)
        )
        given = {part: own(part) for part in stays | makes}
        kept, whole = left_as_given({part: given[part] for part in stays}, stays, left)
        above = given | above
        self._say_what_is_left(left)
        by_part: dict[str, list[Unit]] = {}
        for unit in (*kept, *units):
            if (part := str(unit.place[0])) in self._parts and part not in whole:
                by_part.setdefault(part, []).append(unit)
        try:
            return {
                part: placed({part: above.get(part)}, those)[part]
                for part, those in by_part.items()
            }
        except LookupError as error:
            raise MismatchError(
                f"the ranks that saved the checkpoint have different containers: there is no place "
                f"for {error}. Give private= a rule for it. Nothing was changed"
            ) from error

    @cached_property
    def _share(self) -> range:
        return range(self._ranks.rank, self._saved.world_size, self._ranks.world_size)

    def _read(self, shard: int, keys: Collection[str]) -> dict[str, Any]:
        return self._saved.private_of(shard, keys)

    def _units(self, values: Mapping[str, Any], keys: Collection[str]) -> list[Unit]:
        ruled, others = units_of(values, _boxed, self._rules)
        return [unit for unit in (*ruled, *others) if unit.key in keys]

    def _made(self, keys: Collection[str]) -> list[Unit]:
        """Return what the caller's functions make for this rank."""

        def share() -> Message:
            packs = []
            for shard in self._share:
                units = self._units(self._read(shard, self._keys), keys)
                image = self._pack([[list(unit.place), unit.value] for unit in units])
                packs.append(Packed("rule", shard, image))
            return Message(*joined_packs(packs))

        def judge(messages: Sequence[Message]) -> Any:
            packs = [p for told in messages for p in split_packs(told.record, told.data)]
            made = ruled_values(
                *(self._rules, packs, self._saved.world_size, self._ranks.world_size),
                pack=self._pack,
                unpack=self._unpack,
            )
            return PerRank(None, {r: Message(*joined_packs([p])) for r, p in made.items()})

        _, own = self._ranks.decide(
            "call the functions in private=", share, judge, read=shaped((object, Message | None))
        )
        images = [pack.data for pack in split_packs(own.record, own.data)] if own else []
        return [Unit(tuple(place), v) for image in images for place, v in self._unpack(image)]

    def _say_what_is_left(self, keys: Collection[str]) -> None:
        if keys:
            logger.warning(
                "saved by %d ranks and loaded by %d: %s stay as they are on rank %d",
                *(self._saved.world_size, self._ranks.world_size),
                *(", ".join(sorted(keys)), self._ranks.rank),
            )

    def _rule_of(self, key: str) -> PrivateRule:
        return self._rules[prefix_in(key, self._rules) or ""]


def _boxed(_: int) -> bool:
    """Return whether a tensor is a part of a global one: none of those of single ranks is."""
    return False
