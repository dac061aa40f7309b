"""Computes shards that no node holds any more from what is left of their groups, at a load.

Whatever is read is verified first, block by block; what is computed is checked against the heads
that other members keep, and lies then where a shard to be kept lies: it is written behind training.
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
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.managers.repairs import (
    NOTHING_FOUND,
    Repair,
    Seen,
    require_group,
    take_together,
    turns,
)
from localckpt.managers.shelf import Shelf
from localckpt.managers.watched import WatchedSource
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.parity.chains import Chain
from localckpt.replication.parity.encode_group import layout_of
from localckpt.replication.parity.planning import Want, plan_rebuild
from localckpt.replication.parity.rebuild import rebuild
from localckpt.replication.parity.relay import Relay
from localckpt.replication.parity.stripes import Kind
from localckpt.replication.retrieval import new_name
from localckpt.state_dict.digests import BLOCK_NBYTES
from localckpt.state_dict.identify import find_bad_blocks
from localckpt.state_dict.parity_image import ImageHead, ParityPart, read_heads
from localckpt.state_dict.parity_of import ParityOf
from localckpt.state_dict.source import MemorySource, ShardSource

__all__ = ["Rebuilding"]

logger = logging.getLogger(__name__)


class Rebuilding:
    """One attempt to carry out repairs; all ranks of the job make it and call it together.

    Args:
        coordinator: The ranks.
        shelf: This rank's shards.
        checkpoint: What is loaded.
        session_id: The training run.
        repairs: From :func:`plan_repairs`.
        timeout_s: Deadline of each step, in seconds.
    """

    def __init__(
        self,
        coordinator: Ranks,
        shelf: Shelf,
        checkpoint: Checkpoint,
        session_id: str,
        repairs: Sequence[Repair],
        timeout_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._shelf = shelf
        self._checkpoint = checkpoint
        self._session_id = session_id
        self._timeout_s = timeout_s
        self._rank = coordinator.rank
        self._groups = [_Group(repair) for repair in repairs]
        self.gone: list[tuple[Kind, int, int, str]] = []
        """What is of no use at all: kind, owner, the rank that read it, and why."""
        self.damaged: list[tuple[Kind, int, int, str]] = []
        """The same of what is of use in part."""
        self.hopeless: dict[int, str] = {}
        """Ranks whose shards could not be computed, and why."""
        self.nbytes: dict[int, int] = {}
        """The sizes of all images that were computed, by rank."""
        self.room: memoryview | None = None
        """This rank's image, if it was computed: on its shelf, in room made for it."""

    def run(self) -> bool:
        """Carry the repairs out.

        Returns:
            Whether that was done, on all ranks. If not, what was found tells why, and the ranks may
            plan again with it.

        Raises:
            PeerLostError: A rank did not come, or broke off.
            CheckpointingException: What went wrong on some rank; the same on all.
        """
        with ExitStack() as opened:
            name = self._look(opened)
            for group in self._groups:
                self.gone += group.findings.gone
                self.damaged += group.findings.damaged
            wanted = {rank for group in self._groups for rank in group.repair.wanted}
            new = [o for kind, o, _, _ in self.damaged if kind is Kind.IMAGE and o not in wanted]
            if self.gone or new:
                return False
            usual_s = self._coordinator.timeout_s
            # A rank that is in several groups takes one after the other. Most are in one: nobody
            # is to wait for all groups of the job when a rank is lost.
            in_turn = turns(group.repair for group in self._groups)
            self._coordinator.timeout_s = max(usual_s, 3 * self._timeout_s * in_turn)
            try:
                return self._carry_out(name, opened)
            finally:
                self._coordinator.timeout_s = usual_s

    def _identity(self, kind: Kind, owner: int) -> ShardIdentity:
        shard = self._checkpoint.shard(owner, self._session_id)
        return shard.parity if kind is Kind.PARITY else shard

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
        told = self._coordinator.share(phase, looking, [new_name(), mine])
        seen: list[list[tuple[int, Seen]]] = [[] for _ in self._groups]
        for rank, (_, found) in enumerate(told):
            for number, fields in found:
                seen[number].append((rank, Seen.from_json(fields)))
        for group, of_group in zip(self._groups, seen, strict=True):
            group.findings = take_together(group.repair, of_group)
        return str(told[0][0])

    def _look_at(self, group: _Group, kind: Kind, owner: int, opened: ExitStack) -> Seen:
        identity = self._identity(kind, owner)
        try:
            source: ShardSource = self._shelf.open(identity)
            opened.callback(source.close)
            bad = find_bad_blocks(source, identity)
            if kind is Kind.IMAGE:
                group.sources[kind, owner] = WatchedSource(source)
                return Seen(kind, owner, bad_blocks=tuple(sorted(bad)), nbytes=source.nbytes)
            part = ParityPart(source)
            require_group(part.of, group.repair.group)
            layout = layout_of(part.of)
            if part.nbytes != layout.parity_nbytes:
                raise CorruptShardError(f"{identity} has {part.nbytes} bytes of parity")
            heads: list[bytes] = []
            if min(bad, default=part.first_block) >= part.first_block:
                behind = [group.place[rank] for rank in group.repair.group.behind(owner)]
                heads = read_heads(source, [part.of.image_nbytes[place] for place in behind])
                group.kept_heads[owner] = b"".join(heads)
            group.sources[kind, owner] = WatchedSource(part)
            blocks = range(layout.parity_nbytes // BLOCK_NBYTES)
            of_parity = (block - part.first_block for block in sorted(bad))
            return Seen(
                kind,
                owner,
                bad_blocks=tuple(block for block in of_parity if block in blocks),
                of=part.of,
                heads=tuple(map(len, heads)),
            )
        except (StorageError, CorruptShardError, MismatchError) as error:
            return Seen(kind, owner, problem=described(error))

    def _carry_out(self, name: str, opened: ExitStack) -> bool:
        what = f"rebuild shards of iteration {self._checkpoint.iteration}"
        with Attempt() as sharing:
            self._for_each_group(lambda group: self._share_heads(name, group, opened))
        self._coordinator.settle(f"connect to {what}", sharing)
        if any(group.findings.doubtful for group in self._groups):
            self._settle_doubts()
        for group in self._groups:
            self._plan(group)
        if self.hopeless:
            return False
        sizes = {
            rank: group.of.image_nbytes[group.place[rank]]
            for group in self._groups
            for rank in group.repair.wanted
        }
        with Attempt() as accepting:
            if self._rank in sizes:
                mine = self._identity(Kind.IMAGE, self._rank)
                self.room = self._shelf.make_room(mine, sizes[self._rank])
        self._coordinator.settle(f"make room to {what}", accepting)
        with Attempt() as rebuilding:
            self._for_each_group(self._rebuild)
        try:
            self._coordinator.settle(what, rebuilding, grace_s=self._coordinator.timeout_s)
        except PeerLostError:
            raise
        except CheckpointingException as error:
            if self._found_what_failed(what, error, sizes):
                return False
            raise
        self.nbytes = sizes
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

    def _share_heads(self, name: str, group: _Group, opened: ExitStack) -> None:
        """Heads go from the members that keep them to whoever computes, or doubts, an image."""
        repair, name = group.repair, f"{name}/{self._groups.index(group)}"
        transport = HostTransport.connect(name, repair.ranks, self._rank, self._timeout_s)
        opened.callback(transport.close)
        group.transport = transport
        sends: list[tuple[int, ShardSource]] = []
        receives: list[tuple[int, memoryview]] = []
        heads: dict[int, memoryview] = {}
        for rank, (keeper, start, nbytes) in group.findings.heads.items():
            sender = repair.parities[keeper]
            for receiver in sorted({rank, repair.images.get(rank, rank)}):
                if self._rank == sender:
                    kept = memoryview(bytearray(group.kept_heads[keeper][start : start + nbytes]))
                    if receiver == sender:
                        heads[rank] = kept
                    else:
                        sends.append((receiver, MemorySource(kept)))
                elif self._rank == receiver:
                    heads[rank] = memoryview(bytearray(nbytes))
                    receives.append((sender, heads[rank]))
        transport.exchange(sends, receives)
        for rank, head in heads.items():
            identity = self._identity(Kind.IMAGE, rank)
            nbytes = group.of.image_nbytes[group.place[rank]]
            try:
                group.heads[rank] = ImageHead(bytes(head), identity, nbytes)
            except (CorruptShardError, MismatchError) as error:
                # What is computed is verified without it as well, when it is restored.
                logger.warning("the head that was kept for %s is no good: %s", identity, error)

    def _settle_doubts(self) -> None:
        """Find out by their heads which blocks of images are really bad, and tell each other.

        An image alone cannot tell whether a block is bad or its digest.
        """
        mine: list[list[Any]] = []
        with Attempt() as looking:
            mine += [
                [number, rank, sorted(self._bad_blocks(group, rank))]
                for number, group in enumerate(self._groups)
                for rank in group.findings.doubtful
                if group.repair.images[rank] == self._rank and rank in group.heads
            ]
        phase = f"see which blocks of iteration {self._checkpoint.iteration} are bad"
        for found in self._coordinator.share(phase, looking, mine):
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
            if not group.heads[rank].matches(block, content):
                bad.add(block)
        return bad

    def _plan(self, group: _Group) -> None:
        left = group.findings.left
        try:
            if group.bad_blocks is not None:
                left = replace(left, bad_blocks=group.bad_blocks)
            wants = [Want(rank, group.place[rank]) for rank in group.repair.wanted]
            group.chains = plan_rebuild(layout_of(group.of), left, wants)
        except NoReplicasAvailableError as error:
            self.hopeless |= dict.fromkeys(group.repair.wanted, str(error))

    def _rebuild(self, group: _Group) -> None:
        assert group.transport is not None, "the ranks are connected before"
        sinks: dict[tuple[Kind, int], memoryview] = {}
        if self._rank in group.repair.wanted and self.room is not None:
            sinks[Kind.IMAGE, group.place[self._rank]] = self.room
        head = group.heads.get(self._rank)

        def is_good(kind: Kind, member: int, block: int, content: memoryview) -> bool:
            return head is None or head.matches(block, content)

        relay = Relay(group.transport.connections)
        try:
            rebuild(
                layout_of(group.of),
                group.chains,
                relay,
                {(k, group.place[o]): source for (k, o), source in group.sources.items()},
                sinks,
                self._timeout_s,
                verify=is_good,
            )
        finally:
            relay.close()

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
        told = self._coordinator.gather(f"say why it failed to {what}", refused)
        self.gone = [
            (Kind(kind), owner, rank, why)
            for rank, found in enumerate(told)
            for kind, owner, why in found
        ]
        if not self.gone and isinstance(error, CorruptShardError):
            # What was computed is not what was lost, though all that was read is good.
            self.hopeless = dict.fromkeys(wanted, str(error))
        return bool(self.gone or self.hopeless)


class _Group:
    """A repair under way, as this rank sees it; ranks are told by their numbers in the job."""

    def __init__(self, repair: Repair) -> None:
        self.repair = repair
        self.place = {rank: number for number, rank in enumerate(repair.group.ranks)}
        self.findings = NOTHING_FOUND
        self.bad_blocks: dict[tuple[Kind, int], frozenset[int]] | None = None
        self.sources: dict[tuple[Kind, int], WatchedSource] = {}
        self.kept_heads: dict[int, bytes] = {}
        self.heads: dict[int, ImageHead] = {}
        self.transport: HostTransport | None = None
        self.chains: Sequence[Chain] = ()

    @property
    def of(self) -> ParityOf:
        """What the parities are of."""
        assert self.findings.of is not None, "without any parity nothing is to be computed"
        return self.findings.of
