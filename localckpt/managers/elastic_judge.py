"""Root's part in a load on another number of ranks: it compares what was saved, and plans.

Two reports of each rank are judged. The first describes tensors and values by names and digests;
the second tells, from few ranks, what the names stand for, and the values that others are to get.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from localckpt.availability.private_values import (
    RuledValues,
    judge_rules,
    judge_tables,
    judge_values,
    tellers_of,
)
from localckpt.availability.reshard import (
    Keys,
    ReshardPlan,
    TensorGroup,
    plan_reshard,
    require_equal,
)
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import Mismatches, with_class
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.options import PrivateRule
from localckpt.ranks.ranks import PerRank
from localckpt.ranks.values import Message
from localckpt.replication.retrieval import new_name
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.names import Names, merged_names
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.targets import TargetRules, compare_names
from localckpt.state_dict.values import Unit, key_of


class Packed(NamedTuple):
    """Image of values beside a report or a verdict, and the rank that saved them; -1 for several.

    ``kind`` is ``"all"`` for values of every rank, ``"keep"`` for those of one rank, ``"rule"`` for
    those that a function of the caller's gets, or has made.
    """

    kind: str
    shard: int
    data: bytes


def joined_packs(packs: Sequence[Packed]) -> tuple[list[list[Any]], bytes]:
    """Return what says which values there are, and their bytes, for a :class:`Message`."""
    about = [[kind, shard, len(data)] for kind, shard, data in packs]
    return about, b"".join(pack.data for pack in packs)


def split_packs(about: Sequence[Sequence[Any]], data: bytes) -> list[Packed]:
    packs, at = [], 0
    for kind, shard, nbytes in about:
        packs.append(Packed(kind, shard, data[at : at + nbytes]))
        at += nbytes
    return packs


def ask_for_structures(reports: Sequence[Any]) -> PerRank:
    """Ask for each different structure, saved and given, one of the ranks that have it."""
    bad = [[rank, *copy] for rank, report in enumerate(reports) for copy in report["bad"]]
    asked: dict[int, dict[str, Any]] = {}
    known: set[str] = set()

    def of_rank(rank: int) -> dict[str, Any]:
        return asked.setdefault(rank, {"saved": [], "given": False})

    for rank, report in enumerate(reports):
        for digest in report["saved"].keys() - known:
            of_rank(rank)["saved"].append(digest)
        if f"given {report['given']}" not in known:
            of_rank(rank)["given"] = True
        known |= {*report["saved"], f"given {report['given']}"}
    return PerRank(bad, {} if bad else asked)


def judge_structures(
    reports: Sequence[Message], private: Mapping[str, PrivateRule], rules: TargetRules
) -> dict[str, Any]:
    """Compare the names of all parts and values.

    All ranks are told the ``missing`` parts, which were saved and are not given, the ``outlines``
    as text, the ``dtypes`` of tensors that may be converted, the keys of ``expanded`` tensors, and
    what does not fit, as ``lines`` and by ``names``.
    """
    saved: Names | None = None
    given: Names | None = None
    images: list[str] = []
    dtypes: dict[str, str] = {}
    expanded: dict[str, None] = {}
    for report in reports:
        record = report.record
        dtypes |= record["dtypes"]
        expanded |= dict.fromkeys(record["expanded"])
        for names in record["saved"]:
            saved = merged_names(saved, names)
        given = merged_names(given, record["given"])
        packs = split_packs(record["packs"], report.data)
        images += [base64.b64encode(pack.data).decode() for pack in packs]
    rules.require_named(saved or ())
    differ = compare_names(
        *(saved, given),
        rules=rules,
        is_dropped=lambda name: private.get(prefix_in(name, private) or "") == "drop",
    )
    return {
        "missing": differ.missing,
        "lines": differ.lines,
        "names": sorted(differ.names),
        "outlines": images,
        "dtypes": dtypes,
        "expanded": list(expanded),
    }


def kind_of(rule: PrivateRule) -> str:
    """Return the name of a rule, the same on all ranks."""
    return rule if isinstance(rule, str) else "function"


class ValueImages:
    """Images of values, as they travel."""

    def __init__(self, identity: ShardIdentity, allowed: SafeGlobals) -> None:
        self._identity = identity
        self._allowed = allowed

    def pack(self, value: Any) -> bytes:
        return bytes(pack(value, self._identity, ImagePlanner(self._allowed)).view)

    def unpack(self, image: bytes) -> Any:
        return unpack(MemorySource(memoryview(bytearray(image))), allowed=self._allowed)

    def pack_units(self, units: Iterable[Unit]) -> bytes:
        return self.pack([[list(unit.place), unit.value] for unit in units])

    def units(self, image: bytes) -> list[Unit]:
        return [Unit(tuple(place), value) for place, value in self.unpack(image)]


class ElasticJudge:
    """Judge of one load; only the root's is asked."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: Mapping[str, PrivateRule],
        nodes: Sequence[str],
        readers: Mapping[int, int],
        held: Mapping[int, Collection[str]],
        fits: TargetRules,
        images: ValueImages,
    ) -> None:
        self._checkpoint = checkpoint
        self._rules = rules
        self._nodes = nodes
        self._readers = readers
        self._held = held
        self._fits = fits
        self._images = images
        self._saved: dict[int, list[TensorGroup]] = {}
        self._wanted: dict[int, list[TensorGroup]] = {}
        self._sections: dict[int, dict[str, str]] = {}
        self._ruled = RuledValues({}, ())
        self._places = frozenset[str]()
        # What is planned, until digests that are asked for are judged.
        self._plan = ReshardPlan()
        self._packs: list[Packed] = []

    def leave_out(self, names: Collection[str]) -> None:
        """Say nothing of tensors below some names, which are found to be on one side only."""
        lets_go = self._fits.lets_go
        self._fits = replace(
            self._fits, lets_go=lambda name: lets_go(name) or prefix_in(name, names) is not None
        )

    def compare(self, reports: Sequence[Any]) -> PerRank:
        """Judge what all ranks describe; ask some of them for more."""
        judge_rules([report["rules"] for report in reports])
        ruled: dict[int, dict[str, str]] = {}
        names: dict[str, int] = {}
        if self._checkpoint.world_size != len(reports):
            self._places = frozenset(place for report in reports for place in report["places"])
        shared = sorted({tuple(pair) for report in reports for pair in report["shared"]})
        for rank, report in enumerate(reports):
            self._wanted[rank] = [TensorGroup.from_json(group) for group in report["wanted"]]
            for name, *_ in self._wanted[rank]:
                names.setdefault(name, rank)
            for shard, groups, sections, of_rules in report["saved"]:
                self._saved[shard] = [TensorGroup.from_json(group) for group in groups]
                self._sections[shard], ruled[shard] = sections, of_rules
                for name, *_ in self._saved[shard]:
                    names.setdefault(name, rank)
        self._ruled = judge_values(
            dict(sorted(ruled.items())), lambda key: self._rule_of(key) == "keep", self._places
        )
        asked: dict[int, dict[str, list[Any]]] = {}
        for name, rank in names.items():
            _ask(asked, rank)["tables"].append(name)
        for shard, told in tellers_of(dict(sorted(self._sections.items()))).items():
            _ask(asked, self._readers[shard])["sections"].append([shard, told])
        equal: dict[int, list[str]] = {}
        for key, shard in self._ruled.equal.items():
            equal.setdefault(shard, []).append(key)
        for shard, keys in equal.items():
            _ask(asked, self._readers[shard])["equal"].append([shard, keys])
        of_all = {"unequal": list(self._ruled.unequal), "shared": shared}
        return PerRank(of_all, asked)

    def plan(self, reports: Sequence[Any]) -> PerRank:
        """Plan with what all ranks told; each rank gets what concerns it.

        Where shards have elements that are not said to be equal, ranks are asked for their digests,
        which :meth:`settle` judges.
        """
        tables: dict[str, Keys] = {}
        digests: dict[int, dict[str, str]] = {}
        packs: list[Packed] = []
        for message in reports:
            record = message.record
            for fields in record["tables"]:
                keys = Keys.from_json(fields)
                tables[keys.name] = keys
            for shard, of_shard in record["digests"]:
                digests.setdefault(shard, {}).update(of_shard)
            packs += split_packs(record["packs"], message.data)
        saved_by = f"was saved by {self._checkpoint.world_size} ranks"
        about = f"iteration {self._checkpoint.iteration} {saved_by}"
        found = Mismatches()
        with found.noted():
            judge_tables(about, digests, self._sections, self._places)
        self._packs = packs
        with found.noted():
            self._plan = plan_reshard(
                dict(sorted(self._saved.items())),
                self._wanted,
                tables,
                self._readers,
                self._nodes,
                held=self._held,
                excluded=self._ruled.unequal,
                dropped=[key for key in self._ruled.equal if self._rule_of(key) == "drop"],
                fits=self._fits,
            )
        found.raise_all()
        if not self._plan.unsettled:
            return self._planned()
        asked: dict[int, list[Any]] = {}
        for number, (those, region, holders) in enumerate(self._plan.unsettled):
            for shard, group in holders:
                wanted = asked.setdefault(self._readers[shard], [])
                wanted.append([shard, number, group, those, region])
        return PerRank(
            {"name": None}, {rank: Message({"digests": of}) for rank, of in asked.items()}
        )

    def settle(self, reports: Sequence[Message]) -> PerRank:
        """Judge the digests that :meth:`plan` has asked for, and give the plan."""
        bad = [[rank, *c] for rank, report in enumerate(reports) for c in report.record["bad"]]
        if bad:
            return PerRank({"bad": bad}, {})
        digests: dict[int, dict[str, list[str]]] = {}
        for report in reports:
            for shard, number, of_keys in report.record["digests"]:
                digests.setdefault(shard, {})[str(number)] = of_keys
        require_equal(self._plan.unsettled, digests)
        return self._planned()

    def _planned(self) -> PerRank:
        packs = self._packs
        takes: dict[int, list[Any]] = {}
        gives: dict[int, list[Any]] = {}
        for take in self._plan.takes:
            mine = takes.setdefault(take.receiver, [])
            gives.setdefault(take.reader, []).append(
                [take.shard, take.receiver, len(mine), take.saved, take.keys, take.region]
            )
            mine.append([take.reader, take.wanted, take.keys, take.region])
        own = self._own_values(packs)
        parts: dict[int, Message] = {}
        for rank in takes.keys() | gives.keys() | own.keys():
            about, data = joined_packs(own.get(rank, ()))
            record = {
                "takes": takes.get(rank, []),
                "gives": gives.get(rank, []),
                "packs": about,
            }
            parts[rank] = Message(record, data)
        values = [base64.b64encode(pack.data).decode() for pack in packs if pack.kind == "all"]
        return PerRank({"name": new_name(), "values": values}, parts)

    def _own_values(self, packs: Sequence[Packed]) -> dict[int, list[Packed]]:
        own: dict[int, list[Packed]] = {}
        for packed in packs:
            if packed.kind == "keep":
                own.setdefault(packed.shard, []).append(packed)
        saved_by, loaded_by = self._checkpoint.world_size, len(self._nodes)
        made = ruled_values(self._rules, packs, saved_by, loaded_by, self._images)
        for rank, image in made.items():
            own.setdefault(rank, []).append(Packed("rule", -1, image))
        return own

    def _rule_of(self, key: str) -> PrivateRule:
        return self._rules[prefix_in(key, self._rules) or ""]


def ruled_values(
    rules: Mapping[str, PrivateRule],
    packs: Sequence[Packed],
    saved_by: int,
    loaded_by: int,
    images: ValueImages,
) -> dict[int, bytes]:
    """Call the functions that the caller has for values that differ.

    Returns for each rank the image of what they have made for it.
    """
    saved: dict[tuple[Any, ...], dict[int, Any]] = {}
    for packed in packs:
        if packed.kind == "rule":
            for place, value in images.units(packed.data):
                saved.setdefault(place, {})[packed.shard] = value

    def made(place: tuple[Any, ...], rank: int) -> Unit:
        key = key_of(place)
        rule = rules[prefix_in(key, rules) or ""]
        assert callable(rule), "only such rules are told values"
        try:
            values = [saved[place].get(shard) for shard in range(saved_by)]
            return Unit(place, rule(values, rank, loaded_by))
        except Exception as error:
            raise MismatchError(
                f"the function for {key!r} in private= raised {with_class(error)}. Nothing was "
                f"changed"
            ) from error

    def packed_for(rank: int) -> bytes:
        units = [made(place, rank) for place in saved]
        try:
            return images.pack_units(units)
        except CheckpointingException:
            for unit in units:
                try:
                    images.pack_units([unit])
                except CheckpointingException as error:
                    raise MismatchError(
                        f"what the function for {unit.key!r} in private= returned for rank {rank} "
                        f"cannot be sent to it: {error}. Nothing was changed"
                    ) from error
            raise

    return {rank: packed_for(rank) for rank in range(loaded_by)} if saved else {}


def _ask(asked: dict[int, dict[str, list[Any]]], rank: int) -> dict[str, list[Any]]:
    return asked.setdefault(rank, {"tables": [], "sections": [], "equal": []})
