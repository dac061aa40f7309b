"""Public face of the managers: the calls that all ranks make.

``save.py`` is the life of a save, ``look.py`` and ``load.py`` are a restart. ``parts.py`` makes the
objects that they work with; the five hooks are in ``storage/hooks.py``.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, SupportsFloat, SupportsIndex, overload

import torch
import torch.distributed as dist

from localckpt.async_save.request import AsyncRequest
from localckpt.availability.durability import Durability
from localckpt.availability.explanation import Explanation
from localckpt.errors import CheckpointingException, NoReplicasAvailableError
from localckpt.events.stream import EventStream
from localckpt.failure_texts import shown
from localckpt.ids import Checkpoint, CkptID
from localckpt.lineage import Lineage, Point
from localckpt.managers.calls import Calls, one_call
from localckpt.managers.epoch import checked_origin
from localckpt.managers.in_flight import forgotten
from localckpt.managers.load import Load
from localckpt.managers.look import Finder
from localckpt.managers.parts import Parts
from localckpt.managers.reports import LoadReport, SaveReport
from localckpt.managers.restoring import Loaded, LoadOptions
from localckpt.managers.save import Save
from localckpt.options import OnDivergence, SaveOptions
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.refusals import MANAGER, refused_together
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.replication.survival import LossChance, chances_of_loss
from localckpt.state_dict.basic import give_states, unwrapped
from localckpt.storage.hooks import Hooks, HookStore
from localckpt.trust import Mark, is_orderly

__all__ = ["BaseCheckpointManager"]

logger = logging.getLogger(__name__)

# Attributes of a manager that another process can neither have nor use.
_OF_THE_TRAINER = frozenset({"repl_strategy", "_parts", "_calls", "_finder"})


class BaseCheckpointManager(Hooks):
    """Saves and loads this rank's state together with all other ranks of the job.

    Every rank makes its manager and calls its methods in the same order as the others. A subclass
    that implements the five hooks keeps shards wherever it likes; the protocol, replication and
    both ways of saving come with this class.

    Args:
        session_id: A name for the training run; two runs may share a directory.
        repl_strategy: Protects this rank's shards on other nodes; ``None`` for none.
        timeout: Deadline of every wait, in seconds.
        process_group: The ranks of the job; ``None`` for all.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults.
        background: Whether replicas are made while training goes on. By default they are, unless
            GPUs send the bytes.
        strict: Whether a save fails when a peer is lost that was to keep a replica. Else it stands
            with fewer copies: a warning, ``degraded_saves`` and :meth:`status` say so.
        events: Stream that is told what happens here; it stays the caller's to close. ``None`` for
            none.
        check_replicas, on_divergence: As for :class:`LocalCheckpointManager`; checkpoints are not
            marked.

    Attributes:
        latest_iteration: Result of the last ``find_latest``; ``-1`` makes the next one look again.
        last_save: The last save on this rank.
        last_load: The last load on this rank.
        skipped_saves: Number of saves that found no room and were left out.
        degraded_saves: Number of saves that are complete with fewer replicas than asked for.
        is_to_stop: Tells whether the job is to stop, so that no save begins that has to wait for
            storage. A training loop may set it.
    """

    read_only = False
    """True for a manager that only loads."""

    def __init__(
        self,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        timeout: float = 300.0,
        process_group: dist.ProcessGroup | None = None,
        safe_globals: Iterable[Any] = (),
        background: bool | None = None,
        strict: bool = False,
        events: EventStream | None = None,
        check_replicas: int | None = None,
        on_divergence: OnDivergence = "error",
    ) -> None:
        arguments = locals()
        with refused_together(MANAGER, process_group, timeout):
            self._set_up(session_id, repl_strategy, SaveOptions.of(arguments))
            parts = self._parts
            parts.strategy.require_states(type(self).__name__)
            rank, world_size = self.rank, self.world_size
            parts.open(lambda: HookStore(self, session_id, rank, world_size, parts.allowed))

    def _set_up(
        self, session_id: str, repl_strategy: ReplicationStrategy | None, options: SaveOptions
    ) -> None:
        """Make all parts but those that need the store."""
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.latest_iteration = -1
        self.last_save: SaveReport | None = None
        self.last_load: LoadReport | None = None
        self.skipped_saves = 0
        self.is_to_stop: Callable[[], bool] = lambda: False
        self.degraded_saves = 0
        self._parts = Parts(session_id, repl_strategy, options, self, hint=lambda: self._calls.hint)
        # What was loaded or saved last.
        self._current: Checkpoint | None = None
        self._rank, self._world_size = self._parts.ranks.rank, self._parts.ranks.world_size
        self._finder = Finder(self._parts)
        self._process = os.getpid()
        self._calls = Calls(self._parts.ranks, self._clean_up_interrupted)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a worker process needs to call the hooks."""
        return {name: value for name, value in vars(self).items() if name not in _OF_THE_TRAINER}

    def __repr__(self) -> str:
        return shown(self, self.session_id)

    # The protocol.

    @property
    def rank(self) -> int:
        """This process's rank among those of the job."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._world_size

    @overload
    def save(
        self,
        state_dict: Any,
        iteration: SupportsIndex,
        is_async: Literal[False] = False,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> None: ...

    @overload
    def save(
        self,
        state_dict: Any,
        iteration: SupportsIndex,
        is_async: Literal[True],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> AsyncRequest: ...

    @overload
    def save(
        self,
        state_dict: Any,
        iteration: SupportsIndex,
        is_async: bool,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> AsyncRequest | None: ...

    def save(
        self,
        state_dict: Any,
        iteration: SupportsIndex,
        is_async: bool = False,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
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
        begin = partial(self._begin_save, called, state_dict, iteration, is_async, metrics)
        return self._calls.make("save", begin)

    def _begin_save(
        self,
        called: float,
        state: Any,
        number: SupportsIndex,
        is_async: bool,
        metrics: Mapping[str, SupportsFloat] | None,
    ) -> AsyncRequest | None:
        parts = self._parts
        iteration = parts.epoch.checked(number)
        parts.resuming.count()
        with parts.events.noting_failure("save", called, iteration):
            parts.in_flight.give_up_forgotten(iteration)
            self._join()
            asked = time.monotonic()
            is_admitted = parts.in_flight.admits(iteration, is_async)
            waited_s = time.monotonic() - asked
            if is_admitted:
                state = parts.capture.checked(
                    *(state, iteration, parts.ranks, parts.epoch.nodes, parts.strategy.protection)
                )
                self._begin_epoch(iteration)
        if not is_admitted:
            parts.events.emit("save", began=called, step=iteration, outcome="skipped")
            self.last_save = SaveReport.of_skipped(iteration)
            self.skipped_saves += 1
            return AsyncRequest(None, (), [])
        self._forget_latest()
        save = Save(parts, parts.epoch.next_identity(iteration), called, waited_s, metrics)
        save.capture(state)
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
            self._calls.make("finalize", partial(self._end_save, save), inside=True)

    def _end_save(self, save: Save) -> None:
        self._parts.await_reprotected()
        # What find_latest saw while this save was under way is out of date.
        self._forget_latest()
        reached = save.finalize()
        self._current = save.identity.checkpoint
        if reached.lacking:
            self.degraded_saves += 1
            logger.warning("%s", reached)
            fields = ("lacking", "copies", "wanted")
            details = {name: getattr(reached, name) for name in fields}
            self._parts.events.emit("degraded", step=reached.iteration, details=details)
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
        self._parts.in_flight.require_none(f"go on from iteration {from_iteration}")
        self._join()
        self._parts.epoch.resume_elsewhere(from_iteration, lineage)
        # What was loaded here before is not what training goes on from.
        self._parts.resuming.take_back()
        self._current = None

    def leave(self, points: Sequence[Point]) -> None:
        """Give up checkpoints on shared storage that the job goes back from; asks no other rank.

        Args:
            points: The checkpoints, the same on all ranks.
        """
        self._require_writable()
        self._parts.epoch.leave(points)

    def lineage_of(self, iteration: int) -> Lineage | None:
        """Return the lineage of the newest complete checkpoint of an iteration, if it has one."""
        complete = self._parts.checkpoints.complete
        epochs = (c.generation.epoch_id for c in complete if c.iteration == iteration)
        epoch = next(epochs, None)
        return None if epoch is None else self._parts.checkpoints.lineages.get(epoch)

    @one_call
    def lineage_of_save(self, iteration: int) -> Lineage:
        """Return the lineage under which an iteration is saved now; all ranks call it.

        Raises:
            CheckpointingException: Some node cannot be read, or cannot note it; on all ranks.
            PeerLostError: A rank did not answer in time.
        """
        self._require_writable()
        if self._parts.epoch.lineage is None:
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
        if self._finder.last is None:
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
        options = LoadOptions.of(
            into, map_location, is_partial=partial, converts=allow_dtype_change
        )
        return self._load_as(options, iteration)

    def load_as(self, options: LoadOptions, iteration: int | None) -> tuple[Any, CkptID]:
        """Load with options for which :meth:`load` has no arguments, as ``Checkpointer`` does."""
        return self._calls.make("load", partial(self._load_as, options, iteration))

    def _load_as(self, options: LoadOptions, iteration: int | None) -> tuple[Any, CkptID]:
        called = time.monotonic()
        if iteration is not None:
            self._parts.in_flight.require_none(f"load iteration {iteration}")
        if self._finder.last is None:
            self._find_latest()
        self._parts.await_reprotected()
        try:
            loaded = self._run_load(options, iteration)
        except NoReplicasAvailableError:
            if iteration is None:
                self.latest_iteration = -1
            raise
        reached = loaded.checkpoint.iteration
        if iteration is None:
            self.latest_iteration = reached
        seconds = time.monotonic() - called
        self.last_load = LoadReport(reached, loaded.nbytes, seconds, loaded.came_from)
        logger.info("loaded %s", self.last_load)
        state = give_states(options.given, unwrapped(loaded.state), loaded.left)
        self._current = loaded.checkpoint
        self._parts.resuming.begin(loaded.checkpoint)
        return state, CkptID(reached, self.rank, self.session_id)

    def _run_load(self, options: LoadOptions, iteration: int | None) -> Loaded:
        """Load a checkpoint, with ``read_only`` another one if a job prunes it meanwhile."""
        deadline = Deadline.after(self._parts.ranks.timeout_s)
        while True:
            try:
                return Load(self._parts, self._finder, options).run(iteration)
            except NoReplicasAvailableError:
                may_differ = self.read_only and iteration is None
                if not (may_differ and self._finder.has_changed(deadline)):
                    raise

    def close(self) -> None:
        """Free buffers, files kept for reuse, and threads. Finish the saves under way before.

        A request that ``save`` returned and that was never scheduled is an error in the log.
        """
        if os.getpid() == self._process and (saves := self._parts.in_flight.not_scheduled()):
            logger.error("%s", forgotten(saves, "The manager is closed."))
        # Also in the finally block of a loop that failed.
        self._end_attempt(sys.exception())
        self._close()
        for ranks in self._all_ranks():
            ranks.close()

    def _all_ranks(self) -> tuple[Ranks, ...]:
        return (self._parts.ranks,)

    def _close(self) -> None:
        # A fork of the trainer has none of it, and must not take it away.
        if os.getpid() == self._process:
            self._calls.make("close", self._parts.close, also_interrupted=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._process:
            # A fork that ends here must not cancel what the trainer has under way.
            return
        if kind is None:
            self.close()
            return
        self._end_attempt(error)
        try:
            # The other ranks may not come any more.
            self._parts.stop_waiting()
        finally:
            self._close()
            for ranks in self._all_ranks():
                ranks.abandon()

    def count_attempt(self) -> None:
        """Count this start from here on: the job has made a step since :meth:`load`.

        The first save counts it, too. Without ``max_attempts``, or a ``load``, nothing is counted.
        It asks no other rank.
        """
        if os.getpid() == self._process:
            self._parts.resuming.count()

    def take_back_attempt(self) -> None:
        """Do not count this start as an attempt in vain: it is about to end because it is to.

        With ``max_attempts`` a start that resumed from a checkpoint, was counted by
        :meth:`count_attempt` or a save, and ends before a later one is complete counts, unless the
        manager is closed without an error, or by Ctrl-C. Call this when the job is told to stop; a
        signal handler may. It asks no other rank.
        """
        if os.getpid() == self._process:
            self._parts.resuming.take_back()

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
        mark = Mark(self._current, "good", why)
        self._parts.store.claim.note_mark(mark)
        self._parts.checkpoints.marks[mark.checkpoint] = mark
        self._parts.resuming.forget()
        return self._current.iteration

    def is_bad(self, iteration: int) -> bool:
        """Return whether a complete checkpoint is marked bad, at the last look or save."""
        marks = self._parts.checkpoints.marked("bad")
        return any(checkpoint.iteration == iteration for checkpoint in marks)

    def is_progress(self, iteration: int) -> bool:
        """Return whether a complete checkpoint is above all from which starts ended in vain."""
        return self._parts.resuming.is_progress(iteration)

    def _end_attempt(self, error: BaseException | None) -> None:
        if is_orderly(error):
            self.take_back_attempt()

    @property
    def degraded(self) -> int:
        """Number of shards of the newest checkpoint with fewer copies than asked for.

        After a ``load`` the built-in managers make those copies again behind training.
        """
        return self._parts.checkpoints.lacking

    def status(self) -> list[Durability]:
        """Durability levels of this manager's checkpoints, the newest first; asks no other rank.

        Those under way are captured. Of those that are complete it says on how many nodes each
        shard is, as the ranks reported when the save was finalized, or the load was over.
        """
        return self._parts.checkpoints.status(self.rank)

    @one_call
    def survivability(self) -> list[LossChance]:
        """Chances that the loss of 1, 2, 3 and 4 nodes loses data; all ranks call it.

        They are those of a checkpoint with all its copies, on the nodes of this job. ``localckpt
        survive`` compares other schemes.

        Raises:
            MismatchError: The ranks do not belong together.
            PeerLostError: A rank did not answer in time.
        """
        self._join()
        return chances_of_loss(self._parts.epoch.nodes, self._parts.strategy.protection)

    def _require_writable(self) -> None:
        if self.read_only:
            raise CheckpointingException(
                "this manager was made with read_only=True: it loads, and saves nothing"
            )

    def _clean_up_interrupted(self) -> None:
        """Give back what a call has taken that was interrupted."""
        self._parts.stop_waiting()
        self._forget_latest()
        for save in self._parts.in_flight:
            save.clean_up_interrupted()
        # Of a load that was interrupted.
        self._parts.store.release([slot for slot in self._parts.store.slots if not slot.is_kept])

    def _join(self) -> None:
        """Meet the other ranks, once an epoch, when nothing is under way behind other calls."""
        self._parts.await_reprotected()
        self._parts.epoch.join()

    def _begin_epoch(self, iteration: int) -> Lineage:
        is_new = self._parts.epoch.lineage is None
        if is_new and self._parts.store.keeps_images and self._parts.checkpoints.seen is None:
            # The job did not ask what is there, and what it starts over from must be known.
            self._finder.look()
        return self._parts.epoch.begin(iteration, self.is_to_stop)

    def _forget_latest(self) -> None:
        self.latest_iteration = -1
        self._finder.last = None
