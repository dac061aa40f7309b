"""Upstream's own test suites, with our classes in the place of theirs.

The tests are read from checkouts in the folder that ``LOCALCKPT_UPSTREAM_SUITES`` names:
``Megatron-LM``, ``nvidia-resiliency-ext`` and ``pytorch``. ``suites.toml`` says which they are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomllib

import localckpt
from tests.upstream.environment import UPSTREAM, unused_port

__all__ = ["SUITES", "listed", "missing", "run"]

_HERE = Path(__file__).parent
_CHECKOUTS = "LOCALCKPT_UPSTREAM_SUITES"
# Folders that tests make in shared memory, and leave there when they fail.
_IN_MEMORY = ("test_local", "test_save_load", "test_sync", "test_async")

SUITES: dict[str, dict[str, Any]] = tomllib.loads((_HERE / "suites.toml").read_text())


def missing(suite: dict[str, Any]) -> str | None:
    """Say what keeps a suite from being run here, if anything does."""
    folder = os.environ.get(_CHECKOUTS)
    if folder is None:
        return f"{_CHECKOUTS} names no folder with a checkout of {suite['checkout']}"
    if not (path := Path(folder, suite["checkout"], suite["file"])).is_file():
        return f"there is no {path}"
    is_installed = (UPSTREAM / "expecttest").is_dir()
    return None if is_installed else f"needs expecttest in {UPSTREAM} (make test installs it)"


def listed(suite: dict[str, Any], case: str) -> bool:
    """Return whether a case need not pass."""
    return case.startswith((*suite.get("not_on_cpu", ()), *suite.get("not_ours", ())))


def run(suite: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """Run a suite in an empty folder; return the outcomes of each case, one a rank.

    With ``"ours": "theirs"`` it runs with upstream's own classes.
    """
    checkout = Path(os.environ[_CHECKOUTS], suite["checkout"])
    # Upstream's package is called "tests", as ours is.
    (folder / "path").mkdir()
    (folder / "path" / "localckpt").symlink_to(Path(localckpt.__file__).parent)
    variables = {
        "LOCAL_WORLD_SIZE": f"{suite['ranks']}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{unused_port()}",
        "PYTHONPATH": os.pathsep.join(
            map(str, (_HERE / "site", checkout, folder / "path", UPSTREAM))
        ),
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": str(folder),
        "WORLD_SIZE": f"{suite['ranks']}",
    }
    with subprocess.Popen(
        [sys.executable, "-P", str(_HERE / "suite_ranks.py"), json.dumps(suite), str(folder)],
        cwd=checkout,
        env=os.environ | variables,
        start_new_session=True,
    ) as process:
        try:
            process.wait()
        finally:
            # Upstream's own classes may leave workers.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for name in _IN_MEMORY:
        shutil.rmtree(Path("/dev/shm", name), ignore_errors=True)
    assert process.returncode in (0, 1), "a rank has not come to the end of the cases"
    outcomes: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for case, outcome in map(json.loads, file.read_text().splitlines()):
            outcomes.setdefault(case, []).append(outcome)
    return outcomes
