"""Root's part in a load on another number of ranks: it compares what was saved, and plans.

Two reports of each rank are judged. The first describes tensors and values by names and digests;
the second tells, from few ranks, what the names stand for, and the values that others are to get.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    tuples_of,
)
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import Mismatches, with_class
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.options import PrivateRule
from localckpt.ranks.ranks import PerRank
from localckpt.ranks.values import Message
from localckpt.replication.retrieval import new_name
from localckpt.state_dict.containers import joined, merged_values, prefix_in
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.names import Names
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.targets import TargetRules, compare_names
from localckpt.state_dict.values import Unit


class Packed(NamedTuple):
    """Text of values in a report or a verdict, and the rank that saved them.

    ``kind`` is ``"all"`` for values of every rank, ``"keep"`` for those of one rank, ``"rule"`` for
    those that a function of the caller's gets. The text is empty if all of them are tensors.
    """

    kind: str
    shard: int
    text: str


def ask_for_structures(reports: Sequence[Any]) -> PerRank:
    """Ask for each different structure, saved and given, one of the ranks that have it."""
    bad = [[rank, *copy] for rank, report in enumerate(reports) for copy in report["bad"]]
    asked: defaultdict[int, dict[str, Any]] = defaultdict(lambda: {"saved": [], "given": False})
    known: set[str] = set()
    for rank, report in enumerate(reports):
        for digest in report["saved"].keys() - known:
            asked[rank]["saved"].append(digest)
        if f"given {report['given']}" not in known:
            asked[rank]["given"] = True
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
    outlines: list[str] = []
    dtypes: dict[str, str] = {}
    expanded: dict[str, None] = {}
    for record, data in ((report.record, report.data) for report in reports):
        dtypes |= record["dtypes"]
        expanded |= dict.fromkeys(record["expanded"])
        for names in record["saved"]:
            saved = merged_values(saved, names)
        given = merged_values(given, record["given"])
        outlines += json.loads(data)
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
        "outlines": outlines,
        "dtypes": dtypes,
        "expanded": list(expanded),
    }


def kind_of(rule: PrivateRule) -> str:
    return rule if isinstance(rule, str) else "function"


class ValueImages:
    """Texts of values, by which ranks tell them each other: images in base 64."""

    def __init__(self, identity: ShardIdentity, allowed: SafeGlobals) -> None:
        self._identity = identity
        self._allowed = allowed

    def pack(self, units: Iterable[Unit]) -> str:
        values = [[list(unit.place), unit.value] for unit in units]
        image = pack(values, self._identity, ImagePlanner(self._allowed))
        return base64.b64encode(image.view).decode()

    def unpack(self, text: str) -> list[Unit]:
        image = memoryview(bytearray(base64.b64decode(text)))
        values = unpack(MemorySource(image), allowed=self._allowed)
        return [Unit(tuple(place), value) for place, value in values]


@dataclass
class ElasticJudge:
    """Judge of one load; only the root's is asked."""

    _checkpoint: Checkpoint
    _rules: Mapping[str, PrivateRule]
    _nodes: Sequence[str]
    _readers: Mapping[int, int]
    _held: Mapping[int, Collection[str]]
    _fits: TargetRules
    _images: ValueImages
    _saved: dict[int, list[TensorGroup]] = field(default_factory=dict, init=False)
    _wanted: dict[int, list[TensorGroup]] = field(default_factory=dict, init=False)
    _sections: dict[int, dict[str, str]] = field(default_factory=dict, init=False)
    _ruled: RuledValues = field(default_factory=lambda: RuledValues({}, ()), init=False)
    _places: frozenset[str] = field(default=frozenset(), init=False)
    # What is planned, until digests that are asked for are judged.
    _plan: ReshardPlan = field(default_factory=ReshardPlan, init=False)
    _packs: list[Packed] = field(default_factory=list, init=False)
    # Kinds of values, and the shards that they are asked of.
    _asked: Counter[tuple[str, int]] = field(default_factory=Counter, init=False)

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
            self._wanted[rank] = [TensorGroup(*tuples_of(group)) for group in report["wanted"]]
            for name, *_ in self._wanted[rank]:
                names.setdefault(name, rank)
            for shard, groups, sections, of_rules in report["saved"]:
                self._saved[shard] = [TensorGroup(*tuples_of(group)) for group in groups]
                self._sections[shard], ruled[shard] = sections, of_rules
                for name, *_ in self._saved[shard]:
                    names.setdefault(name, rank)
        self._ruled = judge_values(
            dict(sorted(ruled.items())), lambda key: self._rule_of(key) == "keep", self._places
        )
        asked: defaultdict[int, dict[str, list[Any]]] = defaultdict(
            lambda: {"tables": [], "sections": [], "equal": []}
        )
        for name, rank in names.items():
            asked[rank]["tables"].append(name)
        for shard, told in tellers_of(dict(sorted(self._sections.items()))).items():
            asked[self._readers[shard]]["sections"].append([shard, told])
        equal: defaultdict[int, list[str]] = defaultdict(list)
        for key, shard in self._ruled.equal.items():
            equal[shard].append(key)
        for shard, keys in equal.items():
            asked[self._readers[shard]]["equal"].append([shard, keys])
        of_all = {"unequal": list(self._ruled.unequal), "shared": shared}
        self._asked = Counter(
            ("all", shard)
            for of_rank in asked.values()
            for shard, _ in (*of_rank["sections"], *of_rank["equal"])
        )
        kind_by_key = {key: kind_of(self._rule_of(key)) for key in self._ruled.unequal}
        for shard, of_shard in ruled.items():
            kinds = {kind_by_key[key] for key in of_shard.keys() & kind_by_key.keys()}
            if "function" in kinds:
                self._asked["rule", shard] = 1
            if "keep" in kinds and shard < len(reports) and shard != self._readers[shard]:
                self._asked["keep", shard] = 1
        return PerRank(of_all, asked)

    def plan(self, reports: Sequence[Message]) -> PerRank:
        """Plan with what all ranks told; each rank gets what concerns it.

        Where shards have elements that are not said to be equal, ranks are asked for their digests,
        which :meth:`settle` judges.
        """
        tables: dict[str, Keys] = {}
        digests: dict[int, dict[str, str]] = {}
        packs: list[Packed] = []
        for report in reports:
            for fields in report.record["tables"]:
                keys = Keys(*tuples_of(fields))
                tables[keys.name] = keys
            for shard, of_shard in report.record["digests"]:
                digests.setdefault(shard, {}).update(of_shard)
            packs += [Packed(*fields) for fields in json.loads(report.data)]
        saved_by = f"was saved by {self._checkpoint.world_size} ranks"
        about = f"iteration {self._checkpoint.iteration} {saved_by}"
        found = Mismatches()
        with found.noted():
            judge_tables(about, digests, self._sections, self._places)
        if Counter((packed.kind, packed.shard) for packed in packs) != self._asked:
            raise MismatchError(
                f"the ranks have not told all values of iteration {self._checkpoint.iteration} "
                f"that rank 0 has asked for. Does another program write to the job's store? "
                f"Nothing was changed"
            )
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
        asked: defaultdict[int, list[Any]] = defaultdict(list)
        for number, (those, region, holders) in enumerate(self._plan.unsettled):
            for shard, group in holders:
                asked[self._readers[shard]].append([shard, number, group, those, region])
        return PerRank({"name": None}, {rank: {"digests": of} for rank, of in asked.items()})

    def settle(self, reports: Sequence[Any]) -> PerRank:
        """Judge the digests that :meth:`plan` has asked for, and give the plan."""
        bad = [[rank, *c] for rank, report in enumerate(reports) for c in report["bad"]]
        if bad:
            return PerRank({"bad": bad}, {})
        digests: dict[int, dict[str, list[str]]] = {}
        for report in reports:
            for shard, number, of_keys in report["digests"]:
                digests.setdefault(shard, {})[str(number)] = of_keys
        require_equal(self._plan.unsettled, digests)
        return self._planned()

    def _planned(self) -> PerRank:
        saved_by, loaded_by = self._checkpoint.world_size, len(self._nodes)
        # A rank that is told of nothing has an error.
        parts: dict[int, dict[str, list[Any]]] = {
            rank: {"takes": [], "values": []} for rank in range(loaded_by)
        }
        for take in self._plan.takes:
            for rank in {take.reader, take.receiver}:
                parts[rank]["takes"].append(take)
        for packed in self._packs:
            if packed.kind == "keep":
                parts[packed.shard]["values"].append(packed.text)
        made = ruled_values(self._rules, self._packs, saved_by, loaded_by, self._images)
        for rank, text in made:
            parts[rank]["values"].append(text)
        values = [packed.text for packed in self._packs if packed.kind == "all" and packed.text]
        return PerRank({"name": new_name(), "values": values}, parts)

    def _rule_of(self, key: str) -> PrivateRule:
        return self._rules[prefix_in(key, self._rules) or ""]


def ruled_values(
    rules: Mapping[str, PrivateRule],
    packs: Sequence[Packed],
    saved_by: int,
    loaded_by: int,
    images: ValueImages,
) -> Iterator[tuple[int, str]]:
    """Call the functions that the caller has for values that differ.

    Yields ranks, and what the functions have made for them.
    """
    saved: dict[tuple[Any, ...], dict[int, Any]] = {}
    for packed in packs:
        if packed.kind == "rule":
            for place, value in images.unpack(packed.text):
                saved.setdefault(place, {})[packed.shard] = value
    for place, of_shards in saved.items():
        key = joined(place)
        rule = rules[prefix_in(key, rules) or ""]
        assert callable(rule), "only such rules are told values"
        for rank in range(loaded_by):
            try:
                values = [of_shards.get(shard) for shard in range(saved_by)]
                made = rule(values, rank, loaded_by)
            except Exception as error:
                raise MismatchError(
                    f"the function for {key!r} in private= raised {with_class(error)}. Nothing "
                    f"was changed"
                ) from error
            try:
                yield rank, images.pack([Unit(place, made)])
            except CheckpointingException as error:
                raise MismatchError(
                    f"what the function for {key!r} in private= returned for rank {rank} cannot "
                    f"be sent to it: {error}. Nothing was changed"
                ) from error
