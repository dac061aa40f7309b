"""Marking of the parts of a state that are equal on several ranks of a job."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from localckpt.errors import CheckpointingException
from localckpt.ranks.job_store import group_ranks
from localckpt.state_dict.replicated import Replicated

__all__ = ["replicated"]


def replicated(obj: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Mark a part of a state as equal on all ranks of a group.

    Put it around what data parallelism keeps equal, in the state that a manager saves:
    ``{"model": localckpt.replicated(model.state_dict()), "rng": ...}``. Images then say which ranks
    hold the same bytes. A load gives the part back without the marker, and loads into a state with
    or without it.

    Args:
        obj: The part: a state, or at the top level of a dict a model, an optimizer or another
            object with ``state_dict`` and ``load_state_dict``.
        group: The ranks on which the part is equal; ``None`` for all.

    Raises:
        CheckpointingException: This rank is not in the group, or the part is marked already.
    """
    if isinstance(obj, Replicated):
        raise CheckpointingException(
            "replicated() was given a part that is marked by replicated() already: mark each part "
            "once, with the ranks that have it in common"
        )
    if not dist.is_available() or not dist.is_initialized():
        return Replicated(obj, range(1))
    if group is not None and dist.get_rank(group) < 0:
        raise CheckpointingException(
            f"replicated() was called by rank {dist.get_rank()} with a group that it is not in: "
            f"pass the group whose ranks have this part in common"
        )
    return Replicated(obj, tuple(sorted(group_ranks(group))))
