"""A replica of torchft gets its state bit for bit, or an error, and nothing is changed then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.upstream.environment import UPSTREAM, import_upstream, needs

pytestmark = [pytest.mark.framework, needs("torchft")]

_ROOT = Path(__file__).parents[2]


def _call(rank: int, world_size: int, name: str) -> Any:
    return getattr(import_upstream("tests.integrations.torchft_runs"), name)()


def _run(name: str) -> Any:
    (told,) = run_ranks(_call, 1, name, init_group=False, timeout_s=120.0)
    return told


@pytest.fixture(scope="module")
def told() -> Any:
    return _run("transfer")


@pytest.mark.example
def test_torchfts_own_test_of_a_transport_passes_and_leaves_no_thread() -> None:
    assert _run("recover_in_torchfts_test") == 0


def test_a_state_is_the_same_bit_for_bit_on_all_also_in_given_tensors(told: Any) -> None:
    assert told["whole"] == 3
    assert told["comes_later"] == "same"
    assert told["in_place"] == {"same tensors": True}


def test_a_state_that_does_not_fit_the_given_tensors_changes_none(told: Any) -> None:
    error = told["misfits"]

    assert error.startswith("MismatchError: ")
    assert "user.default.half" in error


def test_damage_anywhere_is_refused_before_given_tensors_are_changed(told: Any) -> None:
    assert [error.partition(":")[0] for error in told["damaged_blocks"]] == [
        "CorruptShardError"
    ] * 4


def test_a_sender_that_stops_is_waited_for_no_longer_than_told(told: Any) -> None:
    error, seconds = told["stalled"]

    assert "timed out after 1 s" in error
    assert seconds < 8.0


def test_another_step_is_refused_by_its_number(told: Any) -> None:
    errors = told["of_another_step"]

    assert "MismatchError: step 6 of" in errors["older"]
    assert "step 7 is offered there" in errors["older"]
    assert "timed out after 1 s (step 7 is offered)" in errors["newer"]
    assert "timed out after 1 s (none is offered)" in errors["none"]


def test_classes_that_are_not_allowed_are_neither_sent_nor_made(told: Any) -> None:
    assert "Settings" in told["classes"]["not allowed to send"]
    assert told["classes"]["not allowed to receive"].startswith("UnsafeGlobalError")


def test_a_replica_that_was_killed_gets_its_state_from_the_other() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-m", "examples.integrations.torchft_training"],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), str(UPSTREAM)])},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        # torchft's own hook ends a replica so if the other is lost within its allreduce.
        if "assert fut._fut" not in done.stderr:
            break

    assert done.returncode == 0, done.stderr[-4000:]
    back = re.search(r"killed after step 5, and is back at step (\d+)", done.stdout)
    assert back is not None
    assert 5 <= int(back[1]) <= 6
    assert "after step 20 their weights are equal" in done.stdout
