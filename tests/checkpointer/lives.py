"""Lives of a training loop: killed after each of its steps, and begun anew in the same process."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

import localckpt

__all__ = ["Killed", "Losses", "Tier", "lives"]

Tier = Literal["nodes", "shared"]
Losses = dict[str, str]


class Killed(BaseException):
    """Ends a life: nothing more is saved, and everything is left as it is."""


def lives(
    rank: int,
    program: Any,
    node: Path,
    tier: Tier,
    shared: Path | None = None,
    *arguments: Any,
) -> tuple[Losses, Losses, int]:
    """The losses of a program that is never killed, and of one killed after each of its steps.

    Every life has objects of its own, with other random numbers than any other.
    """

    def live(local: Path, dies_after: int | None) -> tuple[Losses, bool]:
        losses: Losses = {}

        class Mortal(localckpt.Checkpointer):
            def resume(self, *args: Any, **kwargs: Any) -> int:
                if (first := super().resume(*args, **kwargs)) == 0:
                    # Of equal models each rank draws numbers of its own.
                    torch.manual_seed(100 + rank)
                    random.seed(rank)
                return first

            def step(self, *args: Any, **kwargs: Any) -> bool:
                is_to_stop = super().step(*args, **kwargs)
                self._steps = getattr(self, "_steps", 0) + 1
                if self._steps == dies_after:
                    self.wait_until_finished()
                    raise Killed
                return is_to_stop

        def note(key: str, value: Any) -> None:
            assert key not in losses
            losses[key] = torch.as_tensor(value, dtype=torch.double).item().hex()

        options: dict[str, Any] = {"local": local, "max_attempts": None}
        if tier == "shared":
            options |= {"shared": shared, "shared_every": 1}
        if dies_after is None:
            options = {"local": local, "every": 10**6}
        else:
            options["every"] = 1
        with mock.patch.object(localckpt, "Checkpointer", Mortal):
            try:
                program(note, *arguments, **options)
            except Killed:
                return losses, True
        return losses, False

    # The first life of both runs has the same ones. What is drawn by others does not matter.
    torch.manual_seed(0)
    expected, is_killed = live(node / "whole", None)
    assert not is_killed
    found: Losses = {}
    count = 0
    while is_killed or count == 0:
        torch.manual_seed(count)
        local = node / (f"{count}" if tier == "shared" else "killed")
        losses, is_killed = live(local, 1)
        assert all(found.get(key, value) == value for key, value in losses.items())
        found |= losses
        count += 1
        if tier == "shared":
            shutil.rmtree(local)
    return expected, found, count
