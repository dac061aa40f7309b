"""A rank's shard that is kept in a store, for work that reads it behind training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from localckpt.errors import CorruptShardError, RestoreError, StorageError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.identify import verify
from localckpt.state_dict.lazy_image import LazyImage
from localckpt.state_dict.safe_globals import SafeGlobals
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
            with closing(source):
                try:
                    return work(LazyImage(source, self.allowed, self.identity))
                except CorruptShardError as error:
                    damage = error
            self._quarantine(damage)

    def _quarantine(self, damage: CorruptShardError) -> None:
        """Put the copy in quarantine if it is bad when it is read by itself, too."""
        source = self.store.open(self.identity)
        try:
            with closing(source):
                verify(source, self.identity)
        except CorruptShardError as error:
            self.store.quarantine(self.identity, Problem.of(error))
            logger.error("%s: looking for another copy on this node", error)
            return
        raise RestoreError(
            f"{damage}, though every byte of the shard matches its digest when it is read by "
            f"itself: is the memory of this node defective?"
        ) from damage
