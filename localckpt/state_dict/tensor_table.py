"""Table of a state's tensors: the slot of each in an image, and its place and strides in the slot.

Tensors that share bytes share a slot, and share bytes again after a load. A dense tensor is stored
in memory order, whatever the order of its dimensions. The table is JSON in the skeleton.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch

from localckpt.errors import CorruptShardError
from localckpt.memory.tensor_bytes import (
    byte_span,
    is_flat,
    is_lazy,
    same_view,
    storage_address,
    storage_bytes,
)
from localckpt.state_dict.foreign_values import ArrayTensor
from localckpt.state_dict.header import RESERVED_NAMES
from localckpt.state_dict.layout import TensorSlot

_LABELS = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}

DTYPES = {label: dtype for dtype, label in _LABELS.items()}
"""Dtypes by their labels in the safetensors format."""

SHARED = "shared:"
"""Beginning of the names of slots that several views share."""
UNNAMED = "tensor."
"""Beginning of the names of slots of tensors without a path, before their numbers."""
_View = tuple[int, tuple[int, ...]]
"""Offset in bytes, and strides in items."""
ARRAY = "array"
"""Kind of an entry that is a numpy array, which is in host memory whatever the map_location."""

# Blobs of shared bytes start at multiples of this offset in their storage, aligned for any dtype.
_BLOB_ALIGN = 16


class TableEntry(NamedTuple):
    """Description of one tensor, and the place of its bytes.

    ``slot`` is ``None`` for a tensor without data (on the meta device). ``view`` is ``None`` for a
    contiguous tensor that fills its slot; for others it is (offset in bytes, strides in items).
    """

    slot: str | None
    dtype: str
    shape: tuple[int, ...]
    device: str
    kind: str
    requires_grad: bool
    view: _View | None = None

    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptShardError(f"the skeleton names a dtype {self.dtype!r}")
        return dtype

    def reach_nbytes(self) -> int:
        """Return the bytes that the tensor needs in its slot, from the slot's first byte on."""
        itemsize = self.torch_dtype().itemsize
        if self.view is None:
            return math.prod(self.shape) * itemsize
        offset, strides = self.view
        if offset % itemsize:
            raise CorruptShardError(f"a tensor in {self.slot!r} begins within an item")
        if 0 in self.shape:
            return 0
        reach = sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))
        return offset + (reach + 1) * itemsize

    @property
    def offset(self) -> int:
        """Offset of the tensor in its slot, in bytes."""
        return 0 if self.view is None else self.view[0]

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Strides of the tensor in its slot; ``None`` if it is contiguous."""
        return None if self.view is None else self.view[1]

    @property
    def is_contiguous(self) -> bool:
        """True if the items follow each other in the slot in the order of their indices."""
        if self.strides is None or 0 in self.shape:
            return True
        steps = zip(self.shape, self.strides, _contiguous_strides(self.shape), strict=True)
        return all(size == 1 or step == contiguous for size, step, contiguous in steps)

    @property
    def is_expanded(self) -> bool:
        strides = self.strides or (1,) * len(self.shape)
        return any(n > 1 and not s for n, s in zip(self.shape, strides, strict=True))

    @property
    def is_blob(self) -> bool:
        """True if the slot is a range of bytes of a storage rather than one tensor's value."""
        return self.slot is not None and self.slot.startswith(SHARED)


class Source(NamedTuple):
    """Source of a slot: a tensor's value, or a range of bytes (``span``) of its storage.

    ``strides``, those in the slot, give the order of the items; ``None`` if contiguous there.
    """

    number: int
    span: tuple[int, int] | None
    strides: tuple[int, ...] | None

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of the tensor whose contiguous bytes fill the slot."""
        if self.span is not None:
            return storage_bytes(tensor, self.span)
        return packed(tensor, self.strides)


@dataclass(frozen=True)
class TensorTable:
    """All tensors of a state, and the slots that hold their bytes, each with its source."""

    entries: tuple[TableEntry, ...]
    slots: tuple[TensorSlot, ...]
    sources: tuple[Source, ...] = field(repr=False)

    def to_json(self) -> bytes:
        rows = [
            [e.slot, e.dtype, e.shape, e.device, e.kind, int(e.requires_grad), e.view]
            for e in self.entries
        ]
        return json.dumps(rows, separators=(",", ":")).encode()


def parse_entries(text: bytes) -> tuple[TableEntry, ...]:
    try:
        return tuple(_parse_row(row) for row in json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptShardError(f"the table of tensors cannot be read: {error}") from error


def _parse_row(row: list[Any]) -> TableEntry:
    slot, dtype, shape, device, kind, requires_grad, view = row
    if {type(dtype), type(device), type(kind), type("" if slot is None else slot)} != {str}:
        raise ValueError(f"a row is {row}")
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"a shape is {shape}")
    if view is not None:
        offset, strides = view
        if not all(type(n) is int and n >= 0 for n in (offset, *strides)):
            raise ValueError(f"a view is {view}")
        if len(strides) != len(shape):
            raise ValueError(f"a view has {len(strides)} strides for {len(shape)} dimensions")
        view = (offset, tuple(strides))
    return TableEntry(slot, dtype, tuple(shape), device, kind, bool(requires_grad), view)


# Tensors for which all properties are read while they are in the cache of a processor.
_TOGETHER = 512
_dtype, _data_ptr = attrgetter("dtype"), torch.Tensor.data_ptr
_READERS: tuple[Callable[[torch.Tensor], Any], ...] = (
    *(_dtype, attrgetter("device"), attrgetter("requires_grad")),
    *(torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_neg),
)


class Properties:
    """Properties of tensors that :func:`build_table` depends on, but attributes, to compare.

    They are read by passes of C over the tensors, which are not kept. ``addresses`` are those of
    the last save; what counts is which tensors share storage. Wrappers of tensors have none.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, are_wrappers: bool = False) -> None:
        is_complex = any(dtype.is_complex for dtype in set(map(_dtype, tensors)))
        self._readers = (*_READERS, torch.Tensor.is_conj) if is_complex else _READERS
        self._kinds = list(map(type, tensors))
        self._values = [[list(map(read, c)) for read in self._readers] for c in _chunks(tensors)]
        self.addresses = [] if are_wrappers else list(map(_data_ptr, tensors))
        self._storages = _storages(tensors, self.addresses)

    def hold_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these tensors, or others in their places, have the same properties."""
        has_moved = False
        try:
            if self._kinds != list(map(type, tensors)):
                return False
            at = _chunks(self.addresses or tensors)
            for chunk, of_chunk, known in zip(_chunks(tensors), self._values, at, strict=True):
                for read, values in zip(self._readers, of_chunk, strict=True):
                    # Without a list of new values, which would take new memory in each save.
                    if not all(map(eq, map(read, chunk), values)):
                        return False
                if self.addresses and not all(map(eq, map(_data_ptr, chunk), known)):
                    has_moved = True
            addresses = list(map(_data_ptr, tensors)) if has_moved else self.addresses
        except RuntimeError:
            # In the place of a plain tensor, a nested one has no size and a sparse one no address.
            return False
        if has_moved and _storages(tensors, addresses) != self._storages:
            return False
        self.addresses = addresses
        return True


def _chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[n : n + _TOGETHER] for n in range(0, len(values), _TOGETHER))


def _storages(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> list[int]:
    """Number the storages of tensors; 0 for those without memory."""
    numbers: dict[int, int] = {0: 0}
    starts = (
        address and address - int(tensor.storage_offset()) * tensor.itemsize
        for tensor, address in zip(tensors, addresses, strict=False)
    )
    return [numbers.setdefault(start, len(numbers)) for start in starts]


def build_table(tensors: Sequence[torch.Tensor], names: Mapping[int, str]) -> TensorTable:
    """Assign each tensor a slot; ``names`` has the paths of some by ``id(tensor)``."""
    slots: list[TensorSlot] = []
    sources: list[Source] = []
    entries: list[TableEntry | None] = [None] * len(tensors)
    taken: set[str] = set(RESERVED_NAMES)

    def add_slot(number: int, span: tuple[int, int] | None) -> tuple[str, _View | None]:
        """Add a slot; return its name, and the tensor's view unless it is contiguous or a blob."""
        tensor = tensors[number]
        wanted = printable(names.get(id(tensor)) or f"{UNNAMED}{number}")
        strides = None
        if span is not None:
            nbytes = span[1] - span[0]
            slot = TensorSlot(free_name(f"{SHARED}{wanted}", taken), "U8", (nbytes,), nbytes)
        else:
            strides = stored_strides(tensor)
            shape, label = tuple(packed(tensor, strides).shape), _LABELS.get(tensor.dtype)
            nbytes = math.prod(shape) * tensor.itemsize
            shape = shape if label else (nbytes,)
            slot = TensorSlot(free_name(wanted, taken), label or "U8", shape, nbytes)
        slots.append(slot)
        taken.add(slot.name)
        sources.append(Source(number, span, strides))
        return slot.name, None if strides is None else (0, strides)

    for cluster in _clusters(tensors):
        first = tensors[cluster[0]]
        if first.is_meta:
            for number in cluster:
                entries[number] = _entry(tensors[number], None, (0, tensors[number].stride()))
            continue
        # A short cut for nearly every tensor, since a restart waits for this.
        is_flat_alone = len(cluster) == 1 and is_flat(first)
        base = cluster[0] if is_flat_alone else _covering_tensor(tensors, cluster)
        whole = None
        if base is not None:
            name, whole = add_slot(base, None)
            start = byte_span(tensors[base])[0]
        else:
            spans = [byte_span(tensors[number]) for number in cluster]
            start = min(s for s, _ in spans) // _BLOB_ALIGN * _BLOB_ALIGN
            # Storages that begin at the same address (of two numpy arrays) may differ in length.
            longest = max(cluster, key=lambda n: tensors[n].untyped_storage().nbytes())
            name, _ = add_slot(longest, (start, max(e for _, e in spans)))
        for number in cluster:
            tensor = tensors[number]
            if base is not None and same_view(tensor, tensors[base]):
                view = whole
            else:
                view = (byte_span(tensor)[0] - start, tensor.stride())
            entries[number] = _entry(tensor, name, view)
    return TensorTable(tuple(e for e in entries if e is not None), tuple(slots), tuple(sources))


def structures(entries: Sequence[TableEntry]) -> list[tuple[Any, ...]]:
    """Return what must be equal to load; strides of a tensor alone in its slot may differ."""
    views: dict[str | None, set[Any]] = {}
    for entry in entries:
        views.setdefault(entry.slot, set()).add((entry.dtype, entry.shape, entry.view))
    return [
        (
            entry.slot,
            entry.dtype,
            entry.shape,
            None if _may_lie_otherwise(entry, len(views[entry.slot])) else entry.view,
        )
        for entry in entries
    ]


def _may_lie_otherwise(entry: TableEntry, views_of_slot: int) -> bool:
    if entry.view is None or entry.slot is None or entry.is_blob:
        return False
    if views_of_slot > 1:
        return entry.view[0] == 0 and entry.is_contiguous
    # A tensor that repeats items cannot take the values of one that does not.
    return not entry.is_expanded


def packed(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """View a tensor in the order of its items in the slot, without repeated ones."""
    if strides is None:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    sized = [stride for size, stride in zip(tensor.shape, strides, strict=True) if size > 1]
    if sized == sorted(sized, reverse=True):
        return tensor
    return tensor.permute(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def stored_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Choose strides for a tensor's value in its own slot: its own if dense, else contiguous."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if strides == _contiguous_strides(shape) or 0 in shape:
        return None
    # Repeated items (stride 0), which only a lazy tensor can have here, are stored once.
    once = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
    expected = 1
    for size, stride in sorted(zip(once, strides, strict=True), key=lambda pair: pair[::-1]):
        if size > 1 and stride != expected:
            # Not dense: stored contiguous.
            apart = zip(shape, once, _contiguous_strides(once), strict=True)
            strides = tuple(0 if n > 1 and m == 1 else stride for n, m, stride in apart)
            return None if once == shape else strides
        expected *= size
    return strides


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a new, contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _entry(tensor: torch.Tensor, slot: str | None, view: _View | None) -> TableEntry:
    return TableEntry(
        slot,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        str(tensor.device),
        kind_of(tensor),
        tensor.requires_grad,
        view,
    )


def kind_of(tensor: torch.Tensor) -> str:
    """Return what a tensor is saved as: its class, or that it is a buffer or an array."""
    if type(tensor) is torch.nn.Parameter:
        return "parameter"
    if type(tensor) is ArrayTensor:
        return ARRAY
    # An nn.Buffer is marked by an attribute; isinstance() alone takes ten times as long.
    return "buffer" if tensor.__dict__ and isinstance(tensor, torch.nn.Buffer) else "tensor"


def _clusters(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the numbers of tensors that share bytes, in the order of the first members."""
    by_storage: dict[tuple[str, int], list[int]] = {}
    clusters: list[list[int]] = []
    for number, tensor in enumerate(tensors):
        alone = tensor.is_meta or tensor.numel() == 0 or type(tensor) is ArrayTensor
        if alone or is_lazy(tensor):
            clusters.append([number])
        else:
            key = (str(tensor.device), storage_address(tensor))
            by_storage.setdefault(key, []).append(number)
    for members in by_storage.values():
        if len(members) == 1:
            clusters.append(members)
            continue
        members.sort(key=lambda n: byte_span(tensors[n]))
        end = -1
        for number in members:
            start, stop = byte_span(tensors[number])
            if start >= end:
                clusters.append([])
            clusters[-1].append(number)
            end = max(end, stop)
    for cluster in clusters:
        cluster.sort()
    return sorted(clusters)


def _covering_tensor(tensors: Sequence[torch.Tensor], cluster: Sequence[int]) -> int | None:
    """Return the member whose value holds all bytes of the cluster, if there is one."""
    if all(same_view(tensors[n], tensors[cluster[0]]) for n in cluster):
        tensor = tensors[cluster[0]]
        start, stop = byte_span(tensor)
        # An expanded tensor is stored smaller as a view of its bytes, unless it is lazy: then the
        # bytes are not its value.
        repeats = tensor.numel() * tensor.itemsize > stop - start
        return None if repeats and not is_lazy(tensor) else cluster[0]
    spans = [byte_span(tensors[n]) for n in cluster]
    whole = (min(s for s, _ in spans), max(e for _, e in spans))
    for number, span in zip(cluster, spans, strict=True):
        if span == whole and tensors[number].is_contiguous():
            fits = all(
                (byte_span(tensors[n])[0] - whole[0]) % tensors[n].itemsize == 0 for n in cluster
            )
            return number if fits else None
    return None


def printable(name: str) -> str:
    """Replace lone surrogates, which would make a header invalid for other tools."""
    return name.encode(errors="replace").decode()


def free_name(wanted: str, taken: Container[str]) -> str:
    """Return the wanted name, with a number if it is taken."""
    name, n = wanted, 1
    while name in taken:
        n += 1
        name = f"{wanted}#{n}"
    return name
