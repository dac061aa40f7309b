"""What the installed release of DeepSpeed does, for tests that compare its runs."""

from __future__ import annotations

import re
from importlib.metadata import distributions

from tests.upstream.environment import UPSTREAM

__all__ = ["is_deterministic"]

# With ZeRO 3, runs of 0.18.6 to 0.19.6 have differed that nothing disturbed.
_SINCE = (0, 19, 7)


def is_deterministic(stage: int) -> bool:
    """Whether two runs that nothing disturbs are the same, on CPU.

    Args:
        stage: ZeRO's.
    """
    (installed,) = distributions(name="deepspeed", path=[str(UPSTREAM)])
    release = tuple(int(part) for part in re.findall(r"\d+", installed.version)[:3])
    return stage < 3 or release >= _SINCE
