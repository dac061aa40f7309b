"""Calls into a manager, one at a time, and the clean-up after an interrupted call.

An interrupt, as Ctrl-C raises it, may come between any two instructions, also while another one is
being handled. So a call notes its name before it does anything, and takes the name away when it is
left in order: a later call that finds a name cleans up first.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from localckpt.errors import CheckpointingException
from localckpt.ranks.ranks import Ranks
from localckpt.threads import interrupt_behind

__all__ = ["Calls", "one_call"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """The calls into one manager.

    Args:
        ranks: The ranks that take part in the calls. Other ranks cannot know that a call was
            interrupted here, so no further call can be made with them.
        clean_up: Gives back what an interrupted call has taken; may itself be interrupted, and is
            then called again.
    """

    def __init__(self, ranks: Ranks, clean_up: Callable[[], None]) -> None:
        self._ranks = ranks
        self._clean_up = clean_up
        self._process = os.getpid()
        self._under_way = threading.Lock()
        self._thread = 0
        self._name = ""
        self._interrupted = ""

    def make(
        self,
        name: str,
        call: Callable[[], T],
        *,
        inside: bool = False,
        also_interrupted: bool = False,
    ) -> T:
        """Make a call, unless another one is under way.

        Args:
            name: What the user calls it.
            call: Does it.
            inside: Whether it may be a part of another call of this thread.
            also_interrupted: Whether it can be made after an interrupt, whatever other ranks do.

        Raises:
            CheckpointingException: Another call is under way; or one was interrupted, and other
                ranks take part; or this process is a fork.
            MismatchError: The job's process group, or its members, are not those of the manager.
        """
        self.require_own_process()
        if self._under_way.locked():
            if inside and self._thread == threading.get_ident():
                return call()
            raise CheckpointingException(
                f"{name}() was called while {self._name or 'another call'}() of the same manager "
                f"is under way{'' if self._thread == threading.get_ident() else ' in a thread'}: "
                f"make one call at a time. Nothing was done"
            )
        # Left in order whatever comes, since the lock is not written in Python.
        if not also_interrupted:
            self._ranks.require_same_world()
        with self._under_way:
            self._begin(name, also_interrupted)
            handled, interrupt = sys.exception(), None
            try:
                result = call()
            except BaseException as error:
                interrupt = interrupt_behind(error, handled)
                if interrupt is None:
                    self._name, self._thread = "", 0
                    raise
                self._left_by_interrupt()
                raise interrupt from None
            finally:
                # Else an error would keep itself, and the state, by a variable of this call.
                del handled, interrupt
            self._name, self._thread = "", 0
            return result

    @property
    def hint(self) -> str:
        """Most frequent cause of ranks that do not come, as the end of an error message."""
        if self._name == "finalize":
            return " Does every rank poll its queue?"
        return f" Is {self._name}() called on every rank?" if self._name else ""

    def require_own_process(self) -> None:
        """Check that no fork of the trainer makes a call.

        Raises:
            CheckpointingException: This process is one.
        """
        if os.getpid() != self._process:
            raise CheckpointingException(
                f"this manager belongs to process {self._process}, of which this one is a fork: "
                f"save and load there. Nothing was changed"
            )

    def _begin(self, name: str, also_interrupted: bool) -> None:
        if self._name:
            # Cleaning up after it was interrupted, too.
            self._left_by_interrupt()
        if self._interrupted and not also_interrupted:
            raise CheckpointingException(
                f"{name}() cannot be called: {self._interrupted}() was interrupted on this rank, "
                f"and the other ranks may wait for it. Close this manager and its queue, and make "
                f"new ones on every rank. Checkpoints saved before are as they were"
            )
        self._name, self._thread = name, threading.get_ident()

    def _left_by_interrupt(self) -> None:
        if self._ranks.world_size > 1:
            self._interrupted = self._interrupted or self._name
        try:
            self._clean_up()
        except Exception:
            # The interrupt is what is to be raised.
            logger.exception("what %s() left when it was interrupted stays", self._name)
        self._name, self._thread = "", 0


class _HasCalls(Protocol):
    @property
    def _calls(self) -> Calls: ...


ManagerT = TypeVar("ManagerT", bound=_HasCalls)


def one_call(
    method: Callable[Concatenate[ManagerT, P], T],
) -> Callable[Concatenate[ManagerT, P], T]:
    """Decorate a method of a manager that cannot be called while another one is under way."""

    @functools.wraps(method)
    def guarded(manager: ManagerT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(method, manager, *args, **kwargs)
        return manager._calls.make(method.__name__, call)

    return guarded
