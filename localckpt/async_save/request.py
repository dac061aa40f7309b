"""Requests for work behind training, and the judgement of their outcome.

A request has the seven fields that requests of NVRx and Megatron-Core have, so that their queues
carry it out as well; whatever else belongs to a call hangs on its function (:class:`AsyncCall`).
Whether a call stands or fails is decided by all ranks (:mod:`localckpt.ranks.failure`).
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from localckpt.errors import CheckpointingException
from localckpt.ranks.failure import NO_FUNCTION, CallEnd

if TYPE_CHECKING:
    from localckpt.ranks.ranks import Ranks

logger = logging.getLogger(__name__)

_MARK = "__localckpt_runs_in_trainer__"

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Modules whose queues accept only instances of the ``AsyncRequest`` that they define themselves.
_FOREIGN_MODULES = (
    "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    "megatron.core.dist_checkpointing.strategies.async_utils",
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Place of a call in a queue: whether all up to it are over here, and how to finalize them."""

    is_over: Callable[[], bool]
    finalize: Callable[[], None]


@dataclass(eq=False, repr=False)
class AsyncCall:
    """A function to carry out behind training, and what else an :class:`AsyncCallsQueue` runs.

    Called, it calls the function; pickled, it is the function alone.

    Attributes:
        function: Runs behind training; ``None`` for nothing.
        failure_fns: Run in place of the request's ``finalize_fns``, on every rank, with the error
            that every rank is about to raise.
        stop_fns: Run when the queue is left with an error, or aborted, before it waits for the end
            of the call, which is to wait for no other rank any more.
        waits_for_fn: Describes which other ranks the call waits for, and what each last did.
        scheduled_fn: Runs in the trainer once the queue has taken the call.
        hand_over: Runs in the trainer when a queue of another library takes the request, and
            returns a function without arguments for its process. Without it, ``function`` is handed
            over alone.
        report_fn: Gives what came of the call on this rank, in JSON, once it is over without an
            error; in a thread. What it raises fails the call on every rank.
        judge_fn: A pure function of what came of the call on each rank, called on one rank. What it
            raises is raised on every rank.
        verdict_fn: Runs in the trainer with what ``judge_fn`` returned, right before the request's
            ``finalize_fns``; not in a poll with ``no_dist``, which asks no other rank.
        iteration: Iteration that the call saves, the same on all ranks; ``None`` for no save.
        name: What the call does, for messages, the same on all ranks; by default the function's
            name.
        is_urgent_fn: Tells by what ``judge_fn`` returned whether all ranks act in the next poll of
            the rank that is ahead, so that polls may wait a moment; by default they act one later.
    """

    function: Callable[..., Any] | None
    _: KW_ONLY
    failure_fns: Sequence[Callable[[BaseException], None]] = ()
    stop_fns: Sequence[Callable[[], None]] = ()
    waits_for_fn: Callable[[], str] = str
    scheduled_fn: Callable[[Ticket], None] | None = None
    hand_over: Callable[[], Callable[[], None]] | None = None
    report_fn: Callable[[], Any] | None = None
    judge_fn: Callable[[list[Any]], Any] | None = None
    verdict_fn: Callable[[Any], None] | None = None
    iteration: int | None = None
    name: str = ""
    is_urgent_fn: Callable[[Any], bool] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any] | None) -> AsyncCall:
        """Make a call of a function; a function that is a call already stays as it is."""
        return function if isinstance(function, AsyncCall) else cls(function)

    def without_work(self) -> AsyncCall:
        """Return a call without the function, for what follows once that function has begun."""
        return replace(self, function=None, scheduled_fn=None, hand_over=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.function is None else self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (self.function,)


def do_nothing() -> None:
    """Function of a call that has nothing to do."""


def _unpickled(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    return function


class AsyncRequest(NamedTuple):
    """A call to carry out behind training, and what follows it.

    Attributes:
        async_fn: Runs behind training on each rank; ``None`` for nothing but the finalizing. It
            may be an :class:`AsyncCall`.
        async_fn_args: Its positional arguments.
        finalize_fns: Run in the trainer, in order, once all ranks are done without an error.
        async_fn_kwargs: Its keyword arguments.
        preload_fn: Runs in the trainer before training goes on. What it returns, if not ``None``,
            takes the place of the second positional argument.
        is_frozen: Whether nothing may be added any more.
        call_idx: Number of the call in its queue.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: Sequence[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    @classmethod
    def of(cls, request: Any) -> AsyncRequest:
        """Make a request of another library one of ours; CheckpointingException if it is none."""
        if isinstance(request, AsyncRequest):
            return request
        fields = request._asdict() if hasattr(request, "_asdict") else {}
        if not {"async_fn", "async_fn_args", "finalize_fns"} <= fields.keys() <= {*cls._fields}:
            raise CheckpointingException(
                f"a {type(request).__name__} cannot be scheduled: make an AsyncRequest, whose "
                f"fields are {', '.join(cls._fields)}"
            )
        # NVRx's newest has None where there are none.
        return cls(**fields | {"async_fn_kwargs": fields.get("async_fn_kwargs") or {}})

    @property
    def call(self) -> AsyncCall:
        return AsyncCall.of(self.async_fn)

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function that runs after those that are there.

        Raises:
            CheckpointingException: The request is frozen, or its functions are not in a list.
        """
        if self.is_frozen:
            raise CheckpointingException(
                f"{function_name(fn)} cannot be added to a request that is frozen, most often "
                f"because it was scheduled already; add it before"
            )
        if not isinstance(self.finalize_fns, list):
            raise CheckpointingException(
                f"finalize_fns is a {type(self.finalize_fns).__name__}, and only a list can be "
                f"added to; make the request with a list"
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the request for a queue of another library; nothing can be added to it.

        Those queues call this before they fork, or send it to their process: it is here that a call
        hands over what such a process can run.
        """
        call, frozen = self.call, self.scheduled(self.call_idx)
        if call.hand_over is not None:
            return frozen._replace(
                async_fn=call.hand_over(), async_fn_args=(), async_fn_kwargs={}, preload_fn=None
            )
        # Never None: NVRx's persistent queue waits for ever for the end of a call without function.
        return frozen._replace(async_fn=call.function or do_nothing)

    def scheduled(self, call_idx: int) -> AsyncRequest:
        """Return a copy of the request with its number, which later additions do not change."""
        return self._replace(
            finalize_fns=tuple(self.finalize_fns), is_frozen=True, call_idx=call_idx
        )

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalize functions, as NVRx's queue has it done; returns the call's number."""
        for fn in self.finalize_fns:
            fn()
        return self.call_idx

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _accepted_here, tuple(self)

    def preload(self) -> AsyncRequest:
        """Run ``preload_fn`` and give the request as it stands then."""
        if self.preload_fn is None:
            return self
        staged, args = self.preload_fn(), self.async_fn_args
        if staged is not None:
            if len(args) < 2:
                raise CheckpointingException(
                    f"{function_name(self.preload_fn)} returned a value to stand in for the "
                    f"second argument of {function_name(self.async_fn)}, which is called with "
                    f"{len(args)}; return None, or pass that argument"
                )
            args = (args[0], staged, *args[2:])
        return self._replace(preload_fn=None, async_fn_args=args)

    def execute_sync(self, coordinator: Ranks | None = None) -> None:
        """Do here and now what a queue would do behind training, in the same order.

        Args:
            coordinator: Carries the agreement; ``None`` for all ranks of the default group.

        Raises:
            CheckpointingException: The call failed on some rank; the same on every rank.
            PeerLostError: Some rank did not come in time.
        """
        if coordinator is None:
            # Here only, so that a process which merely carries out calls does without torch.
            from localckpt.ranks.ranks import Ranks

            coordinator = Ranks("execute_sync")
        name, error = function_name(self.async_fn), None
        try:
            request = self.preload()
            if request.async_fn is not None:
                request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
        except Exception as failure:  # noqa: BLE001 - raised below, on every rank
            error = failure
        try:
            coordinator.decide_end(f"agree on {name}", CallEnd.of(self.call_idx, name, error))
        except CheckpointingException as failed:
            run_failure_fns(self, failed)
            raise failed from error
        finally:
            # A variable of a call in its traceback would make an error keep itself, and the state
            # that was to be saved.
            del error
        self.execute_finalize_fns()


def _accepted_here(*fields: Any) -> AsyncRequest:
    """A request that was pickled, as the queues whose modules are loaded here accept it."""
    foreign = (getattr(sys.modules.get(name), "AsyncRequest", None) for name in _FOREIGN_MODULES)
    return _request_class(tuple(kind for kind in foreign if _has_our_fields(kind)))(*fields)


def _has_our_fields(kind: Any) -> bool:
    is_foreign = isinstance(kind, type) and not issubclass(kind, AsyncRequest)
    return is_foreign and getattr(kind, "_fields", None) == AsyncRequest._fields


@functools.cache
def _request_class(foreign: tuple[type, ...]) -> type[AsyncRequest]:
    """Make ``AsyncRequest``, or a subclass whose instances pass as each foreign class as well."""
    if not foreign:
        return AsyncRequest
    return type("AsyncRequest", (AsyncRequest, *foreign), {"__slots__": ()})


def runs_in_trainer(function: _Function) -> _Function:
    """Mark a function whose arguments are memory of this process: it runs in a thread of it."""
    setattr(function, _MARK, True)
    return function


def must_run_in_trainer(function: Callable[..., Any]) -> bool:
    """Return whether the function, or the one inside a partial or callable object, is marked."""
    function = _innermost(function)
    called = getattr(function, "__call__", None)  # noqa: B004 - its mark is what is asked for
    return bool(getattr(function, _MARK, False) or getattr(called, _MARK, False))


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial | AsyncCall):
        function = function.func if isinstance(function, functools.partial) else function.function
    return function


def function_name(function: Callable[..., Any] | None) -> str:
    if isinstance(function, AsyncCall) and function.name:
        return function.name
    function = _innermost(function)
    if function is None:
        return NO_FUNCTION
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def run_failure_fns(request: AsyncRequest, error: BaseException) -> None:
    """Run the failure functions of a call, also those behind one that fails itself."""
    for fn in request.call.failure_fns:
        try:
            fn(error)
        except Exception:
            logger.exception("%s failed while cleaning up after: %s", function_name(fn), error)


def run_stop_fns(request: AsyncRequest) -> None:
    """Run the stop functions of a call that nobody waits for any more, as failure functions."""
    for fn in request.call.stop_fns:
        try:
            fn()
        except Exception:
            logger.exception("%s failed while a call was given up", function_name(fn))
