"""The journal of a rank of the demo, and the options of its training scripts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

__all__ = ["Journal", "fields", "parse_options"]


class Journal:
    """What this rank did and when, one JSON object a line, for the process that watches."""

    def __init__(self, path: Path, node: str) -> None:
        self._file = path.open("a", buffering=1)
        self._node = node

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "node": self._node, "at": time.monotonic(), **values}
        self._file.write(json.dumps(line) + "\n")


def fields(record: Any) -> dict[str, Any]:
    """The fields of one of the manager's reports."""
    return dataclasses.asdict(record)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training of the demo.")
    parser.add_argument("--tier", choices=["disk", "memory"], default="disk")
    parser.add_argument("--store", type=Path, required=True, help="this node's checkpoints")
    parser.add_argument("--results", type=Path, required=True, help="for the demo's table")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    return parser.parse_args()
