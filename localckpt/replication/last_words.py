"""Who is to blame when connections break, found by what each rank says before it cuts its own.

In an exchange in which ranks wait for each other along a chain, one that is lost stops all: most
ranks lose connections to ranks that only gave up themselves. So a rank that gives up first leaves
word in the job's key-value store, of whom it waited for or of what went wrong, and then cuts its
connections. Whoever sees a connection break and finds no word there knows that its peer is gone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from localckpt.ranks.job_store import ask_store

__all__ = ["LastWord", "ask_whom_to_blame", "leave_word", "whom_to_blame"]

_GRACE_S = 2.0
_STORE_TIMES = 2
_NAP_S = 0.02


@dataclass(frozen=True, slots=True)
class LastWord:
    """Why a rank gave up.

    Attributes:
        peers: The ranks that it waited for.
        late: Whether it gave up because time was over, not because a connection broke.
        reason: What went wrong on the rank itself, if that was why.
    """

    peers: tuple[int, ...] = ()
    late: bool = False
    reason: str | None = None


def leave_word(store: Store, rank: int, word: LastWord) -> None:
    """Say why this rank gives up; returns once others can read it.

    Raises:
        PeerLostError: The store does not answer.
    """

    def say() -> None:
        store.set(f"word/{rank}", json.dumps(asdict(word)))
        # Setting does not wait for the store to have done it; reading back does.
        store.get(f"word/{rank}")

    ask_store("say why this rank gives up", _STORE_TIMES * _GRACE_S, say)


def ask_whom_to_blame(
    store: Store, ranks: Sequence[int], rank: int, own: LastWord, *, grace_s: float = _GRACE_S
) -> dict[int, LastWord | None]:
    """Read what other ranks said, until it is known who is to blame or a grace is over.

    Args:
        store: Where words were left.
        ranks: Who may have left one.
        rank: This rank.
        own: Why it gives up.
        grace_s: How long to wait for the words of ranks that are only late, in seconds.

    Returns:
        The ranks to blame, with the words of those that left any.

    Raises:
        PeerLostError: The store does not answer.
    """

    def ask() -> dict[int, LastWord | None]:
        deadline = time.monotonic() + grace_s
        while True:
            words = {peer: word for peer in ranks if (word := _word_of(store, peer)) is not None}
            blamed, is_sure = whom_to_blame(rank, words | {rank: own})
            if is_sure or time.monotonic() > deadline:
                return {peer: words.get(peer) for peer in blamed}
            time.sleep(_NAP_S)

    return ask_store("ask why others gave up", _STORE_TIMES * max(grace_s, _GRACE_S), ask)


def whom_to_blame(rank: int, words: Mapping[int, LastWord]) -> tuple[list[int], bool]:
    """Follow who waited for whom, to those that said nothing or had a reason of their own.

    Ranks that all wait for each other are all to blame.

    Args:
        rank: Who asks.
        words: What ranks said, also the one that asks.

    Returns:
        The ranks, and whether that is sure: one that is only late may yet say why.
    """
    reached, ways = {rank}, [rank]
    gone: dict[int, bool] = {}
    guilty: set[int] = set()
    while ways:
        word = words[ways.pop()]
        for peer in word.peers:
            if peer not in words:
                gone[peer] = gone.get(peer, False) or not word.late
            elif words[peer].reason is not None:
                guilty.add(peer)
            elif peer not in reached:
                reached.add(peer)
                ways.append(peer)
    blamed = guilty | set(gone)
    return sorted(blamed or reached - {rank}), all(gone.values())


def _word_of(store: Store, rank: int) -> LastWord | None:
    key = f"word/{rank}"
    if not store.check([key]):
        return None
    said = json.loads(store.get(key))
    return LastWord(tuple(said["peers"]), said["late"], said["reason"])
