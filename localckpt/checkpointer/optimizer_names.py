"""State of an optimizer by the names of its parameters, as shared storage keeps it.

What is there is taken, and nothing is made: no optimizer is stepped to find out what its state may
look like. A load makes tensors for the states that were saved, like their parameters where they
have their shape.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from localckpt.checkpointer.fit import paired_groups
from localckpt.checkpointer.parts import ModulePart, OptimizerPart
from localckpt.errors import CheckpointingException
from localckpt.global_tier.metadata import set_element

__all__ = ["NamedOptimizer", "Path"]

Path = tuple[str | int, ...]
"""Keys on the way to a value in a state: text in a dict, a number in a list."""

_STATE, _GROUPS = "state", "param_groups"


class NamedOptimizer:
    """An optimizer, and the names of its parameters."""

    def __init__(self, key: str, part: OptimizerPart, modules: Mapping[str, ModulePart]) -> None:
        self._key = key
        self._part = part
        self._module = _module_of(key, part.optimizer, modules)

    @property
    def is_kept_equal(self) -> bool:
        """True if DDP keeps the parameters equal on all ranks of the job."""
        return self._module.is_kept_equal

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, with the names of their parameters."""
        names = self._names()
        return [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in self._part.optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is there; all ranks call it where FSDP1 shards the parameters."""
        own = self._part.state_dict()
        if not {_STATE, _GROUPS} <= own.keys():
            raise CheckpointingException(
                f"{self._key!r} of the training state has a state_dict() without 'state' and "
                f"'param_groups', as torch's optimizers have them; on shared storage its state is "
                f"named by its parameters. Leave out shared=, or save what it returns as a pair of "
                f"functions"
            )
        if self._module.is_fsdp1:
            return self._module.optimizer_state(self._part.optimizer, own)
        names = dict(enumerate(self._numbered()))
        # States that belong to no parameter have a key of their own.
        state = {names.get(key, key): values for key, values in own[_STATE].items()}
        groups = [{**g, "params": [names[number] for number in g["params"]]} for g in own[_GROUPS]]
        return {**own, _STATE: state, _GROUPS: groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that :meth:`state_dict` has returned, and whose parameters are the same."""
        if self._module.is_fsdp1:
            self._part.load_state_dict(
                self._module.optimizer_state_to_load(self._part.optimizer, dict(state))
            )
            return
        numbers = {name: number for number, name in enumerate(self._numbered())}
        self._part.load_state_dict(
            {
                **state,
                _STATE: {numbers.get(name, name): v for name, v in state[_STATE].items()},
                # In the order of the optimizer, which may be another one than was saved.
                _GROUPS: [
                    {
                        **saved,
                        **{key: own[key] for key in ("param_names",) if key in own},
                        "params": [numbers[name] for name in own["params"]],
                    }
                    for saved, own in paired_groups(state[_GROUPS], self.groups)
                ],
            }
        )

    def placed(self, state: Mapping[str, Any]) -> str:
        """Describe the DTensors of a state that are not sharded as their parameters are.

        Returns pairs of a path and the placement in each dimension of the mesh: a number for a
        shard along that dimension of the tensor, ``None`` for a replica.
        """
        likes = self._likes()
        found = []
        for path, value in _leaves(state.get(_STATE, {}), ()):
            like = likes.get(str(path[0]))
            if not isinstance(value, DTensor) or not isinstance(like, DTensor):
                continue
            if value.shape != like.shape or value.placements != like.placements:
                dims = [p.dim if isinstance(p, Shard) else None for p in value.placements]
                found.append([path, dims])
        return json.dumps(found)

    def targets(
        self, saved: Mapping[Path, TensorStorageMetadata | Any], placed: str
    ) -> dict[str, Any]:
        """Make a state to load into: the optimizer's own tensors, or new ones.

        ``placed`` is what :meth:`placed` returned when they were saved. What is no tensor is
        ``b""``.
        """
        likes = self._likes()
        own = {} if self._module.is_fsdp1 else dict(_leaves(self.state_dict(), ()))
        dims_of = {tuple(path): dims for path, dims in json.loads(placed)}
        targets: dict[str, Any] = {_STATE: {}, _GROUPS: []}
        for path, described in saved.items():
            value: Any = b""
            if isinstance(described, TensorStorageMetadata):
                like = likes.get(str(path[1])) if path[0] == _STATE else None
                given = own.get(path)
                dtype = described.properties.dtype
                if (
                    isinstance(given, torch.Tensor)
                    and type(given) in (torch.Tensor, DTensor)
                    and (given.shape, given.dtype) == (described.size, dtype)
                ):
                    value = given
                else:
                    value = _new(described.size, dtype, like, dims_of.get(path[1:]), path[-1])
            set_element(targets, path, value)
        return targets

    def _names(self) -> dict[int, str]:
        """Names of the parameters by ``id()``: the first of each, if it has several."""
        return self._module.parameter_names()

    def _numbered(self) -> list[str]:
        """Names of the parameters by their number in the optimizer's own state."""
        names = self._names()
        groups = self._part.optimizer.param_groups
        return [names[id(p)] for group in groups for p in group["params"]]

    def _likes(self) -> Mapping[str, Any]:
        """Tensors by name that say how states of a parameter's shape are sharded."""
        if self._module.is_fsdp1:
            return self._module.state_dict()
        groups = self._part.optimizer.param_groups
        return dict(zip(self._numbered(), (p for g in groups for p in g["params"]), strict=True))


def _module_of(
    key: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, ModulePart]
) -> ModulePart:
    """The module whose parameters an optimizer has."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for part in modules.values():
        if wanted <= {id(parameter) for parameter in part.module.parameters()}:
            return part
    raise CheckpointingException(
        f"{key!r} of the training state is an optimizer whose parameters are not all in one of its "
        f"modules ({', '.join(modules) or 'there is none'}): on shared storage its state is named "
        f"by them. Give the module, or leave out shared="
    )


def _leaves(value: Any, above: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaves(member, (*above, str(key)))
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield from _leaves(member, (*above, number))
    else:
        yield above, value


def _new(
    size: torch.Size,
    dtype: torch.dtype,
    like: Any,
    dims: list[int | None] | None,
    name: str | int,
) -> Any:
    """Make a tensor for the state of a parameter."""
    # torch keeps steps on the host; where they are to be on a GPU, its load_state_dict moves them.
    device = like.device if isinstance(like, torch.Tensor) and name != "step" else "cpu"
    if isinstance(like, DTensor) and dims is not None:
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        if len(placements) != like.device_mesh.ndim:
            placements = [Replicate()] * like.device_mesh.ndim
        return torch.distributed.tensor.empty(
            *(tuple(size),), dtype=dtype, device_mesh=like.device_mesh, placements=placements
        )
    if isinstance(like, DTensor) and like.shape == size:
        # On the device of its local tensor, which may be offloaded to the host.
        return torch.empty_like(like.detach(), dtype=dtype)
    if isinstance(like, torch.Tensor) or like is None:
        return torch.empty(size, dtype=dtype, device=device)
    if like.size() != size:
        return torch.empty(size, dtype=dtype)
    sharded = copy.deepcopy(like)
    for shard in sharded.local_shards():
        shard.tensor = shard.tensor.detach().to(dtype)
    sharded.metadata().tensor_properties.dtype = dtype
    return sharded
