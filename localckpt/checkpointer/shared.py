"""The state of a training loop on shared storage, in torch.distributed.checkpoint's form.

Modules and optimizers have the names that they have on any number of ranks, so another number can
load them, and any program that uses torch.distributed.checkpoint. Values that are no tensors, and
small buffers, belong to a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, SupportsFloat

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from localckpt.checkpointer.fit import VALUES, judge_fits, why_groups_differ, why_other_class
from localckpt.checkpointer.optimizer_names import NamedOptimizer, Path
from localckpt.checkpointer.parts import OURS, RNG, ModulePart, OptimizerPart, is_odd, kind_of
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
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.global_tier.load import LoadOptions
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.global_tier.metadata import set_element
from localckpt.ids import Generation, ShardIdentity
from localckpt.options import PrivateRule
from localckpt.ranks.ranks import Ranks
from localckpt.state_dict.basic import unwrapped, wrapped
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.replicated import without_marker
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.stateful import Freedom
from localckpt.state_dict.targets import TargetRules
from localckpt.state_dict.value_digests import digest_of

__all__ = ["OnResize", "SharedState"]

logger = logging.getLogger(__name__)

OnResize = Literal["error", "drop"]

# Each rank keeps small buffers for itself: they may differ, as the statistics of BatchNorm do.
_SMALL_NBYTES = 64 << 10


class SharedState:
    """The parts of a state, saved to and loaded from shared storage.

    Args:
        parts: Parts by name.
        manager: Manager of the checkpoints there.
        ranks: The ranks of the job.
        safe_globals: Classes and functions that a checkpoint may name, beyond the defaults.
        on_resize: What becomes of values that differ between ranks when another number of ranks
            loads them: an ``"error"``, or they are ``"drop"``-ped, and stay as they are.
        private: Rules by part. Each rank has its own module or optimizer where there is one.

    Raises:
        CheckpointingException: The parameters of an optimizer are in none of the modules, or a
            part or a rule cannot be on shared storage.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        manager: GlobalCheckpointManager,
        ranks: Ranks,
        safe_globals: tuple[Any, ...],
        on_resize: OnResize,
        private: Mapping[str, PrivateRule],
    ) -> None:
        # Checkpoints there hold no table of ranks: what is equal is found by its name.
        self._parts = {key: without_marker(part) for key, part in parts.items()}
        self._manager = manager
        self._ranks = ranks
        self._allowed = SafeGlobals(safe_globals)
        self._on_resize = on_resize
        self._modules = {k: p for k, p in self._parts.items() if isinstance(p, ModulePart)}
        self._optimizers = {
            key: NamedOptimizer(key, part, self._modules)
            for key, part in self._parts.items()
            if isinstance(part, OptimizerPart)
        }
        self._named: dict[str, ModulePart | NamedOptimizer] = self._modules | self._optimizers
        self._others = {k: p for k, p in self._parts.items() if k not in self._named}
        self._private = {key: rule for key, rule in private.items() if key in self._named}
        if functions := [key for key, rule in self._private.items() if callable(rule)]:
            raise CheckpointingException(
                f"private= has a function for {', '.join(functions)}: on shared storage modules "
                f"and optimizers that each rank has of its own take 'keep' or 'drop'"
            )

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
            partial(self._state, step, of_ranks),
            step,
            is_async=True,
            metrics=metrics,
            is_compared=is_compared,
        )

    def _state(self, step: int, of_ranks: set[str]) -> dict[str, Any]:
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
                OF_RANK: {str(rank): self._packed({PARTS: others, BUFFERS: buffers}, step)},
            }
        }
        for key, part_state in named.items():
            plain = self._plain_tree if key in self._optimizers else self._plain_value
            values = {name: plain(v, step, f"{key}.{name}") for name, v in part_state.items()}
            set_element(state, self._place(key, rank), values)
        return state

    def _place(self, key: str, rank: int) -> Path:
        """Return the place of a module or an optimizer of one rank in the state."""
        return (OURS, TENSORS, str(rank), key) if key in self._private else (key,)

    def _plain_tree(self, value: Any, step: int, name: str) -> Any:
        """Apply :meth:`_plain_value` to the values in dicts and lists."""
        # torch.distributed.checkpoint leaves empty dicts out.
        if isinstance(value, Mapping) and value:
            return {k: self._plain_tree(v, step, f"{name}.{k}") for k, v in value.items()}
        if isinstance(value, list):
            return [self._plain_tree(v, step, f"{name}.{n}") for n, v in enumerate(value)]
        return self._plain_value(value, step, name)

    def _plain_value(self, value: Any, step: int, name: str) -> Any:
        """Replace what torch.distributed.checkpoint would not return as it is by its image.

        Raises:
            CheckpointingException: It is a part of a global tensor, and has no such image.
        """
        if isinstance(value, DTensor) and is_odd(value._local_tensor):
            raise CheckpointingException(
                f"{name} is a DTensor over {type(value._local_tensor).__name__}, which cannot be "
                f"kept on shared storage: leave out shared=, or save what full_tensor() gives as a "
                f"pair of functions"
            )
        if is_odd(value) or isinstance(value, Mapping | list):
            return IMAGE, self._packed(value, step)
        return value

    def _packed(self, state: Any, step: int) -> bytes:
        """Return an object as one value of bytes, which can be loaded without knowing its shape."""
        identity = ShardIdentity("", Generation(0, 0), step, 0, 1)
        return bytes(pack(wrapped(state), identity, ImagePlanner(self._allowed)).view)

    def _unpacked(self, image: bytes) -> Any:
        source = MemorySource(memoryview(bytearray(image)))
        return unwrapped(unpack(source, allowed=self._allowed))

    # Loading.

    def load(self, step: int, load: PartsToLoad) -> None:
        """Fill the parts with the state of a step; all ranks call it.

        Raises:
            MismatchError: The state is not as it was saved, or values differ between the ranks that
                saved them, and another number of ranks is here. The state is as it was.
        """
        with self._manager.opened(step) as checkpoint:
            saved: list[SavedState] = []

            def compare() -> dict[str, Any]:
                saved.append(SavedState(checkpoint, self._unpacked))
                return self._compare(saved[0], load)

            self._ranks.decide(f"compare the parts with step {step}", compare, judge_fits)
            keys = load.parts.keys() & saved[0].kinds.keys()
            others = self._values_for_this_rank(saved[0], keys)
            self._fill(saved[0], keys, others, load)

    def _compare(self, saved: SavedState, load: PartsToLoad) -> dict[str, Any]:
        """Find what does not fit, and change nothing; the argument of :func:`judge_fits`."""
        TargetRules(named=load.named).require_named(saved.kinds)
        wanted = {
            key: kind_of(without_marker(part))
            for key, part in load.parts.items()
            if key in saved.kinds or not load.lets_go(key)
        }
        given = {key: kind_of(part) for key, part in self._parts.items()}
        there = {k: v for k, v in saved.kinds.items() if k in wanted or not load.lets_go(k)}
        lines: list[str] = []
        values = saved.of_rank(self._rank_in(saved))
        for key in wanted.keys() & saved.kinds.keys():
            part = self._parts[key]
            kinds = saved.kinds[key], given[key]
            if isinstance(named := self._named.get(key), NamedOptimizer):
                groups = self._read_groups(saved, key)
                differ = why_groups_differ(key, groups, named.groups, kinds)
                lines += differ or why_other_class(key, *kinds, (), ())
            elif isinstance(named, ModulePart):
                lines += self._why_forms_differ(saved, key, named, load.converts)
            elif key not in values[PARTS]:
                if saved.world_size == self._manager.world_size:
                    lines.append(f"{key}: given, and this rank had none when it was saved")
            elif kinds[0] != kinds[1] or (kinds[0] == VALUES and not load.is_partial):
                keys = [list(state) for state in (values[PARTS][key], part.state_dict())]
                lines += why_other_class(key, *kinds, *keys)
        is_resized = saved.world_size != self._manager.world_size
        lost = [] if is_resized else [k for k in values[PARTS] if k in there and k not in given]
        return {"given": wanted, "saved": there, "lost": lost, "lines": lines}

    def _rank_in(self, saved: SavedState) -> int:
        """Return the number of the saved rank whose values this rank takes."""
        return self._manager.rank % saved.world_size

    def _read_groups(self, saved: SavedState, key: str) -> list[dict[str, Any]]:
        place = self._place(key, self._rank_in(saved))
        found = saved.read(place, lambda path: path[0] == "param_groups")
        groups: list[dict[str, Any]] = found.get("param_groups", [])
        return groups

    def _why_forms_differ(
        self, saved: SavedState, key: str, part: ModulePart, allow_dtype_change: bool
    ) -> list[str]:
        """Compare what the reader of shared storage does not: odd tensors, and own buffers."""
        rank = self._rank_in(saved)
        below = saved.below(self._place(key, rank))
        read = saved.of_rank(rank)[BUFFERS].get(key, {}) | saved.odd(self._place(key, rank))
        own, freedom = part.state_dict(), part.freedom
        lines = []
        for name, given in own.items():
            if name in read:
                forms = _form(read[name]), _form(given)
                kinds = _tensor_kind(read[name]), _tensor_kind(given)
            elif is_odd(given) and isinstance(
                saved_as := below.get((name,)), TensorStorageMetadata
            ):
                forms = f"a tensor of {saved_as.properties.dtype}", _form(given)
                kinds = (saved_as.properties.dtype, tuple(saved_as.size)), _tensor_kind(given)
            else:
                continue
            if forms[0] == forms[1] or freedom.allows(name, *kinds):
                continue
            converts = _is_convertible(read.get(name), given)
            if not (converts and allow_dtype_change):
                lines.append(
                    f"{key}.{name}: saved as {forms[0]}, given as {forms[1]}"
                    + ", which allow_dtype_change=True converts" * converts
                )
        return lines

    def _values_for_this_rank(self, saved: SavedState, keys: Collection[str]) -> dict[str, Any]:
        """Return what those of this rank's other parts get that are loaded; all ranks call it.

        Raises:
            MismatchError: Another number of ranks has saved it, values differ, and that is an
                error.
        """
        world_size, rank = self._manager.world_size, self._manager.rank
        if saved.world_size == world_size:
            return dict(saved.of_rank(rank)[PARTS])
        share = range(rank, saved.world_size, world_size)
        first_of = self._ranks.decide(
            "compare what the ranks have saved",
            lambda: [[n, _digests(saved.read_of_rank(n)[PARTS], keys)] for n in share],
            partial(_judge_values, saved.world_size, world_size, self._on_resize == "error"),
        )
        loaded = [key for key in self._others if key in keys]
        dropped = sorted(key for key in loaded if key != RNG and first_of.get(key) is None)
        if rank < saved.world_size:
            # A generator for two ranks would give both the same numbers.
            first_of[RNG] = rank
        if dropped:
            logger.warning(
                "saved by %d ranks and loaded by %d: %s differ between ranks, and stay as they are",
                *(saved.world_size, world_size, ", ".join(dropped)),
            )
        return {
            key: saved.of_rank(first)[PARTS][key]
            for key in loaded
            if (first := first_of.get(key)) is not None
        }

    def _fill(
        self,
        saved: SavedState,
        keys: Collection[str],
        others: Mapping[str, Any],
        load: PartsToLoad,
    ) -> None:
        """Fill the modules and the optimizers, and give every part what was loaded for it."""
        is_resized = saved.world_size != self._manager.world_size
        buffers = saved.of_rank(self._rank_in(saved))[BUFFERS]
        state: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        besides: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for key, part in self._named.items():
            if key not in keys or (is_resized and self._is_left(key, saved)):
                continue
            place = self._place(key, self._manager.rank)
            below = saved.below(place)
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
            set_element(state, place, targets[key])

        def let_go(name: str) -> bool:
            path = saved.path(name)
            if path[0] == OURS:
                return path[1] != TENSORS or is_resized or path[3] not in keys
            return path[0] not in keys or path[-1] in buffers.get(str(path[0]), {})

        saved.fill(state, LoadOptions(load.is_partial, load.converts, let_go, besides))
        for key, part in self._parts.items():
            if key not in keys:
                continue
            if key in targets:
                loaded = saved.value(targets[key])
                self._named[key].load_state_dict(loaded | buffers.get(key, {}))
            elif key in others:
                part.load_state_dict(others[key])

    def _is_left(self, key: str, saved: SavedState) -> bool:
        """Return whether another number of ranks leaves a part of this rank as it is."""
        rule = self._private.get(key)
        if rule is None or (rule == "keep" and self._manager.rank < saved.world_size):
            return False
        logger.warning(
            "saved by %d ranks and loaded by %d: %s stays as it is on rank %d, by private=",
            *(saved.world_size, self._manager.world_size, key, self._manager.rank),
        )
        return True


def _module_targets(
    own: Mapping[str, Any],
    freedom: Freedom,
    below: Mapping[Path, Any],
    buffers: Mapping[str, Any],
) -> dict[str, Any]:
    """Make a state to load a module into: its own values, or new ones where those are free.

    Args:
        own: State of the module.
        freedom: Values of the module that are free.
        below: Descriptions of the saved values.
        buffers: Those that have been read already.
    """
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


def _digests(parts: Mapping[str, Any], keys: Collection[str]) -> dict[str, str]:
    return {k: digest_of(state, str) for k, state in parts.items() if k in keys and k != RNG}


def _judge_values(
    saved_by: int, loaded_by: int, is_error: bool, told: Sequence[Sequence[Any]]
) -> dict[str, int | None]:
    """Find the values that are equal on all ranks that have saved them.

    Args:
        saved_by, loaded_by: Number of the ranks then and now.
        is_error: Whether values that differ are an error.
        told: Of each rank, pairs of the number of a saved rank and its digests by part.

    Returns:
        By part the number of a rank that has saved the value; ``None`` for those that differ.

    Raises:
        MismatchError: Values differ.
    """
    found: dict[str, dict[str, int]] = {}
    for number, digests in sorted(pair for pairs in told for pair in pairs):
        for key, digest in digests.items():
            found.setdefault(key, {}).setdefault(digest, number)
    differ = sorted(key for key, numbers in found.items() if len(numbers) > 1)
    if differ and is_error:
        raise MismatchError(
            f"the checkpoint on shared storage was saved by {saved_by} ranks, and this job has "
            f"{loaded_by}: {', '.join(differ)} differ between ranks. Resume with as many ranks, or "
            f"leave them as they are with on_resize='drop'. Nothing was changed"
        )
    return {
        key: None if len(numbers) > 1 else next(iter(numbers.values()))
        for key, numbers in found.items()
    }
