"""What errors of the front door advise are its own methods and arguments."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    Checkpointer,
    CheckpointingException,
    GlobalCheckpointManager,
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
    options: dict[str, Any] = {"shared": shared} if what == "shared save" else {}
    checkpointer = Checkpointer(_state(), local=node_store(), timeout_s=_S, every=1000, **options)
    text = ""
    if what != "resume" or rank == 0:
        checkpointer_resume = checkpointer.resume
        if what != "resume":
            checkpointer_resume()
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
    elif what == "save":
        checkpointer.step(0)
        checkpointer.save(0)
        checkpointer.wait_until_finished()
    elif what == "shared save":
        checkpointer.step(0)
        checkpointer.save(0, shared=True)
    elif what == "close":
        checkpointer.step(0)
        checkpointer.close()
    else:
        for step in range(600):
            time.sleep(0.02)
            checkpointer.step(step)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("step", "step"),
        ("resume", "resume"),
        ("save", "save"),
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


def _make_alone(rank: int, world_size: int) -> str:
    text = ""
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            Checkpointer(_state(), local=node_store(), timeout_s=_S)
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_checkpointer_that_is_made_alone_names_timeout_s(tmp_path: Path) -> None:
    text, _ = run_ranks(_make_alone, 2, store_per_node=stores(tmp_path, 1))

    assert "give the Checkpointer a longer timeout_s" in text
    assert "Is Checkpointer() called on every rank?" in text


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


def test_steps_that_go_back_are_told_how_to(tmp_path: Path) -> None:
    with Checkpointer(_state(), local=tmp_path, save_last=False) as checkpointer:
        checkpointer.resume()
        checkpointer.step(5)

        for call in (checkpointer.step, checkpointer.save):
            name = call.__name__
            with pytest.raises(CheckpointingException) as caught:
                call(3)
            assert f"{name}(3) was called after step(5)" in str(caught.value)
            assert "call resume(step=...)" in str(caught.value)
        checkpointer.save(5)
    with Checkpointer(_state(), local=tmp_path) as checkpointer:
        checkpointer.resume()

        with pytest.raises(CheckpointingException, match=r"save\(5\) was called after resuming"):
            checkpointer.save(5)


def _program(change: str) -> dict[str, Any]:
    a, b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    modules = {"a": a, "b": b}
    if change == "part":
        del modules["b"]
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters[:: -1 if change == "order" else 1])
    return {**modules, **({} if change == "part" else {"optimizer": optimizer})}


_ONLY_FIT = "the saved one, and was left as it is: "


@pytest.mark.parametrize("change", ["part", "order"])
@pytest.mark.parametrize("options", [{}, {"partial": True}, {"allow_dtype_change": True}])
def test_what_does_not_fit_is_told_once_and_what_was_given_is_not_advised(
    options: dict[str, bool], change: str, tmp_path: Path
) -> None:
    # A part alone may go.
    change = "order" if "partial" in options else change
    told = "b: saved, not given; optimizer: saved, not given. Make"
    if change == "order":
        told = "optimizer: its parameters are in another order (number 0 was a.weight, and is b.w"
    with Checkpointer(_program(""), local=tmp_path) as checkpointer:
        checkpointer.step(checkpointer.resume())

    with (
        pytest.raises(CheckpointingException) as caught,
        Checkpointer(_program(change), local=tmp_path) as checkpointer,
    ):
        checkpointer.resume(**options)

    text = str(caught.value)
    assert text.partition(_ONLY_FIT)[2].startswith(told), text
    for name in ("partial", "allow_dtype_change"):
        assert (f"({name}=True)" in text) == (name not in options)
    assert not [word for word in _NEVER if word in text], text


def test_what_a_manager_saved_is_told_by_whom_it_can_be_loaded(tmp_path: Path) -> None:
    with LocalCheckpointManager(tmp_path) as manager:
        manager.save({"value": torch.nn.Linear(1, 1)}, 3)

    with (
        pytest.raises(CheckpointingException, match=r"saved by another object.*resume\(Elsewhere"),
        Checkpointer(_state(), local=tmp_path) as checkpointer,
    ):
        checkpointer.resume()


def _save_alone(rank: int, world_size: int, make: Callable[[], Any]) -> str:
    text = ""
    manager = make()
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            manager.save({"value": torch.ones(2)}, 7)
        text = str(caught.value)
    dist.barrier()
    error = RuntimeError("the test is over")
    manager.__exit__(type(error), error, None)
    return text


def _shared_manager() -> GlobalCheckpointManager:
    return GlobalCheckpointManager(node_store() / "shared", timeout=_S)


def _node_manager() -> LocalCheckpointManager:
    return LocalCheckpointManager(node_store(), timeout=_S)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_shared_manager, "Was save(7) called on every rank?"),
        (_node_manager, "Is save() called on every rank?"),
    ],
)
def test_a_lone_save_of_a_manager_asks_whether_all_have_called_it(
    make: Callable[[], Any], words: str, tmp_path: Path
) -> None:
    text, _ = run_ranks(_save_alone, 2, make, store_per_node=stores(tmp_path, 1))

    assert words in text
    assert "give a longer timeout" in text


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
