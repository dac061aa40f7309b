"""Keeps shards with the five hooks of a user's own manager.

The hooks deal in states, the protocol in images; here the one is turned into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from localckpt.errors import MismatchError, RestoreError, StorageError
from localckpt.ids import CkptID, Generation, ShardIdentity, ShardRecord
from localckpt.lineage import Lineage
from localckpt.managers.shelf import LoadOptions, Shelf, StagedShard
from localckpt.state_dict.base import TensorAwareStateDict
from localckpt.state_dict.basic import BasicTensorAwareStateDict
from localckpt.state_dict.identify import read_header
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.parity_image import ParityRoom
from localckpt.state_dict.parity_of import ParityOf
from localckpt.state_dict.restore import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.targets import find_targets

__all__ = ["HookShelf", "Hooks"]


class Hooks(Protocol):
    """The hooks that keep and find shards."""

    def _my_ckpt_ids(self) -> Iterable[CkptID]: ...

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict: ...

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None: ...


class HookShelf(Shelf):
    """One rank's shards, wherever its manager's hooks keep them.

    The hooks know no generations and no failure domains: a shard is what its ID says, and every
    rank is taken to fail alone.
    """

    def __init__(
        self, hooks: Hooks, session_id: str, rank: int, world_size: int, allowed: SafeGlobals
    ) -> None:
        self.failure_domain = f"rank {rank}"
        self._hooks = hooks
        self._session_id = session_id
        self._world_size = world_size
        self._allowed = allowed
        self._planner = ImagePlanner(allowed)
        self._rooms: dict[ShardIdentity, memoryview] = {}

    def inventory(self) -> list[ShardRecord]:
        return [
            ShardRecord(self._identity(CkptID(*ckpt_id)), 0)
            for ckpt_id in self._hooks._my_ckpt_ids()
            if CkptID(*ckpt_id).session_id == self._session_id
        ]

    def bad_copies(self) -> list[str]:
        return []

    def newest_epoch(self) -> int:
        return 0

    def begin_epoch(self, epoch: int, owners: Collection[str]) -> None:
        """The hooks know no attempts."""

    def noted_lineages(self) -> list[Lineage]:
        return []

    def note_lineage(self, lineage: Lineage) -> None:
        """The hooks know no attempts."""

    def check(self, state: TensorAwareStateDict) -> None:
        self._planner.capture(state)

    def stage(
        self, state: TensorAwareStateDict, identity: ShardIdentity, *, travels: bool
    ) -> StagedShard:
        image = pack(state, identity, self._planner)
        if isinstance(state, BasicTensorAwareStateDict):
            snapshot = unpack(image, allowed=self._allowed, map_location="cpu")
            snapshot.remember_devices(state)
        else:
            snapshot = unpack(image, allowed=self._allowed)
            snapshot.copy_tensors_to_cpu()
        source = pack(snapshot, identity) if travels else None
        return StagedShard(identity, image.nbytes, snapshot, source)

    def wait_staged(self) -> None:
        """Staging a state for the hooks copies all of it at once."""

    def was_sent(self, identity: ShardIdentity) -> None:
        """Nothing else is put into the image that travels."""

    def wait_sealed(self) -> None:
        """States have no digests."""

    def make_room(self, identity: ShardIdentity, nbytes: int) -> memoryview:
        self._rooms[identity] = memoryview(bytearray(nbytes))
        return self._rooms[identity]

    def make_parity_room(
        self, identity: ShardIdentity, of: ParityOf, heads_nbytes: int, parity_nbytes: int
    ) -> ParityRoom:
        raise MismatchError(
            f"{identity} cannot be kept: the hooks of a manager keep states, and parity is of bytes"
        )

    def received(self, identity: ShardIdentity) -> StagedShard:
        source = MemorySource(self._rooms.pop(identity))
        found = read_header(source).identity
        if found != identity:
            raise MismatchError(f"expected a replica of {identity}, and {found} arrived")
        state = unpack(source, expect=identity, allowed=self._allowed)
        return StagedShard(identity, source.nbytes, state)

    def drop_unfinished(self, identities: Collection[ShardIdentity]) -> None:
        for identity in identities:
            self._rooms.pop(identity, None)

    def worker_call(
        self, shards: Sequence[StagedShard]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        payloads = [(shard.payload, shard.identity.ckpt_id) for shard in shards]
        return _save_all, (self._hooks._save, payloads)

    def holds(self, identity: ShardIdentity) -> bool:
        return identity.ckpt_id in {CkptID(*i) for i in self._hooks._my_ckpt_ids()}

    def open(self, identity: ShardIdentity) -> MemorySource:
        return pack(self._load(identity.ckpt_id), identity)

    def room_to_load(self, identity: ShardIdentity, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def restore(
        self, identity: ShardIdentity, arrived: memoryview | None, options: LoadOptions
    ) -> tuple[Any, int]:
        if arrived is None:
            state = self._load(identity.ckpt_id)
            if options == LoadOptions():
                state.restore_tensor_device(non_blocking=False)
                return state, 0
            source = pack(state, identity)
        else:
            source = MemorySource(arrived)
        into = None if options.into is None else find_targets(options.into, options.optional)
        state = ImageReader(source, self._allowed, identity).restore(into, options.map_location)
        if options == LoadOptions():
            state.restore_tensor_device(non_blocking=False)
        return state, source.nbytes

    def set_aside(self, identity: ShardIdentity, why: str) -> None:
        """The hooks have no way to tell; this run does not ask for the copy again."""

    def doubt(self, identity: ShardIdentity, why: str) -> None:
        self.set_aside(identity, why)

    def close(self) -> None:
        self._rooms.clear()

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        try:
            return self._hooks._load(ckpt_id)
        except (MemoryError, RestoreError):
            raise
        except Exception as error:
            # Whatever it was, another copy may do.
            raise StorageError(f"{ckpt_id} cannot be read: {error!r}") from error

    def _identity(self, ckpt_id: CkptID) -> ShardIdentity:
        return ShardIdentity(
            self._session_id,
            Generation(0, 0),
            ckpt_id.iteration,
            ckpt_id.rank,
            self._world_size,
        )


def _save_all(
    save: Callable[[TensorAwareStateDict, CkptID], None],
    payloads: Sequence[tuple[TensorAwareStateDict, CkptID]],
) -> None:
    for state, ckpt_id in payloads:
        save(state, ckpt_id)
