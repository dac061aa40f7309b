"""Checkpoints in the memory of each node, outliving the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from localckpt.availability.retention import Retention, node_rules
from localckpt.errors import CheckpointingException
from localckpt.events.stream import EventStream
from localckpt.managers.store_manager import StoreCheckpointManager
from localckpt.options import OnBusy, OnDivergence, PrivateRule, SaveOptions
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.ranks.refusals import MANAGER, refused_together
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.disk import ReadOnlyStore
from localckpt.storage.memory import MemoryStore, default_root, default_session

__all__ = ["InMemoryCheckpointManager", "agreed_session"]


class InMemoryCheckpointManager(StoreCheckpointManager):
    """Keeps each rank's shards, and replicas of others', in the node's shared memory.

    They are there after the trainer has died, and gone after the node has. A save is one copy into
    the file that keeps it.

    Args:
        session_id: As for :class:`BaseCheckpointManager`. Without it, and without ``root``, it
            names the program: its main script, its arguments and the working directory, as the
            first rank has them.
        repl_strategy: As for :class:`BaseCheckpointManager`.
        keep_last: Number of complete checkpoints to keep, by default 1; memory holds one more for
            each save under way.
        retention: As for :class:`LocalCheckpointManager`.
        root: Directory in shared memory, the same for all ranks of a node; ``None`` for
            ``/dev/shm/localckpt-<uid>``.
        timeout, process_group, safe_globals, background, strict: As for
            :class:`LocalCheckpointManager`.
        num_buffers, staging_threads, on_busy, guard, read_only, events, max_attempts, check: As for
            that class.
        elastic, private: As for that class.
        check_replicas, on_divergence, divide_replicated: As for that class.

    Raises:
        CheckpointingException: There is neither a ``session_id`` nor a ``root``, and nothing to
            name the program by.
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Replicas would be lost together with their originals.
    """

    def __init__(
        self,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep_last: int | None = None,
        retention: Retention | None = None,
        root: str | os.PathLike[str] | None = None,
        timeout: float = 300.0,
        process_group: dist.ProcessGroup | None = None,
        safe_globals: Iterable[Any] = (),
        num_buffers: int = 2,
        staging_threads: int | None = None,
        on_busy: OnBusy = "wait",
        guard: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        background: bool | None = None,
        strict: bool = False,
        read_only: bool = False,
        events: EventStream | None = None,
        max_attempts: int | None = None,
        check: Callable[[Mapping[str, torch.Tensor]], str | None] | None = None,
        elastic: bool = False,
        private: Mapping[str, PrivateRule] | None = None,
        check_replicas: int | None = None,
        on_divergence: OnDivergence = "error",
        divide_replicated: bool = False,
    ) -> None:
        names_itself = root is None and not session_id
        with refused_together("session" if names_itself else MANAGER, process_group, timeout):
            retention = node_rules(keep_last, retention, 1)
            options = SaveOptions.of(locals())
            if names_itself and read_only:
                raise CheckpointingException(
                    f"read_only=True in {default_root()}: give the session_id of the job whose "
                    f"checkpoints are to be loaded (localckpt ls shows them)"
                )
        if names_itself:
            ranks = Ranks("session", process_group, timeout)
            try:
                session_id = agreed_session(ranks)
            finally:
                ranks.close()

        def open_store() -> DirectoryStore:
            place = root or default_root()
            if read_only:
                return ReadOnlyStore(place, session_id, self.rank, timeout)
            return MemoryStore(
                place,
                session_id,
                self.rank,
                timeout,
                num_buffers=num_buffers,
                keep_last=options.retention.most,
            )

        self._use_store(session_id, repl_strategy, options, open_store)


def agreed_session(ranks: Ranks) -> str:
    """Name the session of a program that gives none, by the first rank; all ranks call it.

    Raises:
        CheckpointingException: As :func:`default_session`; on all ranks.
        PeerLostError: A rank did not answer in time.
    """
    return ranks.decide(
        "name the session",
        lambda: default_session() if ranks.is_root else "",
        lambda names: names[ranks.root],
        read=shaped(str),
    )
