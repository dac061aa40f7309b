"""Transfers between transports for torchft in one process, and what became of each."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import TestCase

import torch
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.transport_test import run_multi_recovery_test

from localckpt.errors import CheckpointingException
from localckpt.integrations.torchft import ImageTransport
from localckpt.waiting import wait_until
from tests.state_dict.states import Settings, assert_same

__all__ = ["recover_in_torchfts_test", "transfer"]

_TIMEOUT = timedelta(seconds=20)
_SHORT = timedelta(seconds=1)

Handle = Callable[[socket.socket, socket.socket], None]


def recover_in_torchfts_test() -> int:
    """Run torchft's test of a transport; the number of threads that are left."""
    run_multi_recovery_test(
        TestCase(), lambda rank, world_size: ImageTransport(), torch.device("cpu")
    )
    return _threads()


def transfer() -> dict[str, Any]:
    """Run each of the transfers; what each tells by its name, and what is left open."""
    open_before = len(os.listdir("/proc/self/fd"))
    told = {run.__name__.strip("_"): run() for run in _RUNS}
    left = len(os.listdir("/proc/self/fd")) - open_before
    return told | {"left": {"threads": _threads(), "open": left}}


def _threads() -> int:
    ours = [t for t in threading.enumerate() if "torchft" in t.name]
    wait_until(lambda: not any(thread.is_alive() for thread in ours), 10.0)
    return sum(thread.is_alive() for thread in ours)


def _make_state(seed: int = 0) -> dict[str, Any]:
    """A state as a Manager sends it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 600)).square().mean().backward()
    optimizer.step()
    user = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.randn(33).bfloat16(),
        "rng": torch.get_rng_state(),
        "name": "run",
    }
    return {"user": {"default": user}, "torchft": {"step": 7, "batches_committed": 14}}


@contextlib.contextmanager
def _sending(state: Any, step: int = 7, **options: Any) -> Iterator[ImageTransport]:
    sender = ImageTransport(hostname="127.0.0.1", **options)
    try:
        sender.send_checkpoint([1], step, state, _TIMEOUT)
        yield sender
    finally:
        sender.shutdown()


def _receive(
    metadata: str, *args: Any, step: int = 7, timeout: timedelta = _TIMEOUT, **options: Any
) -> Any:
    receiver = ImageTransport(*args, **options)
    try:
        return receiver.recv_checkpoint(0, metadata, step, timeout)
    finally:
        receiver.shutdown()


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextlib.contextmanager
def _behind(sender: ImageTransport, handle: Handle) -> Iterator[str]:
    """Metadata of a sender behind a network of which a function carries each connection."""
    address, _, token = sender.metadata().rpartition("/")
    host, _, port = address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as network:

        def carry() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = network.accept()
                    with connection, socket.create_connection((host, int(port))) as there:
                        there.sendall(connection.recv(48, socket.MSG_WAITALL))
                        handle(there, connection)

        thread = threading.Thread(target=carry)
        thread.start()
        yield f"127.0.0.1:{network.getsockname()[1]}/{token}"
        network.shutdown(socket.SHUT_RDWR)
    thread.join()


def _pass_on(
    change: Callable[[bytearray], bytearray], stalls_until: threading.Event | None = None
) -> Handle:
    def handle(there: socket.socket, here: socket.socket) -> None:
        data = bytearray()
        while part := there.recv(1 << 20):
            data += part
        here.sendall(change(data))
        if stalls_until is not None:
            stalls_until.wait(_TIMEOUT.total_seconds())

    return handle


def _damaged_at(offset: int) -> Handle:
    def change(data: bytearray) -> bytearray:
        data[offset] ^= 1
        return data

    return _pass_on(change)


# What is told of each.


def _whole() -> int:
    """How many replicas receive the state as it was when it was sent."""
    state = _make_state()
    with _sending(state) as sender, ThreadPoolExecutor(3) as pool:
        for value in state["user"]["default"]["model"].values():
            value.zero_()
        received = list(pool.map(lambda _: _receive(sender.metadata()), range(3)))
    for one in received:
        assert_same(one, _make_state())
    return len(received)


def _in_place() -> dict[str, Any]:
    state, given = _make_state(), _make_state(seed=1)
    user = given["user"]["default"]
    # As of an optimizer that has made no step.
    user["optimizer"]["state"] = {}
    with _sending(state) as sender:
        received = _receive(sender.metadata(), lambda: {"user": given["user"]})["user"]["default"]
    assert_same(received["model"], state["user"]["default"]["model"])
    assert_same(received["optimizer"], state["user"]["default"]["optimizer"])
    weights = zip(received["model"].values(), user["model"].values(), strict=True)
    return {"same tensors": all(a is b or a.data_ptr() == b.data_ptr() for a, b in weights)}


def _refused_in_place(change: Callable[[Any], None] | None, handle: Handle | None = None) -> str:
    """The error of a transfer into given tensors, which are as they were."""
    given, wanted = _make_state(seed=1), _make_state(seed=1)
    if change is not None:
        change(given)
        change(wanted)
    with _sending(_make_state()) as sender:
        network = (
            contextlib.nullcontext(sender.metadata()) if handle is None else _behind(sender, handle)
        )
        with network as metadata:
            error = _error_of(lambda: _receive(metadata, lambda: given))
    assert_same(given, wanted)
    return error


def _stalled() -> tuple[str, float]:
    """The error, and its time in seconds, where a network stops after half of the bytes."""
    is_over = threading.Event()
    handle = _pass_on(lambda data: data[: len(data) // 2], stalls_until=is_over)
    with _sending(_make_state()) as sender, _behind(sender, handle) as metadata:
        began = time.monotonic()
        error = _error_of(lambda: _receive(metadata, timeout=_SHORT))
        seconds = time.monotonic() - began
        is_over.set()
    return error, seconds


def _misfits() -> str:
    def change(state: Any) -> None:
        state["user"]["default"]["half"] = torch.ones(5)

    return _refused_in_place(change)


def _damaged_blocks() -> list[str]:
    """One bit of the header, of a tensor, of the last block and of the digests."""
    return [_refused_in_place(None, _damaged_at(at)) for at in (100, 2_000_000, -20_000, -3)]


def _cut() -> str:
    return _refused_in_place(None, _pass_on(lambda data: data[: len(data) // 2]))


def _of_another_step() -> dict[str, str]:
    with _sending({"a": torch.ones(3)}, step=7) as sender:
        told = {
            "older": _error_of(lambda: _receive(sender.metadata(), step=6)),
            "newer": _error_of(lambda: _receive(sender.metadata(), step=8, timeout=_SHORT)),
        }
        sender.disallow_checkpoint()
        told["none"] = _error_of(lambda: _receive(sender.metadata(), timeout=_SHORT))
    return told


def _comes_later() -> str:
    with _sending({"a": torch.ones(3)}, step=7) as sender, ThreadPoolExecutor(1) as pool:
        received = pool.submit(_receive, sender.metadata(), step=8)
        time.sleep(0.3)
        sender.send_checkpoint([1], 8, {"a": torch.zeros(3)}, _TIMEOUT)
        assert_same(received.result(), {"a": torch.zeros(3)})
    return "same"


def _elsewhere() -> dict[str, str]:
    with _sending({"a": torch.ones(3)}) as sender:
        address = sender.metadata().rpartition("/")[0]
        told = {"other token": _error_of(lambda: _receive(f"{address}/{'0' * 32}"))}
    told["gone"] = _error_of(lambda: _receive(f"{address}/{'0' * 32}"))
    http = HTTPTransport[Any](_TIMEOUT, num_chunks=0)
    http.send_checkpoint([1], 7, {"a": torch.ones(3)}, _TIMEOUT)
    told["another transport"] = _error_of(lambda: _receive(http.metadata()))
    told["no transport"] = _error_of(lambda: _receive("<n/a>"))
    http.shutdown()
    http._server.server_close()
    return told


def _classes() -> dict[str, str]:
    state = {"settings": Settings(torch.ones(3))}
    told = {"not allowed to send": _error_of(lambda: _sending(state).__enter__())}
    with _sending(state, safe_globals=[Settings]) as sender:
        told["not allowed to receive"] = _error_of(lambda: _receive(sender.metadata()))
        assert_same(_receive(sender.metadata(), safe_globals=[Settings]), state)
    return told


def _after_shutdown() -> dict[str, str]:
    transport = ImageTransport()
    transport.shutdown()
    transport.shutdown(wait=False)
    state = {"a": torch.ones(3)}
    return {
        "send": _error_of(lambda: transport.send_checkpoint([1], 7, state, _TIMEOUT)),
        "receive": _error_of(lambda: transport.recv_checkpoint(0, "localhost:1/a", 7, _TIMEOUT)),
    }


def _shutdown_while_sending() -> float:
    """Seconds of a shutdown, while a stranger says nothing and a receiver takes nothing."""
    with _sending({"a": torch.ones(20_000_000)}) as sender:
        address, _, token = sender.metadata().rpartition("/")
        where = "127.0.0.1", int(address.rpartition(":")[2])
        with socket.create_connection(where), socket.create_connection(where) as slow:
            slow.sendall(struct.pack("!32sqd", token.encode(), 7, 60.0))
            assert slow.recv(1)
            began = time.monotonic()
            sender.shutdown()
            return time.monotonic() - began


_RUNS = (
    *(_whole, _in_place, _misfits, _damaged_blocks, _cut, _stalled, _of_another_step),
    *(_comes_later, _elsewhere, _classes, _after_shutdown, _shutdown_while_sending),
)
