"""Programs that name no session have one each in the memory that all programs of a user share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt.managers.manager import agreed_session
from localckpt.ranks.ranks import Ranks
from localckpt.storage.names import default_root, default_session
from tests.cli.commands import call
from tests.ranks import run_ranks

_PROGRAM = """
import sys, torch, localckpt
layer = torch.nn.Linear(2, 2)
options = {"memory": True, "every": localckpt.Every(steps=1)}
with localckpt.Checkpointer({"layer": layer}, **options) as checkpointer:
    first = checkpointer.resume()
    for step in range(first, 4):
        checkpointer.step(step)
print(first, checkpointer.manager.session_id)
"""


@pytest.fixture
def sessions() -> Iterator[set[str]]:
    """Names of the sessions that the test makes in the user's own store, removed after it."""
    root, made = default_root(), set[str]()
    was_there = root.exists()
    yield made
    for session in made:
        shutil.rmtree(root / f"session-{session}")
        shutil.rmtree(root / "events" / f"session-{session}")
    if not was_there:
        shutil.rmtree(root)


def _run(folder: Path, *command: str) -> tuple[int, str]:
    """Run a program in a folder; its first step, and its session."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(Path(localckpt.__file__).parents[1])}
    ended = subprocess.run(
        *([sys.executable, *command],),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, session = ended.stdout.split()
    return int(first), session


def test_a_restart_finds_its_own_session(tmp_path: Path, sessions: set[str]) -> None:
    here, script = tmp_path / "here", tmp_path / "train.py"
    script.write_text(_PROGRAM)

    ended = [_run(here, str(script), "--lr=1") for _ in range(2)]

    sessions.update(session for _, session in ended)
    assert [first for first, _ in ended] == [0, 4]
    assert len(sessions) == 1
    assert ended[0][1].startswith("train-")
    assert all(session in call("ls").out for session in sessions)


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
