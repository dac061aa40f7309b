"""Values of single ranks on shared storage, on their way to another number of ranks.

What becomes of each is decided as on the nodes. Every rank reads what it gets by itself; only what
functions of the caller make comes from the root.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from localckpt.availability.private_values import judge_rules, judge_tables, judge_values
from localckpt.checkpointer.selection import PartsToLoad
from localckpt.checkpointer.shared_saved import SavedState
from localckpt.checkpointer.state import of_one_rank
from localckpt.errors import MismatchError
from localckpt.managers.elastic_judge import (
    Packed,
    ValueImages,
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
from localckpt.state_dict.values import Unit, digest_of, left_as_given, placed, units_of

__all__ = ["PrivateValues"]

logger = logging.getLogger(__name__)


class PrivateValues:
    """Values of single ranks in a checkpoint that another number of ranks loads.

    ``keys`` names the parts that are compared.
    """

    def __init__(
        self,
        saved: SavedState,
        load: PartsToLoad,
        keys: Collection[str],
        ranks: Ranks,
        images: ValueImages,
    ) -> None:
        self._saved = saved
        self._parts, self._rules = load.parts, load.private
        self._keys = keys
        self._ranks = ranks
        self._images = images
        # The saved ranks whose values this rank compares, and hands to functions.
        self._share = range(ranks.rank, saved.world_size, ranks.world_size)

    def described(self) -> list[Any]:
        """Describe the rules, and what some of the ranks have saved, for :meth:`judge`."""
        rules = [[key, kind_of(rule)] for key, rule in sorted(self._rules.items())]
        shards = []
        for shard in self._share:
            both = self._units_of(self._saved.private_of(shard, self._keys))
            digests = [{unit.key: digest_of(unit.value, str) for unit in units} for units in both]
            shards.append([shard, *digests])
        return [rules, sorted(places_in(self._parts)), shards]

    def judge(self, about: str, told_by: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Judge what all ranks have described.

        Returns by its key the number of a rank that has saved a value which every rank gets; and
        the keys of the values that rules are for.
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

        Of modules of all ranks these are the buffers. Parts that stay as they are have none.
        """
        wanted: dict[int, set[str]] = {}
        functions = set[str]()
        rank, saved_by = self._ranks.rank, self._saved.world_size
        for key, shard in verdict["equal"].items():
            wanted.setdefault(shard, set()).add(key)
        for key in verdict["unequal"]:
            rule = self._rule_of(key)
            if rule == "keep" or rule is of_one_rank:
                wanted.setdefault(rank if rule == "keep" else rank % saved_by, set()).add(key)
            elif rule != "drop":
                functions.add(key)
        units: list[Unit] = []
        above: dict[str, Any] = {}
        for shard, keys in wanted.items():
            if shard < saved_by:
                read = self._saved.private_of(shard, self._parts)
                above = read | above
                units += self._units(read, keys)
        if functions:
            units += self._made(functions)
        left = {*verdict["unequal"]} - {unit.key for unit in units}
        if left:
            logger.warning(
                "saved by %d ranks and loaded by %d: %s stay as they are on rank %d",
                *(saved_by, self._ranks.world_size, ", ".join(sorted(left)), rank),
            )
        stays, makes = (
            {part for key in keys if (part := prefix_in(key, self._parts)) is not None}
            for keys in (left, functions)
        )
        given = {part: own(part) for part in stays | makes}
        kept, whole = left_as_given({part: given[part] for part in stays}, stays, left)
        above = given | above
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

    def _units_of(self, values: Mapping[str, Any]) -> tuple[list[Unit], list[Unit]]:
        # No tensor of a single rank is a part of a global one.
        return units_of(values, lambda _: False, self._rules)

    def _units(self, values: Mapping[str, Any], keys: Collection[str]) -> list[Unit]:
        return [unit for units in self._units_of(values) for unit in units if unit.key in keys]

    def _made(self, keys: Collection[str]) -> list[Unit]:
        """Return what the caller's functions make for this rank."""
        images = self._images

        def share() -> Message:
            packs = []
            for shard in self._share:
                units = self._units(self._saved.private_of(shard, self._keys), keys)
                packs.append(Packed("rule", shard, images.pack_units(units)))
            return Message(*joined_packs(packs))

        def judge(messages: Sequence[Message]) -> Any:
            packs = [p for told in messages for p in split_packs(told.record, told.data)]
            saved_by, loaded_by = self._saved.world_size, self._ranks.world_size
            made = ruled_values(self._rules, packs, saved_by, loaded_by, images)
            return PerRank(None, {rank: Message(None, image) for rank, image in made.items()})

        _, own = self._ranks.decide(
            "call the functions in private=", share, judge, read=shaped((object, Message | None))
        )
        return images.units(own.data) if own else []

    def _rule_of(self, key: str) -> PrivateRule:
        return self._rules[prefix_in(key, self._rules) or ""]
