"""Repair of checkpoints whose pieces are lost while the job runs, beside its saves.

A disk was replaced, a folder removed, a copy quarantined, or a peer could not be reached by a save.
What is made again, and how, is in ``copies.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from localckpt.availability.inventory import ranks_by_node
from localckpt.errors import (
    CheckpointingException,
    MismatchError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.events.event import Outcome
from localckpt.failure_texts import described, ranks_named, short
from localckpt.ids import Checkpoint
from localckpt.managers.context import Context
from localckpt.managers.copies import PROTECTING_STEPS, Reprotection
from localckpt.ranks.failure import Attempt, forget_frames
from localckpt.ranks.ranks import Ranks
from localckpt.storage.directory import DirectoryStore
from localckpt.threads import SerialThread, Task

logger = logging.getLogger(__name__)

# Saves that end, at most, before a repair is tried again.
_MOST_PASSES = 64


class Repairs:
    """Repairs of kept checkpoints beside saves, in rounds that all ranks begin in the same poll.

    Each rank looks for names in its folder when a save ends, and tells with its outcome what lacks
    pieces. A round gives up what is pruned meanwhile. After each round that fails in a row, twice
    as many saves end before the next.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = SerialThread("localckpt-repair")
        self._rounds: list[tuple[Reprotection, Task[None]]] = []
        self._suspect: set[Checkpoint] = set()
        self._failures = self._passes = 0

    def wanted(self) -> tuple[Checkpoint, ...]:
        """Return the kept checkpoints that lack pieces, as far as this rank knows; any thread."""
        checkpoints, kept = self._context.checkpoints, self._context.checkpoints.complete
        if (images := self._context.images) is None:
            return ()
        self._suspect.update(images.lost())
        if self._passes or self._is_busy:
            return ()
        return tuple(c for c in kept if c in self._suspect or checkpoints.lacks_copies(c))

    def begin(self, lacking: Collection[Checkpoint]) -> None:
        """Begin a round for those that are kept; all ranks call it as a save ends, in one poll.

        It waits for nothing: a round that is under way goes on, or is aborted if it is at a
        checkpoint that is kept no more.
        """
        kept, under_way = self._context.checkpoints.complete, self._context.checkpoints.under_way
        self._passes = max(0, self._passes - 1)
        over = [c for c in (*self._suspect,) if c not in kept and c.iteration not in under_way]
        self._suspect.difference_update(over)
        self._rounds = [(of, task) for of, task in self._rounds if not task.done()]
        for reprotection, _ in self._rounds:
            if reprotection.checkpoint is not None and reprotection.checkpoint not in kept:
                reprotection.abort()
        if not (wanted := [checkpoint for checkpoint in kept if checkpoint in lacking]):
            return
        context = self._context
        ranks = Ranks("repair", context.options.process_group, context.options.timeout)
        ranks.prepare()
        reprotection = Reprotection(context, ranks)
        task = Task(partial(self._repair, reprotection, wanted))
        self._rounds.append((reprotection, task))
        try:
            self._thread.submit(task)
        except RuntimeError as error:
            task.call_off()
            ranks.abandon()
            logger.warning("lost pieces are not made again now: %s", error)

    def finish(self) -> None:
        """Wait for the rounds that were begun."""
        deadline_s = PROTECTING_STEPS * self._context.ranks.timeout_s
        for _, task in self._rounds:
            if not task.wait(deadline_s):
                raise CheckpointingException(
                    f"making lost pieces again has not ended after {deadline_s:g} s: is the disk "
                    f"of this node stuck?"
                )
        self._rounds = []

    def abort(self) -> None:
        """End the rounds, from any thread."""
        for reprotection, _ in tuple(self._rounds):
            reprotection.ranks.cut_off()
            reprotection.abort()

    def close(self) -> None:
        """Abort the rounds, and wait until nothing of them runs here."""
        for reprotection, _ in self._rounds:
            reprotection.abort()
        self.finish()

    @property
    def _is_busy(self) -> bool:
        return not all(task.done() for _, task in self._rounds)

    def _repair(self, reprotection: Reprotection, wanted: Sequence[Checkpoint]) -> None:
        store, checkpoints = self._context.images, self._context.checkpoints
        assert store is not None, "hooks are not asked what they have lost"
        store.repaired = frozenset(wanted)
        try:
            inventory = reprotection.look(wanted)
            self._suspect.difference_update(wanted)
            for checkpoint in wanted:
                try:
                    reprotection.repair(checkpoint, inventory)
                except NoReplicasAvailableError as error:
                    self._note_failure(reprotection, checkpoint, error)
        except Exception as error:  # noqa: BLE001 - the next round tries again
            self._note_failure(reprotection, wanted[0], error)
            forget_frames(error)
        finally:
            store.repaired = frozenset()
            reprotection.ranks.close()
            self._prune(wanted)
            left = [c for c in wanted if c in self._suspect or checkpoints.lacks_copies(c)]
            self._failures = self._failures + 1 if left and not reprotection.ranks.is_aborted else 0
            self._passes = min(2**self._failures, _MOST_PASSES) - 1

    def _prune(self, made: Sequence[Checkpoint]) -> None:
        """Prune what was made of a checkpoint after all ranks had pruned it."""
        context = self._context
        over = [c for c in made if c not in context.checkpoints.complete]
        if context.images is None or not over:
            return
        try:
            context.images.prune(lambda shard: shard.checkpoint in over, ())
        except StorageError as error:
            logger.warning("pieces that nobody keeps stay until the next start: %s", error)

    def _note_failure(
        self, reprotection: Reprotection, checkpoint: Checkpoint, error: Exception
    ) -> None:
        is_ours = reprotection.ranks.is_aborted
        is_lost = isinstance(error, NoReplicasAvailableError)
        logger.log(
            logging.ERROR if is_lost else logging.INFO if is_ours else logging.WARNING,
            "iteration %d %s: %s",
            checkpoint.iteration,
            "cannot be loaded any more" if is_lost else "is not repaired now",
            described(error),
            exc_info=None if isinstance(error, CheckpointingException) else error,
        )
        outcome: Outcome = "stopped" if is_ours else "failed"
        details = {"error": short(described(error))}
        emit = self._context.events.emit
        emit("reprotected", step=checkpoint.iteration, outcome=outcome, details=details)


def open_in_place(
    context: Context, open_store: Callable[..., Any], path: str | os.PathLike[str] | None
) -> DirectoryStore | None:
    """Open a store that takes this node's place, on all ranks or on none; ``None`` for none here.

    All ranks call it. Raises the same error on all, and then nothing was changed.
    """
    ranks, new = context.ranks, None
    with Attempt() as opening:
        if path is not None:
            new = open_store(root=path)
    told = [path is not None, (context.store if new is None else new).domain]
    judge = partial(_judge_places, context.nodes)
    try:
        ranks.decide("open the new directories", opening.of(told), judge, grace_s=ranks.timeout_s)
    except BaseException:
        if new is not None:
            new.close()
        raise
    return new


def _judge_places(nodes: Sequence[str], told: Sequence[Any]) -> None:
    """Raise an error unless some store is new, and the ranks that share one are as before."""
    if not any(is_new for is_new, _ in told):
        raise CheckpointingException(
            "no rank gives a directory to replace_store(): give one on all ranks of the nodes "
            "whose disk was replaced. No store was replaced"
        )
    before = ranks_by_node(nodes).values()
    for ranks in ranks_by_node([domain for _, domain in told]).values():
        if ranks not in before:
            raise MismatchError(
                f"{ranks_named(ranks)} would have one store, and others share one now: give "
                f"replace_store() a directory of each node's own, the same on all of its ranks. No "
                f"store was replaced"
            )
