"""A trainer is interrupted, or ends, or forks, while a save is in flight: nothing hangs or stays.

What carries its saves out is held up until then, so that the save is in flight without a doubt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.async_save import work
from tests.managers.jobs import files, iterations_on, make_manager, resume, state_of
from tests.ranks import node_store, run_ranks

pytestmark = pytest.mark.fault("interrupted")

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 40.0
# A save is held up after the interruption: a trainer that does not wait is seen to.
_HELD_S = 0.3
_OLDER, _NEWER = 1, 2

# Two checkpoints come first and one is kept, so that the save in flight overwrites a file.
_TRAINER = """
import contextlib, multiprocessing, os, signal, sys, time
from pathlib import Path

import localckpt
from tests.async_save import work
from tests.managers.jobs import MAX_S, before_commit, make_manager, state_of

here, root = Path(sys.argv[1]), Path(sys.argv[2])
blocks = contextlib.ExitStack()
manager = make_manager("disk", root, "job", keep_last=1)
queue = localckpt.AsyncCallsQueue(timeout_s=MAX_S)

def hold_up(ckpt_id):
    if ckpt_id.iteration == 2:
        work.await_file(here / "gate", MAX_S)

before_commit(manager, hold_up)

def begin_save(iteration):
    request = manager.save(state_of(0, iteration), iteration, is_async=True)
    queue.schedule_async_request(request)

def train():
    blocks.enter_context(manager)
    blocks.enter_context(queue)
    assert manager.find_latest() == -1
    for iteration in range(2):
        begin_save(iteration)
        queue.maybe_finalize_async_calls(blocking=True)
    begin_save(2)
    time.sleep(0.2)
    committed = list(manager.store.folder.glob("000000000002.*.safetensors"))
    assert queue.get_num_unfinalized_calls() and not committed, "the save is not in flight"
    work.write(here / "in-flight")

"""

_IN_BLOCKS = "with blocks:\n    train()\n    {then}\n"
_WITHOUT_BLOCKS = "train()\n{then}\n"


def _start_again(rank: int, world_size: int) -> int:
    """A next life: the older or the newer checkpoint is there, whole; then one more is saved."""
    with make_manager("disk", node_store(), "job", keep_last=1) as manager:
        found = int(manager.find_latest())
        assert found in (_OLDER, _NEWER)
        resume(manager, rank, found)
        manager.save(state_of(rank, 7), 7)
        resume(manager, rank, 7)
    return found


def _assert_only_shards(root: Path, *iterations: int) -> None:
    assert all(name.endswith(".safetensors") for name in files(root)), files(root)
    assert iterations_on(root) == {*iterations}
    assert [*root.rglob("ahead.*"), *root.rglob(".owner")] == []


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

work.write(here / "gate")
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

    (tmp_path / "train.py").write_text(_TRAINER + script.format(then=lines))
    with subprocess.Popen(
        [sys.executable, "train.py", str(tmp_path), str(root)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as trainer:
        try:
            work.await_file(tmp_path / "in-flight", _PATIENCE_S)
            # Time to begin to wait.
            time.sleep(0.1)
            for number in signals:
                trainer.send_signal(number)
                time.sleep(_HELD_S * (len(signals) > 1))
            time.sleep(_HELD_S)
            work.write(tmp_path / "gate")
            output, _ = trainer.communicate(timeout=_PATIENCE_S)
        finally:
            trainer.kill()

    assert trainer.returncode == code, output
    if finishes and script == _IN_BLOCKS:
        # The one that forks finalizes, and lets the older one go.
        _assert_only_shards(root, *([] if then == _FORKING else [_OLDER]), _NEWER)
    (found,) = run_ranks(_start_again, 1, init_group=False, store_per_node=[root])
    assert found == _NEWER or not finishes
    _assert_only_shards(root, 7)
