"""The network is cut while ranks talk: errors in time, never two answers, and all is well after."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import localckpt
from tests.faults.netns import CONTROL, DATA, STORE_ADDRESS, Network, enter
from tests.managers.jobs import Dirs, assert_same, cliques, make_manager
from tests.ranks import Answer, RankGroup, obey, run_ranks, start_ranks

pytestmark = [pytest.mark.fault("cut-network", "silent-peer"), pytest.mark.rows(1)]

_WORLD_SIZE, _SESSION = 3, "job"
# So long may a rank that nothing happens to be late, on a machine that is busy.
_TIMEOUT_S = 4.0
# A call waits up to seven times for bytes that do not move, and three times for the others.
_LIMIT_S = 10 * _TIMEOUT_S + 20.0
_START_S = 60.0
# Where nothing is cut, ranks may be as slow as the machine is busy.
_PATIENT_S = 30.0
# Two seconds under way to a node whose line is slow: it is cut in the middle, and seen to be.
_NBYTES = 24 << 20
_NBYTES_PER_S = 12 << 20
_CUT_AFTER_NBYTES = 4 << 20


class _Cut(NamedTuple):
    """Which node is cut off, and from what; its rank may be stopped, or killed, instead."""

    node: int
    lines: tuple[str, ...]


_STOPPED, _KILLED = (), ("killed",)
_WAYS = ((CONTROL, DATA), (CONTROL,), (DATA,), _STOPPED, _KILLED)
_CUTS = [_Cut(*way) for way in product((1, 0), _WAYS)]


class _Node:
    """One rank; its methods are the commands."""

    def __init__(
        self,
        rank: int,
        namespaces: Sequence[str],
        stores: Sequence[Path],
        timeout_s: float,
        options: dict[str, bool],
    ) -> None:
        enter(namespaces[rank])
        self._rank, self._root, self._timeout_s = rank, stores[rank], timeout_s
        self._options = options

    def open(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        repl = cliques(1, 2, self._timeout_s)
        self._queue = localckpt.AsyncCallsQueue(timeout_s=self._timeout_s)
        options = {"timeout": self._timeout_s, "keep_last": 2, **self._options}
        self._manager = make_manager("disk", self._root, _SESSION, repl, **options)

    def find(self) -> int:
        self._manager.latest_iteration = -1
        return int(self._manager.find_latest())

    def load(self) -> None:
        """Load what was found, bit for bit."""
        found = self._manager.latest_iteration
        state, ckpt_id = self._manager.load()
        assert ckpt_id == (found, self._rank, _SESSION)
        assert_same(state, _state(self._rank, found))

    def status(self) -> str:
        return str(self._manager.status()[0])

    def save(self, iteration: int) -> None:
        self._manager.save(_state(self._rank, iteration), iteration)

    def begin(self, iteration: int) -> None:
        state = _state(self._rank, iteration)
        self._queue.schedule_async_request(self._manager.save(state, iteration, is_async=True))

    def finalize(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def save_rows(self, iteration: int) -> None:
        """Save this rank's rows of a tensor that all ranks share."""
        self._manager.save({"shared": _shared(Shard(0))}, iteration)

    def load_columns(self) -> None:
        """Load this rank's columns of it, most of which come from the other ranks."""
        into = {"shared": torch.zeros_like(_shared(Shard(1)))}
        self._manager.load(into=into)
        assert torch.equal(into["shared"].to_local(), _shared(Shard(1)).to_local())


def _state(rank: int, iteration: int) -> dict[str, Any]:
    large = torch.arange(_NBYTES // 4, dtype=torch.int32) * (1 + rank) + 1000 * iteration
    return {"large": large, "iteration": iteration}


def _shared(placement: Shard) -> DTensor:
    mesh = init_device_mesh("cpu", (_WORLD_SIZE,))
    rows = torch.arange(_WORLD_SIZE * _NBYTES // 4, dtype=torch.int32).view(-1, 1 << 10)
    return distribute_tensor(rows, mesh, [placement], src_data_rank=None)


class _Job:
    """Ranks on nodes that are connected by a network."""

    def __init__(self, network: Network, stores: Sequence[Path]) -> None:
        self.network = network
        self.stores = list(stores)
        self.options: dict[str, bool] = {}
        self.ranks: RankGroup
        self._life = ExitStack()

    def start(self, timeout_s: float = _TIMEOUT_S) -> None:
        args = (self.network.namespaces, self.stores, timeout_s, self.options)
        env = {"MASTER_ADDR": STORE_ADDRESS, "GLOO_SOCKET_IFNAME": DATA}
        # What ranks are forked from must not be started in the hub.
        run_ranks(_do_nothing, 1, init_group=False)
        with self.network.inside_hub():
            ranks = start_ranks(obey, _WORLD_SIZE, _Node, *args, init_group=False, env=env)
            self.ranks = self._life.enter_context(ranks)
        self.all_do("open")

    def all_do(self, command: str, *args: Any) -> list[Any]:
        """What each rank gives back; all must succeed."""
        self.ranks.tell(command, *args, ranks=range(_WORLD_SIZE))
        answers = self.ranks.answers(_START_S, range(_WORLD_SIZE))
        assert all(answer.succeeded for answer in answers.values()), answers
        return [answer.value for answer in answers.values()]

    def end(self) -> None:
        """Kill the job."""
        self._life.close()

    def cut_in(
        self, cut: _Cut, command: str, *args: Any, moves: bool, to: int | None = None
    ) -> dict[int, Answer]:
        """Make a call, cut the network in the middle of it, and wait for what the ranks say.

        If shards are moved in it, to the node's rank or another one, the network is cut when some
        bytes have come; else the node is cut off before its rank makes the call.
        """
        to = cut.node if to is None else to
        others = [rank for rank in range(_WORLD_SIZE) if rank != cut.node]
        receiver = self.ranks.pids[to]
        before = _received(receiver)
        if moves:
            self.network.slow(to, DATA, _NBYTES_PER_S)
        self.ranks.tell(command, *args, ranks=range(_WORLD_SIZE) if moves else others)
        if moves:
            deadline = time.monotonic() + _START_S
            while _received(receiver) <= before + _CUT_AFTER_NBYTES:
                assert time.monotonic() < deadline
                time.sleep(0.0005)
        else:
            time.sleep(0.2)
        if cut.lines in (_STOPPED, _KILLED):
            signals = {_STOPPED: signal.SIGSTOP, _KILLED: signal.SIGKILL}
            self.ranks.kill(cut.node, signals[cut.lines])
        else:
            self.network.cut(cut.node, cut.lines)
        if not moves and cut.lines != _KILLED:
            self.ranks.tell(command, *args, ranks=[cut.node])
        try:
            answers = self.ranks.answers(_LIMIT_S, others)
            if cut.lines == _STOPPED:
                self.ranks.kill(cut.node, signal.SIGCONT)
            late = [] if cut.lines == _KILLED else [cut.node]
            return answers | self.ranks.answers(_LIMIT_S, late)
        finally:
            self.network.mend(to, [DATA])
            self.network.mend(cut.node, [CONTROL, DATA])

    def resumes_from(self, *iterations: int) -> None:
        """Start anew: all ranks find and load one checkpoint, one of these, bit for bit."""
        self.end()
        self.start(_PATIENT_S)
        (found,) = set(self.all_do("find"))
        self.all_do("load")
        assert found in iterations
        self.all_do("save", found + 5)
        self.end()


def _do_nothing(rank: int, world_size: int) -> None:
    return


def _received(pid: int) -> int:
    """Bytes that have come to a rank from others."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DATA:
            return int(counts.split()[0])
    return 0


def _ranks_in(text: str) -> set[int]:
    """The ranks that a message names: "rank 1", "ranks 0 and 2", "ranks 0 to 2"."""
    named = set()
    for listed in re.findall(r"\branks? (\d+(?:(?:, | and | to )\d+)*)", text):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
            named |= set(range(int(first), int(last or first) + 1))
    return named


def _assert_all_failed(answers: dict[int, Answer], cut: _Cut) -> None:
    assert not any(answer.succeeded for answer in answers.values()), answers
    _assert_named({rank: str(answer.error) for rank, answer in answers.items()}, cut)


def _assert_named(errors: dict[int, str], cut: _Cut) -> None:
    """Each rank says who did not come; who is cut off from the store, that it is silent."""
    for rank, text in errors.items():
        assert "PeerLostError" in text, text
        named = _ranks_in(text) - {rank}
        if rank != cut.node:
            assert cut.node in named, text
        else:
            assert named or "key-value store does not answer" in text, text


@pytest.fixture
def job(node_dirs: Dirs) -> Iterator[_Job]:
    """A job that has saved iteration 1, and is over."""
    network = Network(_WORLD_SIZE)
    made = _Job(network, node_dirs(_WORLD_SIZE))
    made.start(_PATIENT_S)
    made.all_do("save", 1)
    made.end()

    yield made

    made.end()
    network.close()


@pytest.mark.parametrize(
    ("cut", "strict"), [*((cut, False) for cut in _CUTS), (_Cut(1, (DATA,)), True)], ids=str
)
def test_replicas_that_stop_half_way_cost_the_copies_or_are_an_error_that_names_the_node(
    cut: _Cut, strict: bool, job: _Job
) -> None:
    job.options = {"strict": strict}
    job.start()

    answers = job.cut_in(cut, "save", 2, moves=True)

    if cut.lines == (DATA,) and not strict:
        # All ranks can still agree that each has its own shard.
        assert all(answer.succeeded for answer in answers.values()), answers
        assert all(told.startswith("iteration 2 is local, ") for told in job.all_do("status"))
        job.resumes_from(2)
    else:
        _assert_all_failed(answers, cut)
        job.resumes_from(1)


@pytest.mark.parametrize("cut", _CUTS, ids=str)
def test_a_node_that_is_cut_off_never_makes_two_answers_of_find_latest(
    cut: _Cut, job: _Job
) -> None:
    job.start()

    answers = job.cut_in(cut, "find", moves=False)

    assert {answer.value for answer in answers.values() if answer.succeeded} <= {1}
    if cut.lines != (DATA,):
        # Whoever comes late gets no answer that the others have not got.
        _assert_all_failed(answers, cut)
    job.resumes_from(1)


@pytest.mark.parametrize("cut", _CUTS, ids=str)
def test_a_save_is_there_if_any_rank_called_it_complete_before_the_network_was_cut(
    cut: _Cut, job: _Job
) -> None:
    job.start()
    job.all_do("begin", 2)

    answers = job.cut_in(cut, "finalize", moves=False)

    assert not any(answer.crash for answer in answers.values()), answers
    errors = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
    _assert_named(errors, cut)
    all_failed = len(errors) == len(answers)
    assert cut.lines not in (_STOPPED, _KILLED) or all_failed, answers
    # What one rank has called complete is there, whatever the others were told.
    job.resumes_from(*([1, 2] if all_failed else [2]))


@pytest.mark.fault("lost-during-recovery")
@pytest.mark.parametrize("restored", range(2))
@pytest.mark.parametrize("cut", _CUTS, ids=str)
def test_a_load_from_a_peer_that_is_cut_off_ends_in_time_and_can_be_done_again(
    cut: _Cut, restored: int, job: _Job
) -> None:
    shutil.rmtree(job.stores[restored])
    job.start()
    assert job.all_do("find") == [1] * _WORLD_SIZE

    answers = job.cut_in(cut, "load", moves=True, to=restored)

    _assert_all_failed(answers, cut)
    job.resumes_from(1)


@pytest.mark.fault("world-size")
@pytest.mark.parametrize("cut", _CUTS, ids=str)
def test_a_load_into_another_sharding_that_is_cut_off_ends_in_time_and_can_be_done_again(
    cut: _Cut, job: _Job
) -> None:
    job.options = {"elastic": True}
    job.start(_PATIENT_S)
    job.all_do("save_rows", 2)
    job.end()
    # With copies on all nodes, none would send another one what it wants.
    for node, store in enumerate(job.stores):
        for shard in store.rglob("000000000002.*.safetensors"):
            if int(shard.name.split(".")[1]) != node:
                shard.unlink()
    job.start()
    assert job.all_do("find") == [2] * _WORLD_SIZE

    answers = job.cut_in(cut, "load_columns", moves=True)

    _assert_all_failed(answers, cut)
    job.end()
    job.start(_PATIENT_S)
    job.all_do("load_columns")
