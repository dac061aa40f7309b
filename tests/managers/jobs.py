"""What the tests of the managers have in common: states, managers on nodes, and what lies there."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import localckpt
from localckpt.waiting import wait_until
from tests.ranks import node_store

Dirs = Callable[[int], list[Path]]
"""Fixture that makes so many directories, each the disk or the shared memory of a node."""
Redundancy = tuple[int | None, int] | str | None
"""``(jump, factor)`` of cliques, or ``"parity m of g"``."""
NodesOf = Callable[[str, int], list[Path]]
"""Fixture that makes nodes for stores of a kind."""
KINDS = ("disk", "memory")
IN_PIECES_NBYTES = 5 << 20
"""Size of a state that a manager of kind ``"pieces"`` does not stage as a whole."""
MAX_S = 20.0
"""Timeout of managers, strategies and queues where no timeout is to be seen."""


def state_of(rank: int, iteration: int, nbytes: int = 4000) -> dict[str, Any]:
    """A state like no other's: values depend on rank and iteration, sizes on the rank."""
    random = torch.Generator().manual_seed(1000 * iteration + rank)
    numel = nbytes // 4 + 17 * rank
    return {
        "model": {
            "weight": torch.randn(numel, generator=random),
            "bias": torch.randn(3, 5 + rank, generator=random).to(torch.bfloat16),
        },
        "optimizer": {"step": torch.tensor(float(iteration)), "empty": torch.zeros(0)},
        "random": random.get_state(),
        "iteration": iteration,
        "rank": rank,
        "losses": (1.5, [iteration, None]),
    }


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit, in type, shape and dtype, whatever the containers."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.device == expected.device
        left, right = (t.detach().contiguous().flatten() for t in (found, expected))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right)
    else:
        assert found == expected


def make_manager(
    kind: str,
    root: Path,
    session_id: str = "",
    repl_strategy: Any = None,
    **options: Any,
) -> Any:
    """A manager of a kind, whose store is ``root``; ``"pieces"`` has 4 MiB of memory for saves."""
    options = {"timeout": MAX_S} | options
    if kind == "pieces":
        options["staging_limit"] = 4 << 20
    if kind != "memory":
        manager = localckpt.LocalCheckpointManager(root, session_id, repl_strategy, **options)
        manager.store.piece_nbytes = 1 << 20 if kind == "pieces" else manager.store.piece_nbytes
        return manager
    return localckpt.InMemoryCheckpointManager(session_id, repl_strategy, root=root, **options)


def before_commit(manager: Any, hook: Callable[[localckpt.CkptID], bool | None]) -> Any:
    """Have a manager call a hook before it commits a piece, which ``False`` leaves out."""
    commit = manager.store.commit

    def commit_each(slots: Any) -> None:
        for slot in slots:
            if hook(slot.identity.ckpt_id) is not False:
                commit([slot])

    manager.store.commit = commit_each
    return manager


def troubled(manager: Any) -> Any:
    """Have a manager's commits fail when it is asked to, by its ``trouble``."""
    manager.trouble = None

    def fail(ckpt_id: localckpt.CkptID) -> bool:
        if manager.trouble == "refuses":
            raise localckpt.StorageError("this disk is bad")
        if manager.trouble == "raises":
            raise ZeroDivisionError("a mistake of the user's")
        is_forgotten = manager.trouble == "forgets the replica" and ckpt_id.rank != manager.rank
        return manager.trouble != "does nothing" and not is_forgotten

    return before_commit(manager, fail)


def cliques(jump: int | None, factor: int, timeout_s: float = MAX_S) -> Any:
    """The replication strategy; collective."""
    return localckpt.CliqueReplicationStrategy.from_replication_params(
        jump, factor, timeout_s=timeout_s
    )


def strategy_of(redundancy: Redundancy, timeout_s: float = MAX_S) -> Any:
    """A strategy, or nothing; a context."""
    if redundancy is None:
        return nullcontext()
    if isinstance(redundancy, str):
        parity, group_size = map(int, redundancy.removeprefix("parity ").split(" of "))
        return localckpt.ParityReplicationStrategy(parity, group_size, timeout_s=timeout_s)
    return cliques(*redundancy, timeout_s)


def on_node(session: str = "", repl: Any = None, **options: Any) -> Any:
    """In a rank: its manager on disk, with time for ranks that import DTensors at once."""
    return make_manager("disk", node_store(), session, repl, **{"timeout": 120.0, **options})


@contextmanager
def in_job(
    repl: Any = None, kind: str = "disk", **options: Any
) -> Iterator[tuple[Any, localckpt.AsyncCallsQueue]]:
    """In a rank: its manager and a queue; ranks keep copies in pairs if no strategy is given."""
    with (
        repl or cliques(1, 2) as strategy,
        make_manager(kind, node_store(), "job", strategy, **options) as manager,
        localckpt.AsyncCallsQueue(timeout_s=MAX_S) as queue,
    ):
        yield manager, queue


def save(
    manager: Any, state: Any, iteration: int, queue: localckpt.AsyncCallsQueue | None = None
) -> None:
    """Save and finalize; behind training if there is a queue."""
    if queue is None:
        assert manager.save(state, iteration) is None
        return
    queue.schedule_async_request(manager.save(state, iteration, is_async=True))
    queue.maybe_finalize_async_calls(blocking=True)


def resume(manager: Any, rank: int, iteration: int) -> str:
    """Find and load that iteration and nothing else, bit for bit; where the shard came from."""
    assert manager.find_latest() == iteration
    state, ckpt_id = manager.load()
    assert ckpt_id == (iteration, rank, manager.session_id)
    assert_same(state, state_of(rank, iteration))
    assert manager.last_load.iteration == iteration
    assert manager.last_load.nbytes > 0
    return str(manager.last_load.source)


def error_of(
    call: Callable[[], Any], kind: type[Exception] = localckpt.CheckpointingException
) -> str:
    """Message of the error that a call must raise; its type stands before it."""
    with pytest.raises(kind) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def files(*roots: Path) -> list[str]:
    """All files in stores but those that tell who is here, or what happened, or that a next save
    will want."""
    administration = {"node-token", ".lock", ".owner", ".notes"}
    return sorted(
        str(path.relative_to(root))
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and path.name not in administration and not is_ahead(path)
        if path.suffix != ".jsonl"
    )


def everything(root: Path) -> dict[Path, tuple[int, int]]:
    """All names below a directory, each with its inode and time of change."""
    return {p: (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in [root, *root.rglob("*")]}


def is_ahead(path: Path) -> bool:
    """Whether it is memory that was made ahead of time; closing the manager removes it."""
    return path.name.startswith("ahead.")


def iterations_on(*roots: Path) -> set[int]:
    """Iterations that stores have files of, in whatever condition, recycled files left out."""
    names = (name.rpartition("/")[2] for name in files(*roots))
    return {int(name.partition(".")[0]) for name in names if not name.endswith(".recycled")}


def damage(path: Path, position: float = 0.5) -> None:
    """Flip one bit of a file, at a fraction of its length; others may be reading it."""
    with path.open("r+b") as file:
        at = int(position * (path.stat().st_size - 1))
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("localckpt")]


def our_children() -> list[str]:
    return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]


@contextmanager
def reads_fail(path: Path) -> Iterator[None]:
    """Every positioned read of a file by this process is an EIO, as from a disk that breaks."""
    me = os.getpid()
    tracer = subprocess.Popen(
        [
            *("strace", "-f", "-qq", "-o", os.devnull, "-p", str(me), "-P", str(path)),
            *("-e", "trace=preadv,preadv2", "-e", "inject=preadv,preadv2:error=EIO"),
        ]
    )
    try:
        status, told = Path(f"/proc/{me}/status"), f"TracerPid:\t{tracer.pid}\n"
        assert wait_until(lambda: tracer.poll() is None and told in status.read_text(), MAX_S)
        yield
    finally:
        tracer.terminate()
        tracer.wait(MAX_S)


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """This process cannot write more into a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def take_away(folder: Path) -> None:
    """Move a folder, and put a file in its place, so that no folder can be made there."""
    folder.rename(folder.with_name(f"{folder.name} away"))
    folder.write_text("in the way")


def put_back(folder: Path) -> None:
    """Undo :func:`take_away`."""
    folder.unlink()
    folder.with_name(f"{folder.name} away").rename(folder)
