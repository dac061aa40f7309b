"""The handshake with which ranks open a part of the job's store.

The first rank of the group publishes a random name, and all ranks report in a round under it. Its
verdict opens the part. A rank reports under a name only once, so a name that a dead first rank had
published is either reported under already or never confirmed, and is left for the next one.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import NAMED, Absences, Failure, named
from localckpt.ranks.patience import Patience
from localckpt.ranks.round import OPENING, Round, remove_rounds
from localckpt.ranks.values import if_there
from localckpt.ranks.verdict import Verdict
from localckpt.waiting import wait_until

__all__ = ["NAMES", "Opening"]

# More ranks than that ask less often, so that the store has no more to answer.
_LONGEST_PAUSE_S, _MANY = 0.25, 1024
_ALIKE = " All ranks make the same calls in the same order."
_PUBLISHED = "opening"

NAMES = re.compile("[0-9a-f]{16}")
"""Names of parts."""


class Opening:
    """One handshake, in which all ranks come to one name that was never used before.

    ``part_of`` makes the part of a name; ``deadline`` returns that of the wait for the other ranks,
    which may be brought forward.
    """

    def __init__(
        self,
        store: Store,
        part_of: Callable[[str], Store],
        name: str,
        rank: int,
        ranks: Sequence[int],
        deadline: Callable[[], Deadline],
        is_given_up: Callable[[], bool],
        hint: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._part_of = part_of
        self._what = f"open {name!r}"
        self._name = name
        self._rank, self._ranks = rank, ranks
        self._deadline = deadline
        self._is_given_up = is_given_up
        self._hint = hint
        self._absences = Absences(ranks[rank], ranks, ranks[0])
        self._patience = Patience(ranks[rank], self._what, logging.WARNING)

    def agree(self) -> str:
        refused = {""}
        while True:
            name = self._publish() if self._rank == 0 else self._await_name(refused)
            refused.add(name)
            round_ = Round(
                self._part_of(name), OPENING, self._rank, len(self._ranks), lambda *_: None
            )
            # One that has a verdict, or under which this rank has reported, is of an attempt that
            # is over.
            if not round_.is_decided() and round_.is_first_report():
                round_.report([self._what, None, None, None, "", None], wakes_root=False)
                verdict = self._await_verdict(round_, name)
                if verdict is None:
                    remove_rounds(self._part_of(name), self._rank, len(self._ranks))
                elif verdict.failure is not None:
                    raise verdict.failure.error()
                else:
                    if self._rank == 0:
                        self._store.delete_key(_PUBLISHED)
                    return name

    def _publish(self) -> str:
        before, name = self._published(), secrets.token_hex(8)
        self._store.set(_PUBLISHED, name)
        for rank in range(len(self._ranks) if before else 0):
            remove_rounds(self._part_of(before), rank, len(self._ranks))
        return name

    def _await_name(self, refused: set[str]) -> str:
        self._wait(lambda: self._published() not in refused, lambda: [0])
        if (name := self._published()) in refused:
            raise self._failure([0], {}).error()
        return name

    def _await_verdict(self, round_: Round, name: str) -> Verdict | None:
        """The verdict under a name; ``None`` once another one is published."""
        given: Any = None
        published = name

        def is_over() -> bool:
            nonlocal given, published
            if self._rank == 0 and round_.is_complete():
                given = round_.decide(Verdict().to_json())
            else:
                # In this order: a first rank that publishes its next name has decided this one.
                published = self._published()
                given = round_.verdict()
            return given is not None or published != name

        def late() -> list[int]:
            return [rank for rank, report in enumerate(round_.reports()) if report is None] or [0]

        if not self._wait(is_over, late) or self._is_given_up():
            seen = round_.last_seen(late()[:NAMED], self._ranks)
            given = round_.decide(Verdict(failure=self._failure(late(), seen)).to_json())
        return None if given is None else Verdict.received(given, bytes)

    def _published(self) -> str:
        name = (if_there(self._store, _PUBLISHED) or b"").decode(errors="replace")
        # It becomes a part of keys, and the store ends connections over some that others put there.
        return name if NAMES.fullmatch(name) else ""

    def _wait(self, is_there: Callable[[], bool], late: Callable[[], Sequence[int]]) -> bool:
        longest_s = _LONGEST_PAUSE_S * max(1.0, len(self._ranks) / _MANY)
        found = False

        def whom() -> str:
            awaited = f"rank {self._ranks[0]}, or ranks that it names"
            if self._rank == 0:
                # No other rank looks at all of them.
                awaited = named([self._ranks[rank] for rank in late()], {})
            return f"{awaited}.{self._hint()}"

        def is_over() -> bool:
            nonlocal found
            found = self._is_given_up() or is_there()
            if not found:
                self._patience.left_s(whom)
            return found or self._deadline().left_s <= 0

        wait_until(is_over, self._deadline().left_s, longest_s=longest_s)
        return found

    def _failure(self, late: Sequence[int], seen: dict[int, str]) -> Failure:
        """Describe this rank, which has closed the part, or those that have not come."""
        if self._is_given_up():
            return self._absences.closed(self._name)
        ranks, waited_s = [self._ranks[rank] for rank in late], self._deadline().timeout_s
        return self._absences.late(self._what, ranks, seen, waited_s, f"{_ALIKE}{self._hint()}")
