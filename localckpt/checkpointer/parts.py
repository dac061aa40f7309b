"""State of a training loop: parts that give values to a save, and take them from a load.

A part has ``state_dict`` and ``load_state_dict``, as torch's own classes do. Tensors that a part
gives are filled in place by a load; ``load_state_dict`` then takes what cannot be filled.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from localckpt.errors import CheckpointingException, MismatchError
from localckpt.memory.tensor_bytes import copy_values, is_number
from localckpt.options import PrivateRule
from localckpt.state_dict.basic import is_stateful
from localckpt.state_dict.names import ABOUT, CLASS, MODULE, ORDER, OURS, Names
from localckpt.state_dict.replica_digests import find_not_finite
from localckpt.state_dict.replicated import Replicated, without_marker
from localckpt.state_dict.stateful import (
    Freedom,
    freedom_of,
    is_same_tensor,
    load_module,
    plain_names,
)

logger = logging.getLogger(__name__)

EPOCHS = "epoch_loop"
"""Key of the place in the loop over epochs."""
RNG = "rng"
"""Key of the states of the random number generators."""
_SHOWN = 10

OnResize = Literal["error", "drop"]
Check = Callable[[Mapping[str, torch.Tensor]], str | None]


class TrainingState:
    """State of one rank's training loop; ``parts`` and ``rules`` stay the same dicts."""

    def __init__(
        self,
        given: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        epochs: Any,
        *,
        rng: bool,
        private: Mapping[str, PrivateRule],
        drop: bool,
    ) -> None:
        self.given, self._epochs, self._rng = given, epochs, rng
        self.private, self._drop = dict(private), drop
        self.parts: dict[str, Any] = {}
        self.rules: dict[str, PrivateRule] = {}
        self._set({} if callable(given) else parts_of(given, epochs, rng=rng))

    def give(self, given: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        """Take other parts in place of those that there are."""
        parts = {} if callable(given) else parts_of(given, self._epochs, rng=self._rng)
        self.given = given
        self._set(parts)

    def make(self) -> None:
        if callable(self.given):
            self._set(parts_of(self.given(), self._epochs, rng=self._rng))

    def _set(self, parts: Mapping[str, Any]) -> None:
        # In place, since managers read the rules, and the check of captured states the parts.
        self.parts.clear()
        self.parts.update(parts)
        self.rules.clear()
        self.rules.update(self._rules_of(parts))

    def _rules_of(self, parts: Mapping[str, Any]) -> dict[str, PrivateRule]:
        unmarked = {key: without_marker(part) for key, part in parts.items()}
        rules: dict[str, PrivateRule] = {}
        if self._drop:
            whole = (ModulePart, torch.optim.Optimizer)
            others = (k for k, part in unmarked.items() if not isinstance(part, whole))
            rules |= {k: "drop" for k in others if k != EPOCHS}
        # Ranks may have parts of their own.
        rules[OURS] = "keep"
        # Of the loop over epochs another number of ranks needs how many batches were given.
        for name in ("entry", "generators", "loader", "saved_at"):
            rules[f"{EPOCHS}.{name}"] = of_one_rank
        if self._rng:
            rules[RNG] = "keep"
        for key, part in unmarked.items():
            if isinstance(part, ModulePart):
                # Such as the statistics of BatchNorm, which each rank has of its own data.
                rules |= {f"{key}.{name}": of_one_rank for name in part.buffer_names()}
        for key, rule in self.private.items():
            # A pair of functions has a value, which its part has a key for.
            rules[f"{key}.value" if isinstance(unmarked.get(key), ValuePart) else key] = rule
        return rules


def of_one_rank(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """Return one saved rank's value of those that all ranks have."""
    return values[rank % len(values)]


def parts_of(state: Mapping[str, Any], epochs: Any, *, rng: bool) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for key, value in state.items():
        if key in (OURS, EPOCHS):
            raise CheckpointingException(
                f"the key {key!r} of the training state is that of what is saved beside its "
                f"parts: choose another name"
            )
        if not isinstance(key, str) or not key or (rng and key == RNG):
            raise CheckpointingException(
                f"the key {key!r} of the training state must be a name, and not {RNG!r}, under "
                f"which the random number generators are saved (rng=False leaves them out)"
            )
        if isinstance(value, Replicated):
            parts[key] = Replicated(_part_of(key, value.value), value.ranks)
        else:
            parts[key] = _part_of(key, value)
    if not parts:
        raise CheckpointingException("the training state is empty: there is nothing to save")
    parts[EPOCHS] = epochs
    if rng:
        # Last, since making and loading the other parts may draw random numbers.
        parts[RNG] = RandomPart()
    return parts


def _part_of(key: str, value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return ModulePart(value)
    if is_stateful(value):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(map(callable, value)):
        return ValuePart(*value)
    pair = f"a pair of functions, such as {key!r}: (lambda: run.epoch, run.set_epoch)"
    if value is None:
        raise CheckpointingException(
            f"{key!r} of the training state is None: leave it out. A value that may be None is "
            f"given as {pair}"
        )
    if isinstance(value, Mapping):
        raise CheckpointingException(
            f"{key!r} of the training state is a {type(value).__name__}, as a state_dict() is: "
            f"give the module or the optimizer itself, which is asked for its state at each save. "
            f"A plain value is given as {pair}"
        )
    raise CheckpointingException(
        f"{key!r} of the training state is a {type(value).__name__}, which has no "
        f"state_dict and load_state_dict. Give a plain value as {pair}"
    )


def _is_odd(value: Any) -> bool:
    """Return whether a value is a tensor that torch's modules do not load as any other."""
    if not isinstance(value, torch.Tensor):
        return False
    if type(value).__name__ in ("DTensor", "ShardedTensor"):
        return False
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return True
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return True
    return not is_number(value.dtype) or bool(_expanded_dims(value))


def _kind_of(part: Any) -> str:
    """Return in words what a part is, and its class; of a module only that it is one."""
    if isinstance(part, ModulePart):
        return MODULE
    if isinstance(part, ValuePart):
        return "value of a pair of functions"
    sort = "optimizer" if isinstance(part, torch.optim.Optimizer) else "part"
    return f"{sort} {type(part).__module__}.{type(part).__qualname__}"


def described(parts: Mapping[str, Any]) -> Names:
    """Name what must be alike in parts for a load from the nodes, beside their states.

    By the name of a part it says its kind. An optimizer's state is kept by the numbers of its
    parameters, so their names are in their order.
    """
    plain = {key: without_marker(part) for key, part in parts.items()}
    names: dict[int, str] = {}
    # Sorted, for a parameter that several modules share.
    for key, part in sorted(plain.items()):
        if isinstance(part, ModulePart):
            names = {id_: f"{key}.{name}" for id_, name in part.parameter_names().items()} | names
    found: Names = {}
    for key, part in plain.items():
        about = found[key] = {CLASS: {_kind_of(part): None}}
        if isinstance(part, torch.optim.Optimizer):
            parameters = [p for group in part.param_groups for p in group["params"]]
            about[ORDER] = {"\n".join(names.get(id(p), "") for p in parameters): None}
    return {ABOUT: found}


class ModulePart:
    """A module, by the names that its values have without DDP and ``torch.compile``.

    Parameters and buffers are given as they are, each rank's own part of them where FSDP or tensor
    parallelism shards them. FSDP1 makes a sharded copy for each save.

    If it ``is_partial``, a load leaves out what the module has not, and what it lacks.
    """

    def __init__(self, module: torch.nn.Module, *, is_partial: bool = False) -> None:
        self.module = _unwrapped(module)
        self._is_partial = is_partial
        self.is_fsdp1 = any(_is_fsdp1(child) for child in self.module.modules())

    @property
    def freedom(self) -> Freedom:
        """Values that are taken as they were saved."""
        return freedom_of(self.module)

    def state_dict(self) -> dict[str, Any]:
        own = self._own_state()
        plain = plain_names(self.module, own)
        if nested := [plain[n] for n, v in own.items() if type(v) is torch.Tensor and v.is_nested]:
            raise CheckpointingException(
                f"torch loads no nested tensors into modules: {', '.join(nested[:_SHOWN])}. Save "
                f"such buffers as a part of their own, a pair of functions"
            )
        return {plain[name]: value for name, value in own.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was loaded; tensors that were filled in place are there already."""
        own, free = self._own_state(), self.freedom
        names = {plain: name for name, plain in plain_names(self.module, own).items()}
        unknown = sorted(name for name in state.keys() - names.keys() if not free.covers(name))
        if self._is_partial:
            state = {name: value for name, value in state.items() if name not in unknown}
        elif unknown:
            raise MismatchError(
                f"the checkpoint has {len(unknown)} values that {type(self.module).__name__} has "
                f"not: {', '.join(unknown[:_SHOWN])}. Make the module as it was when it was saved"
            )
        loaded = OrderedDict((names.get(name, name), value) for name, value in state.items())
        # A hook needs all that its module saved, and FSDP1's own tensors are copies.
        is_whole = self.is_fsdp1 or any(not name.endswith("_extra_state") for name in free.below)
        if not is_whole:
            loaded = OrderedDict(
                (n, v)
                for n, v in loaded.items()
                if not is_same_tensor(v, own.get(n)) and not self._is_copied(n, own.get(n), v)
            )
        if not loaded:
            return
        # The versions of the modules' states, by which hooks see that nothing is to be converted.
        loaded._metadata = getattr(own, "_metadata", None)  # type: ignore[attr-defined]
        with self._sharded():
            load_module(self.module, loaded, strict=is_whole and not self._is_partial)

    def _is_copied(self, name: str, own: Any, loaded: Any) -> bool:
        """Copy a value into a tensor that ``torch.nn.Module.load_state_dict`` cannot write to."""
        if not isinstance(own, torch.Tensor) or not isinstance(loaded, torch.Tensor):
            return False
        if own.shape != loaded.shape or not (_is_odd(own) or own.is_inference()):
            return False
        if own.is_meta:
            return True
        is_plain = {type(own), type(loaded)} <= {torch.Tensor, torch.nn.Parameter}
        is_strided = torch.strided is own.layout is loaded.layout
        if is_strided:
            # The elements along an expanded dimension are one.
            for dim in _expanded_dims(own):
                own, loaded = own.narrow(dim, 0, 1), loaded.narrow(dim, 0, 1)
        else:
            # A detached tensor has indices of its own.
            own = self.module.state_dict(keep_vars=True)[name]
        with torch.no_grad(), torch.inference_mode(own.is_inference()):
            if is_plain and is_strided and own.dtype is loaded.dtype:
                copy_values(own, loaded)
            else:
                own.copy_(loaded)
        return True

    def _own_state(self) -> dict[str, Any]:
        with self._sharded():
            return self.module.state_dict()

    def parameter_names(self) -> dict[int, str]:
        """Return the names of the parameters by ``id()``: the first of each, if it has several."""
        named = dict(self.module.named_parameters())
        plain = plain_names(self.module, named)
        return {id(p): _clean(plain[name]) for name, p in named.items()}

    def buffer_names(self) -> list[str]:
        plain = plain_names(self.module, [name for name, _ in self.module.named_buffers()])
        return [_clean(name) for name in plain.values()]

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        if not self.is_fsdp1:
            yield
            return
        from torch.distributed.fsdp import (
            FullyShardedDataParallel,
            ShardedStateDictConfig,
            StateDictType,
        )

        with FullyShardedDataParallel.state_dict_type(
            self.module,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
        ):
            yield


class Values:
    """Plain values of a training loop, such as an epoch or the best loss so far, as attributes.

    A part of a ``Checkpointer``'s state in place of a pair of functions for each value::

        run = localckpt.Values(epoch=0, best=math.inf)
        checkpointer = localckpt.Checkpointer({"model": model, "run": run}, local=...)
        ...
        run.best = min(run.best, loss)

    Each value may be any that a checkpoint takes, a tensor too, and may change its class while
    training. Its names are fixed: one that was saved and is not here, or the reverse, is an error
    when the job resumes.

    Args:
        values: The values by name, as a fresh run has them.

    Raises:
        CheckpointingException: A name is that of a method.
    """

    def __init__(self, **values: Any) -> None:
        if taken := sorted(name for name in values if hasattr(type(self), name)):
            raise CheckpointingException(
                f"Values({', '.join(taken)}=...): a method has that name, choose another"
            )
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(
                f"there is no value {name!r} (there are {', '.join(self.__dict__) or 'none'}): "
                f"name each when it is made, Values({name}=...), so that it can be resumed"
            )
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values that are here; with ``partial=True`` others may have been saved."""
        if gone := sorted(state.keys() - vars(self).keys()):
            logger.warning("saved, and no value here has the name: %s", ", ".join(gone))
        if new := sorted(vars(self).keys() - state.keys()):
            logger.warning("not saved, and left as they are: %s", ", ".join(new))
        self.__dict__.update((name, state[name]) for name in vars(self).keys() & state.keys())


class ValuePart:
    def __init__(self, get: Callable[[], Any], take: Callable[[Any], object]) -> None:
        self._get = get
        self._take = take

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._get()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._take(state["value"])


class RandomPart:
    """Random number generators of this process: Python's, numpy's, torch's and those of its GPU."""

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def rewind(self) -> None:
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Find the module inside of DDP, DataParallel and ``torch.compile``, in whatever order."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module


def _expanded_dims(tensor: torch.Tensor) -> list[int]:
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dim for dim, (size, stride) in sizes if size > 1 and stride == 0]


def _clean(name: str) -> str:
    """Leave the wrappers of FSDP1 and of activation checkpointing out of a parameter's name."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _is_fsdp1(module: torch.nn.Module) -> bool:
    # Its package takes long to import, and no module is of a class that was not imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def combined_check(parts: Mapping[str, Any], check: Check | None, *, finite: bool) -> Check | None:
    """Return one check of all that is asked for; ``None`` if nothing is.

    With ``finite`` the parameters of all modules must be finite, but not their buffers: a mask is
    made of infinite values.
    """
    if not finite:
        return check

    def check_all(tensors: Mapping[str, torch.Tensor]) -> str | None:
        unmarked = {key: without_marker(part) for key, part in parts.items()}
        modules = {key: part for key, part in unmarked.items() if isinstance(part, ModulePart)}
        prefixes = tuple(f"{key}." for key in modules)
        buffers = {f"{key}.{name}" for key, part in modules.items() for name in part.buffer_names()}
        found = find_not_finite(
            {n: t for n, t in tensors.items() if n.startswith(prefixes) and n not in buffers}
        )
        return found if found is not None or check is None else check(tensors)

    return check_all
