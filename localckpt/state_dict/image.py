"""Writing of a shard image: a state turned into one run of bytes.

Capture finds the tensors and the size, a write copies them into a buffer, and digests follow.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import xxhash

from localckpt.errors import CheckpointingException, RestoreError
from localckpt.ids import ShardIdentity
from localckpt.memory.copying import BlockCopies, Copier
from localckpt.memory.digests import BLOCK_NBYTES, BlockHasher
from localckpt.memory.gpu_copies import CopiesUnderWay, SideStreams, copy_to_host
from localckpt.memory.tensor_bytes import copy_values, flat_bytes, is_flat, storage_address
from localckpt.state_dict.boxes import render_boxes
from localckpt.state_dict.branches import Structure
from localckpt.state_dict.global_view import Job, Teller, boxes_of, named, paths_of
from localckpt.state_dict.header import Skeleton, render_header, render_slots
from localckpt.state_dict.layout import lay_out
from localckpt.state_dict.marks import unsaved_marks
from localckpt.state_dict.parts import Agreed, DividedSlot, divide_table, render_parts
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.refusals import require_loadable, take_or_refuse
from localckpt.state_dict.safe_globals import Name, SafeGlobals
from localckpt.state_dict.skeleton import Taken, collection_paused, insert_tensors
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.state_dict.tensor_table import Properties, Source, build_table, kind_of

logger = logging.getLogger(__name__)


@dataclass
class _Plan:
    """Results that every save reuses as long as the structure of the state stays the same."""

    names: tuple[list[str | None], list[str], list[Any]]
    """Paths and kinds of the tensors, and outlines of the tellers."""
    properties: Properties
    structure: Structure
    data_nbytes: int
    slots_json: bytes
    tables: tuple[bytes, bytes, bytes]
    """Tables of the skeleton: of tensors, of boxes and of parts."""
    runs: tuple[_Copy, ...]
    """Sources of the slots whose bytes are one run of host memory."""
    copies: BlockCopies
    """Copies of ``runs``."""
    others: tuple[_Copy, ...]
    """Sources of the other slots, in the order of their offsets."""
    agreed: tuple[Agreed, ...]
    _sources: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def sources(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the addresses of the bytes of ``runs``."""
        at = self.properties.addresses
        if self._sources[0] is not at:
            sources = [
                at[of.number]
                if of.span is None
                else storage_address(tensors[of.number]) + of.span[0]
                for of, _, _ in self.runs
            ]
            self._sources = at, sources
        return self._sources[1]


class _Copy(NamedTuple):
    """Source of one slot, and the place of the slot in the tensor data."""

    source: Source
    offset: int
    nbytes: int


class Written(NamedTuple):
    """Outcome of writing an image: bytes that digests cover, and copies that may go on."""

    covered_nbytes: int
    under_way: CopiesUnderWay
    has_digests: bool


class ImagePlanner:
    """Planner of images; keeps the layout of a state from save to save.

    A state that could not be loaded again is refused when its classes are first seen.
    """

    def __init__(self, allowed: SafeGlobals | None = None, job: Job | None = None) -> None:
        self._allowed = allowed or SafeGlobals()
        self._job = job
        # By the ranks that tensors are divided among: a save may divide nothing for once.
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._checked: bytes | None = None
        """Digest of the last skeleton that passed the check."""
        self._rebuilt: frozenset[Name] = frozenset()
        self._warned: set[str] = set()

    @collection_paused()
    def capture(self, state: Any, node_ranks: tuple[int, ...] = ()) -> Capture:
        """Find a state's tensors, of which ``node_ranks`` divide what is equal; copy none."""
        plan = self._plans.get(node_ranks)
        taken = None if plan is None else plan.structure.take_again(state)
        if plan is None or taken is None or not plan.properties.hold_of(taken.tensors):
            plan, taken = self._capture_anew(plan, state, node_ranks)
            self._plans[node_ranks] = plan
        elif taken.has_objects:
            self._require_loadable(state, taken, is_new=False)
        skeleton = Skeleton(*plan.tables, taken.skeleton).join()
        return Capture(plan, skeleton, taken.tensors, plan.sources(taken.tensors))

    def _capture_anew(
        self, plan: _Plan | None, state: Any, node_ranks: tuple[int, ...]
    ) -> tuple[_Plan, Taken]:
        taken = take_or_refuse(state, self._allowed)
        names, tellers = named(state)
        job, tellers = self._job or Job(0, ()), tellers if self._job else []
        structure = Structure(is_told=self._job is not None)
        taken = structure.divide(state, taken)
        # A state of literals and tensors alone can always be loaded.
        if taken.has_objects:
            self._require_loadable(state, taken, is_new=True)
        tensors, paths = taken.tensors, paths_of(taken.tensors, names)
        found = paths, list(map(kind_of, tensors)), [teller.outline() for teller in tellers]
        if plan is None or plan.names != found or not plan.properties.hold_of(tensors):
            self._warn_of_unsaved_marks(tensors, paths)
            plan = _plan(found, structure, tensors, tellers, job, node_ranks)
        plan.structure = structure
        return plan, taken

    def _require_loadable(self, state: Any, taken: Taken, *, is_new: bool) -> None:
        """Run a load's checks on the skeleton; for new classes, also rebuild the objects."""
        digest = xxhash.xxh3_128_digest(taken.checked)
        if digest == self._checked and not is_new:
            return
        skeleton, tensors = taken.skeleton, taken.tensors
        named = require_loadable(state, skeleton if is_new else taken.checked, self._allowed)
        if is_new or not named <= self._rebuilt:
            try:
                insert_tensors(skeleton, lambda number: tensors[number].detach(), self._allowed)
            except RestoreError as error:
                raise CheckpointingException(
                    f"the state cannot be saved, because it could not be loaded again: {error}"
                ) from error
            self._rebuilt = named
        self._checked = digest

    def _warn_of_unsaved_marks(
        self, tensors: Sequence[torch.Tensor], paths: Sequence[str | None]
    ) -> None:
        for tensor, path in zip(tensors, paths, strict=True):
            for name, kind in unsaved_marks(tensor).items():
                if name not in self._warned:
                    self._warned.add(name)
                    logger.warning(
                        "the attribute %r of tensors is not saved with them: %s has one of class "
                        "%s. Saved are numbers, text, dtypes, and containers of these",
                        name,
                        path or "a tensor",
                        kind.__qualname__,
                    )


@dataclass(frozen=True)
class Capture:
    """Tensors of a state, with the plan of their places in the image."""

    plan: _Plan
    skeleton: bytes
    tensors: list[torch.Tensor]
    sources: list[int]
    _headers: dict[ShardIdentity, tuple[bytes, int]] = field(default_factory=dict, init=False)

    @property
    def agreed(self) -> tuple[Agreed, ...]:
        """Agreements with other ranks, without which the parts of divided tensors do not fit."""
        return self.plan.agreed

    @property
    def data_nbytes(self) -> int:
        return self.plan.data_nbytes

    @property
    def gpu(self) -> torch.device | None:
        """GPU of the first tensor on one; ``None`` if no tensor is on a GPU."""
        return next((tensor.device for tensor in self.tensors if tensor.is_cuda), None)

    def nbytes(self, identity: ShardIdentity) -> int:
        return self._header(identity)[1]

    def covered_nbytes(self, identity: ShardIdentity) -> int:
        """Return the bytes of the image before its digests."""
        return len(self._header(identity)[0]) + self.data_nbytes + len(self.skeleton)

    def write(
        self,
        image: memoryview,
        identity: ShardIdentity,
        copier: Copier,
        streams: SideStreams,
        guarded: Collection[int] = (),
    ) -> Written:
        """Copy header, tensors and skeleton into ``image``; without GPU tensors, add the digests.

        Storages on GPUs whose addresses are ``guarded`` are not changed until their copies end.
        """
        if len(image) != self.nbytes(identity):
            raise ValueError(f"the buffer has {len(image)} bytes, and another size than the image")
        covered = self.covered_nbytes(identity)
        data, digests = image[:covered], image[covered:]
        from_gpus = self._put_others(data, 0, identity, {})
        later = [copy for copy in from_gpus if storage_address(copy[1]) in guarded]
        now = [copy for copy in from_gpus if storage_address(copy[1]) not in guarded]
        digest = None if from_gpus else partial(BlockHasher(identity).fill_block, digests)
        try:
            unguarded, under_way = streams.queue(now), streams.queue(later)
            self._copy_runs(data, 0, identity, copier, digest)
        except BaseException:
            # The caller frees the image now, so no copy into it may still be running.
            streams.synchronize()
            raise
        unguarded.wait()
        return Written(covered, under_way, not from_gpus)

    def write_pieces(
        self,
        pieces: Iterable[tuple[int, memoryview]],
        identity: ShardIdentity,
        copier: Copier,
        streams: SideStreams,
    ) -> None:
        """Write the image to memory that is given piece by piece, each with where it begins.

        Each piece is complete when the next is asked for, digests included.
        """
        covered, hasher = self.covered_nbytes(identity), BlockHasher(identity)
        digests = memoryview(bytearray(self.nbytes(identity) - covered))
        digest = partial(hasher.fill_block, digests)
        whole = dict[int, torch.Tensor]()
        for start, piece in pieces:
            data = piece[: max(0, covered - start)]
            from_gpus = self._put_others(data, start, identity, whole)
            try:
                queued = streams.queue(from_gpus)
                self._copy_runs(data, start, identity, copier, None if from_gpus else digest)
            except BaseException:
                streams.synchronize()
                raise
            queued.wait()
            for at in range(0, len(data) if from_gpus else 0, BLOCK_NBYTES):
                digest((start + at) // BLOCK_NBYTES, data[at : at + BLOCK_NBYTES])
            skipped = start + len(data) - covered
            piece[len(data) :] = digests[skipped : skipped + len(piece) - len(data)]

    def _put_others(
        self,
        memory: memoryview,
        begin: int,
        identity: ShardIdentity,
        whole: dict[int, torch.Tensor],
    ) -> list[tuple[memoryview, torch.Tensor]]:
        """Put all but runs of host memory into ``memory``, the image from ``begin`` on.

        Returns what is left to copy from GPUs. ``whole`` keeps the tensor that lies in several
        pieces, as one run of bytes.
        """
        header, end = self._header(identity)[0], begin + len(memory)
        data_start, covered = len(header), self.covered_nbytes(identity)
        from_gpus: list[tuple[memoryview, torch.Tensor]] = []
        for at, content in ((0, header), (covered - len(self.skeleton), self.skeleton)):
            first, last = max(at, begin), min(at + len(content), end)
            if first < last:
                memory[first - begin : last - begin] = content[first - at : last - at]
        others = self.plan.others
        before = bisect_right(others, begin - data_start, key=attrgetter("offset"))
        for source, offset, nbytes in islice(others, max(0, before - 1), None):
            at = data_start + offset
            first, last = max(at, begin), min(at + nbytes, end)
            if at >= end:
                break
            if first >= last:
                continue
            tensor = source.value(self.tensors[source.number].detach())
            if last - first < nbytes:
                if offset not in whole:
                    whole.clear()
                    whole[offset] = _contiguous(tensor)
                tensor = flat_bytes(whole[offset])[first - at : last - at]
            place = memory[first - begin : last - begin]
            if tensor.is_cpu:
                copy_to_host(place, tensor)
            else:
                from_gpus.append((place, tensor))
        return from_gpus

    def _copy_runs(
        self,
        memory: memoryview,
        begin: int,
        identity: ShardIdentity,
        copier: Copier,
        digest: Callable[[int, memoryview], None] | None,
    ) -> None:
        data_start, first = len(self._header(identity)[0]), begin // BLOCK_NBYTES
        copies, sources = self.plan.copies, self.sources
        copies.copy(memory, data_start, sources, copier, digest, self.tensors, first)

    def fill(self, bucket: torch.Tensor, image: memoryview, data_start: int, start: int) -> None:
        """Fill a uint8 bucket in device memory with bytes of the written image from ``start`` on.

        Tensors on the bucket's device are copied on the device; all other bytes come from the
        image.
        """
        stop, done = start + bucket.numel(), start
        for copy in self.plan.others:
            offset = data_start + copy.offset
            begin, end = max(start, offset), min(stop, offset + copy.nbytes)
            if begin >= end:
                continue
            tensor = copy.source.value(self.tensors[copy.source.number].detach())
            if tensor.device != bucket.device or not is_flat(tensor):
                continue
            _copy_up(bucket[done - start : begin - start], image[done:begin])
            data = flat_bytes(tensor)[begin - offset : end - offset]
            bucket[begin - start : end - start].copy_(data)
            done = end
        _copy_up(bucket[done - start :], image[done:stop])

    def _header(self, identity: ShardIdentity) -> tuple[bytes, int]:
        if identity not in self._headers:
            sizes = self.data_nbytes, len(self.skeleton)
            self._headers[identity] = render_header(self.plan.slots_json, *sizes, identity)
        return self._headers[identity]


def write_digests(image: memoryview, covered_nbytes: int, identity: ShardIdentity) -> None:
    """Write the digests behind the bytes that they cover, which completes the image."""
    BlockHasher(identity).fill(image, covered_nbytes)


def pack(state: Any, identity: ShardIdentity, planner: ImagePlanner | None = None) -> MemorySource:
    """Write a state's image into new memory."""
    capture = (planner or ImagePlanner()).capture(state)
    image = memoryview(bytearray(capture.nbytes(identity)))
    capture.write_pieces([(0, image)], identity, Copier(1), SideStreams())
    return MemorySource(image)


def unpack(
    source: ShardSource,
    *,
    expect: ShardIdentity | None = None,
    allowed: SafeGlobals | None = None,
    map_location: str | torch.device | None = None,
) -> Any:
    """Load the state of an image into new tensors, with every block verified."""
    reader = ImageReader(source, allowed or SafeGlobals(), expect)
    return reader.restore(map_location=map_location)


def _plan(
    found: tuple[list[str | None], list[str], list[Any]],
    structure: Structure,
    tensors: list[torch.Tensor],
    tellers: Sequence[Teller],
    job: Job,
    node_ranks: tuple[int, ...],
) -> _Plan:
    names = {id(tensor): path for tensor, path in zip(tensors, found[0], strict=True) if path}
    table, boxes = build_table(tensors, names), boxes_of(tellers, tensors, job)
    parts, agreed = dict[str, DividedSlot](), tuple[Agreed, ...]()
    if len(node_ranks) > 1:
        table, parts, agreed = divide_table(table, boxes, job.rank, node_ranks)
    layout = lay_out(table.slots)
    # Runs of host memory, and others.
    runs, others = list[_Copy](), list[_Copy]()
    for slot, source in zip(layout.slots, table.sources, strict=True):
        if slot.nbytes:
            value = source.value(tensors[source.number].detach())
            is_run = value.is_cpu and is_flat(value)
            (runs if is_run else others).append(_Copy(source, slot.offset, slot.nbytes))
    others.sort(key=lambda copy: copy.offset)
    copies = BlockCopies((run.offset, run.nbytes) for run in runs)
    tables = table.to_json(), render_boxes(boxes), render_parts(parts)
    texts = render_slots(layout), tables
    state = found, Properties(tensors), structure
    return _Plan(*state, layout.nbytes, *texts, tuple(runs), copies, tuple(others), agreed)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose value is one run of bytes, where it lies."""
    if is_flat(tensor):
        return tensor
    run = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_values(run, tensor)
    return run


def _copy_up(place: torch.Tensor, image: memoryview) -> None:
    if len(image):
        place.copy_(torch.frombuffer(image, dtype=torch.uint8))
