"""One event of a job's record, and its form in JSON.

The schema is that of docs/events.md. A field or a name that is added keeps :data:`SCHEMA_VERSION`;
one whose meaning changes raises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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

# Fields that are left out of the JSON where they have these values.
_DEFAULTS: dict[str, Any] = {
    "duration": 0.0,
    "step": None,
    "bytes": None,
    "tier": None,
    "outcome": "ok",
    "error_class": "",
    "lost": False,
    "details": {},
}


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
        fields = {
            "name": self.name,
            "start": round(self.start, 6),
            "duration": round(self.duration, 6),
            "step": self.step,
            "rank": self.rank,
            "node": self.node,
            "bytes": self.nbytes,
            "tier": self.tier,
            "outcome": self.outcome,
            "error_class": self.error_class,
            "lost": self.is_lost,
            "run": self.run,
            "number": self.number,
            "details": {name: _rounded(value) for name, value in self.details.items()},
        }
        not_default = {k: v for k, v in fields.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
        return {"v": SCHEMA_VERSION, **not_default}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Event:
        """Read what :meth:`to_json` gave; CheckpointingException if it is none, or a newer one."""
        version = fields.get("v")
        if not isinstance(version, int):
            raise CheckpointingException("this is no event of localckpt: it has no version")
        if version > SCHEMA_VERSION:
            raise CheckpointingException(
                f"the event is of schema {version}, and this localckpt reads schemas up to "
                f"{SCHEMA_VERSION}: read it with a newer one"
            )
        fields = _DEFAULTS | dict(fields)
        try:
            return cls(
                fields["name"],
                float(fields["start"]),
                int(fields["rank"]),
                str(fields["node"]),
                str(fields["run"]),
                int(fields["number"]),
                duration=float(fields["duration"]),
                step=fields["step"],
                nbytes=fields["bytes"],
                tier=fields["tier"],
                outcome=fields["outcome"],
                error_class=fields["error_class"],
                is_lost=fields["lost"],
                details=fields["details"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointingException(f"this is no event of localckpt: {error!r}") from error


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
