"""One round of a group of ranks over the job's store: reports go up, one verdict comes down.

The last rank to report wakes the root. Only the root reads all reports, in one message where the
store can, and whatever is decided, by the root or by a rank that waited in vain, is decided once,
by who writes the verdict first. A round takes O(N) operations of the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from localckpt.failure_texts import short
from localckpt.ranks.values import (
    delete,
    drop,
    if_there,
    look,
    look_all,
    put,
    take,
)

Fetch = Callable[[str, float], bytes | None]
"""``fetch(key, until)``: a value, or ``None`` if it is not there in time by the monotonic clock."""

# Key of the part, outside of rounds.
_HAND = "hand"
# A verdict up to this size is one value with the word that it was decided.
_INLINE_NBYTES = 1 << 20
_SMALL_PART_NBYTES = 4096
_INLINE, _APART = "=", "@"
# The value of a key that only has to be there; not an empty one, which would be waited for again.
_THERE = "1"

VERDICT = "verdict"
RESULT = "result"
"""Key of what the root has done after a round whose verdict was that all ranks did their part."""


class Round:
    def __init__(
        self,
        store: Store,
        number: int,
        rank: int,
        world_size: int,
        fetch: Fetch,
    ) -> None:
        self._store = store
        self.number = number
        self._rank = rank
        self._world_size = world_size
        self._fetch = fetch

    def report(self, report: Any, *, wakes_root: bool) -> None:
        """Report, once a round. With ``wakes_root`` the root knows before others have reported."""
        number = self.number
        # Two keys by turns: the last report stays for those who ask where a rank was last seen.
        value = json.dumps([number, report]).encode()
        put(self._store, _report_key(self._rank, number), value)
        if is_last := self._store.add(f"{number}/count", 1) == self._world_size:
            self._store.set(f"{number}/complete", _THERE)
        if is_last or wakes_root:
            self.wake_root()

    def note(self, what: str) -> None:
        self._store.set(_note_key(self._rank), json.dumps([self.number, short(what)]))

    def raise_hand(self) -> None:
        self._store.set(_HAND, _THERE)

    def is_hand_raised(self) -> bool:
        return bool(self._store.check([_HAND]))

    def put_data(self, data: bytes) -> None:
        put(self._store, _data_key(self._rank, self.number), data)

    def take_data(self, rank: int) -> bytes:
        return take(self._store, _data_key(rank, self.number))

    def drop_data(self, nbytes: int) -> None:
        """Delete the bytes of this rank's report if the root has not taken them."""
        drop(self._store, _data_key(self._rank, self.number), nbytes)

    def count_reader(self) -> None:
        self._store.add(f"{self.number}/readers", 1)

    def is_read_by_all(self) -> bool:
        return int(self._store.add(f"{self.number}/readers", 0)) >= self._world_size - 1

    def wait_for_reports(self, until: float, grace_s: float) -> None:
        """On the root: wait until all have reported, or until the grace for a failure is over."""
        if self._fetch(f"{self.number}/look", until) is not None:
            self._fetch(f"{self.number}/complete", min(until, time.monotonic() + grace_s))

    def wake_root(self) -> None:
        self._store.set(f"{self.number}/look", _THERE)

    def reports(self) -> list[Any]:
        """Read the reports of all ranks; ``None`` for one that has reported later, or not yet."""
        keys = [_report_key(rank, self.number) for rank in range(self._world_size)]
        entries = [value and json.loads(value) for value in look_all(self._store, keys)]
        return [entry[1] if entry and entry[0] == self.number else None for entry in entries]

    def last_report(self, rank: int) -> tuple[int, Any] | None:
        """The round and the report that a rank was last seen in; ``None`` if it never was."""
        values = [
            look(self._store, _report_key(rank, number))
            for number in (self.number, self.number - 1)
        ]
        found = [tuple(json.loads(value)) for value in values if value is not None]
        return max(found, key=lambda entry: entry[0], default=None)

    def last_seen(self, ranks: Sequence[int], names: Sequence[int]) -> dict[int, str]:
        """The calls that ranks were last seen in, if they ever were, by their ``names``."""
        seen: dict[int, str] = {}
        for rank in ranks:
            noted = if_there(self._store, _note_key(rank))
            number, what = (-1, "") if noted is None else json.loads(noted)
            reported = self.last_report(rank)
            # A note is of the round that the rank is to report in next.
            if reported is not None and reported[0] >= number:
                what = reported[1][0]
            if reported is not None or noted is not None:
                seen[names[rank]] = what
        return seen

    def give_parts(self, parts: Mapping[int, bytes]) -> None:
        """On the root, before the verdict: give ranks the parts of it that are theirs alone."""
        number = _packed_number(self.number)
        for rank, part in parts.items():
            put(self._store, _part_key(rank, self.number), number + part)

    def part(self) -> bytes | None:
        """Read this rank's part of a verdict that has parts; ``None`` if it has no part."""
        key, number = _part_key(self._rank, self.number), _packed_number(self.number)
        value = look(self._store, key)
        # An earlier verdict may have had a part for this rank, and this one none.
        if value is None or not value.startswith(number):
            return None
        # Others are overwritten by the next.
        if len(value) > _SMALL_PART_NBYTES:
            drop(self._store, key, len(value))
        return value[len(number) :]

    def decide(self, verdict: Any, key: str = VERDICT) -> Any:
        """Give the verdict, unless another rank has; the one that holds."""
        text, kind, key = json.dumps(verdict), _INLINE, f"{self.number}/{key}"
        if len(text) > _INLINE_NBYTES:
            put(self._store, f"{key}/body", text.encode())
            text, kind = "", _APART
        return self._read(key, self._store.compare_set(key, "", kind + text))

    def await_verdict(self, until: float, key: str = VERDICT) -> Any:
        key = f"{self.number}/{key}"
        value = self._fetch(key, until)
        return None if value is None else self._read(key, value)

    def verdict(self) -> Any:
        key = f"{self.number}/{VERDICT}"
        value = if_there(self._store, key)
        return None if value is None else self._read(key, value)

    def is_first_to_ask(self) -> bool:
        """Return whether this rank is the first that waited in vain, which looks for the reason."""
        return int(self._store.add(f"{self.number}/asked", 1)) == 1

    def forget_before(self, first: int) -> None:
        """On the root, when all have reported: delete what is left of the rounds from ``first``."""
        for number in range(first, self.number):
            _forget_verdict(self._store, number)

    def _read(self, key: str, value: bytes) -> Any:
        kind, text = value[:1].decode(), value[1:]
        return json.loads(look(self._store, f"{key}/body") or b"" if kind == _APART else text)


def remove_rounds(store: Store, rank: int) -> None:
    last = -1
    for number in (0, 1):
        if (value := if_there(store, _report_key(rank, number))) is not None:
            last = max(last, _number_in(value))
            delete(store, _report_key(rank, number))
        delete(store, _part_key(rank, number))
    store.delete_key(_note_key(rank))
    for number in range(last - 1, last + 1):
        delete(store, _data_key(rank, number))
    if rank > 0:
        return
    store.delete_key(_HAND)
    for number in range(last - 1, last + 1):
        _forget_verdict(store, number)


def _number_in(report: bytes) -> int:
    """Read the round that a report is of; -1 for a value that no rank has put there."""
    digits = report[5:25].partition(b",")[0]
    return int(digits) if digits.isdigit() else -1


def _forget_verdict(store: Store, number: int) -> None:
    for key in ("count", "complete", "look", VERDICT, RESULT, "asked", "readers"):
        store.delete_key(f"{number}/{key}")
    for key in (VERDICT, RESULT):
        delete(store, f"{number}/{key}/body")


def _report_key(rank: int, number: int) -> str:
    return f"report/{rank}/{number % 2}"


def _note_key(rank: int) -> str:
    return f"note/{rank}"


def _data_key(rank: int, number: int) -> str:
    return f"{number}/data/{rank}"


def _part_key(rank: int, number: int) -> str:
    return f"part/{rank}/{number % 2}"


def _packed_number(number: int) -> bytes:
    return number.to_bytes(8, "little")
