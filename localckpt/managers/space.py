"""Memory that saves take, and the check of the node's room."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from localckpt.errors import CheckpointingException
from localckpt.ids import Piece
from localckpt.managers.reports import MemoryPlan
from localckpt.storage.directory import DirectoryStore

__all__ = ["SpaceCheck", "plan_memory"]

logger = logging.getLogger(__name__)


class SpaceCheck:
    """Check of the room for one rank's saves, made once.

    Args:
        store: Keeps the shards.
        most: Number of checkpoints that are kept at most.
    """

    def __init__(self, store: DirectoryStore, most: int) -> None:
        self._store = store
        self._most = most
        self._is_done = False

    def check(self, nodes: Sequence[str]) -> None:
        """Check the room in the first save, once all images of this rank are known.

        Args:
            nodes: For each rank the name of its node.

        Raises:
            StorageError: There is no room for what this rank alone will keep.
        """
        if self._is_done:
            return
        rank = self._store.rank
        logger.info("memory of rank %d: %s", rank, plan_memory(self._store))
        # One more than are kept is there while it is written.
        self._store.check_space(self._most + 1, nodes.count(nodes[rank]))
        self._is_done = True


def plan_memory(store: DirectoryStore) -> MemoryPlan:
    """Plan the memory of this node that saves of a store's rank take.

    Raises:
        CheckpointingException: The size of no image is known yet.
    """
    images = store.image_nbytes
    if Piece(store.rank) not in images:
        raise CheckpointingException(
            "nothing is known of the state yet: call warm_up(state) or save() first"
        )
    return MemoryPlan.of(images, store.rank, *store.planned_nbytes())
