"""Every exception that localckpt raises on purpose.

There is one root, so a training loop can catch it alone; a subclass exists where a caller would
act differently. A message says what happened, to which (iteration, rank, path, peer), what was
kept, and what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointingException",
    "CorruptShardError",
    "FormatVersionError",
    "MismatchError",
    "NoReplicasAvailableError",
    "PeerLostError",
    "RestoreError",
    "SameMachineReplicationException",
    "SaveFailedError",
    "StorageError",
    "UnsafeGlobalError",
    "WorkerDiedError",
]


class CheckpointingException(Exception):
    """Root of every error raised by localckpt."""


class StorageError(CheckpointingException):
    """The node's disk or shared memory refused: full, read-only, no permission, I/O error."""


class CorruptShardError(CheckpointingException):
    """A shard's bytes are not the bytes that were saved, or are not a shard at all.

    Args:
        message: What is wrong.
        shard: What the shard says that it is, in words. Where its header is not verified, that may
            be a part of the damage.

    Attributes:
        shard: The same; empty if unknown.
        damage: What is wrong, without the shard's name.
    """

    shard = damage = ""

    def __init__(self, message: str = "", shard: str = "") -> None:
        super().__init__(f"{shard} is damaged: {message}" if shard else message)
        if shard:
            self.shard, self.damage = shard, message


class FormatVersionError(CorruptShardError):
    """A shard says that it is of another version of the format."""


class RestoreError(CheckpointingException):
    """A shard's bytes are good, and this program or machine cannot rebuild the state from them.

    A class changed since the save, its ``__setstate__`` raised, or memory ran out. The shard stays
    as it is and where it is, and no older checkpoint is taken in its place.

    Args:
        message: What happened.
        class_name: Full name of the class, or of the function, that failed; ``None`` if unknown.
        path: Where in the state the object stands, joined by dots; ``None`` if unknown.
    """

    def __init__(
        self, message: str = "", class_name: str | None = None, path: str | None = None
    ) -> None:
        super().__init__(message)
        self.class_name = class_name
        self.path = path


class UnsafeGlobalError(CheckpointingException):
    """A shard names a class or function that is not allowed to be loaded from a file.

    Attributes:
        names: What it calls them, if that is known here.
    """

    names: tuple[Any, ...] = ()


class MismatchError(CheckpointingException):
    """Two sides that must agree do not: ranks, session, world size, version, or structure."""


class PeerLostError(CheckpointingException):
    """A rank did not answer before the deadline, or its connection broke."""


class NoReplicasAvailableError(CheckpointingException):
    """A shard or a checkpoint is wanted that no living node, or shared storage, holds."""


class SameMachineReplicationException(CheckpointingException):
    """Replicas would be kept in the failure domain of the rank they are meant to outlive."""


class SaveFailedError(CheckpointingException):
    """A save did not complete on some rank; every rank raises this, and older saves stand."""


class WorkerDiedError(CheckpointingException):
    """The process that was writing behind training ended without reporting success."""
