"""The protocol that all ranks follow: save, finalize, find_latest, load.

A save is captured, replicated, kept behind training and finalized: all ranks agree that it is
complete and let older checkpoints go, or take it back and raise. A restart asks every rank what its
node holds, and all come to the same answer by the same pure functions (``coverage.py``). Where
shards are kept is the shelf's business (``shelf.py``).
"""

from __future__ import annotations

import logging
import operator
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, Self, SupportsIndex, overload

import torch
import torch.distributed as dist
from torch.profiler import record_function

from localckpt.async_save.request import AsyncRequest
from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    NoReplicasAvailableError,
    SaveFailedError,
)
from localckpt.ids import Checkpoint, CkptID, Generation, ShardIdentity
from localckpt.lineage import Lineage, Origin, Point, Resumed, begin_lineage, unsaid
from localckpt.managers.calls import Calls, one_call
from localckpt.managers.coverage import (
    SaveOutcome,
    complete_checkpoints,
    describe_choice,
    describe_incomplete,
    judge_newest,
    judge_resumed,
    save_problems,
)
from localckpt.managers.durability import (
    Durability,
    chances_of_loss,
)
from localckpt.managers.explanation import Explanation
from localckpt.managers.holdings import Holdings
from localckpt.managers.hooks import HookShelf
from localckpt.managers.in_flight import InFlight, forgotten
from localckpt.managers.joining import (
    gather_explanation,
    gather_holdings,
    join,
    node_labels,
)
from localckpt.managers.known import KnownCheckpoints
from localckpt.managers.ordering import unrelated
from localckpt.managers.recovery import Recovery, why_not_that, why_nothing_loads
from localckpt.managers.redundancy import Redundancy
from localckpt.managers.replicator import Replicator
from localckpt.managers.reports import LoadReport, SaveReport, SaveUnderWay
from localckpt.managers.saving import Saving
from localckpt.managers.shelf import LoadOptions, Shelf
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.replication.strategies import NoReplication, ReplicationStrategy
from localckpt.replication.survival import LossChance
from localckpt.state_dict.base import TensorAwareStateDict
from localckpt.state_dict.basic import unwrapped, wrapped
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.stateful import give_states, stateful_keys

__all__ = ["BaseCheckpointManager"]

logger = logging.getLogger(__name__)

# Attributes of a manager that another process can neither have nor use.
_OF_THE_TRAINER = frozenset(
    {
        *("_coordinator", "_strategy", "repl_strategy", "_replicator", "_redundancy"),
        *("_shelf", "_saving", "_in_flight", "_calls", "_known", "_holdings"),
    }
)


class BaseCheckpointManager(ABC):
    """Saves and loads this rank's state together with all other ranks of the job.

    Every rank makes its manager and calls its methods in the same order as the others. A subclass
    that implements the five hooks keeps shards wherever it likes; the protocol, replication and
    both ways of saving come with this class.

    Args:
        session_id: A name for the training run; two runs may share a directory.
        repl_strategy: Which other ranks keep copies of this rank's shards; ``None`` for none.
        timeout: Deadline of every wait, in seconds.
        process_group: The ranks of the job; ``None`` for all.
        async_worker: Whether an asynchronous save is written by a ``"thread"`` of the trainer or by
            another ``"process"``.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults.
        background: Whether replicas are made while training goes on. By default they are, unless
            GPUs send the bytes.
        strict: Whether a save fails when a peer is lost that was to keep a replica. Else it stands
            with fewer copies: a warning, ``degraded_saves`` and :meth:`status` say so.

    Attributes:
        latest_iteration: What the last ``find_latest`` found; ``-1`` makes the next one look again.
        last_save: The last save on this rank.
        last_load: The last load on this rank.
        skipped_saves: How many saves found no room and were left out.
        degraded_saves: How many saves are complete with fewer replicas than asked for.
    """

    _keeps_images = False
    """Whether what is kept is the image of a shard, byte for byte."""
    read_only = False
    """True for a manager that only loads."""

    def __init__(
        self,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        timeout: float = 300.0,
        process_group: dist.ProcessGroup | None = None,
        async_worker: Literal["thread", "process"] = "thread",
        safe_globals: Iterable[Any] = (),
        background: bool | None = None,
        strict: bool = False,
    ) -> None:
        if async_worker not in ("thread", "process"):
            raise CheckpointingException(
                f"async_worker is {async_worker!r}; it can be 'thread' or 'process'"
            )
        if timeout <= 0:
            raise CheckpointingException(f"timeout is {timeout} s; it must be above 0")
        self.session_id = session_id
        self.timeout = timeout
        self.async_worker = async_worker
        self.latest_iteration = -1
        self.last_save: SaveReport | None = None
        self.last_load: LoadReport | None = None
        self.skipped_saves = 0
        self.degraded_saves = 0
        self.repl_strategy = repl_strategy
        # Without the session in its name: ranks with different ones must meet, to be told.
        self._coordinator = Ranks("manager", process_group, timeout)
        self._rank, self._world_size = self._coordinator.rank, self._coordinator.world_size
        self._strategy = repl_strategy or NoReplication(timeout, process_group)
        self._strategy.take_timeout(timeout)
        self._replicator = Replicator(self._strategy, timeout, background=background, strict=strict)
        if self._strategy.parity and not self._keeps_images:
            raise MismatchError(
                f"parity is of images, and {type(self).__name__} keeps states: use "
                f"CliqueReplicationStrategy, or LocalCheckpointManager or "
                f"InMemoryCheckpointManager"
            )
        self._allowed = SafeGlobals(safe_globals)
        self._known = KnownCheckpoints(self._strategy)
        self._in_flight = InFlight()
        self._keep_on(HookShelf(self, session_id, self.rank, self.world_size, self._allowed))
        self._domains: list[str] | None = None
        self._generation = Generation(0, 0)
        # Of the epoch, once its first save has begun; and what that goes on from.
        self._lineage: Lineage | None = None
        self._resumed: Resumed | None = None
        self._begins_anew = False
        self._left: list[Point] = []
        self._newest_iteration = -1
        self._states_are_good = False
        self._holdings: Holdings | None = None
        self._redundancy: Redundancy | None = None
        self._process = os.getpid()
        self._calls = Calls(
            self._clean_up_interrupted, has_peers=self.world_size > 1, begun=self._note_call
        )

    def __getstate__(self) -> dict[str, Any]:
        """What a worker process needs to call the hooks: all but the protocol's own objects."""
        return {name: value for name, value in vars(self).items() if name not in _OF_THE_TRAINER}

    # The five hooks.

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """IDs of all shards that are kept here, replicas of other ranks' included."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Read a shard; raises CheckpointingException when it cannot.

        The state that it returns belongs to the caller, who may train on with its tensors.
        """

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Keep a shard. Its tensors are in host memory, and it belongs to the hook.

        It may run in another thread, or process, while the other hooks are called.
        """

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Let older checkpoints go: ``iteration`` is complete on all ranks."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove what is here of ``iteration``, whose save failed."""

    # The protocol.

    @property
    def rank(self) -> int:
        """This process's rank among those of the job."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self._world_size

    @overload
    def save(
        self, state_dict: Any, iteration: SupportsIndex, is_async: Literal[False] = False
    ) -> None: ...

    @overload
    def save(
        self, state_dict: Any, iteration: SupportsIndex, is_async: Literal[True]
    ) -> AsyncRequest: ...

    @overload
    def save(
        self, state_dict: Any, iteration: SupportsIndex, is_async: bool
    ) -> AsyncRequest | None: ...

    def save(
        self, state_dict: Any, iteration: SupportsIndex, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save this rank's state; all ranks call it.

        What is saved is the value that the state has at the call; afterwards it may be changed.

        Args:
            state_dict: A plain dict, a :class:`TensorAwareStateDict`, or any object graph. Values
                of the dict that have ``state_dict`` and ``load_state_dict`` (a model, an optimizer)
                are saved as the state that they tell.
            iteration: Its number, above that of every checkpoint this manager saved or loaded: an
                ``int``, or an integer of numpy.
            is_async: Return as soon as the state is captured.

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
            PeerLostError: A rank did not answer in time.
        """
        called = time.monotonic()
        self._check_fork()
        self._require_writable()
        return self._calls.make(
            "save", lambda: self._begin_save(called, state_dict, self._checked(iteration), is_async)
        )

    def _begin_save(
        self, called: float, state: Any, iteration: int, is_async: bool
    ) -> AsyncRequest | None:
        self._give_up_forgotten(iteration)
        self._finish_copies()
        self._join()
        if not self._may_start(iteration, is_async):
            self.last_save = SaveReport.of_skipped(iteration)
            self.skipped_saves += 1
            return AsyncRequest(None, (), [])
        if not self._states_are_good:
            state = self._require_good_states(state, iteration)
        self._begin_epoch(iteration)
        self._forget_latest()
        self._generation = self._generation.next()
        identity = self._identity(iteration)
        save = SaveUnderWay(identity, called, previous_iteration=self._newest_iteration)
        finalize = partial(self._finalize, save)
        self._in_flight.add(save, finalize)
        self._known.under_way.append(iteration)
        self._newest_iteration = iteration
        self._saving.begin(save, state)
        self.last_save = save.report()
        request = AsyncRequest(
            *self._saving.call(save, lambda _: self._take_back(save)), [finalize]
        )
        if is_async:
            save.is_returned = True
            return request
        request.execute_sync(self._coordinator)
        return None

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
        self._finish_copies()
        self._join()
        holdings = self._look()
        self._known.job_has_looked = True
        complete = self._known.complete
        judge_newest(complete, self.world_size)
        if complete:
            self.latest_iteration = complete[0].iteration
            if others := unrelated(complete[0], complete[1:], holdings.lineages):
                logger.warning("%s", describe_choice(complete[0], others))
            return self.latest_iteration
        if holdings.checkpoints:
            logger.warning("no checkpoint is complete: %s", describe_incomplete(holdings))
        if self._newest_iteration >= 0 and not self._known.under_way:
            # The job begins anew and may save any iteration.
            self._newest_iteration = -1
            self._resume(None)
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
        if (number := _as_int(from_iteration)) is None:
            raise CheckpointingException(
                f"the iteration to go on from is {from_iteration!r}; it must be an int"
            )
        from_iteration = number
        if from_iteration < -1:
            raise CheckpointingException(
                f"the iteration to go on from is {from_iteration}; it must be -1 or above"
            )
        self._refuse_to_go_back_in_flight(f"go on from iteration {from_iteration}")
        self._finish_copies()
        self._join()
        mine = [from_iteration, lineage and lineage.to_json()]
        self._coordinator.decide("begin", lambda: mine, judge_resumed)
        if self._lineage is not None:
            # It has saved since it looked.
            self._known.seen = None
        self._known.job_has_looked = True
        self._newest_iteration = from_iteration
        origin: Origin = "shared" if lineage else "nothing" if from_iteration < 0 else "elsewhere"
        self._resume(Resumed(origin, from_iteration, lineage))

    @one_call
    def lineage_of_save(self, iteration: int) -> Lineage:
        """Return the lineage under which an iteration is saved now; all ranks call it.

        Raises:
            CheckpointingException: Some node cannot be read, or cannot note it; on all ranks.
            PeerLostError: A rank did not answer in time.
        """
        self._require_writable()
        if self._lineage is None:
            self._finish_copies()
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
        return self._explanation()

    def _explanation(self) -> Explanation:
        self._finish_copies()
        self._join()
        assert self._domains is not None
        return gather_explanation(self._coordinator, self._shelf, self._domains)

    @one_call
    def all_iterations(self) -> list[int]:
        """Iterations that :meth:`load` can give, in the order in which a restart tries them.

        All ranks call it, and get the same.

        Raises:
            MismatchError: As for :meth:`find_latest`.
            PeerLostError: A rank did not answer in time.
        """
        return self._all_iterations()

    def _all_iterations(self) -> list[int]:
        if self._holdings is None:
            self._find_latest()
        complete = [c for c in self._known.complete if c.world_size == self.world_size]
        return list(dict.fromkeys(checkpoint.iteration for checkpoint in complete))

    @one_call
    def load(
        self,
        *,
        into: Any = None,
        iteration: int | None = None,
        map_location: str | torch.device | None = None,
        partial: bool = False,
    ) -> tuple[Any, CkptID]:
        """Read this rank's shard of a complete checkpoint; all ranks call it.

        Every block is verified as it is read. A copy that turns out bad is set aside on its node,
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

        Returns:
            The state as it was given to ``save`` (with ``into``, holding the given tensors), and
            its ID, which says which iteration it is.

        Raises:
            CheckpointingException: The job is to go back while saves are in flight.
            NoReplicasAvailableError: No checkpoint is complete, or not the one that was asked for;
                it says which shards are gone.
            MismatchError: ``into`` has another structure.
            RestoreError: The bytes are good, and some rank cannot rebuild its state from them: a
                class changed, its ``__setstate__`` raised, memory ran out. It is raised on every
                rank and names the class and the path in the state. Nothing is renamed, and no older
                checkpoint is taken; ``load`` may be called again.
            UnsafeGlobalError: A shard names a class or function that is not allowed.
            PeerLostError: A rank did not answer in time.
        """
        called = time.monotonic()
        if iteration is not None:
            self._refuse_to_go_back_in_flight(f"load iteration {iteration}")
        if self._holdings is None:
            self._find_latest()
        assert self._holdings is not None
        assert self._domains is not None
        self._finish_copies()
        optional = ("",) if partial else tuple(f"{key}." for key in stateful_keys(into))
        options = LoadOptions(None if into is None else wrapped(into), map_location, optional)
        recovery = Recovery(self._coordinator, self._strategy, self._shelf, self._holdings)
        while wanted := [c for c in self._known.complete if iteration in (None, c.iteration)]:
            judge_newest(wanted, self.world_size)
            checkpoint = wanted[0]
            with record_function("localckpt.load"):
                loaded = recovery.load(checkpoint, self.session_id, options)
            if loaded is None:
                logger.error(
                    "iteration %d cannot be had any more; trying another checkpoint",
                    checkpoint.iteration,
                )
                # It must not count among those that are kept, and push out one that can be had.
                self._known.remove(checkpoint)
                continue
            seconds = time.monotonic() - called
            self._resume_from(checkpoint)
            self._newest_iteration = checkpoint.iteration
            if iteration is None:
                self.latest_iteration = checkpoint.iteration
            self.last_load = LoadReport(
                checkpoint.iteration, loaded.nbytes, seconds, loaded.came_from
            )
            logger.info("loaded %s", self.last_load)
            self._known.take_stock(checkpoint, self._holdings)
            if self._redundancy is not None:
                self._redundancy.restore(
                    checkpoint, self._holdings, recovery.rebuilt, recovery.to_replace
                )
            elif self.rank in recovery.rebuilt:
                self._shelf.drop_unfinished([checkpoint.shard(self.rank, self.session_id)])
            state = give_states(into, unwrapped(loaded.state))
            return state, CkptID(checkpoint.iteration, self.rank, self.session_id)
        if iteration is not None:
            raise NoReplicasAvailableError(
                why_not_that(iteration, self._all_iterations(), recovery.bad)
            )
        self.latest_iteration = -1
        raise NoReplicasAvailableError(
            why_nothing_loads(
                self._holdings, self._explanation(), recovery.bad, node_labels(self._domains)
            )
        )

    def close(self) -> None:
        """Free buffers, files kept for reuse, and threads. Finish the saves under way before.

        A request that ``save`` returned and that was never scheduled is an error in the log.
        """
        if os.getpid() == self._process and (saves := self._in_flight.not_scheduled()):
            logger.error("%s", forgotten(saves, "The manager is closed."))
        self._close()
        self._coordinator.close()

    def _close(self) -> None:
        # A fork of the trainer has none of it, and must not take it away.
        if os.getpid() == self._process:
            self._calls.make("close", self._free, also_interrupted=True)

    def _free(self) -> None:
        try:
            self._finish_copies()
        finally:
            self._in_flight = InFlight()
            self._saving.close()
            self._shelf.close()
            if self.repl_strategy is None:
                self._strategy.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if os.getpid() != self._process:
            # A fork that ends here must not cancel what the trainer has under way.
            return
        if kind is None:
            self.close()
            return
        try:
            # The other ranks may not come any more.
            self._saving.cancel()
            if self._redundancy is not None:
                self._redundancy.cancel()
        finally:
            self._close()

    @property
    def degraded(self) -> int:
        """How many shards of the newest checkpoint have fewer copies than asked for.

        After a ``load`` the built-in managers make those copies again behind training.
        """
        return self._known.lacking

    def status(self) -> list[Durability]:
        """How far this manager's checkpoints have climbed, the newest first; asks no other rank.

        Those under way are captured. Of those that are complete it says on how many nodes each
        shard is, as the ranks told each other when the save was finalized, or the load was over.
        """
        return self._known.status(self.rank)

    @one_call
    def survivability(self) -> list[LossChance]:
        """How likely 1, 2, 3 and 4 lost nodes lose data, as ranks are on nodes; all ranks call it.

        It is of a checkpoint with all its copies. ``localckpt survive`` compares other schemes.

        Raises:
            MismatchError: The ranks do not belong together.
            PeerLostError: A rank did not answer in time.
        """
        self._finish_copies()
        self._join()
        assert self._domains is not None
        parity = self._strategy.parity
        groups = self._strategy.cliques() if parity else []
        return chances_of_loss(self._domains, self._strategy.keepers, parity, groups)

    def _check_fork(self) -> None:
        if os.getpid() != self._process:
            raise CheckpointingException(
                f"this manager belongs to process {self._process}, of which this one is a fork: "
                f"save and load there. Nothing was changed"
            )

    def _finish_copies(self) -> None:
        self._check_fork()
        if self._redundancy is not None:
            self._redundancy.finish()

    # The steps of a save.

    def _require_good_states(self, state: Any, iteration: int) -> Any:
        """Refuse a first state on all ranks if it could not be loaded again on some.

        Ranks that save what others cannot would wait for those. So all ask each other, once.

        Returns:
            The state, as it is saved.
        """
        with Attempt() as checking:
            state = wrapped(state)
            self._shelf.check(state)
        phase = f"save iteration {iteration}"
        self._coordinator.settle(phase, checking, grace_s=self._coordinator.timeout_s)
        self._states_are_good = True
        return state

    def _keep_on(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._saving = Saving(
            shelf,
            None if self.repl_strategy is None else self._replicator,
            self._keep,
            self._check_room,
            by_process=self.async_worker == "process",
            timeout_s=self.timeout,
        )

    def _keep(self, payload: Any, ckpt_id: CkptID) -> None:
        """The hook, whichever this manager has by then."""
        self._save(payload, ckpt_id)

    def _check_room(self) -> None:  # noqa: B027 - hooks know best
        """Raise if what this rank is to keep of a save finds no room."""

    def _may_start(self, iteration: int, is_async: bool) -> bool:
        """Whether there is room for one more save under way; the same on all ranks."""
        return True

    def _give_up_forgotten(self, iteration: int) -> None:
        """Forget saves that no queue is going to finalize.

        Raises:
            CheckpointingException: The request of some was never scheduled.
        """
        for save in self._in_flight.dropped():
            # Its queue was left with an error. It may be complete, which find_latest() looks at.
            self._leave(save)
        if saves := self._in_flight.never_scheduled():
            for save in reversed(saves):
                self._take_back(save)
            raise forgotten(
                saves, f"Nothing was begun of iteration {iteration}, which can be saved now."
            )

    def _leave(self, save: SaveUnderWay) -> None:
        """Nobody finalizes a save any more; what it has written stays."""
        self._in_flight.remove(save)
        self._known.forget(save.identity.iteration)

    def _identity(self, iteration: int) -> ShardIdentity:
        return ShardIdentity(
            self.session_id,
            self._generation,
            iteration,
            self.rank,
            self.world_size,
            lineage=self._lineage,
        )

    def _require_writable(self) -> None:
        if self.read_only:
            raise CheckpointingException(
                "this manager was made with read_only=True: it loads, and saves nothing"
            )

    def _checked(self, iteration: SupportsIndex) -> int:
        number = _as_int(iteration)
        if number is None or number < 0:
            raise CheckpointingException(
                f"the iteration to save is {iteration!r}; it must be an int and not negative"
            )
        if number <= self._newest_iteration:
            raise CheckpointingException(
                f"iteration {number} cannot be saved: this manager has saved or loaded "
                f"iteration {self._newest_iteration}, and the next must be above it. To go back, "
                f"load(iteration=...), or say with begin() what the job goes on from"
            )
        return number

    def _note_call(self, name: str) -> None:
        """Have errors about ranks that do not come ask for what is most often the cause."""
        self._coordinator.hint = (
            " Does every rank poll its queue?"
            if name == "finalize"
            else f" Is {name}() called on every rank?"
        )

    def _clean_up_interrupted(self) -> None:
        """Give back what a call has taken that was interrupted."""
        # The other ranks may not come any more.
        self._saving.cancel()
        if self._redundancy is not None:
            self._redundancy.cancel()
        self._forget_latest()
        for save in self._in_flight:
            # One that was returned is for its queue to finalize.
            if save.is_told:
                # Another rank may have found it complete.
                self._leave(save)
            elif not save.is_returned:
                self._take_back(save)

    def _join(self) -> None:
        """Meet the other ranks once: check that all belong together, agree on the epoch."""
        if self._domains is None or self._begins_anew:
            self._domains, self._generation = join(
                self._coordinator, self._shelf, self._strategy, self.session_id
            )
            self._begins_anew = False

    def _refuse_to_go_back_in_flight(self, what: str) -> None:
        if self._known.under_way:
            raise CheckpointingException(
                f"cannot {what} while the saves of iterations {self._known.under_way} are in "
                f"flight: finalize them first "
                f"(AsyncCallsQueue.maybe_finalize_async_calls(blocking=True))"
            )

    def _look(self) -> Holdings:
        """See what all nodes hold."""
        assert self._domains is not None
        holdings = gather_holdings(self._coordinator, self._shelf, self._domains)
        complete = complete_checkpoints(holdings)
        self._known.found(complete, holdings)
        for checkpoint in complete:
            self._known.take_stock(checkpoint, holdings)
        self._holdings = holdings
        return holdings

    def _resume_from(self, loaded: Checkpoint) -> None:
        """The job goes on from a checkpoint of the nodes."""
        epoch = loaded.generation.epoch_id
        if self._lineage is not None and (
            epoch == self._lineage.epoch and loaded.iteration >= self._newest_iteration
        ):
            # It goes on as if it had not loaded.
            return
        # Of what earlier versions wrote no more is known.
        parent = self._known.lineages.get(epoch, Lineage(epoch, "elsewhere", is_cut=True))
        self._resume(Resumed("local", loaded.iteration, parent))

    def _resume(self, resumed: Resumed | None) -> None:
        self._resumed = resumed
        if self._lineage is not None:
            # What this epoch has saved is not what the next save goes on from. Saves in flight are
            # left behind, too, which a look at the nodes does not find.
            self._left += [self._lineage.left(iteration) for iteration in self._known.under_way]
            self._lineage, self._begins_anew = None, True

    def _begin_epoch(self, iteration: int) -> Lineage:
        """Before the first save of an epoch: settle, and note on every node, its lineage."""
        if self._lineage is not None:
            return self._lineage
        if self._keeps_images and self._known.seen is None:
            # The job did not ask what is there; what it starts over from is known all the same.
            self._look()
        seen = [*(self._known.seen or ()), *self._left]
        resumed = self._resumed or unsaid(iteration, seen)
        lineage = begin_lineage(self._generation.epoch_id, resumed, seen, self._known.lineages)
        with Attempt() as noting:
            self._shelf.note_lineage(lineage)
        self._coordinator.settle("note what the job resumed from", noting)
        self._generation = self._generation._replace(epoch=lineage.epoch.number)
        self._known.began(lineage)
        self._lineage, self._left = lineage, []
        return lineage

    def _finalize(self, save: SaveUnderWay) -> None:
        """All ranks agree that a save is complete, or take it back and raise the same error."""
        # A save that waits for older ones finalizes them, and a poll that was interrupted does so
        # again.
        if not save.is_finalized:
            self._calls.make("finalize", lambda: self._agree_on_outcome(save), inside=True)

    def _agree_on_outcome(self, save: SaveUnderWay) -> None:
        self._finish_copies()
        iteration = save.identity.iteration
        mine = self._saving.outcome(save, self._known.copies_wanted(self.rank))
        save.is_told = self.world_size > 1
        gathered = self._coordinator.gather(f"finalize iteration {iteration}", mine.to_json())
        outcomes = [SaveOutcome.from_json(fields) for fields in gathered]
        # What find_latest saw while this save was under way is out of date.
        self._forget_latest()
        checkpoint = Checkpoint(save.identity.generation, iteration, self.world_size)
        self._known.remove(checkpoint)
        if problems := save_problems(outcomes):
            # Not below its own count: a later save may be under way, and no number is used twice.
            self._generation = max(self._generation, *(o.generation for o in outcomes))
            self._take_back(save)
            raise SaveFailedError(
                f"the save of iteration {iteration} failed: {'; '.join(problems)}. Older "
                f"checkpoints are as they were; training can go on and save again"
            )
        self._known.forget(iteration)
        reached = self._known.add(checkpoint, outcomes)
        if reached.lacking:
            self.degraded_saves += 1
            logger.warning("%s", reached)
        try:
            self._let_go(iteration)
        except Exception:
            # The save is complete on all ranks, whatever becomes of older ones on this.
            logger.exception("rank %d could not let go of older checkpoints", self.rank)
        self._in_flight.remove(save)
        save.is_finalized = True
        report = save.report()
        if self.last_save is not None and self.last_save.iteration == iteration:
            self.last_save = report
        logger.info("saved %s; %s", report, reached.reached)

    def _let_go(self, iteration: int) -> None:
        """Older checkpoints may go; what the hooks keep of them, they know."""
        self._cleanup(iteration)
        del self._known.complete[1:]

    def _take_back(self, save: SaveUnderWay) -> None:
        self._saving.settle(save)
        self._in_flight.remove(save)
        self._known.forget(save.identity.iteration)
        if self._newest_iteration == save.identity.iteration:
            self._newest_iteration = save.previous_iteration
        try:
            self._cleanup_failed_save(save.identity.iteration)
        except Exception:
            # Every rank is about to raise why the save failed; this must not take its place.
            logger.exception(
                "rank %d could not remove iteration %d", self.rank, save.identity.iteration
            )

    def _forget_latest(self) -> None:
        self.latest_iteration = -1
        self._holdings = None


def _as_int(number: SupportsIndex) -> int | None:
    """An integer of any type, numpy's among them, as an ``int``; ``None`` for anything else."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)
    except TypeError:
        return None
