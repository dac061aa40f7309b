"""What the tests of the trainers share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.trainings import LONGEST_S
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``run_jobs()`` of a test's module returns, in a process that imports its framework."""
    (told,) = run_ranks(
        *(_call, 1, request.module.run_jobs),
        store_per_node=[tmp_path_factory.mktemp("nodes")],
        init_group=False,
        timeout_s=getattr(request.module, "LONGEST_S", LONGEST_S),
    )
    return told


def _call(rank: int, world_size: int, run_jobs: Any) -> Any:
    return run_jobs()
