"""Starts the ranks of a job as real processes, and never leaves one behind.

Ranks are forked from a warm server that has imported torch, so each starts in milliseconds. The
job's store is hosted by the test process, as torchrun's agents host it, so any rank may die. What
a rank prints is shown by the test that started it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.stores import serve_store
from localckpt.errors import CheckpointingException

__all__ = [
    "NODE_STORE",
    "Answer",
    "DeadRank",
    "RankGroup",
    "RanksFailedError",
    "announce",
    "await_announced",
    "die",
    "logged",
    "node_store",
    "obey",
    "on_ranks",
    "run_ranks",
    "same_on_all",
    "start_ranks",
]

NODE_STORE = "LOCALCKPT_TEST_NODE_STORE"
_SHOWN_CHARACTERS = 20_000
_LEAVING_S = 10.0
_CONNECTIONS: list[Connection] = []
"""In a rank: to the test."""
_SHOW_STACKS = signal.SIGUSR2


@dataclass(frozen=True, slots=True)
class DeadRank:
    """Stands in the results for a rank that was expected to die and did."""

    rank: int
    exitcode: int

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it; ``None`` when it called exit."""
        return signal.Signals(-self.exitcode) if self.exitcode < 0 else None


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command of :meth:`RankGroup.tell` ended on one rank."""

    value: Any = None
    error: str | None = None
    """Type and text of an error that localckpt raises on purpose."""
    crash: str | None = None
    """The traceback of any other, or that the rank died."""

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.crash is None


class RanksFailedError(Exception):
    """Some ranks raised, died or did not finish; ``failures`` has the text of each."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        told = (f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(failures.items()))
        super().__init__("\n".join([f"{len(failures)} rank(s) failed", *told]))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    expect_dead: Collection[int] = (),
    **options: Any,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in every rank and return what each returned.

    Args:
        fn: A function at the top of an importable module; it and ``args`` are pickled.
        timeout_s: After this many seconds all that still runs is killed and named in the error.
        expect_dead: Ranks that must end without returning; their result is a :class:`DeadRank`.
        options: For :func:`start_ranks`.

    Raises:
        RanksFailedError: With rank and traceback of every rank that failed. Once one has failed,
            the others get five seconds to end by themselves.
    """
    with start_ranks(fn, world_size, *args, **options) as group:
        return group.join(timeout_s, expect_dead)


def on_ranks(
    world_size: int | None = None,
    *,
    nodes: int = 0,
    after: tuple[Callable[..., None], int] | None = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that every rank runs: ``def test_it(rank, ...)``.

    It may take ``world_size``, and fixtures and parameters, which are pickled for the ranks.

    Args:
        world_size: How many ranks; if not given, the test is parametrised by it.
        nodes: The ranks are dealt to as many empty nodes, if to any.
        after: A function, and how many ranks of a job before have run it on these nodes.
        options: For :func:`run_ranks`.
    """

    def decorate(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def test(**given: Any) -> None:
            where = {"store_per_node": given.pop("node_dirs")(nodes)} if nodes else {}
            if after is not None:
                run_ranks(*after, **where)
            ranks = world_size or given.pop("world_size")
            run_ranks(_act, ranks, act.__module__, act.__name__, given, **where, **options)

        asked = list(inspect.signature(act).parameters.values())[1:]
        asked = [each for each in asked if world_size is None or each.name != "world_size"]
        if nodes:
            asked.append(inspect.Parameter("node_dirs", inspect.Parameter.KEYWORD_ONLY))
        named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in asked]
        test.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return test

    return decorate


def _act(rank: int, world_size: int, module: str, name: str, given: Mapping[str, Any]) -> None:
    act = getattr(importlib.import_module(module), name).__wrapped__
    takes_size = "world_size" in inspect.signature(act).parameters
    act(rank, **given, **({"world_size": world_size} if takes_size else {}))


@contextlib.contextmanager
def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    init_group: bool = True,
    backend: str = "gloo",
    group_timeout_s: float = 30.0,
    store_per_node: Sequence[Path] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[RankGroup]:
    """As :func:`run_ranks`, for a test that acts on the ranks while they run.

    Leaving the block kills and reaps whatever still runs.

    Args:
        init_group: Whether the default process group is made before ``fn`` and destroyed after it.
            The variables of ``env://`` are set either way.
        group_timeout_s: The process group's own timeout.
        store_per_node: One directory for each node; ranks are dealt to nodes in blocks, and each
            finds its own by :func:`node_store`. The order of the directories says which node is
            which, so handing them over in another order swaps nodes.
        env: More environment variables for the ranks (too late for what torch reads at import).
    """
    if store_per_node is not None and not 1 <= len(store_per_node) <= world_size:
        raise ValueError(f"{len(store_per_node)} nodes for {world_size} ranks")
    store = serve_store()
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as logs:
        group = RankGroup(world_size, Path(logs), dist.PrefixStore("test", store))
        try:
            for rank in range(world_size):
                variables = _rank_environment(rank, world_size, store.port, store_per_node)
                group._start(
                    rank,
                    _RankCall(call, rank, world_size, backend, init_group, group_timeout_s),
                    variables | dict(env or {}),
                )
            yield group
        finally:
            group._end()


class RankGroup:
    """The ranks that :func:`start_ranks` started."""

    def __init__(self, world_size: int, logs: Path, store: dist.Store) -> None:
        self.world_size = world_size
        self._logs = logs
        self._store = store
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._returned: set[int] = set()

    @property
    def pids(self) -> list[int]:
        return [_pid(process) for process in self._processes]

    def kill(self, rank: int, sig: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], sig)

    def await_announced(self, name: str, timeout_s: float = 30.0) -> Any:
        """Wait until a rank has called :func:`announce` with this name; return its value."""
        self._store.wait([name], timedelta(seconds=timeout_s))
        return pickle.loads(self._store.get(name))

    def tell(self, command: str, *args: Any, ranks: Collection[int]) -> None:
        """Have ranks that :func:`obey` carry out a command."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._connections[rank].send((command, args))

    def answers(self, limit_s: float, ranks: Collection[int]) -> dict[int, Answer]:
        """The answers to the last command, which must come within the limit."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        for rank in sorted(ranks):
            connection = self._connections[rank]
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    self._show_stacks(rank)
                    raise AssertionError(f"rank {rank} did not answer within {limit_s:g} s")
                answers[rank] = connection.recv()
            except (EOFError, OSError):
                answers[rank] = Answer(crash="died")
        return answers

    def output(self, rank: int) -> str:
        log = self._logs / f"{rank}"
        return log.read_text(errors="replace") if log.exists() else ""

    def await_printed(self, rank: int, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a rank has printed a text."""
        self.await_(lambda: text in self.output(rank), timeout_s)

    def await_(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something holds, while all ranks run."""
        until = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < until, self.output(0)
            assert all(process.exitcode is None for process in self._processes), self.output(0)
            time.sleep(0.02)

    def announce(self, name: str, value: Any = None) -> None:
        """Tell the ranks, who wait by the module's :func:`await_announced`."""
        self._store.set(name, pickle.dumps(value))

    def join(self, timeout_s: float = 60.0, expect_dead: Collection[int] = ()) -> list[Any]:
        """Wait for all ranks and return their results, as :func:`run_ranks` does."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._connections))
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting.values()), max(0.0, left))
            if not ready:
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                connection = waiting.pop(rank)
                outcome = self._outcome(rank, connection, rank in expect_dead)
                if isinstance(outcome, _Failure):
                    failures[rank] = outcome.text
                    deadline = min(deadline, time.monotonic() + 5.0)
                else:
                    results[rank] = outcome
        for rank in waiting:
            others = " after another rank failed" if failures else f" within {timeout_s:g} s"
            failures[rank] = f"did not end{others}"
            self._show_stacks(rank)
        if failures:
            raise RanksFailedError(failures)
        return [results[rank] for rank in range(self.world_size)]

    def _show_stacks(self, rank: int) -> None:
        """Have a rank that hangs write the stacks of its threads into its output."""
        with contextlib.suppress(ProcessLookupError):
            self.kill(rank, _SHOW_STACKS)
        self._processes[rank].join(0.5)

    def _start(self, rank: int, call: _RankCall, env: dict[str, str]) -> None:
        context = _warm_context()
        # It reaches into other network namespaces.
        ours, its = context.Pipe()
        process = context.Process(
            target=_rank_main, args=(call, env, its, self._logs / f"{rank}"), name=f"rank{rank}"
        )
        process.start()
        its.close()
        self._processes.append(process)
        self._connections.append(ours)

    def _outcome(self, rank: int, connection: Connection, may_die: bool) -> Any:
        try:
            returned, payload = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError, pickle.UnpicklingError):
            return self._death(rank, may_die)
        self._returned.add(rank)
        if not returned:
            return _Failure(payload)
        if may_die:
            return _Failure(f"was expected to die, and returned {payload!r}")
        return payload

    def _death(self, rank: int, may_die: bool) -> Any:
        process = self._processes[rank]
        process.join(10.0)
        if process.exitcode is None:
            return _Failure("closed its connection but did not end within 10 s")
        dead = DeadRank(rank, process.exitcode)
        if may_die:
            return dead
        return _Failure(f"died: {dead.signal.name if dead.signal else f'exit {dead.exitcode}'}")

    def _end(self) -> None:
        left_hanging = [rank for rank in sorted(self._returned) if not self._leaves(rank)]
        for process in self._processes:
            if process.exitcode is None:
                _kill_tree(_pid(process))
        for process in self._processes:
            process.join(10.0)
        for connection in self._connections:
            connection.close()
        for rank in range(len(self._processes)):
            text = self.output(rank)
            if text.strip():
                print(f"--- output of rank {rank} ---\n{text[-_SHOWN_CHARACTERS:]}")
        stuck = [process.name for process in self._processes if process.exitcode is None]
        if stuck:
            raise RuntimeError(f"could not be killed: {', '.join(stuck)}")
        for process in self._processes:
            process.close()
        if left_hanging:
            text = f"returned, but its process did not end within {_LEAVING_S:g} s"
            raise RanksFailedError(dict.fromkeys(left_hanging, text))

    def _leaves(self, rank: int) -> bool:
        """Whether a rank that has returned ends by itself: no thread of it may stay."""
        self._processes[rank].join(_LEAVING_S)
        return self._processes[rank].exitcode is not None


def node_store() -> Path:
    """In a rank: the directory of the node it plays on (``store_per_node``)."""
    return Path(os.environ[NODE_STORE])


def obey(rank: int, world_size: int, make: Callable[..., Any], *args: Any) -> None:
    """In every rank: make ``make(rank, *args)``, whose methods are the commands of the test."""
    does = make(rank, *args)
    while True:
        command, own = _CONNECTIONS[0].recv()
        try:
            answer = Answer(getattr(does, command)(*own))
        except CheckpointingException as raised:
            answer = Answer(error=f"{type(raised).__name__}: {raised}")
        except BaseException:  # noqa: BLE001 - the test wants to see all of them
            answer = Answer(crash=traceback.format_exc())
        _CONNECTIONS[0].send(answer)


def die(*_: Any) -> Any:
    """In a rank: be killed, in the place of whatever function."""
    os.kill(os.getpid(), signal.SIGKILL)


def logged() -> list[str]:
    """In a rank: the warnings and errors that are logged from here on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("localckpt").addHandler(handler)
    return lines


def same_on_all(value: Any) -> Any:
    """In a rank: what all ranks must have alike."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * len(values)
    return value


def announce(name: str, value: Any = None) -> None:
    """In a rank: tell the test, and the other ranks, that a point was reached."""
    _test_store().set(name, pickle.dumps(value))


def await_announced(name: str, timeout_s: float = 30.0) -> Any:
    """In a rank: wait until anyone has announced this name; return the value that came with it."""
    store = _test_store()
    store.wait([name], timedelta(seconds=timeout_s))
    return pickle.loads(store.get(name))


def torchrun(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    restarts: int,
    logs: Path,
) -> None:
    """In one rank, without a group: be torchrun, and run ``fn(*args)`` in two forked processes."""
    # torch leaves files there of ranks that are killed.
    tempfile.tempdir = str(logs)
    config = LaunchConfig(
        *(1, 1, 2, DefaultLogsSpecs(str(logs)), uuid.uuid4().hex),
        rdzv_endpoint="localhost:0",
        rdzv_backend="c10d",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, fn)(*args)


def init_group_with_store_on(host: int, rank: int, world_size: int) -> dist.TCPStore:
    """In a rank, with ``init_group=False``: make the default group; one rank hosts its store."""
    if rank == host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        announce("port", store.port)
    else:
        store = dist.TCPStore("127.0.0.1", await_announced("port"), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return store


@dataclass(frozen=True, slots=True)
class _RankCall:
    pickled: bytes
    rank: int
    world_size: int
    backend: str
    init_group: bool
    group_timeout_s: float

    def run(self) -> Any:
        torch.set_num_threads(1)
        fn, args = pickle.loads(self.pickled)
        if not self.init_group:
            return fn(self.rank, self.world_size, *args)
        dist.init_process_group(self.backend, timeout=timedelta(seconds=self.group_timeout_s))
        # Of two ranks that connect, the first to be done may leave before the other one is, which
        # gloo then takes for a crash.
        if self.backend == "gloo":
            dist.barrier()
        try:
            return fn(self.rank, self.world_size, *args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def _rank_main(call: _RankCall, env: dict[str, str], connection: Connection, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.update(env)
    _CONNECTIONS.append(connection)
    faulthandler.register(_SHOW_STACKS, file=2)
    try:
        outcome = pickle.dumps((True, call.run()))
    except BaseException:  # noqa: BLE001 - also SystemExit: the test wants to see all of them
        outcome = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(outcome)
    connection.close()


def _rank_environment(
    rank: int, world_size: int, port: int, stores: Sequence[Path] | None
) -> dict[str, str]:
    nodes = len(stores) if stores else 1
    node_of = [r * nodes // world_size for r in range(world_size)]
    node = node_of[rank]
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank - node_of.index(node)),
        "LOCAL_WORLD_SIZE": str(node_of.count(node)),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: every rank is a client of a store that outlives it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return env | ({NODE_STORE: str(stores[node])} if stores else {})


def _test_store() -> dist.Store:
    port = int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("test", dist.TCPStore("127.0.0.1", port, is_master=False))


@functools.cache
def _warm_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context


def _pid(process: ForkServerProcess) -> int:
    if process.pid is None:
        raise RuntimeError(f"{process.name} was not started")
    return process.pid


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(pid)
        family = [*rank.children(recursive=True), rank]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
