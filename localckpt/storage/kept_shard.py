"""A rank's shard that is kept in a store, for work that reads it behind training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from localckpt.errors import CorruptShardError, RestoreError, StorageError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.identify import verify
from localckpt.state_dict.lazy_image import LazyImage
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import ShardSource
from localckpt.storage.problem import Problem
from localckpt.storage.store import Store

__all__ = ["KeptShard"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REMEDY = (
    "Copies on other nodes are not fetched for this: use a later checkpoint, or load() this one "
    "first, which puts a copy here"
)


@dataclass(frozen=True, slots=True)
class KeptShard:
    """A committed shard of this node, which is not pruned while this is in use.

    Attributes:
        store: Store that keeps it.
        identity: Identity of the shard.
        allowed: Classes and functions that it may name.
    """

    store: Store
    identity: ShardIdentity
    allowed: SafeGlobals

    def use(self, work: Callable[[LazyImage], T]) -> T:
        """Call ``work`` with the image of the shard.

        A copy that turns out damaged is put in quarantine, and ``work`` is called again with
        another copy that this node has.

        Raises:
            CorruptShardError: This node has no copy that is good.
            StorageError: A copy cannot be read; or the node holds none.
            RestoreError: A copy is bad where it is read, and good when it is read by itself.
            Exception: What ``work`` raises.
        """
        damage: CorruptShardError | None = None
        while True:
            try:
                source = self.store.open(self.identity)
            except StorageError as error:
                if damage is None:
                    raise StorageError(f"{error}. {_REMEDY}") from error
                raise CorruptShardError(
                    f"{damage}. It was put in quarantine, and this node holds no other copy. "
                    f"{_REMEDY}",
                ) from error
            opened = [self.identity]
            with ExitStack() as sources:
                sources.callback(source.close)

                def open_mate(
                    rank: int,
                    opened: list[ShardIdentity] = opened,
                    sources: ExitStack = sources,
                ) -> ShardSource:
                    opened.append(self.identity.checkpoint.shard(rank, self.identity.session_id))
                    mate = self.store.open(opened[-1])
                    sources.callback(mate.close)
                    return mate

                try:
                    return work(LazyImage(source, self.allowed, self.identity, open_mate))
                except CorruptShardError as error:
                    damage = error
            self._quarantine(damage, opened)

    def _quarantine(self, damage: CorruptShardError, opened: Sequence[ShardIdentity]) -> None:
        """Put the copies in quarantine that are bad when they are read by themselves, too."""
        for identity in opened:
            source = self.store.open(identity)
            try:
                with closing(source):
                    verify(source, identity)
            except CorruptShardError as error:
                self.store.quarantine(identity, Problem.of(error))
                logger.error("%s: looking for another copy on this node", error)
                return
        raise RestoreError(
            f"{damage}, though every byte of the shard matches its digest when it is read by "
            f"itself: is the memory of this node defective?"
        ) from damage
