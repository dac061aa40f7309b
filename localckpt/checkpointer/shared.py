"""The state of a training loop on shared storage, in torch.distributed.checkpoint's form.

Modules and optimizers have the names that they have on any number of ranks, so another number can
load them, and any program that uses torch.distributed.checkpoint. Values that are no tensors, and
small buffers, belong to a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, SupportsFloat

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from localckpt.checkpointer.fit import (
    VALUES,
    judge_fits,
    names_of_groups,
    why_parts_are_others,
)
from localckpt.checkpointer.optimizer_names import NamedOptimizer, Path
from localckpt.checkpointer.parts import (
    OURS,
    ModulePart,
    OptimizerPart,
    described_part,
    is_odd,
    kind_of,
)
from localckpt.checkpointer.private import PrivateValues
from localckpt.checkpointer.selection import PartsToLoad
from localckpt.checkpointer.shared_saved import (
    BUFFERS,
    IMAGE,
    OF_RANK,
    PARTS,
    PLACED,
    TENSORS,
    WORLD_SIZE,
    SavedState,
)
from localckpt.errors import CheckpointingException
from localckpt.failure_texts import Mismatches
from localckpt.global_tier.load import FillOptions
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.global_tier.metadata import set_element
from localckpt.ids import Generation, ShardIdentity
from localckpt.managers.elastic_judge import ValueImages
from localckpt.options import PrivateRule
from localckpt.ranks.ranks import Ranks, shaped
from localckpt.state_dict.basic import unwrapped, wrapped
from localckpt.state_dict.containers import prefix_in
from localckpt.state_dict.names import ABOUT, KEYS, Names
from localckpt.state_dict.replicated import without_marker
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.stateful import Freedom
from localckpt.state_dict.targets import TargetRules

__all__ = ["SharedState"]

# Each rank keeps small buffers for itself: they may differ, as the statistics of BatchNorm do.
_SMALL_NBYTES = 64 << 10


class SharedState:
    """The parts of a state, saved to and loaded from shared storage.

    Each rank saves its own module or optimizer where there is a rule for it, or for some of it.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        manager: GlobalCheckpointManager,
        ranks: Ranks,
        safe_globals: tuple[Any, ...],
        private: Mapping[str, PrivateRule],
    ) -> None:
        # Checkpoints there hold no table of ranks: what is equal is found by its name.
        self._parts = {key: without_marker(part) for key, part in parts.items()}
        self._manager = manager
        self._ranks = ranks
        identity = ShardIdentity("", Generation(0, 0), 0, 0, 1)
        self._images = ValueImages(identity, SafeGlobals(safe_globals))
        self._modules = {k: p for k, p in self._parts.items() if isinstance(p, ModulePart)}
        self._optimizers = {
            key: NamedOptimizer(key, part, self._modules)
            for key, part in self._parts.items()
            if isinstance(part, OptimizerPart)
        }
        self._named: dict[str, ModulePart | NamedOptimizer] = self._modules | self._optimizers
        self._others = {k: p for k, p in self._parts.items() if k not in self._named}
        found = {key: prefix_in(key, self._named) for key in private}
        self._private = {p for key, p in found.items() if p and not self._is_own_buffer(p, key)}

    # Saving.

    def save(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Save the state of all ranks behind training; raises what the save before failed with."""
        of_ranks: set[str] = set()
        kept_equal = {
            f"{key}.{name}"
            for key, part in self._modules.items()
            if part.is_kept_equal
            for name in part.parameter_names().values()
        }
        of_optimizers = tuple(
            f"{key}.state." for key, part in self._optimizers.items() if part.is_kept_equal
        )

        def is_compared(name: str, value: Any) -> bool:
            # Small values tell as well whether DDP keeps all of them equal.
            is_large = isinstance(value, torch.Tensor) and value.nbytes > _SMALL_NBYTES
            is_equal = name in kept_equal or name.startswith(of_optimizers)
            return name not in of_ranks and not (is_large and is_equal)

        self._manager.save(
            partial(self._state, of_ranks),
            step,
            is_async=True,
            metrics=metrics,
            is_compared=is_compared,
        )

    def _state(self, of_ranks: set[str]) -> dict[str, Any]:
        """Return the state of this rank, and add the names of what each rank keeps for itself."""
        rank = self._manager.rank
        named = {key: part.state_dict() for key, part in self._named.items()}
        buffers = {
            key: _own_buffers(part, named[key])
            for key, part in self._modules.items()
            if key not in self._private
        }
        of_ranks.update(f"{key}.{name}" for key, names in buffers.items() for name in names)
        others = {key: part.state_dict() for key, part in self._others.items()}
        state: dict[str, Any] = {
            OURS: {
                WORLD_SIZE: self._manager.world_size,
                PARTS: {key: kind_of(part) for key, part in self._parts.items()},
                PLACED: {key: part.placed(named[key]) for key, part in self._optimizers.items()},
                OF_RANK: {str(rank): self._packed({PARTS: others, BUFFERS: buffers})},
            }
        }
        for key, part_state in named.items():
            plain = self._plain_tree if key in self._optimizers else self._plain_value
            values = {name: plain(v, f"{key}.{name}") for name, v in part_state.items()}
            place = (OURS, TENSORS, str(rank), key) if key in self._private else (key,)
            set_element(state, place, values)
        return state

    def _is_own_buffer(self, part: str, key: str) -> bool:
        """Return whether a key is that of a buffer which each rank keeps for itself anyway."""
        module = self._modules.get(part)
        return module is not None and any(
            key == f"{part}.{name}" and buffer.nbytes <= _SMALL_NBYTES
            for name, buffer in zip(module.buffer_names(), module.module.buffers(), strict=True)
        )

    def _plain_tree(self, value: Any, name: str) -> Any:
        """Apply :meth:`_plain_value` to the values in dicts and lists."""
        # torch.distributed.checkpoint leaves empty dicts out, and makes text of keys.
        if isinstance(value, Mapping) and value:
            if others := [key for key in value if not isinstance(key, str)]:
                raise CheckpointingException(
                    f"{name} has the key {others[0]!r}, which is no text: it cannot be kept on "
                    f"shared storage. Leave out shared=, or save the state of "
                    f"{name.partition('.')[0]!r} as a pair of functions"
                )
            return {k: self._plain_tree(v, f"{name}.{k}") for k, v in value.items()}
        if isinstance(value, list):
            return [self._plain_tree(v, f"{name}.{n}") for n, v in enumerate(value)]
        return self._plain_value(value, name)

    def _plain_value(self, value: Any, name: str) -> Any:
        """Replace what torch.distributed.checkpoint would not return as it is by its image."""
        if isinstance(value, DTensor) and is_odd(value._local_tensor):
            raise CheckpointingException(
                f"{name} is a DTensor over {type(value._local_tensor).__name__}, which cannot be "
                f"kept on shared storage: leave out shared=, or save what full_tensor() gives as a "
                f"pair of functions"
            )
        if is_odd(value) or isinstance(value, Mapping | list):
            return IMAGE, self._packed(value)
        return value

    def _packed(self, state: Any) -> bytes:
        """Return an object as one value of bytes, which can be loaded without knowing its shape."""
        return self._images.pack(wrapped(state))

    def _unpacked(self, image: bytes) -> Any:
        return unwrapped(self._images.unpack(image))

    # Loading.

    def load(self, step: int, load: PartsToLoad) -> None:
        """Fill the parts with the state of a step; all ranks call it.

        After a MismatchError the state is as it was.
        """
        with self._manager.opened(step) as checkpoint:
            loads: list[tuple[SavedState, PrivateValues]] = []

            def compare() -> dict[str, Any]:
                manager = self._manager
                saved = SavedState(checkpoint, self._unpacked, manager.rank, manager.world_size)
                keys = {k for k in saved.kinds if k in load.parts or not load.lets_go(k)}
                private = PrivateValues(saved, load, keys, self._ranks, self._images)
                loads.append((saved, private))
                fits = self._compare(saved, load)
                return {**fits, "private": private.described() if saved.is_resized else []}

            def judge(told_by: Sequence[Mapping[str, Any]]) -> Any:
                found, verdict = Mismatches(), None
                with found.noted():
                    judge_fits(told_by)
                saved, private = loads[0]
                if saved.is_resized:
                    about = f"step {step} was saved by {saved.world_size} ranks"
                    with found.noted():
                        verdict = private.judge(about, [told["private"] for told in told_by])
                found.raise_all()
                return verdict

            what = f"compare the parts with step {step}"
            verdict = self._ranks.decide(what, compare, judge, read=_as_verdict)
            saved, private = loads[0]
            if verdict is None:
                states = saved.own[BUFFERS] | saved.own[PARTS]
            else:
                named = self._named | self._others
                states = private.states(verdict, lambda key: named[key].state_dict())
            self._fill(saved, states, load)

    def _compare(self, saved: SavedState, load: PartsToLoad) -> dict[str, Any]:
        """Find what does not fit, and change nothing; the argument of :func:`judge_fits`."""
        TargetRules(named=load.named).require_named(saved.kinds)
        given = {key: kind_of(part) for key, part in self._parts.items()}
        wanted = {k: given[k] for k in load.parts if k in saved.kinds or not load.lets_go(k)}
        there = {k: v for k, v in saved.kinds.items() if k in wanted or not load.lets_go(k)}
        values = saved.own[PARTS]
        lines_of: dict[str, list[str]] = {}
        sides: tuple[Names, Names] = {OURS: {ABOUT: {}}}, {OURS: {ABOUT: {}}}
        for key in sorted(wanted.keys() & saved.kinds.keys()):
            part, kinds = self._parts[key], (saved.kinds[key], given[key])
            below: Sequence[tuple[Names | None, str | None]] = [(None, None)] * 2
            if isinstance(named := self._named.get(key), NamedOptimizer):
                below = [names_of_groups(groups) for groups in (saved.groups(key), named.groups)]
            elif isinstance(named, ModulePart):
                lines_of[key] = _why_forms_differ(
                    saved, key, named, load.selection.allow_dtype_change
                )
            elif key not in values:
                if not saved.is_resized:
                    lines_of[key] = [f"{key}: given, and this rank had none when it was saved"]
            elif kinds[0] != kinds[1] or kinds[0] == VALUES:
                states = values[key], part.state_dict()
                below = [({KEYS: dict.fromkeys(state)}, None) for state in states]
            for side, kind, (names, order) in zip(sides, kinds, below, strict=True):
                side[key], side[OURS][ABOUT][key] = names, described_part(kind, order)
        of_parts = lines_of | why_parts_are_others(*sides, is_partial=load.selection.partial)
        # Where the groups of an optimizer differ, there is nothing to fill its states into.
        sound = {k for k in self._named if k in wanted and k in saved.kinds and not of_parts.get(k)}
        sound |= {k for k in self._modules if k in wanted and k in saved.kinds}
        state, _, options = self._targets(saved, sound, load)
        lines, lacking = saved.compare(state, options)
        for line in lines:
            of_parts.setdefault(str(prefix_in(line.partition(" ")[0], sound)), []).append(line)
        lost = [] if saved.is_resized else [k for k in values if k in there and k not in given]
        return {
            "given": wanted,
            "saved": there,
            "lost": lost,
            "lacking": lacking,
            # In turn, since not all may be shown.
            "lines": [line for turn in zip_longest(*of_parts.values()) for line in turn if line],
        }

    def _targets(
        self, saved: SavedState, keys: Collection[str], load: PartsToLoad
    ) -> tuple[dict[str, Any], dict[str, Any], FillOptions]:
        """Make the state that modules and optimizers are filled by.

        Returns the state, what it has by the name of a part, and the options of the load.
        """
        buffers = saved.own[BUFFERS]
        state: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        besides: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for key, part in self._named.items():
            if key not in keys:
                continue
            below = saved.below(key)
            if isinstance(part, NamedOptimizer):
                targets[key] = part.targets(below, saved.placed(key))
            else:
                own, own_buffers = part.state_dict(), buffers.get(key, {})
                targets[key] = _module_targets(own, part.freedom, below, own_buffers)
                besides |= {
                    f"{key}.{name}": (own[name], value)
                    for name, value in own_buffers.items()
                    if name in own and own[name].shape == value.shape
                }
            set_element(state, saved.place(key), targets[key])

        def let_go(name: str) -> bool:
            path = saved.path(name)
            if path[0] == OURS:
                is_of_rank = path[1] == TENSORS and path[2] == str(saved.rank)
                return not is_of_rank or path[3] not in keys
            return path[0] not in keys or path[-1] in buffers.get(str(path[0]), {})

        is_partial, converts = load.selection.partial, load.selection.allow_dtype_change
        return state, targets, FillOptions(is_partial, converts, let_go, besides)

    def _fill(self, saved: SavedState, states: Mapping[str, Any], load: PartsToLoad) -> None:
        """Fill the modules and the optimizers, and give every part what was loaded for it."""
        keys = load.parts.keys() & saved.kinds.keys()
        filled = {key for key in keys if not (saved.is_resized and saved.is_of_ranks(key))}
        state, targets, options = self._targets(saved, filled, load)
        saved.fill(state, options)
        for key, part in self._parts.items():
            if key in targets:
                loaded = saved.value(targets[key]) | states.get(key, {})
                self._named[key].load_state_dict(loaded)
            elif key in keys and key in states:
                self._named.get(key, part).load_state_dict(states[key])


def _as_verdict(verdict: Any) -> Any:
    return verdict if verdict is None else shaped({"equal": dict, "unequal": [str]})(verdict)


def _why_forms_differ(
    saved: SavedState, key: str, part: ModulePart, allow_dtype_change: bool
) -> list[str]:
    """Compare what the reader of shared storage does not: odd tensors, and own buffers."""
    read, below = saved.own[BUFFERS].get(key, {}) | saved.odd(key), saved.below(key)
    freedom, lines = part.freedom, []
    for name, given in part.state_dict().items():
        described = below.get((name,))
        if name in read:
            was, kind = _form(read[name]), _tensor_kind(read[name])
        elif is_odd(given) and isinstance(described, TensorStorageMetadata):
            kind = described.properties.dtype, tuple(described.size)
            was = f"a tensor of {described.properties.dtype}"
        else:
            continue
        now = _form(given)
        if was == now or freedom.allows(name, kind, _tensor_kind(given)):
            continue
        converts = _is_convertible(read.get(name), given)
        if not (converts and allow_dtype_change):
            advice = ", which allow_dtype_change=True converts" * converts
            lines.append(f"{key}.{name}: saved as {was}, given as {now}{advice}")
    return lines


def _module_targets(
    own: Mapping[str, Any],
    freedom: Freedom,
    below: Mapping[Path, Any],
    buffers: Mapping[str, Any],
) -> dict[str, Any]:
    """Make a state to load a module into: its own values, or new ones where those are free."""
    targets: dict[str, Any] = {}
    for name in [*own, *(str(path[0]) for path in below if path[0] not in own)]:
        described, given = below.get((name,)), own.get(name)
        kind, saved = _tensor_kind(given), None
        if isinstance(described, TensorStorageMetadata):
            saved = described.properties.dtype, tuple(described.size)
        if name in own and name in buffers:
            continue
        may_be_other = freedom.allows(name, saved, kind)
        if described is None:
            if not may_be_other:
                # The reader refuses it, with all else that does not fit.
                targets[name] = given
        elif name not in own:
            if freedom.covers(name):
                targets[name] = b"" if saved is None else torch.empty(saved[1], dtype=saved[0])
        elif saved is None:
            targets[name] = b""
        elif (saved == kind and not is_odd(given)) or not may_be_other:
            targets[name] = given
        else:
            targets[name] = torch.empty(saved[1], dtype=saved[0])
    return targets


def _own_buffers(part: ModulePart, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers that each rank keeps for itself."""
    return {
        name: value
        for name in part.buffer_names()
        if type(value := state.get(name)) is torch.Tensor
        and not is_odd(value)
        and value.nbytes <= _SMALL_NBYTES
    }


def _tensor_kind(value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _is_convertible(saved: Any, given: Any) -> bool:
    """Return whether two values are plain tensors that differ in nothing but their dtype."""
    are_plain = all(isinstance(v, torch.Tensor) and not is_odd(v) for v in (saved, given))
    return are_plain and saved.shape == given.shape


def _form(value: Any) -> str:
    """Describe what must be alike in a tensor that was saved and one that is given."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = "tensor" if type(value) in (torch.Tensor, torch.nn.Parameter) else type(value).__name__
    layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
    return f"a {layout}{kind} of {value.dtype} {list(value.shape)}"
