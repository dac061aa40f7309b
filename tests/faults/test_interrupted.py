"""A trainer is interrupted, or ends, or forks, while a save is in flight: nothing hangs or stays.

Each is a script of its own, as a user's is. What carries its saves out is held up until the trainer
has been interrupted, so that the save is in flight without a doubt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.async_save import work
from tests.faults.table import fixed_rows
from tests.managers.jobs import (
    KINDS,
    cliques,
    files,
    iterations_on,
    make_manager,
    resume,
    state_of,
)
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("interrupted")

Dirs = Callable[[int], list[Path]]

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 40.0
_HELD_S = 0.3
"""How long a save is held up after the interruption: a trainer that does not wait is seen to."""
_OLDER, _NEWER = 1, 2
_LONG = pytest.mark.long
_ONE_WAY = fixed_rows(KINDS, {"disk"})

# Two checkpoints come first and one is kept, so that the save in flight overwrites a file.
_TRAINER = """
import contextlib, multiprocessing, os, signal, sys, time
from pathlib import Path

import torch.distributed as dist
import localckpt
from tests.async_save import work
from tests.managers.jobs import MAX_S, before_commit, cliques, make_manager, state_of

here, root, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
blocks = contextlib.ExitStack()
rank, replicas = 0, None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), cliques(1, 2)
manager = make_manager(kind, root, "job", replicas, keep_last=1)
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
        kind: How they save.
        script: What they do.
        port: Of the store where they meet; ``None`` for a rank that knows no other.
    """

    def __init__(
        self, here: Path, roots: list[Path], kind: str, script: str, port: int | None
    ) -> None:
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
                [sys.executable, str(file), str(here), str(root), kind],
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


Start = Callable[..., _Trainers]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[_Trainers] = []

    def begin(roots: list[Path], kind: str, script: str, port: int | None = None) -> _Trainers:
        started.append(_Trainers(tmp_path, roots, kind, script, port))
        return started[-1]

    yield begin

    for trainers in started:
        trainers.kill()


def _start_again(rank: int, root: Path, kind: str, strategy: object = None) -> int:
    """A next life: the older or the newer checkpoint is there, whole; then one more is saved."""
    options = {"keep_last": 1}
    with make_manager(kind, root, "job", strategy, **options) as manager:
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


def _assert_a_next_life(root: Path, kind: str) -> int:
    found = _start_again(0, root, kind)
    _assert_only_shards([root], {7})
    return found


@pytest.mark.parametrize("kind", _ONE_WAY)
def test_a_trainer_that_exits_waits_for_its_save_and_leaves_nothing(
    start: Start, node_dirs: Dirs, shm_roots: Dirs, kind: str
) -> None:
    (root,) = _stores(kind, 1, node_dirs, shm_roots)
    trainers = start([root], kind, _IN_BLOCKS.format(then="sys.exit(3)"))
    trainers.await_in_flight()

    trainers.let_saves_go_on()

    codes, output = trainers.end()
    assert codes == {3}, output
    _assert_only_shards([root], {_OLDER, _NEWER})
    assert _assert_a_next_life(root, kind) == _NEWER


@pytest.mark.parametrize("kind", fixed_rows(KINDS, {"memory"}))
def test_a_trainer_that_ends_without_closing_anything_does_not_hang(
    start: Start, node_dirs: Dirs, shm_roots: Dirs, kind: str
) -> None:
    (root,) = _stores(kind, 1, node_dirs, shm_roots)
    trainers = start([root], kind, _WITHOUT_BLOCKS.format(then="1 / 0"))
    trainers.await_in_flight()

    trainers.let_saves_go_on()

    codes, output = trainers.end()
    assert codes == {1}, output
    assert _assert_a_next_life(root, kind) == _NEWER


_TRAINING, _WAITING = "time.sleep(600)", "queue.wait_until_finished()"


@pytest.mark.parametrize(
    ("kind", "doing"),
    fixed_rows(product(KINDS, (_WAITING, _TRAINING)), {("disk", _WAITING), ("memory", _TRAINING)}),
)
def test_ctrl_c_lets_the_save_end_well_and_leaves_nothing(
    start: Start, node_dirs: Dirs, shm_roots: Dirs, kind: str, doing: str
) -> None:
    (root,) = _stores(kind, 1, node_dirs, shm_roots)
    trainers = start([root], kind, _IN_BLOCKS.format(then=doing))
    trainers.await_in_flight()
    # Time to begin to wait.
    time.sleep(0.1)

    trainers.signal(signal.SIGINT)
    trainers.let_saves_go_on()

    codes, output = trainers.end()
    assert codes == {-signal.SIGINT}, output
    _assert_only_shards([root], {_OLDER, _NEWER})
    assert _assert_a_next_life(root, kind) == _NEWER


@pytest.mark.parametrize("kind", _ONE_WAY)
def test_a_second_ctrl_c_may_give_the_save_up_and_leaves_nothing(
    start: Start, node_dirs: Dirs, shm_roots: Dirs, kind: str
) -> None:
    (root,) = _stores(kind, 1, node_dirs, shm_roots)
    trainers = start([root], kind, _IN_BLOCKS.format(then=_TRAINING))
    trainers.await_in_flight()

    for _ in range(2):
        trainers.signal(signal.SIGINT)
        time.sleep(_HELD_S)
    trainers.let_saves_go_on()

    codes, output = trainers.end()
    assert codes == {-signal.SIGINT}, output
    _assert_a_next_life(root, kind)


@pytest.mark.parametrize("kind", fixed_rows(KINDS, {"memory"}))
def test_sigterm_ends_a_trainer_at_once_and_the_next_start_removes_what_is_left(
    start: Start, node_dirs: Dirs, shm_roots: Dirs, kind: str
) -> None:
    (root,) = _stores(kind, 1, node_dirs, shm_roots)
    trainers = start([root], kind, _IN_BLOCKS.format(then=_TRAINING))
    trainers.await_in_flight()

    trainers.signal(signal.SIGTERM)
    trainers.let_saves_go_on()

    codes, output = trainers.end()
    assert codes == {-signal.SIGTERM}, output
    _assert_a_next_life(root, kind)


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


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_IN_BLOCKS, id="in blocks"),
        pytest.param(_WITHOUT_BLOCKS, id="without", marks=_LONG),
    ],
)
@pytest.mark.parametrize("kind", _ONE_WAY)
def test_a_forked_child_that_ends_leaves_the_save_of_its_parent_alone(
    start: Start, node_dirs: Dirs, shm_roots: Dirs, kind: str, script: str
) -> None:
    (root,) = _stores(kind, 1, node_dirs, shm_roots)
    forking = _FORKING.replace("\n", "\n    ") if script == _IN_BLOCKS else _FORKING

    trainers = start([root], kind, script.format(then=forking))

    codes, output = trainers.end()
    assert codes == {0}, output
    assert _assert_a_next_life(root, kind) == _NEWER


def _start_all_again(rank: int, world_size: int, kind: str) -> int:
    with cliques(1, 2) as replicas:
        return _start_again(rank, node_store(), kind, replicas)


@pytest.mark.parametrize("kind", _ONE_WAY)
@pytest.mark.parametrize(
    "way",
    fixed_rows(("SIGINT", "sys.exit(3)", "SIGTERM"), {"SIGINT"}),
)
def test_ranks_that_are_interrupted_together_come_back_to_one_checkpoint(
    start: Start, node_dirs: Dirs, shm_roots: Dirs, kind: str, way: str
) -> None:
    roots = _stores(kind, 2, node_dirs, shm_roots)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    number = getattr(signal, way, None)
    then = way if number is None else _TRAINING
    trainers = start(roots, kind, _IN_BLOCKS.format(then=then), store.port)
    trainers.await_in_flight()

    if number is not None:
        trainers.signal(number)
    trainers.let_saves_go_on()

    codes, output = trainers.end()
    assert codes == {3 if number is None else -number}, output
    found = run_ranks(_start_all_again, 2, kind, store_per_node=roots)
    _assert_only_shards(roots, {7})
    assert found in ([_NEWER] * 2, [_OLDER] * 2)
    assert way == "SIGTERM" or found == [_NEWER] * 2


def _stores(kind: str, count: int, node_dirs: Dirs, shm_roots: Dirs) -> list[Path]:
    return (node_dirs if kind == "disk" else shm_roots)(count)
