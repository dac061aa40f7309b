"""What the tests of this room share: states of all kinds, blanks to load them into, and saving,
loading and comparing them.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from localckpt.global_tier.load import ReshardingLoadPlanner
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.global_tier.storage_writer import (
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


def _can_be_loaded_by_torch(name: str) -> bool:
    try:
        values = torch.empty(1, dtype=getattr(torch, name))
        values.copy_(values)
    except (AttributeError, NotImplementedError):
        return False
    return True


# All that torch.distributed.checkpoint can save and load.
DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(
        getattr(torch, name)
        for name in ("float8_e8m0fnu", "float4_e2m1fn_x2")
        if _can_be_loaded_by_torch(name)
    ),
]


def told_by(call: Callable[[], Any]) -> str:
    """What a call raised, also if it is no error of ours; empty if nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what is not ours is told to one rank only
        return f"{type(error).__name__}: {error}"
    return ""


def tensor_of(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits: also NaNs of all kinds, and values that are not normal."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    nbytes = math.prod(shape) * dtype.itemsize
    values = torch.randint(0, top, (nbytes,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).view(tuple(shape))


def state_of(seed: int = 0) -> dict[str, Any]:
    """A nested state with everything that a checkpoint can hold, other in each value by seed."""
    base, numbers = tensor_of(torch.float32, (6, 8), seed), tensor_of(torch.complex64, (4, 3), seed)
    channels = tensor_of(torch.bfloat16, (2, 3, 4, 5), seed)
    parameter = torch.nn.Parameter(tensor_of(torch.float32, (5,), seed))
    parameter.grad = torch.ones(5)
    odd = [0x80000000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x7F800000, 1, seed]
    return {
        "dtypes": {
            str(dtype).removeprefix("torch."): tensor_of(dtype, (3, 4), seed) for dtype in DTYPES
        },
        "views": {
            "some rows": base[1:4, ::3],
            "transposed": base.t(),
            "expanded": base[0].expand(3, 8),
            "conjugated": numbers.conj(),
            "negated": numbers.conj().imag,
            "channels last": channels.to(memory_format=torch.channels_last),
        },
        "shapes": {
            "none": torch.tensor(float(seed)),
            "one": torch.tensor([[[seed]]]),
            "empty": torch.empty(0),
            "empty inside": torch.empty(2, 0, 3, dtype=torch.int16),
            "whole pages": tensor_of(torch.float64, (65536,), seed),
            "large": tensor_of(torch.float32, (600, 2003), seed),
        },
        "odd": torch.tensor(odd, dtype=torch.int64).to(torch.uint32).view(torch.float32),
        "parameter": parameter,
        "list": [tensor_of(torch.int64, (2,), seed), {"deep": [1.5 + seed, None]}, [seed]],
        "pair": (tensor_of(torch.int32, (3,), seed), seed),
        "objects": {
            "number": 10**30 + seed,
            "minus zero": -0.0,
            "nan": struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000ABC))[0],
            "text": f"größer als {seed}",
            "yes": True,
            "nothing": None,
            "plain pair": (seed, "text"),
        },
    }


def blank(state: Any) -> Any:
    """The same structure without any of its values."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(blank(value) for value in state)
    if isinstance(state, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros_like(state))
    if isinstance(state, torch.Tensor):
        data = torch.zeros(state.numel() * state.itemsize, dtype=torch.uint8)
        return data.view(state.dtype).view(state.shape)
    return "nothing was loaded here"


def save(
    writer: FileSystemWriterAsync, state: dict[str, Any], planner: Any = None, **options: Any
) -> None:
    """Plan, stage, write and finish, here and now, as a queue would have it done."""
    planned = save_state_dict_async_plan(state, writer, planner=planner, **options)
    write(writer)
    save_state_dict_async_finalize(*planned)


def write(writer: FileSystemWriterAsync) -> None:
    """Stage and write what was planned, if there is anything."""
    function, preload, args = writer.get_save_function_and_args()
    if function is not None:
        assert preload is not None
        args[1] = preload()
        function(*args)


def load_with_torch(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Fill a blank of the state by torch itself; raises what the reader raised."""
    found: dict[str, Any] = blank(state)
    _load(found, FileSystemReader(path, **options), None)
    return found


def load_with_ours(
    path: Path, state: dict[str, Any], *, safe_globals: Iterable[Any] = (), **options: Any
) -> dict[str, Any]:
    """Fill a blank of the state by our reader and planner; raises what the reader raised."""
    found: dict[str, Any] = blank(state)
    reader = CachedMetadataFileSystemReader(path, **options)
    _load(found, reader, ReshardingLoadPlanner(safe_globals=safe_globals))
    return found


def _load(state: dict[str, Any], reader: FileSystemReader, planner: Any) -> None:
    with warnings.catch_warnings():
        # Without ranks torch warns that there are none.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            # What torch's error of all ranks was made of, on the first of them.
            raise min(error.failures.items())[1][0] from error


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"))
