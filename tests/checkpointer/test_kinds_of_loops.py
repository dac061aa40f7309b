"""Loops of seven kinds of programs go on bit for bit where they were killed, after every step."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch

import localckpt
from examples import loops
from tests.ranks import node_store, run_ranks

Losses = dict[str, str]


class _Killed(BaseException):
    """Ends a life: nothing more is saved, and everything is left as it is."""


def lives(
    rank: int,
    program: Any,
    folder: Path,
    tier: Literal["nodes", "shared"],
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
                return first

            def step(self, *args: Any, **kwargs: Any) -> bool:
                is_to_stop = super().step(*args, **kwargs)
                self._steps = getattr(self, "_steps", 0) + 1
                if self._steps == dies_after:
                    self.wait_until_finished()
                    raise _Killed
                return is_to_stop

        def note(key: str, value: Any) -> None:
            assert key not in losses
            losses[key] = torch.as_tensor(value, dtype=torch.double).item().hex()

        options: dict[str, Any] = {"local": local, "max_attempts": None}
        if tier == "shared":
            options |= {"shared": folder / "shared", "shared_every": 1}
        if dies_after is None:
            options = {"local": local, "every": 10**6}
        else:
            options["every"] = 1
        with mock.patch.object(localckpt, "Checkpointer", Mortal):
            try:
                program(note, *arguments, **options)
            except _Killed:
                return losses, True
        return losses, False

    def begin(life: int) -> None:
        # The first life of both runs has the same ones. What is drawn by others does not matter.
        torch.manual_seed(life)

    begin(0)
    expected, is_killed = live(node_store() / "whole", None)
    assert not is_killed
    found: Losses = {}
    count = 0
    while is_killed or count == 0:
        begin(count)
        local = node_store() / (f"{count}" if tier == "shared" else "killed")
        losses, is_killed = live(local, 1)
        assert all(found.get(key, value) == value for key, value in losses.items())
        found |= losses
        count += 1
        if tier == "shared":
            shutil.rmtree(local)
    return expected, found, count


def run_lives(
    rank: int, world_size: int, names: list[str], folder: Path, tier: Literal["nodes", "shared"]
) -> dict[str, tuple[Losses, Losses, int]]:
    outcomes = {}
    for name in names:
        outcomes[name] = lives(rank, loops.LOOPS[name], folder / name, tier)
        shutil.rmtree(node_store())
    return outcomes


@pytest.mark.fault("trainer-dies")
@pytest.mark.parametrize("tier", ["nodes", "shared"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_kind_of_loop_goes_on_bit_for_bit_after_each_step(
    world_size: int, tier: Literal["nodes", "shared"], tmp_path: Path
) -> None:
    outcomes = run_ranks(
        *(run_lives, world_size, list(loops.LOOPS), tmp_path, tier),
        store_per_node=[tmp_path / f"node {number}" for number in range(world_size)],
        timeout_s=150,
    )

    for of_rank in outcomes:
        for name, (expected, found, count) in of_rank.items():
            assert found == expected, name
            assert count > 5, name


def test_a_program_gets_ten_lines_at_most() -> None:
    sources = re.split(r"^(?:def|class) ", inspect.getsource(loops), flags=re.MULTILINE)
    added = {source.partition("(")[0]: source.count("# +") for source in sources[1:]}

    assert sum(count > 0 for count in added.values()) == len(loops.LOOPS)
    assert max(added.values()) <= 10
