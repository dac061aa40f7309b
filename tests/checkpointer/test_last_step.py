"""A loop that ends without an error has its last step saved, once, on both tiers."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Best, Checkpointer, GlobalCheckpointManager, MismatchError, Retention
from tests.checkpointer.loops import stores
from tests.ranks import node_store, run_ranks

_S = 20.0


def _train(local: Path, steps: int, **options: Any) -> tuple[int, list[int]]:
    """Train to a step; the first step, and the steps that were saved to the nodes."""
    state = {"value": torch.nn.Linear(1, 1)}
    usual = {"every": 5, "timeout_s": _S}
    with Checkpointer(state, local=local, **(usual | options)) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, steps):
            if checkpointer.step(step, metrics={"loss": step}):
                break
    with Checkpointer(state, local=local, read_only=True, timeout_s=_S) as reader:
        reader.find_latest()
        return first, sorted(reader.manager.all_iterations())


def test_a_loop_that_ended_is_resumed_after_its_last_step(tmp_path: Path) -> None:
    assert _train(tmp_path, 23) == (0, [19, 22])
    assert _train(tmp_path, 23) == (23, [19, 22])
    assert _train(tmp_path, 25) == (23, [22, 24])


def test_without_save_last_it_is_resumed_after_its_newest_save(tmp_path: Path) -> None:
    assert _train(tmp_path, 23, save_last=False) == (0, [14, 19])


def test_the_last_step_goes_to_shared_storage_with_its_metrics(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    kept = Retention(best=Best("loss", "max"))

    _train(tmp_path / "nodes", 23, shared=shared, shared_every=10, shared_retention=kept)

    with GlobalCheckpointManager(shared, read_only=True) as manager:
        assert manager.all_iterations() == [22]


def test_a_loop_that_failed_saves_nothing_more(tmp_path: Path) -> None:
    state = {"value": torch.nn.Linear(1, 1)}
    with contextlib.suppress(ValueError), Checkpointer(state, local=tmp_path, every=5) as one:
        for step in range(one.resume(), 8):
            one.step(step)
        raise ValueError("the loss is no number")
    try:
        # Also where the program handles another error around it.
        raise OSError("a file is not there")
    except OSError:
        with pytest.raises(ValueError, match="of the loop"):
            _fail_and_close(tmp_path, state)

    assert _train(tmp_path, 0) == (5, [4])


def _fail_and_close(local: Path, state: dict[str, Any]) -> None:
    checkpointer = Checkpointer(state, local=local, every=5)
    try:
        for step in range(checkpointer.resume(), 8):
            checkpointer.step(step)
        raise ValueError("of the loop")
    finally:
        checkpointer.close()


def test_a_run_within_a_handler_of_an_error_ends_in_order_as_any_other(tmp_path: Path) -> None:
    firsts, state = [], {"value": torch.nn.Linear(1, 1)}
    for _ in range(5):
        try:
            raise OSError("a file is not there")
        except OSError:
            checkpointer = Checkpointer(state, local=tmp_path, every=5)
            firsts.append(checkpointer.resume())
            for step in range(firsts[-1], firsts[-1] + 2):
                checkpointer.step(step)
            checkpointer.close()

    # Each start saves its last step, and none counts as one in vain.
    assert firsts == [0, 2, 4, 6, 8]


def test_a_job_that_was_stopped_is_not_saved_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"value": torch.nn.Linear(1, 1)}
    with (
        caplog.at_level("INFO", "localckpt"),
        Checkpointer(state, local=tmp_path, every=10_000) as checkpointer,
    ):
        step = checkpointer.resume()
        os.kill(os.getpid(), signal.SIGTERM)
        while not checkpointer.step(step):
            step += 1

    saved = [text for text in caplog.messages if text.startswith("saved iteration")]
    assert len(saved) == 1
    assert saved[0].startswith(f"saved iteration {step}:")


def _end_apart(rank: int, world_size: int) -> str:
    state = {"value": torch.nn.Linear(1, 1)}
    checkpointer = Checkpointer(state, local=node_store(), every=5, timeout_s=_S)
    for step in range(checkpointer.resume(), 7 + rank):
        checkpointer.step(step)
    with pytest.raises(MismatchError) as caught:
        checkpointer.close()
    with Checkpointer(state, local=node_store(), timeout_s=_S) as again:
        assert again.resume() == 5
    return str(caught.value)


def test_ranks_that_end_after_different_steps_are_told_so(tmp_path: Path) -> None:
    texts = run_ranks(_end_apart, 2, store_per_node=stores(tmp_path, 1))

    assert texts[0] == texts[1]
    assert "rank 0 after step 6, rank 1 after step 7, so the last one is not saved" in texts[0]
