"""One load of a checkpoint that another number of ranks saved, or that is sharded otherwise now.

Each shard has one reader, a rank on a node that holds it. Works in rounds: readers open their
shards, all ranks describe what was saved and what they want, the root plans, and the parts go from
the readers straight into the tensors of the ranks that want them. A copy that is damaged is left
out of the next round. Whatever makes the load impossible is found before a tensor is changed.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from localckpt.availability.inventory import Inventory
from localckpt.availability.readers import assign_readers
from localckpt.availability.refusals import BadCopy
from localckpt.availability.reshard import Keys, TensorGroup, group_tensors
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import described, said_by
from localckpt.ids import Checkpoint, Piece, ShardIdentity
from localckpt.managers.elastic_judge import (
    ElasticJudge,
    Packed,
    joined_packs,
    kind_of,
    split_packs,
)
from localckpt.managers.parts import Parts
from localckpt.managers.progress import CountedSource, ReadProgress
from localckpt.managers.recovery import Recovery
from localckpt.managers.restoring import Loaded, LoadOptions, incurable, verify_again
from localckpt.options import PrivateRule
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.ranks.values import Message
from localckpt.replication.connections import HostConnections
from localckpt.replication.parts import Accept, Put, exchange_parts
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.direct_runs import RunTarget
from localckpt.state_dict.identify import verify
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.optimizer_states import make_states
from localckpt.state_dict.regions import Cut, Region, volume
from localckpt.state_dict.resharded import Filling, find_wanted, with_values
from localckpt.state_dict.saved_shard import SavedShard
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.state_dict.value_digests import digest_of
from localckpt.state_dict.values import Unit, rule_for

__all__ = ["ElasticLoad"]

logger = logging.getLogger(__name__)

# Connecting, and the transfer itself.
_DEADLINES = 2


@dataclass(frozen=True, slots=True)
class _Take:
    """Elements that this rank takes from a shard."""

    shard: int
    numbers: list[list[int]]
    """Its tensors, by the number of the key; several where they are the same part."""
    items: int
    """Number of elements of each tensor."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Give:
    """Elements that this rank gives; ``item`` is their number among all that the receiver takes."""

    shard: int
    receiver: int
    item: int
    numbers: list[int]
    region: Region
    nbytes: int


class ElasticLoad:
    """One load of one checkpoint; its methods are the steps, in their order.

    Args:
        parts: Of the manager.
        inventory: What each node holds; copies that turn out bad are taken out.
        checkpoint: The checkpoint.
        recovery: Computes shards that no node holds.
        options: How the caller wants its state.
        bad: Gets the copies that turn out bad; the same on all ranks.
    """

    def __init__(
        self,
        parts: Parts,
        inventory: Inventory,
        checkpoint: Checkpoint,
        recovery: Recovery,
        options: LoadOptions,
        bad: list[BadCopy],
    ) -> None:
        self._parts = parts
        self._ranks = parts.ranks
        self._inventory = inventory
        self._checkpoint = checkpoint
        self._recovery = recovery
        self._options = options
        self._bad = bad
        self._rules: Mapping[str, PrivateRule] = parts.options.rules
        # Optimizer states that were made to be filled, and how they are taken away again.
        self._made: dict[str, Callable[[], None]] = {}

    def run(self) -> Loaded | None:
        """Fill the state of every rank.

        Returns:
            The state; ``None`` on all ranks if some shard has no good copy left.

        Raises:
            MismatchError: The state does not fit what was saved; nothing was changed.
            PeerLostError: A rank did not answer in time.
            CheckpointingException: Something went wrong on some rank; the same on all.
        """
        try:
            while True:
                self._recovery.drop()
                try:
                    computed_by = self._plan_recovery()
                except NoReplicasAvailableError:
                    self._quarantine_damaged()
                    self._take_states_away()
                    return None
                with self._parts.events.timed("fetch", self._checkpoint.iteration):
                    if not self._recovery.run(computed_by):
                        continue
                readers = assign_readers(self._checkpoint, self._inventory, computed_by)
                with ExitStack() as opened:
                    if (loaded := self._load(readers, opened)) is not None:
                        self._quarantine_damaged()
                        self._recovery.give_up_damaged_pieces()
                        return loaded
        except BaseException:
            self._recovery.drop()
            self._take_states_away()
            raise

    def _plan_recovery(self) -> dict[int, int]:
        """Choose the ranks that compute shards which no node holds: they take turns.

        Raises:
            NoReplicasAvailableError: A shard cannot be computed.
        """
        world_size = self._ranks.world_size
        return {shard: shard % world_size for shard in self._recovery.plan()}

    def _take_states_away(self) -> None:
        for take_away in self._made.values():
            take_away()

    def _load(self, readers: Mapping[int, int], opened: ExitStack) -> Loaded | None:
        """Make one round; ``None`` if it has to be made again."""
        self._readers = readers
        self._shards: dict[int, SavedShard] = {}
        self._groups: dict[int, dict[TensorGroup, list[list[int]]]] = {}
        self._tables: dict[str, Keys] = {}
        self._found_bad: dict[int, tuple[str, bool]] = {}
        self._judge = ElasticJudge(
            *(self._checkpoint, self._rules, self._parts.epoch.nodes, readers),
            *(self._packed, self._unpacked),
        )
        step = self._checkpoint.iteration
        with self._parts.events.timed("fetch", step):
            asked = self._describe(opened)
            if self._take_out(asked[0]["bad"]):
                return None
            self._take_plan(*self._tell(*asked))
        with self._parts.events.timed("read", step):
            return self._move()

    # Describe.

    def _describe(self, opened: ExitStack) -> list[Any]:
        """Open the shards that this rank reads, and describe them, and what this rank wants."""
        report: dict[str, Any] = {}
        with Attempt() as opening:
            self._require_into()
            self._made |= make_states(self._options.given)
            self._state = wrapped(self._options.given)
            self._targets = find_wanted(self._state)
            rows = [(w.key, w.dtype, w.shape, w.region) for w in self._targets]
            self._wanted = self._grouped(rows)
            saved = [
                self._described(shard)
                for shard, reader in self._readers.items()
                if reader == self._ranks.rank and self._open(shard, opened)
            ]
            report = {
                "bad": [[shard, *bad] for shard, bad in self._found_bad.items()],
                "rules": [[key, kind_of(rule)] for key, rule in sorted(self._rules.items())],
                "made": list(self._made),
                "wanted": list(self._wanted),
                "saved": saved,
            }
        what = f"compare iteration {self._checkpoint.iteration} with the states to load into"
        return list(self._ranks.agree(what, opening, report, self._judge.compare))

    def _require_into(self) -> None:
        checkpoint = self._checkpoint
        if self._options.given is None:
            now = f"this job has {self._ranks.world_size}"
            if checkpoint.world_size == self._ranks.world_size:
                now = "some of this job load into tensors that are sharded otherwise"
            raise MismatchError(
                f"iteration {checkpoint.iteration} was saved by {checkpoint.world_size} ranks, and "
                f"{now}: pass the state to load() as into= on every rank, which says what part of "
                f"each tensor the rank has now. Nothing was changed"
            )

    def _open(self, shard: int, opened: ExitStack) -> bool:
        """Open a shard; whether its copy here is good, as far as it was read."""
        store, identity = self._parts.store, self._identity(shard)
        computed = self._recovery.slots.get(shard)
        source: ShardSource | None = None
        try:
            source = store.open(identity) if computed is None else MemorySource(computed.image)
            opened.callback(source.close)
            counted = CountedSource(source, ReadProgress(f"reading {identity}", source.nbytes))
            saved = SavedShard(counted, self._parts.allowed, identity, list(self._rules))
            # They read private tensors.
            _ = saved.digests, saved.ruled_digests
        except CorruptShardError as error:
            # With good digests another copy says the same.
            self._require_damaged(shard, source, error)
            self._note_bad(shard, error)
            return False
        except StorageError as error:
            self._note_bad(shard, error)
            return False
        except CheckpointingException:
            raise
        except Exception as error:
            raise incurable(error) from error
        self._shards[shard] = saved
        return True

    def _require_damaged(
        self, shard: int, source: ShardSource | None, error: CorruptShardError
    ) -> None:
        """Raise an error for a shard that contradicts itself, though its bytes are good."""
        if source is None:
            return
        try:
            verify(source, self._identity(shard))
        except (StorageError, CorruptShardError):
            return
        raise incurable(RestoreError(f"{self._identity(shard)}: {error}")) from error

    def _described(self, shard: int) -> list[Any]:
        saved = self._shards[shard]
        numbers = list(saved.tensors)
        tensors = saved.tensors.values()
        groups = self._grouped([(t.key, t.entry.dtype, t.shape, t.region) for t in tensors])
        self._groups[shard] = {
            group: [[numbers[row] for row in rows] for rows in of_keys]
            for group, of_keys in groups.items()
        }
        sections = {
            section: digest_of(digests, str) for section, digests in self._sections(shard).items()
        }
        return [shard, list(groups), sections, saved.ruled_digests]

    def _sections(self, shard: int) -> dict[str, dict[str, str]]:
        """Digests of values that no rule is for, by the first key of their places, and by key."""
        saved = self._shards[shard]
        sections: dict[str, dict[str, str]] = {}
        for unit in saved.others:
            section = str(unit.place[0]) if unit.place else ""
            sections.setdefault(section, {})[unit.key] = saved.digests[unit.key]
        return sections

    def _grouped(self, rows: Sequence[Any]) -> dict[TensorGroup, list[list[int]]]:
        groups, tables = group_tensors(rows)
        self._tables |= tables
        return groups

    # Tell, and plan.

    def _tell(
        self, common: Mapping[str, Any], asked: Mapping[str, list[Any]] | None
    ) -> tuple[Mapping[str, Any], Message | None]:
        """Tell the root what it asks for; it plans."""
        self._unequal: Sequence[str] = common["unequal"]
        message = Message()
        with Attempt() as telling:
            asked = asked or {"tables": [], "sections": [], "equal": []}
            sections = {shard: self._sections(shard) for shard, _ in asked["sections"]}
            digests = [
                [shard, sections[shard][name]]
                for shard, names in asked["sections"]
                for name in names
            ]
            about, data = joined_packs(self._packs(asked))
            tables = [self._tables[name] for name in asked["tables"]]
            message = Message({"tables": tables, "digests": digests, "packs": about}, data)
        what = f"plan the load of iteration {self._checkpoint.iteration}"
        verdict, own = self._ranks.agree(what, telling, message, self._judge.plan)
        return verdict, own

    def _packs(self, asked: Mapping[str, list[Any]]) -> list[Packed]:
        """Values of the shards that this rank reads, for others."""
        packs = []
        for shard, names in asked["sections"]:
            units = [
                unit
                for unit in self._shards[shard].others
                if (str(unit.place[0]) if unit.place else "") in names
            ]
            packs.append(self._pack_of("all", shard, SavedShard.values(units)))
        for shard, key in asked["equal"]:
            units = [unit for unit in self._shards[shard].ruled if unit.key == key]
            packs.append(self._pack_of("all", shard, SavedShard.values(units)))
        for shard, saved in self._shards.items():
            if of_function := self._unequal_of(saved, "function"):
                packs.append(self._pack_of("rule", shard, of_function))
            kept = self._unequal_of(saved, "keep")
            if kept and shard != self._ranks.rank and shard < self._ranks.world_size:
                packs.append(self._pack_of("keep", shard, kept))
        return packs

    def _pack_of(self, kind: str, shard: int, units: Sequence[Unit]) -> Packed:
        return Packed(kind, shard, self._packed([[list(u.place), u.value] for u in units]))

    def _unequal_of(self, saved: SavedShard, kind: str) -> list[Unit]:
        """Values of a shard that not all shards have alike, and that a kind of rule is for."""
        rules = list(self._rules)
        return saved.whole_values(
            unit
            for unit in saved.ruled
            if unit.key in self._unequal
            and kind_of(self._rules[rule_for(unit.key, rules) or ""]) == kind
        )

    def _take_plan(self, verdict: Mapping[str, Any], own: Message | None) -> None:
        """Take in the plan, and the values; on no rank is anything changed if some rank cannot."""
        with Attempt() as checking:
            record = {"takes": [], "gives": [], "packs": []} if own is None else own.record
            self._name = str(verdict["name"])
            self._takes = [self._take_of(*take) for take in record["takes"]]
            self._gives = [self._give_of(*give) for give in record["gives"]]
            images = [base64.b85decode(text) for text in verdict["values"]]
            images += [p.data for p in split_packs(record["packs"], own.data)] if own else []
            units = [
                Unit(tuple(place), value)
                for image in images
                for place, value in self._unpacked(image)
            ]
            if self._ranks.rank in self._shards:
                units += self._unequal_of(self._shards[self._ranks.rank], "keep")
            self._result = with_values(self._state, units)
        self._ranks.agree("check that the states can be loaded into", checking)

    def _take_of(self, shard: int, group: Any, keys: Sequence[str] | None, fields: Any) -> _Take:
        wanted, region = TensorGroup.from_json(group), TensorGroup.from_json(["", fields]).region
        numbers = self._of_keys(wanted, self._wanted[wanted], keys)
        itemsize = self._targets[numbers[0][0]].tensor.itemsize
        return _Take(shard, numbers, volume(region), volume(region) * itemsize * len(numbers))

    def _give_of(
        self,
        shard: int,
        receiver: int,
        item: int,
        group: Any,
        keys: Sequence[str] | None,
        fields: Any,
    ) -> _Give:
        saved, region = TensorGroup.from_json(group), TensorGroup.from_json(["", fields]).region
        numbers = [of[0] for of in self._of_keys(saved, self._groups[shard][saved], keys)]
        itemsize = self._shards[shard].tensors[numbers[0]].itemsize
        nbytes = volume(region) * itemsize * len(numbers)
        return _Give(shard, receiver, item, numbers, region, nbytes)

    def _of_keys(
        self, group: TensorGroup, numbers: list[list[int]], keys: Sequence[str] | None
    ) -> list[list[int]]:
        if keys is None:
            return numbers
        of_key = dict(zip(self._tables[group.name].keys, numbers, strict=True))
        return [of_key[key] for key in keys]

    # Move.

    def _move(self) -> Loaded | None:
        """Fill the tensors; ``None`` on all ranks if a copy turned out bad on the way."""
        began = time.monotonic()
        lost: PeerLostError | None = None
        with Attempt() as moving:
            try:
                self._exchange()
            except (StorageError, CorruptShardError) as error:
                # Noted where it was read.
                forget_frames(error)
                if not self._found_bad:
                    raise
            except PeerLostError as error:
                # Most often a peer that found its copy bad; else this is what all ranks raise.
                lost = error
                forget_frames(error)
        bad = [[shard, *found] for shard, found in self._found_bad.items()]
        report = [bad, None if lost is None else str(lost)]
        timeout_s = self._ranks.timeout_s
        reports = self._ranks.merge(
            f"load iteration {self._checkpoint.iteration}",
            moving,
            report if any(report) else None,
            grace_s=timeout_s,
            deadline=Deadline.after((1 + _DEADLINES) * timeout_s),
        )
        if self._take_out(
            [[rank, *copy] for rank, (those, _) in reports.items() for copy in those]
        ):
            return None
        if texts := {rank: text for rank, (_, text) in reports.items() if text is not None}:
            raise PeerLostError(
                f"could not load iteration {self._checkpoint.iteration}: {said_by(texts)}"
            ) from lost
        nbytes = sum(take.nbytes for take in self._takes)
        logger.info(
            "iteration %d of %d ranks: %d bytes filled in %.3f s, %d of them from this node's "
            "shards; %d bytes sent to %d ranks",
            *(self._checkpoint.iteration, self._checkpoint.world_size, nbytes),
            *(time.monotonic() - began, nbytes - sum(self._senders().values())),
            *(sum(self._receivers().values()), len(self._receivers())),
        )
        source = f"the shards of {self._checkpoint.world_size} ranks"
        return Loaded(self._checkpoint, self._result, nbytes, source)

    def _senders(self) -> dict[int, int]:
        """Other ranks that this one gets parts from, with their bytes."""
        nbytes: dict[int, int] = {}
        for take in self._takes:
            if (reader := self._readers[take.shard]) != self._ranks.rank:
                nbytes[reader] = nbytes.get(reader, 0) + take.nbytes
        return nbytes

    def _receivers(self) -> dict[int, int]:
        """Other ranks that this one sends parts to, with their bytes."""
        nbytes: dict[int, int] = {}
        for give in self._gives:
            if give.receiver != self._ranks.rank:
                nbytes[give.receiver] = nbytes.get(give.receiver, 0) + give.nbytes
        return nbytes

    def _exchange(self) -> None:
        rank, timeout_s = self._ranks.rank, self._ranks.timeout_s
        receivers, senders = self._receivers(), self._senders()
        expected: dict[int, int] = {}
        for take in self._takes:
            for number in (number for numbers in take.numbers for number in numbers):
                expected[number] = expected.get(number, 0) + take.items
        filling = Filling([(self._targets[number], count) for number, count in expected.items()])

        def accept(
            peer: int,
            item: int,
            index: int,
            first: Sequence[int],
            sizes: Sequence[int],
            values: torch.Tensor,
        ) -> None:
            if not item < len(self._takes) or not index < len(self._takes[item].numbers):
                raise CorruptShardError(f"rank {peer} sent what rank {rank} does not take")
            for number in self._takes[item].numbers[index]:
                filling.fill(self._targets[number], first, sizes, values)

        with ExitStack() as opened:
            connections = None
            if peers := receivers.keys() | senders.keys():
                connections = HostConnections.connect_to(self._name, peers, rank, timeout_s)
                opened.callback(connections.close)
            exchange_parts(
                *(connections, receivers, senders),
                lambda put: self._read(put, accept, filling),
                accept,
                timeout_s,
            )
        filling.require_full()

    def _read(self, put: Put, accept: Accept, filling: Filling) -> None:
        """Read the parts that this rank gives, and hand them on."""
        rank = self._ranks.rank
        wanted: dict[int, dict[int, list[tuple[Any, Region]]]] = {}
        for give in self._gives:
            of_shard = wanted.setdefault(give.shard, {})
            for index, number in enumerate(give.numbers):
                receiver = give.receiver, give.item, index
                of_shard.setdefault(number, []).append((receiver, give.region))

        def deliver(receiver: tuple[int, int, int], _: int, cut: Cut, values: torch.Tensor) -> None:
            to, item, index = receiver
            if to == rank:
                accept(rank, item, index, cut.first, cut.sizes, values)
            else:
                put(to, item, index, cut.first, values)

        def direct(receiver: tuple[int, int, int]) -> RunTarget | None:
            to, item, index = receiver
            numbers = self._takes[item].numbers[index] if to == rank else []
            return filling.target(self._targets[numbers[0]]) if len(numbers) == 1 else None

        for shard, of_shard in wanted.items():
            try:
                self._shards[shard].stream(of_shard, deliver, direct)
            except (StorageError, CorruptShardError) as error:
                self._note_bad(shard, error)
                raise

    # Bad copies.

    def _note_bad(self, shard: int, error: CheckpointingException) -> None:
        forget_frames(error)
        self._found_bad[shard] = described(error), isinstance(error, CorruptShardError)

    def _take_out(self, bad: Sequence[Sequence[Any]]) -> bool:
        """Leave bad copies out of the next round; whether there are any."""
        for reader, shard, why, is_damaged in bad:
            identity = self._identity(shard)
            if shard in self._recovery.nbytes:
                logger.error("%s was computed in vain: %s", identity, why)
                self._recovery.hopeless.add(shard)
                continue
            node = self._inventory.node_of(reader)
            mendable = is_damaged and self._recovery.may_be_mended(shard)
            self._inventory.remove(self._checkpoint, Piece(shard), node)
            self._bad.append(BadCopy(identity, reader, why))
            if mendable:
                # What is good of it may be needed yet.
                self._recovery.damaged.setdefault(shard, {})[node] = why
            elif is_damaged and reader == self._ranks.rank:
                # What the node refused once it may give the next time: only bad bytes go.
                verify_again(self._parts.store, identity, f"read: {why}")
        return bool(bad)

    def _quarantine_damaged(self) -> None:
        """Quarantine copies that nobody needs any more, if they are bad when read again."""
        for shard, nodes in self._recovery.damaged.items():
            for node, why in nodes.items():
                if self._inventory.reader([node], shard) == self._ranks.rank:
                    verify_again(self._parts.store, self._identity(shard), f"read: {why}")

    def _identity(self, shard: int) -> ShardIdentity:
        return self._checkpoint.shard(shard, self._parts.session_id)

    # Images of values.

    def _packed(self, values: Any) -> bytes:
        image = pack(values, self._identity(0), ImagePlanner(self._parts.allowed))
        return bytes(image.view)

    def _unpacked(self, image: bytes) -> Any:
        source = MemorySource(memoryview(bytearray(image)))
        return unpack(source, allowed=self._parts.allowed)
