"""What the protocol needs of the place where a rank keeps its shards.

``stored.py`` keeps them in a store of this node; ``hooks.py`` hands them to a user's own subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from localckpt.ids import ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.state_dict.base import TensorAwareStateDict
from localckpt.state_dict.parity_image import ParityRoom
from localckpt.state_dict.parity_of import ParityOf
from localckpt.state_dict.source import ShardSource

__all__ = ["LoadOptions", "Shelf", "StagedShard"]


@dataclass(frozen=True)
class StagedShard:
    """A shard whose value is captured, and which is not yet kept.

    Attributes:
        identity: What it is.
        nbytes: Size of its image.
        payload: What ``_save`` is given for it.
        source: Its image, for the ranks that keep a replica; ``None`` if there are none.
        on_gpu: Whether any of its tensors is in device memory.
    """

    identity: ShardIdentity
    nbytes: int
    payload: Any
    source: ShardSource | None = None
    on_gpu: bool = False


@dataclass(frozen=True)
class LoadOptions:
    """How the caller of ``load`` wants its state."""

    into: TensorAwareStateDict | None = None
    map_location: str | torch.device | None = None
    optional: tuple[str, ...] = ()
    """Beginnings of paths below which ``into`` may lack tensors that were saved."""


class Shelf(ABC):
    """One rank's access to the shards of its node."""

    failure_domain: str
    """What is lost together with this rank's shards."""
    owner = ""
    """The process that these shards belong to; empty where nobody asks."""

    @abstractmethod
    def inventory(self) -> list[ShardRecord]:
        """All shards that can be read here, whichever rank they belong to."""

    @abstractmethod
    def bad_copies(self) -> list[str]:
        """What is here and cannot be used: names, and what is wrong with each."""

    @abstractmethod
    def newest_epoch(self) -> int:
        """The highest epoch known here: of any shard, and of any attempt that began."""

    @abstractmethod
    def begin_epoch(self, epoch: int, owners: Collection[str]) -> None:
        """Remember an attempt from its beginning, even if none of its shards will be left.

        Args:
            epoch: Its number.
            owners: Those of all ranks of the job.

        Raises:
            StorageError: Another job is alive here.
        """

    @abstractmethod
    def noted_lineages(self) -> list[Lineage]:
        """Lineages of the attempts that began here last, one for each rank that ever did."""

    @abstractmethod
    def note_lineage(self, lineage: Lineage) -> None:
        """Remember what the attempt resumed from, before it saves for the first time.

        Raises:
            StorageError: It cannot be noted here.
        """

    @abstractmethod
    def check(self, state: TensorAwareStateDict) -> None:
        """Refuse a state that could not be loaded again, before anything is done.

        Raises:
            CheckpointingException: It could not; the message says what in it, and where.
        """

    @abstractmethod
    def stage(
        self, state: TensorAwareStateDict, identity: ShardIdentity, *, travels: bool
    ) -> StagedShard:
        """Capture the value that ``state`` has now.

        Args:
            state: The state, which stays as it is.
            identity: What the shard is.
            travels: Whether the image will be sent to other ranks, once :meth:`wait_staged` has
                returned.
        """

    @abstractmethod
    def wait_staged(self) -> None:
        """Return when everything that was staged is in host memory."""

    @abstractmethod
    def was_sent(self, identity: ShardIdentity) -> None:
        """What was staged to travel does so no more: other ranks have it, or will not get it."""

    @abstractmethod
    def wait_sealed(self) -> None:
        """Return when everything that was staged can be kept."""

    @abstractmethod
    def make_room(self, identity: ShardIdentity, nbytes: int) -> memoryview:
        """Memory for a peer's image that is about to arrive, to be kept here."""

    @abstractmethod
    def make_parity_room(
        self, identity: ShardIdentity, of: ParityOf, heads_nbytes: int, parity_nbytes: int
    ) -> ParityRoom:
        """Memory for this rank's parity, which is about to be computed.

        Args:
            identity: What it is.
            of: Of which shards.
            heads_nbytes: Bytes of the heads that it keeps.
            parity_nbytes: Bytes of the parity.

        Raises:
            MismatchError: Parity cannot be kept here.
        """

    @abstractmethod
    def received(self, identity: ShardIdentity) -> StagedShard:
        """The image that has arrived in the room made for it; of parity, all but its digests.

        Raises:
            MismatchError: What arrived is another shard.
        """

    @abstractmethod
    def drop_unfinished(self, identities: Collection[ShardIdentity]) -> None:
        """Give back the room made for images that will not be kept; those written stay."""

    @abstractmethod
    def worker_call(
        self, shards: Sequence[StagedShard]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function and arguments that keep the shards from another process."""

    @abstractmethod
    def holds(self, identity: ShardIdentity) -> bool:
        """Whether a shard that was staged here is kept and can be found again."""

    @abstractmethod
    def open(self, identity: ShardIdentity) -> ShardSource:
        """The image of a shard that is kept here."""

    @abstractmethod
    def room_to_load(self, identity: ShardIdentity, nbytes: int) -> memoryview:
        """Memory for this rank's own image, which a peer is about to send."""

    @abstractmethod
    def restore(
        self, identity: ShardIdentity, arrived: memoryview | None, options: LoadOptions
    ) -> tuple[Any, int]:
        """Read a shard, from this node or, if it has ``arrived``, from a peer's bytes.

        Returns:
            The state, and the size of its image in bytes.

        Raises:
            CorruptShardError: Some bytes are bad, also when they are read by themselves.
            RestoreError: They are good, and the state cannot be made of them.
        """

    @abstractmethod
    def set_aside(self, identity: ShardIdentity, why: str) -> None:
        """Keep a bad copy from being found again."""

    @abstractmethod
    def doubt(self, identity: ShardIdentity, why: str) -> None:
        """A copy from here was bad where it was read: set it aside if it is bad here, too."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the shelf holds open."""
