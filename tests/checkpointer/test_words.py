"""What errors of the front door advise are its own methods and arguments."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    Checkpointer,
    CheckpointingException,
    LocalCheckpointManager,
    PeerLostError,
)
from tests.checkpointer.loops import stores
from tests.ranks import node_store, run_ranks

_S = 1.5
_NEVER = ("manager", "load()", "allow_partial_load", "<locals>", "keep_local", "timeout=")


def _state() -> dict[str, Any]:
    return {"value": torch.nn.Linear(1, 1)}


def _alone(rank: int, world_size: int, what: str, shared: Path) -> str:
    """Make one call on the first rank alone; returns the error."""
    text: str = ""
    options: dict[str, Any] = {"timeout_s": _S, "every": 1000}
    if rank == 0 and what == "Checkpointer":
        with pytest.raises(PeerLostError) as caught:
            Checkpointer(_state(), local=node_store(), **options)
        text = str(caught.value)
    if what == "Checkpointer":
        dist.barrier()
        return text
    if what == "shared save":
        options["shared"] = shared
    checkpointer = Checkpointer(_state(), local=node_store(), **options)
    if what != "resume":
        checkpointer.resume()
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            _call(checkpointer, what)
        text = str(caught.value)
    dist.barrier()
    error = RuntimeError("the test is over")
    checkpointer.__exit__(type(error), error, None)
    return text


def _call(checkpointer: Checkpointer, what: str) -> None:
    if what == "resume":
        checkpointer.resume()
        return
    for step in range(1 if what != "step" else 600):
        time.sleep(0.02)
        checkpointer.step(step)
    if what == "close":
        checkpointer.close()
    else:
        checkpointer.save(0, shared=True)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("Checkpointer", "Checkpointer"),
        ("step", "step"),
        ("resume", "resume"),
        ("shared save", "save"),
        ("close", "close"),
    ],
)
def test_a_lone_call_names_itself_and_timeout_s(what: str, call: str, tmp_path: Path) -> None:
    text, _ = run_ranks(*(_alone, 2, what, tmp_path / "shared"), store_per_node=stores(tmp_path, 1))

    assert f"Is {call}() called on every rank?" in text
    assert "give the Checkpointer a longer timeout_s" in text
    assert "rank 1" in text
    assert not [word for word in _NEVER if word in text], text


def _fail_to_save(local: Path, checkpointer: Checkpointer, steps: int) -> str:
    for step in range(checkpointer.resume(), steps):
        if step == 2:
            local.rename(local.with_name("away"))
            local.touch()
        checkpointer.step(step)
        checkpointer.wait_until_finished()
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_failures": 2}, "2 saves in a row to the nodes failed (max_failures)"),
        ({"on_error": "raise"}, "a save to the nodes failed (on_error, max_failures)"),
    ],
)
def test_the_error_that_ends_training_does_not_say_that_it_can_go_on(
    options: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "nodes"
    local.mkdir()
    checkpointer = Checkpointer(_state(), local=local, every=1, timeout_s=5.0, **options)

    with (
        caplog.at_level(logging.WARNING, "localckpt"),
        pytest.raises(CheckpointingException) as caught,
        checkpointer,
    ):
        _fail_to_save(local, checkpointer, 6)
    local.unlink()
    local.with_name("away").rename(local)

    text = str(caught.value)
    assert text.endswith(f"Training ends, since {words}")
    assert "can go on" not in text
    assert text.count("as they were") == 1
    # What is logged of a save that does not end it says that training goes on.
    logged = [message for message in caplog.messages if "a save to the nodes failed (1" in message]
    assert all(message.count("as they were") <= 1 for message in logged)


def test_what_a_manager_saved_is_told_by_whom_it_can_be_loaded(tmp_path: Path) -> None:
    with LocalCheckpointManager(tmp_path) as manager:
        manager.save({"value": torch.nn.Linear(1, 1)}, 3)

    with (
        pytest.raises(CheckpointingException, match=r"saved by another object.*resume\(Elsewhere"),
        Checkpointer(_state(), local=tmp_path) as checkpointer,
    ):
        checkpointer.resume()


_SCRIPT = """
import sys, torch, localckpt

class Conf:
    pass

def run(local):
    state = {"layer": torch.nn.Linear(1, 1), "conf": (Conf, lambda conf: None)}
    with localckpt.Checkpointer(state, local=local, safe_globals=[Conf]) as checkpointer:
        for step in range(checkpointer.resume(), 2):
            checkpointer.step(step)

if __name__ == "__main__":
    run(sys.argv[1])
"""


def test_a_class_of_the_script_that_is_imported_now_is_told_by_both_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    local = str(tmp_path / "nodes")

    def run(*command: str) -> str:
        ran = subprocess.run(
            [sys.executable, *command, local],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.stderr

    assert "Error" not in run("train.py")
    text = run("-c", "import sys; sys.path.insert(0, '.'); import train; train.run(sys.argv[1])")

    assert "UnsafeGlobalError" in text
    assert "train.Conf is allowed, and was saved as __main__.Conf" in text
    assert "pass safe_globals=[(Conf, '__main__.Conf')]" in text
