"""Arguments that one rank's constructor refuses: an error on all ranks at once."""

from __future__ import annotations

import threading
from contextlib import suppress
from math import inf

import torch.distributed as dist

from localckpt.errors import CheckpointingException
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.failure import Attempt
from localckpt.ranks.ranks import Ranks
from localckpt.ranks.verdict import REFUSED

MANAGER = "manager"
"""Name of the :class:`Ranks` of a manager of the nodes' checkpoints."""

# The others may make nothing together, and then this rank's error is not to wait long for them.
_LONGEST_S = 30.0

_nested = threading.local()


class refused_together:
    """Context of a constructor: what it raises on this rank, the others raise where they meet.

    This rank takes part in the first decision of the others, and then raises its own error. Of
    contexts inside each other the outermost acts.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._name = name
        self._process_group = process_group
        # It may be what is refused.
        is_time = isinstance(timeout_s, int | float) and 0 < timeout_s < inf
        self._timeout_s = min(timeout_s, _LONGEST_S) if is_time and timeout_s else _LONGEST_S

    def __enter__(self) -> None:
        _nested.depth = getattr(_nested, "depth", 0) + 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _nested.depth -= 1
        if _nested.depth or not isinstance(error, Exception):
            return
        refused = Attempt()
        refused.failure = error
        # Without the ranks nobody waits for this one. What they say is this error, or that they
        # did not come.
        with suppress(CheckpointingException):
            ranks = Ranks(self._name, self._process_group, self._timeout_s)
            try:
                ranks.agree(
                    "begin together",
                    refused,
                    deadline=Deadline.after(self._timeout_s),
                    kind=REFUSED,
                )
            finally:
                ranks.close()
