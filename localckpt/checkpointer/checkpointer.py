"""The front door: four lines in a training loop.

Here is the loop that programs call: resume, step, save and wait. The life of the object, with all
that it makes and closes, is in ``life.py``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, Self

import torch

from localckpt.async_save.callers import OWN_WORK
from localckpt.async_save.queue import AsyncCallsQueue
from localckpt.availability.retention import Metrics, Retention
from localckpt.checkpointer.arguments import (
    as_cadence,
    in_own_words,
    judge_last_steps,
)
from localckpt.checkpointer.cadence import NODES, SHARED, Every, Meter, Plan, Pulse, Schedule
from localckpt.checkpointer.life import Life
from localckpt.checkpointer.loaders import places_loaded, warn_of_lost_places
from localckpt.checkpointer.parts import (
    RNG,
    Check,
    OnResize,
    RandomPart,
)
from localckpt.checkpointer.resume import Elsewhere, Rejoined
from localckpt.checkpointer.selection import Selection
from localckpt.checkpointer.stopping import (
    Evidence,
    is_of_loader,
    judge_ends,
)
from localckpt.checkpointer.tiers import NodeManager, SharedTier
from localckpt.errors import CheckpointingException, MismatchError, StorageError
from localckpt.events.event import Outcome
from localckpt.events.stream import Sink
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.interrupted import OfOneProcess
from localckpt.options import OnDivergence, PrivateRule
from localckpt.ranks.deadline import answered
from localckpt.ranks.ranks import shaped
from localckpt.replication.strategies import ReplicationStrategy
from localckpt.state_dict.replicated import without_marker
from localckpt.threads import Task
from localckpt.trust import is_orderly

logger = logging.getLogger(__name__)

# Between two steps poll_stop() is called less often.
_POLLS_IN_STEP = 1 << 32
# So many times ranks that finish their saves wait for drains, which storage may make slow.
_PATIENCE = 4


class Checkpointer(OfOneProcess):
    """Saves the state of a training loop, resumes it, and stops it in order.

    Every rank makes one and calls the same methods in the same steps. With ``torch.distributed`` it
    is made after ``init_process_group``; without, a process is alone.

    Args:
        state: Parts of the state by name: modules (also in DDP, FSDP, ``torch.compile``),
            optimizers, schedulers, data loaders and whatever else has ``state_dict`` and
            ``load_state_dict``; plain values as :class:`localckpt.Values`, or one as a pair of
            functions that give and take it. Each may stand in :func:`localckpt.replicated`, which
            says on which ranks it is equal. Or a function that gives them, for a program that makes
            them after :meth:`find_latest`: :meth:`resume` calls it.
        local: Directory on a disk of each node; with ``memory`` one in shared memory, ``None`` for
            ``/dev/shm/localckpt-<uid>``.
        memory: Keep checkpoints in the nodes' memory instead, where they outlive the processes and
            not the nodes.
        shared: Directory on storage that all nodes share, or a URL of an object store, where
            checkpoints outlive the nodes, and can be loaded by another number of ranks.
        session_id: Name of the training run; runs with different names may share a directory. With
            ``memory``, and without ``local``, it names the program on the nodes if it is not given:
            its main script, its arguments and the working directory, as the first rank has them.
        every: Cadence of saves, or a number of steps. By default saves take at most 1 % of training
            time.
        shared_every: Cadence of saves to shared storage, or a number of steps.
        keep_last: Number of complete checkpoints that are kept on the nodes, by default 2. Short
            for ``retention=Retention(last=...)``.
        retention: Rules by which checkpoints are kept on the nodes: ``last``, at least 1, and
            ``best``, by a metric that is given to :meth:`step` or :meth:`save`.
        shared_keep_last: Number that are kept on shared storage; ``None`` for all. Short for
            ``shared_retention=Retention(last=...)``.
        shared_retention: Rules by which checkpoints are kept on shared storage.
        replication_factor: Number of nodes that each shard is to be on. By default 2 where the job
            runs on two nodes or more, and 1 on one node.
        repl_strategy: Any other redundancy, in place of ``replication_factor``; it stays
            the caller's to close.
        on_resize: What becomes of parts that differ between ranks when another number of ranks
            loads them, and of data loaders and samplers, whose place is another one then though
            it be equal on all ranks: an ``"error"``, or they are ``"drop"``-ped, and stay as they
            are made. A loader in :func:`localckpt.replicated` counts what all ranks have seen.
        private: By the name of a part, or by the beginning of a key such as ``"loader.position"``,
            what becomes of such values, on both tiers; see :class:`LocalCheckpointManager`. It goes
            before ``on_resize``. Shared storage has a module or an optimizer with a rule for each
            rank that saved. States of random number generators are kept: each rank gets that of its
            number.
        rng: Whether to save the states of the random number generators.
        guard: Optimizers whose tensors on a GPU change in ``step`` only: training goes on while
            they are being copied.
        stop_signals: Signals on any one rank that stop the job in order. Of SIGINT a second one
            interrupts it.
        stop_file: A file that stops the job once it is there.
        stop_when: A function that tells why the job is to stop, ``None`` while it is not, such as
            a look at a cloud's notice of maintenance. It is called in a thread every few seconds.
        grace_s: Longest wait for the last save when the job is stopped, in seconds; ``None`` for
            ``timeout_s``.
        on_error: Whether a save that failed is a ``"warn"``-ing, or to ``"raise"``.
        max_failures: Number of saves that may fail in a row before the error is raised.
        max_attempts: Number of starts of the job that may resume from a checkpoint, make a step,
            and end before a later one is complete, in a row. Then it is quarantined, and an older
            one is taken. ``None`` for any number.
        finite: Whether to look at the parameters of all modules in each captured state, behind
            training. A checkpoint with one that is infinite or no number is marked bad: it is
            loaded only if there is no other.
        check: Judges each captured state as well: is given this rank's tensors by name, such as
            ``"model.weight"``, and returns why they are bad, or ``None``. It runs behind training,
            and may neither change the tensors nor keep them.
        check_replicas: Compare, in every save to the nodes of so many, what the state says is equal
            on several ranks: parts in :func:`localckpt.replicated`, and tensors that are a
            replicated ``DTensor``. It is done behind training, by digests. ``None`` to compare
            nothing.
        on_divergence: Whether a difference is an ``"error"``, raised at once on all ranks, with
            which the save is rolled back; or a ``"warn"``-ing, with which the checkpoint is marked
            bad.
        timeout_s: Deadline of every wait, in seconds.
        divide_replicated: Whether the ranks of a node divide what :func:`localckpt.replicated` or a
            ``DTensor`` says is equal on them: each saves some of these tensors. ``None`` for yes,
            unless there is a ``check``, which is to see all tensors of its rank.
        staging_limit: Most bytes of host memory that a rank's saves to the nodes' disks take; see
            :class:`localckpt.options.Options`.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults.
        events: Sinks of the record of what happens, which the checkpointer closes; by default files
            of JSON lines beside the nodes' checkpoints. ``()`` for none.
        iteration_file: File with the step of the newest complete save to the nodes, for a launcher
            that looks for progress; see :class:`LocalCheckpointManager`.
        save_last: Whether :meth:`close` saves the last step, to shared storage as well, where it is
            newer than the newest save. It does so at the end of a loop that was left without an
            error and was not stopped.
        quiet: Whether :meth:`resume` prints no line that says from where the job goes on.
        read_only: Only :meth:`find_latest` and :meth:`resume`, beside a job that may be running:
            nothing is made, locked, recorded, counted or removed, and no signal is handled.

    Attributes:
        stopped: Why the job was stopped; ``None`` if it was not.

    Raises:
        CheckpointingException: The arguments make no sense; nothing was made.
        StorageError: The directory cannot be used, or another live job uses it.
        SameMachineReplicationException: Copies that were asked for would be lost together with
            their originals.
    """

    _noun = "Checkpointer"
    # Whether a call has failed that saves.
    _has_failed = False

    @in_own_words
    def __init__(
        self,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        local: str | os.PathLike[str] | None = None,
        memory: bool = False,
        shared: str | os.PathLike[str] | None = None,
        session_id: str = "",
        every: Every | int = Every(overhead=0.01),  # noqa: B008 - a frozen value
        shared_every: Every | int = Every(minutes=30),  # noqa: B008 - a frozen value
        keep_last: int | None = None,
        retention: Retention | None = None,
        shared_keep_last: int | None = None,
        shared_retention: Retention | None = None,
        replication_factor: int | None = None,
        repl_strategy: ReplicationStrategy | None = None,
        on_resize: OnResize = "error",
        private: Mapping[str, PrivateRule] | None = None,
        rng: bool = True,
        guard: Sequence[torch.optim.Optimizer] = (),
        stop_signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        stop_file: str | os.PathLike[str] | None = None,
        stop_when: Callable[[], str | None] | None = None,
        grace_s: float | None = None,
        on_error: Literal["warn", "raise"] = "warn",
        max_failures: int = 3,
        max_attempts: int | None = 3,
        finite: bool = False,
        check: Check | None = None,
        check_replicas: int | None = None,
        divide_replicated: bool | None = None,
        staging_limit: int | None = None,
        on_divergence: OnDivergence = "error",
        timeout_s: float = 300.0,
        safe_globals: Iterable[Any] = (),
        events: Iterable[Sink] | None = None,
        iteration_file: str | os.PathLike[str] | None = None,
        save_last: bool = True,
        quiet: bool = False,
        read_only: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        OfOneProcess.__init__(self)
        self.stopped: str | None = None
        self._life = Life(given, self.rewind_random, lambda: self.stopped is not None)
        self._state, self._epochs = self._life.state, self._life.epochs
        self._events, self._stop_requests = self._life.events, self._life.stop_requests
        self._read_only, self._saves_last = read_only, save_last and not read_only
        # An error that is being handled by a program that makes its fallback run.
        self._handled = sys.exception()
        self._begin()

    def _begin(self) -> None:
        """Begin a loop, with the ranks as they are now."""
        life, given = self._life, self._life.given
        life.begin()
        self._ranks, self._tiers = life.ranks, life.tiers
        self._nodes, self._shared = life.nodes, life.shared
        cadence = as_cadence("every", given["every"])
        is_shared = given["shared"] is not None
        cadences = cadence, as_cadence("shared_every", given["shared_every"]) if is_shared else None
        # With a cadence that is measured, saves do not overlap. With one in steps they do as far as
        # the manager has buffers.
        self._may_overlap = cadence.steps is not None
        self._schedule, self._meter = Schedule(cadences), Meter()
        stops, costs = self._stop_requests, self._meter.costs
        # One for steps, and one for calls of poll_stop() between two steps.
        life.pulses = self._pulse, self._pulse_between = (
            Pulse(cadences, self._ranks.timeout_s, stops.why, stops.asked, costs),
            Pulse(cadences, self._ranks.timeout_s, stops.why, stops.asked, costs),
        )
        self._evidence = Evidence(self._state.parts)
        self._loaded_places = places_loaded({})
        self._last_step: int | None = None
        self._last_metrics: Metrics | None = None
        # Calls of poll_stop() since then.
        self._polls = 0
        # Whether a step was made since resume(), which counts this start; whether one ever was.
        self._is_counted = False
        # Whether the time to stop in was over before the last save was complete.
        self._is_late = False

    def __repr__(self) -> str:
        shared = "" if self._shared is None else f", {self._shared.manager!r}"
        step = "not resumed" if self._last_step is None else f"after step {self._last_step}"
        state = "closed" if self._closed else step
        return f"<{type(self).__name__} {state}, {self._nodes.manager!r}{shared}>"

    @property
    def manager(self) -> NodeManager:
        """Manager of the nodes' checkpoints: ``status``, ``explain``."""
        return self._nodes.manager

    @property
    def newest(self) -> int | None:
        """Step of the newest save to the nodes that is complete; ``None`` before the first.

        It changes in the same call on all ranks.
        """
        return self._nodes.newest

    @property
    def failed_saves(self) -> int:
        """Number of saves that failed, to the nodes and to shared storage."""
        return sum(tier.failed for tier in self._tiers)

    # The loop.

    @in_own_words
    def find_latest(self, elsewhere: Elsewhere | None = None) -> int:
        """Step of the checkpoint that :meth:`resume` is to load, or -1; all ranks call it.

        Nothing is loaded. Should that checkpoint turn out damaged, :meth:`resume` loads an older
        one, and tells so by what it returns.

        Args:
            elsewhere: As for :meth:`resume`.

        Raises:
            MismatchError, NoReplicasAvailableError, PeerLostError: As for :meth:`resume`.
        """
        self._require_open()
        return self._life.resumption.find(elsewhere)

    @in_own_words
    def resume(
        self,
        elsewhere: Elsewhere | None = None,
        *,
        step: int | None = None,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        partial: bool = False,
        allow_dtype_change: bool = False,
    ) -> int:
        """Load the newest checkpoint that can be had, in place; all ranks call it.

        It is looked for on the nodes, and then on shared storage. Tensors of the state are filled
        where they are. Optimizers without a state yet get the loaded tensors as theirs. Another
        number of ranks than saved it takes the parts of each tensor from wherever the nodes hold
        them.

        Args:
            elsewhere: A checkpoint that the program can load by itself. It is taken if it is newer,
                or nothing else can be loaded.
            step: Step of an older checkpoint to go back to, on the nodes or on shared storage. What
                is saved from there on overrules all that is newer.
            only: Names of the parts to load, such as ``["model"]``; all others stay as they are
                made.
            skip: Names of parts that stay as they are made, or that were saved and are no parts any
                more.
            rename: By the name that a part was saved under, its name now.
            partial: Let go of parts, and of values of modules, that were saved and are not given,
                or are given and were not saved; these stay as they are made. The log names them.
            allow_dtype_change: Convert values to the dtypes of the tensors that they fill, such as
                those of a model that is in bfloat16 now; else another dtype is an error.

        Returns:
            The next step: 0 if there is no checkpoint.

        Raises:
            MismatchError: The state is not as it was saved; or another number of ranks saved the
                checkpoint, values differ between these that no rule is for, and there is none on
                shared storage that can be loaded. Or the ranks know of different checkpoints
                elsewhere.
            NoReplicasAvailableError: Checkpoints were complete, and all turned out damaged, or the
                job was resumed from each in vain too often. Or there is none of ``step``.
            CheckpointingException: An argument makes no sense; nothing was changed.
            PeerLostError: Some rank did not come in time.
        """
        self._require_open()
        called = time.monotonic()
        if step is not None:
            # The job goes back from what they save, too.
            self.wait_until_finished()
        # Its plan is for steps that the loop may not come to for long.
        self._pulse.finish()
        self._state.make()
        # Of a call before: training has gone no further from there, or has come back.
        self._life.take_back_attempt()
        loaded = self._life.resumption.run(
            *(self._state, elsewhere),
            lambda: Selection(step, only, skip, rename, partial, allow_dtype_change),
            called,
        )
        self._epochs.begin(is_resumed=loaded >= 0)
        self._loaded_places = places_loaded(self._state.parts)
        if self._read_only:
            return loaded + 1
        self._last_step, self._is_counted = loaded, False
        self._nodes.begun = self._nodes.newest = None
        self._schedule.begin(loaded)
        if self._shared is not None:
            newest = self._life.resumption.newest
            self._shared.go_on(loaded if newest is None else newest)
        self._note_whole(loaded)
        return loaded + 1

    @in_own_words
    def rejoin(
        self,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        *,
        keep: Literal["live"] | None = None,
        guard: Sequence[torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> Rejoined:
        """Go on with the ranks of the job as they are now, and resume; all of them call it.

        For survivors of a lost rank, which keep their processes: after ``destroy_process_group``
        and a new ``init_process_group``, or a change of the members in place. Rank numbers, and the
        number of ranks, may be others. A rank that is new makes a :class:`Checkpointer` meanwhile,
        and calls :meth:`resume`. Whatever is under way is aborted, and saves that are not complete
        are given up. Each rank fills its state from the newest complete checkpoint: from its own
        memory, as long as that has its part, from its node, from a peer, or from shared storage.

        Args:
            state: The parts of the state, if they are other objects now, such as a module in a new
                DDP; as for the class. ``None`` for those that there are.
            keep: ``"live"`` to lose no step, where some rank's state is whole and has all that
                another one lacks: ranks that have it change nothing, and the others are filled from
                it. See :meth:`whole_step`. Else all go back, and :attr:`Rejoined.why` says why.
            guard: The optimizers of the state, if they are others now; needed with ``state``, if
                the checkpointer was given some.
            options: As for :meth:`resume`.

        Raises:
            MismatchError: As for :meth:`resume`.
            NoReplicasAvailableError: As for :meth:`resume`. Or there is no checkpoint yet, and some
                rank's state has been trained and was not given anew.
            StorageError: This rank's directory cannot be used.
            PeerLostError: Some rank did not come in time. As after any other error, rejoin again,
                or close.
        """
        called, left_after = time.monotonic(), self._last_step
        life = self._life
        if state is not None and life.given["guard"] and guard is None:
            raise CheckpointingException(
                "guard= has optimizers of the state before: give rejoin() those of the new state, "
                "guard=[...], or none, guard=[]. Nothing was changed"
            )
        if keep is not None:
            self._require_keepable(state, keep, options)
        self._begin_rejoin()
        if guard is not None:
            life.given["guard"] = guard
        life.leave_ranks()
        self.begin_life()
        try:
            with self._abort:
                life.join_ranks(state, called, left_after)
            self._begin()
            is_anew = keep is None and (state is not None or callable(self._state.given))
            if not is_anew and left_after is not None:
                # The loss may have come between a step of the optimizer and the call that notes it.
                life.resumption.trained_to = max(left_after, 0)
            life.resumption.keeps = keep is not None
            step = self.resume(**options)
        except BaseException:
            self._abort.set()
            self._last_step = left_after
            raise
        for part in map(without_marker, self._state.parts.values()):
            if isinstance(part, torch.optim.Optimizer):
                # Those of a step that was cut off.
                part.zero_grad()
        self._has_failed = False
        load, resumption = self._nodes.manager.last_load, life.resumption
        resumption.keeps, nbytes = None, resumption.nbytes
        if load is not None and load.source == resumption.source:
            nbytes = load.nbytes
        lost = 0 if left_after is None else max(0, left_after + 1 - step)
        seconds = time.monotonic() - called
        return Rejoined(step, resumption.source, nbytes, seconds, lost, resumption.why)

    def whole_step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Have ``rejoin(keep="live")`` know when the state is whole; before the first step.

        From the first of these optimizers' ``step()`` to the call of :meth:`step` it is not: a rank
        that is cut off there has nothing to keep. All that changes the parameters of the state is
        to be given here. At the end of each step buffers of modules, learning rates, states of
        random number generators, and parts that are neither module nor optimizer are copied.

        Args:
            optimizers: The optimizers, those in the state among them.

        Raises:
            CheckpointingException: One is no optimizer of torch.
        """
        self._life.live.watch(optimizers)

    def _require_keepable(self, state: Any, keep: str, options: Mapping[str, Any]) -> None:
        if keep != "live" or options:
            given = ", ".join(f"{name}=" for name in options)
            raise CheckpointingException(
                f"keep={keep!r}{' with ' * bool(given)}{given}: it is 'live' or None, and goes "
                f"with no option of resume(). Nothing was changed"
            )
        parts = self._state.given if state is None else state
        if callable(parts):
            raise CheckpointingException(
                "keep='live' keeps the parts that there are, and the state is a function that "
                "makes them: give rejoin() the parts. Nothing was changed"
            )
        self._life.live.require_watched(parts)

    def _note_whole(self, step: int) -> None:
        ranks, life = self._ranks, self._life
        was = ranks.rank, ranks.world_size, life.resumption.job_run
        life.live.note(step, self._state.parts, was)

    def _end_waits(self) -> None:
        self._life.abort()

    def epochs(self, count: int, *, first: int | None = None) -> Iterator[int]:
        """Numbers of the epochs that are left, of so many; all ranks take the same.

        The loop goes on in the epoch that it was in, with the batches that are left of it by
        :meth:`batches`. What a program does after the batches of an epoch, such as a validation, it
        does after a restart from the checkpoint of the epoch's last step, too. A loop that was
        stopped takes no further epoch::

            checkpointer.resume()
            for epoch in checkpointer.epochs(90):
                for batch in checkpointer.batches(loader):
                    train(batch)
                    checkpointer.step()
                if checkpointer.stopped:
                    break
                validate()
                scheduler.step()

        Args:
            count: Number of the epochs of the whole run, which may grow at a restart.
            first: Epoch to begin with where no checkpoint tells it: in a fresh run, or after
                :meth:`resume` took a checkpoint elsewhere or one of a program without this loop.

        Raises:
            CheckpointingException: :meth:`resume` was not called, or is called in the loop; a loop
                over epochs is under way; or an epoch was left by ``break`` after the step of a
                batch, so that a restart from that step would go on with the next batch.
            MismatchError: The checkpoint does not tell the epoch, and ``first`` is not given.
        """
        self._require_writable()
        if self._last_step is None:
            raise CheckpointingException(
                "call resume() before epochs(), which goes on where the checkpoint was saved"
            )
        yield from self._epochs.numbers(count, first)

    def batches(self, loader: Iterable[Any], *, by_index: bool = False) -> Iterator[Any]:
        """Batches of the epoch that are left; in the loop over :meth:`epochs`, once in each.

        They are the batches that come after those of the last step, whatever was made of the
        loader before, and the random number generators go on as they were. ``set_epoch`` of the
        loader, its samplers and its dataset is called where there is one. A loop that was stopped
        takes no further batch.

        Args:
            loader: A torch ``DataLoader``, whose batches that were trained on are left out without
                loading them; a ``StatefulDataLoader`` of torchdata, or any other with
                ``state_dict`` and ``load_state_dict``, which goes on by its own state; a sequence,
                such as a ``range``; or whatever else can be gone through again from its beginning,
                of which batches are drawn to leave them out. It is no part of the state.
            by_index: Whether to leave batches out without loading them though a ``DataLoader`` has
                workers. Random numbers that a dataset draws in workers are other ones then.

        Raises:
            CheckpointingException: It is not in the loop over :meth:`epochs`, or not the first in
                its epoch; or ``loader`` is an iterator, which can be gone through once.
            MismatchError: The place that was saved cannot be found in this loader: it has other
                data, or too few; or other ranks, or another size of batches, for which no batch
                begins there.
        """
        return self._epochs.batches(loader, by_index=by_index)

    @property
    def batch(self) -> int:
        """Number of the batch under way, from 0, in the epoch's :meth:`batches`."""
        return self._epochs.batch

    @in_own_words
    def step(self, step: int | None = None, *, metrics: Metrics | None = None) -> bool:
        """Note the end of a step, and save if it is time; all ranks call it, in every step.

        No message is sent, and unless a save is due, or one is under way, nothing is done.

        Args:
            step: Number of the step, greater than that of the call before; ``None`` for the next.
            metrics: Numbers to record if this step is saved, such as a loss, for
                ``Retention(best=...)``: all of them on shared storage, and on the nodes the one
                that their rule names. Those of the first rank count. Tensors are read only then.

        Returns:
            Whether the job is to stop: some rank was asked to. The state of this step is then safe,
            or the log says what is not.

        Raises:
            CheckpointingException: :meth:`resume` was not called, or the step is not after the
                last. Or too many saves in a row have failed; the same on every rank.
            DivergenceError: With ``check_replicas``: tensors that should be equal on several ranks
                are not.
            MismatchError: The ranks do not work together.
            PeerLostError: Some rank did not come in time.
        """
        is_busy = any(tier.is_busy for tier in self._tiers)
        entered = self._meter.enter(is_beside_save=self._nodes.is_busy)
        if step is None:
            step = 0 if self._last_step is None else self._last_step + 1
        if self._last_step is None or step <= self._last_step:
            raise self._out_of_order(step)
        self._ranks.require_same_world()
        self._epochs.note_step()
        self._last_step, self._last_metrics = step, metrics
        self._note_whole(step)
        if not self._is_counted:
            warn_of_lost_places(self._loaded_places)
            self._loaded_places.clear()
            self._count_attempt()
        self._polls = 0
        is_save = False
        if is_busy or step >= self._schedule.due or self._pulse.is_under_way:
            is_save = self._attend(step)
        self._evidence.note()
        self._meter.leave(entered, is_save=is_save)
        return self.stopped is not None

    @in_own_words
    def poll_stop(self) -> str | None:
        """Return why the job is to stop, ``None`` if it is not, where no :meth:`step` comes.

        Call it in loops of minutes between two steps, such as an evaluation, a warm-up or the
        preparation of data; all ranks call it equally often. No message is sent. It answers alike
        on all ranks in the same call, and then the state of the last step is safe, or the log says
        what is not: as it is now, so that nothing but random number generators may have changed
        since that step. :meth:`step` answers likewise from then on.

        Raises:
            CheckpointingException: :meth:`resume` was not called.
            MismatchError, PeerLostError: As for :meth:`step`.
        """
        step = self._last_step
        if step is None:
            raise self._out_of_order(0)
        if self.stopped is None:
            self._ranks.require_same_world()
            self._polls += 1
            between, poll = self._pulse_between, step * _POLLS_IN_STEP + self._polls
            if not between.is_under_way:
                between.begin(step, self._schedule.saved, poll)
            self._stop_as_planned(between.poll(poll), step)
        return self.stopped

    def rewind_random(self) -> None:
        """Have the random number generators go on from where :meth:`resume` has set them.

        Call it after what draws from them and was not done at that step before, such as making the
        iterator of a data loader, which draws the seed of its workers. After the first :meth:`step`
        since :meth:`resume`, as in the later epochs of a loop, it does nothing; nor without a
        checkpoint, or with ``rng=False``.
        """
        part = self._state.parts.get(RNG)
        if not self._is_counted and isinstance(part, RandomPart):
            part.rewind()

    @in_own_words
    def save(self, step: int, *, shared: bool = False, metrics: Metrics | None = None) -> None:
        """Save the state now, behind training; all ranks call it in the same step.

        Use it for a step that is to be saved whatever the cadence says: after its call of
        :meth:`step`, before that of the next or :meth:`close`. After the :meth:`batches` of an
        epoch it is put off to the end of the epoch, with all that the program does there.

        Args:
            step: Number of the step.
            shared: Whether to save to shared storage, too.
            metrics: Numbers to record, as for :meth:`step`. A step that is on the nodes already
                keeps the one that was given to :meth:`step`.

        Raises:
            CheckpointingException: As for :meth:`step`; or there is no shared storage.
        """
        self._require_open()
        is_resumed = step == self._last_step and not self._is_counted
        is_after_batches = self._epochs.is_after_batches
        if is_resumed and is_after_batches:
            # It is what the job was resumed from, and what comes after an epoch is done again.
            return
        if self._last_step is None or step < self._last_step or is_resumed:
            raise self._out_of_order(step, "save")
        if shared:
            self._shared_manager("save")
        if is_after_batches:
            # With all that the program does after an epoch, of which it may have done a part.
            self._epochs.put_off.append(partial(self.save, step, shared=shared, metrics=metrics))
            return
        self._begin_save(step, metrics)
        if shared:
            self._begin_shared_save(step, metrics)

    @in_own_words
    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step on shared storage until it is unpinned; all ranks call it.

        It waits for the save to shared storage that is under way. Every later run keeps the
        checkpoint, too.

        Raises:
            NoReplicasAvailableError: It is not there; the same on every rank, as all errors.
            CheckpointingException: There is no shared storage, or it refused.
        """
        manager = self._shared_manager("pin")
        self.wait_until_finished()
        manager.pin(step)

    @in_own_words
    def unpin(self, step: int) -> None:
        """Leave a checkpoint to the retention again; all ranks call it. Raises as :meth:`pin`."""
        self._shared_manager("unpin").unpin(step)

    @in_own_words
    def mark_good(self, why: str = "") -> int:
        """Mark the newest checkpoint on the nodes as good, by what only the job can judge.

        That is the one that the job was resumed from, or the newest that is complete since; all
        ranks call it, and no message is sent. The newest good one is kept on the nodes beside the
        ``keep_last`` newest, and no start so far counts as one in vain.

        Args:
            why: Reason, for people: ``localckpt explain`` shows it.

        Returns:
            Its step.

        Raises:
            CheckpointingException: There is no such checkpoint on the nodes.
            StorageError: The mark cannot be noted on this node.
        """
        self._require_writable()
        if self._shared is not None:
            self._shared.manager.forget_attempts()
        return self._nodes.manager.mark_good(why)

    @in_own_words
    def replace_store(self, path: str | os.PathLike[str] | None) -> None:
        """Go on with another directory on some nodes, as on a new disk; all ranks call it.

        Waits for the saves under way. See :meth:`CheckpointManager.replace_store`, which takes and
        raises the same. Events go to the old directory until the next start.
        """
        self._require_writable()
        self.wait_until_finished()
        self._nodes.manager.replace_store(path)

    @in_own_words
    def wait_until_finished(self) -> None:
        """Return when every save is complete on all ranks, or has failed; all ranks call it.

        After :meth:`close`, and with ``read_only``, none is under way, and it returns at once.
        """
        with self._events.timed("wait", self._last_step):
            while self._nodes.is_busy:
                self._finalize(self._last_step, blocking=True)
            if (shared := self._shared) is not None:
                for _ in range(_PATIENCE):
                    if not shared.is_busy or any(self._look_at_drains(shared, self._last_step)):
                        break
                while shared.is_busy:
                    shared.finalize(self._last_step, blocking=True)

    @in_own_words
    def close(self) -> None:
        """Save the last step, finish the saves under way, and free everything; all ranks call it.

        The last step is saved with ``save_last``, as the state is now, unless it is saved already
        or the job was stopped or left with an error. May be called twice.

        Raises:
            CheckpointingException: The last save failed, and ``on_error`` is ``"raise"`` or too
                many have failed in a row; everything is freed.
            MismatchError: The ranks end after different steps, so the last one was not saved;
                everything is freed.
        """
        if self._closed:
            return
        if self._interrupted or self._abort.is_set():
            interrupt = KeyboardInterrupt(self._interrupted) if self._interrupted else None
            self._life.end(partial(self._leave, interrupt or self._abort.error()))
            return
        # Also in the finally block of a loop that failed; not where the whole job handles an error.
        error = sys.exception()
        self._close_in_step(None if error is self._handled else error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._closed:
            return
        if error is None:
            self._close_in_step(None)
            return
        if not self._abort.is_set():
            self._save_after(error)
        # The other ranks may not come any more.
        self._life.end(partial(self._leave, error))

    # What a step does when there is something to do.

    def _attend(self, step: int) -> bool:
        """Finalize, plan, save and stop; return whether a save to the nodes took time."""
        is_save = self._nodes.is_busy
        self._finalize(step, blocking=False)
        if self.stopped is not None:
            return is_save
        self._stop_as_planned(self._pulse_between.poll(step * _POLLS_IN_STEP), step)
        # The next pulse begins before saves, whose waits it may end.
        if self._beat(step):
            self._beat(step)
        if self._schedule.is_save_due(NODES, step) and (
            self._may_overlap or not self._nodes.is_busy
        ):
            self._begin_save(step, self._last_metrics)
            is_save = True
        if self._schedule.is_save_due(SHARED, step):
            self._begin_shared_save(step, self._last_metrics)
        return is_save

    def _beat(self, step: int) -> bool:
        """Begin a pulse, or follow the plan of one; return whether another is to begin."""
        if self._schedule.takes_pulse(step):
            self._pulse.begin(step, self._schedule.saved, step)
        if (plan := self._pulse.poll(step)) is None:
            return False
        self._events.emit("steps", step=step, details=asdict(self._meter.costs()))
        self._evidence.look()
        self._stop_as_planned(plan, step)
        if self.stopped is None:
            self._schedule.follow(plan, step, may_save=not self._nodes.is_busy)
        return self.stopped is None

    def _begin_save(self, step: int, metrics: Metrics | None) -> None:
        nodes, waits_s = self._nodes, self._ranks.timeout_s
        # A request to stop ends the wait: the last save is that of the next step.
        self._ranks.patience(f"save step {step}").until(
            lambda: nodes.has_room or self._life.is_to_stop(), waits_s, nodes.queue.waits_for
        )
        if nodes.has_room and nodes.answers(waits_s, self._life.is_to_stop):
            nodes.save(self._state.parts, step, metrics)
        elif not self._life.is_to_stop():
            nodes.leave_out(waits_s)
        self._schedule.note_save(NODES, step)

    def _begin_shared_save(self, step: int, metrics: Metrics | None) -> None:
        shared = self._shared
        assert shared is not None, "without it no such save is planned"
        if self._nodes.begun != step:
            self._begin_save(step, metrics)
        if not (has_room := shared.has_room):
            has_room, is_to_stop = self._look_at_drains(shared, step)
            if has_room:
                shared.finalize(step, blocking=True)
            elif not is_to_stop:
                shared.leave_out(OWN_WORK * self._ranks.timeout_s)
        if has_room:
            shared.drain(step, metrics)
        self._schedule.note_save(SHARED, step)

    def _look_at_drains(self, shared: SharedTier, step: int | None) -> tuple[bool, bool]:
        """Wait for the drains under way; whether all are over, and whether the job is to stop."""
        queue, kind = shared.queue, "drain to shared storage"
        # A request to stop ends the wait, and a rank that waits alone is not to keep it from what
        # the others do next.
        self._ranks.patience(f"{kind} after step {step}").until(
            lambda: queue.is_over_here or self._life.is_to_stop(),
            *(OWN_WORK * self._ranks.timeout_s, queue.waits_for),
        )
        is_over, is_to_stop = self._ranks.decide(
            f"{kind} after step {step}",
            lambda: [queue.is_over_here, self._life.is_to_stop()],
            lambda waits: [all(over for over, _ in waits), any(stop for _, stop in waits)],
            kind=kind,
            order=step,
            read=shaped((bool, bool)),
        )
        return is_over, is_to_stop

    def _finalize(self, step: int | None, *, blocking: bool) -> None:
        """Finalize the saves that are over on all ranks; if it is ``blocking`` to the nodes."""
        was_busy, failed = self._nodes.is_busy, self.failed_saves
        if was_busy:
            self._nodes.finalize(step, blocking=blocking)
        if self.failed_saves > failed:
            self._schedule.note_failure()
        if was_busy and not self._nodes.is_busy:
            self._meter.end_save()
            self._note_progress()
        if self._shared is not None and self._shared.is_busy:
            self._shared.finalize(step, blocking=False)

    def _note_progress(self) -> None:
        """Note on shared storage that the job has got on, as the nodes' manager has."""
        shared, manager, step = self._shared, self._nodes.manager, self._nodes.newest
        if shared is None or step is None or manager.is_bad(step):
            return
        if manager.is_progress(step):
            self._note_in(shared.root, "progress", partial(shared.manager.note_progress, step))

    # Whether this start counts as one in vain.

    def _count_attempt(self) -> None:
        """Count this start as one in vain until it gets on: it has made a step."""
        self._is_counted = True
        self._life.listen()

        def count() -> None:
            for tier in self._tiers:
                tier.manager.count_attempt()

        self._note_in(self._nodes.root, "this start", count)

    def _note_in(self, place: object, what: str, note: Callable[[], object]) -> None:
        """Have a note durable before training goes on, unless the job is to stop."""
        try:
            answered(f"note {what} in", place, self._ranks.timeout_s, note, self._life.is_to_stop)
        except StorageError as error:
            logger.warning("%s", error)

    def _end_attempt(self, error: BaseException | None) -> None:
        if is_orderly(error):
            self._life.take_back_attempt()
            self._warn_if_idle()
        elif self._stop_requests.asked.is_set():
            self._nodes.manager.take_back_attempt()

    def _warn_if_idle(self) -> None:
        """Warn if nothing was left to do: the checkpoint may be that of another program."""
        if self._last_step is None or self._last_step < 0 or self._is_counted:
            return
        logger.log(
            logging.WARNING if self._ranks.is_root else logging.DEBUG,
            "the job resumed after step %d (session %r in %s%s) and made no step. If these are not "
            "the checkpoints of this program, give it another session_id",
            *(self._last_step, self._nodes.manager.session_id, self._nodes.root),
            "" if self._shared is None else f", or {self._shared.root}",
        )

    # Requests to stop, and the last save.

    def _stop_as_planned(self, plan: Plan | None, step: int) -> None:
        if plan is not None and plan.stop is not None and self.stopped is None:
            self._stop(plan.stop, step)

    def _stop(self, why: str, step: int) -> None:
        """Have the state of this step safe, as far as there is time; all ranks do so."""
        self.stopped = why
        logger.warning("stopping after step %d: %s", step, why)
        self._events.emit("preempted", step=step, details={"reason": why})
        # Behind the last save, which is not to wait for storage that hangs.
        Task(self._life.take_back_attempt).start("localckpt-stop", daemon=False)
        if self._is_counted:
            self._is_late = self._life.last_save.run(
                *(step, self._state.parts, self._last_metrics),
                # It polls more than once in a step.
                lambda: self._finalize(None, blocking=False),
            )
        else:
            # The job has made no step, and there is nothing to save.
            self._life.last_save.begin()
        self._schedule.end()

    # The end.

    def _close_in_step(self, error: BaseException | None) -> None:
        failed: list[BaseException] = []
        self._save_after(error)
        try:
            if error is None:
                self._save_last_step()
            elif self._saves_last and self.stopped is None:
                what = "the last step is not saved: close() is called while %r is handled"
                logger.info(what, error)
            if self.stopped is None:
                self._await_saves()
        except BaseException as caught:  # noqa: BLE001 - raised when everything is freed
            failed.append(caught)
        self._life.end(partial(self._finish, error, failed))

    def _save_last_step(self) -> None:
        """Save the step that the loop ended after, unless it is saved; all ranks do so."""
        if not self._saves_last or self.stopped is not None:
            return
        self._epochs.end_epoch(is_left=True)
        try:
            self._ranks.require_same_world()
        except MismatchError as error:
            # Everything is freed all the same.
            logger.warning("the last step is not saved: %s", error.text)
            return
        # One that made no step has nothing that is not saved, and takes part.
        step = self._last_step if self._is_counted else None
        lacks = [self._nodes.begun != step, self._schedule.saved[SHARED] != step]
        mine = [self._has_failed, step, *lacks]
        failed_on, step, to_nodes, to_shared = self._ranks.decide(
            *("end the job", lambda: mine, judge_last_steps),
            read=shaped((str, int | None, bool, bool)),
        )
        if failed_on:
            logger.warning("the last step is not saved: a call failed on %s", failed_on)
        if failed_on or step is None:
            return
        if to_nodes:
            self._begin_save(step, self._last_metrics)
        if to_shared and self._shared is not None:
            self._begin_shared_save(step, self._last_metrics)

    def _save_after(self, error: BaseException | None) -> None:
        """Save the last step after an error by a signal, if all know it unchanged."""
        step, is_asked = self._last_step, self._stop_requests.asked.is_set()
        if not isinstance(error, Exception) or not is_asked or self.stopped is not None:
            return
        self._life.last_save.begin()
        if step is None or not self._is_counted:
            return
        report = (step, is_of_loader(error) and self._evidence.is_unchanged())
        try:
            self._ranks.decide("save after an error", lambda: report, judge_ends)
        except CheckpointingException as refused:
            logger.error("step %d is not saved after the signal to stop: %s", step, refused.text)
            return
        why = f"{self._stop_requests.why()}, and then {type(error).__name__}"
        self._stop(why, step)

    def _await_saves(self) -> None:
        """Wait for the saves under way; a rank that is asked to stop does so for its grace."""
        self._await(self._nodes.queue)
        if self._shared is not None and not self._is_late:
            # What is complete on the nodes is drained now.
            while self._nodes.is_busy:
                self._finalize(self._last_step, blocking=True)
            self._await(self._shared.queue)

    def _await(self, queue: AsyncCallsQueue) -> None:
        asked = self._stop_requests.asked
        self._ranks.patience("finish its saves").until(
            lambda: queue.is_over_here or asked.is_set(), self._ranks.timeout_s, queue.waits_for
        )
        if asked.is_set():
            self._is_late = not self._life.last_save.await_in_time(lambda: queue.is_over_here)

    def _finish(self, handled: BaseException | None, failed: list[BaseException]) -> None:
        """Finish the saves that are under way, unless one has failed, and free everything."""
        self._end_attempt(handled)
        try:
            if failed:
                # Taken out, so that no variable of a call that it comes through keeps it.
                raise failed.pop()
            if not self._is_late:
                self.wait_until_finished()
        except BaseException as error:
            self._free(error, is_in_step=not self._is_late)
            raise
        self._free(None, is_in_step=not self._is_late)

    def _leave(self, error: BaseException) -> None:
        self._end_attempt(error)
        self._free(error, is_in_step=False)

    def _free(self, error: BaseException | None, *, is_in_step: bool) -> None:
        # An error keeps all frames that it came through.
        self._handled = None
        self._closed = True
        step, self._last_step = self._last_step, None
        outcome: Outcome | None = None if error or self.stopped is None else "stopped"
        self._life.close(error, step, outcome, is_in_step=is_in_step)

    # Refusals.

    def _shared_manager(self, what: str) -> GlobalCheckpointManager:
        self._require_writable()
        if self._shared is None:
            raise CheckpointingException(
                f"there is no shared storage: give shared= to {what} checkpoints there"
            )
        return self._shared.manager

    def _require_open(self) -> None:
        self._check_usable()
        self._ranks.require_same_world()

    def _require_writable(self) -> None:
        self._require_open()
        if self._read_only:
            raise CheckpointingException(
                "this Checkpointer was made with read_only=True: it resumes, and saves, marks and "
                "pins nothing"
            )

    def _out_of_order(self, step: int, call: str = "step") -> CheckpointingException:
        self._require_writable()
        if self._last_step is None:
            return CheckpointingException(
                f"call resume() before the first step: what is saved from step {step} on would "
                f"else overrule the checkpoints that are there. Nothing was saved"
            )
        last = f"step({self._last_step})" if self._is_counted else f"resuming at {self._last_step}"
        return CheckpointingException(
            f"{call}({step}) was called after {last}: steps must grow. To go back to a step that "
            f"was saved, call resume(step=...). Nothing was saved"
        )
