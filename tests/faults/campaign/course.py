"""Which step the campaign takes next.

Every decision of a step is drawn from the seed and the step's number alone, so that a seed takes
the same steps however the timing turns out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.campaign import steps
from tests.faults.campaign.campaign import Campaign
from tests.faults.campaign.job import Setup

__all__ = ["choose_setup", "finish", "take_step"]

_TIMEOUT_S = 3.0


def choose_setup(seed: int) -> Setup:
    """How the job of a seed saves."""
    choice = random.Random(str(seed))
    return Setup(
        kind=choice.choice(["disk", "memory"]),
        world_size=choice.choice([3, 4]),
        keep_last=choice.choice([1, 2, 3]),
        lazy=choice.random() < 0.3,
        timeout_s=_TIMEOUT_S,
    )


def take_step(campaign: Campaign, seed: int) -> None:
    """Take the next step. The first two see to it that there is something to lose."""
    number = len(campaign.trail)
    campaign.choice = random.Random(f"{seed}/{number}")
    if number < 2:
        _take(campaign, (steps.restart, steps.save)[number])
        return
    possible = [s for s in (_ALIVE if campaign.is_alive else _AT_REST) if s.when(campaign)]
    (step,) = campaign.choice.choices(possible, [step.weight for step in possible])
    _take(campaign, step.take)


def finish(campaign: Campaign, seed: int) -> None:
    """Whatever happened, the job starts, saves, and leaves in peace."""
    campaign.choice = random.Random(f"{seed}/end")
    if not campaign.is_alive:
        _take(campaign, steps.restart)
    for step in (steps.save, steps.shut_down):
        _take(campaign, step)


def _take(campaign: Campaign, step: Callable[[Campaign], None]) -> None:
    campaign.trail.append(step.__name__.replace("_", " "))
    step(campaign)


@dataclass(frozen=True, slots=True)
class _Choice:
    take: Callable[[Campaign], None]
    weight: float
    when: Callable[[Campaign], bool] = lambda _: True


def _can_fill(c: Campaign) -> bool:
    return any(node.can_fill for node in c.nodes)


_ALIVE = [
    _Choice(steps.save, 3),
    _Choice(steps.save_behind_training, 4, lambda c: c.begun < 2),
    _Choice(steps.settle_all, 2, lambda c: c.begun > 0),
    _Choice(steps.poll, 1, lambda c: c.begun > 0),
    _Choice(steps.look_again, 1),
    _Choice(steps.kill_in_save, 2),
    _Choice(steps.stop_in_save, 0.7),
    _Choice(steps.kill_in_load, 1),
    _Choice(steps.fill_node, 1, _can_fill),
    _Choice(steps.break_directory, 1),
    _Choice(steps.damage_alive, 0.7),
    _Choice(steps.crash, 1.5),
    _Choice(steps.crash_and_restart_at_once, 1),
    _Choice(steps.shut_down, 1),
]

_AT_REST = [
    _Choice(steps.restart, 6),
    _Choice(steps.restart_twice, 1),
    _Choice(steps.go_back, 1),
    _Choice(steps.restart_on_full_node, 0.5, _can_fill),
    _Choice(steps.lose_node, 1.2),
    _Choice(steps.node_away, 0.8),
    _Choice(steps.node_of_old, 1),
    _Choice(steps.move_ranks, 1),
    _Choice(steps.damage_at_rest, 1.5),
    _Choice(steps.swap_files, 0.7),
]
