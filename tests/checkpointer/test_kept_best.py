"""A training loop keeps its best checkpoint by a metric on the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from localckpt import Best, Checkpointer, Retention
from tests.managers.jobs import MAX_S

_LEAST = Retention(last=2, best=Best("loss"))


def _run(local: Path, losses: dict[int, float], by_hand: int = -1, **options: Any) -> list[int]:
    """What is there after a start that has these steps, and saves one of them by hand."""
    weight = torch.zeros(9)
    state = {"weight": (lambda: weight, weight.copy_)}
    usual = {"timeout_s": MAX_S, "retention": _LEAST}
    with Checkpointer(state, local=local, **(usual | options)) as checkpointer:
        assert checkpointer.resume() == min(losses)
        for step, loss in losses.items():
            checkpointer.step(step, metrics={"loss": torch.tensor(loss)})
            if step == by_hand:
                checkpointer.save(step, metrics={"loss": loss})
            checkpointer.wait_until_finished()
        return checkpointer.manager.all_iterations()


def test_a_step_that_is_saved_by_hand_or_at_the_end_has_its_metric(tmp_path: Path) -> None:
    _run(tmp_path, {0: 2.0, 1: 0.5}, by_hand=0, every=100)
    _run(tmp_path, {2: 5.0, 3: 6.0}, by_hand=2, every=100)

    # Step 1 was saved by close().
    assert _run(tmp_path, {4: 7.0, 5: 8.0}, by_hand=4, every=100) == [4, 3, 1]
