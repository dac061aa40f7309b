"""One round of a group of ranks over the job's store: reports go up, one verdict comes down.

Ranks are taken in teams of about the square root of their number. The last rank of a team to report
joins the reports of the team into one message, and the last team wakes the root. Only the root
reads what all ranks say, and whatever is decided, by the root or by a rank that waited in vain, is
decided once, by who writes the verdict first. A round takes O(N) operations of the store.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isqrt
from typing import Any

from torch._C._distributed_c10d import Store

from localckpt.ranks.values import delete, if_there, look, look_all, put

__all__ = ["Round", "remove_rounds"]

Await = Callable[[str, float], bool]
"""``await_key(key, until)``: whether a key is there in time, by the monotonic clock."""

_SMALLEST_TEAM = 8
# A verdict up to this size is one value with the word that it was decided.
_INLINE_NBYTES = 1 << 20
_INLINE, _APART = "=", "@"


class Round:
    """One round, as one rank takes part in it.

    Args:
        store: The group's part of the job's store.
        number: Of the round, from 0; the same on all ranks.
        rank, world_size: This rank's place in the group, and the number of ranks.
        await_key: Waits for a key.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        rank: int,
        world_size: int,
        await_key: Await,
    ) -> None:
        self._store = store
        self._number = number
        self._rank = rank
        self._await = await_key
        self._teams = _teams(world_size)
        self._team = rank // len(self._teams[0])

    def report(self, report: Any, *, wakes_root: bool) -> None:
        """Say what there is to say on this rank.

        Args:
            report: Anything that JSON can carry.
            wakes_root: Let the root know at once, though others have not reported yet.
        """
        store, number, team = self._store, self._number, self._team
        # Two places in turn: what a rank said last is there for those who ask where it was seen.
        value = json.dumps([number, report]).encode()
        put(store, _report_key(self._rank, number), value)
        if store.add(f"{number}/count/{team}", 1) == len(self._teams[team]):
            keys = [_report_key(rank, number) for rank in self._teams[team]]
            put(store, f"{number}/team/{team}", _joined(look_all(store, keys)))
            # All of the team are here, so they are done with the round before.
            store.delete_key(f"{number - 1}/count/{team}")
            delete(store, f"{number - 1}/team/{team}")
            if store.add(f"{number}/teams", 1) == len(self._teams):
                store.set(f"{number}/complete", "")
                wakes_root = True
        if wakes_root:
            store.set(f"{number}/look", "")

    def wait_for_reports(self, until: float, grace_until: Callable[[], float]) -> bool:
        """On the root: wait until all ranks have reported; whether they have.

        Args:
            until: The deadline, by the monotonic clock.
            grace_until: The deadline once some rank has reported a failure.
        """
        if not self._await(f"{self._number}/look", until) or self.is_complete():
            return self.is_complete()
        return self._await(f"{self._number}/complete", min(until, grace_until()))

    def is_complete(self) -> bool:
        """Whether all ranks have reported."""
        return bool(self._store.check([f"{self._number}/complete"]))

    def reports(self) -> list[Any]:
        """What each rank has reported, by rank; ``None`` for those that have not."""
        store, number = self._store, self._number
        if self.is_complete():
            keys = [f"{number}/team/{team}" for team in range(len(self._teams))]
            return [said for value in look_all(store, keys) for _, said in json.loads(value)]
        reports: list[Any] = []
        for team, ranks in enumerate(self._teams):
            if store.check([f"{number}/team/{team}"]):
                joined = json.loads(look(store, f"{number}/team/{team}"))
                reports += [said for _, said in joined]
            else:
                last = [self.last_report(rank) for rank in ranks]
                reports += [said[1] if said and said[0] == number else None for said in last]
        return reports

    def last_report(self, rank: int) -> tuple[int, Any] | None:
        """The round and the report that a rank was last seen in; ``None`` if it never was."""
        found = []
        for number in (self._number, self._number - 1):
            head = if_there(self._store, _report_key(rank, number))
            if head is not None:
                found.append(tuple(json.loads(look(self._store, _report_key(rank, number)))))
        return max(found, key=lambda said: said[0], default=None)

    def decide(self, verdict: Any) -> Any:
        """Give the verdict, unless another rank has; the one that holds."""
        text, kind = json.dumps(verdict), _INLINE
        if len(text) > _INLINE_NBYTES:
            put(self._store, f"{self._number}/body", text.encode())
            text, kind = "", _APART
        return self._read(self._store.compare_set(f"{self._number}/verdict", "", kind + text))

    def hear(self, until: float) -> Any:
        """Wait for the verdict; ``None`` if it is not in time."""
        key = f"{self._number}/verdict"
        return self._read(self._store.get(key)) if self._await(key, until) else None

    def is_first_to_ask(self) -> bool:
        """Whether no other rank has waited in vain for the verdict: the first one looks why."""
        return int(self._store.add(f"{self._number}/asked", 1)) == 1

    def forget_before(self) -> None:
        """On the root, when all have reported: delete what is left of the round before."""
        _forget_verdict(self._store, self._number - 1)

    def _read(self, value: bytes) -> Any:
        kind, text = value[:1].decode(), value[1:]
        return json.loads(look(self._store, f"{self._number}/body") if kind == _APART else text)


def remove_rounds(store: Store, rank: int, world_size: int) -> None:
    """Delete what a rank may have left of its last rounds."""
    last = -1
    for number in (0, 1):
        if if_there(store, _report_key(rank, number)) is not None:
            last = max(last, json.loads(look(store, _report_key(rank, number)))[0])
            delete(store, _report_key(rank, number))
    if rank > 0:
        return
    for number in range(max(0, last - 1), last + 1):
        _forget_verdict(store, number)
        for team in range(len(_teams(world_size))):
            store.delete_key(f"{number}/count/{team}")
            delete(store, f"{number}/team/{team}")


def _teams(world_size: int) -> list[range]:
    size = max(_SMALLEST_TEAM, isqrt(world_size))
    return [range(start, min(start + size, world_size)) for start in range(0, world_size, size)]


def _forget_verdict(store: Store, number: int) -> None:
    for key in ("teams", "complete", "look", "verdict", "asked"):
        store.delete_key(f"{number}/{key}")
    delete(store, f"{number}/body")


def _report_key(rank: int, number: int) -> str:
    return f"said/{rank}/{number % 2}"


def _joined(values: list[bytes]) -> bytes:
    return b"[" + b",".join(values) + b"]"
