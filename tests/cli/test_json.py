"""What programs read stays as it is: keys and their types, as ``docs/cli.md`` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import localckpt
from localckpt.cli import app
from tests.cli.commands import call, only_shards, python
from tests.cli.jobs import PaperJob
from tests.cli.test_reporting import write
from tests.managers.jobs import damage, make_manager

_CHECKPOINT = {"iteration": "int", "epoch": "int", "sequence": "int", "world_size": "int"}
_FILES = {"files": "int", "nbytes": "int"}


def _shape(value: Any) -> Any:
    """Keys and types; of a list, those of its first item."""
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return type(value).__name__


def _spoil(store: Path) -> None:
    """Have something of everything there."""
    newer = only_shards(store)[-1]
    damage(newer, 0.01)
    (newer.parent / "000000000002.0.1.2.safetensors.corrupt").touch()
    (newer.parent / "x.safetensors.dirty").touch()


def test_ls(store: Path) -> None:
    _spoil(store)

    assert _shape(call("ls", store, "--json").json()) == {
        "store": "str",
        "shared": "bool",
        "node": "str",
        "sessions": [
            {
                "session": "str",
                "checkpoints": [
                    _CHECKPOINT
                    | {"ranks": ["int"], "copies": "int", "parities": "int"}
                    | {"nbytes": "int", "saved_at": "float", "complete_here": "bool"}
                ],
                "uncounted": [{"path": "str", "nbytes": "int", "fault": "str", "why": "str"}],
                "leftovers": {"dirty_live": _FILES, "dirty_dead": _FILES, "corrupt": _FILES}
                | {"recycled_live": _FILES, "recycled_dead": _FILES},
            }
        ],
    }


def test_explain(store: Path, tmp_path: Path) -> None:
    with make_manager("disk", tmp_path / "other", "run") as manager:
        manager.save({"x": torch.zeros(3)}, 1)
    _spoil(store)

    told = call("explain", store, tmp_path / "other", "--world-size", "9", "--json").json()

    assert _shape(told) == {
        "sessions": [
            {
                "session": "str",
                "nodes": ["str"],
                "loads": _CHECKPOINT,
                "newest_complete": _CHECKPOINT,
                "refusal": "NoneType",
                "checkpoints": [
                    _CHECKPOINT
                    | {"complete": "bool", "by_name": "bool", "resumed": "int", "metrics": {}}
                    | {"mark": "NoneType", "mark_why": "str", "passed_over": "str"}
                    | {"holders": [[]], "damaged": [["str"]], "computed": []}
                    | {"lacks": [{"ranks": ["int"], "why": "str", "nodes": ["str"]}]}
                ],
                "survives_any": "int",
                "may_be_lost_alone": ["str"],
                "breaking": [["str"]],
                "bad": {str(store): ["str"]},
                # The first is one of which only the name of a file tells.
                "drained": [],
                "least_nodes": "int",
                "reshards": "bool",
                "saved_at": "float",
                "shared": [],
            }
        ]
    }


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

    done = python("-c", _ALL, store, only_shards(store)[0])

    assert done.out.splitlines()[-1] == "[]", done.err


def test_every_command_has_a_line_of_help() -> None:
    told = call("--help")

    assert told.status == 0
    assert call("--version").out == f"localckpt {localckpt.__version__}\n"
    commands = [command.callback.__name__ for command in app.registered_commands]
    assert {"ls", "verify", "explain", "inspect", "clean", "survive"} <= set(commands)
    for command in commands:
        (line,) = [row for row in told.out.splitlines() if row.strip().startswith(f"{command} ")]
        assert line.endswith(".")
        assert not line.endswith("...")
        assert call(command, "--help").status == 0
