"""Makes one member's parity together with the heads that it keeps: what a save and a restart do.

Parity and heads travel over the same connections, one after the other, so that a group has one set
of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from localckpt.ids import ParityGroup
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.parity.encode import encode
from localckpt.replication.parity.relay import Relay
from localckpt.replication.parity.stripes import ParityLayout
from localckpt.state_dict.parity_image import ParityRoom, read_head
from localckpt.state_dict.parity_of import ParityOf
from localckpt.state_dict.source import MemorySource, ShardSource

__all__ = ["GroupEncoder", "heads_nbytes", "layout_of"]


class GroupEncoder:
    """Encodes over some connections, again and again.

    Args:
        transport: Connects the members, in the order of their ring. It stays the caller's.
    """

    def __init__(self, transport: HostTransport) -> None:
        self.transport = transport
        self._relay = Relay(transport.connections, transport.pacer)

    @property
    def broken(self) -> bool:
        """Whether the connections broke."""
        return self._relay.broken or self.transport.broken

    def run(
        self,
        of: ParityOf,
        source: ShardSource,
        room: ParityRoom,
        head_nbytes: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Fill the room; the members call it together.

        Args:
            of: The same on all members.
            source: This member's image.
            room: Of :func:`heads_nbytes` and ``layout_of(of).parity_nbytes`` bytes.
            head_nbytes: Of each member's head.
            timeout_s: Deadline of the parity, and once more of the heads, in seconds.

        Raises:
            PeerLostError: A member died, stopped or failed.
            CheckpointingException: The source failed, or the arguments do not fit.
        """
        try:
            encode(layout_of(of), self._relay, source, room.parity, timeout_s)
            self._exchange_heads(of, source, room, head_nbytes, timeout_s)
        except BaseException:
            # The other members are not to wait for this one until their deadline.
            self._relay.close()
            self.transport.abort()
            raise

    def _exchange_heads(
        self,
        of: ParityOf,
        source: ShardSource,
        room: ParityRoom,
        head_nbytes: Sequence[int],
        timeout_s: float,
    ) -> None:
        ranks = self.transport.connections.ranks
        here, count = ranks.index(self.transport.connections.rank), len(ranks)
        head = MemorySource(memoryview(bytearray(read_head(source))))
        receives: list[tuple[int, memoryview]] = []
        at = 0
        for step in range(1, of.group.parity + 1):
            member = (here - step) % count
            receives.append((ranks[member], room.heads[at : at + head_nbytes[member]]))
            at += head_nbytes[member]
        sends = [(ranks[(here + step) % count], head) for step in range(1, of.group.parity + 1)]
        self.transport.timeout_s = timeout_s
        self.transport.exchange(sends, receives)

    def close(self) -> None:
        """Give the memory for messages back."""
        self._relay.close()


def layout_of(of: ParityOf) -> ParityLayout:
    """Which bytes are in which stripe.

    Raises:
        MismatchError: No group can be so.
    """
    return ParityLayout(of.image_nbytes, of.group.parity)


def heads_nbytes(group: ParityGroup, rank: int, head_nbytes: Sequence[int]) -> int:
    """Bytes of the heads that a rank keeps, of all heads' bytes in the group's order."""
    return sum(head_nbytes[group.ranks.index(behind)] for behind in group.behind(rank))
