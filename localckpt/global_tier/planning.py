"""Planning a save once, and not again while no rank's structure changes.

torch has a cache of plans of its own (``enable_plan_caching``). It is kept by the name of the
planner's class for the whole process, so two managers mix theirs up; it does not look at dtypes, so
a model that was converted is described as it was before; and after a plan that was refused the
coordinator goes on from it, and the others do not. So the plans are torch's, and the cache is ours.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from localckpt.errors import CheckpointingException, MismatchError

if TYPE_CHECKING:
    from localckpt.global_tier.rounds import Meeting
    from localckpt.global_tier.writer import FileSystemWriterAsync

__all__ = ["PlanCache", "PlannedSave", "Written", "plan_save", "require_same"]


class Written(NamedTuple):
    """Where one rank's items are, and the bytes of each of its files."""

    results: list[WriteResult]
    files: dict[str, int]


class PlanCache:
    """What the last save of a job planned on this rank.

    Attributes:
        bytes_gathered: What the ranks sent to the coordinator for the last save; 0 elsewhere.
        global_plans_made: How often the coordinator has planned for all ranks.
    """

    def __init__(self) -> None:
        self.bytes_gathered = 0
        self.global_plans_made = 0
        self.local: SavePlan | None = None
        self.final: SavePlan | None = None
        self.coordinated: _Coordinated | None = None

        self._said: Written | None = None
        self._heard: list[Written] | None = None

    def clear(self) -> None:
        """Plan anew at the next save. All ranks do it after a save that failed on any."""
        self.local = self.final = self.coordinated = self._said = self._heard = None

    @contextmanager
    def kept_if_all_is_well(self) -> Iterator[None]:
        """Clears it when what is inside fails."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def say_written(self, written: Written) -> bytes:
        """What this rank has to send to the coordinator: nothing, if it wrote as it did before."""
        if written == self._said:
            return b""
        self._said = written
        return pickle.dumps(written)

    def hear_written(self, said: list[bytes]) -> tuple[list[Written], bool]:
        """On the coordinator: what each rank has written, and whether it is all as before."""
        self.bytes_gathered += sum(map(len, said))
        if self._heard is None:
            _require_all(said)
            self._heard = [Written([], {}) for _ in said]
        self._heard = [
            pickle.loads(part) if part else last
            for part, last in zip(said, self._heard, strict=True)
        ]
        return self._heard, not any(said)


@dataclass(frozen=True)
class _Coordinated:
    """What the coordinator knows of all ranks."""

    local: list[SavePlan]
    final: list[SavePlan]
    metadata: Metadata


@dataclass(frozen=True)
class PlannedSave:
    """One save as all ranks have agreed on it.

    Attributes:
        plan: What this rank writes; for the planner's ``finish_plan``.
        metadata: What the checkpoint will hold; ``None`` but on the coordinator.
        word: What the coordinator has said to all ranks.
    """

    plan: SavePlan
    metadata: Metadata | None
    word: Any


def plan_save(
    meeting: Meeting,
    state_dict: dict[str, Any],
    planner: SavePlanner,
    writer: FileSystemWriterAsync,
    *,
    tag: Any,
    check: Callable[[], None] = lambda: None,
    word: Callable[[], Any],
    prepare: Callable[[SavePlan], SavePlan] = lambda plan: plan,
) -> PlannedSave:
    """Agree on who writes what; all ranks call it.

    A rank whose structure is that of its last save sends none; if that holds for all, nobody plans.

    Args:
        meeting: The ranks.
        state_dict: This rank's state; values may be ``Stateful``.
        planner: Made for this save; torch's own, or a user's.
        writer: Keeps what was planned before, and says where this rank writes.
        tag: What must be the same on all ranks, as the number of the checkpoint.
        check: Called on each rank before anything is planned; what it raises is raised on all.
        word: Called on the coordinator when all have come; gives what is to be told to all, or
            raises what is then raised on all.
        prepare: This rank's own preparations, with its plan.

    Raises:
        MismatchError: The tags differ.
        CheckpointingException: Planning failed on some rank; the same on every rank.
        PeerLostError: Some rank did not come in time.
    """
    cache = writer.plans
    local: SavePlan | None = None
    pending: _Coordinated | None = None

    def say() -> bytes:
        nonlocal local
        # First of all, since a state may be made by all ranks together.
        state = _plain(state_dict)
        check()
        planner.set_up_planner(
            state_dict=state,
            storage_meta=writer.storage_meta(),
            is_coordinator=meeting.is_coordinator,
        )
        local = prepare(planner.create_local_plan())
        if not local.usable:
            raise CheckpointingException(
                "the planner keeps plans itself: make it with enable_plan_caching=False; they are "
                "kept here"
            )
        head = json.dumps(tag).encode() + b"\n"
        return head if local == cache.local else head + pickle.dumps(local)

    def answer(said: list[bytes]) -> list[bytes]:
        nonlocal pending
        cache.bytes_gathered = sum(map(len, said))
        tags, plans = zip(*(text.split(b"\n", 1) for text in said), strict=True)
        require_same(tags, meeting.global_ranks)
        before = cache.coordinated
        if before is not None and not any(plans):
            pending = before
            return [pickle.dumps((word(), None))]
        pending = _coordinate(before, plans, planner, writer)
        cache.global_plans_made += 1
        told = word()
        # Who sent a plan may have forgotten what came of it, even if it is what it was.
        known = [None] * len(plans) if before is None else before.final
        return [
            pickle.dumps((told, None if final == last and not plan else final))
            for final, last, plan in zip(pending.final, known, plans, strict=True)
        ]

    with cache.kept_if_all_is_well():
        told, final = pickle.loads(meeting.hold("plan the save", say, answer))
    cache.local, cache.coordinated = local, pending
    cache.final = cache.final if final is None else final
    assert cache.final is not None, "who is told that nothing changed has a plan"
    return PlannedSave(cache.final, None if pending is None else pending.metadata, told)


def _plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state with each ``Stateful`` object replaced by its own state."""
    return {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}


def _coordinate(
    before: _Coordinated | None,
    plans: tuple[bytes, ...],
    planner: SavePlanner,
    writer: FileSystemWriterAsync,
) -> _Coordinated:
    if before is None:
        _require_all(plans)
    local = [
        pickle.loads(plan) if plan else before.local[rank]  # type: ignore[union-attr]
        for rank, plan in enumerate(plans)
    ]
    final, metadata = planner.create_global_plan(local)
    return _Coordinated(local, writer.prepare_global_plan(final), metadata)


def _require_all(said: Sequence[bytes]) -> None:
    if not all(said):
        raise MismatchError(
            "some ranks count on what the coordinator has forgotten: save again, and everything "
            "is planned anew"
        )


def require_same(tags: Sequence[bytes], ranks: Sequence[int]) -> None:
    """Raises MismatchError if the ranks do not speak of the same checkpoint."""
    if len(set(tags)) > 1:
        at = ", ".join(f"rank {r}: {t.decode()}" for r, t in zip(ranks, tags, strict=True))
        raise MismatchError(
            f"the ranks do not speak of the same checkpoint ({at}). All ranks must make the same "
            f"calls in the same order. What was saved before stands"
        )
