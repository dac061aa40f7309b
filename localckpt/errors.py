"""Every exception that localckpt raises on purpose.

All derive from one root, so a training loop can catch that alone; a subclass exists where a caller
would act differently. A message says what happened, to which (iteration, rank, path, peer), what
was kept, and what to do.
"""

from __future__ import annotations

from typing import Any, Self

__all__ = [
    "AbortedError",
    "CheckpointingException",
    "CorruptShardError",
    "DivergenceError",
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
    """Root of every error raised by localckpt.

    Attributes:
        topic: What the advice is on; empty for none.
        advice: Last sentence of the message, which says what to do. It names arguments, so an
            object that makes the failing call for the program has a sentence of its own.
    """

    topic = advice = ""

    @property
    def text(self) -> str:
        """The message without the advice."""
        return Exception.__str__(self)

    def __str__(self) -> str:
        return f"{self.text}. {self.advice}" if self.advice else self.text

    def advised(self, topic: str, advice: str) -> Self:
        """Set the topic and the advice; returns the error."""
        self.topic, self.advice = topic, advice
        return self


class StorageError(CheckpointingException):
    """The node's disk or shared memory failed: full, read-only, no permission, I/O error.

    Attributes:
        is_given_up: True if the job was told to stop before the storage had answered.
    """

    is_given_up = False


class CorruptShardError(CheckpointingException):
    """A shard's bytes are not the bytes that were saved, or are not a shard at all.

    Args:
        message: Description of the damage.
        shard: Identity of the shard, in words, from its header. Where the header is not verified,
            the identity itself may be damaged.

    Attributes:
        shard: Identity of the shard; empty if unknown.
        damage: Description of the damage, without the shard's name.
    """

    shard = damage = ""

    def __init__(self, message: str = "", shard: str = "") -> None:
        super().__init__(f"{shard} is damaged: {message}" if shard else message)
        if shard:
            self.shard, self.damage = shard, message


class FormatVersionError(CorruptShardError):
    """A shard's header names a format version that this localckpt does not read."""


class RestoreError(CheckpointingException):
    """A shard's bytes are good, but this program or machine cannot rebuild the state from them.

    A class changed since the save, its ``__setstate__`` raised, or memory ran out. The shard is
    neither changed nor moved, and no older checkpoint is loaded instead.

    Args:
        message: Description of the failure.
        class_name: Full name of the class, or of the function, that failed; ``None`` if unknown.
        path: Dotted path of the object in the state; ``None`` if unknown.
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
        names: Names of these classes and functions in the shard; empty if unknown.
    """

    names: tuple[Any, ...] = ()


class MismatchError(CheckpointingException):
    """Two sides that must agree do not: ranks, session, world size, version, or structure."""


class PeerLostError(CheckpointingException):
    """A rank did not answer before the deadline, or its connection broke.

    Attributes:
        outcome_unknown: True if the other ranks may have agreed on an outcome that this rank did
            not receive, because the job's store did not answer.
    """

    outcome_unknown = False


class AbortedError(PeerLostError):
    """``abort()`` ended the call, or was called before it; other ranks may have come further."""

    outcome_unknown = True


class NoReplicasAvailableError(CheckpointingException):
    """No living node, nor shared storage, holds a shard or checkpoint that is needed."""


class SameMachineReplicationException(CheckpointingException):
    """Replicas would be kept in the failure domain of the rank they are meant to outlive."""


class SaveFailedError(CheckpointingException):
    """A save failed on some rank; every rank raises this error, and older checkpoints are kept.

    Attributes:
        is_mismatched: True if some rank made another save, or none.
    """

    is_mismatched = False


class DivergenceError(SaveFailedError):
    """Tensors that the job keeps equal on several ranks are not equal; the save was rolled back.

    Args:
        message: Description of the tensors that differ, and of the ranks.

    Attributes:
        iteration: Iteration of the save; -1 if unknown.
        keys: Keys of the tensors that differ, as far as they are told.
        ranks: Ranks in the minority. Where no value is that of more than half of the ranks, all
            ranks that differ.
        nodes: Host names of the first of ``ranks``, in their order.
        is_minority: True if ``ranks`` are in the minority, so that they are to be suspected.
        differences: What is known of each tensor: its key, the ranks with equal bytes, and those in
            the minority.
    """

    iteration = -1
    keys: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    is_minority = False
    differences: tuple[Any, ...] = ()


class WorkerDiedError(CheckpointingException):
    """The background writer process ended without reporting success."""
