"""Runs the command line: in a process of its own, or in this one where many calls are made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from localckpt.cli import app

__all__ = ["DEAD_OWNER", "Answer", "call", "listed", "only_shards", "python", "run"]

DEAD_OWNER = "0123456789ab-1-1"
"""What a store notes of a process of another boot."""

# The interpreter may lie where only its own user can read: what is imported late is, before.
_AS_USER = """
import os, sys
from typer.testing import CliRunner
from localckpt.cli import app, main
CliRunner().invoke(app, ["ls", "/dev/null"])
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv.pop(1)))
main()
"""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def python(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Answer:
    """Run Python in a process whose output is a pipe."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=_ROOT,
        env={**os.environ, **(env or {})},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, user: int | None = None
) -> Answer:
    """As a person does, or another one if this is root."""
    command = ["-m", "localckpt.cli"] if user is None else ["-c", _AS_USER, str(user)]
    return python(*command, *arguments, env=env)


def call(*arguments: str | Path) -> Answer:
    """The same in this process; what a person would see as a traceback is raised."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def listed(root: Path) -> Any:
    """What ``ls`` tells of the session ``run``."""
    sessions = call("ls", root, "--json").json()["sessions"]
    (found,) = [told for told in sessions if told["session"] == "run"]
    return found


def only_shards(root: Path) -> list[Path]:
    """The shards in a store, in the order of their names."""
    return sorted(root.rglob("*.safetensors"))
