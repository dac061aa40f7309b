"""Errors about ranks that did not come: who, what each of them last did, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localckpt.errors import PeerLostError
from localckpt.failure_texts import ranks_named
from localckpt.ranks.failure import Failure

__all__ = ["NAMED", "SLOW", "Absences", "named"]

SLOW = "If the ranks are alive but slow, give a longer timeout; else restart the job."
"""Advice on the topic ``slow``, on ranks that did not come."""

NAMED = 16
"""So many ranks are named in a message."""


@dataclass(frozen=True, slots=True)
class Absences:
    """The words of one rank (``me``) about others: ranks of the job, of which ``root`` judges."""

    me: int
    ranks: Sequence[int]
    root: int

    def late(
        self, what: str, late: Sequence[int], seen: Mapping[int, str], waited_s: float, hint: str
    ) -> Failure:
        """Describe ranks that have not reported in time.

        ``seen`` has the call in which each was last seen, if it was; ``hint`` is the end of the
        message.
        """
        return _lost(
            f"rank {self.me} waited {round(waited_s, 2):g} s to {what}, and "
            f"{named(late, seen)} did not come. What was saved before stands",
            advice=f"{SLOW}{hint}",
        )

    def too_late(self, what: str, late: Sequence[int]) -> Failure:
        """Tell this rank, which is among ``late``, that the others did not wait for it."""
        others = ranks_named(rank for rank in self.ranks if rank != self.me)
        missing = [rank for rank in late if rank != self.me]
        named = ", ".join(f"rank {rank}" for rank in missing[:NAMED])
        nor = f", and {named} had not come either" if missing else ""
        return _lost(
            f"rank {self.me} came too late to {what}: the others ({others}) were not all waiting "
            f"any more{nor}. What was saved before stands",
            advice=SLOW,
        )

    def closed(self, name: str) -> Failure:
        return _lost(
            f"rank {self.me} closed {name!r} before all ranks had opened it. What was saved before "
            f"stands",
            advice=SLOW,
        )

    def left(self, what: str) -> Failure:
        return _lost(
            f"could not {what}: rank {self.me} has left before all ranks had come. What was saved "
            f"before stands"
        )

    def unknown(self, what: str, waited_s: float) -> Failure:
        return _lost(
            f"could not {what}: all ranks had done their part, and rank {self.root} has not said "
            f"after {waited_s:g} s what came of it. Whether it was done is not known; what was "
            f"saved before stands. find_latest() will tell",
            outcome_unknown=True,
        )


def named(late: Sequence[int], seen: Mapping[int, str]) -> str:
    """Return ranks that have not come in words, with the call in which each was last seen."""
    texts = [f"rank {rank} (last seen: {seen.get(rank, 'not seen yet')})" for rank in late]
    texts[NAMED:] = [f"{len(late) - NAMED} more"] * (len(late) > NAMED)
    return ", ".join(texts)


def _lost(text: str, *, advice: str = "", **fields: bool) -> Failure:
    advised = {"topic": "slow", "advice": advice} if advice else {}
    return Failure(PeerLostError.__name__, text, {**fields, **advised})
