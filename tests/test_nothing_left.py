"""The check that the tests leave nothing behind does see what is left."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.programs import run

_LEAVES_ALL = """
    tempfile.mkstemp(prefix="forgotten")
    tempfile.mkstemp(prefix="localckpt-forgotten", dir="/dev/shm")
    # Right after it has begun, a program's environment cannot be read.
    subprocess.Popen(["sleep", "60"], start_new_session=True); time.sleep(0.2)
"""
_LEAVES_NOTHING = "    subprocess.run(['true'])\n"


@pytest.mark.parametrize("body", [_LEAVES_ALL, _LEAVES_NOTHING], ids=["all", "nothing"])
def test_what_a_test_leaves_fails_the_run(body: str, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    test = tmp_path / "test_inner.py"
    test.write_text(f"import subprocess, tempfile, time\n\ndef test_it():\n{body}")

    done = run(
        *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
        *("--rootdir", tmp_path, test),
        env=os.environ | {"LOCALCKPT_TEST_GRACE_S": "0.3"},
        cwd=Path(__file__).parents[1],
    )

    if found := re.search(r"process: (\d+) .*sleep 60", done.stdout):
        psutil.Process(int(found[1])).kill()
    for path in set(Path("/dev/shm").glob("localckpt-forgotten*")) - before:
        path.unlink()
    assert "1 passed" in done.stdout
    for kind in ("temporary file", "shared memory", "process"):
        assert (f"{kind}: " in done.stdout) == (body is _LEAVES_ALL), done.stdout
    assert (done.returncode == 0) == (body is _LEAVES_NOTHING)
