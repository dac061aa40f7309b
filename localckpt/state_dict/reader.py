"""The reader of images: a state, single tensors, and bytes, each block verified before it is used.

Bytes are copied piece by piece from the source straight into the tensors, without a second copy of
the state in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import with_class
from localckpt.ids import ShardIdentity
from localckpt.memory.gpu_copies import BounceBuffers
from localckpt.memory.host_memory import memory_at, prefer_huge_pages
from localckpt.memory.tensor_bytes import (
    copy_values,
    flat_bytes,
    is_flat,
)
from localckpt.state_dict.boxes import Box, Rectangle, parse_boxes
from localckpt.state_dict.containers import named_values
from localckpt.state_dict.header import Skeleton
from localckpt.state_dict.names import read_names
from localckpt.state_dict.part_reads import Part, read_parts, read_together
from localckpt.state_dict.parts import DividedSlot, Tables, as_stored, parse_parts
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import collection_paused, insert_tensors
from localckpt.state_dict.source import PIECE_NBYTES, Destination, ImageBytes, ShardSource
from localckpt.state_dict.targets import FIT, Matched, NamesDiffer, Targets, compare_names
from localckpt.state_dict.tensor_table import (
    ARRAY,
    SHARED,
    UNNAMED,
    TableEntry,
    parse_entries,
)
from localckpt.state_dict.unpickler import Contents, check_skeleton
from localckpt.state_dict.values import Placeholder, read_tree, root_of

logger = logging.getLogger(__name__)


class ImageReader(ImageBytes):
    """Reader of one image.

    Args:
        source, expect: As for :class:`ImageBytes`.
        allowed: Allow-list for the classes and functions that the image names.
        like: Reader of the same image, or of another one of the checkpoint: what is the same in
            both is not parsed, checked and compared again.

    Attributes:
        joined: Readers of the images of :attr:`co_owners`, by rank, once :meth:`join` is called.
        nbytes_read: Bytes of images that :meth:`restore` has read.
    """

    @collection_paused()
    def __init__(
        self,
        source: ShardSource,
        allowed: SafeGlobals,
        expect: ShardIdentity | None = None,
        like: ImageReader | None = None,
    ) -> None:
        super().__init__(source, expect)
        self._like = like
        self._texts = b"", b""
        self._matches: tuple[Targets, NamesDiffer, Matched] | None = None
        self.allowed = allowed
        self.joined: dict[int, ImageReader] = {}
        self.nbytes_read = 0

    @cached_property
    def absent(self) -> dict[str, DividedSlot]:
        """Divided slots that the images of other ranks hold; raises as :attr:`tables`."""
        parts = self.tables.parts
        return {slot: part for slot, part in parts.items() if part.owner != self.identity.rank}

    @property
    def co_owners(self) -> list[int]:
        """Ranks whose images hold :attr:`absent`."""
        return sorted({part.owner for part in self.absent.values()})

    def join(self, co_owner: ImageReader) -> None:
        """Read what this image lacks from another one; raises as :attr:`tables` of that."""
        _ = co_owner.tables
        self.joined[co_owner.identity.rank] = co_owner

    # The state.

    @collection_paused()
    def restore(
        self,
        into: Targets | None = None,
        map_location: str | torch.device | None = None,
    ) -> Any:
        """Read the state, into given tensors or new ones, on their saved devices by default.

        Given tensors keep their attributes; all other values are the saved ones. After a
        MismatchError nothing was written; after another error given tensors may be filled.
        """
        try:
            return self._restore(into, map_location)
        except CheckpointingException:
            raise
        except Exception as error:
            raise RestoreError(f"the state cannot be rebuilt: {with_class(error)}") from error

    def _restore(self, into: Targets | None, map_location: str | torch.device | None) -> Any:
        # Checked before anything is allocated and before the given tensors are changed.
        skeleton, _ = self.checked_skeleton
        entries, boxes, *_ = self.tables
        holders = self._holders
        matched = Matched({}, {})
        dtensors: dict[int, Any] = {}
        if into is not None:
            differ, matched = self.match(into)
            if differ.missing and into.rules.is_partial:
                logger.warning(
                    "saved and not given, as partial=True allows: %s", ", ".join(differ.missing)
                )
            given_parts = [matched.given[number] for number in boxes if number in matched.given]
            locals_given = {id(part) for part in given_parts}
            dtensors = {key: into.dtensors[key] for key in locals_given & into.dtensors.keys()}
        filled = {n: t for n, t in matched.given.items() if n not in matched.converted}
        left = {n: _make_tensor(entries[n]._replace(slot=None), {}) for n in matched.left}
        given = filled | left
        new = [entry for number, entry in enumerate(entries) if number not in given]
        made = self._make_bases(new, map_location)
        tensors = [
            given[n] if n in given else _make_tensor(entry, made) for n, entry in enumerate(entries)
        ]
        bases = made | matched.targets
        # Of what is left nothing is read.
        own = {name: base for name, base in bases.items() if name not in holders}
        self._fill(own, is_all_verified=not left)
        self.nbytes_read = self.header.nbytes
        for rank, reader in self.joined.items():
            slots = {slot: there for slot, (of, there) in holders.items() if of == rank}
            targets = {there: bases[slot] for slot, there in slots.items() if slot in bases}
            reader._fill(targets)
            self.nbytes_read += sum(base.nbytes for base in targets.values())
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

    def match(self, into: Targets) -> tuple[NamesDiffer, Matched]:
        """Find what fills which tensor; raises MismatchError as :meth:`restore`."""
        skeleton, contents = self.checked_skeleton
        if self._matches is not None and self._matches[0] is into:
            return self._matches[1:]
        entries, boxes, *_ = self.tables
        saved = read_names(skeleton, self.allowed, into.rules.free)
        differ = compare_names(saved, into.parts, rules=into.rules)
        matched = into.match(
            *(entries, boxes, contents.of_meshes | contents.composed),
            *(self._paths, differ),
        )
        self._require_sizes(matched.targets)
        self._matches = into, differ, matched
        return differ, matched

    def dtensors(self) -> set[int]:
        """Return the numbers of the local tensors of DTensors in the containers of the state."""
        found = self._placeholders()
        return {number for _, value in found if value.is_dtensor for number in value.numbers}

    def _paths(self) -> dict[int, str]:
        """Return the paths of the tensors in the containers of the state, by their numbers."""
        paths: dict[int, str] = {}
        for path, placeholder in self._placeholders():
            for number in placeholder.numbers:
                paths.setdefault(number, self.path_of(number, path, placeholder))
        return paths

    def path_of(self, number: int, path: str, placeholder: Placeholder) -> str:
        """Return the path of a tensor that a placeholder stands for, maybe with others."""
        if len(placeholder.numbers) == 1:
            return path
        slot = self.entries[number].slot or ""
        return slot if slot.startswith(f"{path}.") else f"{path}.?"

    def _placeholders(self) -> list[tuple[str, Placeholder]]:
        skeleton, contents = self.checked_skeleton

        def tensor(number: int) -> torch.Tensor | None:
            entry = self.entries[number]
            name = (entry.slot or "").removeprefix(SHARED)
            is_in_container = entry.kind != ARRAY and name != f"{UNNAMED}{number}"
            if is_in_container or number in contents.composed:
                return None
            # An object may read it, and its values are not loaded yet.
            if entry.kind == ARRAY:
                return torch.zeros(entry.shape, dtype=entry.torch_dtype())
            return torch.empty((), dtype=entry.torch_dtype()).expand(entry.shape)

        root = root_of(read_tree(skeleton, self.allowed, tensor))
        return named_values(root, (Placeholder,))

    @cached_property
    def checked_skeleton(self) -> tuple[bytes, Contents]:
        """The pickle, and what it holds: checked, with the tables, without making any object."""
        skeleton = self.tables.pickle
        if (like := self._like) is not None and like.tables.pickle == skeleton:
            return like.checked_skeleton
        try:
            contents = check_skeleton(skeleton, self.allowed, len(self.entries))
        except CorruptShardError as error:
            # The skeleton's bytes are verified, so another version of the program may read them.
            raise RestoreError(f"the state cannot be rebuilt: {error}") from error
        return skeleton, contents

    @cached_property
    def _holders(self) -> dict[str, tuple[int, str]]:
        """By the name of each absent slot the rank whose image holds it, and its name there."""
        if lacking := sorted(set(self.co_owners) - self.joined.keys()):
            raise RestoreError(
                f"{self.identity} holds parts of tensors only; the images of ranks "
                f"{', '.join(map(str, lacking))} hold the rest. Load it with a manager"
            )
        numbers = {entry.slot: number for number, entry in enumerate(self.entries)}
        places = {
            rank: {box[:3]: number for number, box in reader.tables.boxes.items()}
            for rank, reader in self.joined.items()
        }
        found = {}
        for slot, part in self.absent.items():
            number, owner = numbers[slot], self.joined[part.owner]
            box, nbytes = self.tables.boxes[number], self._whole_nbytes[slot]
            there = places[part.owner].get(box[:3])
            other = None if there is None else owner.entries[there]
            if (
                other is None
                or other.slot is None
                or owner.tables.parts.get(other.slot) != part
                or as_stored(other) != as_stored(self.entries[number])
                or owner.header.slots[other.slot].nbytes != nbytes
            ):
                raise CorruptShardError(
                    f"{box.key!r} is divided among ranks {list(part.ranks)} in the image of rank "
                    f"{self.identity.rank}, and not so in that of rank {part.owner}"
                )
            found[slot] = part.owner, other.slot
        return found

    @cached_property
    @collection_paused()
    def tables(self) -> Tables:
        """Tables, which fit the header, and the pickle, of which nothing is checked yet."""
        header, identity = self.header, self.identity
        for _ in self.pieces(0, header.data_start):
            # The places of the tensors are the header's, so its blocks are verified, too.
            pass
        framed = bytearray(header.digests_start - header.skeleton_start)
        self.read_into(header.skeleton_start, memoryview(framed))
        try:
            table, boxes_text, parts_text, pickle = Skeleton.split(bytes(framed))
            entries, boxes = self._parse(table, boxes_text)
            parts = parse_parts(parts_text, entries, boxes, identity.rank, identity.world_size)
        except CorruptShardError as error:
            raise CorruptShardError(f"{identity}: {error}") from error
        tables = Tables(entries, boxes, parts, pickle)
        self._require_consistent(tables)
        return tables

    def _parse(
        self, table: bytes, boxes_text: bytes
    ) -> tuple[tuple[TableEntry, ...], dict[int, Box]]:
        self._texts = table, boxes_text
        identity, like = self.identity, self._like
        known = (b"", b"") if like is None else like._texts
        if like is None or known[0] != table:
            entries = parse_entries(table)
        else:
            entries = like.tables.entries
        if like is None or known != self._texts:
            shapes = [entry.shape for entry in entries]
            return entries, parse_boxes(boxes_text, shapes, identity.rank, identity.world_size)
        boxes = like.tables.boxes
        for ranks in {box.ranks for box in boxes.values()}:
            if ranks is not None and identity.rank not in ranks:
                raise CorruptShardError(f"a set of ranks without rank {identity.rank}")
        return entries, boxes

    def _require_consistent(self, tables: Tables) -> None:
        """Check that table and header describe the same bytes, so no tensor exceeds its slot."""
        for entry in tables.entries:
            if entry.slot is None:
                entry.torch_dtype()
                continue
            slot, part = self.header.slots.get(entry.slot), tables.parts.get(entry.slot)
            wanted = entry.reach_nbytes()
            if part is not None and part.owner != self.identity.rank:
                wanted = 0
            if (
                slot is None
                or wanted > slot.nbytes
                or ((entry.view is None or part is not None) and wanted < slot.nbytes)
            ):
                raise CorruptShardError(
                    f"{self.identity}: the skeleton says {wanted} bytes of tensor "
                    f"{entry.slot!r}, the header {slot.nbytes if slot else 'nothing'}"
                )

    def _require_sizes(self, bases: dict[str, torch.Tensor]) -> None:
        """Check that each given tensor has as many bytes as the saved one."""
        for name, base in bases.items():
            nbytes = self._whole_nbytes[name]
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
            bases[entry.slot] = _allocate(self._whole_nbytes[entry.slot], device)
        return bases

    @cached_property
    def _whole_nbytes(self) -> dict[str, int]:
        """Sizes of the slots by name, as they would be without division."""
        nbytes = {name: slot.nbytes for name, slot in self.header.slots.items()}
        return nbytes | {e.slot: e.reach_nbytes() for e in self.entries if e.slot in self.absent}

    def _fill(self, bases: dict[str, torch.Tensor], *, is_all_verified: bool = False) -> None:
        """Fill the targets of slots."""
        slots = [slot for slot in self.header.slots.values() if slot.nbytes and slot.name in bases]
        targets = [(s, bases[s.name]) for s in slots if not bases[s.name].is_meta]
        on_gpus = {tensor.device for _, tensor in targets if is_flat(tensor) and not tensor.is_cpu}
        bounce = BounceBuffers(on_gpus, PIECE_NBYTES)
        parts = []
        for slot, tensor in targets:
            start, shape = self.header.data_start + slot.offset, tuple(tensor.shape)
            to: Destination | None = None
            if is_flat(tensor) and tensor.is_cpu:
                to = memory_at(tensor.data_ptr(), slot.nbytes)
            elif is_flat(tensor):
                to = partial(_copy_up, flat_bytes(tensor), bounce)
            items = tensor.dtype, shape, None, (0,) * len(shape)
            parts.append(Part(start, start + slot.nbytes, to, tensor, *items))
        read_together(
            self,
            parts,
            is_all_verified=is_all_verified,
            scratch=lambda nbytes: bounce.buffer()[:nbytes],
            finish=bounce.finish,
        )

    # Single tensors.

    @property
    def entries(self) -> tuple[TableEntry, ...]:
        """The tensors, by number, each described whole; raises as :attr:`tables`."""
        return self.tables.entries

    @property
    def arrays(self) -> set[int]:
        """Numbers of the tensors that are numpy arrays in the state."""
        return {n for n, entry in enumerate(self.entries) if entry.kind == ARRAY}

    @collection_paused()
    def rebuild(self, filled: Collection[int]) -> tuple[Any, list[torch.Tensor]]:
        """Rebuild the state; return it, and its tensors: on the meta device unless ``filled``."""
        tensors = [
            self.tensor(number) if number in filled else _without_data(entry)
            for number, entry in enumerate(self.entries)
        ]
        skeleton, _ = self.checked_skeleton
        return insert_tensors(skeleton, tensors.__getitem__, self.allowed), tensors

    def tensor(self, number: int) -> torch.Tensor:
        """Read one tensor into new host memory."""
        entry, holder = self.entries[number], self
        if entry.slot is not None and entry.slot in self.absent:
            rank, slot = self._holders[entry.slot]
            holder, entry = self.joined[rank], entry._replace(slot=slot)
        if entry.slot is None:
            return _make_tensor(entry, {})
        flat = torch.empty(max(0, entry.reach_nbytes() - entry.offset), dtype=torch.uint8)
        header = holder.header
        start = header.data_start + header.slots[entry.slot].offset + entry.offset
        holder.read_into(start, memory_at(flat.data_ptr(), flat.nbytes))
        items = flat.view(entry.torch_dtype())
        if entry.view is None:
            return _of_kind(entry, items.view(entry.shape))
        return _of_kind(entry, items.as_strided(entry.shape, entry.view[1]))

    def read(self, parts: Iterable[tuple[int, Rectangle, torch.Tensor]]) -> None:
        """Fill tensors with rectangles of tensors of this image, given by their numbers."""
        read_parts(self, (self._part(*part) for part in parts))

    def _part(self, number: int, rectangle: Rectangle, out: torch.Tensor) -> Part:
        entry = self.entries[number]
        dims, dtype = len(entry.shape), out.dtype
        # A global tensor may have more dimensions in front.
        rectangle = Rectangle(*(side[len(side) - dims :] for side in rectangle))
        start = self.start_of(number) + entry.offset
        if entry.is_contiguous:
            return Part.contiguous(start, dtype, entry.shape, rectangle, out)
        stop = start + entry.reach_nbytes() - entry.offset
        starts = rectangle.offsets
        return Part(start, stop, None, out, dtype, entry.shape, entry.strides, starts)

    def start_of(self, number: int) -> int:
        """First byte in the image of the slot of a tensor that has data."""
        name = self.entries[number].slot
        assert name is not None, "it has data"
        return self.header.data_start + self.header.slots[name].offset

    def run_of(self, number: int) -> tuple[int, int] | None:
        """First byte and end of a tensor's values in the image; ``None`` if they are no run."""
        entry = self.entries[number]
        if entry.slot is None or entry.slot in self.absent or not entry.is_contiguous:
            return None
        start = self.start_of(number) + entry.offset
        return start, start + math.prod(entry.shape) * entry.torch_dtype().itemsize


class OpenImages:
    """Images of one checkpoint that are read together; ``close`` closes all of them.

    Args:
        open_source: Opens the source of an image.
        allowed: As for :class:`ImageReader`.

    Attributes:
        bad: Images that could not be read, or were found damaged, each with the error.
    """

    def __init__(
        self, open_source: Callable[[ShardIdentity], ShardSource], allowed: SafeGlobals
    ) -> None:
        self._open_source, self._allowed = open_source, allowed
        self._opened = ExitStack()
        self._sources: dict[ShardIdentity, ShardSource] = {}
        self.bad: dict[ShardIdentity, StorageError | CorruptShardError] = {}

    def open(self, identity: ShardIdentity, like: ImageReader | None = None) -> ImageReader:
        return ImageReader(self.source(identity), self._allowed, identity, like)

    def source(self, identity: ShardIdentity) -> ShardSource:
        with self.noting(identity):
            source = self._sources[identity] = self._open_source(identity)
        self._opened.callback(source.close)
        return source

    def join(self, image: ImageReader) -> None:
        """Open the images that hold parts of an image's tensors, and join them."""
        identity = image.identity
        for rank in image.co_owners:
            image.join(self.open(identity.checkpoint.shard(rank, identity.session_id), image))

    @contextmanager
    def noting(self, identity: ShardIdentity) -> Iterator[None]:
        """Context in which one image is read: what is wrong with it is noted, and raised."""
        try:
            yield
        except (StorageError, CorruptShardError) as error:
            self.bad[identity] = error
            raise

    def find_bad(
        self, error: StorageError | CorruptShardError, only: ShardIdentity | None = None
    ) -> None:
        """Note which images are bad after an error of reading some of them, or ``only`` one.

        Each is read by itself, since bytes are compared where they were read to, which others may
        write into. Raises RestoreError for a damage that none of them has.
        """
        suspects = [identity for identity in self._sources if only in (None, identity)]
        for identity in suspects:
            with suppress(StorageError, CorruptShardError), self.noting(identity):
                ImageBytes(self._sources[identity], identity).verify()
        is_found = bool(self.bad) if only is None else only in self.bad
        if not is_found and isinstance(error, StorageError):
            self.bad[suspects[0]] = error
        elif not is_found:
            raise RestoreError(
                f"the state cannot be read: {error}, though every byte of the shard matches its "
                f"digest when it is read by itself. Something else writes into the tensors or "
                f"buffers that it is read into, the memory or the bus is defective, or another "
                f"program made the file"
            ) from error

    def close(self) -> None:
        self._opened.close()
        # Errors refer to the frames that they came through, and so to what was to be filled.
        self.bad.clear()


def _copy_up(flat: torch.Tensor, bounce: BounceBuffers, offset: int, data: memoryview) -> None:
    """Begin to copy bytes to their place in device memory."""
    bounce.begin(flat[offset : offset + len(data)], torch.frombuffer(data, dtype=torch.uint8))


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


def _make_tensor(entry: TableEntry, bases: Mapping[str, torch.Tensor]) -> torch.Tensor:
    dtype = entry.torch_dtype()
    strides = entry.strides
    if strides is None:
        strides = torch.empty(entry.shape, device="meta").stride()
    if entry.slot is None:
        tensor = torch.empty_strided(entry.shape, strides, dtype=dtype, device="meta")
    else:
        base = bases[entry.slot]
        tensor = torch.empty(0, dtype=dtype, device=base.device)
        tensor.set_(base.untyped_storage(), entry.offset // dtype.itemsize, entry.shape, strides)
    return _of_kind(entry, tensor)


def _of_kind(entry: TableEntry, tensor: torch.Tensor) -> torch.Tensor:
    if entry.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    if entry.kind == "buffer":
        tensor = torch.nn.Buffer(tensor)
    return tensor.requires_grad_(entry.requires_grad)


def _without_data(entry: TableEntry) -> torch.Tensor:
    if entry.slot is None:
        return _make_tensor(entry, {})
    base = torch.empty(entry.reach_nbytes(), dtype=torch.uint8, device="meta")
    return _make_tensor(entry, {entry.slot: base})
