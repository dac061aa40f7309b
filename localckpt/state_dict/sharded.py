"""Pickling of torch's ShardedTensor, which FSDP1 puts into sharded and local state dicts.

Saved are the local tensors and plain metadata; a load makes it in the process group of its process.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from localckpt.errors import CheckpointingException

# Imported at the first ShardedTensor, since the import takes time and few states hold one.
_MODULE = "torch.distributed._shard.sharded_tensor"
_SPECS = "torch.distributed._shard.sharding_spec"
_GROUPS = "torch.distributed._shard.api"

_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")

_Figures = tuple[list[int], list[int], str | None]
"""Offsets, sizes and placement of a shard."""
_Devices = dict[tuple[tuple[int, ...], tuple[int, ...]], torch.device]
"""Devices of local tensors by their offsets and sizes."""


def is_sharded(value: torch.Tensor) -> bool:
    """Return whether a tensor is a ShardedTensor."""
    kind = type(value)
    return kind.__qualname__ == "ShardedTensor" and kind.__module__.startswith(_MODULE)


def reduce_sharded(sharded: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a ShardedTensor, as ``__reduce__`` does, to values that the allow-list accepts."""
    if sharded._init_rrefs:
        raise CheckpointingException(
            "the state holds a ShardedTensor with remote references (init_rrefs=True), which end "
            "with its processes: make it without"
        )
    whole = sharded.metadata()
    properties = whole.tensor_properties
    return restore_sharded, (
        [(shard.tensor, _figures(shard.metadata)) for shard in sharded.local_shards()],
        [_figures(shard) for shard in whole.shards_metadata],
        tuple(whole.size),
        {name: getattr(properties, name) for name in _PROPERTIES},
        _spec_figures(sharded.sharding_spec()),
    )


def restore_sharded(
    local: list[tuple[torch.Tensor, _Figures]],
    shards: list[_Figures],
    size: tuple[int, ...],
    properties: dict[str, Any],
    spec: tuple[Any, ...],
) -> Any:
    """Rebuild a ShardedTensor in the group of ``load_with_process_group``, or the default group."""
    home = import_module(_MODULE)
    result = home.ShardedTensorBase.__new__(
        home.ShardedTensor,
        _spec(spec),
        torch.Size(size),
        **{name: properties[name] for name in _PROPERTIES if name != "memory_format"},
    )
    # load(map_location=) may have put the local tensors on other devices.
    devices = {
        (tuple(offsets), tuple(sizes)): tensor.device for tensor, (offsets, sizes, _) in local
    }
    result._metadata = home.ShardedTensorMetadata(
        [_shard_metadata(figures, devices) for figures in shards],
        torch.Size(size),
        home.TensorProperties(**properties),
    )
    result._local_shards = [
        home.Shard(tensor, _shard_metadata(figures, devices)) for tensor, figures in local
    ]
    group = import_module(_GROUPS)._get_current_process_group()
    result._prepare_init(process_group=group, init_rrefs=False)
    result._post_init()
    return result


def _figures(shard: Any) -> _Figures:
    placement = None if shard.placement is None else str(shard.placement)
    return list(shard.shard_offsets), list(shard.shard_sizes), placement


def _shard_metadata(figures: _Figures, devices: _Devices) -> Any:
    offsets, sizes, placement = figures
    metadata = import_module(_MODULE).ShardMetadata(list(offsets), list(sizes), placement)
    device = devices.get((tuple(offsets), tuple(sizes)))
    at = metadata.placement
    if device is not None and at is not None and at.device() != device:
        metadata.placement = type(at)(f"rank:{at.rank()}/{device}")
    return metadata


def _spec_figures(spec: Any) -> tuple[Any, ...]:
    kind = type(spec).__qualname__
    if kind == "ChunkShardingSpec":
        return kind, spec.dim, [str(placement) for placement in spec.placements]
    if kind == "EnumerableShardingSpec":
        return kind, [_figures(shard) for shard in spec.shards]
    # The user's own class, which the allow-list must accept.
    return "", spec


def _spec(figures: tuple[Any, ...]) -> Any:
    kind, *values = figures
    if kind == "ChunkShardingSpec":
        return import_module(_SPECS).ChunkShardingSpec(*values)
    if kind == "EnumerableShardingSpec":
        shards = [_shard_metadata(shard, {}) for shard in values[0]]
        return import_module(_SPECS).EnumerableShardingSpec(shards)
    return values[0]
