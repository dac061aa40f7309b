"""Live state of a training loop, which is kept by the ranks that are left when one is lost.

It is whole at the end of a step, until an optimizer changes parameters. Parameters and the states
of optimizers are not copied: hooks of the optimizers, and the version counters of the tensors, tell
whether they still are those of that step. What else a step changes is copied at the end of each,
and put back: buffers, learning rates, random number generators, schedules, places in the data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.optim.swa_utils import AveragedModel

from localckpt.checkpointer.parts import EPOCHS, RNG, ModulePart, RandomPart
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.failure_texts import ranks_named, said_by
from localckpt.managers.capture import tensors_of
from localckpt.options import PrivateRule
from localckpt.state_dict.replicated import Replicated, without_marker

# What a loop over epochs knows of its place that is the same on all ranks.
_PLACE = ("epoch", "batches", "is_over", "saved_at", "facts")


class LiveReport(NamedTuple):
    """Report of one rank on its live state.

    ``keeps`` is ``None`` on a rank that did not rejoin. ``step`` is the one at whose end the state
    is whole, -1 for none, and ``changed`` why. ``private`` names what no other rank has. ``was`` is
    the rank then, the number of ranks, and the job's run; ``place`` that in the loop over epochs.
    ``is_sharded`` if tensors are DTensors, and ``is_anew`` if the parts to go on with are others.
    """

    keeps: bool | None = None
    step: int = -1
    changed: str = ""
    private: str = ""
    was: Sequence[Any] = (-1, -1, "")
    place: Mapping[str, Any] | None = None
    is_sharded: bool = False
    is_anew: bool = False


class Kept(NamedTuple):
    """Step whose live state is kept, -1 for none, and ``why``.

    Ranks ``lacking`` it get it from the ``holders``, ranks now and then: those ``without`` it, and
    those whose parts are made anew.
    """

    step: int
    holders: Sequence[tuple[int, int]] = ()
    lacking: Collection[int] = ()
    without: Collection[int] = ()
    place: Any = None
    why: str = ""


class LiveState:
    """Live state of one rank; ``step`` is the one at whose end it was whole, -1 for none."""

    def __init__(self) -> None:
        self._watched = WeakSet[torch.optim.Optimizer]()
        self._hooks: list[Any] = []
        self.lose("no step was made since")

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise CheckpointingException(
                    f"whole_step() was given a {type(optimizer).__name__}: give it the optimizers "
                    f"of torch that change the parameters"
                )
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                self._hooks.append(optimizer.register_step_pre_hook(self._begin_change))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.lose("it is closed")

    def require_watched(self, parts: Mapping[str, Any]) -> None:
        """Refuse to keep a state unless all that changes its parameters is watched."""
        plain = {key: without_marker(part) for key, part in parts.items()}
        optimizers = {k: p for k, p in plain.items() if isinstance(p, torch.optim.Optimizer)}
        unwatched = [key for key, part in optimizers.items() if part not in self._watched]
        if unwatched or not self._hooks:
            named = ", ".join(map(repr, unwatched)) or "the state, which names no optimizer"
            raise CheckpointingException(
                f"keep='live' cannot know whether the state is whole: give "
                f"whole_step() the optimizer of {named}. Nothing was changed"
            )

    # While training.

    def _begin_change(self, *_: Any) -> None:
        if self.step >= 0:
            self.lose(f"an optimizer had begun to change what step {self.step} ended with")

    def lose(self, why: str) -> None:
        """Note that the state is no more that of the end of a step."""
        self.step, self._why = -1, why
        self._parts: dict[str, Any] = {}
        self._seen: dict[str, list[tuple[torch.Tensor, float]]] = {}
        self._copied: dict[str, Any] = {}

    def note(self, step: int, parts: Mapping[str, Any], was: Sequence[Any]) -> None:
        """Note that a step has ended, if optimizers are watched."""
        if not self._hooks:
            return
        self.lose("no step was made before")
        self._parts = plain = {key: without_marker(part) for key, part in parts.items()}
        self._seen = {k: [(t, _version(t)) for t in _tensors(p)] for k, p in plain.items()}
        self._copied = {key: _copy_of(part) for key, part in plain.items()}
        self.step, self._was = step, was

    # When a rank is lost.

    def report(
        self,
        parts: Mapping[str, Any],
        private: Mapping[str, PrivateRule],
        world_size: int,
        *,
        keeps: bool | None,
    ) -> LiveReport:
        alone = why_private(parts, private, world_size)
        is_sharded = any(_is_sharded(without_marker(part)) for part in parts.values())
        report = LiveReport(keeps, private=alone, is_sharded=is_sharded)
        if self.step < 0 or not keeps:
            return report._replace(changed=self._why)
        if parts.keys() != self._parts.keys():
            return report._replace(changed="rejoin() was given parts of other names")
        both = ((without_marker(part), self._parts[key]) for key, part in parts.items())
        is_anew = any(now is not was for of in both for now, was in zip_longest(*map(_tensors, of)))
        for part in self._parts.values() if is_anew else ():
            _reshard(part)
        if changed := self._why_changed():
            return report._replace(changed=changed)
        loop = self._copied[EPOCHS]
        place = {name: loop[name] for name in _PLACE}
        dealt = place["facts"].get("dealt")
        is_common = dealt and dealt[0] and not (loop["generators"] or loop.get("loader"))
        if not alone and place["epoch"] is not None and not is_common:
            alone = "the order in which batches() takes the data is each rank's own"
        report = report._replace(private=alone, is_anew=is_anew)
        return report._replace(step=self.step, was=self._was, place=place)

    def _why_changed(self) -> str:
        stepped = {id(p) for optimizer in self._watched for p in tensors_of(optimizer)}
        for key, seen in self._seen.items():
            part = self._parts[key]
            if [*map(id, _tensors(part))] != [id(tensor) for tensor, _ in seen]:
                return f"{key!r} has other tensors than at the end of step {self.step}"
            if any(_version(tensor) != was for tensor, was in seen):
                return (
                    f"tensors of {key!r} were changed since the end of step {self.step}, which "
                    f"DistributedDataParallel(module) does without init_sync=False"
                )
            if not isinstance(part, ModulePart):
                continue
            if any(name.endswith("_extra_state") for name in part.state_dict()):
                return f"{key!r} has extra states, which its forward may have changed"
            shapes = [[x.shape for x in of] for of in (part.module.buffers(), self._copied[key])]
            if shapes[0] != shapes[1]:
                return f"buffers of {key!r} have other shapes than at the end of step {self.step}"
            trained = {id(p) for p in part.module.parameters() if p.requires_grad}
            if trained - stepped and not isinstance(part.module, AveragedModel):
                return (
                    f"{key!r} has parameters that require gradients, and that no optimizer given "
                    f"to whole_step() has"
                )
        return ""

    def put_back(
        self, parts: Mapping[str, Any], now: Sequence[int], dropped: Collection[str]
    ) -> None:
        """Put back what was copied; what other ranks have otherwise only at the rank of before.

        What the holders' images have is put back into the parts that were trained.
        """
        is_moved = [*self._was[:2]] != [*now]
        apart = {EPOCHS, RNG, *dropped}
        for key, given in parts.items():
            copied, part = deepcopy(self._copied[key]), given if key in apart else self._parts[key]
            if key == EPOCHS and is_moved:
                copied = {name: copied[name] for name in _PLACE}
            if not (is_moved and key in dropped):
                _put_back(without_marker(part), copied)

    def parts(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the parts that were trained."""
        return {key: self._parts[key] for key in keys}


def dropped_in(parts: Mapping[str, Any], private: Mapping[str, PrivateRule]) -> set[str]:
    """Return the parts that a new rank has as they are made: no modules, and no optimizers."""
    plain = {key: without_marker(part) for key, part in parts.items() if private.get(key) == "drop"}
    return {k for k, p in plain.items() if not isinstance(p, ModulePart | torch.optim.Optimizer)}


def why_private(
    parts: Mapping[str, Any], private: Mapping[str, PrivateRule], world_size: int
) -> str:
    """Return why no other rank has what one rank has of some part; empty if another has it all."""
    for key in sorted(parts.keys() - {EPOCHS, RNG} - dropped_in(parts, private)):
        part, value = parts[key], without_marker(parts[key])
        if getattr(value, "is_fsdp1", False):
            return f"each rank has a part of its own of the tensors of {key!r}"
        if _is_sharded(value):
            # They say themselves who else has them.
            continue
        if not isinstance(part, Replicated):
            return (
                f"nothing says that {key!r} is equal on all ranks: mark it by replicated(), or "
                f"give private={{{key!r}: 'drop'}} to have it as it is made on a new rank"
            )
        if list(part.ranks) != list(range(world_size)):
            return (
                f"{key!r} is marked as equal on {ranks_named(part.ranks)}, and there are "
                f"{world_size} ranks now: give rejoin() the parts marked by replicated() anew"
            )
    return ""


def judge_live(reports: Sequence[LiveReport]) -> Kept | None:
    """Judge whether the live state of some step is kept; ``None`` if no rank asks for that."""
    asked = {report.keeps: rank for rank, report in enumerate(reports)}
    if True not in asked:
        return None
    if False in asked:
        raise MismatchError(
            f"rank {asked[True]} keeps its live state, and rank {asked[False]} goes back to a "
            f"checkpoint: give rejoin() the same keep= on all ranks. Nothing was changed"
        )
    step = max(report.step for report in reports)
    first = next(report for report in reports if report.step == step)
    # A rank that was away while others went back may have another state of that step.
    whole = [n for n, r in enumerate(reports) if (r.step, r.was[2]) == (step, first.was[2])]
    without = [n for n in range(len(reports)) if n not in whole]
    lacking = [n for n, report in enumerate(reports) if n in without or report.is_anew]
    # If all ranks are there, each with all that it had, nothing is to be had from others.
    is_same = all([*r.was[:2]] == [n, len(reports)] for n, r in enumerate(reports))
    alone = {rank: report.private for rank, report in enumerate(reports) if report.private}
    is_sharded = any(report.is_sharded for report in reports)
    if is_sharded and not (lacking or is_same):
        alone = dict.fromkeys(whole, "its tensors are sharded over other ranks")
    if alone and (lacking or not is_same):
        return Kept(-1, why=said_by(alone))
    if step < 0:
        changed = {n: report.changed for n, report in enumerate(reports) if report.keeps}
        return Kept(-1, why=f"no rank has a whole state: {said_by(changed)}")
    holders = [(n, reports[n].was[0]) for n in (whole if is_sharded else whole[:1])]
    return Kept(step, holders, lacking, without, first.place)


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, ModulePart):
        yield from part.module.parameters()
    elif isinstance(part, torch.optim.Optimizer):
        yield from tensors_of(part)


def _is_sharded(part: Any) -> bool:
    """Return whether all parameters are DTensors: a plain one may be each rank's own."""
    if isinstance(part, torch.optim.Optimizer):
        parameters = [p for group in part.param_groups for p in group["params"]]
    else:
        parameters = [*_tensors(part)]
    return bool(parameters) and all(hasattr(p, "placements") for p in parameters)


def _reshard(part: Any) -> None:
    """Have a module of FSDP2, which may have been cut off in a step, hold its own shards again."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in part.module.modules() if isinstance(part, ModulePart) else ():
        if isinstance(module, fsdp):
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def _version(tensor: torch.Tensor) -> float:
    # One that is not counted is never the same.
    return math.nan if tensor.is_inference() else tensor._version


def _copy_of(part: Any) -> Any:
    if isinstance(part, ModulePart):
        return [buffer.detach().clone() for buffer in part.module.buffers()]
    if isinstance(part, torch.optim.Optimizer):
        return [deepcopy({**group, "params": None}) for group in part.param_groups]
    state = part.state_dict()
    # It makes a copy by itself.
    return state if isinstance(part, RandomPart) else deepcopy(state)


@torch.no_grad()
def _put_back(part: Any, copied: Any) -> None:
    if isinstance(part, ModulePart):
        for buffer, was in zip(part.module.buffers(), copied, strict=True):
            buffer.copy_(was)
    elif isinstance(part, torch.optim.Optimizer):
        for group, was in zip(part.param_groups, copied, strict=True):
            for name, value in was.items():
                if isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                elif name != "params":
                    group[name] = value
    else:
        part.load_state_dict(copied)
