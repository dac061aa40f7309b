"""Makes one member's parity together with the envelopes that it keeps, at a save or a restart.

Parity and envelopes are sent over the same connections, one after the other, so that a group has
one set of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from localckpt.ids import Group, ShardIdentity
from localckpt.replication.host_transport import HostTransport
from localckpt.replication.parity.code import PARITY_KIND
from localckpt.replication.parity.encode import encode
from localckpt.replication.parity.image import ParityFrame, ParityParts, read_envelope
from localckpt.replication.parity.members import ParityOf
from localckpt.replication.parity.pipeline import Pipeline
from localckpt.state_dict.source import MemorySource, ShardSource

__all__ = ["GroupEncoder", "frame_for", "ranks_behind"]


class GroupEncoder:
    """Encodes over some connections, again and again.

    Args:
        transport: Connects the members, in the order of their ring. It stays the caller's.
    """

    def __init__(self, transport: HostTransport) -> None:
        self.transport = transport
        self._pipeline = Pipeline(transport.connections, transport.pacer)

    @property
    def broken(self) -> bool:
        """True if the connections broke."""
        return self._pipeline.broken or self.transport.broken

    def run(
        self,
        of: ParityOf,
        source: ShardSource,
        parts: ParityParts,
        envelope_nbytes: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Fill the parts; the members call it together.

        Args:
            of: The same on all members.
            source: This member's image.
            parts: Parts of a frame from :func:`frame_for`.
            envelope_nbytes: Size of each member's envelope.
            timeout_s: Deadline of the parity, and once more of the envelopes, in seconds.

        Raises:
            PeerLostError: A member died, stopped or failed.
            CheckpointingException: The source failed, or the arguments do not fit.
        """
        try:
            encode(of.layout, self._pipeline, source, parts.parity, timeout_s)
            self._exchange_envelopes(of, source, parts, envelope_nbytes, timeout_s)
        except BaseException:
            # The other members are not to wait for this one until their deadline.
            self._pipeline.close()
            self.transport.abort()
            raise

    def _exchange_envelopes(
        self,
        of: ParityOf,
        source: ShardSource,
        parts: ParityParts,
        envelope_nbytes: Sequence[int],
        timeout_s: float,
    ) -> None:
        ranks = self.transport.connections.ranks
        here, count = ranks.index(self.transport.connections.rank), len(ranks)
        envelope = MemorySource(memoryview(bytearray(read_envelope(source))))
        receives: list[tuple[int, memoryview]] = []
        at = 0
        for step in range(1, of.group.tolerated + 1):
            member = (here - step) % count
            receives.append((ranks[member], parts.envelopes[at : at + envelope_nbytes[member]]))
            at += envelope_nbytes[member]
        sends = [
            (ranks[(here + step) % count], envelope) for step in range(1, of.group.tolerated + 1)
        ]
        self.transport.exchange(sends, receives, timeout_s)

    def close(self) -> None:
        """Give the memory for messages back."""
        self._pipeline.close()


def ranks_behind(group: Group, rank: int) -> tuple[int, ...]:
    """The ranks that come before a member in the ring, the nearest first: one a parity.

    The member keeps what is needed to tell that their shards are what was lost.
    """
    place = group.ranks.index(rank)
    return tuple(group.ranks[place - step] for step in range(1, group.tolerated + 1))


def frame_for(identity: ShardIdentity, of: ParityOf, envelope_nbytes: Sequence[int]) -> ParityFrame:
    """The frame of the parity that a rank is to keep.

    Args:
        identity: Identity of the rank's shard.
        of: The group, and the sizes of its images.
        envelope_nbytes: Bytes of each member's envelope.
    """
    behind = ranks_behind(of.group, identity.rank)
    envelopes_nbytes = sum(envelope_nbytes[of.group.ranks.index(rank)] for rank in behind)
    parity = identity.of_kind(PARITY_KIND)
    return ParityFrame.of(parity, of, envelopes_nbytes, of.layout.parity_nbytes)
