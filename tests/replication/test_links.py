"""Links between the ranks of a node: who may send over them, and how they end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from localckpt.errors import CorruptShardError, PeerLostError
from localckpt.ranks.deadline import Deadline
from localckpt.replication.links import Links
from localckpt.replication.parts.linked import LinkedPart, LinkOutlet, take_all
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
    task = Task(lambda: take_all(0, link, progress, lambda *_: part))
    task.start("taking", daemon=True)
    return task


def _outlet(link: socket.socket) -> LinkOutlet:
    progress = Progress(0, _S)
    progress.expect(1)
    return LinkOutlet(1, link, progress)


def test_parts_are_taken_where_they_belong(links: tuple[Links, Links]) -> None:
    sent, taken = _connected(links)
    values = torch.arange(1000.0)
    tensor, part, filling = _filled(1000)
    taking, outlet = _taking(taken, part), _outlet(sent)

    linked = LinkedPart(outlet, 0, 0)
    linked.take_run(400, memoryview(bytearray(values.numpy().tobytes()))[400:2000])
    linked.take_cut((0,), (100,), values[:100])
    linked.take_cut((500,), (500,), values.view(2, 500)[1])
    outlet.end()
    outlet.await_taken()

    taking.take_result(_S)
    filling.require_full()
    assert torch.equal(tensor, values)


def test_a_link_that_ends_early_is_a_rank_that_failed(links: tuple[Links, Links]) -> None:
    sent, taken = _connected(links)
    _, part, _ = _filled(1000)
    taking = _taking(taken, part)
    sent.sendall(run_head(0, 0, 0, 4000) + bytes(100))

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
def test_a_part_that_reaches_out_of_its_tensor_is_refused(
    links: tuple[Links, Links], head: bytes
) -> None:
    sent, taken = _connected(links)
    tensor, part, _ = _filled(1000)
    taking = _taking(taken, part)

    sent.sendall(head + b"\xff" * 4)

    with pytest.raises(CorruptShardError):
        taking.take_result(_S)
    assert not tensor.any()
