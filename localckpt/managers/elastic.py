"""One round of a load of what another number of ranks saved, or sharded otherwise.

Readers open shards, all ranks describe what was saved and what they want, the root
plans, and each rank reads the shards of its node, and sends the rest to other nodes. A damaged copy
is left out of the next round. What makes the load impossible is found before a tensor is changed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from localckpt.availability.reshard import Take, assign_readers
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    PeerLostError,
    StorageError,
)
from localckpt.failure_texts import Mismatches, said_by
from localckpt.managers.context import Context
from localckpt.managers.elastic_judge import (
    ElasticJudge,
    ask_for_structures,
    judge_structures,
    kind_of,
)
from localckpt.managers.elastic_tensors import DescribedTensors, ShardCopies, move_tensors
from localckpt.managers.recovery import Recovery
from localckpt.managers.restoring import Loaded, LoadOptions, Survey
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.ranks.ranks import shaped, to_all
from localckpt.ranks.values import Message
from localckpt.state_dict.basic import own_states, places_in, stateful_keys, wrapped
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.names import Names, digest_of_names, names_of
from localckpt.state_dict.reader import OpenImages
from localckpt.state_dict.replicated import without_markers
from localckpt.state_dict.resharded import (
    beside,
    find_wanted,
    merged,
    overlapping_keys,
    take_values,
    with_outlines,
    with_values,
)
from localckpt.state_dict.stateful import ParametersOfStates
from localckpt.state_dict.targets import mismatch
from localckpt.state_dict.values import digest_of, left_as_given

logger = logging.getLogger(__name__)

# Connecting, and the transfer itself.
_DEADLINES = 2
_Verdict = tuple[Mapping[str, Any], Mapping[str, Any] | None]
"""What the judge tells all ranks, and what it tells this one."""


class ElasticLoad:
    """One round of a load; its methods are the steps, in their order."""

    def __init__(
        self, context: Context, recovery: Recovery, options: LoadOptions, images: OpenImages
    ) -> None:
        self._context = context
        self._ranks = context.ranks
        self._checkpoint = recovery.checkpoint
        self._options = options
        self._rules = context.options.rules if options.private is None else options.private
        inventory = recovery.inventory
        self._readers = assign_readers(self._checkpoint, inventory, recovery.computed_by)
        self._copies = ShardCopies(
            *(context, recovery, self._rules, images), only_boxes=options.only_chunks
        )
        self._values = self._copies.values
        self._judge = ElasticJudge(
            *(self._checkpoint, self._rules, context.nodes, self._readers),
            *(inventory.holders(self._checkpoint), options.rules),
            self._values,
        )

    def run(self) -> Loaded | None:
        """Fill the state of every rank; ``None`` on all if a copy of some shard was bad."""
        if (survey := self._options.survey) is not None:
            return self._describe_images(survey)
        step = self._checkpoint.iteration
        with self._context.events.timed("fetch", step):
            if (structure := self._compare_structures()) is None:
                return None
            verdict, own = self._compare_all(structure)
            if verdict.get("name") is None:
                verdict, own = self._settle(own)
            if self._copies.take_out(verdict.get("bad", ())):
                return None
            if not self._take_plan(verdict, own):
                return None
        with self._context.events.timed("read", step):
            return self._move()

    def _describe_images(self, survey: Survey) -> Loaded | None:
        """Look at each image on the rank that reads it; in place of a state is the verdict."""
        with Attempt() as looking:
            for shard in (s for s, reader in self._readers.items() if reader == self._ranks.rank):
                self._copies.open_one(shard, survey.look)
            looking.of(Message(self._copies.bad, survey.report()))

        def judge(reports: Sequence[Message]) -> list[Any]:
            bad = [[reader, *copy] for reader, one in enumerate(reports) for copy in one.record]
            return [bad, None if bad else survey.judge([report.data for report in reports])]

        bad, verdict = self._ranks.decide(
            *(f"describe iteration {self._checkpoint.iteration}", looking, judge),
            read=shaped(([(int, int, str)], object)),
        )
        return None if self._copies.take_out(bad) else Loaded(self._checkpoint, verdict, 0, "")

    # Compare structures.

    def _compare_structures(self) -> Mapping[str, Any] | None:
        """Open the shards that this rank reads, and compare the names of parts and values.

        Returns what :func:`judge_structures` says; ``None`` on all ranks if a copy turned out bad.
        """
        of_digests: dict[str, int] = {}
        given: Names | None = None
        free = self._options.rules.free
        with Attempt() as opening:
            self._require_into()
            self._own = own_states(self._options.given)
            given = None if self._options.only_chunks else names_of(self._own, free)
            mine = [shard for shard, reader in self._readers.items() if reader == self._ranks.rank]
            self._copies.describe(mine, free)
            shards = self._copies.shards
            for shard, saved in shards.items():
                digest = f"{digest_of_names(saved.names)} {digest_of(saved.outlines, str)}"
                of_digests.setdefault(digest, shard)
        report = {"bad": self._copies.bad, "saved": of_digests, "given": digest_of_names(given)}
        what = f"compare the names in iteration {self._checkpoint.iteration}"
        found_bad, asked = self._ranks.decide(
            *(what, opening.of(report), ask_for_structures),
            read=shaped(([(int, int, str)], dict | None)),
        )
        if self._copies.take_out(found_bad):
            return None
        message = Message()
        with Attempt() as telling:
            if asked is None:
                asked = {"saved": [], "given": False}
            told = [self._copies.shards[of_digests[digest]] for digest in asked["saved"]]
            tensors = [
                (box.key, saved.entries[number])
                for saved in told
                for number, box in saved.tensors.items()
            ]
            converts = self._options.rules.converts
            record = {
                "saved": [saved.names for saved in told],
                "given": given if asked["given"] else None,
                "dtypes": {key: entry.dtype for key, entry in tensors} if converts else {},
                "expanded": [key for key, entry in tensors if entry.is_expanded],
            }
            outlines = [self._values.pack(saved.outlines) for saved in told]
            message = Message(record, json.dumps(outlines).encode())
        rules = self._options.rules
        texts = "missing", "outlines", "expanded", "lines", "names"
        structure: Mapping[str, Any] = self._ranks.decide(
            *(what, telling.of(message)),
            lambda told: judge_structures(told, self._rules, rules),
            read=shaped({name: [str] for name in texts} | {"dtypes": dict}),
        )
        if missing := structure["missing"]:
            for saved in self._copies.shards.values():
                saved.leave_out(missing)
            if rules.is_partial:
                level = logging.WARNING if self._ranks.is_root else logging.DEBUG
                logger.log(level, "left out, as partial=True allows: %s", ", ".join(missing))
        return structure

    # Describe.

    def _describe(self, structure: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Describe the shards that this rank reads, and what it wants; return what it is asked."""
        report: dict[str, Any] = {}
        with Attempt() as opening:
            state, free = self._own, self._options.rules.free
            if outlines := merged(map(self._values.unpack, structure["outlines"])):
                parameters = ParametersOfStates(self._options.given)
                state = with_outlines(state, outlines, free, parameters)
            self._state = wrapped(state)
            shards = self._copies.shards
            # Replicas that differ are a reason for the mark.
            is_doubted = self._checkpoint in self._context.checkpoints.marked("bad")
            own = find_wanted(self._state) if self._options.fills else []
            wanted, self._beside = beside(own, structure["dtypes"], structure["expanded"])
            self._tensors = DescribedTensors(wanted, shards, is_doubted=is_doubted)
            report = {
                "rules": [[key, kind_of(rule)] for key, rule in sorted(self._rules.items())],
                "places": sorted(places_in(self._options.given)),
                "shared": overlapping_keys(self._tensors.tensors),
                "wanted": list(self._tensors.wanted),
                "saved": [
                    [
                        *(shard, list(self._tensors.saved(shard))),
                        {
                            name: digest_of_names(of)
                            for name, of in self._copies.sections(shard).items()
                        },
                        saved.ruled_digests,
                    ]
                    for shard, saved in shards.items()
                ],
            }
        what = f"compare iteration {self._checkpoint.iteration} with the states to load into"
        asked_of_all: Mapping[str, Any]
        asked: Mapping[str, Any] | None
        asked_of_all, asked = self._ranks.decide(
            *(what, opening.of(report), self._judge.compare),
            read=shaped(({"unequal": [str], "shared": list}, dict | None)),
        )
        self._unequal, self._shared = asked_of_all["unequal"], asked_of_all["shared"]
        return asked

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

    # Tell, and plan.

    def _compare_all(self, structure: Mapping[str, Any]) -> _Verdict:
        """Compare values and tensors as well, and plan, if all fits."""
        found, lines = Mismatches(), structure["lines"]
        if lines:
            found.note(mismatch(lines))
            self._judge.leave_out(structure["names"])
        verdict: _Verdict = {}, None
        try:
            with found.noted():
                verdict = self._tell(self._describe(structure))
        except (PeerLostError, StorageError):
            raise
        except CheckpointingException as error:
            # Most likely because of the structure.
            if not lines:
                raise
            forget_frames(error)
        found.raise_all()
        return verdict

    def _tell(self, asked: Mapping[str, Any] | None) -> _Verdict:
        """Tell the root what it asks for; it plans."""
        message = Message()
        with Attempt() as telling:
            for shard in self._copies.shards.values():
                shard.require_together(self._shared)
            if asked is None:
                asked = {"tables": [], "sections": [], "equal": []}
            sections = {shard: self._copies.sections(shard) for shard, _ in asked["sections"]}
            digests = [
                [shard, sections[shard][name]]
                for shard, names in asked["sections"]
                for name in names
            ]
            packs = self._copies.packs(asked, self._unequal)
            tables = [self._tensors.tables[name] for name in asked["tables"]]
            record = {"tables": tables, "digests": digests}
            message = Message(record, json.dumps(packs).encode())
        what = f"plan the load of iteration {self._checkpoint.iteration}"
        verdict: _Verdict = self._ranks.decide(
            what, telling.of(message), self._judge.plan, read=shaped((dict, dict | None))
        )
        return verdict

    def _settle(self, own: Mapping[str, Any] | None) -> _Verdict:
        """Tell the root the digests of parts that shards do not say are equal; it plans."""
        digests = []
        with Attempt() as reading:
            for shard, number, group, keys, part in () if own is None else own["digests"]:
                if self._copies.is_bad(shard):
                    continue
                try:
                    with self._copies.noting(shard):
                        of_keys = self._tensors.digests(shard, group, keys, part)
                except (StorageError, CorruptShardError) as error:
                    # It is noted, and told to all ranks.
                    forget_frames(error)
                else:
                    digests.append([shard, number, of_keys])
        what = f"compare tensors of one key in iteration {self._checkpoint.iteration}"
        record = {"bad": self._copies.bad, "digests": digests}
        verdict: _Verdict = self._ranks.decide(
            what, reading.of(record), self._judge.settle, read=shaped((dict, dict | None))
        )
        return verdict

    def _take_plan(self, verdict: Mapping[str, Any], own: Mapping[str, Any] | None) -> bool:
        """Take in the plan, and the values; on no rank is anything changed if some rank cannot.

        Returns False on all ranks if a copy turned out bad.
        """
        rank = self._ranks.rank
        with Attempt() as checking:
            if own is None:
                raise MismatchError(
                    f"there is no plan for rank {rank} in the job's store. Does another program "
                    f"write to that store? Nothing was changed"
                )
            takes = [Take.from_json(fields) for fields in own["takes"]]
            read = [take for take in takes if take.reader == rank]
            self._copies.open(read, self._options.rules.free)
            self._name = str(verdict["name"])
            self._transfers = [
                transfer
                for take in takes
                if take.reader != rank or not self._copies.is_bad(take.shard)
                for transfer in self._tensors.transfers_of(take, rank)
            ]
            texts = [*verdict["values"], *own["values"]]
            units = [unit for text in texts for unit in self._values.unpack(text)]
            units += self._copies.unequal_of(rank, self._unequal, "keep")
            # Of values that differ, what stays as it is: those for which a rule gives nothing.
            loaded, free = {unit.key for unit in units}, self._options.rules.free
            keys = {key for key in self._unequal if key not in loaded and free.covers(key)}
            parts = {str(key) for key in stateful_keys(self._options.given)}
            kept, self._left = left_as_given(without_markers(self._own), parts, keys)
            self._result = with_values(self._state, [*kept, *units])
        reports = self._ranks.decide(
            *("check that the states can be loaded into", checking.of(self._copies.bad or None)),
            **to_all([(int, str)]),
        )
        return not self._take_out(reports)

    def _say_what_is_dropped(self) -> None:
        dropped = [
            key for key in self._unequal if self._rules[prefix_in(key, self._rules) or ""] == "drop"
        ]
        if dropped:
            logger.log(
                logging.WARNING if self._ranks.is_root else logging.DEBUG,
                "iteration %d was saved by %d ranks, which differ in %s: dropped, so each rank "
                "keeps what it had",
                *(self._checkpoint.iteration, self._checkpoint.world_size),
                ", ".join(map(repr, dropped)),
            )

    def _take_out(self, reports: Mapping[int, Sequence[Any]]) -> bool:
        return self._copies.take_out(
            [[rank, *copy] for rank, those in reports.items() for copy in those]
        )

    # Move.

    def _move(self) -> Loaded | None:
        """Fill the tensors; ``None`` on all ranks if a copy turned out bad on the way."""
        began = time.monotonic()
        timeout_s, rank = self._ranks.timeout_s, self._ranks.rank
        lost: PeerLostError | None = None
        with Attempt() as moving:
            try:
                move_tensors(self._name, rank, self._copies, self._transfers, timeout_s)
            except (StorageError, CorruptShardError) as error:
                # Noted where it was read.
                forget_frames(error)
                if not self._copies.bad:
                    raise
            except PeerLostError as error:
                # Most often a peer that found its copy bad; else this is what all ranks raise.
                lost = error
                forget_frames(error)
        report = [self._copies.bad, None if lost is None else str(lost)]
        reports = self._ranks.decide(
            f"load iteration {self._checkpoint.iteration}",
            moving.of(report if any(report) else None),
            **to_all(([(int, str)], str | None)),
            grace_s=timeout_s,
            deadline=Deadline.after((1 + _DEADLINES) * timeout_s),
        )
        if self._take_out({rank: bad for rank, (bad, _) in reports.items()}):
            return None
        if texts := {rank: text for rank, (_, text) in reports.items() if text is not None}:
            raise PeerLostError(
                f"could not load iteration {self._checkpoint.iteration}: {said_by(texts)}"
            ) from lost
        taken = [one for one in self._transfers if one.receiver == rank]
        nbytes = sum(one.nbytes for one in taken)
        logger.info(
            "iteration %d of %d ranks: %d bytes filled in %.3f s, %d of them from this node's "
            "shards; %d bytes sent to other nodes",
            *(self._checkpoint.iteration, self._checkpoint.world_size, nbytes),
            *(time.monotonic() - began, sum(one.nbytes for one in taken if one.reader == rank)),
            sum(one.nbytes for one in self._transfers if one.receiver != rank),
        )
        take_values(self._beside)
        self._say_what_is_dropped()
        source = f"the shards of {self._checkpoint.world_size} ranks"
        return Loaded(self._checkpoint, self._result, nbytes, source, self._left)
