"""Ranks that do what the test tells them, one command after another, and tell how it went.

Commands go over a socket in the file system, which reaches into other network namespaces.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from localckpt import CheckpointingException
from tests.ranks import RankGroup, start_ranks

__all__ = ["Answer", "Ranks"]

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended on one rank."""

    value: Any = None
    error: str | None = None
    """Type and text of an error that localckpt raises on purpose."""
    crash: str | None = None
    """The traceback of any other, or that the rank died."""

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.crash is None


class Ranks:
    """The processes of one life of a job; methods of ``make(rank, *args)`` are the commands."""

    def __init__(
        self, world_size: int, make: Callable[..., Any], *args: Any, env: Mapping[str, str]
    ) -> None:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="job-"))
            address = f"{directory}/s"
            with Listener(address, "AF_UNIX", world_size) as server:
                server._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
                self._group: RankGroup = stack.enter_context(
                    start_ranks(_obey, world_size, address, make, args, init_group=False, env=env)
                )
                self.pids = list(self._group.pids)
                joined = [server.accept() for _ in range(world_size)]
            by_rank = {connection.recv(): connection for connection in joined}
            self._connections: list[Connection] = [by_rank[rank] for rank in range(world_size)]
            self._stack = stack.pop_all()

    def tell(self, command: str, *args: Any, ranks: Collection[int]) -> None:
        """Send a command."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._connections[rank].send((command, args))

    def answers(self, limit_s: float, ranks: Collection[int]) -> dict[int, Answer]:
        """The answers to the last command, which must come within the limit."""
        asked = {self._connections[rank]: rank for rank in ranks}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        while asked:
            ready = wait(list(asked), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in asked.values():
                    self.kill(rank, signal.SIGUSR1)
                # For their stacks, in what they print.
                time.sleep(0.5)
                raise AssertionError(f"{asked.values()} did not answer within {limit_s:g} s")
            for connection in [c for c in asked if c in ready]:
                rank = asked.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = Answer(crash="died")
        return dict(sorted(answers.items()))

    def kill(self, rank: int, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._group.kill(rank, sig)

    def end(self) -> None:
        """Kill the job."""
        for connection in self._connections:
            connection.close()
        self._stack.close()


def _obey(rank: int, _: int, address: str, make: Callable[..., Any], args: Sequence[Any]) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Client(address, "AF_UNIX")
    connection.send(rank)
    does = make(rank, *args)
    while True:
        try:
            command, own = connection.recv()
        except EOFError:
            os._exit(1)
        try:
            answer = Answer(getattr(does, command)(*own))
        except CheckpointingException as raised:
            answer = Answer(error=f"{type(raised).__name__}: {raised}")
        except BaseException:  # noqa: BLE001 - the test wants to see all of them
            answer = Answer(crash=traceback.format_exc())
        connection.send(answer)
