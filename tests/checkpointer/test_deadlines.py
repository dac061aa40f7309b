"""The waits of a checkpointer's constructor end at its timeout, and say whom they are for."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, CliqueReplicationStrategy, PeerLostError
from tests.checkpointer.loops import stores
from tests.ranks import DeadRank, node_store, run_ranks

_TIMEOUT_S = 3.0


def _make(rank: int, world_size: int) -> tuple[str, float, list[str]]:
    """Make a checkpointer on rank 0, while rank 1 ends within its own; what became of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("localckpt").addHandler(handler)
    options: dict[str, Any] = {"local": node_store(), "timeout_s": _TIMEOUT_S}
    if rank == 1:
        CliqueReplicationStrategy.from_replication_params = lambda **_: os._exit(0)  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(PeerLostError) as lost:
        Checkpointer({"m": torch.nn.Linear(1, 1)}, **options)
    return str(lost.value), time.monotonic() - began, lines


def test_a_rank_that_does_not_come_is_waited_for_in_time_and_named_meanwhile(
    tmp_path: Path,
) -> None:
    ended = run_ranks(_make, 2, expect_dead=[1], store_per_node=stores(tmp_path, 2))

    assert isinstance(ended[1], DeadRank)
    error, took_s, lines = ended[0]
    assert "rank 1" in error
    assert took_s < 4 * _TIMEOUT_S
    assert any(line.startswith("rank 0 has waited") and ", for rank 1" in line for line in lines), (
        lines
    )
