"""Random sequences of faults, each of which another test makes alone: all guarantees hold."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.faults.campaign.campaign import Campaign
from tests.faults.campaign.course import choose_setup, finish, take_step
from tests.faults.campaign.nodes import Node
from tests.storage.conftest import small_disk

__all__ = ["small_disk"]  # pytest finds fixtures by name

Dirs = Callable[[int], list[Path]]

# Together they take most kinds of steps, with each kind of manager and of worker.
_SEEDS = (12, 13, 16, 17)
_STEPS = 16
_LONG_S = 600.0
_LONG_STEPS = 60
_SMALL = "size=96m"


@pytest.fixture
def small_home(request: pytest.FixtureRequest) -> Callable[[], Path | None]:
    """A small file system, where one can be mounted."""

    def mount() -> Path | None:
        try:
            return Path(request.getfixturevalue("small_disk")(_SMALL))
        except pytest.skip.Exception:
            return None

    return mount


@pytest.mark.fault("random-sequence")
@pytest.mark.timeout(3600)
def test_all_guarantees_hold_in_random_sequences_of_faults(
    tmp_path: Path,
    node_dirs: Dirs,
    shm_roots: Dirs,
    small_home: Callable[[], Path | None],
    long_form: bool,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    seed, steps = pytestconfig.getoption("--seed"), pytestconfig.getoption("--steps")
    end = float("inf")
    if seed is not None:
        seeds, steps = [seed], steps or _LONG_STEPS
    elif long_form:
        seeds = [secrets.randbelow(1_000_000)]
        end = time.monotonic() + _LONG_S if steps is None else end
    else:
        seeds, steps = _SEEDS, steps or _STEPS
    taken = 0
    for seed in seeds:
        setup = choose_setup(seed)
        home = (node_dirs if setup.kind == "disk" else shm_roots)(1)[0]
        homes = [small_home() or home, *[home] * (setup.world_size - 1)]
        aside = Path(tempfile.mkdtemp(prefix="aside-", dir=tmp_path))
        nodes = [Node(f"node{n}", at, aside, at != home) for n, at in enumerate(homes)]
        with capsys.disabled() if long_form else nullcontext():
            print(f"\nseed {seed}: {setup}")

        taken += _run(Campaign(setup, nodes), seed, steps, end)

    record_property("cases", taken)


def _run(campaign: Campaign, seed: int, steps: int | None, end: float) -> int:
    """Take steps until there were enough, or it is time; how many."""
    taken, held = 0, False
    try:
        while taken != steps and time.monotonic() < end:
            taken += 1
            take_step(campaign, seed)
        finish(campaign, seed)
        held = True
        return taken
    finally:
        # Captured, and shown with a failure.
        for number, step in enumerate(campaign.trail, 1):
            print(f"{number:4d}  {step}")
        if not held:
            print(f"To run it again: make faults SEED={seed} STEPS={taken}\n")
        campaign.clean_up()
        for output in campaign.outputs:
            print(output)
