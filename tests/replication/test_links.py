"""Links between the ranks of a node: who may send over them, and how they end."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from localckpt.errors import CorruptShardError, PeerLostError
from localckpt.memory.host_memory import memory_at
from localckpt.ranks.deadline import Deadline
from localckpt.replication.links import Links
from localckpt.replication.parts.messages import (
    IN_FLIGHT,
    MESSAGE_NBYTES,
    Outlet,
    SentPart,
    take_apart,
)
from localckpt.replication.parts.over_links import LinkSender, link_messages
from localckpt.replication.parts.wire import run_head
from localckpt.replication.progress import PeerFailed, Progress
from localckpt.state_dict.regions import whole
from localckpt.state_dict.resharded import FilledPart, Filling, WantedTensor
from localckpt.state_dict.runs import PartReceiver
from localckpt.threads import Task

_S = 10.0


@pytest.fixture
def links() -> Iterator[tuple[Links, Links]]:
    pair = Links(0), Links(1)
    yield pair
    for of_rank in pair:
        of_rank.close()


def _connected(links: tuple[Links, Links]) -> tuple[socket.socket, socket.socket]:
    sender, receiver = links
    assert sender.connect({1: receiver.address}, Deadline.after(_S))
    receiver.accept([0], Deadline.after(_S))
    return sender.outgoing[1], receiver.incoming[0]


def _is_there(links: Links) -> bool:
    name, _, _ = links.address.partition(".")
    return name in Path("/proc/net/unix").read_text()


def test_a_name_ends_with_its_links(links: tuple[Links, Links]) -> None:
    _connected(links)
    assert all(map(_is_there, links))

    for of_rank in links:
        of_rank.close()

    assert not any(map(_is_there, links))


def test_who_does_not_know_the_token_is_not_accepted(links: tuple[Links, Links]) -> None:
    sender, receiver = links
    name, _, _ = receiver.address.partition(".")
    strangers = [f"{name}.{'00' * 12}", f"{name}.00"]
    for rank, address in enumerate(strangers):
        # It says that it is the rank that is waited for.
        with closing(Links(0)) as stranger:
            assert stranger.connect({1: address}, Deadline.after(_S)), rank
    assert sender.connect({1: receiver.address}, Deadline.after(_S))

    receiver.accept([0], Deadline.after(_S))

    sender.outgoing[1].sendall(b"it")
    assert receiver.incoming[0].recv(2) == b"it"


def test_a_rank_that_cannot_be_reached_is_told(links: tuple[Links, Links]) -> None:
    sender, receiver = links
    receiver.close()

    assert not sender.connect({1: receiver.address}, Deadline.after(_S))
    assert not sender.connect({1: ""}, Deadline.after(_S))


def test_a_rank_that_does_not_come_is_named(links: tuple[Links, Links]) -> None:
    with pytest.raises(PeerLostError, match="no link from rank 0"):
        links[1].accept([0], Deadline.after(0.1))


def _filled(size: int) -> tuple[torch.Tensor, PartReceiver, Filling]:
    tensor = torch.zeros(size)
    wanted = WantedTensor("w", (size,), whole((size,)), tensor)
    filling = Filling(1, [(wanted, size)])
    return tensor, FilledPart(filling, [wanted], whole((size,))), filling


def _taking(link: socket.socket, part: PartReceiver) -> Task[None]:
    progress = Progress(1, _S)
    progress.expect(0)

    def take() -> None:
        for message in link_messages(0, link, progress):
            take_apart(0, message, lambda *_: part)

    task = Task(take)
    task.start("taking", daemon=True)
    return task


@pytest.fixture
def sending(links: tuple[Links, Links]) -> Iterator[tuple[LinkSender, socket.socket]]:
    """Sender over a link, and the other end of it."""
    sent, taken = _connected(links)
    progress = Progress(0, _S)
    progress.expect(1)
    sender = LinkSender(1, sent, progress)
    yield sender, taken
    sender.close()


Sending = tuple[LinkSender, socket.socket]


def _files() -> list[str]:
    return sorted(os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists())


def test_parts_are_taken_where_they_belong(sending: Sending) -> None:
    # More than all messages of a pair of ranks have room for at a time.
    size = 4 * IN_FLIGHT * MESSAGE_NBYTES // 4
    sender, taken = sending
    before = _files()
    values = torch.arange(float(size))
    tensor, part, filling = _filled(size)
    taking, outlet = _taking(taken, part), Outlet(1, sender)

    sent = SentPart(outlet, 0, 0)
    sent.take_run(400, memory_at(values.data_ptr(), values.nbytes)[400 : size * 2])
    sent.take_cut((0,), (100,), values[:100])
    sent.take_cut((size // 2,), (size // 2,), values.view(2, -1)[1])
    outlet.end()
    outlet.await_taken()

    taking.take_result(_S)
    filling.require_full()
    assert torch.equal(tensor, values)
    assert _files() == before


class _LostSender:
    """Sender to a rank that is lost; as over gloo, no message can be waited for twice."""

    def __init__(self) -> None:
        self._sent: list[int] = []

    def make(self) -> memoryview:
        return memoryview(bytearray(MESSAGE_NBYTES))

    def send(self, number: int, nbytes: int) -> None:
        self._sent.append(number)

    def await_oldest(self) -> None:
        raise ConnectionError(f"message {self._sent.pop(0)} was not taken")

    def end(self) -> None: ...

    def await_end(self) -> None: ...


def test_every_thread_that_waits_for_a_lost_rank_hears_what_became_of_it() -> None:
    outlet = Outlet(1, _LostSender())
    values = torch.zeros(MESSAGE_NBYTES // 4 // 2)
    part = SentPart(outlet, 0, 0)
    for _ in range(2):
        part.take_cut((0,), (len(values),), values)
    outlet.end()

    told = []
    for _ in range(3):
        with pytest.raises(ConnectionError) as caught:
            outlet.await_taken()
        told.append(str(caught.value))

    assert told == ["message 0 was not taken"] * 3


@pytest.mark.parametrize("note", [b"", b"\1\0\0"])
def test_a_link_that_ends_early_is_a_rank_that_failed(
    links: tuple[Links, Links], note: bytes
) -> None:
    sent, taken = _connected(links)
    _, part, _ = _filled(1000)
    taking = _taking(taken, part)
    sent.sendall(note)

    sent.close()

    with pytest.raises(PeerFailed):
        taking.take_result(_S)


def test_a_link_is_cut_from_another_thread(links: tuple[Links, Links]) -> None:
    _, taken = _connected(links)
    _, part, _ = _filled(1000)
    taking = _taking(taken, part)

    links[1].cut()

    with pytest.raises(PeerFailed):
        taking.take_result(_S)


@pytest.mark.parametrize("head", [run_head(0, 0, 3999, 4), run_head(0, 0, 0, 1 << 40)])
def test_a_part_that_reaches_out_of_its_tensor_is_refused(sending: Sending, head: bytes) -> None:
    sender, taken = sending
    tensor, part, _ = _filled(1000)
    taking = _taking(taken, part)
    message = head + b"\xff" * 4

    sender.make()[: len(message)] = message
    sender.send(0, len(message))

    with pytest.raises(CorruptShardError):
        taking.take_result(_S)
    assert not tensor.any()


def _memory(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("files", "seals", "error"),
    [
        (0, 0, CorruptShardError),
        (1, fcntl.F_SEAL_SHRINK, CorruptShardError),
        # It may get shorter while it is read.
        (1, fcntl.F_SEAL_GROW, PeerFailed),
    ],
)
def test_a_message_that_is_not_in_memory_is_refused(
    links: tuple[Links, Links], files: int, seals: int, error: type[Exception]
) -> None:
    sent, taken = _connected(links)
    _, part, _ = _filled(1000)
    before = _files()
    taking = _taking(taken, part)

    fds = [_memory(4096, seals) for _ in range(files)]
    socket.send_fds(sent, [struct.pack("<II", 0, 4097)], fds)

    with pytest.raises(error):
        taking.take_result(_S)
    for fd in fds:
        os.close(fd)
    assert _files() == before


_STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
name, hello, count = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
links = []
for _ in range(count):
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect("\\0localckpt-" + name)
    link.sendall(hello)
    links.append(link)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("knows", ["nothing", "the token"])
def test_processes_of_another_user_are_turned_away_at_once(
    links: tuple[Links, Links], knows: str
) -> None:
    sender, receiver = links
    name, _, token = receiver.address.partition(".")
    hello = struct.pack("<Q12s", 0, bytes.fromhex(token)) if knows == "the token" else b""
    command = [sys.executable, "-c", _STRANGER, name, hello.hex(), "400"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "connected\n"
        assert sender.connect({1: receiver.address}, Deadline.after(_S))

        # Far from the seconds for which each of them may be silent.
        receiver.accept([0], Deadline.after(_S))

        stranger.communicate("")
    sender.outgoing[1].sendall(b"true")
    assert receiver.incoming[0].recv(4) == b"true"


_LISTENER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listening.bind("\\0localckpt-" + sys.argv[1])
listening.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_listener_of_another_user_gets_no_link() -> None:
    name = f"{os.getpid():024x}"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _LISTENER, name]
    with (
        closing(Links(0)) as sender,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as stranger,
    ):
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listening\n"

        is_reached = sender.connect({1: f"{name}.{'00' * 12}"}, Deadline.after(_S))

        stranger.communicate("")
    assert not is_reached
