"""A rank's shard that is kept in a store, for work that reads it behind training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from localckpt.errors import CorruptShardError, RestoreError, StorageError
from localckpt.ids import ShardIdentity
from localckpt.state_dict.reader import ImageReader, open_images
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import ImageBytes, ShardSource
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
            opened: list[ShardIdentity] = []
            with ExitStack() as sources:
                try:
                    image = self._open(opened, sources)
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
            self._quarantine(damage, opened)

    def _open(self, opened: list[ShardIdentity], sources: ExitStack) -> ImageReader:
        """Open the image, and those that hold parts of its tensors; notes which."""

        def open_here(identity: ShardIdentity) -> ShardSource:
            source = self.store.open(identity)
            sources.callback(source.close)
            opened.append(identity)
            return source

        return open_images(open_here, self.identity, self.allowed)

    def _quarantine(self, damage: CorruptShardError, opened: Sequence[ShardIdentity]) -> None:
        """Put the copies in quarantine that are bad when they are read by themselves, too."""
        for identity in opened:
            try:
                with closing(self.store.open(identity)) as source:
                    ImageBytes(source, identity).verify()
            except CorruptShardError as error:
                self.store.quarantine(identity, Problem.of(error))
                logger.error("%s: looking for another copy on this node", error)
                return
        raise RestoreError(
            f"{damage}, though every byte of the shard matches its digest when it is read by "
            f"itself: is the memory of this node defective?"
        ) from damage
