"""Base of the replication strategies, and the exchange of shards that ranks lack.

How copies are made is up to the strategies. All work is done on images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch.distributed as dist

from localckpt.availability.inventory import Inventory
from localckpt.errors import MismatchError
from localckpt.ids import Checkpoint, CkptID, Group, ShardIdentity
from localckpt.ranks.ranks import Ranks
from localckpt.replication.exchange import ExchangePlan
from localckpt.replication.redundancy import Lacking
from localckpt.replication.retrieval import carry_out
from localckpt.state_dict.source import ShardSource
from localckpt.storage.store import Slot, Store
from localckpt.storage.write import Place
from localckpt.threads import SerialThread

STEPS = 7
"""Announcing, making room (after an older save), connecting (twice), sending (twice, where pieces
are computed), telling the outcome: how often a replication may need the deadline."""

# Two steps of a replication that each wait until their deadline end before the manager's.
_STEPS_IN_TIME = 3
_TIMEOUT_S = 300.0


class ReplicationStrategy:
    """Protection of the shards that a job saves; also brings shards to ranks that lack them.

    Args:
        timeout_s: Deadline of each step that ranks take together, in seconds, if it is to be
            shorter than that of the manager that uses the strategy. With ``None`` it is the
            manager's, in a save a third of that, so that a save whose peer is lost is over within
            the manager's.
        process_group: The ranks of the job, whose numbers stand in plans; ``None`` for all.

    Attributes:
        rate_limit: Bytes a second that a rank may send behind training; ``None`` for any.
        sent_nbytes: Bytes that this rank sent for the copies of the last save; ``None`` if nobody
            counts.
        thread: Makes the copies of all managers that share the strategy. All ranks submit their
            calls of :meth:`protect` in the same order, each after :meth:`begin_copies`.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.rate_limit: float | None = None
        self.sent_nbytes: int | None = None
        self.thread = SerialThread("localckpt-replicate")
        self._process_group = process_group
        # Whether the caller has formed the groups of ranks.
        self._is_given_group = False
        self._everyone: Ranks | None = None

    def place(self, domains: Sequence[str], timeout_s: float | None = None) -> None:
        """Place the ranks in groups; all call it first, with the tokens of all ranks' stores."""

    @property
    def protection(self) -> Mapping[int, Group]:
        """For each rank the group that protects its shard, on all ranks, once they are placed."""
        return {}

    def lacking(self, checkpoint: Checkpoint, inventory: Inventory) -> Lacking:
        """Find what a loaded checkpoint lacks of its protection: a pure function."""
        return Lacking({})

    def begin_copies(self) -> None:
        """Take back :meth:`give_up`, which was about the copies before these."""

    def step_s(self, timeout_s: float | None, *, of_save: bool = False) -> float:
        """Deadline in seconds of each step of a caller's, of which two ``of_save`` fit into it."""
        if timeout_s is None:
            return self.timeout_s or _TIMEOUT_S
        share_s = timeout_s / _STEPS_IN_TIME if of_save else timeout_s
        return min(self.timeout_s or share_s, timeout_s)

    def protect(
        self,
        own: Slot | None,
        identity: ShardIdentity,
        store: Store,
        timeout_s: float,
        *,
        on_gpu: bool = False,
        error: str | None = None,
    ) -> list[Slot]:
        """Send what protects a shard to other nodes, and take what protects theirs.

        All ranks call it together. Without ``own`` there is an ``error``, which the ranks of the
        group raise, too. ``timeout_s`` is the caller's deadline: of waiting for a slot of the
        store, and of two steps that ranks take together. A state ``on_gpu`` may be sent from there.

        Returns slots of what came here, filled, for the caller to commit. When it raises, it has
        released them.
        """
        return []

    def require_states(self, manager: str) -> None:
        """Raise MismatchError if the strategy deals in images only, for a manager of states."""

    @property
    def sends_from_devices(self) -> bool:
        """True if images of states on GPUs are sent from GPU to GPU, not through the host."""
        return False

    def waits_for(self) -> str:
        """Describe, in any thread, whom a replication waits for; empty if for no other rank."""
        return ""

    def give_up(self) -> None:
        """End all waits of other threads, with an error there, until :meth:`begin_copies`."""

    def abort(self, within_s: float = 2.0) -> None:
        """End all waits at once, from any thread, with AbortedError there, until :meth:`rejoin`.

        Args:
            within_s: How long to wait for the end of copies that are under way, in seconds.
        """
        self.give_up()
        if self._everyone is not None:
            self._everyone.cut_off()
        self.thread.close(within_s)

    def rejoin(self) -> None:
        """Begin anew in the process group as it is now, as one that is made now does.

        All ranks that are left call it, and others make a strategy; by a manager's ``rejoin``.

        Raises:
            MismatchError: The strategy was given process groups, which may be gone.
        """
        if self._process_group is not None or self._is_given_group:
            raise MismatchError(
                f"this {type(self).__name__} was given process groups, which may be gone: give "
                f"rejoin(repl_strategy=...) one that is made for the job as it is now"
            )
        self.close()
        self.thread, self._everyone = SerialThread("localckpt-replicate"), None

    def close(self) -> None:
        """Close connections, and groups that the strategy made itself."""
        if self._everyone is not None:
            self._everyone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def retrieve_image(
        self,
        plan: ExchangePlan[CkptID],
        open_source: Callable[[CkptID], ShardSource],
        accept: Callable[[CkptID, int], Place],
        timeout_s: float | None = None,
    ) -> list[CkptID]:
        """Bring the shards of a plan to the ranks that lack them; all ranks call it with one plan.

        A rank's own copies are not touched. ``open_source`` opens an image that this rank sends,
        which is closed here; ``accept`` returns writable memory for one that comes. Returns what
        this rank received.

        Raises:
            PeerLostError: A rank did not come, or broke off.
            CheckpointingException: What went wrong on some rank, the same on all of them.
        """
        return carry_out(self._world(), plan, open_source, accept, self.step_s(timeout_s))

    def _world(self) -> Ranks:
        if self._everyone is None:
            self._everyone = Ranks("retrieval", self._process_group, self.step_s(None))
        return self._everyone


class NoReplication(ReplicationStrategy):
    """Keeps no replicas. Shards are still brought to ranks that restart on other nodes."""
