"""Transfers between transports for torchft in one process; the name of each says what holds."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import TestCase

import torch
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.transport_test import run_multi_recovery_test

from localckpt.integrations.torchft import ImageTransport
from localckpt.waiting import wait_until
from tests.managers.jobs import error_of
from tests.state_dict.states import Settings, assert_same

__all__ = ["recover_in_torchfts_test", "transfer"]

_TIMEOUT = timedelta(seconds=20)
_SHORT = timedelta(seconds=1)

Handle = Callable[[socket.socket, socket.socket], None]


def recover_in_torchfts_test() -> None:
    """Run torchft's test of a transport, which leaves no thread."""
    run_multi_recovery_test(
        TestCase(), lambda rank, world_size: ImageTransport(), torch.device("cpu")
    )
    assert _threads() == 0


def transfer() -> dict[str, str]:
    """Run each of the transfers, which leave nothing open; what was wrong of each."""
    wrong, opened = {}, len(os.listdir("/proc/self/fd"))
    ours = [f for f in globals().values() if getattr(f, "__module__", "") == __name__]
    named = {f.__name__: f for f in ours if not f.__name__.startswith("_")}
    for name, fn in named.items():
        if name in __all__:
            continue
        try:
            fn()
            assert _threads() == 0
            assert len(os.listdir("/proc/self/fd")) == opened
        except Exception:  # noqa: BLE001 - the test shows it
            wrong[name] = traceback.format_exc()
    return wrong


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


def a_state_is_the_same_bit_for_bit_on_all() -> None:
    state = _make_state()
    with _sending(state) as sender, ThreadPoolExecutor(3) as pool:
        for value in state["user"]["default"]["model"].values():
            value.zero_()
        # As it was when it was sent.
        for received in pool.map(lambda _: _receive(sender.metadata()), range(3)):
            assert_same(received, _make_state())


def given_tensors_are_filled() -> None:
    state, given = _make_state(), _make_state(seed=1)
    user = given["user"]["default"]
    # As of an optimizer that has made no step.
    user["optimizer"]["state"] = {}
    with _sending(state) as sender:
        received = _receive(sender.metadata(), lambda: {"user": given["user"]})["user"]["default"]
    assert_same(received["model"], state["user"]["default"]["model"])
    assert_same(received["optimizer"], state["user"]["default"]["optimizer"])
    for one, other in zip(received["model"].values(), user["model"].values(), strict=True):
        assert one.data_ptr() == other.data_ptr()


def _refused_in_place(
    handle: Handle | None = None, change: Callable[[Any], None] = lambda _: None
) -> str:
    """The error of a transfer into given tensors, which are as they were."""
    given, wanted = _make_state(seed=1), _make_state(seed=1)
    change(given)
    change(wanted)
    with _sending(_make_state()) as sender:
        network = (
            contextlib.nullcontext(sender.metadata()) if handle is None else _behind(sender, handle)
        )
        with network as metadata:
            error = error_of(lambda: _receive(metadata, lambda: given))
    assert_same(given, wanted)
    return error


def a_state_that_does_not_fit_the_given_tensors_changes_none() -> None:
    def change(state: Any) -> None:
        state["user"]["default"]["half"] = torch.ones(5)

    error = _refused_in_place(change=change)
    assert error.startswith("MismatchError: ")
    assert "user.default.half" in error


def damage_and_a_cut_are_refused_before_given_tensors_are_changed() -> None:
    # One bit of the header, of a tensor, of the last block and of the digests.
    for at in (100, 2_000_000, -20_000, -3):
        assert _refused_in_place(_damaged_at(at)).startswith("CorruptShardError")
    error = _refused_in_place(_pass_on(lambda data: data[: len(data) // 2]))
    assert "the connection ended after" in error


def a_sender_that_stops_is_waited_for_no_longer_than_told() -> None:
    is_over = threading.Event()
    handle = _pass_on(lambda data: data[: len(data) // 2], stalls_until=is_over)
    with _sending(_make_state()) as sender, _behind(sender, handle) as metadata:
        began = time.monotonic()
        error = error_of(lambda: _receive(metadata, timeout=_SHORT))
        assert time.monotonic() - began < 8.0
        is_over.set()
    assert "timed out after 1 s" in error


def another_step_is_refused_by_its_number() -> None:
    with _sending({"a": torch.ones(3)}, step=7) as sender:
        older = error_of(lambda: _receive(sender.metadata(), step=6))
        newer = error_of(lambda: _receive(sender.metadata(), step=8, timeout=_SHORT))
        sender.disallow_checkpoint()
        none = error_of(lambda: _receive(sender.metadata(), timeout=_SHORT))
    assert "MismatchError: step 6 of" in older
    assert "step 7 is offered there" in older
    assert "timed out after 1 s (step 7 is offered)" in newer
    assert "timed out after 1 s (none is offered)" in none


def a_step_that_comes_later_is_waited_for() -> None:
    with _sending({"a": torch.ones(3)}, step=7) as sender, ThreadPoolExecutor(1) as pool:
        received = pool.submit(_receive, sender.metadata(), step=8)
        time.sleep(0.3)
        sender.send_checkpoint([1], 8, {"a": torch.zeros(3)}, _TIMEOUT)
        assert_same(received.result(), {"a": torch.zeros(3)})


def who_is_no_sender_of_the_state_is_an_error() -> None:
    with _sending({"a": torch.ones(3)}) as sender:
        address = sender.metadata().rpartition("/")[0]
        other = error_of(lambda: _receive(f"{address}/{'0' * 32}"))
    gone = error_of(lambda: _receive(f"{address}/{'0' * 32}"))
    http = HTTPTransport[Any](_TIMEOUT, num_chunks=0)
    http.send_checkpoint([1], 7, {"a": torch.ones(3)}, _TIMEOUT)
    another = error_of(lambda: _receive(http.metadata()))
    none = error_of(lambda: _receive("<n/a>"))
    http.shutdown()
    http._server.server_close()
    assert "another process is there now" in other
    assert "did not come" in gone
    assert "no ImageTransport" in another, another
    assert "no ImageTransport" in none


def classes_that_are_not_allowed_are_neither_sent_nor_made() -> None:
    state = {"settings": Settings(torch.ones(3))}
    assert "Settings" in error_of(lambda: _sending(state).__enter__())
    with _sending(state, safe_globals=[Settings]) as sender:
        error = error_of(lambda: _receive(sender.metadata()))
        assert error.startswith("UnsafeGlobalError")
        assert_same(_receive(sender.metadata(), safe_globals=[Settings]), state)


def a_transport_that_was_shut_down_says_so() -> None:
    transport = ImageTransport()
    transport.shutdown()
    transport.shutdown(wait=False)
    state = {"a": torch.ones(3)}
    told = [
        error_of(lambda: transport.send_checkpoint([1], 7, state, _TIMEOUT)),
        error_of(lambda: transport.recv_checkpoint(0, "localhost:1/a", 7, _TIMEOUT)),
    ]
    assert all("this transport is shut down: make another one" in error for error in told)


def a_shutdown_waits_for_no_stranger_and_no_slow_receiver() -> None:
    with _sending({"a": torch.ones(20_000_000)}) as sender:
        address, _, token = sender.metadata().rpartition("/")
        where = "127.0.0.1", int(address.rpartition(":")[2])
        with socket.create_connection(where), socket.create_connection(where) as slow:
            slow.sendall(struct.pack("!32sqd", token.encode(), 7, 60.0))
            assert slow.recv(1)
            began = time.monotonic()
            sender.shutdown()
            assert time.monotonic() - began < 8.0
