"""Restoring of states from images, on this node or sent by a peer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import described, with_class
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.managers.progress import CountedSource, ReadProgress
from localckpt.options import PrivateRule
from localckpt.state_dict.basic import TensorAwareStateDict, freedom_in, wrapped
from localckpt.state_dict.identify import verify
from localckpt.state_dict.names import Names, read_names
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource, ShardSource
from localckpt.state_dict.targets import (
    STRICT,
    LetsGo,
    TargetRules,
    Targets,
    find_targets,
    let_nothing_go,
)
from localckpt.storage.hooks import HookStore
from localckpt.storage.problem import Problem
from localckpt.storage.store import Store

__all__ = [
    "BadPartError",
    "LoadOptions",
    "Loaded",
    "PartsElsewhereError",
    "compare_with_shard",
    "incurable",
    "restore",
    "verify_again",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """Options of one load, for its state."""

    into: TensorAwareStateDict | None = None
    given: Any = field(default=None, compare=False)
    """``into`` as the caller gave it."""
    map_location: str | torch.device | None = None
    rules: TargetRules = STRICT
    """Ways in which what was saved may differ from ``into``."""
    private: Mapping[str, PrivateRule] | None = None
    """Rules for values of single ranks, by key prefix; ``None`` for those of the manager."""

    @cached_property
    def targets(self) -> Targets | None:
        """The tensors of ``into``; raises as :func:`find_targets`."""
        return None if self.into is None else find_targets(self.into, self.rules)

    @classmethod
    def of(
        cls,
        into: Any,
        map_location: str | torch.device | None = None,
        *,
        is_partial: bool = False,
        converts: bool = False,
        lets_go: LetsGo = let_nothing_go,
        named: frozenset[str] = frozenset(),
        compare: Callable[[Names, Names], Mapping[str, list[str]]] | None = None,
        private: Mapping[str, PrivateRule] | None = None,
    ) -> LoadOptions:
        """Make the options from the arguments of a caller."""
        rules = TargetRules(freedom_in(into), is_partial, converts, lets_go, named)
        if compare is not None:
            rules = replace(rules, compare=compare)
        return cls(None if into is None else wrapped(into), into, map_location, rules, private)


@dataclass(frozen=True)
class Loaded:
    """Shard that was read and verified.

    Attributes:
        left: Keys of stateful values that stay as they are.
    """

    checkpoint: Checkpoint
    state: Any
    nbytes: int
    came_from: str
    left: frozenset[str] = frozenset()


class PartsElsewhereError(CheckpointingException):
    """Parts of a shard's tensors are in shards that are not on this node.

    Args:
        ranks: The ranks whose shards they are in.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        shown = ", ".join(map(str, ranks))
        super().__init__(f"parts of its tensors are in the shards of ranks {shown}")
        self.ranks = tuple(ranks)


class BadPartError(CheckpointingException):
    """A shard that holds parts of another one's tensors cannot be read, or is damaged.

    Args:
        rank: The rank whose shard it is.
        error: What is wrong with it.
    """

    def __init__(self, rank: int, error: StorageError | CorruptShardError) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error


def restore(
    store: Store,
    identity: ShardIdentity,
    arrived: Mapping[int, memoryview],
    options: LoadOptions,
    allowed: SafeGlobals,
    held: Container[int] | None = None,
) -> tuple[Any, int]:
    """Read a shard, from this node or, if it has ``arrived``, from a peer's bytes.

    Args:
        store: Where the shards of this node are.
        identity: Identity of the shard.
        arrived: Images that peers have sent, or that were computed here, by the rank.
        options: How the caller wants its state.
        allowed: Classes and functions that the shard may name.
        held: Ranks whose shards are on this node; ``None`` if that is not known.

    Returns:
        The state, and the bytes that were read for it: 0 for a state that the hooks gave as it is.

    Raises:
        PartsElsewhereError: Parts of its tensors are in shards that are not here.
        BadPartError: A shard that holds parts of its tensors cannot be read, or is damaged.
        CorruptShardError: Some bytes are bad, also when they are read by themselves.
        RestoreError: They are good, and the state cannot be made of them.
    """
    is_plain = options == LoadOptions()
    if isinstance(store, HookStore) and is_plain and identity.rank not in arrived:
        state, nbytes = store.load(identity), 0
    else:
        state, nbytes = _read(store, identity, arrived, options, allowed, held)
    if not store.keeps_images and is_plain:
        state.restore_tensor_device(non_blocking=False)
    return state, nbytes


def _read(
    store: Store,
    identity: ShardIdentity,
    arrived: Mapping[int, memoryview],
    options: LoadOptions,
    allowed: SafeGlobals,
    held: Container[int] | None,
) -> tuple[Any, int]:
    source = _opened(store, identity, arrived)
    mates: dict[int, ShardSource] = {}
    try:
        reader = ImageReader(source, allowed, identity)
        readers = _open_mates(store, reader, arrived, held, mates)
        state = reader.restore(options.targets, options.map_location, readers)
        return state, source.nbytes + reader.mates_nbytes
    except CorruptShardError as error:
        # Bytes are compared where they were read to, which others may write into.
        verify(source, identity)
        for rank, mate in mates.items():
            with _noting(rank):
                verify(mate, _of_rank(identity, rank))
        raise RestoreError(
            f"the state cannot be rebuilt: {error}, though every byte of the shard matches its "
            f"digest when it is read by itself. Something else writes into the tensors to load "
            f"into, the memory or the bus is defective, or another program made the file"
        ) from error
    except StorageError:
        # Of which image it is, it does not say.
        for rank, mate in mates.items():
            with _noting(rank):
                verify(mate, _of_rank(identity, rank))
        raise
    finally:
        for mate in mates.values():
            mate.close()
        source.close()


def compare_with_shard(
    store: Store,
    identity: ShardIdentity,
    arrived: Mapping[int, memoryview],
    options: LoadOptions,
    allowed: SafeGlobals,
) -> tuple[bool, list[str]]:
    """Compare a state to load into with a shard, before any of it is read.

    The arguments are those of :func:`restore`.

    Returns:
        Whether tensors to load into are other parts of global tensors than those of the shard; and
        the parts of the shard, where the caller has named some that must be there.

    Raises:
        CorruptShardError, StorageError: The shard cannot be read.
    """
    if (targets := options.targets) is None:
        return False, []
    source = _opened(store, identity, arrived)
    try:
        reader = ImageReader(source, allowed, identity)
        differs = targets.are_sharded_otherwise(*reader.tables[:2], reader.dtensors)
        if not options.rules.named:
            return differs, []
        skeleton, _ = reader.checked_skeleton()
        return differs, list(read_names(skeleton, allowed, options.rules.free) or ())
    finally:
        source.close()


def _opened(
    store: Store, identity: ShardIdentity, arrived: Mapping[int, memoryview]
) -> ShardSource:
    if identity.rank in arrived:
        return MemorySource(arrived[identity.rank])
    source = store.open(identity)
    return CountedSource(source, ReadProgress(f"reading {identity}", source.nbytes))


def _open_mates(
    store: Store,
    reader: ImageReader,
    arrived: Mapping[int, memoryview],
    held: Container[int] | None,
    opened: dict[int, ShardSource],
) -> dict[int, ImageReader]:
    """Open the images that hold what one lacks of its tensors, and read their tables."""
    ranks = reader.mates
    if held is not None:
        away = [rank for rank in ranks if rank not in arrived and rank not in held]
        if away:
            raise PartsElsewhereError(away)
    readers = {}
    for rank in ranks:
        identity = _of_rank(reader.header.identity, rank)
        with _noting(rank):
            opened[rank] = _opened(store, identity, arrived)
            readers[rank] = ImageReader(opened[rank], reader.allowed, identity, reader)
            _ = readers[rank].tables
    return readers


@contextmanager
def _noting(rank: int) -> Iterator[None]:
    """Context for reading another rank's image, whose errors then name that rank."""
    try:
        yield
    except (StorageError, CorruptShardError) as error:
        raise BadPartError(rank, error) from error


def _of_rank(identity: ShardIdentity, rank: int) -> ShardIdentity:
    return identity.checkpoint.shard(rank, identity.session_id)


def verify_again(store: Store, identity: ShardIdentity, why: str) -> None:
    """Quarantine a shard of this node, which was bad where it was read, if it is bad here, too.

    Args:
        store: Where the shard is.
        identity: Identity of the shard.
        why: What was done with it, and what was found.
    """
    # A rank with bad memory must not talk the others out of their good copies.
    try:
        source = store.open(identity)
        try:
            verify(source, identity)
        finally:
            source.close()
    except CorruptShardError as error:
        store.quarantine(identity, Problem.of(error))
    except StorageError as error:
        logger.warning("%s could not be looked at after it was %s: %s", identity, why, error)
    else:
        logger.warning("%s is good here, but not when it was %s", identity, why)


def incurable(error: Exception) -> CheckpointingException:
    """Return the error to raise on all ranks for one that no other copy would cure."""
    if isinstance(error, CheckpointingException) and not isinstance(error, RestoreError):
        return error
    # Else memory ran out, or the caller's own objects raised: the bytes were not at fault.
    text = f"the state cannot be rebuilt: {with_class(error)}"
    if isinstance(error, RestoreError):
        text = described(error)
    refusal = RestoreError(
        f"{text}. The bytes are those that were saved: nothing was renamed or removed, and no "
        f"older checkpoint was taken instead. Load with the classes, the libraries and the memory "
        f"that the state needs",
        getattr(error, "class_name", None),
        getattr(error, "path", None),
    )
    refusal.__cause__ = error
    return refusal
