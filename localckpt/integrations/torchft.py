"""Checkpoint transport for torchft's ``Manager`` that sends a replica's state as a shard image.

Replicas of torchft share neither a process group nor a store, so an image goes over a connection of
its own, from a server in the process that sends.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from localckpt.errors import CheckpointingException, MismatchError, PeerLostError
from localckpt.ids import Generation, ShardIdentity
from localckpt.integrations.versions import at_least
from localckpt.ranks.deadline import Deadline, begin, within
from localckpt.state_dict.image import ImagePlanner, pack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import MemorySource
from localckpt.state_dict.targets import TargetRules, find_targets
from localckpt.storage.buffers import PrivateBuffer, allocate

with at_least("torchft", "torchft-nightly"):
    from torchft.checkpointing.transport import CheckpointTransport

logger = logging.getLogger(__name__)

# Token of the sender, step, and the seconds that the receiver has left.
_REQUEST = struct.Struct("!32sqd")
# Step that is offered, and the size of the image that follows: 0 for none.
_REPLY = struct.Struct("!qQ")
_NO_STEP, _NO_SENDER = -1, -2
_PAUSE_S, _REQUEST_S, _CLOSING_S = 0.05, 10.0, 10.0
# Who keeps to the deadline says why it has passed.
_LAST_WORD_S = 0.5
# Sockets take no timeout of any length.
_LONGEST_S = 86_400.0


class ImageTransport(CheckpointTransport[Any]):
    """Transport for ``torchft.Manager(checkpoint_transport=...)`` that verifies what it receives.

    The sender copies the state, which training may then change, and any number of replicas fetch
    the copy at once. A receiver verifies every block before it changes anything, and makes objects
    of allowed classes only.

    Args:
        state_dict: Returns the state whose tensors are filled where they are, in the form that is
            sent: by a ``Manager`` that is ``{"user": {"default": ...}}`` and a few numbers. Tensors
            that it does not have are made in host memory, as all are by default.
        hostname: Name by which other replicas reach this host; by default that of the host.
        safe_globals: Classes and functions that a state may name, beyond the defaults.

    Raises:
        UnsafeGlobalError: One of ``safe_globals`` would run what a sender says.
    """

    def __init__(
        self,
        state_dict: Callable[[], Any] | None = None,
        *,
        hostname: str | None = None,
        safe_globals: Iterable[Any] = (),
    ) -> None:
        self._target, self._allowed = state_dict, SafeGlobals(safe_globals)
        self._planner = ImagePlanner(self._allowed)
        # Whoever reaches the port needs it to be sent anything.
        self._token = secrets.token_hex(16)
        self._offered = _NO_STEP, memoryview(b"")
        self._is_closed, self._ended = False, threading.Condition()
        self._connections: set[socket.socket] = set()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self._address = f"{hostname or socket.gethostname()}:{self._listener.getsockname()[1]}"
        self._serving = begin(self._serve, "localckpt-torchft-serve")

    def metadata(self) -> str:
        """Return the address and the token by which other replicas fetch from this one."""
        return f"{self._address}/{self._token}"

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Copy the state, and offer the copy to all who fetch it, by deadlines of their own.

        Raises:
            CheckpointingException: The state has an object that could not be loaded again, or the
                transport is shut down; nothing is offered then.
        """
        self.disallow_checkpoint()
        self._require_open()
        if torch.accelerator.is_available():
            # The last step of the optimizer may be under way on another stream than this thread's.
            torch.accelerator.synchronize()
        self._offered = step, pack(state_dict, _identity(self._token, step), self._planner).view

    def disallow_checkpoint(self) -> None:
        """Offer nothing any more, and wait for nobody: a copy that is being sent is sent."""
        self._offered = _NO_STEP, memoryview(b"")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch the state of a step by what the sender's :meth:`metadata` returned.

        Raises:
            PeerLostError: It was not here after ``timeout``, or the connection broke.
            MismatchError: The sender offers another step, is another one, or the state does not fit
                the tensors that are given.
            CorruptShardError: What arrived is not what was sent.
            StorageError: There is no host memory for it.
            RestoreError, UnsafeGlobalError: The state cannot be made of what arrived.
            CheckpointingException: The transport is shut down.
        """
        self._require_open()
        address, _, token = metadata.rpartition("/")
        what = f"step {step} of replica rank {src_rank} at {address}"
        timeout_s, began = timeout.total_seconds(), time.monotonic()
        try:
            # In a thread of its own, as no deadline ends a look-up of a host's name.
            fetch = partial(_fetch, what, address, token, step, timeout_s)
            image = within(timeout_s + _LAST_WORD_S, fetch)
        except (OSError, OverflowError, MemoryError) as error:
            is_late = isinstance(error, TimeoutError)
            why = f"timed out after {timeout_s:g} s ({error})" if is_late else repr(error)
            raise PeerLostError(
                f"{what} did not come: {why}. Nothing was changed; torchft asks again in its next "
                f"quorum"
            ) from error
        seconds, size = time.monotonic() - began, len(image) / 1e9
        logger.info(
            "received %s: %.3f GB in %.3f s, %.2f GB/s", what, size, seconds, size / seconds
        )
        reader = ImageReader(MemorySource(image), self._allowed, _identity(token, step))
        # All of it, before given tensors are changed.
        reader.verify()
        # A fresh optimizer has no tensors yet: these are made.
        rules = TargetRules(is_partial=True)
        into = None if self._target is None else find_targets(self._target(), rules)
        # GPUs may have no room for a second state.
        return reader.restore(into, "cpu")

    def shutdown(self, wait: bool = True) -> None:
        """Close all connections; with ``wait`` their threads have ended. May be called again."""
        self._is_closed = True
        self.disallow_checkpoint()
        with suppress(OSError):
            # It ends the wait for connections, as close() does not. A second call is an error.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._serving.wait(_CLOSING_S)
        self._listener.close()
        with self._ended:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            if wait:
                self._ended.wait_for(lambda: not self._connections, _CLOSING_S)

    def _require_open(self) -> None:
        if self._is_closed:
            raise CheckpointingException("this transport is shut down: make another one")

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
                begin(partial(self._answer, connection), "localckpt-torchft-send")
            except (OSError, CheckpointingException) as error:
                # As with too many open files or threads, until some are over.
                if not self._is_closed:
                    logger.warning("a replica that wants a state is not answered: %s", error)
                    time.sleep(_PAUSE_S)

    def _answer(self, connection: socket.socket) -> None:
        with self._ended:
            self._connections.add(connection)
        try:
            self._require_open()
            asked = _receive(connection, bytearray(_REQUEST.size), Deadline.after(_REQUEST_S))
            token, step, timeout_s = _REQUEST.unpack(asked)
            offered, image = self._offered
            if not secrets.compare_digest(token, self._token.encode()):
                offered = _NO_SENDER
            image = image if offered == step else memoryview(b"")
            connection.settimeout(_left_s(Deadline.after(min(timeout_s, _LONGEST_S))))
            connection.sendall(_REPLY.pack(offered, len(image)))
            connection.sendall(image)
        except (OSError, CheckpointingException) as error:
            logger.warning("a replica was not sent the state that it wants: %s", error)
        finally:
            with self._ended:
                connection.close()
                self._connections.discard(connection)
                self._ended.notify_all()


def _identity(token: str, step: int) -> ShardIdentity:
    return ShardIdentity(token, Generation(0, 0), step, 0, 1)


def _fetch(what: str, address: str, token: str, step: int, timeout_s: float) -> memoryview:
    deadline = Deadline.after(min(timeout_s, _LONGEST_S))
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise MismatchError(f"{what}: no ImageTransport. Give all replicas the same transport")
    while True:
        with socket.create_connection((host, int(port)), timeout=_left_s(deadline)) as connection:
            connection.sendall(_REQUEST.pack(token.encode(), step, deadline.left_s))
            reply = _receive(connection, bytearray(_REPLY.size), deadline)
            offered, nbytes = _REPLY.unpack(reply)
            if nbytes:
                memory = allocate(PrivateBuffer, nbytes).view[:nbytes]
                return _receive(connection, memory, deadline)
        if offered == _NO_SENDER:
            raise MismatchError(f"{what}: another process is there now. Nothing was changed")
        if offered > step:
            raise MismatchError(f"{what}: step {offered} is offered there. Nothing was changed")
        if deadline.left_s < _PAUSE_S:
            raise TimeoutError(f"step {offered} is offered" if offered >= 0 else "none is offered")
        time.sleep(_PAUSE_S)


def _receive(
    connection: socket.socket, into: bytearray | memoryview, deadline: Deadline
) -> memoryview:
    memory, done = memoryview(into), 0
    while done < len(memory):
        connection.settimeout(_left_s(deadline))
        if not (count := connection.recv_into(memory[done:])):
            raise ConnectionError(f"the connection ended after {done} of {len(memory)} bytes")
        done += count
    return memory


def _left_s(deadline: Deadline) -> float:
    """Seconds for a socket, which takes 0 as not to wait; raises TimeoutError after the last."""
    if not deadline.left_s:
        raise TimeoutError("with bytes on their way")
    return deadline.left_s
