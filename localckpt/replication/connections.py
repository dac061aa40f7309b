"""gloo connections between ranks, for host memory: made, used and cut here only."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from localckpt.errors import MismatchError, PeerLostError
from localckpt.failure_texts import ranks_named
from localckpt.ranks.deadline import Patience, ask_store, begin
from localckpt.ranks.job_store import default_store
from localckpt.ranks.store_part import remove_later
from localckpt.ranks.values import if_there
from localckpt.replication.progress import first_line
from localckpt.waiting import wait_until

logger = logging.getLogger(__name__)

NEVER = 3
"""A tag that no message may have."""

# gloo waits as long as it is told for other ranks, and without end for the store.
_CONNECTING_TIMES = 2
_LEAVING_S = 1.0
_LONGEST_PAUSE_S = 0.02
_GIVEN_UP = "given-up"


class HostConnections:
    """Connections of this rank to others, in no group that torch.distributed knows of.

    Making them connects the ranks; see ``transport.connect``.
    """

    def __init__(
        self,
        name: str,
        ranks: Collection[int],
        rank: int,
        timeout_s: float,
        is_given_up: Callable[[], bool] = lambda: False,
        *,
        in_pairs: bool = False,
        store: Store | None = None,
    ) -> None:
        self.rank, self.ranks = rank, sorted({rank, *ranks}) if in_pairs else list(ranks)
        # For each peer a gloo group of torch's that both are in, and the peer's place there.
        self._ways: dict[int, tuple[Any, int]] = {}
        self._process = os.getpid()
        here = f"localckpt/transport/{name}"
        groups = [sorted((rank, peer)) for peer in sorted(ranks)] if in_pairs else [list(ranks)]
        openings: list[_Opening] = []
        try:
            # All at once: each waits for its peer, which connects to others as well.
            for members in groups:
                # A process that is alone connects to nobody, and may have no store.
                if members != [rank]:
                    names = f"{here}/{members[0]}-{members[-1]}"
                    part = PrefixStore(names, store or default_store())
                    openings.append(_Opening(part, members, rank, timeout_s, is_given_up))
            for opening in openings:
                group = opening.finish()
                self._ways |= {other: (group, place) for place, other in enumerate(opening.ranks)}
        except BaseException:
            for opening in openings:
                opening.give_up()
            raise
        self._asking = [opening.asking for opening in openings]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send; gloo drops a message whose work object is dropped before it was sent."""
        group, place = self._way(peer)
        work: dist.Work = group.send([tensor], place, tag)
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Ask for a message; it may come at any time from now on."""
        group, place = self._way(peer)
        work: dist.Work = group.recv([tensor], place, tag)
        return work

    def disconnect(self) -> None:
        """Close all connections, so that peers stop waiting and late bytes go nowhere."""
        if os.getpid() != self._process:
            # A fork has the sockets, too, and must not end what the trainer sends over them.
            return
        # Looked at once, since another thread may close these connections meanwhile.
        for peer, (group, place) in list(self._ways.items()):
            # A wait that runs out is gloo's one way to close every connection of a group; on a
            # connection that is closed already, there is no wait.
            with contextlib.suppress(RuntimeError):
                if peer != self.rank:
                    group.recv([nothing()], place, NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Connections end with the last reference."""
        if os.getpid() != self._process:
            return
        self._ways = {}
        for asking in self._asking:
            asking.close()

    def _way(self, peer: int) -> tuple[Any, int]:
        if peer not in self.ranks:
            raise MismatchError(f"rank {peer} is not among the ranks {self.ranks} that exchange")
        return self._ways[peer]


class _Opening:
    """A process group over gloo that is being made, in another thread."""

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        is_given_up: Callable[[], bool],
    ) -> None:
        self.ranks = list(ranks)
        self._rank = rank
        self._timeout_s = timeout_s
        self._is_given_up = is_given_up
        deadline = timedelta(seconds=timeout_s)
        self.asking = asking = _AskingStore(store, deadline, is_given_up)
        place, count = self.ranks.index(rank), len(self.ranks)
        # The store's client, which it uses, waits for ever for a host that cannot be reached, and
        # gloo for a rank that has died since it told its address.
        self._making = begin(lambda: dist.ProcessGroupGloo(asking, place, count, deadline))

    def finish(self) -> Any:
        making = self._making
        try:
            Patience(self._rank, "connect").until(
                lambda: making.done() or self._is_given_up(),
                _CONNECTING_TIMES * self._timeout_s,
                lambda: ranks_named(r for r in self.ranks if r != self._rank),
                longest_s=_LONGEST_PAUSE_S,
            )
            return making.take_result(0)
        except (RuntimeError, TimeoutError) as error:
            self.give_up()
            why = self.asking.why_ended or first_line(error) or "no answer"
            raise PeerLostError(
                f"rank {self._rank} could not connect to ranks {self.ranks} within "
                f"{self._timeout_s:g} s ({why}). Shards kept on this node are untouched; restart "
                f"the job if one of these ranks has died."
            ) from error
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        self.asking.close(given_up_by=self._rank)


class _AskingStore(Store):
    """Store by which gloo finds other ranks: a wait asks the job's store again and again.

    A wait on the store would hold up all other users of this process's client, and a client of its
    own takes a reverse look-up of the host's name to connect, which may take seconds.
    """

    def __init__(self, store: Store, longest: timedelta, is_given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._longest = longest
        self._is_given_up = is_given_up
        self._is_closed = False
        self._keys: list[str] = []
        self.why_ended = ""
        """Why a wait ended early, if another rank is the reason."""

    def close(self, given_up_by: int | None = None) -> None:
        """Remove what was set here; ``given_up_by`` is this rank if the others are to stop, too."""
        self._is_closed = True
        keys, self._keys = self._keys, []

        def remove() -> None:
            if given_up_by is not None:
                self._store.compare_set(_GIVEN_UP, "", str(given_up_by))
                remove_later(self._store, _GIVEN_UP)
            for key in keys:
                self._store.delete_key(key)

        try:
            ask_store("remove the addresses of connections", _LEAVING_S, remove)
        except PeerLostError as error:
            # Most often the process that hosts the store has ended, and the keys with it.
            logger.debug("%s", error)

    def has_extended_api(self) -> bool:
        """Without it gloo uses what is here, and nothing else."""
        return False

    def set(self, key: str, value: str | bytes) -> None:
        self._keys.append(key)
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Value of a key; gloo has waited for it."""
        # torch's store wakes who waits for a key that was removed with an empty value, and gloo
        # takes an address of no bytes for a pointer.
        if not (value := if_there(self._store, key)):
            raise TimeoutError(f"{key} was removed")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = (timeout or self._longest).total_seconds()

        def are_there() -> bool:
            if self._is_closed or self._is_given_up():
                raise TimeoutError("it is not waited for any more")
            if (quitter := if_there(self._store, _GIVEN_UP)) is not None:
                self.why_ended = f"rank {quitter.decode()} has given up"
                raise TimeoutError(self.why_ended)
            return bool(self._store.check(keys))

        if not wait_until(are_there, timeout_s, longest_s=_LONGEST_PAUSE_S):
            raise TimeoutError("they did not all come")


def as_tensor(view: memoryview) -> torch.Tensor:
    """The memory of a writable view, which must stay alive while the tensor is used."""
    return torch.frombuffer(view, dtype=torch.uint8)


def nothing() -> torch.Tensor:
    """An empty message, which cannot arrive in part."""
    return torch.empty(0, dtype=torch.uint8)
