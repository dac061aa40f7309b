"""Attribution of broken connections, by the account that each rank leaves before it cuts its own.

In an exchange in which ranks wait for each other along a chain, one that is lost stops all: most
ranks lose connections to ranks that only gave up themselves. So a rank that gives up leaves an
account in the job's key-value store, of whom it waited for or of what went wrong, and then cuts its
connections. Whoever sees a connection break and finds no account there knows that its peer is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from localckpt.ranks.asking import ask_store
from localckpt.waiting import wait_until

__all__ = ["GivenUp", "ask_whom_to_blame", "tell_given_up", "whom_to_blame"]

_GRACE_S = 2.0
_STORE_TIMES = 2
_LONGEST_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Why a rank gave up.

    Attributes:
        late: Whether it gave up because time was over, not because a connection broke.
        reason: What went wrong on the rank itself, if that was why.
    """

    peers: tuple[int, ...] = ()
    late: bool = False
    reason: str | None = None


def tell_given_up(store: Store, rank: int, account: GivenUp) -> None:
    """Leave the account of why this rank gives up; returns once others can read it."""

    def write() -> None:
        store.set(f"gave-up/{rank}", json.dumps(asdict(account)))
        # Setting does not wait for the store to have done it; reading back does.
        store.get(f"gave-up/{rank}")

    ask_store("say why this rank gives up", _STORE_TIMES * _GRACE_S, write)


def ask_whom_to_blame(
    store: Store, ranks: Sequence[int], rank: int, own: GivenUp, *, grace_s: float = _GRACE_S
) -> dict[int, GivenUp | None]:
    """Read the accounts of other ranks, until it is known who is to blame or a grace is over.

    Returns the ranks to blame, with the accounts of those that left any.
    """

    def ask() -> dict[int, GivenUp | None]:
        found: dict[int, GivenUp | None] = {}

        def is_sure() -> bool:
            nonlocal found
            accounts = {
                peer: account for peer in ranks if (account := _account_of(store, peer)) is not None
            }
            blamed, is_sure = whom_to_blame(rank, accounts | {rank: own})
            found = {peer: accounts.get(peer) for peer in blamed}
            return is_sure

        wait_until(is_sure, grace_s, longest_s=_LONGEST_PAUSE_S)
        return found

    return ask_store("ask why others gave up", _STORE_TIMES * max(grace_s, _GRACE_S), ask)


def whom_to_blame(rank: int, accounts: Mapping[int, GivenUp]) -> tuple[list[int], bool]:
    """Follow who waited for whom, to those that left no account or had a reason of their own.

    Ranks that all wait for each other are all to blame.

    Returns the ranks, and whether that is sure: one that is only late may yet leave an account.
    """
    reached, ways = {rank}, [rank]
    gone: dict[int, bool] = {}
    guilty: set[int] = set()
    while ways:
        account = accounts[ways.pop()]
        for peer in account.peers:
            if peer not in accounts:
                gone[peer] = gone.get(peer, False) or not account.late
            elif accounts[peer].reason is not None:
                guilty.add(peer)
            elif peer not in reached:
                reached.add(peer)
                ways.append(peer)
    blamed = guilty | set(gone)
    return sorted(blamed or reached - {rank}), all(gone.values())


def _account_of(store: Store, rank: int) -> GivenUp | None:
    key = f"gave-up/{rank}"
    if not store.check([key]):
        return None
    fields = json.loads(store.get(key))
    return GivenUp(tuple(fields["peers"]), fields["late"], fields["reason"])
