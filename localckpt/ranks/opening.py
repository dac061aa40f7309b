"""The handshake with which ranks open a part of the job's store.

The first rank of the group publishes a random name, every other rank signs the name, and the first
rank confirms it once all have signed. A rank signs a name only once, so a name that a dead first
rank had published is either signed already or never confirmed, and is left for the next one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from localckpt.errors import PeerLostError
from localckpt.ranks.absent import SLOW
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.patience import Patience
from localckpt.ranks.values import if_there
from localckpt.waiting import wait_until

__all__ = ["Opening"]

_NAMED = 16
# More ranks than that ask less often, so that the store has no more to answer.
_LONGEST_PAUSE_S, _MANY = 0.25, 1024
_CLOSED, _CONFIRMED = "closed ", "confirmed"


class Opening:
    """One handshake, in which all ranks come to one name that was never used before.

    Args:
        store: Store of all openings of this name by these ranks.
        name: What is opened, for messages.
        rank: This process's place among ``ranks``.
        ranks: The ranks, as ranks of the job.
        deadline: Returns the deadline of the wait for the other ranks; it may be brought forward.
        is_given_up: Tells whether nobody waits for this opening any more.
        hint: Returns the end of the error message for ranks that do not come: a likely cause.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        deadline: Callable[[], Deadline],
        is_given_up: Callable[[], bool],
        hint: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._deadline = deadline
        self._is_given_up = is_given_up
        self._hint = hint
        self._patience = Patience(ranks[rank], f"open {name!r}", logging.WARNING)

    def agree(self) -> str:
        return self._publish() if self._rank == 0 else self._sign()

    def _publish(self) -> str:
        before = (if_there(self._store, "opening") or b"").decode().removeprefix(_CLOSED)
        name, others = secrets.token_hex(8), len(self._ranks) - 1
        self._store.set("opening", name)
        if before:
            self._remove(before, range(1, others + 1))
        # Also when another rank has given up.
        self._wait(
            lambda: (
                self._store.add(f"{name}/signed", 0) >= others
                or if_there(self._store, f"{name}/outcome") is not None
            )
        )
        if self._is_given_up():
            outcome = self._decide(name, self._describe_given_up())
            if outcome != _CONFIRMED:
                raise self._lost(outcome)
        # No rank of a later attempt may sign a name that is confirmed already.
        self._store.set("opening", f"{_CLOSED}{name}")
        all_signed = self._store.add(f"{name}/signed", 0) >= others
        outcome = self._decide(name, _CONFIRMED if all_signed else self._describe_unsigned(name))
        if outcome != _CONFIRMED:
            raise self._lost(outcome)
        if self._wait(lambda: self._store.add(f"{name}/readers", 0) >= others):
            self._store.delete_key("opening")
            self._remove(name, ())
        return name

    def _sign(self) -> str:
        refused: set[str] = set()
        while self._wait(lambda: self._published() not in {"", *refused}):
            if self._is_given_up():
                raise self._lost(self._describe_given_up())
            name = self._published()
            if name in {"", *refused}:
                continue
            # Once only: a name that this rank has signed before is of an attempt that is over. So
            # is one that was given up before all had signed.
            is_over = if_there(self._store, f"{name}/outcome") is not None
            if is_over or self._store.add(f"{name}/signed/{self._rank}", 1) > 1:
                refused.add(name)
                continue
            self._store.add(f"{name}/signed", 1)
            if (outcome := self._await_outcome(name)) is None:
                refused.add(name)
                self._remove(name, [self._rank])
                continue
            self._store.delete_key(f"{name}/signed/{self._rank}")
            self._store.add(f"{name}/readers", 1)
            if outcome != _CONFIRMED:
                raise self._lost(outcome)
            return name
        raise self._lost(self._describe_lost([0]))

    def _await_outcome(self, name: str) -> str | None:
        """The outcome of a name that was signed; ``None`` once another one is published."""
        outcome: bytes | None = None
        published = name

        def is_decided() -> bool:
            nonlocal outcome, published
            # In this order: a first rank that goes on to its next opening has decided this one.
            published = self._published(closed=True)
            outcome = if_there(self._store, f"{name}/outcome")
            return outcome is not None or published.removeprefix(_CLOSED) != name

        if not self._wait(is_decided) or self._is_given_up():
            return self._decide(name, self._describe_unsigned(name))
        return None if outcome is None else outcome.decode()

    def _decide(self, name: str, outcome: str) -> str:
        """Say how an opening ends, for all ranks, unless another rank has; what holds."""
        return self._store.compare_set(f"{name}/outcome", "", outcome).decode()

    def _published(self, *, closed: bool = False) -> str:
        name = (if_there(self._store, "opening") or b"").decode()
        return "" if name.startswith(_CLOSED) and not closed else name

    def _remove(self, name: str, ranks: Sequence[int]) -> None:
        for key in ("signed", "outcome", "readers", *(f"signed/{rank}" for rank in ranks)):
            self._store.delete_key(f"{name}/{key}")

    def _wait(self, is_there: Callable[[], bool]) -> bool:
        longest_s = _LONGEST_PAUSE_S * max(1.0, len(self._ranks) / _MANY)
        found = False

        def is_over() -> bool:
            nonlocal found
            found = self._is_given_up() or is_there()
            if not found:
                self._patience.left_s(lambda: f"{self._describe_awaited()}.{self._hint()}")
            return found or self._deadline().left_s <= 0

        wait_until(is_over, self._deadline().left_s, longest_s=longest_s)
        return found

    def _lost(self, text: str) -> PeerLostError:
        return PeerLostError(text).advised("slow", f"{SLOW}{self._hint()}")

    def _describe_given_up(self) -> str:
        return (
            f"rank {self._ranks[self._rank]} closed {self._name!r} before all ranks had opened it. "
            f"What was saved before stands"
        )

    def _describe_unsigned(self, name: str) -> str:
        others = range(1, len(self._ranks))
        lost = [r for r in others if not self._store.check([f"{name}/signed/{r}"])]
        return self._describe_lost(lost or [0])

    def _describe_awaited(self) -> str:
        """Return in words who has not come; only the first rank looks at all others."""
        if self._rank or not (name := self._published()):
            return f"rank {self._ranks[0]}, or ranks that it names"
        others = range(1, len(self._ranks))
        return self._named([r for r in others if not self._store.check([f"{name}/signed/{r}"])])

    def _describe_lost(self, lost: Sequence[int]) -> str:
        return (
            f"waited {self._deadline().timeout_s:g} s to open {self._name!r}, and "
            f"{self._named(lost)} (last seen: not seen yet) did not come. All ranks make the same "
            f"calls in the same order; what was saved before stands"
        )

    def _named(self, ranks: Sequence[int]) -> str:
        named = ", ".join(f"rank {self._ranks[rank]}" for rank in ranks[:_NAMED])
        return named + f" and {len(ranks) - _NAMED} more" * (len(ranks) > _NAMED)
