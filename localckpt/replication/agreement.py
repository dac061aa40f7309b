"""One outcome for all: what went wrong on one rank is raised on every rank that took part.

Without it a rank that fails would leave the others to run into their deadlines, and to guess.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from localckpt import errors
from localckpt.coordination import Coordinator
from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.failure_texts import described, ranks_named, said_by

__all__ = ["GRACE_S", "Attempt", "agree", "forget_frames", "give_up", "require_same"]

# A rank whose connections broke waits this long for the others to have noticed, and say why.
GRACE_S = 10.0


class Attempt:
    """Keeps the exception of what is done inside until the other ranks have been told."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    @property
    def succeeded(self) -> bool:
        return self.failure is None

    @property
    def told(self) -> str | None:
        """What went wrong, in words for other ranks."""
        described = _describe(self.failure)
        return described[1] if described else None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.failure = error
            return True
        return False


def agree(
    coordinator: Coordinator,
    phase: str,
    attempt: Attempt,
    payload: Any = None,
    *,
    grace_s: float = GRACE_S,
    others_s: float = 0.0,
) -> list[Any]:
    """Tell every rank how an attempt ended here; return if it succeeded on all.

    Args:
        phase: What was attempted, as an infinitive.
        payload: Something for the other ranks, if it succeeded here.
        grace_s: How long to wait for the others if it failed here.
        others_s: How much longer than usual to wait if it succeeded here: others may be in the
            middle of an attempt with a deadline of its own, and are to say how it ended.

    Returns:
        The payloads in rank order.

    Raises:
        CheckpointingException: It failed somewhere; the same on all ranks. The class is that of the
            causes, where they are of one class.
        PeerLostError: A rank did not come.
    """
    failure = attempt.failure
    usual_s = coordinator.timeout_s

    def joint_error(records: list[Any]) -> CheckpointingException | None:
        told = zip(coordinator.global_ranks, records, strict=True)
        failures = {rank: described for rank, (described, _) in told if described is not None}
        return _joint_error(phase, failures) if failures else None

    coordinator.timeout_s = usual_s + others_s if failure is None else min(usual_s, grace_s)
    try:
        records = coordinator.all_gather(
            phase,
            [_describe(failure), payload if failure is None else None],
            too_late=joint_error,
        )
    except PeerLostError as lost:
        if failure is None:
            raise
        raise PeerLostError(f"could not {phase}: {failure} Also: {lost}") from failure
    finally:
        coordinator.timeout_s = usual_s
    if failed := joint_error(records):
        try:
            raise failed from failure
        finally:
            # Else the errors would keep themselves by these variables.
            attempt.failure = None
            del failed, failure
    return [payload for _, payload in records]


def give_up(coordinator: Coordinator, phase: str, failure: Exception) -> None:
    """Leave word of a failure for ranks that will :func:`agree` on a phase, without waiting."""
    coordinator.post(phase, [_describe(failure), None])


def require_same(what: str, values: Mapping[int, str]) -> None:
    """Refuse to go on unless all ranks said the same.

    Raises:
        MismatchError: It names the ranks on either side.
    """
    if len(set(values.values())) == 1:
        return
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    said = "; ".join(f"{value} on {ranks_named(ranks)}" for value, ranks in ranks_of.items())
    raise MismatchError(
        f"ranks that replicate together must agree on {what}: {said}. Nothing was sent, and what "
        f"was saved before stands. Let all ranks call it with the same {what}."
    )


def forget_frames(failure: BaseException | None) -> None:
    """Drop the variables of the calls that failed, images among them; those that run keep theirs.

    An exception that is kept in a variable of a call that it came through would keep all of them
    until Python looks for cycles.
    """
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        # Not its context, which may be an error that the trainer is about to handle.
        failure = failure.__cause__


def _describe(failure: Exception | None) -> list[str] | None:
    if failure is None:
        return None
    return [type(failure).__name__, described(failure)]


def _joint_error(phase: str, failures: Mapping[int, list[str]]) -> CheckpointingException:
    # Peers of a rank that failed for a reason of its own have lost it: that says nothing more.
    causes = {r: told for r, told in failures.items() if told[0] != PeerLostError.__name__}
    causes = causes or dict(failures)
    kinds = {kind for kind, _ in causes.values()}
    kind = kinds.pop() if len(kinds) == 1 else ""
    error: type[CheckpointingException] = CheckpointingException
    if kind in errors.__all__:
        error = getattr(errors, kind)
    told = said_by({rank: text for rank, (_, text) in causes.items()})
    return error(f"could not {phase}: {told}")
