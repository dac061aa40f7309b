"""Copies of shards that a load with another sharding reads, and what happens to bad ones."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from localckpt.availability.inventory import Inventory
from localckpt.availability.refusals import BadCopy
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import described
from localckpt.ids import Checkpoint, Piece, ShardIdentity
from localckpt.managers.parts import Parts
from localckpt.managers.progress import CountedSource, ReadProgress
from localckpt.managers.recovery import Recovery
from localckpt.managers.restoring import incurable, verify_again
from localckpt.ranks.failure import forget_frames
from localckpt.state_dict.identify import verify
from localckpt.state_dict.saved_shard import SavedShard
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.state_dict.stateful import NO_FREEDOM, Freedom

__all__ = ["ShardCopies"]

logger = logging.getLogger(__name__)


class ShardCopies:
    """Copies of the shards of one checkpoint; what was found bad is the same on all ranks.

    Args:
        parts: Of the manager.
        inventory: What each node holds; copies that turn out bad are taken out.
        checkpoint: The checkpoint.
        recovery: Computes shards that no node holds.
        bad: Gets the copies that turn out bad.

    Attributes:
        shards: Shards that are open on this rank.
        found_bad: Shards whose copies this rank has found bad in this round, with the reason, and
            whether their bytes are damaged.
    """

    def __init__(
        self,
        parts: Parts,
        inventory: Inventory,
        checkpoint: Checkpoint,
        recovery: Recovery,
        bad: list[BadCopy],
    ) -> None:
        self._parts = parts
        self._inventory = inventory
        self._checkpoint = checkpoint
        self._recovery = recovery
        self._bad = bad
        self.shards: dict[int, SavedShard] = {}
        self.found_bad: dict[int, tuple[str, bool]] = {}

    def identity(self, shard: int) -> ShardIdentity:
        """Return the identity of a shard."""
        return self._checkpoint.shard(shard, self._parts.session_id)

    def plan_recovery(self) -> dict[int, int] | None:
        """Choose the ranks that compute shards which no node holds: they take turns.

        Returns:
            The rank for each shard; ``None`` if some shard cannot be computed.
        """
        world_size = self._parts.ranks.world_size
        try:
            return {shard: shard % world_size for shard in self._recovery.plan()}
        except NoReplicasAvailableError:
            return None

    def open(self, readers: Mapping[int, int], free: Freedom, opened: ExitStack) -> None:
        """Open the shards that this rank reads, and note the copies that are bad.

        Args:
            readers: For each shard the rank that reads it.
            free: Names whose values are loaded as they were saved.
            opened: Closes the shards.
        """
        self.shards, self.found_bad = {}, {}
        for shard, reader in readers.items():
            if reader == self._parts.ranks.rank:
                self._open(shard, self._parts.options.rules, free, opened)

    def open_more(self, shards: Iterable[int], opened: ExitStack) -> None:
        """Open shards of this node for long runs of their tensors alone; as :meth:`open`."""
        for shard in shards:
            if shard not in self.shards:
                self._open(shard, None, NO_FREEDOM, opened)

    @contextmanager
    def noting(self, shard: int) -> Iterator[None]:
        """Context in which a shard is read: that its copy is bad is noted, and raised."""
        try:
            yield
        except (StorageError, CorruptShardError) as error:
            self._note_bad(shard, error)
            raise

    def take_out(self, bad: Sequence[Sequence[Any]]) -> bool:
        """Leave bad copies out of the next round.

        Args:
            bad: For each the rank that read it, and its item of :attr:`found_bad`, in one list.

        Returns:
            Whether there are any.
        """
        for reader, shard, why, is_damaged in bad:
            identity = self.identity(shard)
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
            elif is_damaged and reader == self._parts.ranks.rank:
                # What the node refused once it may give the next time: only bad bytes go.
                verify_again(self._parts.store, identity, f"read: {why}")
        return bool(bad)

    def quarantine_damaged(self) -> None:
        """Quarantine copies that nobody needs any more, if they are bad when read again."""
        for shard, nodes in self._recovery.damaged.items():
            for node, why in nodes.items():
                if self._inventory.reader([node], shard) == self._parts.ranks.rank:
                    verify_again(self._parts.store, self.identity(shard), f"read: {why}")

    def _open(
        self, shard: int, rules: Collection[str] | None, free: Freedom, opened: ExitStack
    ) -> None:
        identity, computed = self.identity(shard), self._recovery.slots.get(shard)
        source: ShardSource | None = None
        try:
            source = (
                self._parts.store.open(identity)
                if computed is None
                else MemorySource(computed.image)
            )
            opened.callback(source.close)
            counted = CountedSource(source, ReadProgress(f"reading {identity}", source.nbytes))
            saved = SavedShard(counted, self._parts.allowed, identity, rules, free)
            # They read private tensors.
            _ = saved.digests, saved.ruled_digests
        except CorruptShardError as error:
            # With good digests another copy says the same.
            self._require_damaged(shard, source, error)
            self._note_bad(shard, error)
        except StorageError as error:
            self._note_bad(shard, error)
        except CheckpointingException:
            raise
        except Exception as error:
            raise incurable(error) from error
        else:
            self.shards[shard] = saved

    def _require_damaged(
        self, shard: int, source: ShardSource | None, error: CorruptShardError
    ) -> None:
        """Raise an error for a shard that contradicts itself, though its bytes are good."""
        if source is None:
            return
        try:
            verify(source, self.identity(shard))
        except (StorageError, CorruptShardError):
            return
        raise incurable(RestoreError(f"{self.identity(shard)}: {error}")) from error

    def _note_bad(self, shard: int, error: CheckpointingException) -> None:
        forget_frames(error)
        self.found_bad[shard] = described(error), isinstance(error, CorruptShardError)
