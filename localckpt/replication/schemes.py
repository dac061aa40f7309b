"""The redundancy schemes whose pieces are not copies of shards, by the kind of their pieces.

A checkpoint is read by the kinds of the pieces that the nodes hold, whichever redundancy the job
that reads it has. A scheme of another kind is entered here; see ``redundancy.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from localckpt.replication.parity.code import ParityCode
from localckpt.replication.parity.stripes import PARITY_KIND

if TYPE_CHECKING:
    from localckpt.replication.redundancy import RecoveryScheme

SCHEMES: Mapping[str, RecoveryScheme] = {PARITY_KIND: ParityCode()}
"""The scheme of each kind of piece beside shards."""
