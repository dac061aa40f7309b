"""A replica of torchft gets its state bit for bit, or an error, and nothing is changed then."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import python
from tests.ranks import run_ranks
from tests.upstream.environment import UPSTREAM, import_upstream, needs

pytestmark = [pytest.mark.framework, needs("torchft")]

_ROOT = Path(__file__).parents[2]


def _call(rank: int, world_size: int, name: str) -> Any:
    return getattr(import_upstream("tests.integrations.torchft_runs"), name)()


def _run(name: str) -> Any:
    (told,) = run_ranks(_call, 1, name, init_group=False, timeout_s=120.0)
    return told


@pytest.mark.example
def test_torchfts_own_test_of_a_transport_passes_and_leaves_no_thread() -> None:
    _run("recover_in_torchfts_test")


def test_each_transfer_is_whole_or_an_error_in_time_that_changes_nothing() -> None:
    assert _run("transfer") == {}


def test_a_replica_that_was_killed_gets_its_state_from_the_other() -> None:
    variables = {"PYTHONPATH": os.pathsep.join([str(_ROOT), str(UPSTREAM)])}
    for _ in range(3):
        done = python("-m", "examples.integrations.torchft_training", env=variables)
        # torchft's own hook ends a replica so if the other is lost within its allreduce.
        if "assert fut._fut" not in done.err:
            break

    assert done.status == 0, done.err[-4000:]
    back = re.search(r"killed after step 5, and is back at step (\d+)", done.out)
    assert back is not None
    assert 5 <= int(back[1]) <= 6
    assert "after step 20 their weights are equal" in done.out
