"""What is to be done behind training, and what all ranks make of its outcome.

A request is plain data: a function, its arguments, and what runs once every rank is done. Whether
a call stands or fails is decided by :func:`judge`, a pure function of what the ranks report.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from localckpt import errors
from localckpt.errors import CheckpointingException, MismatchError

if TYPE_CHECKING:
    from localckpt.coordination import Coordinator

__all__ = [
    "AsyncRequest",
    "CallReport",
    "function_name",
    "judge",
    "must_run_in_trainer",
    "run_failure_fns",
    "run_stop_fns",
    "runs_in_trainer",
]

logger = logging.getLogger(__name__)

_MARK = "__localckpt_runs_in_trainer__"
# Every rank sends its error to every other, so one endless message must not fill the job's store.
_LONGEST_TEXT = 4000

_NO_FUNCTION = "no function"

_Function = TypeVar("_Function", bound=Callable[..., Any])


class AsyncRequest(NamedTuple):
    """A call to carry out behind training, and what follows it.

    Attributes:
        async_fn: Runs behind training on each rank; ``None`` for nothing but the finalizing.
        async_fn_args: Its positional arguments.
        finalize_fns: Run in the trainer, in order, once all ranks are done without an error.
        async_fn_kwargs: Its keyword arguments.
        preload_fn: Runs in the trainer before training goes on. What it returns, if not ``None``,
            takes the place of the second positional argument.
        is_frozen: Whether nothing may be added any more.
        call_idx: Number of the call in its queue.
        failure_fns: Run in place of ``finalize_fns``, on every rank, with the error that every
            rank is about to raise.
        stop_fns: Run when the queue is left with an error, or aborted, before it waits for the end
            of the call: other ranks may not come any more, and it is to wait for none.
        then_fn: Runs in a thread of the trainer once ``async_fn`` has returned, wherever that ran;
            the call is over when this is. A queue of others does not know of it.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: Sequence[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0
    failure_fns: Sequence[Callable[[BaseException], None]] = ()
    stop_fns: Sequence[Callable[[], None]] = ()
    then_fn: Callable[[], None] | None = None

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
        """The same request, to which nothing can be added; what this one gets later is its own."""
        return self._replace(finalize_fns=tuple(self.finalize_fns), is_frozen=True)

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

    def execute_sync(self, coordinator: Coordinator | None = None) -> None:
        """Do here and now what a queue would do behind training, in the same order.

        Args:
            coordinator: Carries the agreement; ``None`` for all ranks of the default group.

        Raises:
            CheckpointingException: The call failed on some rank; the same on every rank.
            PeerLostError: Some rank did not come in time.
        """
        if coordinator is None:
            # Here only, so that a process which merely carries out calls does without torch.
            from localckpt.coordination import Coordinator

            coordinator = Coordinator("execute_sync")
        name, error = function_name(self.async_fn), None
        try:
            request = self.preload()
            if request.async_fn is not None:
                request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
                if request.then_fn is not None:
                    request.then_fn()
        except Exception as failure:  # noqa: BLE001 - raised below, on every rank
            error = failure
        own = CallReport.of(self.call_idx, name, error)
        try:
            records = coordinator.all_gather(f"agree on {name}", own.to_json())
        except CheckpointingException as lost:
            run_failure_fns(self, lost)
            raise
        failed = judge([CallReport.from_json(r) for r in records], coordinator.global_ranks)
        if failed is not None:
            run_failure_fns(self, failed)
            raise failed from error
        for fn in self.finalize_fns:
            fn()


def runs_in_trainer(function: _Function) -> _Function:
    """Mark a function whose arguments are memory of this process: it runs in a thread of it."""
    setattr(function, _MARK, True)
    return function


def must_run_in_trainer(function: Callable[..., Any]) -> bool:
    """Whether the function, or the one inside a partial, method or callable object, is marked."""
    while isinstance(function, functools.partial):
        function = function.func
    return bool(
        getattr(function, _MARK, False) or getattr(function.__call__, _MARK, False)  # type: ignore[operator]
    )


def function_name(function: Callable[..., Any] | None) -> str:
    """What messages call a function."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None:
        return _NO_FUNCTION
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def run_failure_fns(request: AsyncRequest, error: BaseException) -> None:
    """Tell the owner of a failed call. One that fails itself does not keep the others from it."""
    for fn in request.failure_fns:
        try:
            fn(error)
        except Exception:
            logger.exception("%s failed while cleaning up after: %s", function_name(fn), error)


def run_stop_fns(request: AsyncRequest) -> None:
    """Tell the owner of a call that nobody waits for it any more; as :func:`run_failure_fns`."""
    for fn in request.stop_fns:
        try:
            fn()
        except Exception:
            logger.exception("%s failed while a call was given up", function_name(fn))


@dataclass(frozen=True, slots=True)
class CallReport:
    """What one rank says of its oldest call; all ranks judge by the same reports."""

    call_idx: int
    function: str
    kind: str | None = None
    text: str = ""

    @classmethod
    def of(cls, call_idx: int, function: str, error: BaseException | None) -> CallReport:
        if error is None:
            return cls(call_idx, function)
        own_names = (c.__name__ for c in type(error).__mro__ if c.__name__ in errors.__all__)
        kind = next(own_names, "") if isinstance(error, CheckpointingException) else ""
        text = f"{type(error).__name__}: {error}"
        if len(text) > _LONGEST_TEXT:
            text = f"{text[:_LONGEST_TEXT]} (cut)"
        return cls(call_idx, function, kind, text)

    def to_json(self) -> list[Any]:
        return [self.call_idx, self.function, self.kind, self.text]

    @classmethod
    def from_json(cls, fields: list[Any]) -> CallReport:
        return cls(*fields)


def judge(reports: Sequence[CallReport], ranks: Sequence[int]) -> CheckpointingException | None:
    """The error that every rank raises, or ``None`` when the call stands.

    Args:
        reports: One of each rank.
        ranks: The global ranks, in the same order.
    """
    # A rank that has nothing to write takes part with no function.
    functions = {r.function for r in reports} - {_NO_FUNCTION}
    if len({r.call_idx for r in reports}) > 1 or len(functions) > 1:
        where = ", ".join(
            f"rank {rank} is at call {r.call_idx} ({r.function})"
            for rank, r in zip(ranks, reports, strict=True)
        )
        return MismatchError(
            f"the ranks do not finalize the same call: {where}. Every rank must schedule the same "
            f"calls in the same order. The oldest of these was not finalized"
        )
    failed = [(rank, r) for rank, r in zip(ranks, reports, strict=True) if r.kind is not None]
    if not failed:
        return None
    kinds = {r.kind for _, r in failed}
    kind = kinds.pop() if len(kinds) == 1 else None
    raised: type[CheckpointingException] = (
        getattr(errors, kind) if kind in errors.__all__ else CheckpointingException
    )
    causes = "; ".join(f"rank {rank}: {r.text.rstrip('.')}" for rank, r in failed)
    _, first = failed[0]
    return raised(
        f"call {first.call_idx} ({first.function}) failed on {causes}. "
        f"It was finalized on no rank; further calls can be scheduled"
    )
