"""Part of a job's global tensors that each tensor of a state is.

DTensor and the ShardedTensors of torch and Megatron-Core say it themselves, and a :class:`Chunk`
around a plain tensor; others are whole where :func:`localckpt.replicated` marks them. All others
are private to their rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy
import torch

from localckpt.errors import CheckpointingException
from localckpt.state_dict.basic import TensorAwareStateDict
from localckpt.state_dict.boxes import Box, RankSet, Run, narrowed_runs
from localckpt.state_dict.containers import named_values
from localckpt.state_dict.foreign_values import ArrayTensor
from localckpt.state_dict.replicated import Chunk, Replicated
from localckpt.state_dict.sharded import is_sharded


class Job(NamedTuple):
    """Job that a rank saves with: its ranks, as torch.distributed numbers them.

    ``own`` is this one's number in meshes of a process group that there was before.
    """

    rank: int
    ranks: Sequence[int]
    own: int | None = None


_Kind = Literal["plain", "DTensor", "ShardedTensor", "Megatron", "other"]
_TELLING = frozenset({"DTensor", "ShardedTensor", "Megatron"})


class Teller(NamedTuple):
    """Value that says which part of a global tensor its tensors are, and ranks that mark it."""

    path: str
    value: Any
    kind: _Kind
    marked: Sequence[int] | None

    def outline(self) -> tuple[Any, ...]:
        """Collect all that the boxes depend on, for a quick comparison between saves."""
        path, value, kind, marked = self
        if kind == "DTensor":
            spec = value._spec
            order = getattr(spec, "shard_order", None)
            return path, marked, spec.mesh, spec.placements, value.shape, order
        if kind == "Megatron":
            offset, prepended = value.global_offset, value.prepend_axis_num
            return path, marked, value.key, value.global_shape, offset, prepended
        if kind == "ShardedTensor":
            offsets = [shard.metadata.shard_offsets for shard in value.local_shards()]
            return path, marked, value.metadata().size, offsets
        return path, marked


class NamedTensors(NamedTuple):
    """Paths of the tensors in a state's containers by ``id(tensor)``, and all its tellers.

    The inner tensors of a DTensor, a ShardedTensor or another wrapper get paths from the wrapper's.
    """

    names: dict[int, str]
    tellers: list[Teller]


def named(state: Any, take: Callable[..., bool] | None = None) -> NamedTensors:
    """Find the names and tellers of a state, but in values that ``take`` returns true for.

    It is called with each container, the keys of its path, and the ranks that mark it.
    """
    found = NamedTensors({}, [])
    root = vars(state) if isinstance(state, TensorAwareStateDict) else state
    _collect(root, "", None, found, take)
    return found


def paths_of(tensors: Sequence[torch.Tensor], names: Mapping[int, str]) -> list[str | None]:
    """Return the paths of tensors, of which those of arrays are named by the array."""
    named: Iterable[Any] = tensors
    if ArrayTensor in set(map(type, tensors)):
        named = (t.array if type(t) is ArrayTensor else t for t in tensors)
    return list(map(names.get, map(id, named)))


def _collect(
    root: Any,
    above: str,
    marked: Sequence[int] | None,
    found: NamedTensors,
    take: Callable[..., bool] | None,
) -> None:
    wanted = (torch.Tensor, numpy.ndarray, Replicated, *megatron_classes())
    names, tellers = found
    kinds: dict[type, _Kind] = {torch.Tensor: "plain", torch.nn.Parameter: "plain"}
    takes = partial(take, marked=marked) if take else None
    for path, value in named_values(root, wanted, above, takes):
        path = path.removeprefix("state_dict.")
        if type(value) is Replicated:
            if marked is not None:
                raise CheckpointingException(
                    f"the state cannot be saved: {path!r} is marked by replicated() inside of a "
                    f"part that is marked already. Mark each part once, with the ranks that have "
                    f"it in common"
                )
            _collect(value.value, path, value.ranks, found, take)
            continue
        names.setdefault(id(value), path)
        if (kind := kinds.get(type(value))) is None:
            kind = kinds[type(value)] = _kind_of(value)
        if kind != "plain":
            for inner_path, inner in _made_of(path, value):
                names.setdefault(id(inner), inner_path)
        if marked is not None or kind in _TELLING:
            tellers.append(Teller(path, value, kind, marked))


def _made_of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the paths of a tensor and of its inner tensors."""
    yield path, value
    if (kind := _kind_of(value)) == "plain":
        return
    if kind == "ShardedTensor":
        inner = [(str(number), s.tensor) for number, s in enumerate(value.local_shards())]
    elif kind == "Megatron":
        if isinstance(value.data, torch.Tensor):
            path = path if type(value) is Chunk else f"{path}.data"
            yield from _made_of(path, value.data)
        return
    elif callable(flatten := getattr(value, "__tensor_flatten__", None)):
        # Some versions of torch flatten a DTensor to its mesh, too.
        parts = ((name, getattr(value, name)) for name in flatten()[0])
        inner = [(name, part) for name, part in parts if isinstance(part, torch.Tensor)]
    else:
        return
    for name, tensor in inner:
        yield from _made_of(path if len(inner) == 1 else f"{path}.{name}", tensor)


def boxes_of(
    tellers: Sequence[Teller], tensors: Sequence[torch.Tensor], job: Job
) -> dict[int, Box]:
    """Return the boxes of a state's tensors by their numbers, with ranks of the job."""
    numbers = {
        id(tensor.array) if type(tensor) is ArrayTensor else id(tensor): number
        for number, tensor in enumerate(tensors)
    }
    sets, parts = _RankSets(job), LocalParts(job.own)
    boxes: dict[int, Box] = {}
    paths: Counter[str] = Counter()
    for teller in tellers:
        for tensor, box in _boxes(teller, sets, parts):
            number = numbers.get(id(tensor))
            # What a class says of its tensors may be impossible; a reader would refuse the image.
            if number is None or number in boxes or not parts.fits(box, tensors[number]):
                continue
            # Keys with dots in them can make one path of two.
            if teller.kind in ("plain", "DTensor", "other"):
                paths[box.key] += 1
                if paths[box.key] > 1:
                    box = box._replace(key=f"{box.key}#{paths[box.key]}")
            boxes[number] = box
    return dict(sorted(boxes.items()))


def _boxes(teller: Teller, sets: _RankSets, parts: LocalParts) -> Iterator[tuple[Any, Box]]:
    """Yield the tensors of a value with their boxes."""
    path, value, kind, marked = teller
    ranks = None if marked is None else sets.of(marked)
    if kind == "Megatron":
        # A range of a flattened tensor, in earlier versions of Megatron-Core, is no box.
        if value.data is not None and getattr(value, "flattened_range", None) is None:
            shape = tuple(map(int, value.global_shape))
            sizes = (1,) * value.prepend_axis_num + tuple(value.data.shape)
            yield value.data, Box(value.key, shape, _one_run(value.global_offset, sizes), ranks)
    elif kind == "DTensor":
        spec, shape = value._spec, tuple(value.shape)
        if has_other_order(value):
            return
        # A tensor made by DTensor.from_local() may be sharded as torch never does; the box does not
        # fit then.
        if (runs := parts.of(spec, shape)) is not None:
            yield value._local_tensor, Box(path, shape, runs, sets.of_mesh(path, spec, marked))
    elif kind == "ShardedTensor":
        for shard in value.local_shards():
            about = shard.metadata
            place = _one_run(about.shard_offsets, about.shard_sizes)
            size = tuple(value.metadata().size)
            yield shard.tensor, Box(path, size, place, ranks or sets.own)
    elif ranks is not None:
        for inner_path, inner in _made_of(path, value):
            shape = tuple(inner.shape)
            yield inner, Box(inner_path, shape, _one_run((0,) * len(shape), shape), ranks)


class LocalParts:
    """Parts of global tensors that a rank has, each computed once, however many tensors have it."""

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank
        self._of_specs: dict[tuple[Any, ...], tuple[tuple[Run, ...], ...] | None] = {}
        self._fitting: dict[tuple[Any, ...], bool] = {}

    def of(self, spec: Any, shape: tuple[int, ...]) -> tuple[tuple[Run, ...], ...] | None:
        """Return the runs that this rank has of a DTensor; ``None`` if no box can say them."""
        mesh, placements = spec.mesh, spec.placements
        # With the classes, since some versions of torch call placements of two classes equal.
        which = id(mesh), shape, placements, tuple(map(type, placements))
        if which not in self._of_specs:
            at = _place_in(mesh, self._rank)
            runs = None if at is None else shard_runs(shape, mesh.shape, at, placements)
            self._of_specs[which] = runs
        return self._of_specs[which]

    def fits(self, box: Box, tensor: torch.Tensor) -> bool:
        local = tuple(tensor.shape)
        which = local, box.shape, box.runs
        if which not in self._fitting:
            self._fitting[which] = box.fits(local)
        return self._fitting[which]


class _RankSets:
    """Sets of a job's ranks, each made once."""

    def __init__(self, job: Job) -> None:
        self.own, self._own = RankSet.of([job.rank]), job.own
        self._numbers = {rank: number for number, rank in enumerate(job.ranks)}
        self._of_markers: dict[int, RankSet] = {}
        self._of_meshes: dict[tuple[Any, ...], tuple[list[int], RankSet]] = {}

    def of(self, marked: Sequence[int]) -> RankSet:
        """Return the ranks of a marker."""
        if id(marked) not in self._of_markers:
            self._of_markers[id(marked)] = self._made(marked)
        return self._of_markers[id(marked)]

    def of_mesh(self, path: str, spec: Any, marked: Sequence[int] | None) -> RankSet:
        """Return the ranks that have the same part of a DTensor as this one."""
        mesh = spec.mesh
        kept = tuple(placement.is_replicate() for placement in spec.placements)
        which = (id(mesh), kept, None if marked is None else id(marked))
        if which not in self._of_meshes:
            own = zip(kept, _place_in(mesh, self._own) or (), strict=True)
            here = mesh.mesh[tuple(slice(None) if is_kept else at for is_kept, at in own)]
            equal = set(here.flatten().tolist())
            others = set(mesh.mesh.flatten().tolist()) - equal
            wrong = sorted(others.intersection(marked or ()))
            self._of_meshes[which] = wrong, self._made(equal.union(marked or ()))
        wrong, ranks = self._of_meshes[which]
        if wrong:
            raise CheckpointingException(
                f"the state cannot be saved: {path!r} is marked by replicated() as equal on rank "
                f"{wrong[0]}, and is a DTensor of which that rank has another part. Leave DTensors "
                f"out of the marker: they say by themselves which ranks are equal"
            )
        return ranks

    def _made(self, ranks: Iterable[int]) -> RankSet:
        return RankSet.of([self._numbers[rank] for rank in ranks if rank in self._numbers])


def _place_in(mesh: Any, rank: int | None) -> tuple[int, ...] | None:
    """Return a rank's place in a mesh, this process's by default; ``None`` outside of it.

    Not by what the mesh says itself. torch gives new DTensors the spec of an equal one, whose mesh
    is of an earlier process group where this rank may have had another number.
    """
    # A mesh exists only where it is imported.
    dist = sys.modules["torch.distributed"]
    if not dist.is_initialized():
        at = mesh.get_coordinate()
        return None if at is None else tuple(at)
    places = (mesh.mesh == (dist.get_rank() if rank is None else rank)).nonzero().tolist()
    return tuple(places[0]) if places else None


def shard_runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
) -> tuple[tuple[Run, ...], ...] | None:
    """Compute the runs of a DTensor's part; ``None`` for a placement of no known kind."""
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for parts, number, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            return None
        strides = int(getattr(placement, "split_factor", 1))
        runs[placement.dim] = _share(runs[placement.dim], strides, parts, number)
    return tuple(tuple(of) for of in runs)


def _share(runs: Sequence[Run], strides: int, parts: int, number: int) -> list[Run]:
    """Divide indices as ``torch.chunk`` does: into ``strides``, and each of these into parts."""
    total = sum(count for _, count in runs)
    taken: list[Run] = []
    for stride in range(strides):
        start, end = _chunk(0, total, strides, stride)
        start, end = _chunk(start, end, parts, number)
        for first, count in narrowed_runs(tuple(runs), start, end - start):
            # One run of those that follow each other.
            if count and taken and sum(taken[-1]) == first:
                first, before = taken.pop()
                count += before
            if count:
                taken.append((first, count))
    return taken or [(sum(runs[-1]), 0)]


def _chunk(start: int, end: int, parts: int, number: int) -> tuple[int, int]:
    size = -(-(end - start) // parts)
    low = min(start + number * size, end)
    return low, min(low + size, end)


def _one_run(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    return tuple(((int(a), int(n)),) for a, n in zip(offsets, sizes, strict=True))


def has_other_order(value: Any) -> bool:
    """Return whether the dimensions of its mesh divide a DTensor in another order than theirs."""
    order = getattr(value._spec, "shard_order", None) or ()
    return any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order)


def _kind_of(value: Any) -> _Kind:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return "plain"
    # A value of one of these classes exists only where its module is imported, which takes long.
    dtensors = sys.modules.get("torch.distributed.tensor")
    if dtensors is not None and isinstance(value, dtensors.DTensor):
        return "DTensor"
    if isinstance(value, torch.Tensor) and is_sharded(value):
        return "ShardedTensor"
    return "Megatron" if isinstance(value, megatron_classes()) else "other"


def megatron_classes() -> tuple[Any, ...]:
    """Return our Chunk, and Megatron-Core's ShardedTensor if it is imported."""
    module = sys.modules.get("megatron.core.dist_checkpointing.mapping")
    found = getattr(module, "ShardedTensor", None)
    return (Chunk,) if found is None else (Chunk, found)
