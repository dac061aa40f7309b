"""Every way to start a trainer: its own functions are called, and nothing hangs or stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
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


def _from_words(file: Path) -> list[str]:
    return ["-c", file.read_text()]


def _from_stdin(file: Path) -> list[str]:
    return ["-"]


def _notebook(file: Path) -> list[str]:
    return ["-c", NOTEBOOK]


def _torchrun(file: Path) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]


class Trainer:
    """A trainer that is started in one of these ways."""

    def __init__(self, way: Way, directory: Path, end: str) -> None:
        file = directory / "train.py"
        file.write_text(SCRIPT + textwrap.dedent(end))
        # torchrun leaves its temporary directories behind.
        own = {"HERE": directory, "PYTHONPATH": ROOT, "TMPDIR": directory}
        with file.open() as stdin:
            self.process = subprocess.Popen(
                [sys.executable, *way(file)],
                cwd=ROOT,
                env={**os.environ, **{name: str(path) for name, path in own.items()}},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def ends(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Way, str], Trainer]]:
    trainers: list[Trainer] = []

    def begin(way: Way, end: str) -> Trainer:
        trainers.append(Trainer(way, tmp_path, end))
        return trainers[-1]

    yield begin

    for process in [trainer.process for trainer in trainers]:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("way", "end"),
    [
        *((_from_file, end) for end in ENDS),
        *((way, "in flight") for way in (_from_words, _from_stdin, _notebook, _torchrun)),
    ],
)
def test_a_trainer_calls_what_it_imports_and_what_it_defines_and_ends(
    start: Callable[[Way, str], Trainer], tmp_path: Path, way: Way, end: str
) -> None:
    code, output = start(way, ENDS[end]).ends()

    assert code == 0, output
    assert "localckpt/" not in output, "a traceback at exit"
    for rank in range(2 if way is _torchrun else 1):
        assert (tmp_path / f"runs-{rank}").read_text() == "x"
        pids = [
            json.loads((tmp_path / f"{name}-{rank}").read_text())["pid"]
            for name in ("sent", "forked")
        ]
        assert len(set(pids)) == 2
        assert all(work.await_end(pid) for pid in pids)
        assert (tmp_path / f"late-{rank}").exists() == (end == "in flight")


@pytest.mark.fault("trainer-dies")
def test_when_a_rank_dies_under_torchrun_the_calls_in_hand_are_finished_and_all_ends(
    start: Callable[[Way, str], Trainer], tmp_path: Path
) -> None:
    trainer = start(
        _torchrun,
        """
        schedule(work.write_when, here / f"a-{rank}", here / "gate")
        work.await_file(here / "a-0.started")
        work.await_file(here / "a-1.started")
        if rank == "1":
            os.kill(os.getpid(), 9)
        queue.wait_until_finished()
        """,
    )
    pids = [int(work.await_file(tmp_path / f"a-{r}.started", PATIENCE_S)) for r in range(2)]

    code, output = trainer.ends()
    work.write(tmp_path / "gate")

    assert code != 0, output
    assert [work.await_file(tmp_path / f"a-{rank}") for rank in range(2)] == ["done", "done"]
    assert all(work.await_end(pid) for pid in pids)
