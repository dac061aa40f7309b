"""A checkpoint outside of its job: its tensors by their global keys, each read when asked for.

There is no process group. Tensors that were sharded are put together from the shards of all ranks,
from the stores of one or more nodes, or from shared storage; every block is verified as it is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from localckpt.availability.explanation import ExplainedCheckpoint
from localckpt.cli.gathered import Found, explain_session, gather, read_store
from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    NoReplicasAvailableError,
    StorageError,
)
from localckpt.failure_texts import ranges
from localckpt.global_tier.folders import SharedCheckpoint, SharedSession, find_shared_sessions
from localckpt.global_tier.load import ReshardingLoadPlanner
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.memory.tensor_bytes import flat_bytes
from localckpt.state_dict.boxes import (
    Rectangle,
    Region,
    common,
    rectangles_of,
    text_of,
    whole,
    without,
)
from localckpt.state_dict.names import OURS
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.saved_shard import PRIVATE, SavedShard
from localckpt.state_dict.values import Unit, digest_of
from localckpt.storage.catalog import find_sessions
from localckpt.storage.files import FileSource
from localckpt.storage.names import shared_path

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHOWN = 10
_MOST_OPEN = 128


class SavedTensor(NamedTuple):
    """What a checkpoint says of a tensor.

    Attributes:
        ranks: Ranks whose shards hold parts of it; empty on shared storage, which does not tell.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Source(Protocol):
    """Tensors and other values of one checkpoint, by their keys."""

    tensors: dict[str, SavedTensor]
    values: dict[str, Callable[[], Any]]

    def read(self, key: str) -> torch.Tensor: ...

    def close(self) -> None: ...


class SavedCheckpoint(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint by their global keys, read-only; :meth:`close` closes its files.

    ``checkpoint[key]`` reads a tensor into new host memory: whole, of the dtype that was saved, and
    verified. Keys are paths in the state, as ``"model.layers.0.weight"``, or Megatron-Core's own.

    Attributes:
        where: What it is read from, for people.
        session, iteration, world_size: Of the job that saved it.
    """

    def __init__(
        self, source: _Source, where: str, session: str, iteration: int, world_size: int
    ) -> None:
        self._source = source
        self.where, self.session = where, session
        self.iteration, self.world_size = iteration, world_size

    def __getitem__(self, key: str) -> torch.Tensor:
        """Read a tensor.

        Raises:
            KeyError: The checkpoint has no such tensor.
            MismatchError: Several ranks have saved a tensor of that key, each its own.
            CorruptShardError, StorageError: No copy of some shard can be read.
        """
        self.describe(key)
        return self._source.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.tensors)

    def __len__(self) -> int:
        return len(self._source.tensors)

    def __enter__(self) -> SavedCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<iteration {self.iteration} of {self.where}: {len(self)} tensors>"

    def describe(self, key: str) -> SavedTensor:
        """Return dtype, global shape, and ranks of a tensor; raises KeyError."""
        return self._source.tensors[key]

    @property
    def value_keys(self) -> list[str]:
        """Keys of what the state has beside tensors, as step numbers."""
        return list(self._source.values)

    def value(self, key: str) -> Any:
        """Return what is no tensor; raises KeyError, and MismatchError as reading a tensor does."""
        return self._source.values[key]()

    def close(self) -> None:
        """Close all files; may be called twice."""
        self._source.close()


def open_checkpoint(
    *directories: str | Path,
    iteration: int | None = None,
    session: str | None = None,
    rank: int | None = None,
    safe_globals: Iterable[Any] = (),
) -> SavedCheckpoint:
    """Open a checkpoint outside of its job, to read its tensors.

    Args:
        directories: The stores of one or more nodes, roots on shared storage, or folders of such.
        iteration: Which checkpoint; what a restart would load by default.
        session: The job's session; not needed where there is only one.
        rank: Whose tensors and values are meant, where each rank has its own of one key. By
            default they are given where all ranks have saved the same, and are an error elsewhere.
        safe_globals: Classes of the state, as given to the manager that saved it.

    Raises:
        NoReplicasAvailableError: There is no such checkpoint, or a shard of it is in no directory.
        StorageError: A directory cannot be read, or is no store.
        MismatchError: There are several sessions.
        UnsafeGlobalError: The state has objects of classes that are not allowed.
    """
    if not directories:
        raise CheckpointingException("give open_checkpoint() at least one directory")
    stores: dict[Path, dict[str, Found]] = {}
    roots: list[SharedSession] = []
    given = [*map(shared_path, directories)]
    for url in (url for url in given if isinstance(url, str)):
        roots += find_shared_sessions(url)
    for path in _expanded(path for path in given if isinstance(path, Path)):
        if shared := find_shared_sessions(path):
            roots += shared
        else:
            stores[path] = read_store(path)
    where = ", ".join(map(str, directories))
    names = {name for found in stores.values() for name in found}
    names |= {root.session_id for root in roots}
    if session is None and len(names) > 1:
        listed = ", ".join(map(repr, sorted(names)))
        raise MismatchError(f"{where} has several sessions: say which, session= one of {listed}")
    if session is None and names:
        (session,) = names
    if session is None or session not in names:
        raise NoReplicasAvailableError(f"{where} has no checkpoint of session {session or ''!r}")
    explanation, files = explain_session(session, gather(stores, logger.warning), None)
    of_shared = [
        known
        for root in roots
        if root.session_id == session
        for known in root.checkpoints()
        if known.problem is None
    ]
    complete = [standing for standing in explanation.checkpoints if standing.is_complete]
    if iteration is None:
        on_nodes = [s for s in complete if s.checkpoint == explanation.loads]
        of_shared = sorted(of_shared, key=lambda known: known.folder.version)[-1:]
    else:
        on_nodes = [s for s in complete if s.checkpoint.iteration == iteration]
        of_shared = [known for known in of_shared if known.folder.iteration == iteration]
    if not on_nodes and not of_shared:
        raise NoReplicasAvailableError(_why_none(where, iteration, complete, roots, session))
    allowed = SafeGlobals(safe_globals)
    if on_nodes and not (of_shared and _is_above(of_shared[0], on_nodes[0].checkpoint)):
        checkpoint = _readable(on_nodes[0])
        copies: dict[int, list[Path]] = {}
        for file in files:
            if file.record.identity.checkpoint == checkpoint and file.record.group is None:
                copies.setdefault(file.record.identity.rank, []).append(file.path)
        source: _Source = _NodeShards(checkpoint, session, copies, allowed, rank)
        return SavedCheckpoint(source, where, session, checkpoint.iteration, checkpoint.world_size)
    known = of_shared[0]
    source = _SharedFiles(known, safe_globals, rank)
    named = str(known.folder.path), session, known.folder.iteration, known.record.world_size
    return SavedCheckpoint(source, *named)


def _expanded(directories: Iterable[Path]) -> Iterator[Path]:
    """Yield stores and roots; of a folder that is none of these, those in it."""
    for directory in directories:
        if (why_not := _why_no_store(directory)) is None:
            yield directory
            continue
        inside = sorted(directory.iterdir()) if directory.is_dir() else []
        found = [path for path in inside if path.is_dir() and _why_no_store(path) is None]
        if not found:
            raise why_not
        yield from found


def _why_no_store(path: Path) -> StorageError | None:
    """Say why a directory is neither a store nor a root; raises one that cannot be read."""
    try:
        if not find_shared_sessions(path):
            find_sessions(path)
    except StorageError as error:
        if error.__cause__ is not None:
            raise
        return error
    return None


def _is_above(known: SharedCheckpoint, checkpoint: Checkpoint) -> bool:
    return known.folder.iteration > checkpoint.iteration


def _readable(standing: ExplainedCheckpoint) -> Checkpoint:
    """Return a checkpoint of which each shard is in a file."""
    if standing.computed:
        raise NoReplicasAvailableError(
            f"the shards of ranks {ranges(sorted(standing.computed))} of iteration "
            f"{standing.checkpoint.iteration} are in no store that was given, and are computed "
            f"from other pieces by a job that resumes: give the stores of their nodes too, resume "
            f"with as many ranks, or take another iteration"
        )
    return standing.checkpoint


def _why_none(
    where: str,
    iteration: int | None,
    complete: Sequence[ExplainedCheckpoint],
    roots: Sequence[SharedSession],
    session: str,
) -> str:
    shared = {k.folder.iteration for r in roots if r.session_id == session for k in r.whole()}
    there = sorted({s.checkpoint.iteration for s in complete} | shared, reverse=True)
    listed = ", ".join(map(str, there[:_SHOWN])) or "none"
    wanted = "no complete checkpoint" if iteration is None else f"no complete iteration {iteration}"
    return f"{where} has {wanted}; complete are: {listed}. `localckpt explain` says what is lacking"


# The nodes.


class _Held(NamedTuple):
    """Part of a tensor in the shard of a rank, and the text for what it is said to equal."""

    rank: int
    number: int
    runs: Region
    equal_on: str


@dataclass
class _NodeShards:
    """Shards of one checkpoint on the nodes.

    ``copies`` are the files of each rank's shard; one that turns out bad is left for the next.
    """

    _checkpoint: Checkpoint
    _session: str
    _copies: Mapping[int, list[Path]]
    _allowed: SafeGlobals
    _rank: int | None
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    values: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world_size = self._checkpoint.world_size
        if self._rank is not None and not 0 <= self._rank < world_size:
            raise MismatchError(f"rank={self._rank}, and {world_size} ranks have saved it")
        self._shards: dict[int, SavedShard] = {}
        self._files: dict[Path, FileSource] = {}
        self._held: dict[str, list[_Held]] = {}
        self._aliases: dict[str, str] = {}
        self._values: dict[str, dict[int, Any]] = {}
        try:
            for rank in range(world_size):
                self._with(rank, self._add)
        except BaseException:
            self.close()
            raise
        for alias, key in self._aliases.items():
            if alias not in self.tensors:
                self.tensors[alias] = self.tensors[key]
        for key, of_rank in self._values.items():
            self.values[key] = partial(self._one_value, key, of_rank)

    def close(self) -> None:
        for source in self._files.values():
            source.close()
        self._files.clear()

    def opened(self, path: Path) -> FileSource:
        """Return the open file of a path; the one that was opened first is closed for it."""
        if path not in self._files:
            if len(self._files) == _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = FileSource(path)
        return self._files[path]

    def read(self, key: str) -> torch.Tensor:
        key = self._aliases.get(key, key) if key not in self._held else key
        dtype, shape, _ = self.tensors[key]
        out = torch.empty(shape, dtype=dtype)
        # Disjoint regions, by the text for what they are said to equal.
        lacking, filled = [whole(shape)], list[tuple[str, Region]]()
        for held in self._held[key]:
            before = list(filled)
            for left in lacking:
                if (region := common(left, held.runs)) is not None:
                    self._read(held, region, out, is_compared=False, key=key)
                    filled.append((held.equal_on, region))
            lacking = [part for left in lacking for part in without(left, held.runs)]
            # What is not said to be equal has to be, or it is nobody's and each rank's own.
            for equal_on, region in before:
                both = common(region, held.runs)
                if equal_on != held.equal_on and both is not None:
                    self._read(held, both, out, is_compared=True, key=key)
        if lacking:
            raise CorruptShardError(f"{key}: elements {text_of(lacking[0])} are in no shard")
        return out

    def _read(
        self, held: _Held, region: Region, out: torch.Tensor, *, is_compared: bool, key: str
    ) -> None:
        for rectangle in rectangles_of(region):
            place = _place_in(out, rectangle)
            values = torch.empty_like(place) if is_compared else place
            part = held.number, rectangle, values
            self._with(held.rank, partial(SavedShard.read_parts, parts=[part]))
            if is_compared and not torch.equal(_bits(values), _bits(place)):
                others = [other.rank for other in self._held[key] if other.rank != held.rank]
                raise MismatchError(
                    f"{key!r} is each rank's own: rank {held.rank} has saved it otherwise than "
                    f"{'rank' if len(others) == 1 else 'others of ranks'} {ranges(others)}. Say "
                    f"whose is meant, rank="
                )

    def _add(self, shard: SavedShard) -> None:
        """Note what a shard holds."""
        rank = shard.identity.rank
        is_asked = self._rank in (None, rank)
        keys: dict[int, str] = {}
        for number, box in shard.tensors.items():
            keys[number] = box.key
            equal_on = shard.equal_on(number)
            if equal_on == PRIVATE:
                if not is_asked:
                    continue
                equal_on = f"rank {rank}"
            dtype, known = shard.entries[number].torch_dtype(), self.tensors.get(box.key)
            if known is not None and known[:2] != (dtype, box.shape):
                raise MismatchError(
                    f"{box.key!r} is each rank's own: rank {known.ranks[0]} has saved it as "
                    f"{known.dtype} of shape {list(known.shape)}, and rank {rank} as {dtype} of "
                    f"shape {list(box.shape)}. Say whose is meant, rank="
                )
            ranks = (rank,) if known is None else tuple({**dict.fromkeys(known.ranks), rank: None})
            self.tensors[box.key] = SavedTensor(dtype, box.shape, ranks)
            self._held.setdefault(box.key, []).append(_Held(rank, number, box.runs, equal_on))
        for path, number in shard.other_paths():
            if number in keys:
                self._aliases.setdefault(path, keys[number])
        if is_asked:
            for unit in SavedShard.values([*shard.others, *shard.ruled]):
                if unit.place and unit.place[0] != OURS:
                    self._values.setdefault(unit.key, {})[rank] = unit

    def _one_value(self, key: str, of_rank: Mapping[int, Unit]) -> Any:
        digests = {rank: digest_of(unit.value, str) for rank, unit in of_rank.items()}
        if len(set(digests.values())) > 1:
            raise MismatchError(
                f"{key!r} is each rank's own: it differs between ranks "
                f"{ranges(sorted(digests))}. Say whose is meant, rank="
            )
        return next(iter(of_rank.values())).value

    def _with(self, rank: int, act: Callable[[SavedShard], T]) -> T:
        """Call ``act`` with a rank's shard; with another copy of it where one is no good."""
        while True:
            try:
                return act(self._shard(rank))
            except (CorruptShardError, StorageError) as error:
                self._shards.pop(rank, None)
                if len(self._copies[rank]) == 1:
                    raise
                bad = self._copies[rank].pop(0)
                logger.warning("another copy than %s is read: %s", bad, error)

    def _shard(self, rank: int) -> SavedShard:
        if rank not in self._shards:
            identity: ShardIdentity = self._checkpoint.shard(rank, self._session)
            source = _ShardFile(self, self._copies[rank][0])
            like = next(iter(self._shards.values()), None)
            shard = SavedShard(source, self._allowed, identity, like)
            shard.read_values(())
            self._shards[rank] = shard
        return self._shards[rank]


class _ShardFile:
    """Source of a shard whose file is open while it is read: a job may have many ranks."""

    def __init__(self, shards: _NodeShards, path: Path) -> None:
        self._shards, self._path = shards, path

    @property
    def nbytes(self) -> int:
        return self._shards.opened(self._path).nbytes

    @property
    def threads(self) -> int:
        return self._shards.opened(self._path).threads

    def read(self, start: int, stop: int) -> memoryview:
        return self._shards.opened(self._path).read(start, stop)

    def read_into(self, start: int, parts: Sequence[memoryview]) -> None:
        self._shards.opened(self._path).read_into(start, parts)

    def close(self) -> None:
        """The files are those of the checkpoint, which closes them."""


def _place_in(out: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    sides = zip(*rectangle, strict=True)
    return out[tuple(slice(start, start + size) for start, size in sides)]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return flat_bytes(values.contiguous())


# Shared storage.


class _SharedFiles:
    """Files of one checkpoint on shared storage."""

    def __init__(
        self, known: SharedCheckpoint, safe_globals: Iterable[Any], rank: int | None
    ) -> None:
        if rank not in (None, 0):
            raise MismatchError(
                f"rank={rank}: shared storage has what the first rank had of each rank's own "
                f"values; those of other ranks are loaded by a job that resumes. Give rank=0, or "
                f"the stores of the nodes"
            )
        self._unequal = () if rank == 0 else known.record.unequal
        record = known.record
        self._reader = CachedMetadataFileSystemReader(
            known.folder.path,
            share_metadata=False,
            safe_globals=safe_globals,
            save_id=record.save_id,
            metadata_digest=record.metadata_digest,
        )
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._safe_globals = tuple(safe_globals)
        described = self._metadata.state_dict_metadata
        self.tensors = {
            key: SavedTensor(told.properties.dtype, tuple(told.size))
            for key, told in described.items()
            if isinstance(told, TensorStorageMetadata)
        }
        self.values: dict[str, Callable[[], Any]] = {
            key: partial(self._load, key, None)
            for key in described
            if key not in self.tensors and key.partition(".")[0] != OURS
        }

    def read(self, key: str) -> torch.Tensor:
        dtype, shape, _ = self.tensors[key]
        tensor: torch.Tensor = self._load(key, torch.empty(shape, dtype=dtype))
        return tensor

    def close(self) -> None:
        """Nothing is open between reads."""

    def _load(self, key: str, target: Any) -> Any:
        if key in self._unequal:
            raise MismatchError(
                f"{key!r} is each rank's own: it differs between ranks, and shared storage has the "
                f"first rank's. Say that it is meant, rank=0"
            )
        state = {key: target}
        planner = ReshardingLoadPlanner(safe_globals=self._safe_globals)
        planner.set_up_planner(state, self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return planner.original_state_dict[key]
