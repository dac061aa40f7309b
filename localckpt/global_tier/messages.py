"""Plans and results that ranks send each other over the job's store, as pickles of plain data.

torch's store asks nobody who he is, so what comes from it is read as a file of a stranger is: no
code is run, and nothing is made but the classes that are named here.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from localckpt.errors import MismatchError, UnsafeGlobalError
from localckpt.global_tier.drain_items import RankPlan
from localckpt.global_tier.metadata import PickledObjects, StorageInfo, StoragePrefix
from localckpt.global_tier.plain_pickle import read_plain
from localckpt.global_tier.replicas import CommonItems
from localckpt.state_dict.boxes import RankSet
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused

__all__ = ["Written", "pack", "unpack"]

T = TypeVar("T")


class Written(NamedTuple):
    """Places of one rank's items, and the bytes of each of its files."""

    results: list[WriteResult]
    files: dict[str, int]


_NOTHING = type(None)
_KINDS: Mapping[type, Mapping[str, tuple[type, ...]]] = {
    # Planners keep what they like beside the items.
    SavePlan: {
        "items": (list,),
        "storage_data": (object,),
        "planner_data": (object,),
        "usable": (bool,),
    },
    WriteItem: {
        "index": (MetadataIndex,),
        "type": (WriteItemType,),
        "bytes_io_data": (BytesIOWriteData, _NOTHING),
        "tensor_data": (TensorWriteData, _NOTHING),
    },
    WriteItemType: {},
    BytesIOWriteData: {"nbytes": (int,)},
    TensorWriteData: {
        "chunk": (ChunkStorageMetadata,),
        "properties": (TensorProperties,),
        "size": (torch.Size,),
    },
    StoragePrefix: {"prefix": (str,)},
    WriteResult: {
        "index": (MetadataIndex,),
        "size_in_bytes": (int,),
        "storage_data": (StorageInfo,),
    },
    RankPlan: {"plan": (SavePlan,), "digests": (dict,), "ranks": (dict,)},
    RankSet: {"lattices": (tuple,)},
    CommonItems: {"ranks": (tuple,), "numbers": (tuple,)},
    Written: {"results": (list,), "files": (dict,)},
}


def pack(value: Any) -> bytes:
    """Pickle what :func:`unpack` reads."""
    with collection_paused():
        return pickle.dumps(value, protocol=4)


def unpack(data: bytes, kind: type[T], allowed: SafeGlobals) -> T:
    """Read what another rank has packed; plans have items, and files in their own directory.

    Args:
        data: The bytes.
        kind: Class of the value, which may hold plans.
        allowed: Classes that planners of the user's may name.

    Raises:
        UnsafeGlobalError: It names a class or function that is not allowed.
        MismatchError: It is nothing that a rank packs.
    """
    try:
        with collection_paused():
            value = read_plain(data, PickledObjects(allowed, _KINDS))
            if (why := _why_foreign(value, kind)) is None:
                return value  # type: ignore[no-any-return]
    except UnsafeGlobalError:
        raise
    except Exception as error:
        raise _foreign(f"{type(error).__name__}: {error}") from error
    raise _foreign(why)


def _why_foreign(value: Any, kind: type) -> str | None:
    if type(value) is not kind:
        return f"a {type(value).__name__} in place of a {kind.__name__}"
    parts: Any = [value] if isinstance(value, SavePlan) else value
    for part in value.values() if isinstance(value, dict) else parts:
        plan = part.plan if isinstance(part, RankPlan) else part
        if not isinstance(plan, SavePlan):
            continue
        if any(type(item) is not WriteItem for item in plan.items):
            return "its items are none"
        # Each rank writes the files that its plan names.
        prefix = plan.storage_data.prefix if isinstance(plan.storage_data, StoragePrefix) else ""
        if "/" in prefix or "\0" in prefix:
            return f"files named {prefix!r:.100}"
    return None


def _foreign(why: str) -> MismatchError:
    return MismatchError(
        f"a plan that came by the job's store is none that a rank sends ({why}). Does another "
        f"program write to that store? Nothing was saved, and what was saved before stands"
    )
