"""``close()`` of a checkpointer whose program handles an error of its own around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localckpt import Checkpointer


def _train(local: Path, steps: int, *, closes: str) -> int:
    """Make some steps and end in order; returns the first one."""
    checkpointer = Checkpointer({"model": torch.nn.Linear(2, 2)}, local=local, every=5)
    if closes == "with":
        with checkpointer:
            first = checkpointer.resume()
            for step in range(first, first + steps):
                checkpointer.step(step)
        return first
    first = checkpointer.resume()
    for step in range(first, first + steps):
        checkpointer.step(step)
    checkpointer.close()
    return first


@pytest.mark.parametrize("closes", ["with", "close"])
def test_a_run_within_a_handler_ends_in_order_as_any_other(closes: str, tmp_path: Path) -> None:
    firsts = []
    for _ in range(6):
        try:
            raise OSError("a file is not there")
        except OSError:
            firsts.append(_train(tmp_path, 2, closes=closes))

    # Each start saves its last step, and none counts as one in vain.
    assert firsts == [0, 2, 4, 6, 8, 10]


def test_an_error_of_the_loop_is_one_also_where_another_is_handled(tmp_path: Path) -> None:
    def fail() -> None:
        checkpointer = Checkpointer({"model": torch.nn.Linear(2, 2)}, local=tmp_path, every=5)
        try:
            for step in range(checkpointer.resume(), 8):
                checkpointer.step(step)
            raise RuntimeError("of the loop")
        finally:
            checkpointer.close()

    try:
        raise OSError("a file is not there")
    except OSError:
        with pytest.raises(RuntimeError, match="of the loop"):
            fail()
    with Checkpointer({"model": torch.nn.Linear(2, 2)}, local=tmp_path, every=5) as again:
        assert again.resume() == 5
