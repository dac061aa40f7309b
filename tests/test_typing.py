"""Tests of what a type checker says of programs that use the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import localckpt

_PACKAGE = Path(localckpt.__file__).parent

_USER_PROGRAM = """
from typing import assert_type

import localckpt
from localckpt import no_such_import  # not there: attr-defined


class MyManager(localckpt.LocalCheckpointManager):
    def say(self) -> str:
        return self.session_id


class MyQueue(localckpt.AsyncCallsQueue):
    pass


def train(state: dict[str, object]) -> None:
    replicas = localckpt.LazyCliqueReplicationStrategy.from_replication_params()
    assert_type(replicas, localckpt.LazyCliqueReplicationStrategy)
    with (
        replicas as entered,
        MyManager("/local", "run", entered) as manager,
        localckpt.InMemoryCheckpointManager() as in_memory,
        localckpt.GlobalCheckpointManager("/shared") as shared,
        MyQueue() as queue,
    ):
        assert_type(entered, localckpt.LazyCliqueReplicationStrategy)
        assert_type(manager, MyManager)
        assert_type(in_memory, localckpt.InMemoryCheckpointManager)
        assert_type(shared, localckpt.GlobalCheckpointManager)
        assert_type(queue, MyQueue)
        assert_type(manager.say(), str)
        assert_type(manager.find_latest(), int)
        assert_type(manager.load()[1], localckpt.CkptID)
        assert_type(manager.save(state, 1, is_async=True), localckpt.AsyncRequest)
        assert_type(manager.all_iterations(), list[int])
        assert_type(shared.load(into=state, iteration=2)[1], localckpt.CkptID)
        manager.sav(state, 2)  # not there: attr-defined
        manager.save(state, "2")  # wrong: call-overload
        shared.save(state, 2, on_commit=3)  # wrong: arg-type
    localckpt.no_such_name  # not there: attr-defined
    raise localckpt.NoSuchError("not there")  # not there: attr-defined
"""

# torch's own code would take mypy a minute, and is not what is asked about.
_CONFIGURATION = """
[mypy]
strict = true
[mypy-torch.*,numpy.*]
follow_imports = skip
[mypy-localckpt.*]
follow_imports = silent
disallow_any_generics = false
disallow_subclassing_any = false
warn_unused_ignores = false
"""


def test_mypy_knows_the_public_names_of_the_package_and_no_others(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(_USER_PROGRAM)
    (tmp_path / "mypy.ini").write_text(_CONFIGURATION)
    lines = _USER_PROGRAM.splitlines()
    wrong = {
        (number, found[1])
        for number, line in enumerate(lines, start=1)
        if (found := re.search(r"  # [a-z ]+: ([a-z-]+)$", line))
    }

    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental", "--no-pretty", program.name],
        cwd=tmp_path,
        env={"MYPYPATH": str(_PACKAGE.parent), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    said = re.findall(r"^program\.py:(\d+): error: .*\[([a-z-]+)\]$", checked.stdout, re.MULTILINE)
    assert {(int(number), code) for number, code in said} == wrong, checked.stdout + checked.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (_PACKAGE / "py.typed").is_file()
