"""Computes shards that no node holds any more from what is left of their groups, at a load.

All that is read is verified first, block by block; what is computed is checked against the
envelopes that other members keep, and lies then where a shard to be kept lies: it is written behind
training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
    StorageError,
)
from localckpt.failure_texts import described
from localckpt.ids import ShardIdentity
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.parity.chains import Chain
from localckpt.replication.parity.encode_group import ranks_behind
from localckpt.replication.parity.image import ImageEnvelope, ParityPart, read_envelopes
from localckpt.replication.parity.members import ParityOf
from localckpt.replication.parity.pipeline import Pipeline
from localckpt.replication.parity.planning import Want, plan_rebuild
from localckpt.replication.parity.rebuild import rebuild
from localckpt.replication.parity.repairs import (
    NOTHING_FOUND,
    Repair,
    Seen,
    longest_wait,
    piece_of,
    plan_repairs,
    require_group,
    take_together,
)
from localckpt.replication.parity.stripes import Kind
from localckpt.replication.redundancy import Lost, PieceProblem, Recovered
from localckpt.replication.retrieval import new_name
from localckpt.replication.watched import WatchedSource
from localckpt.state_dict.identify import find_bad_blocks
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.storage.store import Store

__all__ = ["Rebuilding"]

logger = logging.getLogger(__name__)


class Rebuilding:
    """One attempt to compute what is lost; all ranks of the job make it and call it together.

    Args:
        lost: What is lost.
        store: This rank's pieces.
        ranks: The ranks of the job.
        timeout_s: Deadline of each step, in seconds.
    """

    def __init__(self, lost: Lost, store: Store, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._store = store
        self._checkpoint = lost.checkpoint
        self._session_id = lost.session_id
        self._timeout_s = timeout_s
        self._is_kept = lost.is_kept
        # A rank that is in several groups takes one after the other. Most are in one: nobody is to
        # wait for all groups of the job when a rank is lost.
        repairs = plan_repairs(lost)
        self._patience_s = max(ranks.timeout_s, 3 * timeout_s * longest_wait(repairs))
        self._rank = ranks.rank
        self._groups = [_Group(repair) for repair in repairs]
        self._recovered = Recovered()

    def run(self) -> Recovered:
        """Carry the repairs out; see :meth:`Scheme.recover`."""
        try:
            self._recovered.is_done = self._run()
        finally:
            if not self._recovered.is_done:
                self._release()
        return self._recovered

    def _run(self) -> bool:
        with ExitStack() as opened:
            name = self._look(opened)
            for group in self._groups:
                self._recovered.problems += group.findings.problems
            wanted = {rank for group in self._groups for rank in group.repair.wanted}
            if any(
                problem.is_gone or (problem.piece.is_shard and problem.piece.rank not in wanted)
                for problem in self._recovered.problems
            ):
                return False
            return self._carry_out(name, opened)

    def _release(self) -> None:
        """Give back the slots of shards that were to be computed here."""
        mine = {
            self._identity(Kind.IMAGE, rank)
            for group in self._groups
            for rank in group.computed_by(self._rank)
        }
        # From the store, since an interrupt may have come before a slot was noted.
        self._store.release([slot for slot in self._store.slots if slot.identity in mine])
        self._recovered.slots.clear()

    def _deadline(self) -> Deadline:
        """Return the deadline of a step that begins now."""
        return Deadline.after(self._patience_s)

    def _identity(self, kind: Kind, owner: int) -> ShardIdentity:
        return self._checkpoint.shard(owner, self._session_id).of_kind(piece_of(kind, owner).kind)

    def _look(self, opened: ExitStack) -> str:
        """Verify all that is to be read, and tell each other; returns a name for connections."""
        mine: list[list[Any]] = []
        with Attempt() as looking:
            mine += [
                [number, self._look_at(group, kind, owner, opened).to_json()]
                for number, group in enumerate(self._groups)
                for kind, owner in group.repair.reads(self._rank)
            ]
        phase = f"see what is left of iteration {self._checkpoint.iteration}"
        name, findings = self._ranks.agree(
            *(phase, looking, mine, _judge_seen), read=shaped((str, [(int, [(int, object)])]))
        )
        seen: list[list[tuple[int, Seen]]] = [[] for _ in self._groups]
        for rank, found in findings:
            for number, fields in found:
                seen[number].append((rank, Seen.from_json(fields)))
        for group, of_group in zip(self._groups, seen, strict=True):
            group.findings = take_together(group.repair, of_group)
        return str(name)

    def _look_at(self, group: _Group, kind: Kind, owner: int, opened: ExitStack) -> Seen:
        identity = self._identity(kind, owner)
        try:
            source: ShardSource = self._store.open(identity)
            opened.callback(source.close)
            bad = find_bad_blocks(source, identity)
            if kind is Kind.IMAGE:
                group.sources[kind, owner] = WatchedSource(source)
                return Seen(kind, owner, bad_blocks=tuple(sorted(bad)), nbytes=source.nbytes)
            part = ParityPart(source)
            require_group(part.of, group.repair.group)
            layout = part.of.layout
            if part.nbytes != layout.parity_nbytes:
                raise CorruptShardError(f"{identity} has {part.nbytes} bytes of parity")
            envelopes: list[bytes] = []
            if min(bad, default=part.first_block) >= part.first_block:
                behind = [group.place[rank] for rank in ranks_behind(group.repair.group, owner)]
                envelopes = read_envelopes(
                    source, [part.of.image_nbytes[place] for place in behind]
                )
                group.kept_envelopes[owner] = b"".join(envelopes)
            group.sources[kind, owner] = WatchedSource(part)
            blocks = range(layout.parity_nbytes // BLOCK_NBYTES)
            of_parity = (block - part.first_block for block in sorted(bad))
            return Seen(
                kind,
                owner,
                bad_blocks=tuple(block for block in of_parity if block in blocks),
                of=part.of,
                envelopes=tuple(map(len, envelopes)),
            )
        except (StorageError, CorruptShardError, MismatchError) as error:
            return Seen(kind, owner, problem=described(error))

    def _carry_out(self, name: str, opened: ExitStack) -> bool:
        what = f"rebuild shards of iteration {self._checkpoint.iteration}"
        with Attempt() as sharing:
            self._for_each_group(lambda group: self._share_envelopes(name, group, opened))
        self._ranks.agree(f"connect to {what}", sharing, deadline=self._deadline())
        if any(group.findings.to_verify for group in self._groups):
            self._verify_again()
        for group in self._groups:
            self._plan(group)
        if self._recovered.hopeless:
            return False
        sizes = {
            rank: group.of.image_nbytes[group.place[rank]]
            for group in self._groups
            for rank in group.repair.wanted
        }
        with Attempt() as accepting:
            for rank in (r for group in self._groups for r in group.computed_by(self._rank)):
                identity = self._identity(Kind.IMAGE, rank)
                self._recovered.slots[rank] = self._store.reserve(
                    identity, sizes[rank], self._patience_s, is_kept=self._is_kept
                )
        self._ranks.agree(f"make room to {what}", accepting, deadline=self._deadline())
        with Attempt() as rebuilding:
            self._for_each_group(self._rebuild)
        try:
            self._ranks.agree(what, rebuilding, deadline=self._deadline(), grace_s=self._patience_s)
        except PeerLostError:
            raise
        except CheckpointingException as error:
            if self._found_what_failed(what, error, sizes):
                return False
            raise
        self._recovered.nbytes = sizes
        return True

    def _for_each_group(self, act: Callable[[_Group], None]) -> None:
        """Act in each group of this rank; what goes wrong in one does not keep it from the next."""
        failures = []
        for group in self._groups:
            if self._rank in group.repair.ranks:
                with Attempt() as acting:
                    act(group)
                failures += [acting.failure] if acting.failure is not None else []
        if failures:
            raise failures[0]

    def _share_envelopes(self, name: str, group: _Group, opened: ExitStack) -> None:
        """Send envelopes from the members that keep them to those that compute or verify images."""
        repair, name = group.repair, f"{name}/{self._groups.index(group)}"
        transport = HostTransport.connect(name, repair.ranks, self._rank, self._timeout_s)
        opened.callback(transport.close)
        group.transport = transport
        sends: list[tuple[int, ShardSource]] = []
        receives: list[tuple[int, memoryview]] = []
        envelopes: dict[int, memoryview] = {}
        for rank, (keeper, start, nbytes) in group.findings.envelopes.items():
            sender = repair.parities[keeper]
            computing = repair.wanted[rank]
            for receiver in sorted({computing, repair.images.get(rank, computing)}):
                if self._rank == sender:
                    kept = memoryview(
                        bytearray(group.kept_envelopes[keeper][start : start + nbytes])
                    )
                    if receiver == sender:
                        envelopes[rank] = kept
                    else:
                        sends.append((receiver, MemorySource(kept)))
                elif self._rank == receiver:
                    envelopes[rank] = memoryview(bytearray(nbytes))
                    receives.append((sender, envelopes[rank]))
        transport.exchange(sends, receives, self._timeout_s)
        for rank, envelope in envelopes.items():
            identity = self._identity(Kind.IMAGE, rank)
            nbytes = group.of.image_nbytes[group.place[rank]]
            try:
                group.envelopes[rank] = ImageEnvelope(bytes(envelope), identity, nbytes)
            except (CorruptShardError, MismatchError) as error:
                # What is computed is verified without it as well, when it is restored.
                logger.warning("the envelope that was kept for %s is no good: %s", identity, error)

    def _verify_again(self) -> None:
        """Find out by their envelopes which blocks of images are really bad, and report them.

        An image alone cannot tell whether a block is bad or its digest.
        """
        mine: list[list[Any]] = []
        with Attempt() as looking:
            mine += [
                [number, rank, sorted(self._bad_blocks(group, rank))]
                for number, group in enumerate(self._groups)
                for rank in group.findings.to_verify
                if group.repair.images[rank] == self._rank and rank in group.envelopes
            ]
        phase = f"see which blocks of iteration {self._checkpoint.iteration} are bad"
        reports = self._ranks.merge(
            *(phase, looking, mine), deadline=self._deadline(), read=shaped([(int, int, [int])])
        )
        for found in reports.values():
            for number, rank, blocks in found:
                group = self._groups[number]
                bad = group.findings.left.bad_blocks
                group.bad_blocks = {**(group.bad_blocks or bad)}
                group.bad_blocks[Kind.IMAGE, group.place[rank]] = frozenset(blocks)

    def _bad_blocks(self, group: _Group, rank: int) -> set[int]:
        source, bad = group.sources[Kind.IMAGE, rank], set()
        for block in group.findings.left.bad_blocks[Kind.IMAGE, group.place[rank]]:
            start = block * BLOCK_NBYTES
            try:
                content = source.read(start, min(start + BLOCK_NBYTES, source.nbytes))
            except (StorageError, CorruptShardError):
                # It can be done without, as it was to be.
                bad.add(block)
                continue
            if not group.envelopes[rank].matches(block, content):
                bad.add(block)
        return bad

    def _plan(self, group: _Group) -> None:
        left = group.findings.left
        try:
            if group.bad_blocks is not None:
                left = replace(left, bad_blocks=group.bad_blocks)
            wants = [Want(rank, group.place[of]) for of, rank in group.repair.wanted.items()]
            group.chains = plan_rebuild(group.of.layout, left, wants)
        except NoReplicasAvailableError as error:
            self._recovered.hopeless |= dict.fromkeys(group.repair.wanted, str(error))

    def _rebuild(self, group: _Group) -> None:
        assert group.transport is not None, "the ranks are connected before"
        sinks = {
            (Kind.IMAGE, group.place[rank]): self._recovered.slots[rank].image
            for rank in group.computed_by(self._rank)
        }
        envelopes = {group.place[rank]: envelope for rank, envelope in group.envelopes.items()}

        def is_good(kind: Kind, member: int, block: int, content: memoryview) -> bool:
            envelope = envelopes.get(member)
            return envelope is None or envelope.matches(block, content)

        pipeline = Pipeline(group.transport.connections)
        try:
            rebuild(
                group.of.layout,
                group.chains,
                pipeline,
                {(k, group.place[o]): source for (k, o), source in group.sources.items()},
                sinks,
                self._timeout_s,
                verify=is_good,
            )
        finally:
            pipeline.close()

    def _found_what_failed(
        self, what: str, error: CheckpointingException, wanted: Iterable[int]
    ) -> bool:
        """Tell each other which sources failed; whether it is any use to plan again."""
        refused = [
            [kind, owner, str(source.refused)]
            for group in self._groups
            for (kind, owner), source in group.sources.items()
            if source.refused is not None
        ]
        phase = f"say why it failed to {what}"
        refusals = self._ranks.merge(
            *(phase, Attempt(), refused),
            deadline=self._deadline(),
            read=shaped([(object, int, str)]),
        )
        gone = [
            PieceProblem(piece_of(Kind(kind), owner), rank, why, is_gone=True)
            for rank, found in refusals.items()
            for kind, owner, why in found
        ]
        self._recovered.problems += gone
        if not gone and isinstance(error, CorruptShardError):
            # What was computed is not what was lost, though all that was read is good.
            self._recovered.hopeless = dict.fromkeys(wanted, str(error))
        return bool(gone or self._recovered.hopeless)


def _judge_seen(found: Sequence[Any]) -> list[Any]:
    """A name for connections, and what each rank has found that was to look at something."""
    return [new_name(), [[rank, seen] for rank, seen in enumerate(found) if seen]]


class _Group:
    """A repair under way, as this rank sees it; members are named by the ranks that saved."""

    def __init__(self, repair: Repair) -> None:
        self.repair = repair
        self.place = {rank: number for number, rank in enumerate(repair.group.ranks)}
        self.findings = NOTHING_FOUND
        self.bad_blocks: dict[tuple[Kind, int], frozenset[int]] | None = None
        self.sources: dict[tuple[Kind, int], WatchedSource] = {}
        self.kept_envelopes: dict[int, bytes] = {}
        self.envelopes: dict[int, ImageEnvelope] = {}
        self.transport: HostTransport | None = None
        self.chains: Sequence[Chain] = ()

    def computed_by(self, rank: int) -> list[int]:
        """Members whose images a rank of this job computes."""
        return [member for member, computing in self.repair.wanted.items() if computing == rank]

    @property
    def of(self) -> ParityOf:
        """Members that the parities are of."""
        assert self.findings.of is not None, "without any parity nothing is to be computed"
        return self.findings.of
