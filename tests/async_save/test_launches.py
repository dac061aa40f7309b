"""Every way to start a trainer: its own functions are called, and nothing hangs or stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.async_save import work

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
Way = Callable[[Path], list[str]]

SCRIPT = """
import os, sys
from pathlib import Path
from localckpt import AsyncCallsQueue, AsyncRequest
from tests.async_save import work

here = Path(os.environ["HERE"])
rank = os.environ.get("RANK", "0")
with open(here / f"runs-{rank}", "a") as runs:
    runs.write("x")

class Shard:
    name = "own"

def own(path, shard):
    assert shard.name == "own"
    work.describe_process(path)

def schedule(function, *args):
    return queue.schedule_async_request(AsyncRequest(function, args, []))

if "RANK" in os.environ:
    import torch.distributed as dist
    dist.init_process_group("gloo")
queue = AsyncCallsQueue(timeout_s=30.0)
schedule(work.describe_process, here / f"sent-{rank}")
schedule(own, here / f"forked-{rank}", Shard())
queue.wait_until_finished()
"""

# Left to the interpreter's exit: an idle worker, and a call in flight.
ENDS = {
    "closed": "queue.close()",
    "left": "",
    "in flight": "schedule(work.write_slowly, here / f'late-{rank}', 0.3)",
}

# A notebook runs its cells, in the loop of its kernel, as the module __main__, which has no file.
NOTEBOOK = """
import asyncio, sys, types

async def run_cells():
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    for cell in sys.stdin.read().split("\\n\\n"):
        exec(compile(cell, "<cell>", "exec"), main.__dict__)
        await asyncio.sleep(0)

asyncio.run(run_cells())
"""


def _from_file(file: Path) -> list[str]:
    return [str(file)]


def _notebook(file: Path) -> list[str]:
    return ["-c", NOTEBOOK]


def _torchrun(file: Path) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("way", "end"),
    [
        *((_from_file, end) for end in ENDS),
        *((way, "in flight") for way in (_notebook, _torchrun)),
    ],
)
def test_a_trainer_calls_what_it_imports_and_what_it_defines_and_ends(
    tmp_path: Path, way: Way, end: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT + ENDS[end])
    # torchrun leaves its temporary directories behind.
    own = {"HERE": tmp_path, "PYTHONPATH": ROOT, "TMPDIR": tmp_path}

    with file.open() as stdin:
        done = subprocess.run(
            [sys.executable, *way(file)],
            cwd=ROOT,
            env=os.environ | {name: str(path) for name, path in own.items()},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert done.returncode == 0, done.stdout
    assert "localckpt/" not in done.stdout, "a traceback at exit"
    for rank in range(2 if way is _torchrun else 1):
        assert (tmp_path / f"runs-{rank}").read_text() == "x"
        pids = [
            json.loads((tmp_path / f"{name}-{rank}").read_text())["pid"]
            for name in ("sent", "forked")
        ]
        assert len(set(pids)) == 2
        assert all(work.await_end(pid) for pid in pids)
        assert (tmp_path / f"late-{rank}").exists() == (end == "in flight")
