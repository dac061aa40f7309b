"""One rank's part in one round over the job's store: reports go up, one verdict comes down.

The last rank to report wakes the root. Only the root reads all reports, in one message where the
store can, and gives the verdict. A rank that waits for it in vain finds out who is missing, and
gives the verdict in its place: it is decided once, by who writes it first. A round takes O(N)
operations of the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import Store

from localckpt.errors import MismatchError, PeerLostError
from localckpt.failure_texts import short
from localckpt.ranks import values
from localckpt.ranks.deadline import store_errors
from localckpt.ranks.failure import NAMED, OPENING, Failure, Place, named
from localckpt.ranks.verdict import Call, Verdict, joint_failure, judge_reports

Fetch = Callable[[str, float], bytes | None]
"""``fetch(key, until)``: a value, or ``None`` if it is not there in time by the monotonic clock."""

Outcome = tuple[Verdict, Exception | None]
"""A verdict, and on the root the error of the judge that it comes of."""

# The root gives up first; then the first of those that waited for it in vain looks why, and the
# others wait for what it finds.
AFTER_ROOT, AFTER_FIRST_S = 0.1, 2.0

# Key of the part, outside of rounds.
_HAND = "hand"
_SMALL_PART_NBYTES = 4096
# The value of a key that only has to be there; not an empty one, which would be waited for again.
_THERE = "1"

VERDICT = "verdict"
RESULT = "result"
"""Keys of the verdict, and of what the root has done once all ranks had done their part."""


class Round:
    """One rank's part in a round; ``number`` counts those of its part of the store."""

    def __init__(self, store: Store, place: Place, number: int, fetch: Fetch) -> None:
        self._store = store
        self._place = place
        self.number = number
        self._fetch = fetch

    def take_part(self, call: Call) -> Outcome:
        """Report, and wait for the verdict; in a thread that may wait at the store."""
        report, deadline = call.report(), call.deadline
        if call.data and not self._place.is_root:
            values.put(self._store, _bytes_key(self._place.rank, self.number), call.data)
        self.report(report)
        if self._place.is_root:
            if self._fetch(f"{self.number}/look", deadline.at) is not None:
                until = min(deadline.at, time.monotonic() + call.grace_s)
                self._fetch(f"{self.number}/complete", until)
            return self._lead(call)
        if report[1] is not None and not call.grace_s:
            failure = self._place.failed(call.what, Failure.from_json(report[1]))
            verdict: Verdict | None = self.give(Verdict(failure=failure))
        else:
            verdict = self.hear(VERDICT, deadline.at + deadline.timeout_s * AFTER_ROOT)
        return self._ended(call, verdict or self.give_up(call.what, deadline.waited_s))

    def end_now(self, call: Call) -> Outcome:
        """End a round in which this rank has reported, and waits no longer."""
        if self._place.is_root:
            return self._lead(call)
        return self._ended(call, self.give_up(call.what, call.deadline.waited_s, last_wait_s=0.0))

    def give_up(self, what: str, waited_s: float, last_wait_s: float = AFTER_FIRST_S) -> Verdict:
        """Decide that the ranks which have not reported are lost, unless another rank does."""
        # The first rank that waited in vain looks for the reason.
        is_first = (
            not last_wait_s
            or self._place.is_root
            or int(self._store.add(f"{self.number}/asked", 1)) == 1
        )
        try:
            with store_errors(what):
                reports = self._reports() if is_first else []
                if None not in reports:
                    if is_first:
                        # A rank may have died after its report, before it was counted.
                        self._wake_root()
                    # The others wait longer, for what the first one decides.
                    until = time.monotonic() + last_wait_s / (2 if is_first else 1)
                    if (given := self.hear(VERDICT, until)) is not None:
                        return given
                    reports = self._reports()
                missing = self._verdict_on_missing(what, reports, waited_s)
        except MismatchError as error:
            # What a rank has reported cannot be read.
            missing = Verdict(failure=Failure.of(error))
        return self.give(missing)

    def give(self, verdict: Verdict, key: str = VERDICT) -> Verdict:
        """Give a verdict for all ranks, unless there is one; return the one that holds."""
        held = self._give(verdict, key)
        # Another thread of the root may wait for reports.
        self._wake_root()
        return held

    def hear(self, key: str, until: float) -> Verdict | None:
        """Wait for the verdict, or what the root has done after it; ``None`` if it is late."""
        head = self._fetch(f"{self.number}/{key}", until)
        if key == RESULT:
            self.count_reader()
        if head is None:
            return None
        given = json.loads(values.whole(self._store, f"{self.number}/{key}", head))
        return Verdict.received(given, self._own_part)

    def verdict(self) -> Verdict | None:
        """Return the verdict, without a part for this rank, if there is one."""
        given = values.look(self._store, f"{self.number}/{VERDICT}")
        return None if given is None else Verdict.received(json.loads(given), bytes)

    def is_known(self) -> bool:
        """Return whether there is a verdict, or a process of this rank has reported before."""
        keys = _report_key(self._place.rank), f"{self.number}/{VERDICT}"
        return any(self._store.check([key]) for key in keys)

    def awaited(self) -> str:
        """Return in words which ranks are waited for: on the root all, else whether it is."""
        place = self._place
        if not place.is_root and None not in self._reports([place.root]):
            return f"ranks that rank {place.ranks[place.root]} names"
        late = _missing(self._reports()) if place.is_root else [place.root]
        return named([place.ranks[rank] for rank in late], self._last_seen(late)) or (
            "the job's store"
        )

    def report(self, report: Any) -> None:
        """Report, once a round; the root knows of a failure before others have reported."""
        self._show(report[0], report)
        if is_last := self._store.add(f"{self.number}/count", 1) == len(self._place.ranks):
            self._store.set(f"{self.number}/complete", _THERE)
        if is_last or report[1] is not None:
            self._wake_root()

    def note(self, what: str) -> None:
        """Show that this rank is at work, in the place of its report of the round before."""
        self._show(short(what), None)

    def raise_hand(self) -> None:
        self._store.set(_HAND, _THERE)

    def is_hand_raised(self) -> bool:
        return bool(self._store.check([_HAND]))

    def count_reader(self) -> None:
        self._store.add(f"{self.number}/readers", 1)

    def is_read_by_all(self) -> bool:
        # Not by an addition, which would make the key again where it has been removed.
        read = values.if_there(self._store, f"{self.number}/readers") or b"0"
        return int(read) >= len(self._place.ranks) - 1

    def _lead(self, call: Call) -> Outcome:
        """On the root: judge the reports, or find out who is missing; give the verdict."""
        ranks, cause = self._place.ranks, None
        try:
            with store_errors(call.what):
                reports = self._reports()
                if None in reports:
                    waited_s = call.deadline.waited_s
                    verdict = self._verdict_on_missing(call.what, reports, waited_s)
                else:
                    # What is left of earlier rounds has been read by all.
                    for number in range(self._place.forgotten, self.number):
                        _forget_verdict(self._store, number)
                    self._place.forgotten = self.number
                    data = {self._place.rank: call.data or b""}
                    if joint_failure(call.what, reports, ranks) is None:
                        for rank, (_, _, _, nbytes, *_) in enumerate(reports):
                            if nbytes and rank != self._place.rank:
                                data[rank] = values.take(self._store, _bytes_key(rank, self.number))
                    verdict, cause = judge_reports(call, reports, data, ranks)
        except MismatchError as error:
            # What a rank has reported cannot be read.
            verdict = Verdict(failure=Failure.of(error))
        return self._give(verdict, VERDICT), cause

    def _verdict_on_missing(self, what: str, reports: list[Any], waited_s: float) -> Verdict:
        place = self._place
        late = _missing(reports) or [place.root]
        failure = joint_failure(what, reports, place.ranks)
        missing = tuple(place.ranks[rank] for rank in late)
        if failure is None or failure.kind == PeerLostError.__name__:
            absent = place.late(what, missing, self._last_seen(late), waited_s)
            # Ranks that have lost a peer say so, and this which of them is to blame.
            also = "" if failure is None else f" Also: {failure.text}"
            failure = replace(absent, text=f"{absent.text}{also and '.'}{also}")
        return Verdict(failure=failure, late=missing, given_up=what)

    def _ended(self, call: Call, verdict: Verdict) -> Outcome:
        if verdict.failure is not None:
            self.count_reader()
            if call.data:
                # The root may not have taken them.
                values.drop(self._store, _bytes_key(self._place.rank, self.number), len(call.data))
        return verdict, None

    # Values in the store.

    def _wake_root(self) -> None:
        self._store.set(f"{self.number}/look", _THERE)

    def _show(self, what: str, report: Any) -> None:
        # A rank is in a later round only once the ones before have verdicts: no report is missed.
        value = json.dumps([self.number, what, report]).encode()
        values.put(self._store, _report_key(self._place.rank), value)

    def _shown(self, ranks: Iterable[int]) -> list[Any]:
        """Read round, call, and report of the last calls of ranks; ``None`` for one not seen."""
        found = values.look_all(self._store, [_report_key(rank) for rank in ranks])
        return [value and json.loads(value) for value in found]

    def _reports(self, ranks: Iterable[int] | None = None) -> list[Any]:
        """Read the reports of ranks; ``None`` for one that is in another round, or at work."""
        shown = self._shown(range(len(self._place.ranks)) if ranks is None else ranks)
        return [entry[2] if entry and entry[0] == self.number else None for entry in shown]

    def _last_seen(self, ranks: Sequence[int]) -> dict[int, str]:
        """The calls that ranks were last seen in, if they ever were, by their names in the job."""
        shown = zip(ranks, self._shown(ranks[:NAMED]), strict=False)
        return {self._place.ranks[rank]: entry[1] for rank, entry in shown if entry}

    def _give(self, verdict: Verdict, key: str) -> Verdict:
        for rank, part in (verdict.parts or {}).items():
            values.put(self._store, _part_key(rank, self.number), f"{self.number}:".encode() + part)
        given = json.dumps(verdict.to_json()).encode()
        held = values.put_first(self._store, f"{self.number}/{key}", given)
        return Verdict.received(json.loads(held), self._own_part)

    def _own_part(self) -> bytes | None:
        """Read this rank's part of a verdict that has parts; ``None`` if it has no part."""
        key, number = _part_key(self._place.rank, self.number), f"{self.number}:".encode()
        value = values.look(self._store, key)
        # An earlier verdict may have had a part for this rank, and this one none.
        if value is None or not value.startswith(number):
            return None
        # Others are overwritten by the next; an aborted rank may read its part again.
        if len(value) > _SMALL_PART_NBYTES:
            values.drop(self._store, key, len(value))
        return value[len(number) :]


def _missing(reports: list[Any]) -> list[int]:
    return [rank for rank, report in enumerate(reports) if report is None]


def remove_rounds(store: Store, rank: int, for_all: bool) -> None:
    """Delete what is left of a rank's rounds, and ``for_all`` what is for all ranks.

    A rank that was cut off may have given a verdict in a round that the root did not come to, nor
    that rank itself.
    """
    shown = values.if_there(store, _report_key(rank)) or b""
    # The number of the round that the rank was last seen in, unless no rank has put the value.
    digits = shown[5:25].partition(b",")[0]
    last = int(digits) if digits.isdigit() else OPENING
    values.delete(store, _report_key(rank))
    if for_all:
        store.delete_key(_HAND)
    for number in (last - 1, last, last + 1):
        values.delete(store, _bytes_key(rank, number))
        values.delete(store, _part_key(rank, number))
        if for_all:
            _forget_verdict(store, number)


def _forget_verdict(store: Store, number: int) -> None:
    for key in ("count", "complete", "look", "asked", "readers"):
        store.delete_key(f"{number}/{key}")
    for key in (VERDICT, RESULT):
        values.delete(store, f"{number}/{key}")


def _report_key(rank: int) -> str:
    return f"report/{rank}"


def _part_key(rank: int, number: int) -> str:
    """Key of a rank's part of a verdict: by turns, so that one that is not read stays in no way."""
    return f"part/{rank}/{number % 2}"


def _bytes_key(rank: int, number: int) -> str:
    """Key of the bytes beside a rank's report."""
    return f"{number}/bytes/{rank}"
