"""Replicated parts of a state: their marking, and the check that they are equal on all ranks.

Every rank reports a few digests with the outcome of a save, and the root compares them. Only if
they differ do ranks tell each other more: one rank of each kind the digest of every tensor.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from localckpt.availability.divergence import Divergence, describe, judge_differences
from localckpt.errors import CheckpointingException, DivergenceError, PeerLostError
from localckpt.events.stream import EventStream
from localckpt.ranks.job_store import group_ranks
from localckpt.ranks.ranks import Ranks
from localckpt.state_dict.replica_digests import PartDigest
from localckpt.state_dict.replicated import Replicated

logger = logging.getLogger(__name__)

_NOT_KEPT = (
    "It was not kept, and older checkpoints are as they were. If a part is not meant to be equal, "
    "save it without replicated(); else resume from an older checkpoint, without the node of a "
    "rank in the minority"
)


def divergence_error(
    ranks: Ranks,
    events: EventStream,
    iteration: int,
    divergence: Divergence,
    mine: Sequence[PartDigest],
    *,
    is_kept: bool,
) -> DivergenceError:
    """Find the tensors that differ, unless a rank is lost; all ranks call it."""
    wanted = {of.set_id for of in divergence.sets if ranks.rank in of.asked}
    told = {str(part.set_id): part.tensors for part in mine if part.set_id in wanted}
    is_concerned = any(of.may_be_named(ranks.rank) for of in divergence.sets)
    report = [socket.gethostname(), told] if is_concerned else None
    phase = f"name the tensors of iteration {iteration} that differ"
    try:
        divergence = ranks.decide(
            phase,
            lambda: report,
            lambda reports: judge_differences(divergence, reports).to_json(),
            read=Divergence.from_json,
        )
    except PeerLostError as lost:
        # That they differ is known on all ranks already.
        logger.warning("the tensors that differ are not known: %s", lost)
    text = (
        f"iteration {iteration} has replicas that differ, though its state says that they are "
        f"equal: {describe(divergence)}"
    )
    error = DivergenceError(text if is_kept else f"{text}. {_NOT_KEPT}")
    error.iteration = iteration
    error.differences = divergence.differences
    error.keys = tuple(difference.key for difference in divergence.differences)
    error.ranks = divergence.suspects
    error.nodes = divergence.nodes
    error.is_minority = bool(divergence.minority)
    details = {
        "keys": list(error.keys),
        "ranks": list(error.ranks),
        "nodes": list(error.nodes),
        "minority": error.is_minority,
    }
    events.emit("diverged", step=iteration, error=error, details=details)
    return error


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
