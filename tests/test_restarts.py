"""Attempts of a job that share one key-value store: what dead ranks left there misleads nobody.

The default group's backend is torch's fake one, which says nothing over the store, since gloo's own
keys of a dead attempt would stop torch before anything of ours begins.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    AsyncCallsQueue,
    CliqueReplicationStrategy,
    FileSystemWriterAsync,
    GlobalCheckpointManager,
    LocalCheckpointManager,
    MismatchError,
    PeerLostError,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from localckpt.ranks.deadline import Deadline
from localckpt.ranks.job_store import default_store
from localckpt.ranks.ranks import Ranks
from tests.managers.jobs import error_of
from tests.ranks import announce, await_announced, node_store, run_ranks, torchrun
from tests.simulated import gather

_TIMEOUT_S = 20.0
_HANG_S = 1.0


def _join(rank: int, world_size: int, port: int) -> None:
    # Registers the backend.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _talk(rank: int, world_size: int, port: int, dies_after: str | None) -> list[Any] | None:
    """One attempt; rank 1 dies at a point, and the others soon after it, as torchrun's would."""
    _join(rank, world_size, port)
    timeout_s = _HANG_S if dies_after else _TIMEOUT_S

    def point(name: str) -> None:
        if dies_after == name and rank == 1:
            _die()

    try:
        point("start")
        coordinator = Ranks("test", timeout_s=timeout_s)
        point("opening")
        said = [gather(coordinator, "meet", [rank, number]) for number in range(3)]
        assert coordinator.decide("agree", lambda: rank, len) == world_size
        point("gathering")
        behind = Ranks("behind", timeout_s=timeout_s)
        said.append(behind.commit("act", lambda: rank, lambda all_: all_))
        point("acting")
        gather(coordinator, "end", None)
        return said
    except PeerLostError:
        _die()
    return None


@pytest.fixture
def job_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_an_attempt_works_wherever_a_rank_died_in_those_before(job_store: dist.TCPStore) -> None:
    for point in ("start", "opening", "gathering", "acting", None):
        dead = range(3) if point else ()

        told = run_ranks(_talk, 3, job_store.port, point, init_group=False, expect_dead=dead)

    assert told == [[*([[r, n] for r in range(3)] for n in range(3)), [0, 1, 2]]] * 3


def _remake(rank: int, world_size: int, port: int) -> list[int]:
    counts = []
    for number in range(4):
        _join(rank, world_size, port)
        before = Ranks("test", timeout_s=_TIMEOUT_S)
        assert gather(before, "meet", number) == [number] * world_size
        # One rank has made more than the others when the group is made anew.
        if rank == 0:
            Ranks("test", timeout_s=_HANG_S)
        dist.destroy_process_group()
        counts.append(before.world_size)
    return counts


def test_a_group_made_anew_in_the_same_processes_counts_from_the_beginning(
    job_store: dist.TCPStore,
) -> None:
    assert run_ranks(_remake, 3, job_store.port, init_group=False) == [[3] * 4] * 3


def _open_when_all_are_there(rank: int, world_size: int) -> str:
    if rank == 2:
        time.sleep(2.0)
    told = ""
    coordinator = Ranks("test", timeout_s=1.0 if rank == 1 else _TIMEOUT_S)
    until = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            gather(coordinator, "meet", None, deadline=Deadline.after(_TIMEOUT_S))
            return told
        except PeerLostError as error:
            assert time.monotonic() - began < _TIMEOUT_S / 2
            told = told or str(error)
    raise AssertionError(told)


def test_an_opening_that_one_rank_gives_up_is_given_up_by_all_and_the_next_one_works() -> None:
    patient, impatient, _ = run_ranks(_open_when_all_are_there, 3)

    assert patient == impatient
    assert "waited 1 s to open 'test', and rank 2 (last seen: not seen yet) did not come" in patient


def _open_after_one_that_a_stranger_has_overwritten(rank: int, world_size: int) -> None:
    if rank == 0:
        alone = Ranks("test", timeout_s=_HANG_S)
        error_of(lambda: gather(alone, "meet", None, deadline=Deadline.after(_HANG_S)))
        of_ours, nonce = alone._part._shared, alone._part._published()
        of_ours.set(f"{nonce}/-1/verdict", b"\xff" * 100)
        announce("overwritten")
    await_announced("overwritten")

    assert gather(Ranks("test", timeout_s=_TIMEOUT_S), "meet", rank) == [0, 1]


def test_a_verdict_that_a_stranger_has_overwritten_is_in_no_later_openings_way() -> None:
    run_ranks(_open_after_one_that_a_stranger_has_overwritten, 2)


def _use_what_is_older(rank: int, world_size: int, port: int) -> None:
    _join(rank, world_size, port)
    coordinator = Ranks("test", timeout_s=20.0)
    gather(coordinator, "meet", None)
    dist.destroy_process_group()
    # What is under way when a group is destroyed may end.
    gather(coordinator, "meet again", None)
    _join(rank, world_size, port)

    for call in (
        lambda: gather(coordinator, "meet in another group", None),
        lambda: coordinator.commit("act in another group", list, list),
    ):
        assert "torch.distributed was initialised anew after" in error_of(call, MismatchError)


def test_what_was_made_in_another_process_group_says_so_at_once(job_store: dist.TCPStore) -> None:
    run_ranks(_use_what_is_older, 2, job_store.port, init_group=False)


def _save(rank: int, world_size: int, port: int, shared: Path, dies: str | None) -> int:
    _join(rank, world_size, port)
    timeout_s = 2.0 if dies else _TIMEOUT_S
    state = {"w": torch.full((100,), float(rank)), "rank": rank}
    try:
        if dies == "before its manager" and rank == 1:
            _die()
        strategy = CliqueReplicationStrategy.from_replication_params(None, 2, timeout_s=timeout_s)
        local = LocalCheckpointManager(node_store(), "run", strategy, timeout=timeout_s)
        shared_tier = GlobalCheckpointManager(shared, timeout=timeout_s)
        queue = AsyncCallsQueue(timeout_s=timeout_s)
        if dies == "before its first save" and rank == 1:
            _die()
        found = max(local.find_latest(), shared_tier.find_latest())
        queue.schedule_async_request(local.save(state, found + 2, is_async=True))
        if dies == "in its first save" and rank == 1:
            _die()
        queue.maybe_finalize_async_calls(blocking=True)
        shared_tier.save({f"of {rank}": state}, found + 2, is_async=False)
    except PeerLostError:
        _die()
    assert torch.equal(local.load()[0]["w"], state["w"]) if local.find_latest() > 0 else True
    queue.close()
    local.close()
    shared_tier.close()
    return found


@pytest.mark.fault("silent-peer")
def test_both_tiers_save_and_load_after_attempts_in_which_a_rank_died(
    job_store: dist.TCPStore, tmp_path: Path
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    for dies in ("before its manager", "before its first save", "in its first save"):
        run_ranks(
            *(_save, 2, job_store.port, tmp_path / "shared", dies),
            init_group=False,
            expect_dead=(0, 1),
            store_per_node=nodes,
        )

    def found() -> list[int]:
        return run_ranks(
            *(_save, 2, job_store.port, tmp_path / "shared", None),
            init_group=False,
            store_per_node=nodes,
        )

    first = found()
    # The rank that died in its save may have written all of it before, and the other one, too.
    assert first in ([-1, -1], [1, 1])
    assert found() == [first[0] + 2] * 2


def _leave_nothing_to_others(rank: int, world_size: int) -> int:
    for number in range(6):
        coordinator = Ranks("test", timeout_s=_TIMEOUT_S)
        assert gather(coordinator, "meet", number) == [number] * world_size
        coordinator.close()
        coordinator.close()
        if number == 2:
            dist.barrier()
            before = default_store().num_keys()
            dist.barrier()
    dist.barrier()
    return default_store().num_keys() - before


def test_parts_that_were_closed_are_removed_by_the_next() -> None:
    assert run_ranks(_leave_nothing_to_others, 3) == [0, 0, 0]


def _save_together_and_close(rank: int, world_size: int, shared: Path) -> list[int]:
    counts = []
    for life in range(5):
        with GlobalCheckpointManager(shared, timeout=_TIMEOUT_S) as manager:
            for iteration in (2 * life, 2 * life + 1):
                manager.save({f"w{rank}": torch.full((100,), 1.0)}, iteration)
            manager.load(into={f"w{rank}": torch.zeros(100)})
        writer = FileSystemWriterAsync(shared / f"own {life}")
        planned = save_state_dict_async_plan({"a": 1}, writer)
        save, preload, args = writer.get_save_function_and_args()
        if save is not None and preload is not None:
            save(*args[:-1], preload())
        save_state_dict_async_finalize(*planned)
        writer.close()
        dist.barrier()
        counts.append(default_store().num_keys())
        dist.barrier()
    return counts


def test_managers_and_writers_of_shared_storage_leave_no_more_keys_than_the_last_ones(
    tmp_path: Path,
) -> None:
    for counts in run_ranks(_save_together_and_close, 3, tmp_path):
        assert len(set(counts[1:])) == 1, counts


def _make_before_the_group(rank: int, world_size: int, shared: Path) -> None:
    def local() -> LocalCheckpointManager:
        return LocalCheckpointManager(node_store(), "run", timeout=_TIMEOUT_S)

    def global_() -> GlobalCheckpointManager:
        return GlobalCheckpointManager(shared, timeout=_TIMEOUT_S)

    for make in (local, global_):
        assert "call torch.distributed.init_process_group()" in error_of(make, MismatchError)
    assert not any(node_store().glob("*"))

    # Launched in a way that does not say how many ranks there are.
    world = os.environ.pop("WORLD_SIZE")
    managers = [local(), global_()]
    os.environ["WORLD_SIZE"] = world
    dist.init_process_group("gloo")
    for manager in managers:
        calls = [lambda m=manager: m.save({"a": 1}, 1, is_async=False), manager.find_latest]
        for call in calls:
            assert "made before torch.distributed.init_process_group()" in (
                error_of(call, MismatchError)
            )
        manager.close()

    with local() as again:
        again.save({"a": rank}, 1)
        assert again.find_latest() == 1


def test_a_manager_made_before_the_process_group_is_an_error_and_no_world_of_one(
    node_dirs: Callable[[int], list[Path]], tmp_path: Path
) -> None:
    run_ranks(
        *(_make_before_the_group, 2, tmp_path / "shared"),
        init_group=False,
        store_per_node=node_dirs(2),
    )


def _die_at_points(here: Path, deaths: int) -> None:
    attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))

    def die_in(number: int) -> None:
        if attempt == number and number < deaths and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group("gloo")
    die_in(1)
    with (
        AsyncCallsQueue(timeout_s=60.0) as queue,
        LocalCheckpointManager(here / "node", "run", timeout=60.0) as local,
        GlobalCheckpointManager(here / "shared", timeout=60.0) as shared,
    ):
        found = [local.find_latest(), shared.find_latest()]
        die_in(2)
        for iteration in range(found[0] + 1, found[0] + 3):
            queue.schedule_async_request(local.save({"n": iteration}, iteration, is_async=True))
            queue.maybe_finalize_async_calls(blocking=True)
            shared.save({"n": iteration}, iteration, is_async=False)
            die_in(0)
    (here / f"{rank}").write_text(f"{attempt} {found}")
    dist.destroy_process_group()


@pytest.mark.fault("trainer-dies")
def test_torchrun_restarts_a_job_whose_ranks_died_at_different_points(
    tmp_path: Path, long_form: bool
) -> None:
    deaths = 3 if long_form else 1

    run_ranks(
        *(torchrun, 1, _die_at_points, (tmp_path, deaths), 3, tmp_path),
        init_group=False,
        timeout_s=150.0,
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )

    assert {(tmp_path / f"{rank}").read_text() for rank in range(2)} == {f"{deaths} [0, 0]"}
