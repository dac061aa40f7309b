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


def _call(rank: int, world_size: int, name: str, *args: Any) -> Any:
    return getattr(import_upstream("tests.integrations.torchft_runs"), name)(*args)


def _run(name: str, *args: Any) -> Any:
    (told,) = run_ranks(_call, 1, name, *args, init_group=False, timeout_s=120.0)
    return told


@pytest.mark.example
def test_torchfts_own_test_of_a_transport_passes_and_leaves_no_thread() -> None:
    _run("recover_in_torchfts_test")


_TRANSFERS = [
    "a_state_is_the_same_bit_for_bit_on_all",
    "given_tensors_are_filled",
    "a_state_that_does_not_fit_the_given_tensors_changes_none",
    "damage_and_a_cut_are_refused_before_given_tensors_are_changed",
    "a_sender_that_stops_is_waited_for_no_longer_than_told",
    "another_step_is_refused_by_its_number",
    "a_step_that_comes_later_is_waited_for",
    "who_is_no_sender_of_the_state_is_an_error",
    "classes_that_are_not_allowed_are_neither_sent_nor_made",
    "a_transport_that_was_shut_down_says_so",
    "a_shutdown_waits_for_no_stranger_and_no_slow_receiver",
]


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    return dict(_run("transfer", _TRANSFERS))


@pytest.mark.parametrize("name", _TRANSFERS)
def test_of_a_transfer_it_holds_that(name: str, wrong: dict[str, str]) -> None:
    assert name not in wrong, wrong[name]


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
