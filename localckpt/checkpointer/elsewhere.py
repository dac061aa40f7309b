"""A checkpoint that localckpt has not written, as a job may resume from one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Elsewhere"]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A checkpoint that the program loads by itself, such as one of a framework's own.

    Attributes:
        step: Its step; the same on all ranks.
        load: Fills the state from it. All ranks call it.
        goes_back: Whether to take it even if localckpt has a newer one, which is then given up.
    """

    step: int
    load: Callable[[], object]
    goes_back: bool = False
