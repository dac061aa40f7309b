"""What the disk and the memory manager have in common: shards are images in a store."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from localckpt.errors import CheckpointingException, PeerLostError, StorageError
from localckpt.ids import CkptID, Series, ShardIdentity
from localckpt.managers.base import BaseCheckpointManager
from localckpt.managers.in_flight import forgotten
from localckpt.managers.joining import JOINING
from localckpt.managers.ordering import newest_first
from localckpt.managers.redundancy import Redundancy
from localckpt.managers.reports import MemoryPlan, SaveUnderWay
from localckpt.managers.shelf import LoadOptions
from localckpt.managers.stored import StoreShelf
from localckpt.ranks.ranks import Ranks
from localckpt.replication.strategies import LazyCliqueReplicationStrategy, ReplicationStrategy
from localckpt.state_dict.basic import wrapped
from localckpt.storage.store import Store
from localckpt.storage.write import write_shards

__all__ = ["OnBusy", "StoreCheckpointManager"]

logger = logging.getLogger(__name__)

OnBusy = Literal["wait", "skip", "error"]
"""What an asynchronous save does when older ones still use all staging buffers."""


class StoreCheckpointManager(BaseCheckpointManager):
    """A manager whose five hooks work on a store; made by its subclasses."""

    _keeps_images = True

    def __init__(
        self,
        session_id: str,
        repl_strategy: ReplicationStrategy | None,
        *,
        keep_last: int,
        timeout: float,
        process_group: dist.ProcessGroup | None,
        async_worker: Literal["thread", "process"],
        safe_globals: Iterable[Any],
        num_buffers: int,
        staging_threads: int | None,
        on_busy: OnBusy,
        guard: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        background: bool | None,
        strict: bool,
        read_only: bool,
    ) -> None:
        for name, number in (
            ("keep_last", keep_last),
            ("num_buffers", num_buffers),
            ("staging_threads", staging_threads),
        ):
            if number is not None and number < 1:
                raise CheckpointingException(f"{name} is {number}; it must be at least 1")
        if on_busy not in get_args(OnBusy):
            raise CheckpointingException(
                f"on_busy is {on_busy!r}; it can be one of {', '.join(map(repr, get_args(OnBusy)))}"
            )
        self._guard = [guard] if isinstance(guard, torch.optim.Optimizer) else list(guard)
        if async_worker == "process" and self._guard:
            raise CheckpointingException(
                "guard works with async_worker='thread' only: another process cannot wait for "
                "copies of this one's GPU"
            )
        if async_worker == "process" and type(self)._save is not StoreCheckpointManager._save:
            raise CheckpointingException(
                f"{type(self).__name__} has a _save of its own, which the built-in worker process "
                f"would not call: use async_worker='thread'"
            )
        super().__init__(
            session_id,
            repl_strategy,
            timeout=timeout,
            process_group=process_group,
            async_worker=async_worker,
            safe_globals=safe_globals,
            background=background,
            strict=strict,
        )
        # Here, so that all ranks have made as many, whatever becomes of their stores.
        self._copying = Ranks("redundancy", process_group, timeout)
        self.keep_last = keep_last
        self.num_buffers = num_buffers
        self.on_busy = on_busy
        self._staging_threads = staging_threads
        self._is_first_save = True
        self.read_only = read_only

    def _use(self, open_store: Callable[[], Store]) -> None:
        try:
            store = open_store()
        except Exception as error:
            # If they cannot be told, the other ranks end at their deadline; what matters is why.
            with suppress(PeerLostError):
                self._coordinator.post_failure(JOINING, error)
            raise
        self._stored = StoreShelf(
            store, self._allowed, self.timeout, self._staging_threads, self._guard
        )
        self._keep_on(self._stored)
        if not self.read_only:
            self._redundancy = Redundancy(
                self._stored,
                self._strategy,
                self.session_id,
                self._copying,
                self._saving,
                self._known,
            )
        lazy = isinstance(self.repl_strategy, LazyCliqueReplicationStrategy)
        if self.repl_strategy is not None and not lazy:
            # A placement that protects from nothing is an error now, not at the first save.
            try:
                self._join()
            except BaseException:
                self._stored.close()
                raise

    def close(self) -> None:
        super().close()
        self._copying.close()

    @property
    def store(self) -> Store:
        """This node's store."""
        return self._stored.store

    def warm_up(self, state_dict: Any) -> None:
        """Make ready for saves of such a state, in the background; its values are not looked at.

        Lays it out and makes the staging buffers, which the first save would have to wait for.

        Raises:
            CheckpointingException: The state holds something that cannot be saved.
        """
        self._require_writable()
        self._finish_copies()
        self._stored.warm_up(wrapped(state_dict), self._identity(0))

    def wait_staged(self) -> None:
        """Return when no save reads the state any more, so that anything may change it.

        Only with ``guard`` is there something to wait for, and its optimizers wait by themselves.
        """
        self._stored.wait_staged()

    def memory_plan(self) -> MemoryPlan:
        """What saves take of this node's memory for this rank.

        Raises:
            CheckpointingException: Nothing was saved yet, nor :meth:`warm_up` called.
        """
        images = self._stored.image_nbytes
        if Series(self.rank) not in images:
            raise CheckpointingException(
                "nothing is known of the state yet: call warm_up(state) or save() first"
            )
        return self._memory_plan(images)

    @abstractmethod
    def _memory_plan(self, images: Mapping[Series, int]) -> MemoryPlan:
        """:meth:`memory_plan` for images of these sizes."""

    def _may_start(self, iteration: int, is_async: bool) -> bool:
        if self.on_busy == "wait" or not is_async:
            self._wait_for_older(iteration)
            return True
        told = self._coordinator.gather(
            "see whether buffers are free", [self._stored.is_busy(), self._in_flight.over()]
        )
        # What is over on all ranks is finalized here, before anything is skipped because of it.
        for _ in range(min(over for _, over in told)):
            if self._is_full:
                self._finalize_oldest()
        ranks = [
            str(rank)
            for rank, (is_busy, over) in enumerate(told)
            if is_busy or (self._is_full and not over)
        ]
        if not ranks:
            return True
        why = (
            f"iteration {iteration} is not saved: the {self.num_buffers} staging buffers of "
            f"rank{'s'[: len(ranks) > 1]} {', '.join(ranks)} are busy with older saves"
        )
        if self.on_busy == "error":
            raise CheckpointingException(
                f"{why}. Save less often, or with more buffers (num_buffers), or let the save wait "
                f"(on_busy='wait')"
            )
        logger.warning("%s", why)
        return False

    @property
    def _is_full(self) -> bool:
        """Whether as many saves are in flight as may be; the same on all ranks."""
        return len(self._in_flight.limited) >= self.num_buffers

    def _wait_for_older(self, iteration: int) -> None:
        """Finalize older saves until one more may be in flight.

        Only polls finalize saves otherwise, and there may be fewer polls than saves: checkpoints
        that nobody retires would pile up.
        """
        while self._is_full and self._finalize_oldest():
            pass
        waiting = self._in_flight.not_scheduled()
        if self._is_full and waiting and self._stored.is_busy():
            raise forgotten(
                waiting, f"They have all buffers, so nothing was begun of iteration {iteration}."
            )

    def _finalize_oldest(self) -> bool:
        """Wait for the oldest save that a queue of ours carries out; whether it was that one."""
        oldest = self._in_flight.limited[0]
        if oldest.ticket is None:
            return False
        oldest.ticket.finalize()
        # A queue that was left with an error meanwhile has finalized nothing.
        return oldest not in self._in_flight

    def _leave(self, save: SaveUnderWay) -> None:
        super()._leave(save)
        self._stored.leave(save.identity.iteration)

    def _check_room(self) -> None:
        if self._is_first_save:
            logger.info("memory of rank %d: %s", self.rank, self.memory_plan())
            assert self._domains is not None
            ranks_here = self._domains.count(self._stored.failure_domain)
            images = self._stored.image_nbytes.values()
            # One more than are kept is there while it is written.
            self.store.check_room(images, self.keep_last + 1, ranks_here)
            self._is_first_save = False

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        found = [record.identity for record in self._stored.inventory()]
        return [identity.ckpt_id for identity in found if not identity.is_parity]

    def _load(self, ckpt_id: CkptID) -> Any:
        return self._stored.restore(self._newest(ckpt_id), None, LoadOptions())[0]

    def _save(self, state_dict: Any, ckpt_id: CkptID) -> None:
        """Carry out a write; ``state_dict`` is the staged shard's :class:`ShardWrite`."""
        write_shards([state_dict])

    def _let_go(self, iteration: int) -> None:
        self._cleanup(iteration)

    def _cleanup(self, iteration: int) -> None:
        self._stored.settle(iteration)
        if (over := self._known.keep(iteration, self.keep_last)) is not None:
            self.store.retire(lambda shard: over.takes(shard.checkpoint), self._adopted_ranks())

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._stored.take_back(iteration)

    def _adopted_ranks(self) -> set[int]:
        """Ranks with a folder on this node that now run elsewhere; one rank looks after them."""
        assert self._domains is not None
        here = [r for r, d in enumerate(self._domains) if d == self._stored.failure_domain]
        return self.store.claim.ranks() - set(here) if self.rank == here[0] else set()

    def _newest(self, ckpt_id: CkptID) -> ShardIdentity:
        there = [record.identity for record in self._stored.inventory()]
        found = [i for i in there if i.ckpt_id == ckpt_id and not i.is_parity]
        if not found:
            raise StorageError(f"this node does not hold {ckpt_id}")
        lineages = {i.lineage.epoch: i.lineage for i in found if i.lineage is not None}
        by_checkpoint = {identity.checkpoint: identity for identity in found}
        return by_checkpoint[newest_first(by_checkpoint, lineages)[0]]
