"""Checkpoints on the disk of each node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from localckpt.availability.retention import Retention, node_rules
from localckpt.events.stream import EventStream
from localckpt.managers.store_manager import StoreCheckpointManager
from localckpt.options import OnBusy, OnDivergence, PrivateRule, SaveOptions
from localckpt.ranks.refusals import MANAGER, refused_together
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.disk import DiskStore, ReadOnlyStore

__all__ = ["LocalCheckpointManager"]


class LocalCheckpointManager(StoreCheckpointManager):
    """Keeps each rank's shards, and replicas of others', on the node's own disk.

    All ranks of a node share the directory. With a replication strategy that has its process
    groups, making the manager is a collective: placement is checked at once.

    Args:
        root_local_ckpt_dir: Directory on a disk of this node; made if it is not there.
        session_id, repl_strategy: As for :class:`BaseCheckpointManager`.
        keep_last: Number of complete checkpoints to keep, by default 2; the disk holds one more for
            each save under way. Short for ``retention=Retention(last=...)``.
        retention: Rules by which complete checkpoints are kept: ``last``, at least 1, and ``best``,
            by a metric that is given with saves.
        timeout, process_group, safe_globals, background, strict: As for
            :class:`BaseCheckpointManager`.
        num_buffers: Number of saves that can be under way at once.
        staging_threads: Threads that copy tensors; by default this rank's share of the cores, at
            most 4.
        on_busy: What an asynchronous save does when that many are under way: ``"wait"`` for the
            oldest, or ``"skip"`` itself on all ranks (logged, counted, and noted in ``last_save``).
        guard: Optimizers whose parameters and state, where they are on a GPU, change in their
            ``step`` only. ``save`` returns while those are still being copied, and the next step
            begins after the copies. Replicas in the foreground wait for them; whoever changes these
            tensors in another way calls :meth:`wait_staged` before.
        read_only: Only load, beside a job that may be saving in this session: nothing is made,
            renamed, removed or claimed here.
        events: As for :class:`BaseCheckpointManager`.
        max_attempts: Number of starts of the job that may resume from a checkpoint, begin a save or
            call :meth:`count_attempt`, and end before a later one is complete, in a row. Then it is
            quarantined, and an older one is taken. ``None`` to count none.
        check: Judges each captured state behind training, on each rank: it is given the rank's
            tensors by name, in the memory that is about to be written, and returns why they are
            bad, or ``None``. It may neither change nor keep them. A checkpoint that is bad on any
            rank is marked so, with a warning, and is loaded only if there is no other. A check
            that raises fails the save.
        elastic: Whether a checkpoint is loaded, too, that another number of ranks saved, or whose
            tensors were sharded otherwise: each tensor of ``load(into=)`` is filled from the parts
            of it that the nodes hold.
        private: With ``elastic``, by key prefix, what becomes of values that differ between the
            ranks that saved them: ``"drop"`` leaves each rank what it has, ``"keep"`` gives each
            what the rank of its number had, and a function ``f(values, rank, world_size)`` of the
            values of all ranks that saved makes each rank's. All ranks give the same.
        check_replicas: Compare, in every save of so many, what the state says is equal on several
            ranks: by :func:`localckpt.replicated`, as a ``DTensor`` that is replicated, or in
            Megatron-Core. Digests of the captured tensors are computed behind training and compared
            when the save is finalized. After a difference every save compares, until there is none.
            ``None`` to compare nothing.
        on_divergence: Whether a difference is an ``"error"``, with which the save is rolled back on
            all ranks, or a ``"warn"``-ing, with which the checkpoint is marked bad as by ``check``.
        divide_replicated: Whether the ranks of a node divide what the state says is equal on them,
            by :func:`localckpt.replicated` or as a ``DTensor``: each copies, hashes, writes and
            sends some rows of these tensors, and a load puts them together. Tensors below 64 KiB
            stay whole on every rank. A tensor that is not equal, though the state says so, comes
            back as a mixture of the ranks' values. A save that compares replicas divides nothing;
            ``check`` is given the rows that its rank saves. All ranks give the same.

    Raises:
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Replicas would be lost together with their originals.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep_last: int | None = None,
        retention: Retention | None = None,
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
        with refused_together(MANAGER, process_group, timeout):
            retention = node_rules(keep_last, retention, 2)
            options = SaveOptions.of(locals())

        def open_store() -> DirectoryStore:
            if read_only:
                return ReadOnlyStore(root_local_ckpt_dir, session_id, self.rank, timeout)
            return DiskStore(
                root_local_ckpt_dir,
                session_id,
                self.rank,
                timeout,
                num_buffers=num_buffers,
            )

        self._use_store(session_id, repl_strategy, options, open_store)

    @property
    def local_ckpt_dir(self) -> Path:
        """The folder of this rank's shards."""
        return self.store.folder
