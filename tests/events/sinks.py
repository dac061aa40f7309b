"""Sinks for tests: one that keeps what it gets, ones that hang or fail."""

from __future__ import annotations

import threading

from localckpt.events.event import Event

__all__ = ["Failing", "Hanging", "Kept", "make_event"]


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


class Hanging(Kept):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write(self, event: Event) -> None:
        self.reached.set()
        self.go_on.wait(60)
        super().write(event)


class Failing(Kept):
    """Fails at the first event."""

    def write(self, event: Event) -> None:
        super().write(event)
        raise OSError(28, "no space left")


def make_event(number: int = 0, **fields: object) -> Event:
    given = {"name": "save", "start": 1000.0 + number, "rank": 3, "node": "n", "run": "r"} | fields
    return Event(number=number, **given)  # type: ignore[arg-type]
