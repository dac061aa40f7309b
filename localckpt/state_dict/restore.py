"""Restoring of a state from an image, with every block verified before it is used.

Bytes are copied piece by piece from the source straight into the tensors, without a second copy of
the state in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    RestoreError,
)
from localckpt.failure_texts import with_class
from localckpt.ids import ShardIdentity
from localckpt.memory.gpu_copies import BounceBuffers
from localckpt.memory.host_memory import memory_at, prefer_huge_pages
from localckpt.memory.tensor_bytes import copy_values, flat_bytes, is_flat
from localckpt.state_dict.assembly import Piece, Tables, find_pieces, mates_of
from localckpt.state_dict.boxes import Box, parse_boxes
from localckpt.state_dict.call_check import Contents
from localckpt.state_dict.containers import named_values
from localckpt.state_dict.identify import read_header
from localckpt.state_dict.image_parts import ImageParts
from localckpt.state_dict.layout import TensorSlot
from localckpt.state_dict.names import read_names
from localckpt.state_dict.parts import parse_parts
from localckpt.state_dict.placed_runs import PlacedRuns
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import check_skeleton, collection_paused, insert_tensors
from localckpt.state_dict.source import PIECE_NBYTES, ShardSource
from localckpt.state_dict.targets import FIT, Matched, Targets, compare_names
from localckpt.state_dict.tensor_table import ARRAY, SHARED, UNNAMED, TableEntry, parse_entries
from localckpt.state_dict.values import Placeholder, read_tree, root_of

__all__ = ["ImageReader", "make_tensor"]

logger = logging.getLogger(__name__)


class ImageReader:
    """Reader of one image.

    Args:
        source: Source of the image's bytes; the caller closes it.
        allowed: Allow-list for the skeleton.
        expect: Identity that the image must have; ``None`` for any.
        like: Reader of another image of the checkpoint: tables that are the same in both are not
            parsed again.

    Raises:
        CorruptShardError: The header is damaged, or belongs to another shard.

    Attributes:
        header: Header of the image.
        parts: Verified parts of the image.
        allowed: Allow-list for the skeleton.
        mates_nbytes: Bytes that :meth:`restore` has read from other images.
    """

    @collection_paused()
    def __init__(
        self,
        source: ShardSource,
        allowed: SafeGlobals,
        expect: ShardIdentity | None = None,
        like: ImageReader | None = None,
    ) -> None:
        self._like = like
        self._texts = b"", b""
        self.mates_nbytes = 0
        self.allowed = allowed
        self.header = read_header(source)
        identity = self.header.identity
        if expect is not None and identity != expect:
            raise CorruptShardError(f"expected {expect}, and found {identity}")
        self.parts = ImageParts(source, self.header)

    @cached_property
    def tables(self) -> Tables:
        """Tables of the image, verified.

        Raises:
            CorruptShardError: A block is damaged, or the tables contradict each other.
        """
        return self._verified[0]

    @property
    def mates(self) -> tuple[int, ...]:
        """Ranks whose images hold what this one lacks of its tensors; raises as :attr:`tables`."""
        return mates_of(self.tables, self.header.identity.rank)

    @collection_paused()
    def restore(
        self,
        into: Targets | None = None,
        map_location: str | torch.device | None = None,
        mates: Mapping[int, ImageReader] | None = None,
    ) -> Any:
        """Read the state.

        Args:
            into: Tensors to fill; ``None`` for new ones.
            map_location: Device of new tensors; ``None`` for the device that each was saved from.
            mates: Readers of the images of :attr:`mates`.

        Returns:
            The state. With ``into`` it holds the given tensors, which keep their attributes; all
            other values are the saved ones.

        Raises:
            CorruptShardError: A block is damaged, or the header and the table of tensors contradict
                each other. Tensors given by ``into`` may be partly filled.
            MismatchError: ``into`` has another structure; nothing was written.
            UnsafeGlobalError: The skeleton names something that is not allowed.
            RestoreError: The bytes are good, but this program or machine cannot rebuild the state.
                Tensors given by ``into`` may be filled.
        """
        try:
            return self._restore(into, map_location, mates or {})
        except CheckpointingException:
            raise
        except Exception as error:
            raise RestoreError(f"the state cannot be rebuilt: {with_class(error)}") from error

    def _restore(
        self,
        into: Targets | None,
        map_location: str | torch.device | None,
        mates: Mapping[int, ImageReader],
    ) -> Any:
        # Checked before anything is allocated and before the given tensors are changed.
        skeleton, contents = self.checked_skeleton()
        entries, boxes, parts = self.tables
        pieces = self._find_pieces(mates)
        matched = Matched({}, {})
        dtensors: dict[int, Any] = {}
        if into is not None:
            saved = read_names(skeleton, self.allowed, into.rules.free)
            differ = compare_names(saved, into.parts, rules=into.rules)
            matched = into.match(
                *(entries, boxes, contents.of_meshes | contents.composed),
                lambda: self._paths(skeleton, contents),
                differ,
            )
            if differ.missing and into.rules.is_partial:
                logger.warning(
                    "saved and not given, as partial=True allows: %s", ", ".join(differ.missing)
                )
            dtensors = into.dtensors_of(matched.given.get(number) for number in boxes)
            self._require_sizes(matched.targets)
        filled = {n: t for n, t in matched.given.items() if n not in matched.converted}
        left = {n: make_tensor(entries[n]._replace(slot=None), {}) for n in matched.left}
        given = filled | left
        new = [entry for number, entry in enumerate(entries) if number not in given]
        made = self._make_bases(new, map_location)
        tensors = [
            given[n] if n in given else make_tensor(entry, made) for n, entry in enumerate(entries)
        ]
        # Of a slot with given and new tensors the given ones are filled.
        of_slots = {entry.slot: tensor for entry, tensor in zip(entries, tensors, strict=True)}
        of_slots |= {entries[number].slot: tensor for number, tensor in filled.items()}
        bases = made | matched.targets
        own = {name: base for name, base in bases.items() if name not in parts}
        for name, part in parts.items():
            if name in bases:
                own[name] = part.of(of_slots[name].detach())
        # Of what is left nothing is read.
        self._fill(own, alone=bool(left))
        for rank, of_mate in pieces.items():
            slots = [(p, entries[p.number].slot) for p in of_mate]
            of_mates = {p.slot: p.part.of(of_slots[s].detach()) for p, s in slots if s in bases}
            mates[rank]._fill(of_mates, alone=True)
            self.mates_nbytes += sum(target.nbytes for target in of_mates.values())
        # Else tensors that were made in inference mode could not be changed.
        with torch.inference_mode():
            for name in made.keys() & matched.targets.keys():
                target = matched.targets[name]
                copy_values(made[name].view(target.dtype).view(target.shape), target)
            for number in matched.converted:
                tensors[number] = matched.given[number].copy_(tensors[number])
        # Given tensors keep the attributes that the program has set on them.
        return insert_tensors(
            *(skeleton, tensors.__getitem__, self.allowed), marked=into is None, dtensors=dtensors
        )

    def dtensors(self) -> set[int]:
        """Return the numbers of the local tensors of DTensors in the containers of the state."""
        found = self._placeholders(*self.checked_skeleton())
        return {number for _, value in found if value.is_dtensor for number in value.numbers}

    def _paths(self, skeleton: bytes, contents: Contents) -> dict[int, str]:
        """Return the paths of the tensors in the containers of the state, by their numbers."""
        entries = self.tables.entries
        paths: dict[int, str] = {}
        for path, placeholder in self._placeholders(skeleton, contents):
            for number in placeholder.numbers:
                slot = entries[number].slot or ""
                inner = slot if slot.startswith(f"{path}.") else f"{path}.?"
                paths.setdefault(number, path if len(placeholder.numbers) == 1 else inner)
        return paths

    def _placeholders(self, skeleton: bytes, contents: Contents) -> list[tuple[str, Placeholder]]:
        entries = self.tables.entries

        def tensor(number: int) -> torch.Tensor | None:
            entry = entries[number]
            name = (entry.slot or "").removeprefix(SHARED)
            is_in_container = entry.kind != ARRAY and name != f"{UNNAMED}{number}"
            if is_in_container or number in contents.composed:
                return None
            # An object may read it, and its values are not loaded yet.
            return torch.empty((), dtype=entry.torch_dtype()).expand(entry.shape)

        root = root_of(read_tree(skeleton, self.allowed, tensor))
        return named_values(root, (Placeholder,))

    def checked_skeleton(self) -> tuple[bytes, Contents]:
        """Read and check the skeleton, and the tables, without making any object.

        Returns:
            The pickle, and what it holds.

        Raises:
            CorruptShardError: A block is damaged, or the tables contradict each other.
            UnsafeGlobalError: The skeleton names something that is not allowed.
            RestoreError: No object can be made of the skeleton.
        """
        tables, skeleton = self._verified
        try:
            contents = check_skeleton(skeleton, self.allowed, len(tables.entries))
        except CorruptShardError as error:
            # The skeleton's bytes are verified, so another version of the program may read them.
            raise RestoreError(f"the state cannot be rebuilt: {error}") from error
        return skeleton, contents

    def _find_pieces(self, mates: Mapping[int, ImageReader]) -> dict[int, list[Piece]]:
        identity = self.header.identity
        if lacking := sorted(set(self.mates) - mates.keys()):
            raise RestoreError(
                f"{identity} holds parts of tensors only; the images of ranks "
                f"{', '.join(map(str, lacking))} hold the rest. Load it with a manager"
            )
        others = {rank: mates[rank].tables for rank in self.mates}
        return find_pieces(self.tables, identity.rank, others)

    @cached_property
    def _verified(self) -> tuple[Tables, bytes]:
        """Tables, which fit the header, and the pickle, of which nothing is checked yet."""
        with collection_paused():
            tables, skeleton = self._read_skeleton()
            self._require_consistent(tables)
        return tables, skeleton

    def _read_skeleton(self) -> tuple[Tables, bytes]:
        header, identity = self.header, self.header.identity
        framed = bytes(self.parts.read(header.skeleton_start, header.digests_start))
        try:
            table, boxes_text, parts_text, pickle = header.format.split_skeleton(framed)
            entries, boxes = self._parse(table, boxes_text)
            parts = parse_parts(parts_text, entries, boxes, identity.rank, identity.world_size)
            return Tables(entries, boxes, parts), pickle
        except CorruptShardError as error:
            raise CorruptShardError(f"{identity}: {error}") from error

    def _parse(
        self, table: bytes, boxes_text: bytes
    ) -> tuple[tuple[TableEntry, ...], dict[int, Box]]:
        self._texts = table, boxes_text
        identity, like = self.header.identity, self._like
        if like is None or like._texts != self._texts:
            entries = parse_entries(table)
            shapes = [entry.shape for entry in entries]
            return entries, parse_boxes(boxes_text, shapes, identity.rank, identity.world_size)
        entries, boxes = like.tables[:2]
        for ranks in {box.ranks for box in boxes.values()}:
            if ranks is not None and identity.rank not in ranks:
                raise CorruptShardError(f"a set of ranks without rank {identity.rank}")
        return entries, boxes

    def _require_consistent(self, tables: Tables) -> None:
        """Check that table and header describe the same bytes, so no tensor exceeds its slot."""
        for entry in tables.entries:
            part = tables.parts.get(entry.slot or "")
            if part is not None:
                entry = part.entry(entry)
            if entry.slot is None:
                entry.torch_dtype()
                continue
            slot = self.header.slots.get(entry.slot)
            wanted = entry.reach_nbytes()
            if (
                slot is None
                or wanted > slot.nbytes
                or (entry.view is None and wanted < slot.nbytes)
            ):
                raise CorruptShardError(
                    f"{self.header.identity}: the skeleton says {wanted} bytes of tensor "
                    f"{entry.slot!r}, the header {slot.nbytes if slot else 'nothing'}"
                )

    def _require_sizes(self, bases: dict[str, torch.Tensor]) -> None:
        """Check that each given tensor has as many bytes as the saved one."""
        for name, base in bases.items():
            nbytes = self._whole_nbytes(name)
            if nbytes != base.nbytes:
                raise MismatchError(
                    f"the state to load into differs from the saved one, and was left as it is: "
                    f"{name!r} was saved as {nbytes} bytes, and given as {base.nbytes}"
                ).advised("fit", FIT)

    def _make_bases(
        self, entries: Sequence[TableEntry], map_location: str | torch.device | None
    ) -> dict[str, torch.Tensor]:
        bases: dict[str, torch.Tensor] = {}
        for entry in entries:
            if entry.slot is None or entry.slot in bases:
                continue
            device = map_location if map_location is not None else entry.device
            if entry.kind == ARRAY:
                device = "cpu"
            bases[entry.slot] = _allocate(self._whole_nbytes(entry.slot), device)
        return bases

    def _whole_nbytes(self, name: str) -> int:
        """Return the size of a slot, were it not divided."""
        if name not in self.tables.parts:
            return self.header.slots[name].nbytes
        return self._nbytes_of_divided[name]

    @cached_property
    def _nbytes_of_divided(self) -> dict[str, int]:
        tables = self.tables
        return {e.slot: e.reach_nbytes() for e in tables.entries if e.slot in tables.parts}

    def _fill(self, bases: dict[str, torch.Tensor], *, alone: bool = False) -> None:
        """Fill the targets of slots; with ``alone`` nothing else is read, but the header."""
        slots = [slot for slot in self.header.slots.values() if slot.nbytes and slot.name in bases]
        with torch.no_grad():
            targets = [_Target(slot, self.header.data_start, bases[slot.name]) for slot in slots]
            runs = PlacedRuns(targets)
            on_gpus = {target.device for target in targets if target.is_on_gpu}
            bounce = BounceBuffers(on_gpus, PIECE_NBYTES)

            def places(start: int, stop: int) -> list[memoryview]:
                return runs.places(start, stop, bounce.buffer)

            def filled(start: int, parts: list[memoryview]) -> None:
                if on_gpus:
                    near = runs.overlapping(start, start + sum(map(len, parts)))
                    there = [target for target in near if target.is_on_gpu]
                    bounce.copy([copy for target in there for copy in target.takes(start, parts)])

            pieces = _pieces_of(self.header.data_start, targets) if alone else None
            self.parts.stream(places, filled, pieces)
            for target in targets:
                target.finish()


def _pieces_of(data_start: int, targets: Sequence[_Target]) -> list[int]:
    """Starts of the pieces of an image that hold its header, or bytes of targets."""
    spans = [(0, data_start), *((target.start, target.stop) for target in targets)]
    starts = {
        start
        for begin, end in spans
        for start in range(begin // PIECE_NBYTES * PIECE_NBYTES, end, PIECE_NBYTES)
    }
    return sorted(starts)


class _Target:
    """Tensor that is filled from pieces of the image.

    A contiguous tensor in host memory is written directly, one in device memory piece by piece; a
    tensor that is not contiguous is filled from a contiguous copy in host memory.
    """

    def __init__(self, slot: TensorSlot, data_start: int, tensor: torch.Tensor) -> None:
        self.start = data_start + slot.offset
        self.stop = self.start + slot.nbytes
        self._tensor = self._filled = tensor
        if not is_flat(tensor):
            self._filled = torch.empty_like(
                tensor, memory_format=torch.contiguous_format, device="cpu"
            )
        self.memory: memoryview | None = None
        """Bytes to fill, if they are in host memory."""
        if self._filled.is_cpu:
            self.memory = memory_at(self._filled.data_ptr(), slot.nbytes)

    @property
    def device(self) -> torch.device:
        """Device of the bytes to fill."""
        return self._filled.device

    @property
    def is_on_gpu(self) -> bool:
        """True if the bytes to fill are neither in host memory nor on the meta device."""
        return self.memory is None and not self._filled.is_meta

    def takes(
        self, start: int, parts: list[memoryview]
    ) -> Iterator[tuple[torch.Tensor, memoryview]]:
        """Yield the tensor's bytes among parts of the image that begin at ``start``.

        Yields:
            Pairs of a range of the tensor and its bytes in a part.
        """
        flat = flat_bytes(self._filled)
        for part in parts:
            begin, end = max(start, self.start), min(start + len(part), self.stop)
            if begin < end:
                yield flat[begin - self.start : end - self.start], part[begin - start : end - start]
            start += len(part)

    def finish(self) -> None:
        """Copy the contiguous copy, if there is one, into the tensor."""
        if self._filled is not self._tensor:
            copy_values(self._tensor, self._filled)


def _allocate(nbytes: int, device: str | torch.device) -> torch.Tensor:
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        if str(device) == "cpu" or isinstance(error, torch.OutOfMemoryError):
            raise RestoreError(
                f"the state cannot be rebuilt: {nbytes} bytes cannot be allocated on {device!s} "
                f"({error})"
            ) from error
        raise MismatchError(
            f"the shard's tensors were on {device!s}, where {nbytes} bytes cannot be allocated "
            f"here ({error}): pass map_location='cpu', or another device, to load()"
        ) from error
    if tensor.device.type == "cpu":
        prefer_huge_pages(tensor.data_ptr(), nbytes)
    return tensor


def make_tensor(entry: TableEntry, bases: dict[str, torch.Tensor]) -> torch.Tensor:
    """Make a tensor of an image as a view of the bytes of its slot.

    Args:
        entry: Description of the tensor.
        bases: Bytes of slots by name; not needed for a tensor without data.
    """
    dtype = entry.torch_dtype()
    strides = entry.view[1] if entry.view is not None else None
    if entry.slot is None:
        tensor = torch.empty(entry.shape, dtype=dtype, device="meta")
        if strides is not None:
            tensor = torch.empty_strided(entry.shape, strides, dtype=dtype, device="meta")
    else:
        base = bases[entry.slot]
        offset = entry.view[0] if entry.view is not None else 0
        if strides is None:
            strides = torch.empty(entry.shape, device="meta").stride()
        tensor = torch.empty(0, dtype=dtype, device=base.device)
        tensor.set_(base.untyped_storage(), offset // dtype.itemsize, entry.shape, strides)
    if entry.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    if entry.kind == "buffer":
        tensor = torch.nn.Buffer(tensor)
    return tensor.requires_grad_(entry.requires_grad)
