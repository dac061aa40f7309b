"""A trainer is interrupted, or ends, or forks, while a save is in flight: nothing hangs or stays.

Each is a script of its own, as a user's is. What carries its saves out is held up until the trainer
has been interrupted, so that the save is in flight without a doubt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.async_save import work
from tests.managers.jobs import cliques, files, iterations_on, make_manager, resume, state_of
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("interrupted")

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 40.0
_HELD_S = 0.3
"""How long a save is held up after the interruption: a trainer that does not wait is seen to."""
_OLDER, _NEWER = 1, 2

# Two checkpoints come first and one is kept, so that the save in flight overwrites a file.
_TRAINER = """
import contextlib, multiprocessing, os, signal, sys, time
from pathlib import Path

import torch.distributed as dist
import localckpt
from tests.async_save import work
from tests.managers.jobs import MAX_S, before_commit, cliques, make_manager, state_of

here, root = Path(sys.argv[1]), Path(sys.argv[2])
blocks = contextlib.ExitStack()
rank, replicas = 0, None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), cliques(1, 2)
manager = make_manager("disk", root, "job", replicas, keep_last=1)
queue = localckpt.AsyncCallsQueue(timeout_s=MAX_S)

def hold_up(ckpt_id):
    if ckpt_id.iteration == 2:
        work.await_file(here / "gate", MAX_S)

before_commit(manager, hold_up)

def begin_save(iteration):
    request = manager.save(state_of(rank, iteration), iteration, is_async=True)
    queue.schedule_async_request(request)

def announce_save_in_flight():
    begin_save(2)
    time.sleep(0.2)
    committed = list(manager.store.folder.glob("000000000002.*.safetensors"))
    assert queue.get_num_unfinalized_calls() and not committed, "the save is not in flight"
    work.write(here / f"in-flight-{rank}")

def open_gate():
    work.write(here / "gate")

def train():
    for each in filter(None, (replicas, manager, queue)):
        blocks.enter_context(each)
    assert manager.find_latest() == -1
    for iteration in range(2):
        begin_save(iteration)
        queue.maybe_finalize_async_calls(blocking=True)
    announce_save_in_flight()

"""

_IN_BLOCKS = """
with blocks:
    train()
    {then}
"""
_WITHOUT_BLOCKS = """
train()
{then}
"""


class _Trainers:
    """The ranks of a job, each a script that is run.

    Args:
        here: Where they tell how far they are.
        roots: The store of each.
        script: What they do.
        port: Of the store where they meet; ``None`` for a rank that knows no other.
    """

    def __init__(self, here: Path, roots: list[Path], script: str, port: int | None) -> None:
        self.here = here
        file = here / "train.py"
        file.write_text(_TRAINER + script)
        env = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        if port is not None:
            env |= {
                "WORLD_SIZE": str(len(roots)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                # The store is the test's, as it is the agent's under torchrun.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
            }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(file), str(here), str(root)],
                cwd=here,
                env=env if port is None else {**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, root in enumerate(roots)
        ]

    def await_in_flight(self) -> None:
        """Wait until each has begun the save that is held up."""
        deadline = time.monotonic() + _PATIENCE_S
        names = [f"in-flight-{rank}" for rank in range(len(self.processes))]
        while not all((self.here / name).exists() for name in names):
            assert time.monotonic() < deadline, "the save does not begin"
            for process in self.processes:
                assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def let_saves_go_on(self) -> None:
        time.sleep(_HELD_S)
        work.write(self.here / "gate")

    def end(self) -> tuple[set[int], str]:
        """Wait for the end of all; how, and what they said."""
        outputs = [process.communicate(timeout=_PATIENCE_S)[0] for process in self.processes]
        return {process.returncode for process in self.processes}, "\n".join(outputs)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()
            process.communicate(timeout=_PATIENCE_S)


@contextmanager
def _trainers(
    here: Path, roots: list[Path], script: str, port: int | None = None
) -> Iterator[_Trainers]:
    started = _Trainers(here, roots, script, port)
    try:
        started.await_in_flight()
        yield started
    finally:
        started.kill()


def _start_again(rank: int, world_size: int) -> int:
    """A next life: the older or the newer checkpoint is there, whole; then one more is saved."""
    with (
        cliques(1, 2) if world_size > 1 else nullcontext() as replicas,
        make_manager("disk", node_store(), "job", replicas, keep_last=1) as manager,
    ):
        found = int(manager.find_latest())
        assert found in (_OLDER, _NEWER)
        resume(manager, rank, found)
        manager.save(state_of(rank, 7), 7)
        resume(manager, rank, 7)
    return found


def _assert_only_shards(roots: list[Path], iterations: set[int]) -> None:
    assert all(name.endswith(".safetensors") for name in files(*roots)), files(*roots)
    assert iterations_on(*roots) == iterations
    assert [path for root in roots for path in root.rglob("ahead.*")] == []
    assert [path for root in roots for path in root.rglob(".owner")] == []


_TRAINING, _WAITING = "time.sleep(600)", "queue.wait_until_finished()"
# As a data loader forks, as a script does, and as a library that leaves by itself.
_FORKING = """
for leave in (os._exit, sys.exit):
    child = os.fork()
    if child == 0:
        leave(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
child.start()
child.join(MAX_S)
assert child.exitcode == 7

open_gate()
queue.maybe_finalize_async_calls(blocking=True)
"""


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("script", "then", "signals", "code", "finishes"),
    [
        pytest.param(_IN_BLOCKS, "sys.exit(3)", [], 3, True, id="exits"),
        pytest.param(_WITHOUT_BLOCKS, "1 / 0", [], 1, True, id="ends without closing anything"),
        pytest.param(_IN_BLOCKS, _WAITING, [2], -2, True, id="is interrupted while it waits"),
        pytest.param(_IN_BLOCKS, _TRAINING, [2], -2, True, id="is interrupted while it trains"),
        # The save may be given up.
        pytest.param(_IN_BLOCKS, _TRAINING, [2, 2], -2, False, id="is interrupted twice"),
        pytest.param(_IN_BLOCKS, _TRAINING, [15], -15, False, id="is terminated"),
        pytest.param(_IN_BLOCKS, _FORKING, [], 0, True, id="forks"),
    ],
)
def test_a_trainer_with_a_save_in_flight_leaves_one_that_is_whole_and_nothing_else(
    script: str, then: str, signals: list[int], code: int, finishes: bool, tmp_path: Path
) -> None:
    root = tmp_path / "node"
    root.mkdir()
    lines = textwrap.indent(then, "    ").lstrip() if script == _IN_BLOCKS else then

    with _trainers(tmp_path, [root], script.format(then=lines)) as trainers:
        # Time to begin to wait.
        time.sleep(0.1)
        for number in signals:
            trainers.signal(signal.Signals(number))
            time.sleep(_HELD_S * (len(signals) > 1))
        trainers.let_saves_go_on()
        codes, output = trainers.end()

    assert codes == {code}, output
    if finishes and script == _IN_BLOCKS:
        # The one that forks finalizes, and lets the older one go.
        _assert_only_shards([root], {_NEWER} if then == _FORKING else {_OLDER, _NEWER})
    (found,) = run_ranks(_start_again, 1, init_group=False, store_per_node=[root])
    assert found == _NEWER or not finishes
    _assert_only_shards([root], {7})


@pytest.mark.parametrize(
    "way", ["SIGINT", *(pytest.param(w, marks=pytest.mark.long) for w in ("exit", "SIGTERM"))]
)
def test_ranks_that_are_interrupted_together_come_back_to_one_checkpoint(
    way: str, tmp_path: Path, node_dirs: Callable[[int], list[Path]]
) -> None:
    roots = node_dirs(2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = _IN_BLOCKS.format(then="sys.exit(3)" if way == "exit" else _TRAINING)

    with _trainers(tmp_path, roots, script, store.port) as trainers:
        if way != "exit":
            trainers.signal(signal.Signals[way])
        trainers.let_saves_go_on()
        codes, output = trainers.end()

    assert codes == {3 if way == "exit" else -signal.Signals[way]}, output
    found = run_ranks(_start_again, 2, store_per_node=roots)
    _assert_only_shards(roots, {7})
    assert found in ([_NEWER] * 2, [_OLDER] * 2)
    assert way == "SIGTERM" or found == [_NEWER] * 2
