"""Restoring of states from images, on this node or sent by a peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    RestoreError,
    StorageError,
)
from localckpt.failure_texts import described, with_class
from localckpt.ids import Checkpoint, ShardIdentity
from localckpt.managers.context import Context
from localckpt.managers.recovery import Recovery
from localckpt.options import PrivateRule
from localckpt.state_dict.basic import TensorAwareStateDict, freedom_in, wrapped
from localckpt.state_dict.names import read_names
from localckpt.state_dict.reader import ImageReader, open_images
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import ImageBytes, ShardSource
from localckpt.state_dict.targets import (
    STRICT,
    TargetRules,
    Targets,
    find_targets,
)
from localckpt.storage.hooks import HookStore


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
        rules: TargetRules = STRICT,
        private: Mapping[str, PrivateRule] | None = None,
    ) -> LoadOptions:
        """Return the options; the rules get the freedom that the values of ``into`` have."""
        rules = replace(rules, free=freedom_in(into))
        return cls(None if into is None else wrapped(into), into, map_location, rules, private)


@dataclass(frozen=True)
class Loaded:
    """Shard that was read and verified; stateful values at keys of ``left`` stay as they are."""

    checkpoint: Checkpoint
    state: Any
    nbytes: int
    came_from: str
    left: frozenset[str] = frozenset()


class BadShardError(CheckpointingException):
    """The copy of a rank's shard that was read cannot be read, or is damaged."""

    def __init__(self, rank: int, error: StorageError | CorruptShardError) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error


def restore(
    context: Context,
    recovery: Recovery,
    identity: ShardIdentity,
    options: LoadOptions,
    compared: ImageReader | None = None,
) -> tuple[Any, int]:
    """Read a shard from this node, or what was computed or has arrived in its place.

    For ``compared`` see :func:`compare_with_shard`. Returns the state, and the bytes that were read
    for it: 0 for a state that the hooks gave as it is.
    """
    store, is_plain = context.store, options == LoadOptions()
    if isinstance(store, HookStore) and is_plain and not recovery.is_here(identity.rank):
        with _naming(identity):
            state, nbytes = store.load(identity), 0
    else:
        state, nbytes = _read(recovery, identity, options, context.allowed, compared)
    if not store.keeps_images and is_plain:
        state.restore_tensor_device(non_blocking=False)
    return state, nbytes


def _read(
    recovery: Recovery,
    identity: ShardIdentity,
    options: LoadOptions,
    allowed: SafeGlobals,
    compared: ImageReader | None,
) -> tuple[Any, int]:
    sources: dict[ShardIdentity, ShardSource] = {}
    with ExitStack() as opened:

        def open_noted(of: ShardIdentity) -> ShardSource:
            with _naming(of):
                sources[of] = recovery.open(of)
            opened.callback(sources[of].close)
            return sources[of]

        try:
            reader = open_images(open_noted, identity, allowed, compared)
            state = reader.restore(options.targets, options.map_location)
            return state, reader.nbytes_read
        except (StorageError, CorruptShardError) as error:
            # Of which image it is, it does not say; and bytes are compared where they were read to,
            # which others may write into.
            for of, source in sources.items():
                with _naming(of):
                    ImageBytes(source, of).verify()
            if isinstance(error, StorageError):
                raise BadShardError(identity.rank, error) from error
            raise RestoreError(
                f"the state cannot be rebuilt: {error}, though every byte of the shard matches its "
                f"digest when it is read by itself. Something else writes into the tensors to load "
                f"into, the memory or the bus is defective, or another program made the file"
            ) from error


def compare_with_shard(
    context: Context, recovery: Recovery, identity: ShardIdentity, options: LoadOptions
) -> tuple[ImageReader, bool, list[str], MismatchError | None]:
    """Compare a state to load into with a shard, before any of it is read.

    Returns a reader, by which :func:`restore` need not compare again; whether tensors to load into
    are other parts of global tensors than those of the shard, which matters to an elastic load
    alone; the parts of the shard, where the caller has named some; and what does not fit.
    """
    parts, misfit = list[str](), None
    with closing(recovery.open(identity)) as source:
        reader = ImageReader(source, context.allowed, identity)
        tables = reader.tables[:2]
        if (targets := options.targets) is None:
            return reader, False, [], None
        differs = context.options.elastic and targets.are_sharded_otherwise(
            *tables, reader.dtensors
        )
        if options.rules.named:
            skeleton, _ = reader.checked_skeleton
            parts = list(read_names(skeleton, context.allowed, options.rules.free) or ())
        try:
            if not differs:
                reader.match(targets)
        except MismatchError as error:
            misfit = error
        return reader, differs, parts, misfit


@contextmanager
def _naming(identity: ShardIdentity) -> Iterator[None]:
    """Context for reading an image, whose errors then name its rank."""
    try:
        yield
    except (StorageError, CorruptShardError) as error:
        raise BadShardError(identity.rank, error) from error


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
