"""Ranks that see the installed upstream libraries."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import random
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

__all__ = [
    "UPSTREAM",
    "import_upstream",
    "needs",
    "needs_upstream",
    "run_upstream_ranks",
    "unused_port",
    "upstream_variables",
]

UPSTREAM = Path(os.environ.get("LOCALCKPT_UPSTREAM") or Path(sys.prefix) / "upstream")
"""Where ``make test`` installs what ``constraints-integrations.txt`` lists."""

_SITE = Path(__file__).parent / "site"
_ROOT = Path(__file__).parents[2]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests where a package is not installed, such as ``"lightning"``."""
    missing = [name for name in packages if not (UPSTREAM / name.replace(".", "/")).is_dir()]
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {', '.join(missing)} in {UPSTREAM} (make test installs them)"
    )


needs_upstream = needs("megatron.core", "nvidia_resiliency_ext.checkpointing")


def import_upstream(module: str) -> Any:
    """Import a module that imports installed frameworks, in a process that a test has started."""
    if str(UPSTREAM) not in sys.path:
        # Behind all others: a package that both have is the one that localckpt is tested with.
        sys.path.append(str(UPSTREAM))
    return importlib.import_module(module)


def upstream_variables() -> dict[str, str]:
    """The environment of a process that imports the upstream libraries without a GPU."""
    path = [str(_SITE), str(_ROOT), str(UPSTREAM), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONWARNINGS": "ignore"}


def unused_port() -> int:
    """A port of this machine that nothing uses."""
    # Not one of those that the kernel gives to others meanwhile.
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("of 100 ports, each is in use")


def run_upstream_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    store_per_node: Sequence[Path] | None = None,
    timeout_s: float = 150.0,
    init_group: bool = True,
) -> list[Any]:
    """As :func:`run_ranks`; the ranks find the libraries, and so do the processes they start."""
    return run_ranks(
        _enter,
        world_size,
        fn,
        *args,
        store_per_node=store_per_node,
        timeout_s=timeout_s,
        init_group=init_group,
        group_timeout_s=120.0,
        env=upstream_variables(),
    )


def _enter(rank: int, world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(UPSTREAM))
    spec = importlib.util.spec_from_file_location("sitecustomize", _SITE / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return fn(rank, world_size, *args)
