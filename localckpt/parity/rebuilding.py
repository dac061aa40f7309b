"""Computes shards that no node holds any more from what is left of their groups, at a load.

All that is read is verified first, block by block. What is computed lies then where a shard to be
kept lies; it is verified when the state is restored, and written behind training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    PeerLostError,
    StorageError,
)
from localckpt.failure_texts import described
from localckpt.ids import ShardIdentity
from localckpt.parity.chains import Chain
from localckpt.parity.image import ParityOf, ParityPart
from localckpt.parity.pipeline import Pipeline
from localckpt.parity.planning import (
    Left,
    Repair,
    Seen,
    longest_wait,
    piece_of,
    plan_rebuild,
    plan_repairs,
    take_together,
)
from localckpt.parity.stripes import Kind
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks, shaped, to_all
from localckpt.replication.redundancy import Lost, PieceProblem, Recovered
from localckpt.replication.retrieval import WatchedSource, new_name
from localckpt.replication.transport import Transport, connect
from localckpt.state_dict.source import ImageBytes, ShardSource
from localckpt.storage.store import Store


class Rebuilding:
    """One attempt to compute what is lost; all ranks of the job make it and call it together."""

    def __init__(self, lost: Lost, store: Store, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._store = store
        self._checkpoint = lost.checkpoint
        self._session_id = lost.session_id
        self._timeout_s = timeout_s
        # A rank that is in several groups takes one after the other. Most are in one: nobody is to
        # wait for all groups of the job when a rank is lost.
        repairs = plan_repairs(lost)
        self._patience_s = max(ranks.timeout_s, 3 * timeout_s * longest_wait(repairs))
        self._rank = ranks.rank
        self._groups = [_Group(repair) for repair in repairs]
        self._recovered = Recovered()

    def run(self) -> Recovered:
        """Carry the repairs out; see :meth:`RecoveryScheme.recover`."""
        try:
            self._recovered.is_done = self._run()
        finally:
            if not self._recovered.is_done:
                self._release()
        return self._recovered

    def _run(self) -> bool:
        with ExitStack() as opened:
            name = self._look(opened)
            return not self._recovered.problems and self._carry_out(name, opened)

    def _release(self) -> None:
        mine = {
            self._identity(Kind.IMAGE, rank)
            for group in self._groups
            for rank in group.computed_by(self._rank)
        }
        # From the store, since an interrupt may have come before a slot was noted.
        self._store.release([slot for slot in self._store.slots if slot.identity in mine])
        self._recovered.slots.clear()

    def _deadline(self) -> Deadline:
        return Deadline.after(self._patience_s)

    def _identity(self, kind: Kind, owner: int) -> ShardIdentity:
        return self._checkpoint.shard(owner, self._session_id).of_kind(piece_of(kind, owner).kind)

    def _look(self, opened: ExitStack) -> str:
        """Verify all that is to be read, and tell each other; returns a name for connections."""
        mine: list[list[Any]] = []
        with Attempt() as looking:
            mine += [
                [number, self._look_at(group, kind, owner, opened)]
                for number, group in enumerate(self._groups)
                for kind, owner in group.repair.reads(self._rank)
            ]
        phase = f"see what is left of iteration {self._checkpoint.iteration}"
        name, findings = self._ranks.decide(
            phase, looking.of(mine), _judge_seen, read=shaped((str, [(int, [(int, object)])]))
        )
        seen: list[list[tuple[int, Seen]]] = [[] for _ in self._groups]
        for rank, found in findings:
            for number, fields in found:
                seen[number].append((rank, Seen(*fields)))
        for group, of_group in zip(self._groups, seen, strict=True):
            problems, of, group.left = take_together(group.repair, of_group)
            self._recovered.problems += problems
            # Without any parity nothing is computed.
            if of is not None:
                group.of = of
        return str(name)

    def _look_at(self, group: _Group, kind: Kind, owner: int, opened: ExitStack) -> Seen:
        identity = self._identity(kind, owner)
        try:
            source: ShardSource = self._store.open(identity)
            opened.callback(source.close)
            ImageBytes(source, identity).verify()
            if kind is Kind.IMAGE:
                group.sources[kind, owner] = WatchedSource(source)
                return Seen(kind, owner, nbytes=source.nbytes)
            part = ParityPart(source)
            if part.of.group != group.repair.group:
                # Its node has reported another group.
                raise MismatchError(
                    f"it is the parity of {part.of.group}, not of {group.repair.group}"
                )
            if part.nbytes != part.of.layout.parity_nbytes:
                raise CorruptShardError(f"{identity} has {part.nbytes} bytes of parity")
            group.sources[kind, owner] = WatchedSource(part)
            return Seen(kind, owner, of=part.of.to_json())
        except (StorageError, CorruptShardError, MismatchError) as error:
            return Seen(kind, owner, problem=described(error))

    def _carry_out(self, name: str, opened: ExitStack) -> bool:
        what = f"rebuild shards of iteration {self._checkpoint.iteration}"
        with Attempt() as connecting:
            self._for_each_group(lambda group: self._connect(name, group, opened))
        self._ranks.decide(f"connect to {what}", connecting, deadline=self._deadline())
        for group in self._groups:
            wanted = {group.place[of]: rank for of, rank in group.repair.wanted.items()}
            group.chains = plan_rebuild(group.of.layout, group.left, wanted)
        sizes = {
            rank: group.of.image_nbytes[group.place[rank]]
            for group in self._groups
            for rank in group.repair.wanted
        }
        with Attempt() as accepting:
            for rank in (r for group in self._groups for r in group.computed_by(self._rank)):
                identity = self._identity(Kind.IMAGE, rank)
                self._recovered.slots[rank] = self._store.reserve(
                    identity, sizes[rank], self._patience_s
                )
        self._ranks.decide(f"make room to {what}", accepting, deadline=self._deadline())
        with Attempt() as rebuilding:
            self._for_each_group(self._rebuild)
        try:
            self._ranks.decide(
                what, rebuilding, deadline=self._deadline(), grace_s=self._patience_s
            )
        except PeerLostError:
            raise
        except CheckpointingException:
            if self._found_what_failed(what):
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

    def _connect(self, name: str, group: _Group, opened: ExitStack) -> None:
        ranks, name = group.repair.ranks, f"{name}/{self._groups.index(group)}"
        group.transport = connect(name, ranks, self._rank, self._timeout_s)
        opened.callback(group.transport.close)

    def _rebuild(self, group: _Group) -> None:
        assert group.transport is not None, "the ranks are connected before"
        sinks = {
            (Kind.IMAGE, group.place[rank]): self._recovered.slots[rank].image
            for rank in group.computed_by(self._rank)
        }
        sources = {(k, group.place[o]): source for (k, o), source in group.sources.items()}
        Pipeline(group.transport).run(group.chains, sources, sinks, self._timeout_s)

    def _found_what_failed(self, what: str) -> bool:
        """Tell each other which sources failed; whether it is any use to plan again."""
        refused = [
            [kind, owner, str(source.refused)]
            for group in self._groups
            for (kind, owner), source in group.sources.items()
            if source.refused is not None
        ]
        phase = f"say why it failed to {what}"
        refusals = self._ranks.decide(
            phase, lambda: refused, deadline=self._deadline(), **to_all([(object, int, str)])
        )
        gone = [
            PieceProblem(piece_of(kind, owner), rank, why)
            for rank, found in refusals.items()
            for kind, owner, why in found
        ]
        self._recovered.problems += gone
        return bool(gone)


def _judge_seen(found: Sequence[Any]) -> list[Any]:
    """A name for connections, and what each rank has found that was to look at something."""
    return [new_name(), [[rank, seen] for rank, seen in enumerate(found) if seen]]


class _Group:
    """A repair under way, as this rank sees it; members are named by the ranks that saved."""

    def __init__(self, repair: Repair) -> None:
        self.repair = repair
        self.place = {rank: number for number, rank in enumerate(repair.group.ranks)}
        self.of: ParityOf
        self.left = Left({}, {})
        self.sources: dict[tuple[Kind, int], WatchedSource] = {}
        self.transport: Transport | None = None
        self.chains: Sequence[Chain] = ()

    def computed_by(self, rank: int) -> list[int]:
        return [member for member, computing in self.repair.wanted.items() if computing == rank]
