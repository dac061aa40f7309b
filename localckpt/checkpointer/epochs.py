"""Loop over epochs, and over the batches of each: where it is, and how it goes on from there.

What is saved is the place after the last step: an epoch, and how many of its batches were given.
What a program does after an epoch comes after its last step, so it has its turn after a restart
from there, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain, islice
from typing import Any

from localckpt.checkpointer.loaders import (
    batches_given,
    entry_of,
    facts_of,
    is_torchdatas,
    is_unstarted,
    restore_entry,
    restore_generators,
    samplers_of,
    states_of,
    without_first,
)
from localckpt.checkpointer.parts import EPOCHS, RandomPart
from localckpt.errors import CheckpointingException, MismatchError

logger = logging.getLogger(__name__)


class _At(Enum):
    OUTSIDE = "outside of epochs()"
    BEFORE = "in an epoch, before its batches"
    WITHIN = "in a batch"
    AFTER = "in an epoch, after its batches"


class Epochs:
    """Place in a loop over epochs, a part of the state; ``put_off`` has saves for its end."""

    def __init__(
        self, rewind: Callable[[], None], is_stopped: Callable[[], bool], world_size: int
    ) -> None:
        self._rewind, self._is_stopped, self._world_size = rewind, is_stopped, world_size
        self.put_off: list[Callable[[], None]] = []
        self._life = 0
        self._loader: Any = None
        self._entry: dict[str, Any] = {}
        self._taken: Mapping[str, Any] | None = None
        self.begin(is_resumed=False)

    def rejoin(self, world_size: int) -> None:
        """Take another number of ranks; a loop that was under way is over."""
        # A load that was aborted may have given its place.
        self._world_size, self._taken = world_size, None
        self.begin(is_resumed=False)

    def begin(self, *, is_resumed: bool) -> None:
        """Begin at what was loaded since the last call, if anything was."""
        loaded, self._taken = self._taken, None
        self._life += 1
        self._at = _At.OUTSIDE
        self.put_off.clear()
        # Whether step() was called for the batch under way; whether its loop was left then, or has
        # come to its end.
        self._has_stepped = self._is_cut = self._is_through = False
        self._is_fresh = True
        # It is not known of a checkpoint elsewhere, or of one saved by another loop.
        self._is_unknown = is_resumed and (loaded is None or loaded["epoch"] is None)
        self._loaded = None if self._is_unknown else loaded
        self._is_used = self._loaded is not None
        epoch = 0 if self._loaded is None else int(self._loaded["epoch"])
        self._epoch, self._given = epoch, 0
        # Place after the last step: epoch, number of batches, and whether the epoch has no more.
        self._noted = (epoch, 0, False)
        if self._loaded is not None:
            self._noted = (epoch, self._loaded["batches"], self._loaded["is_over"])

    @property
    def batch(self) -> int:
        return max(self._given - 1, 0)

    @property
    def saved_at(self) -> float | None:
        """Wall-clock time at which what was just loaded was saved; for people only."""
        return None if self._taken is None else self._taken["saved_at"]

    # The loops.

    def numbers(self, count: int, first: int | None) -> Iterator[int]:
        """Numbers of the epochs that are left; see :meth:`localckpt.Checkpointer.epochs`."""
        if self._at is not _At.OUTSIDE:
            raise CheckpointingException(
                f"epochs() was called {self._at.value}: a program has one loop over epochs at a "
                f"time. Give an inner loop a range()"
            )
        if self._is_unknown:
            if first is None:
                raise MismatchError(
                    f"the checkpoint that was resumed from does not say in which epoch it was "
                    f"saved: its program had no epochs(), or the part {EPOCHS!r} was left out. "
                    f"Give the epoch to begin with, epochs({count}, first=...)"
                )
            self._is_unknown = False
        if first is not None and not self._is_used:
            self._epoch = first
            self._noted = (first, 0, False)
        self._is_used, life = True, self._life
        if self._epoch >= count and self._is_fresh:
            logger.info("nothing is left of %d epochs: %d were trained", count, self._epoch)
        self._rewind()
        try:
            while self._epoch < count:
                self._at, self._given = _At.BEFORE, 0
                self._is_through = self._is_cut = False
                yield self._epoch
                self._require_same(life)
                if self._is_stopped():
                    return
                if self._is_cut:
                    raise CheckpointingException(
                        f"epoch {self._epoch} was left by break after step() in batch {self.batch}:"
                        f" a restart from that step would go on with the next batch. Look before "
                        f"the step of a batch whether it is to be trained on, by the number that "
                        f"Checkpointer.batch has"
                    )
                self.end_epoch()
                while self.put_off:
                    self.put_off.pop(0)()
        finally:
            if life == self._life:
                self.end_epoch(is_left=True)
                self._at = _At.OUTSIDE

    def end_epoch(self, *, is_left: bool = False) -> None:
        """Note that an epoch is done, with what comes after its batches."""
        if is_left and not (self._at is _At.AFTER and self._is_through):
            # There are batches of it left.
            return
        self._at = _At.OUTSIDE
        if not (is_left and self._is_stopped()):
            self._epoch, self._given = self._epoch + 1, 0
            self._noted = (self._epoch, 0, False)

    def batches(self, loader: Iterable[Any], *, by_index: bool = False) -> Iterator[Any]:
        """Batches of the epoch that are left; see :meth:`localckpt.Checkpointer.batches`.

        A loader may have ``without_first``, which gives the batches after so many, in place of the
        rules for torch's loaders. With ``by_index`` batches are left out by index though workers
        draw random numbers.
        """
        if self._at is not _At.BEFORE:
            again = " once in each epoch" if self._at in (_At.WITHIN, _At.AFTER) else ""
            raise CheckpointingException(
                f"batches() was called {self._at.value}: go through the loader that is trained on "
                f"by batches(){again}, in the loop over epochs(), and through others, such as one "
                f"for validation, as they are"
            )
        if isinstance(loader, Iterator):
            raise CheckpointingException(
                f"batches() was given a {type(loader).__name__}, which can be gone through once: "
                f"give it the loader itself, without iter() or enumerate()"
            )
        life, left = self._life, self._enter(loader, by_index=by_index)
        self._at, self._has_stepped = _At.WITHIN, False
        try:
            for batch in left:
                self._given += 1
                self._has_stepped = False
                yield batch
                self._require_same(life)
                if self._is_stopped():
                    return
            self._has_stepped, self._is_through = False, True
            if self._noted == (self._epoch, self._given, False):
                self._noted = (self._epoch, self._given, True)
        finally:
            if life == self._life:
                self._at, self._is_cut = _At.AFTER, self._has_stepped

    def note_step(self) -> None:
        if self._at is _At.WITHIN:
            self._has_stepped = True
            self._noted = (self._epoch, self._given, False)
        elif self._at is not _At.OUTSIDE:
            raise CheckpointingException(
                f"step() was called {self._at.value}, to which a restart could not go back: call "
                f"it in the loop over batches(), or go through range(resume(), n) in place of "
                f"epochs(). Nothing was saved"
            )

    @property
    def is_after_batches(self) -> bool:
        return self._at is _At.AFTER

    def _require_same(self, life: int) -> None:
        if life != self._life:
            raise CheckpointingException(
                "resume() was called in the loop over epochs(): leave the loop before, and begin "
                "a new one with epochs()"
            )

    # The place in the data.

    def _enter(self, loader: Any, *, by_index: bool) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        self._loader, samplers = loader, samplers_of(loader)
        for thing in (*samplers.values(), getattr(loader, "dataset", None)):
            if callable(set_epoch := getattr(thing, "set_epoch", None)):
                set_epoch(self._epoch)
        if self._is_fresh and is_torchdatas(loader):
            # A place that was loaded, or an iterator that was made, before this loop.
            loader.load_state_dict({})
            loader.next_iter_state = None
        self._is_fresh = False
        if loaded is None or loaded["epoch"] != self._epoch:
            self._entry = entry_of(samplers)
            return iter(loader)
        self._given = count = batches_given(loaded, facts_of(loader, self._world_size))
        self._noted = (self._epoch, count, loaded["is_over"])
        is_over = loaded["is_over"] or (count > 0 and count == loaded["facts"]["batches"])
        is_same_world = loaded["facts"]["ranks"] == self._world_size
        generators = loaded.get("generators", {}) if is_same_world else {}
        state = loaded.get("loader") if count == loaded["batches"] and is_same_world else None
        if not callable(getattr(loader, "load_state_dict", None)) or (
            # With one that is at its end, there is nothing to take.
            is_over and is_torchdatas(loader)
        ):
            state = None
        if state is not None:
            loader.load_state_dict(state)
        if count == 0:
            restore_generators(samplers, generators)
            self._entry = entry_of(samplers)
            return iter(loader)
        before = RandomPart()
        states = before.state_dict()
        self._entry = loaded.get("entry") or entry_of(samplers)
        if is_same_world:
            restore_entry(samplers, self._entry)
        if is_over:
            left = iter(())
        elif state is not None:
            left = iter(loader)
        else:
            left = without_first(loader, count, by_index=by_index)
        if is_unstarted(left):
            # It draws the order with the first batch.
            left = chain(list(islice(left, 1)), left)
        restore_generators(samplers, generators)
        before.load_state_dict(states)
        self._rewind()
        return left

    def state_dict(self) -> dict[str, Any]:
        epoch, batches, is_over = self._noted
        state: dict[str, Any] = {"epoch": epoch if self._is_used else None, "batches": batches}
        state |= {"is_over": is_over, "saved_at": time.time(), "facts": {}}
        if self._loader is None:
            return state
        is_within = epoch == self._epoch and batches > 0
        state["facts"] = facts_of(self._loader, self._world_size)
        state["generators"] = states_of(samplers_of(self._loader))
        state["entry"] = self._entry if is_within else None
        is_now = (epoch, batches) == (self._epoch, self._given)
        if is_now and callable(give := getattr(self._loader, "state_dict", None)):
            own = dict(give())
            # A StatefulDataLoader that is at its end would draw the order of the next epoch twice.
            is_at_end = own.get("_iterator_finished") or (
                batches == 0 and is_torchdatas(self._loader)
            )
            state["loader"] = None if is_at_end else own
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._taken = dict(state)
