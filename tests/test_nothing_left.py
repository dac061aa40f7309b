"""The check that the tests leave nothing behind does see what is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

_LEAVES = {
    "temporary file": "tempfile.mkstemp(prefix='forgotten')",
    "shared memory": "tempfile.mkstemp(prefix='localckpt-forgotten', dir='/dev/shm')",
    # Right after it has begun, a program's environment cannot be read.
    "process": "subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(0.2)",
    "nothing": "subprocess.run(['true'])",
}


@pytest.mark.parametrize("kind", _LEAVES)
def test_what_a_test_leaves_fails_the_run(kind: str, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    test = tmp_path / "test_inner.py"
    test.write_text(f"import subprocess, tempfile, time\n\ndef test_it():\n    {_LEAVES[kind]}\n")

    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("--rootdir", str(tmp_path), str(test)),
        ],
        env=os.environ | {"LOCALCKPT_TEST_GRACE_S": "0.3"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    if found := re.search(r"process: (\d+) .*sleep 60", done.stdout):
        psutil.Process(int(found[1])).kill()
    for path in set(Path("/dev/shm").glob("localckpt-forgotten*")) - before:
        path.unlink()
    assert "1 passed" in done.stdout
    assert (f"{kind}: " in done.stdout) == (kind != "nothing"), done.stdout
    assert (done.returncode == 0) == (kind == "nothing")


def test_shared_memory_of_a_test_is_made_on_demand(
    shm_roots: Callable[[int], list[Path]],
) -> None:
    roots = shm_roots(2)

    assert len(set(roots)) == 2
    assert all(root.is_dir() and root.parent == Path("/dev/shm") for root in roots)
