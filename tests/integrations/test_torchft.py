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


def test_a_state_is_the_same_bit_for_bit_also_if_training_goes_on(told: Any) -> None:
    assert told["whole"] == told["later_changes"] == told["comes_later"] == "same"


def test_several_replicas_receive_at_once(told: Any) -> None:
    assert told["several_at_once"] == 8


def test_given_tensors_are_filled_where_they_are_and_missing_ones_made(told: Any) -> None:
    assert told["in_place"] == {"same tensors": True}


def test_a_state_that_does_not_fit_the_given_tensors_changes_none(told: Any) -> None:
    error = told["misfits"]

    assert error.startswith("MismatchError: ")
    assert "user.default.half" in error


def test_damage_anywhere_is_refused_before_given_tensors_are_changed(told: Any) -> None:
    assert [error.partition(":")[0] for error in told["damaged_blocks"]] == [
        "CorruptShardError"
    ] * 4


def test_a_connection_that_breaks_is_an_error_that_says_how_much_came(told: Any) -> None:
    error = told["cut"]

    assert error.startswith("PeerLostError: step 7 of replica rank 0 at 127.0.0.1:")
    assert re.search(r"the connection ended after \d+ of \d+ bytes.*Nothing was changed", error)


@pytest.mark.parametrize("how", ["stalled", "silent"])
def test_a_sender_that_stops_is_waited_for_no_longer_than_told(told: Any, how: str) -> None:
    error, seconds = told[how]

    assert "timed out after 1 s" in error
    assert seconds < 8.0


def test_another_step_is_refused_by_its_number(told: Any) -> None:
    errors = told["of_another_step"]

    assert "MismatchError: step 6 of" in errors["older"]
    assert "step 7 is offered there" in errors["older"]
    assert "timed out after 1 s (step 7 is offered)" in errors["newer"]
    assert "timed out after 1 s (none is offered)" in errors["none"]


def test_a_sender_that_is_another_one_or_gone_is_an_error(told: Any) -> None:
    errors = told["elsewhere"]

    assert "MismatchError" in errors["other token"]
    assert "another process is there now" in errors["other token"]
    assert "PeerLostError" in errors["gone"]
    assert "Connection refused" in errors["gone"]
    for kind in ("another transport", "no transport"):
        assert "no ImageTransport. Give all replicas the same transport" in errors[kind]


def test_classes_that_are_not_allowed_are_neither_sent_nor_made(told: Any) -> None:
    assert "Settings" in told["classes"]["not allowed to send"]
    assert told["classes"]["not allowed to receive"].startswith("UnsafeGlobalError")


def test_a_transport_that_is_shut_down_says_so(told: Any) -> None:
    for error in told["after_shutdown"].values():
        assert "this transport is shut down" in error


def test_a_shutdown_waits_for_no_slow_receiver_and_leaves_nothing_open(told: Any) -> None:
    assert told["shutdown_while_sending"] < 5.0
    assert told["left"] == {"threads": 0, "open": 0}


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
