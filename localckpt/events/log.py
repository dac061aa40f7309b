"""Sink that logs each event in one line."""

from __future__ import annotations

import logging

from localckpt.events.event import Event

__all__ = ["Log", "described_event"]

logger = logging.getLogger(__name__)

# Outcomes of which somebody should hear.
_BAD = frozenset(("failed", "unknown"))


class Log:
    """Logs events by the logger ``localckpt.events.log``: those that went wrong as warnings.

    Args:
        level: Level of the others.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self._level = level

    def write(self, event: Event) -> None:
        """Log one event."""
        level = logging.WARNING if event.outcome in _BAD else self._level
        logger.log(level, "%s", described_event(event))

    def flush(self) -> None:
        """Do nothing: a logger keeps nothing back."""

    def close(self) -> None:
        """Do nothing: the logger is not the sink's."""


def described_event(event: Event) -> str:
    """One line of an event, without its time."""
    about = event.name if event.step is None else f"{event.name} of step {event.step}"
    parts = [
        event.outcome,
        f"{event.duration:.3f} s" if event.duration else "",
        "" if event.nbytes is None else f"{event.nbytes} bytes",
        event.tier or "",
        event.error_class,
        *(f"{name} {_value(value)}" for name, value in event.details.items()),
    ]
    return f"rank {event.rank}: {about}: {', '.join(filter(None, parts))}"


def _value(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
