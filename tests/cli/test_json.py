"""What programs read stays as it is: keys and their types, as ``docs/cli.md`` has them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.cli.commands import call, only_shards
from tests.managers.jobs import damage, make_manager
from tests.state_dict.states import image_of

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

    told = call("ls", store, "--json").json()

    assert _shape(told) == {
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
                "leftovers": {
                    "dirty_live": _FILES,
                    "dirty_dead": _FILES,
                    "recycled_live": _FILES,
                    "recycled_dead": _FILES,
                    "corrupt": _FILES,
                },
            }
        ],
    }


def test_verify(store: Path) -> None:
    _spoil(store)
    other = only_shards(store)[0]
    other.write_bytes(other.read_bytes().replace(b"localckpt-6", b"localckpt-9"))

    answer = call("verify", store, "--json")

    assert answer.status == 1
    assert _shape(answer.json()) == {
        "store": "str",
        "verified": "int",
        "nbytes": "int",
        "bad": [{"path": "str", "why": "str"}],
        "unreadable": [{"path": "str", "why": "str"}],
        "vanished": "int",
        "quarantined": "int",
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
                    | {
                        "complete": "bool",
                        "holders": [[]],
                        "damaged": [["str"]],
                        "lacks": [{"ranks": ["int"], "why": "str", "nodes": ["str"]}],
                        "by_name": "bool",
                        "computed": [],
                        "resumed": "int",
                        "mark": "NoneType",
                        "mark_why": "str",
                        "metrics": {},
                        "passed_over": "str",
                    }
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


def test_inspect(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(image_of({"x": torch.zeros(3)}))

    told = call("inspect", path, "--json").json()

    assert _shape(told) == {
        "path": "str",
        "nbytes": "int",
        "kind": "str",
        "identity": {"session": "str", "rank": "int"} | _CHECKPOINT,
        "metadata": dict.fromkeys(
            ("format", "session", "epoch", "sequence", "iteration", "rank", "world_size"), "str"
        ),
        "tensors": [
            {
                "name": "str",
                "dtype": "str",
                "shape": ["int"],
                "offset": "int",
                "nbytes": "int",
            }
        ],
        "tensors_nbytes": "int",
        "skeleton_nbytes": "int",
        "digests_nbytes": "int",
        "problems": [],
    }


def test_inspect_of_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "nonsense"
    path.write_bytes(b"nonsense, and more of it")

    answer = call("inspect", path, "--json")

    assert answer.status == 1
    assert answer.json() | {"problems": []} == {
        "path": str(path),
        "nbytes": 24,
        "kind": "unknown",
        "identity": None,
        "metadata": None,
        "tensors": [],
        "tensors_nbytes": 0,
        "skeleton_nbytes": None,
        "digests_nbytes": None,
        "problems": [],
    }
    assert answer.json()["problems"]


def test_clean(store: Path) -> None:
    _spoil(store)
    older = only_shards(store)[0]
    for number in (1, 2):
        shutil.copy(older, f"{older}.{number:08d}.corrupt")
    older.write_bytes(older.read_bytes().replace(b"localckpt-6", b"localckpt-9"))
    older.rename(f"{older}.corrupt")

    told = call("clean", store, "--corrupt", "--json").json()

    assert _shape(told) == {
        "store": "str",
        "dry_run": "bool",
        "removed": [{"path": "str", "nbytes": "int", "kind": "str"}],
        "nbytes": "int",
        "put_back": [{"path": "str", "nbytes": "int"}],
        "left": [{"path": "str", "why": "str"}],
    }


def test_survive() -> None:
    cost = {"mean": "float", "largest": "float", "mean_nbytes": "int", "largest_nbytes": "int"}

    told = call("survive", "--nodes=9", "--ranks-per-node=2", "--shard-size=12GB", "--json").json()

    assert _shape(told) == {
        "nodes": "int",
        "ranks_per_node": "int",
        "shard_nbytes": "int",
        "schemes": [
            {
                "scheme": "str",
                "groups": [{"nodes": "int", "count": "int"}],
                "extra_memory": cost,
                "bytes_sent": cost,
                "survives_any": "int",
                "loss": [{"lost": "int", "probability": "float"}],
            }
        ],
    }
