"""One event of a job's record, and its form in JSON.

The schema is that of docs/events.md. A field or a name that is added keeps :data:`SCHEMA_VERSION`;
one whose meaning changes raises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from localckpt.errors import CheckpointingException

SCHEMA_VERSION = 1

Name: TypeAlias = Literal[
    # The run of one rank.
    "run_began",
    "steps",
    "preempted",
    "run_ended",
    # A restart: the whole, and its parts one after another.
    "resume",
    "start",
    "meet",
    "find",
    "fetch",
    "read",
    # A save: the whole, and its parts. "wait_prev" and "d2h" are within "blocking".
    "save",
    "blocking",
    "wait_prev",
    "d2h",
    "background",
    # Waiting for saves to end, to stop or to close.
    "wait",
    # What becomes of checkpoints.
    "degraded",
    "diverged",
    "reprotected",
    "prefetched",
    "drain",
    "pruned",
    "quarantined",
]
Tier: TypeAlias = Literal["local", "replicated", "shared"]
Outcome: TypeAlias = Literal["ok", "failed", "skipped", "unknown", "stopped"]

LOST: frozenset[str] = frozenset(
    ("blocking", "wait", "start", "meet", "find", "fetch", "read"),
)
"""Names of events during which no rank trains. None of them is a part of another."""

# Names in JSON of fields that have another one there, and what others are read as.
_JSON_NAMES = {"nbytes": "bytes", "is_lost": "lost"}
_KINDS = {"start": float, "duration": float, "rank": int, "node": str, "run": str, "number": int}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened on one rank.

    Attributes:
        name: Kind of the event.
        start: When it began, in seconds since 1970; for people, and to line up ranks.
        rank: Rank of the job that it happened on.
        node: Host name of the rank's node.
        run: Random name of this start of this rank, the same for all its events.
        number: Position among the events of the run, from 0. A gap is events that were dropped.
        duration: Its length in seconds; 0 for a moment.
        step: Step, or iteration, of the checkpoint or the training loop that it is about.
        nbytes: Bytes of this rank that were saved, loaded or copied.
        tier: Where the checkpoint is: ``"local"`` on its own nodes, ``"replicated"`` on others as
            well, or on ``"shared"`` storage.
        outcome: How it ended. ``"unknown"`` if some other rank did not answer.
        error_class: Class of the error if it failed.
        is_lost: Whether no training was done meanwhile.
        details: What only this kind of event has; values that JSON can carry.
    """

    name: Name
    start: float
    rank: int
    node: str
    run: str
    number: int
    duration: float = 0.0
    step: int | None = None
    nbytes: int | None = None
    tier: Tier | None = None
    outcome: Outcome = "ok"
    error_class: str = ""
    is_lost: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object; fields that say nothing are left out."""
        found: dict[str, Any] = {"v": SCHEMA_VERSION}
        for of in fields(self):
            value = getattr(self, of.name)
            if of.name == "details":
                value = {name: _rounded(detail) for name, detail in value.items()}
            value = _rounded(value)
            if value not in (of.default, {}):
                found[_KEYS[of.name]] = value
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Event:
        """Read what :meth:`to_json` gave; CheckpointingException if it is none, or a newer one."""
        version = found.get("v")
        if not isinstance(version, int):
            raise CheckpointingException("this is no event of localckpt: it has no version")
        if version > SCHEMA_VERSION:
            raise CheckpointingException(
                f"the event is of schema {version}, and this localckpt reads schemas up to "
                f"{SCHEMA_VERSION}: read it with a newer one"
            )
        given = {name: found[key] for name, key in _KEYS.items() if key in found}
        try:
            return cls(**given | {n: kind(given[n]) for n, kind in _KINDS.items() if n in given})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointingException(f"this is no event of localckpt: {error!r}") from error


_KEYS = {of.name: _JSON_NAMES.get(of.name, of.name) for of in fields(Event)}


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
