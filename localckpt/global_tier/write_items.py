"""Write items: tensors in the frame that ``torch.save`` gives them, and objects as it writes them.

With the frame known, saving a tensor is a copy of its values between two short runs of bytes.
Objects are loaded without running other code, and what could not be loaded so is not saved.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from localckpt.errors import CheckpointingException, UnsafeGlobalError

# More than tensors of one model have shapes, and bounded, since files name shapes, too.
_FRAMES = 1 << 14
# torch keeps what may be named in a list of the process.
_ALLOWING = threading.Lock()
# What torch says of such an integer.
_LONG_INTEGER = f"Unsupported operand {pickle.LONG4[0]}"
# Values that tell by their text whether they changed, and that every reader takes.
_SIMPLE = (int, float, bool, str, type(None))
# Readers take no integers of more bytes.
_INTEGER_BITS = 8 * 255 - 1


class ItemReader:
    """Values of the items of one save after the other, as a planner gives them."""

    def __init__(self, safe_globals: Iterable[Any] = ()) -> None:
        self._safe_globals = tuple(safe_globals)
        self._simple: dict[str, tuple[str, memoryview]] = {}
        self._checked: set[int] = set()
        self._checked_kinds: set[tuple[type, torch.dtype]] = set()

    def read(self, item: WriteItem, planner: SavePlanner) -> torch.Tensor | memoryview:
        """An item's values: a plain tensor of the item's dtype and shape, or a run of bytes."""
        if item.type == WriteItemType.BYTE_IO:
            return self._read_object(item, planner)
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor), "a planner gives tensors for items that are"
        if tensor.layout is not torch.strided:
            raise CheckpointingException(
                f"{item.index.fqn} is a {tensor.layout} tensor, whose parts cannot be loaded: "
                f"save tensor.to_dense(), or its indices and values"
            )
        if tensor.is_quantized:
            raise CheckpointingException(
                f"{item.index.fqn} is quantized, and its parts cannot be loaded: save "
                f"tensor.dequantize(), or tensor.int_repr() and its scale"
            )
        tensor = tensor.detach()
        data = item.tensor_data
        assert data is not None
        if is_plain(tensor, data.properties.dtype, data.chunk.sizes):
            return tensor
        stream = io.BytesIO()
        torch.save(tensor.cpu(), stream)
        kind = type(tensor), tensor.dtype
        if kind not in self._checked_kinds:
            require_loadable(item.index.fqn, stream, self._safe_globals)
            self._checked_kinds.add(kind)
        return memoryview(stream.getvalue())

    def _read_object(self, item: WriteItem, planner: SavePlanner) -> memoryview:
        # What a planner of the user's makes of an object is known only when it is made, and is no
        # more than bytes to us.
        if not _looks_up(planner):
            return _made(item, planner)
        name, value = item.index.fqn, planner.lookup_object(item.index)
        if type(value) in _SIMPLE and not (
            type(value) is int and value.bit_length() > _INTEGER_BITS
        ):
            text = f"{type(value).__name__} {value!r}"
            if self._simple.get(name, ("",))[0] != text:
                self._simple[name] = text, _made(item, planner)
            return self._simple[name][1]
        data = _made(item, planner)
        digest = xxhash.xxh3_64_intdigest(data)
        if digest not in self._checked:
            require_loadable(name, io.BytesIO(data), self._safe_globals)
            self._checked.add(digest)
        return data


def _made(item: WriteItem, planner: SavePlanner) -> memoryview:
    stream = planner.resolve_data(item)
    assert isinstance(stream, io.BytesIO), "a planner gives bytes for items that are"
    # Python 3.13 complains on stderr of a stream that is collected with its ``getbuffer``.
    return memoryview(stream.getvalue())


def _looks_up(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Return whether the planner saves the objects that it finds, and nothing made of them."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


class Frame(NamedTuple):
    """Bytes around the values of a contiguous tensor in host memory."""

    head: bytes
    tail: bytes


@lru_cache(_FRAMES)
def frame_of(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """The frame of any tensor of this dtype and shape, as torch itself writes it."""
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # type: ignore[arg-type]
    return Frame(*(bytes(part) for part in recorder.parts))


def is_plain(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Return whether a tensor is nothing but its values, one after the other."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and tensor.dtype is dtype
        and tensor.shape == torch.Size(shape)
    )


class _Recorder(io.RawIOBase):
    """Recorder of what is written before and after the values, over which torch seeks."""

    def __init__(self) -> None:
        self.parts = (bytearray(), bytearray())
        self._part = self.parts[0]
        self._position = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._part += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or self._part is self.parts[1]:
            raise io.UnsupportedOperation("torch.save seeks once, over the values of the tensor")
        self._part = self.parts[1]
        self._position += offset
        return self._position

    def tell(self) -> int:
        return self._position


def load_object(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> Any:
    """Load what ``torch.save`` wrote."""
    try:
        stream.seek(0)
        with _allowing(safe_globals):
            if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(stream):
                raise UnsafeGlobalError(
                    f"{name} refers to {', '.join(sorted(unsafe))}, which may not be loaded from a "
                    f"file. If you trust it, pass safe_globals=[...] or call "
                    f"torch.serialization.add_safe_globals([...]), when saving and when loading"
                )
            stream.seek(0)
            return torch.load(stream, map_location="cpu", weights_only=True)
    except CheckpointingException:
        raise
    except Exception as error:
        # A class that is allowed may raise anything.
        raise CheckpointingException(
            f"{name} cannot be loaded from a file: {_reason(error)}"
        ) from error


def require_loadable(name: str, stream: io.BytesIO, safe_globals: Sequence[Any]) -> None:
    """Refuse to save what :func:`load_object` refuses to load; by loading it."""
    try:
        load_object(name, stream, safe_globals)
    except UnsafeGlobalError:
        raise
    except CheckpointingException as error:
        raise CheckpointingException(
            f"{error}. So it is not saved: save plain lists, dicts, numbers and text in its place, "
            f"or have it hold state_dict() and load_state_dict()"
        ) from error


@contextmanager
def _allowing(safe_globals: Sequence[Any]) -> Iterator[None]:
    """Have torch take these, too. Those that the program has allowed itself stay allowed."""
    if not safe_globals:
        yield
        return
    with _ALLOWING:
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([g for g in safe_globals if g not in known]):
            yield


def _reason(error: Exception) -> str:
    """Text of an error, without torch's advice to load without checks."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    if text == _LONG_INTEGER:
        return "it holds an integer of more than 255 bytes"
    return f"{type(error).__name__}: {text}"
