"""The command starts at once, stays away from torch, and is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import localckpt
from localckpt.cli import app, main
from tests.cli.commands import call, only_shards, run
from tests.cli.jobs import PaperJob
from tests.cli.test_reporting import write

_ALL = """
import sys
from localckpt.cli import app
root, file = sys.argv[1:]
of_root = (["ls"], ["verify"], ["explain"], ["clean"], ["report"], ["report", "--trace=/dev/null"])
for arguments in (*([*of, root] for of in of_root), ["inspect", file]):
    app(arguments, standalone_mode=False)
app(["survive", "--nodes", "64", "--ranks-per-node", "8"], standalone_mode=False)
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")])
"""


def test_no_command_imports_torch(store: Path) -> None:
    job = PaperJob()
    job.start()
    write(job.events, store / "events")

    done = subprocess.run(
        [sys.executable, "-c", _ALL, store, only_shards(store)[0]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_command_is_installed_with_the_package() -> None:
    (script,) = entry_points(group="console_scripts", name="localckpt")

    assert script.load() is main


def test_it_tells_its_version() -> None:
    answer = run("--version")

    assert (answer.status, answer.out) == (0, f"localckpt {localckpt.__version__}\n")


def test_every_command_has_a_line_of_help() -> None:
    told = call("--help")

    assert told.status == 0
    commands = [command.callback.__name__ for command in app.registered_commands]
    assert {"ls", "verify", "explain", "inspect", "clean", "survive"} <= set(commands)
    for command in commands:
        (line,) = [row for row in told.out.splitlines() if row.strip().startswith(f"{command} ")]
        assert line.endswith(".")
        assert not line.endswith("...")
        assert call(command, "--help").status == 0
