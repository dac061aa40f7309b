"""Cadence of saves: a pure function of the time of a step and the cost of a save."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from localckpt.errors import CheckpointingException


@dataclass(frozen=True, slots=True)
class Costs:
    """Measurements of a running job, the slowest rank's.

    Attributes:
        step_s: Duration of a step without any save, in seconds; ``None`` before the first.
        save_s: Training time that one save takes away, in seconds: how long training waits for it,
            and how much slower the steps beside it are. ``None`` before the second save.
    """

    step_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True, slots=True)
class Every:
    """Interval between saves, given in one of four ways.

    Args:
        steps: A number of steps, counted from step 0 whatever was saved in between: with 5, after
            steps 4, 9 and 14.
        minutes: A time, turned into steps by the measured duration of a step.
        overhead: Largest share of training time that saves may take, such as 0.01.
        mtbf_hours: Mean time between failures of the whole job. The interval is the one that loses
            least time to saves and to repeated work together, by equation 37 of J. T. Daly, "A
            higher order estimate of the optimum checkpoint interval for restart dumps", Future
            Generation Computer Systems 22 (2006). The time that a restart takes does not change it.

    Raises:
        CheckpointingException: None of them is given, or several, or one that makes no sense.
    """

    steps: int | None = None
    minutes: float | None = None
    overhead: float | None = None
    mtbf_hours: float | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__slots__}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise CheckpointingException(
                f"Every() takes one of steps, minutes, overhead and mtbf_hours, and was given "
                f"{', '.join(given) or 'none'}"
            )
        ((name, value),) = given.items()
        if isinstance(value, bool) or not value > 0:
            raise CheckpointingException(f"Every({name}={value!r}): it must be above 0")
        if name == "steps" and not isinstance(value, int):
            raise CheckpointingException(f"Every(steps={value!r}): it must be an int")
        if name == "overhead" and value >= 1:
            raise CheckpointingException(
                f"Every(overhead={value!r}): it is a share of training time, and must be below 1"
            )

    def interval(self, costs: Costs) -> int | None:
        """Steps from one save to the next, at least 1.

        Returns:
            The interval; ``None`` as long as it depends on what is not measured yet.
        """
        if self.steps is not None:
            return self.steps
        if costs.step_s is None:
            return None
        if self.minutes is not None:
            return _in_steps(60 * self.minutes, costs.step_s)
        if costs.save_s is None:
            return None
        if self.overhead is not None:
            # Of interval + save_s, the saves take the share.
            return _in_steps(costs.save_s * (1 / self.overhead - 1), costs.step_s)
        assert self.mtbf_hours is not None
        return _in_steps(_daly_s(costs.save_s, 3600 * self.mtbf_hours), costs.step_s)


def _daly_s(save_s: float, mtbf_s: float) -> float:
    """Daly's optimum time between two saves, in seconds."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def _in_steps(seconds: float, step_s: float) -> int:
    return max(1, ceil(seconds / max(step_s, 1e-9)))
