"""Random sequences of faults, each of which another test makes alone: all guarantees hold."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.campaign.campaign import Campaign
from tests.faults.campaign.course import choose_setup, finish, take_step
from tests.faults.campaign.nodes import Node

Dirs = Callable[[int], list[Path]]

# Together they take most kinds of steps, with each kind of manager.
_SEEDS = (13, 16)
_STEPS = 16
_LONG_S = 600.0
_LIMIT_S = 3600
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case for each seed; a seed or steps that were asked for may take hours."""
    option = metafunc.config.getoption
    seed, steps = option("--seed"), option("--steps")
    if seed is not None:
        courses = [_Course(seed, steps or _LONG_STEPS)]
    elif option("--faults"):
        courses = [_Course(None, steps)]
    else:
        courses = [_Course(seed, steps or _STEPS) for seed in _SEEDS]
    limit_s = _LIMIT_S if seed is steps is None else 0
    metafunc.parametrize(
        "course",
        [
            pytest.param(course, id=str(course), marks=pytest.mark.timeout(limit_s))
            for course in courses
        ],
    )


@dataclass(frozen=True, slots=True)
class _Course:
    """Without a seed it draws one; without a number of steps it goes on for ten minutes."""

    seed: int | None
    steps: int | None

    def __str__(self) -> str:
        # Every process that runs tests must give them the same names.
        return "any seed" if self.seed is None else f"seed {self.seed}"


@pytest.mark.fault("random-sequence")
def test_all_guarantees_hold_in_random_sequences_of_faults(
    tmp_path: Path,
    node_dirs: Dirs,
    shm_roots: Dirs,
    small_home: Callable[[], Path | None],
    long_form: bool,
    course: _Course,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    end = time.monotonic() + _LONG_S if course.steps is None else float("inf")
    seed = secrets.randbelow(1_000_000) if course.seed is None else course.seed
    setup = choose_setup(seed)
    home = (node_dirs if setup.kind == "disk" else shm_roots)(1)[0]
    homes = [small_home() or home, *[home] * (setup.world_size - 1)]
    nodes = [Node(f"node{n}", at, tmp_path, at != home) for n, at in enumerate(homes)]
    with capsys.disabled() if long_form else nullcontext():
        print(f"\nseed {seed}: {setup}")

    taken = _run(Campaign(setup, nodes), seed, course.steps, end)

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
