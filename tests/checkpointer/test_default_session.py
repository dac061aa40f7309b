"""Programs that name no session have one each in the memory that all programs of a user share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt.checkpointer import life
from localckpt.cli import output
from localckpt.managers import local
from localckpt.managers.manager import agreed_session
from localckpt.ranks.ranks import Ranks
from localckpt.storage.names import default_session
from tests.cli.commands import call
from tests.ranks import run_ranks


def test_script_arguments_and_folder_name_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [
        *(("/a/train.py", ["--lr=1"], "x"), ("/a/train.py", ["--lr=2"], "x")),
        *(("/a/train.py", ["--lr=1"], "y"), ("/b/train.py", ["--lr=1"], "x")),
        *(("/a/train.py", ["--lr", "=1"], "x"), ("/a/train/__main__.py", ["--lr=1"], "x")),
    ]
    names = []

    for script, arguments, folder in [*programs, programs[0]]:
        monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
        monkeypatch.setattr(sys, "argv", ["", *arguments])
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        names.append(default_session())

    assert names[-1] == names[0]
    assert len(set(names)) == len(programs)
    assert all(name.startswith("train-") for name in names)


def test_two_programs_never_meet_and_a_restart_finds_its_own(
    shm_roots: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root,) = shm_roots(1)
    for user in (life, local, output):
        monkeypatch.setattr(user, "default_root", lambda: root)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/a/train.py", raising=False)
    firsts, sessions = [], []

    for argument in ("--lr=1", "--lr=2", "--lr=1"):
        monkeypatch.setattr(sys, "argv", ["", argument])
        state = {"layer": torch.nn.Linear(2, 2)}
        with localckpt.Checkpointer(state, memory=True, every=1) as checkpointer:
            firsts.append(checkpointer.resume())
            checkpointer.step(firsts[-1])
            sessions.append(checkpointer.manager.session_id)

    assert firsts == [0, 0, 1]
    assert sessions[0] == sessions[2] != sessions[1]
    assert all(session in call("ls").out for session in sessions)


def _agreed(rank: int, world_size: int, folders: list[Path]) -> str:
    os.chdir(folders[rank])
    ranks = Ranks("session")
    session = agreed_session(ranks)
    dist.barrier()
    ranks.close()
    return session


def test_the_first_rank_names_the_session_of_all(tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()

    first, second = run_ranks(_agreed, 2, folders)

    assert first == second


def test_a_prompt_and_a_look_must_name_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(localckpt.CheckpointingException, match="give the session_id of the job"):
        localckpt.InMemoryCheckpointManager(read_only=True)

    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-i"])
    for make in (
        localckpt.InMemoryCheckpointManager,
        lambda: localckpt.Checkpointer({"layer": torch.nn.Linear(2, 2)}, memory=True),
    ):
        with pytest.raises(localckpt.CheckpointingException, match="give session_id="):
            make()
