"""Root's part in a load on another number of ranks: it compares what was saved, and plans.

Two reports of each rank are judged. The first describes tensors and values by names and digests;
the second tells, from few ranks, what the names stand for, and the values that others are to get.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from localckpt.availability.private_values import (
    RuledValues,
    judge_rules,
    judge_tables,
    judge_values,
    tellers_of,
)
from localckpt.availability.readers import reader_of
from localckpt.availability.reshard import (
    Keys,
    ReshardPlan,
    TensorGroup,
    plan_reshard,
    require_equal,
)
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import Mismatches, with_class
from localckpt.ids import Checkpoint
from localckpt.options import PrivateRule
from localckpt.ranks.ranks import PerRank
from localckpt.ranks.values import Message
from localckpt.replication.retrieval import new_name
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.names import Names, merged_names
from localckpt.state_dict.targets import TargetRules, compare_names
from localckpt.state_dict.values import key_of

__all__ = [
    "ElasticJudge",
    "Packed",
    "ask_for_structures",
    "joined_packs",
    "judge_structures",
    "kind_of",
    "ruled_values",
    "split_packs",
]


class Packed(NamedTuple):
    """Values that travel beside a report or a verdict.

    Attributes:
        kind: ``"all"`` for values of every rank, ``"keep"`` for those of one rank, ``"rule"`` for
            those that a function of the caller's gets, or has made.
        shard: The rank that saved them; -1 where several did.
        data: Image of a list of places and values.
    """

    kind: str
    shard: int
    data: bytes


def joined_packs(packs: Sequence[Packed]) -> tuple[list[list[Any]], bytes]:
    """Return what says which values there are, and their bytes, for a :class:`Message`."""
    about = [[kind, shard, len(data)] for kind, shard, data in packs]
    return about, b"".join(pack.data for pack in packs)


def split_packs(about: Sequence[Sequence[Any]], data: bytes) -> list[Packed]:
    """Undo :func:`joined_packs`."""
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

    Args:
        reports: Structures that ranks were asked for.
        private: Rules for values of single ranks, by key prefix.
        rules: Ways in which the states may differ.

    Returns:
        What all ranks are told: ``missing``, parts that were saved and are not given;
        ``outlines`` of all ranks, as text; ``dtypes`` of tensors by key, where these may be
        converted; the keys of tensors that were ``expanded``; and what does not fit, as ``lines``
        and by ``names``.
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


class ElasticJudge:
    """Judge of one load; only the root's is asked.

    Args:
        checkpoint: The checkpoint.
        rules: Rules for values of single ranks, by key prefix.
        nodes: Node of each rank.
        readers: For each shard the rank that reads it.
        held: For each shard that nodes hold, these nodes.
        fits: Ways in which tensors to load into may differ from those that were saved.
        pack, unpack: Make an image of values, and values of an image.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: Mapping[str, PrivateRule],
        nodes: Sequence[str],
        readers: Mapping[int, int],
        held: Mapping[int, Collection[str]],
        fits: TargetRules,
        pack: Callable[[Any], bytes],
        unpack: Callable[[bytes], Any],
    ) -> None:
        self._checkpoint = checkpoint
        self._rules = rules
        self._nodes = nodes
        self._readers = readers
        self._held = held
        self._fits = fits
        self._pack = pack
        self._unpack = unpack
        self._saved: dict[int, list[TensorGroup]] = {}
        self._wanted: dict[int, list[TensorGroup]] = {}
        self._sections: dict[int, dict[str, str]] = {}
        self._ruled = RuledValues({}, ())
        self._places = frozenset[str]()
        # What is planned, until digests that are asked for are judged.
        self._plan = ReshardPlan()
        self._tables: dict[str, Keys] = {}
        self._packs: list[Packed] = []
        self._addresses: list[str] = []

    def leave_out(self, names: Collection[str]) -> None:
        """Say nothing of tensors below some names, which are found to be on one side only."""
        lets_go = self._fits.lets_go
        self._fits = replace(
            self._fits, lets_go=lambda name: lets_go(name) or prefix_in(name, names) is not None
        )

    def compare(self, reports: Sequence[Any]) -> PerRank:
        """Judge what all ranks describe; ask some of them for more.

        Raises:
            MismatchError: The ranks do not load alike.
        """
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

        Raises:
            MismatchError: The state does not fit what was saved, or values differ that no rule is
                for.
        """
        tables: dict[str, Keys] = {}
        digests: dict[int, dict[str, str]] = {}
        packs: list[Packed] = []
        addresses: list[str] = []
        for message in reports:
            record = message.record
            addresses.append(record["address"])
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
        self._tables, self._packs, self._addresses = tables, packs, addresses
        with found.noted():
            self._plan = plan_reshard(
                dict(sorted(self._saved.items())),
                self._wanted,
                tables,
                self._readers,
                self._nodes,
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
        """Judge the digests that :meth:`plan` has asked for, and give the plan.

        Raises:
            MismatchError: Tensors of one key differ.
        """
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
        tables, packs = self._tables, self._packs
        takes: dict[int, list[Any]] = {}
        gives: dict[int, list[Any]] = {}
        for take in self._plan.takes:
            itemsize = getattr(torch, tables[take.wanted.name].dtype).itemsize
            reader = reader_of(take, itemsize, self._readers, self._nodes, self._held)
            mine = takes.setdefault(take.receiver, [])
            gives.setdefault(reader, []).append(
                [take.shard, take.receiver, len(mine), take.saved, take.keys, take.region]
            )
            mine.append([reader, take.wanted, take.keys, take.region])
        own = self._own_values(packs)
        parts: dict[int, Message] = {}
        for rank in takes.keys() | gives.keys() | own.keys():
            about, data = joined_packs(own.get(rank, ()))
            record = {
                "takes": takes.get(rank, []),
                "gives": gives.get(rank, []),
                "packs": about,
                "links": self._links_of(rank, gives.get(rank, [])),
            }
            parts[rank] = Message(record, data)
        values = [base64.b64encode(pack.data).decode() for pack in packs if pack.kind == "all"]
        return PerRank({"name": new_name(), "values": values}, parts)

    def _links_of(self, rank: int, gives: Sequence[Any]) -> list[tuple[int, str]]:
        """Addresses of the ranks that a rank gives to and that are on its node."""
        receivers = sorted({give[1] for give in gives} - {rank})
        nodes, addresses = self._nodes, self._addresses
        return [(r, addresses[r]) for r in receivers if nodes[r] == nodes[rank]]

    def _own_values(self, packs: Sequence[Packed]) -> dict[int, list[Packed]]:
        """Values that single ranks get."""
        own: dict[int, list[Packed]] = {}
        for pack in packs:
            if pack.kind == "keep":
                own.setdefault(pack.shard, []).append(pack)
        saved_by, loaded_by = self._checkpoint.world_size, len(self._nodes)
        made = ruled_values(
            *(self._rules, packs, saved_by, loaded_by), pack=self._pack, unpack=self._unpack
        )
        for rank, pack in made.items():
            own.setdefault(rank, []).append(pack)
        return own

    def _rule_of(self, key: str) -> PrivateRule:
        return self._rules[prefix_in(key, self._rules) or ""]


def ruled_values(
    rules: Mapping[str, PrivateRule],
    packs: Sequence[Packed],
    saved_by: int,
    loaded_by: int,
    *,
    pack: Callable[[Any], bytes],
    unpack: Callable[[bytes], Any],
) -> dict[int, Packed]:
    """Call the functions that the caller has for values that differ.

    Args:
        rules: Rules for values of single ranks, by key prefix.
        packs: Values of the ranks that saved, those of kind ``"rule"`` among them.
        saved_by, loaded_by: Number of the ranks then and now.
        pack, unpack: As for :class:`ElasticJudge`.

    Returns:
        What each rank gets, if there is any such value.

    Raises:
        MismatchError: A function raised, or has returned what cannot be sent.
    """
    saved: dict[tuple[Any, ...], dict[int, Any]] = {}
    for packed in packs:
        if packed.kind == "rule":
            for place, value in unpack(packed.data):
                saved.setdefault(tuple(place), {})[packed.shard] = value

    def made(place: tuple[Any, ...], rank: int) -> Any:
        key = key_of(place)
        rule = rules[prefix_in(key, rules) or ""]
        assert callable(rule), "only such rules are told values"
        try:
            return rule([saved[place].get(s) for s in range(saved_by)], rank, loaded_by)
        except Exception as error:
            raise MismatchError(
                f"the function for {key!r} in private= raised {with_class(error)}. Nothing was "
                f"changed"
            ) from error

    result = {}
    for rank in range(loaded_by) if saved else ():
        values = [[list(place), made(place, rank)] for place in saved]
        result[rank] = Packed("rule", -1, _packed_ruled(values, rank, pack))
    return result


def _packed_ruled(made: Sequence[Sequence[Any]], rank: int, pack: Callable[[Any], bytes]) -> bytes:
    try:
        return pack(made)
    except CheckpointingException:
        for place, value in made:
            try:
                pack([[place, value]])
            except CheckpointingException as error:
                raise MismatchError(
                    f"what the function for {key_of(tuple(place))!r} in private= returned for "
                    f"rank {rank} cannot be sent to it: {error}. Nothing was changed"
                ) from error
        raise


def _ask(asked: dict[int, dict[str, list[Any]]], rank: int) -> dict[str, list[Any]]:
    return asked.setdefault(rank, {"tables": [], "sections": [], "equal": []})
