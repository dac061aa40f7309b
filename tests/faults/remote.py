"""Ranks that do what the test tells them, one command after another, and tell how it went.

Commands go over a socket in the file system, which reaches into other network namespaces, and whose
end tells at once that a rank is dead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from localckpt import CheckpointingException
from tests.ranks import RankGroup, start_ranks

__all__ = ["Answer", "PerRank", "Ranks"]

_START_S = 60.0
_GONE_S = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended on one rank."""

    value: Any = None
    error: str | None = None
    """Type and text of an error that localckpt raises on purpose."""
    crash: str | None = None
    """The traceback of any other."""
    died: bool = False

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.crash is None and not self.died

    def __str__(self) -> str:
        if self.died:
            return "died"
        return "ok" if self.succeeded else (self.error or str(self.crash))


class Ranks:
    """The processes of one life of a job.

    Args:
        world_size: How many.
        make: Makes, in each rank, the object whose methods are the commands: called with the rank
            and ``args``.
        env: More environment variables for the ranks.
    """

    def __init__(
        self,
        world_size: int,
        make: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self.output = ""
        self._stack = contextlib.ExitStack()
        self._dead: set[int] = set()
        self._killed: set[int] = set()
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="job-")))
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(directory / "s"))
                server.listen(world_size)
                server.settimeout(_START_S)
                # Not to be shown at once: a campaign has hundreds of lives.
                self._shown = io.StringIO()
                self._group: RankGroup = self._stack.enter_context(
                    start_ranks(
                        *(_obey, world_size, str(directory / "s"), make, args),
                        init_group=False,
                        env=env,
                    )
                )
                self.pids = list(self._group.pids)
                self._connections = self._accept(server)
        except BaseException:
            self._stack.close()
            raise

    @property
    def living(self) -> list[int]:
        gone = self._dead | self._killed
        return [rank for rank in range(self.world_size) if rank not in gone]

    def tell(self, command: str, *args: Any, ranks: Collection[int] | None = None) -> None:
        """Send a command; a :class:`PerRank` among the arguments gives each rank its own."""
        for rank in self.living if ranks is None else ranks:
            own = [arg.values[rank] if isinstance(arg, PerRank) else arg for arg in args]
            with contextlib.suppress(OSError):
                self._connections[rank].send_bytes(pickle.dumps((command, own)))

    def answers(self, limit_s: float, ranks: Collection[int] | None = None) -> dict[int, Answer]:
        """The answers to the last command, which must come within the limit."""
        asked = {self._connections[r]: r for r in (self.living if ranks is None else ranks)}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        while asked:
            ready = wait(list(asked), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._complain(list(asked.values()), limit_s)
            for connection in [c for c in asked if c in ready]:
                rank = asked.pop(connection)
                answers[rank] = self._answer(rank, connection)
        return dict(sorted(answers.items()))

    def ask(self, limit_s: float, command: str, *args: Any) -> dict[int, Answer]:
        """Send a command to all living ranks and wait for their answers."""
        self.tell(command, *args)
        return self.answers(limit_s)

    def kill(self, rank: int, sig: signal.Signals = signal.SIGKILL) -> None:
        if sig == signal.SIGKILL:
            self._killed.add(rank)
        with contextlib.suppress(ProcessLookupError):
            self._group.kill(rank, sig)

    def end(self, *, leave: bool = False) -> None:
        """Kill the job, or let its ranks end by themselves, which they must do."""
        try:
            if leave:
                self.tell("leave")
                self._group.join(_GONE_S, expect_dead=self._dead | self._killed)
        finally:
            for connection in self._connections:
                connection.close()
            with contextlib.redirect_stdout(self._shown):
                self._stack.close()
            self.output = self._shown.getvalue()

    def _accept(self, server: socket.socket) -> list[Connection]:
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self.world_size:
            connection = Connection(server.accept()[0].detach())
            by_rank[pickle.loads(connection.recv_bytes())] = connection
        return [by_rank[rank] for rank in range(self.world_size)]

    def _answer(self, rank: int, connection: Connection) -> Answer:
        try:
            answer = pickle.loads(connection.recv_bytes())
            assert isinstance(answer, Answer)
            return answer
        except (EOFError, OSError):
            self._dead.add(rank)
            return Answer(died=True)

    def _complain(self, ranks: Sequence[int], limit_s: float) -> NoReturn:
        for rank in ranks:
            self.kill(rank, signal.SIGUSR1)
        # For their stacks, in what they print.
        time.sleep(0.5)
        raise AssertionError(f"ranks {ranks} did not answer within {limit_s:g} s")


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument that is another one for each rank."""

    values: Sequence[Any]


def _obey(rank: int, _: int, address: str, make: Callable[..., Any], args: Sequence[Any]) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        connection = Connection(client.detach())
    connection.send_bytes(pickle.dumps(rank))
    does = make(rank, *args)
    while True:
        try:
            command, own = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(1)
        if command == "leave":
            connection.close()
            return
        connection.send_bytes(pickle.dumps(_carry_out(getattr(does, command), own)))


def _carry_out(method: Callable[..., Any], args: Sequence[Any]) -> Answer:
    value = error = crash = None
    try:
        value = method(*args)
    except CheckpointingException as raised:
        error = f"{type(raised).__name__}: {raised}"
    except BaseException:  # noqa: BLE001 - the test wants to see all of them
        crash = traceback.format_exc()
    return Answer(value, error, crash)
