"""Manager of the nodes' checkpoints: the calls that all ranks make.

``save.py`` is the life of a save, ``look.py`` and ``load.py`` are a restart. Here is what is made
and closed with a manager, and the rule that it makes one call at a time.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex, TypeVar, overload

import torch
import torch.distributed as dist

from localckpt.async_save.request import AsyncRequest
from localckpt.availability.durability import Durability
from localckpt.availability.explanation import Explanation
from localckpt.availability.inventory import Inventory
from localckpt.availability.retention import Metrics
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.events.stream import EventStream
from localckpt.failure_texts import ranks_named, shown
from localckpt.ids import Checkpoint, CkptID, ShardIdentity
from localckpt.interrupted import OfOneProcess, interrupt_behind
from localckpt.lineage import Lineage, Point
from localckpt.managers.context import Context, checked_origin
from localckpt.managers.copies import Reprotection
from localckpt.managers.load import Load
from localckpt.managers.look import Finder
from localckpt.managers.promotion import DrainTarget, Promotion, promotable
from localckpt.managers.repair import open_in_place
from localckpt.managers.reports import LoadReport, SaveReport
from localckpt.managers.restoring import Loaded, LoadOptions, Survey
from localckpt.managers.save import Save, Saves, never_scheduled
from localckpt.options import Options
from localckpt.ranks.deadline import Deadline, answered
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import MANAGER, Ranks, refused_together, shaped
from localckpt.replication.strategies import (
    LazyCliqueReplicationStrategy,
    NoReplication,
    ReplicationStrategy,
)
from localckpt.state_dict.basic import give_states, unwrapped, wrapped
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import TargetRules
from localckpt.storage.catalog import Problem
from localckpt.storage.directory import DirectoryStore, KeptImages
from localckpt.storage.kept_shard import KeptShard
from localckpt.storage.names import default_session
from localckpt.storage.store import Store
from localckpt.trust import is_orderly

logger = logging.getLogger(__name__)

_SHOWN = 3
# Longest wait for the end of a call that was aborted.
_LEAVING_S = 5.0

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def one_call(method: F) -> F:
    """Decorate a method of a manager that cannot be called while another one is under way."""

    @wraps(method)
    def guarded(manager: CheckpointManager, /, *args: Any, **kwargs: Any) -> Any:
        return manager._call(method.__name__, partial(method, manager, *args, **kwargs))

    return guarded  # type: ignore[return-value]


class CheckpointManager(OfOneProcess):
    """Saves and loads this rank's state together with all other ranks of the job.

    Every rank makes its manager and calls its methods in the same order as the others. A call that
    an interrupt ends, such as Ctrl-C, closes the manager; what is on the nodes stays.

    Args:
        session_id: A name for the training run; two runs may share a directory.
        repl_strategy: Protects this rank's shards on other nodes; ``None`` for none.
        options: Options of the manager.
        open_store: Opens the store of this rank, by its ranks and allowed classes, in another
            ``root`` than the manager's if that is given.

    Attributes:
        store: Keeps this rank's pieces.
        latest_iteration: Result of the last ``find_latest``; ``-1`` makes the next one look again.
        last_save: The last save on this rank.
        last_load: The last load on this rank.
        skipped_saves: Number of saves that found no room and were left out.
        degraded_saves: Number of saves that are complete with fewer replicas than asked for.
        is_to_stop: Tells whether the job is to stop, so that no save begins that has to wait for
            storage. A training loop may set it.
        read_only: True for a manager that only loads.
    """

    store: Store
    _noun = "manager"

    def __init__(
        self,
        session_id: str,
        repl_strategy: ReplicationStrategy | None,
        options: Options,
        open_store: Callable[..., Store],
    ) -> None:
        super().__init__()
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.read_only = options.read_only
        self.last_save: SaveReport | None = None
        self.last_load: LoadReport | None = None
        self.skipped_saves = self.degraded_saves = 0
        self.is_to_stop: Callable[[], bool] = lambda: False
        self._under_way = threading.Lock()
        self._calling, self._thread = "", 0
        self._options, self._open_store = options, open_store
        # Of a store that was left.
        self._kept = KeptImages()
        self._open()

    def _open(self) -> None:
        """Make all that depends on the ranks of the job; all ranks call it."""
        self._name_session()
        options, repl_strategy = self._options, self.repl_strategy
        self.latest_iteration = -1
        # What was loaded or saved last.
        self._current: Checkpoint | None = None
        self._promotions: list[Promotion] = []
        with refused_together(MANAGER, options.process_group, options.timeout):
            # Without the session in its name: ranks with different ones must meet, to learn of it.
            self._ranks = Ranks(
                MANAGER, options.process_group, options.timeout, hint=lambda: self._hint
            )
            # Before anything can fail, so that all ranks have made as many.
            reprotecting = Ranks("redundancy", options.process_group, options.timeout)
            self._all_ranks = self._ranks, reprotecting
            strategy = repl_strategy or NoReplication(options.timeout, options.process_group)
            allowed, events = SafeGlobals(options.safe_globals), options.events or EventStream()
            try:
                self.store = self._open_store(self._ranks, allowed)
            except BaseException:
                for ranks in self._all_ranks:
                    ranks.abandon()
                raise
            self._context = Context(
                self.session_id, options, events, self._ranks, strategy, allowed, self.store
            )
            self._saves = Saves(
                self._context,
                lambda: self.is_to_stop(),  # noqa: PLW0108 - it may be set later
                is_protected=repl_strategy is not None,
            )
            self._finder = Finder(self._context)
            self._reprotection: Reprotection | None = None
            if isinstance(self.store, DirectoryStore):

                def note_quarantined(path: Path, problem: Problem) -> None:
                    details = {"path": str(path), "error": str(problem)}
                    events.emit("quarantined", details=details)

                self.store.on_quarantine = note_quarantined
                kept, self._kept = self._kept, KeptImages()
                self.store.adopt(kept)
                if not options.read_only:
                    self._reprotection = Reprotection(self._context, reprotecting)
        if repl_strategy is None or isinstance(repl_strategy, LazyCliqueReplicationStrategy):
            return
        if self._context.images is not None:
            # A placement that protects from nothing is an error now, not at the first save.
            try:
                self._join()
            except BaseException:
                self._close(is_abandoned=True, keeps_memory=True)
                raise

    def _name_session(self) -> None:
        """Agree on the name of a session that was given none."""

    def rejoin(
        self,
        *,
        repl_strategy: ReplicationStrategy | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Work with the ranks of the process group as they are now; all of them call it.

        For survivors of a job whose members have changed: after ``destroy_process_group`` and a new
        ``init_process_group``, or a change of members in place. A rank that is new makes a manager
        meanwhile. Whatever is under way is aborted, and saves that were not finalized are given up,
        also those that a queue has: make another queue. What comes next is as at any start,
        :meth:`load` with ``into``, but that this rank reads its newest checkpoint from memory, if
        that is still there.

        Args:
            repl_strategy: Takes the place of the one that there is; needed where that was given
                process groups.
            process_group: The same of the group of a manager that was given one.

        Raises:
            MismatchError: The ranks do not belong together, or the strategy cannot join again.
            StorageError: This rank's directory cannot be used.
            PeerLostError: A rank did not come in time. Rejoin again, or close.
        """
        given = {} if process_group is None else {"process_group": process_group}
        strategy = self.repl_strategy if repl_strategy is None else repl_strategy
        self.rejoin_with(strategy, is_new=repl_strategy is not None, **given)

    def rejoin_with(
        self, strategy: ReplicationStrategy | None, *, is_new: bool, **options: Any
    ) -> None:
        """Rejoin with a strategy, or none; ``is_new`` is one made for the ranks as they are.

        ``options`` are those that have other values from now on.
        """
        self._begin_rejoin()
        if not self._under_way.acquire(timeout=_LEAVING_S):
            raise CheckpointingException(
                f"rejoin() was called while {self._calling or 'another call'}() goes on in a "
                f"thread that abort() did not end: does its storage answer? Nothing was changed"
            )
        try:
            if not self._has_left:
                self._close(is_abandoned=True, keeps_memory=True)
            self.begin_life()
            with self._abort:
                if strategy is not None and not is_new:
                    strategy.rejoin()
                self.repl_strategy = strategy
                self._options = replace(self._options, **options)
                self._open()
        except BaseException:
            self._fail_rejoin()
            raise
        finally:
            self._under_way.release()

    def _end_waits(self) -> None:
        for ranks in self._all_ranks:
            ranks.cut_off()
        self._context.strategy.abort(0.0)
        for promotion in tuple(self._promotions):
            promotion.stop()
        if self._reprotection is not None:
            self._reprotection.abort()
        self._saves.repairs.abort()
        self._saves.prefetches.abort()

    def __repr__(self) -> str:
        images = self._context.images
        return shown(self, self.session_id, *([] if images is None else [images.root]))

    # The protocol.

    @property
    def rank(self) -> int:
        """This process's rank among those of the job."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._ranks.world_size

    @property
    def safe_globals(self) -> tuple[Any, ...]:
        """Classes and functions that a checkpoint may name, beyond the defaults."""
        return tuple(self._options.safe_globals)

    @overload
    def save(
        self,
        state_dict: Any,
        iteration: SupportsIndex,
        is_async: Literal[True],
        *,
        metrics: Metrics | None = None,
    ) -> AsyncRequest: ...

    @overload
    def save(
        self,
        state_dict: Any,
        iteration: SupportsIndex,
        is_async: bool = False,
        *,
        metrics: Metrics | None = None,
    ) -> AsyncRequest | None: ...

    @one_call
    def save(
        self,
        state_dict: Any,
        iteration: SupportsIndex,
        is_async: bool = False,
        *,
        metrics: Metrics | None = None,
    ) -> AsyncRequest | None:
        """Save this rank's state; all ranks call it.

        What is saved is the value that the state has at the call; afterwards it may be changed.

        Args:
            state_dict: A plain dict, a :class:`TensorAwareStateDict`, or any object graph. Values
                of the dict that have ``state_dict`` and ``load_state_dict`` (a model, an optimizer)
                are saved as the state that they return.
            iteration: Its number, above that of every checkpoint this manager saved or loaded: an
                ``int``, or an integer of numpy.
            is_async: Return as soon as the state is captured.
            metrics: Numbers by name, such as a loss, for ``Retention(best=...)``, which notes the
                one that it names. Those of the first rank count, and are read there.

        Returns:
            ``None`` once the checkpoint is complete on all ranks; with ``is_async`` the request to
            hand to an :class:`AsyncCallsQueue`, which raises whatever goes wrong from here on.

        Raises:
            CheckpointingException: The iteration is not one that can be saved, or the request of an
                older save was never scheduled; nothing was done. Or an older save, which this one
                waited for, failed; the same on every rank. Or it is the manager's first save, and
                the state of some rank could not be loaded again; the same on every rank, and
                nothing was done. From the second save on such a state fails as any save does:
                asking would hold up training.
            UnsafeGlobalError: As before, if that is because of classes that are not allowed.
            SaveFailedError: The save failed on some rank (a StorageError, if a node refused). It is
                raised on every rank, older checkpoints are as they were, and training may go on and
                save again.
            DivergenceError: With ``check_replicas``: tensors that should be equal on several ranks
                are not. It is raised on every rank, and older checkpoints are as they were.
            PeerLostError: A rank did not answer in time.
        """
        called = time.monotonic()
        self._require_writable()
        context, saves = self._context, self._saves
        iteration = context.epoch.checked(iteration)
        context.resuming.count()
        with context.events.noting_failure("save", called, iteration):
            saves.give_up_forgotten(iteration)
            self._join()
            asked = time.monotonic()
            is_admitted = saves.admit(iteration, is_async)
            waited_s = time.monotonic() - asked
            if is_admitted:
                state_dict = saves.capture.checked(state_dict, iteration)
                self._begin_epoch(iteration)
        if not is_admitted:
            context.events.emit("save", began=called, step=iteration, outcome="skipped")
            self.last_save = SaveReport(iteration, 0, 0.0, None, 0.0, skipped=True)
            self.skipped_saves += 1
            return AsyncRequest(None, (), [])
        self._forget_latest()
        save = Save(saves, context.epoch.next_identity(iteration), called, waited_s, metrics)
        save.capture(state_dict)
        self.last_save = save.report()
        if is_async:
            return save.request(partial(self._finalize, save))
        save.run()
        self._end_save(save)
        return None

    def _finalize(self, save: Save) -> None:
        # A save that waits for older ones finalizes them, and a poll that was interrupted does so
        # again.
        if not save.is_complete:
            self._call("finalize", partial(self._end_save, save), inside=True)

    def _end_save(self, save: Save) -> None:
        self._await_reprotected()
        # What find_latest saw while this save was under way is out of date.
        self._forget_latest()
        reached = save.finalize()
        self._current = save.identity.checkpoint
        if reached.lacking:
            self.degraded_saves += 1
            logger.warning("%s", reached)
            fields = ("lacking", "copies", "wanted")
            details = {name: getattr(reached, name) for name in fields}
            self._context.events.emit("degraded", step=reached.iteration, details=details)
        report = save.report()
        if self.last_save is not None and self.last_save.iteration == report.iteration:
            self.last_save = report
        logger.info("saved %s; %s", report, reached.reached)

    @one_call
    def find_latest(self) -> int:
        """Iteration of the newest complete checkpoint, or ``-1``; all ranks call it.

        The answer is kept until the next save, or until ``latest_iteration`` is set to ``-1``.

        Raises:
            MismatchError: The ranks do not belong together, or the newest checkpoint was saved by
                another number of ranks.
            PeerLostError: A rank did not answer in time.
        """
        return self._find_latest() if self.latest_iteration == -1 else self.latest_iteration

    def _find_latest(self) -> int:
        """Find the newest complete checkpoint, whatever was found before."""
        self._join()
        newest = self._finder.newest()
        self.latest_iteration = -1 if newest is None else newest.iteration
        return self.latest_iteration

    @one_call
    def begin(self, from_iteration: SupportsIndex, *, lineage: Lineage | None = None) -> None:
        """Say that the job resumes from elsewhere, not from what :meth:`load` gives; all ranks.

        What is saved next descends from there. Complete checkpoints on the nodes that are above
        that iteration are given up: the job has gone back from them. A
        :class:`GlobalCheckpointManager` that was given this manager calls it by itself.

        Args:
            from_iteration: The iteration that the job goes on from; -1 for the beginning.
            lineage: Lineage of the epoch that saved it, where it is known.

        Raises:
            CheckpointingException: That is no iteration, or saves are in flight.
            MismatchError: The ranks do not resume from the same.
            PeerLostError: A rank did not answer in time.
        """
        self._require_writable()
        from_iteration = checked_origin(from_iteration)
        self._saves.require_none(f"go on from iteration {from_iteration}")
        self._join()
        self._context.epoch.resume_elsewhere(from_iteration, lineage)
        # What was loaded here before is not what training goes on from.
        self._context.resuming.take_back()
        self._current = None

    def leave(self, points: Sequence[Point]) -> None:
        """Give up checkpoints on shared storage that the job goes back from; asks no other rank.

        Args:
            points: The checkpoints, the same on all ranks.
        """
        self._require_writable()
        self._context.epoch.leave(points)

    def lineage_of(self, iteration: int) -> Lineage | None:
        """Return the lineage of the newest complete checkpoint of an iteration, if it has one."""
        complete = self._context.checkpoints.complete
        epochs = (c.generation.epoch_id for c in complete if c.iteration == iteration)
        epoch = next(epochs, None)
        return None if epoch is None else self._context.checkpoints.lineages.get(epoch)

    @one_call
    def lineage_of_save(self, iteration: int) -> Lineage:
        """Return the lineage under which an iteration is saved now; all ranks call it.

        Raises:
            CheckpointingException: Some node cannot be read, or cannot note it; on all ranks.
            PeerLostError: A rank did not answer in time.
        """
        self._require_writable()
        if self._context.epoch.lineage is None:
            self._join()
        return self._begin_epoch(iteration)

    @one_call
    def explain(self) -> Explanation:
        """Say which checkpoint a restart would load, and why none that is newer.

        All ranks call it, and get the same: what each node holds of each checkpoint, which are
        complete, and which nodes may be lost. ``print`` shows it as a table.

        Raises:
            MismatchError: The ranks do not belong together.
            CheckpointingException: Some node cannot be read; on all ranks.
            PeerLostError: A rank did not answer in time.
        """
        self._join()
        return self._finder.explain()

    @one_call
    def all_iterations(self) -> list[int]:
        """Iterations that :meth:`load` can give, in the order in which a restart tries them.

        All ranks call it, and get the same.

        Raises:
            MismatchError: As for :meth:`find_latest`.
            PeerLostError: A rank did not answer in time.
        """
        if self._finder.found is None:
            self._find_latest()
        return self._finder.iterations()

    @one_call
    def load(
        self,
        *,
        into: Any = None,
        iteration: int | None = None,
        map_location: str | torch.device | None = None,
        partial: bool = False,
        allow_dtype_change: bool = False,
    ) -> tuple[Any, CkptID]:
        """Read this rank's shard of a complete checkpoint; all ranks call it.

        Every block is verified as it is read. A copy that turns out bad is quarantined on its node,
        and another copy is taken. If a shard has none left, all ranks take an older checkpoint,
        unless one was asked for.

        Args:
            into: A state of the same structure as the saved one, whose tensors are filled in place.
                After an error they may be partly filled. Values of a dict that have ``state_dict``
                and ``load_state_dict`` (a model, an optimizer) take their state from what was
                loaded, and stand in its place in the state that is returned.
            iteration: The checkpoint; ``None`` for the newest. The next save goes on from what was
                loaded, and overrules the newer checkpoints that the job went back from.
            map_location: The device of new tensors; ``None`` for the one each was saved from.
            partial: Whether ``into`` may lack tensors that were saved. Those come back as new
                ones; without it they are an error, as a name that was mistyped would be.
            allow_dtype_change: Whether tensors of ``into`` may have another dtype than was saved.
                Their values are then converted by ``copy_``; without it they are an error.

        Returns:
            The state as it was given to ``save`` (with ``into``, holding the given tensors), and
            its ID, which says which iteration it is.

        Raises:
            CheckpointingException: The job is to go back while saves are in flight.
            NoReplicasAvailableError: No checkpoint is complete, or not the one that was asked for;
                it says which shards are gone.
            MismatchError: ``into`` has another structure; or another number of ranks saved the
                checkpoint, and there is no ``into``, or values that differ between these ranks have
                no rule. Nothing was changed.
            RestoreError: The bytes are good, and some rank cannot rebuild its state from them: a
                class changed, its ``__setstate__`` raised, memory ran out. It is raised on every
                rank and names the class and the path in the state. Nothing is renamed, and no older
                checkpoint is taken; ``load`` may be called again.
            UnsafeGlobalError: A shard names a class or function that is not allowed.
            PeerLostError: A rank did not answer in time.
        """
        rules = TargetRules(is_partial=partial, converts=allow_dtype_change)
        options = LoadOptions.of(into, map_location, rules)
        return self._load_as(options, iteration)

    def load_as(self, options: LoadOptions, iteration: int | None) -> tuple[Any, CkptID]:
        """Load with options for which :meth:`load` has no arguments, as ``Checkpointer`` does."""
        return self._call("load", partial(self._load_as, options, iteration))

    def _load_as(self, options: LoadOptions, iteration: int | None) -> tuple[Any, CkptID]:
        called = time.monotonic()
        if iteration is not None:
            self._saves.require_none(f"load iteration {iteration}")
        try:
            loaded = self._run_load(options, iteration)
        except NoReplicasAvailableError:
            if iteration is None:
                self.latest_iteration = -1
            raise
        reached, seconds = loaded.checkpoint.iteration, time.monotonic() - called
        if iteration is None:
            self.latest_iteration = reached
        self.last_load = LoadReport(reached, loaded.nbytes, seconds, loaded.came_from)
        logger.info("loaded %s", self.last_load)
        state = give_states(options.given, unwrapped(loaded.state), loaded.left)
        self._current = loaded.checkpoint
        self._context.resuming.begin(loaded.checkpoint)
        return state, CkptID(reached, self.rank, self.session_id)

    @one_call
    def survey(self, survey: Survey, iteration: int | None) -> tuple[int, Any]:
        """Return the iteration that :meth:`load` would give, and a verdict on its images."""
        loaded = self._run_load(LoadOptions(is_elastic=True, survey=survey), iteration)
        return loaded.checkpoint.iteration, loaded.state

    @one_call
    def load_from(self, store: Store, shard: ShardIdentity, options: LoadOptions) -> None:
        """Load a checkpoint whose images another store has, which all ranks read.

        Args:
            store: The store, such as that of a checkpoint on shared storage.
            shard: Identity of any of the images.
            options: Options of the load, of which a state to fill is one.

        Raises:
            CorruptShardError: Some image is damaged, or cannot be read; the same on all ranks.
            MismatchError: The state does not fit; nothing was changed.
        """
        checkpoint, place = shard.checkpoint, store.domain
        inventory = Inventory({place: range(self.world_size)})
        for rank in range(checkpoint.world_size):
            inventory.add(checkpoint, rank, place, 1)
        placed = [place] * self.world_size
        context = replace(self._context, session_id=shard.session_id, store=store, placed=placed)
        _load_images(place, checkpoint, context, inventory, options)

    @one_call
    def load_live(
        self, options: LoadOptions, iteration: int, holders: Mapping[int, int], held: Any
    ) -> int:
        """Fill the states of some ranks from what the ``holders`` have; all ranks call it.

        These are ranks, with their numbers in the meshes of what they have. ``options.fills`` says
        whether this rank's state is filled; ``held`` is what it has as a holder. Returns the bytes
        that were filled here. Raises CorruptShardError if a holder's image in memory is bad, and
        MismatchError, before anything is changed, if the states differ, or the holders lack parts.
        """
        # As if a job of the holders alone had saved it, each on a node of its own.
        identity = replace(self._context.epoch.identity(iteration), world_size=len(holders))
        places = [f"the memory of rank {rank}" for rank in range(self.world_size)]
        inventory = Inventory({place: [rank] for rank, place in enumerate(places)})
        for shard, holder in enumerate(holders):
            inventory.add(identity.checkpoint, shard, places[holder], 1)
        context, images = replace(self._context, placed=places), self._images("load_live")
        with ExitStack() as captured:
            with Attempt() as capturing:
                if self.rank in holders:
                    mine = replace(identity, rank=[*holders].index(self.rank))
                    hold = partial(self._saves.capture.held, held, mine, images)
                    captured.enter_context(hold([*holders.values()]))
            self._ranks.decide(f"capture the live state of iteration {iteration}", capturing)
            place = f"the memory of {ranks_named([*holders])}"
            return _load_images(place, identity.checkpoint, context, inventory, options)

    def _run_load(self, options: LoadOptions, iteration: int | None) -> Loaded:
        """Load a checkpoint, with ``read_only`` another one if a job prunes it meanwhile."""
        if self._finder.found is None:
            self._find_latest()
        self._await_reprotected()
        # They write files of what may be loaded.
        self._saves.repairs.finish()
        deadline = Deadline.after(self._context.ranks.timeout_s)
        while True:
            try:
                load = Load(self._context, self._finder.inventory(), options)
                return load.run(iteration, self._finder, self._reprotection)
            except NoReplicasAvailableError:
                may_differ = self.read_only and iteration is None
                if not may_differ or self._finder.look_again(deadline) is None:
                    raise

    def warm_up(self, state_dict: Any) -> None:
        """Prepare for saves of such a state; its values are not read.

        Lays it out and makes the staging buffers, which the first saves would have to make.

        Raises:
            CheckpointingException: The state holds something that cannot be saved, or there is no
                memory for it.
        """
        self._require_writable()
        self._check_usable()
        self._await_reprotected()
        captures, identity = self._saves.capture, self._context.epoch.identity(0)
        capture = captures.planner.capture(wrapped(state_dict), captures.node_ranks())
        self._images("warm_up").prepare(identity.piece, capture.nbytes(identity), capture.gpu)

    def promote(
        self,
        iteration: SupportsIndex,
        to: DrainTarget,
        *,
        rate_limit: float | None = None,
        metrics: Metrics | None = None,
    ) -> AsyncRequest:
        """Drain a complete checkpoint to shared storage, behind training; all ranks call it.

        It is written from the images on the nodes, so training neither copies its state once more
        nor waits. Each rank drains its own shard; one that its node lacks is drained from a copy by
        a rank whose node has it. What several ranks have alike is written once.
        The nodes keep the checkpoint until the promotion is finalized. A drain that was cut off
        goes on where it was when the same checkpoint is promoted again.

        Args:
            iteration: The checkpoint; the newest one, if several have the number.
            to: A :class:`GlobalCheckpointManager` of the same ranks.
            rate_limit: Bytes a second that each rank writes at most; ``None`` for any number. The
                ranks of a node together write as many times more.
            metrics: Numbers that are recorded with it on shared storage.

        Returns:
            The request to hand to an :class:`AsyncCallsQueue`, which raises whatever goes wrong
            from here on. Give promotions a queue of their own: a queue finalizes its calls in
            order, and saves would wait.

        Raises:
            NoReplicasAvailableError: The checkpoint is not complete, or not kept any more.
            MismatchError: Another number of ranks has saved it.
            CheckpointingException: Its save is under way; or it is marked bad; or ``to`` is closed,
                or of other ranks. As all of these the same on every rank, and nothing was done.
            PeerLostError: A rank did not answer in time, when the job had not looked yet what the
                nodes hold.
        """
        iteration = operator.index(iteration)
        # Also by what finalizes its save, which another save may do as it makes room for itself.
        promote = partial(self._promote, iteration, to, rate_limit, metrics)
        return self._call("promote", promote, inside=True)

    def _promote(
        self,
        iteration: int,
        to: DrainTarget,
        rate_limit: float | None,
        metrics: Metrics | None,
    ) -> AsyncRequest:
        self._require_writable()
        images = self._images("promote")
        # This rank's shard may be among what a load has fetched, and not be kept yet.
        self._await_reprotected()
        checkpoints = self._context.checkpoints
        if checkpoints.seen is None and not checkpoints.complete:
            self._find_latest()
        checkpoint = promotable(iteration, checkpoints, self.world_size)
        identity = checkpoint.shard(self.rank, self.session_id)
        shard = KeptShard(images, identity, self._context.allowed)
        promotion = Promotion(shard, to, checkpoints, rate_limit, metrics)
        self._promotions = [*(p for p in self._promotions if not p.is_over), promotion]
        return promotion.request()

    @one_call
    def replace_store(self, path: str | os.PathLike[str] | None) -> None:
        """Go on with another directory on some nodes, as on a new disk; all ranks call it.

        What the directory before held counts as lost: behind training it is made again in the new
        one, from the other nodes. The old directory is left as it is, and released. The job begins
        a new epoch, as if it had resumed from what it saved last.

        Args:
            path: The new directory, the same on all ranks of a node; ``None`` on nodes that keep
                theirs. It may be the old one, where another disk is mounted there.

        Raises:
            CheckpointingException: Saves or drains are in flight, or no rank gives a directory; on
                all ranks, and nothing was changed.
            MismatchError: The ranks of a node give different directories, or ranks of two nodes
                would share one; on all ranks, and nothing was changed.
            StorageError: A directory cannot be used; on all ranks, and nothing was changed.
            PeerLostError: A rank did not answer in time.
        """
        self._require_writable()
        old, context = self._images("replace_store"), self._context
        self._saves.require_none("replace a store")
        if any(not promotion.is_over for promotion in self._promotions):
            raise CheckpointingException(
                "a store cannot be replaced while checkpoints are drained from it: finalize the "
                "promotions first. Nothing was changed"
            )
        self._join()
        # They may be stuck at the disk that is to be replaced.
        self._saves.repairs.close()
        self._saves.prefetches.close()
        new = open_in_place(context, partial(self._open_store, self._ranks, context.allowed), path)
        if new is not None:
            self._open_store = partial(self._open_store, root=path)
            new.on_quarantine = old.on_quarantine
            new.limit_buffers(old.num_buffers, old.most_nbytes)
            self.store = context.store = new
            context.resuming.notes = new.claim
            try:
                answered("leave", old.root, context.options.timeout, old.close)
            except StorageError as error:
                logger.warning("the store that was replaced is not released: %s", error)
        self._saves.has_checked_space = False
        self._forget_latest()
        context.epoch.begin_anew()
        self._join()
        self._finder.look()
        checkpoints = context.checkpoints
        self._saves.repairs.begin([c for c in checkpoints.complete if checkpoints.lacks_copies(c)])

    def wait_staged(self) -> None:
        """Wait until no save reads the state, which may then be changed in any way.

        Only with ``guard`` is there something to wait for, and its optimizers wait by themselves.
        """
        self._saves.capture.await_copied()

    def close(self) -> None:
        """Free buffers, files kept for reuse, and threads. Finish the saves under way before.

        A request that ``save`` returned and that was never scheduled is an error in the log.
        """
        if self._is_fork:
            # A fork of the trainer has none of it, and must not take it away.
            for ranks in self._all_ranks:
                ranks.close()
            return
        if never := self._saves.not_scheduled():
            logger.error("%s", never_scheduled(never, "The manager is closed."))
        # Also in the finally block of a loop that failed.
        self._end_attempt(sys.exception())
        close = partial(self._close, is_abandoned=self._abort.is_set())
        self._call("close", close, also_closed=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_fork:
            # A fork that ends here must not cancel what the trainer has under way.
            return
        if kind is None:
            self.close()
            return
        self._end_attempt(error)
        # The other ranks may not come any more.
        abandon = partial(self._close, is_abandoned=True)
        self._call("close", abandon, also_closed=True)

    def _close(self, *, is_abandoned: bool = False, keeps_memory: bool = False) -> None:
        """Wait for all work and end it, at once if other ranks may not come any more.

        With ``keeps_memory`` the images that are in memory are kept for the next store.
        """
        if self._has_left:
            self._closed = True
            self._kept.close()
            return
        self._closed, self._has_left = not keeps_memory, keeps_memory
        with ExitStack() as closing:
            for ranks in self._all_ranks:
                closing.callback(ranks.abandon if is_abandoned else ranks.close)
            if self.repl_strategy is None:
                closing.callback(self._context.strategy.close)
            closing.callback(partial(self._leave_store, keeps_memory=keeps_memory))
            closing.callback(self._saves.capture.close)
            for step in reversed(list(self._saves.closing_steps())):
                closing.callback(step)
            for promotion in self._promotions:
                closing.callback(promotion.close, self._context.options.timeout)
            closing.callback(self._await_reprotected)
            if is_abandoned:
                self._saves.stop_waiting()
                if self._reprotection is not None:
                    self._reprotection.abort()

    def _leave_store(self, *, keeps_memory: bool) -> None:
        if keeps_memory and isinstance(self.store, DirectoryStore):
            self._kept = self.store.hand_over()
        else:
            self.store.close()
            self._kept.close()

    def count_attempt(self) -> None:
        """Count this start from here on: the job has made a step since :meth:`load`.

        The first save counts it, too. Without ``max_attempts``, or a ``load``, nothing is counted.
        It asks no other rank.
        """
        if not self._is_fork:
            self._context.resuming.count()

    def take_back_attempt(self) -> None:
        """Do not count this start as an attempt in vain: it is about to end because it is to.

        With ``max_attempts`` a start that resumed from a checkpoint, was counted by
        :meth:`count_attempt` or a save, and ends before a later one is complete counts, unless the
        manager is closed without an error, or by Ctrl-C. Call this when the job is told to stop; a
        signal handler may. It asks no other rank.
        """
        if not self._is_fork:
            self._context.resuming.take_back()

    @property
    def newest(self) -> int | None:
        """Iteration that was loaded or is complete since, the later; ``None`` for none."""
        return None if self._current is None else self._current.iteration

    def mark_good(self, why: str = "") -> int:
        """Mark the checkpoint that was loaded last, or is complete since, as good.

        The newest one that is marked good is kept beside the ``keep_last`` newest. The job has got
        on by its own account, so no start so far counts as one in vain. All ranks call it; no
        message is sent, and the mark of any node counts.

        Args:
            why: Reason, for people.

        Returns:
            Its iteration.

        Raises:
            CheckpointingException: There is no such checkpoint.
            StorageError: The mark cannot be noted on this node.
        """
        self._require_writable()
        if self._current is None:
            raise CheckpointingException(
                "there is no checkpoint to mark as good: none was loaded from the nodes, and none "
                "is complete since. Wait for the save first"
            )
        self._context.store.claim.note_trust(self._current, mark="good", why=why)
        self._context.checkpoints.note(self._current, mark="good", why=why)
        self._context.resuming.forget()
        return self._current.iteration

    def is_bad(self, iteration: int) -> bool:
        """Return whether a complete checkpoint is marked bad, at the last look or save."""
        marks = self._context.checkpoints.marked("bad")
        return any(checkpoint.iteration == iteration for checkpoint in marks)

    def is_progress(self, iteration: int) -> bool:
        """Return whether a complete checkpoint is above all from which starts ended in vain."""
        return self._context.resuming.is_progress(iteration)

    def _end_attempt(self, error: BaseException | None) -> None:
        if is_orderly(error):
            self.take_back_attempt()

    @property
    def degraded(self) -> int:
        """Number of shards of the newest checkpoint with fewer copies than asked for.

        After a ``load`` the built-in managers make those copies again behind training.
        """
        return self._context.checkpoints.lacking

    def status(self) -> list[Durability]:
        """Durability levels of this manager's checkpoints, the newest first; asks no other rank.

        Those under way are captured. Of those that are complete it says on how many nodes each
        shard is, as the ranks reported when the save was finalized, or the load was over.
        """
        return self._context.checkpoints.status(self.rank)

    def _require_writable(self) -> None:
        if self.read_only:
            raise CheckpointingException(
                "this manager was made with read_only=True: it loads, and saves nothing"
            )

    # One call at a time.

    def _call(
        self,
        name: str,
        call: Callable[[], T],
        *,
        inside: bool = False,
        also_closed: bool = False,
    ) -> T:
        """Make a call, unless another one is under way. An interrupt closes the manager.

        With ``inside`` it may be a part of another call of this thread; with ``also_closed`` it can
        be made once the manager is closed.
        """
        if not also_closed:
            self._check_usable()
        if self._under_way.locked():
            is_here = self._thread == threading.get_ident()
            if inside and is_here:
                return call()
            raise CheckpointingException(
                f"{name}() was called while {self._calling or 'another call'}() of the same "
                f"manager is under way{'' if is_here else ' in a thread'}: make one call at a "
                f"time. Nothing was done"
            )
        if not also_closed:
            self._ranks.require_same_world()
        # Left in order whatever comes, since the lock is not written in Python.
        with self._under_way:
            self._calling, self._thread = name, threading.get_ident()
            handled, interrupt = sys.exception(), None
            try:
                if also_closed:
                    return call()
                with self._abort:
                    return call()
            except BaseException as error:
                interrupt = interrupt_behind(error, handled)
                if interrupt is None:
                    raise
                self._interrupted = name
                self._end_attempt(interrupt)
                try:
                    self._close(is_abandoned=True)
                except Exception:
                    # The interrupt is what is to be raised.
                    logger.exception("what %s() left when it was interrupted stays", name)
                raise interrupt from None
            finally:
                self._calling, self._thread = "", 0
                # Else an error would keep itself, and the state, by a variable of this call.
                del handled, interrupt

    @property
    def _hint(self) -> str:
        """Most frequent cause of ranks that do not come, as the end of an error message."""
        if self._calling == "finalize":
            return " Does every rank poll its queue?"
        return f" Is {self._calling}() called on every rank?" if self._calling else ""

    # Steps of several calls.

    def _await_reprotected(self) -> None:
        """Wait until no copies of a loaded checkpoint are made behind other calls."""
        if self._reprotection is not None:
            self._reprotection.finish()

    def _images(self, name: str) -> DirectoryStore:
        """Return the store for a call that needs images."""
        if (images := self._context.images) is None:
            raise CheckpointingException(
                f"{name}() is for managers whose nodes keep images, as LocalCheckpointManager: "
                f"the hooks of {type(self).__name__} keep states. Nothing was done"
            )
        return images

    def _join(self) -> None:
        """Meet the other ranks, once an epoch, when nothing is under way behind other calls."""
        self._await_reprotected()
        self._context.epoch.join()

    def _begin_epoch(self, iteration: int) -> Lineage:
        is_new = self._context.epoch.lineage is None
        if is_new and self._context.store.keeps_images and self._context.checkpoints.seen is None:
            # The job did not ask what is there, and what it starts over from must be known.
            self._finder.look()
        return self._context.epoch.begin(iteration, self.is_to_stop)

    def _forget_latest(self) -> None:
        self.latest_iteration = -1
        self._finder.found = None


def _load_images(
    place: str, checkpoint: Checkpoint, context: Context, inventory: Inventory, options: LoadOptions
) -> int:
    """Load a checkpoint of which there are no other copies; return the bytes filled here."""
    load = Load(context, inventory, options)
    if (loaded := load.load(checkpoint)) is None:
        texts = sorted({f"{bad.shard}: {bad.why}" for bad in load.bad})
        raise CorruptShardError(f"{place} cannot be loaded: {'; '.join(texts[:_SHOWN])}")
    if options.fills:
        give_states(options.given, unwrapped(loaded.state), loaded.left)
    return loaded.nbytes


def agreed_session(ranks: Ranks, known: str = "") -> str:
    """Name the session of a program that gives none, by the first rank; all ranks call it.

    Ranks that join again have a ``known`` one.
    """
    name: str = ranks.decide(
        "name the session",
        lambda: [known, default_session() if ranks.is_root and not known else ""],
        lambda names: next((known for known, _ in names if known), names[ranks.root][1]),
        read=shaped(str),
    )
    return name
