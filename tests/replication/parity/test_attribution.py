"""Whoever is to blame for a broken exchange is found behind those that only gave up."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from localckpt.replication.parity.attribution import (
    GivenUp,
    ask_whom_to_blame,
    tell_given_up,
    whom_to_blame,
)


@given(st.integers(3, 9), st.data())
def test_along_a_chain_of_waits_the_silent_one_is_blamed(size: int, data: st.DataObject) -> None:
    silent = data.draw(st.integers(0, size - 1))
    late = data.draw(st.booleans())
    accounts = {
        rank: GivenUp(((rank - 1) % size,), late=late) for rank in range(size) if rank != silent
    }

    for rank in accounts:
        # One that is only late may yet say why; one that is gone cannot.
        assert whom_to_blame(rank, accounts) == ([silent], not late)


def test_a_rank_with_a_reason_is_blamed_not_those_that_waited_for_it() -> None:
    accounts = {0: GivenUp((1,)), 1: GivenUp((2,)), 2: GivenUp(reason="disk gone")}

    assert whom_to_blame(0, accounts) == ([2], True)


def test_ranks_that_wait_for_each_other_blame_each_other() -> None:
    accounts = {0: GivenUp((1,), late=True), 1: GivenUp((0,), late=True)}

    assert whom_to_blame(0, accounts) == ([1], True)
    assert whom_to_blame(1, accounts) == ([0], True)


def test_one_that_is_late_for_some_and_gone_for_others_is_gone() -> None:
    accounts = {0: GivenUp((2,), late=True), 1: GivenUp((2,)), 3: GivenUp((0, 1), late=True)}

    assert whom_to_blame(0, accounts) == ([2], False)
    assert whom_to_blame(3, accounts) == ([2], True)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_words_are_read_from_the_store_without_waiting_where_it_is_sure(store: dist.Store) -> None:
    tell_given_up(store, 1, GivenUp((2,)))
    tell_given_up(store, 2, GivenUp(reason="disk gone"))
    began = time.monotonic()

    blamed = ask_whom_to_blame(store, range(4), 0, GivenUp((1,)))

    assert blamed == {2: GivenUp(reason="disk gone")}
    assert time.monotonic() - began < 1.5, "nobody else is waited for"


def test_a_late_rank_that_says_nothing_is_blamed_after_a_grace(store: dist.Store) -> None:
    own = GivenUp((1,), late=True)

    assert ask_whom_to_blame(store, range(3), 0, own, grace_s=0.1) == {1: None}
