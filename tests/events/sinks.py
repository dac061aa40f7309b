"""A sink that keeps what it gets, for tests."""

from __future__ import annotations

from localckpt.events.event import Event

__all__ = ["Kept", "make_event"]


class Kept:
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.flushes = 0
        self.closed = 0

    def write(self, event: Event) -> None:
        self.events.append(event)

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.closed += 1

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


def make_event(number: int = 0, **fields: object) -> Event:
    given = {"name": "save", "start": 1000.0 + number, "rank": 3, "node": "n", "run": "r"} | fields
    return Event(number=number, **given)  # type: ignore[arg-type]
