"""Computes shards that no node holds any more from what is left of their groups, at a load.

Whatever is read is verified first, block by block; what is computed is checked against the heads
that other members keep, and lies then where a shard to be kept lies: it is written behind training.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from localckpt.coordination import Coordinator
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
    StorageError,
)
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.managers.repairs import Findings, Repair, Seen, require_group, take_together
from localckpt.managers.shelf import Shelf
from localckpt.managers.watched import WatchedSource
from localckpt.replication.agreement import Attempt, agree
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.parity.chains import Chain
from localckpt.replication.parity.encode_group import layout_of
from localckpt.replication.parity.planning import plan_rebuild
from localckpt.replication.parity.rebuild import rebuild
from localckpt.replication.parity.relay import Relay
from localckpt.replication.parity.stripes import Kind
from localckpt.replication.retrieval import new_name
from localckpt.state_dict.digests import BLOCK_NBYTES
from localckpt.state_dict.identify import find_bad_blocks
from localckpt.state_dict.parity_image import ImageHead, ParityPart, read_heads
from localckpt.state_dict.source import MemorySource, ShardSource

__all__ = ["Rebuilding"]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A repair that can be carried out."""

    repair: Repair
    findings: Findings
    chains: Sequence[Chain]


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
        coordinator: Coordinator,
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
        self._repairs = repairs
        self._timeout_s = timeout_s
        self._rank = coordinator.rank
        self._sources: list[dict[tuple[Kind, int], WatchedSource]] = []
        self._heads: list[dict[int, bytes]] = []
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
            name, findings = self._look(opened)
            wanted = {(Kind.IMAGE, rank) for repair in self._repairs for rank in repair.wanted}
            for found in findings:
                self.gone += found.gone
                self.damaged += found.damaged
            new = [
                (k, o) for k, o, _, _ in self.damaged if k is Kind.IMAGE and (k, o) not in wanted
            ]
            if self.gone or new:
                return False
            planned = [self._plan(*both) for both in zip(self._repairs, findings, strict=True)]
            if self.hopeless:
                return False
            return self._carry_out(name, [p for p in planned if p is not None])

    def _identity(self, kind: Kind, owner: int) -> ShardIdentity:
        shard = self._checkpoint.shard(owner, self._session_id)
        return shard.parity if kind is Kind.PARITY else shard

    def _look(self, opened: ExitStack) -> tuple[str, list[Findings]]:
        """Verify all that is to be read, and tell each other."""
        mine = []
        for number, repair in enumerate(self._repairs):
            self._sources.append({})
            self._heads.append({})
            for kind, owner in repair.reads(self._rank):
                seen = self._look_at(number, kind, owner, opened)
                mine.append([number, seen.to_json()])
        told = self._coordinator.all_gather(
            f"see what is left of iteration {self._checkpoint.iteration}", [new_name(), mine]
        )
        seen_by: list[list[tuple[int, Seen]]] = [[] for _ in self._repairs]
        for rank, (_, found) in enumerate(told):
            for number, fields in found:
                seen_by[number].append((rank, Seen.from_json(fields)))
        findings = [take_together(*both) for both in zip(self._repairs, seen_by, strict=True)]
        return told[0][0], findings

    def _look_at(self, number: int, kind: Kind, owner: int, opened: ExitStack) -> Seen:
        identity = self._identity(kind, owner)
        try:
            source: ShardSource = self._shelf.open(identity)
            opened.callback(source.close)
            bad = find_bad_blocks(source, identity)
            if kind is Kind.IMAGE:
                self._sources[number][kind, owner] = WatchedSource(source)
                return Seen(kind, owner, bad_blocks=tuple(sorted(bad)), nbytes=source.nbytes)
            part = ParityPart(source)
            group = self._repairs[number].group
            require_group(part.of, group)
            layout = layout_of(part.of)
            if part.nbytes != layout.parity_nbytes:
                raise CorruptShardError(f"{identity} has {part.nbytes} bytes of parity")
            heads: list[bytes] = []
            if min(bad, default=part.first_block) >= part.first_block:
                behind = [group.ranks.index(rank) for rank in group.behind(owner)]
                heads = read_heads(source, [part.of.image_nbytes[place] for place in behind])
                self._heads[number][owner] = b"".join(heads)
            self._sources[number][kind, owner] = WatchedSource(part)
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
            return Seen(kind, owner, problem=str(error))

    def _plan(self, repair: Repair, found: Findings) -> _Planned | None:
        try:
            if found.of is None:
                raise NoReplicasAvailableError("none of their parity can be read")
            chains = plan_rebuild(layout_of(found.of), found.left, found.wants(repair))
        except NoReplicasAvailableError as error:
            self.hopeless |= dict.fromkeys(repair.wanted, str(error))
            return None
        return _Planned(repair, found, chains)

    def _carry_out(self, name: str, planned: Sequence[_Planned]) -> bool:
        what = f"rebuild shards of iteration {self._checkpoint.iteration}"
        sizes = {
            rank: planned_one.findings.of.image_nbytes[planned_one.repair.group.ranks.index(rank)]
            for planned_one in planned
            for rank in planned_one.repair.wanted
            if planned_one.findings.of is not None
        }
        mine = self._identity(Kind.IMAGE, self._rank)
        with Attempt() as accepting:
            if self._rank in sizes:
                self.room = self._shelf.make_room(mine, sizes[self._rank])
        agree(self._coordinator, f"make room to {what}", accepting)
        usual_s = self._coordinator.timeout_s
        # A rank that is in several groups rebuilds one after the other.
        self._coordinator.timeout_s = max(usual_s, 3 * self._timeout_s * len(planned))
        try:
            with Attempt() as rebuilding:
                failures = [
                    failure
                    for number, one in enumerate(planned)
                    if self._rank in one.repair.ranks
                    and (failure := self._attempt(f"{name}/{number}", number, one)) is not None
                ]
                if failures:
                    raise failures[0]
            try:
                agree(self._coordinator, what, rebuilding, grace_s=self._coordinator.timeout_s)
            except PeerLostError:
                raise
            except CheckpointingException as error:
                if not self._found_what_failed(what, error, sizes):
                    raise
                return False
        finally:
            self._coordinator.timeout_s = usual_s
        self.nbytes = sizes
        return True

    def _attempt(self, name: str, number: int, one: _Planned) -> Exception | None:
        """Rebuild in one group; what goes wrong must not keep this rank from the next."""
        with Attempt() as rebuilding:
            self._rebuild(name, number, one)
        return rebuilding.failure

    def _found_what_failed(
        self, what: str, error: CheckpointingException, wanted: Sequence[int] | dict[int, int]
    ) -> bool:
        """Tell each other which sources failed; whether it is any use to plan again."""
        refused = [
            [kind, owner, str(source.refused)]
            for sources in self._sources
            for (kind, owner), source in sources.items()
            if source.refused is not None
        ]
        told = self._coordinator.all_gather(f"say why it failed to {what}", refused)
        self.gone = [
            (Kind(kind), owner, rank, why)
            for rank, found in enumerate(told)
            for kind, owner, why in found
        ]
        if not self.gone and isinstance(error, CorruptShardError):
            # What was computed is not what was lost, though all that was read is good.
            self.hopeless = dict.fromkeys(wanted, str(error))
        return bool(self.gone or self.hopeless)

    def _rebuild(self, name: str, number: int, one: _Planned) -> None:
        repair, found = one.repair, one.findings
        assert found.of is not None
        place = {rank: at for at, rank in enumerate(repair.group.ranks)}
        with ExitStack() as opened:
            transport = HostTransport.connect(name, repair.ranks, self._rank, self._timeout_s)
            opened.callback(transport.close)
            head = self._fetch_head(transport, number, one)
            relay = Relay(transport.connections)
            opened.callback(relay.close)

            def is_good(kind: Kind, member: int, block: int, content: memoryview) -> bool:
                return head is None or head.matches(block, content)

            rebuild(
                layout_of(found.of),
                one.chains,
                relay,
                {(k, place[o]): source for (k, o), source in self._sources[number].items()},
                {(Kind.IMAGE, place[self._rank]): self.room}
                if self._rank in repair.wanted and self.room is not None
                else {},
                self._timeout_s,
                verify=is_good,
            )

    def _fetch_head(self, transport: HostTransport, number: int, one: _Planned) -> ImageHead | None:
        """Heads go from the members that keep them to those whose images are computed."""
        sends: list[tuple[int, ShardSource]] = []
        receives: list[tuple[int, memoryview]] = []
        head: memoryview | None = None
        for rank, (keeper, start, nbytes) in one.findings.heads.items():
            sender = one.repair.parities[keeper]
            if rank == self._rank:
                head = memoryview(bytearray(nbytes))
            if sender == self._rank:
                kept = memoryview(bytearray(self._heads[number][keeper]))[start : start + nbytes]
                if rank != self._rank:
                    sends.append((rank, MemorySource(kept)))
                elif head is not None:
                    head[:] = kept
            elif head is not None and rank == self._rank:
                receives.append((sender, head))
        transport.exchange(sends, receives)
        if head is None:
            return None
        assert one.findings.of is not None
        at = one.repair.group.ranks.index(self._rank)
        identity = self._identity(Kind.IMAGE, self._rank)
        return ImageHead(bytes(head), identity, one.findings.of.image_nbytes[at])
