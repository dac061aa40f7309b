"""A rank's shard that is kept in a store, for work that reads it behind training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from localckpt.errors import CorruptShardError, StorageError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.reader import ImageReader, OpenImages
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.catalog import Problem
from localckpt.storage.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptShard:
    """A committed shard of this node, which is not pruned while this is in use."""

    store: Store
    identity: ShardIdentity
    allowed: SafeGlobals

    def use(self, work: Callable[[ImageReader], T]) -> T:
        """Call ``work`` with the image of the shard, and again with another copy if it is damaged.

        Raises CorruptShardError without another one on this node, and RestoreError if a copy is bad
        where it is read, and good when it is read by itself.
        """
        damage: CorruptShardError | None = None
        while True:
            with closing(OpenImages(self.store.open, self.allowed)) as images:
                try:
                    image = images.open(self.identity)
                    images.join(image)
                except StorageError as error:
                    if damage is None:
                        raise
                    raise CorruptShardError(
                        f"{damage}. It was put in quarantine, and this node holds no other copy"
                    ) from error
                except CorruptShardError as error:
                    damage = error
                else:
                    try:
                        return work(image)
                    except CorruptShardError as error:
                        damage = error
                images.find_bad(damage)
                for identity, bad in images.bad.items():
                    if isinstance(bad, StorageError):
                        raise bad
                    self.store.quarantine(identity, Problem.of(bad))
                    logger.error("%s: looking for another copy on this node", bad)
