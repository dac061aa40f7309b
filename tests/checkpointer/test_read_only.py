"""A checkpointer that only reads does so beside a job that lives, and leaves no trace."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import Checkpointer, CheckpointingException
from tests.ranks import run_ranks

_S = 20.0


def _state(fill: float) -> dict[str, Any]:
    layer = torch.nn.Linear(2, 2)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, fill)
    return {"layer": layer}


def _everything(root: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in [root, *root.rglob("*")]}


def _read(rank: int, world_size: int, local: Path, shared: Path | None) -> tuple[int, list[float]]:
    state = _state(0.0)
    with Checkpointer(state, local=local, shared=shared, read_only=True, timeout_s=_S) as reader:
        found = reader.find_latest()
        assert reader.resume() == found + 1
        for call in (
            lambda: reader.step(found + 1),
            lambda: reader.save(found + 1),
            lambda: reader.pin(found),
            lambda: reader.mark_good(),
        ):
            with pytest.raises(CheckpointingException, match="made with read_only=True: it"):
                call()
    return found, state["layer"].bias.tolist()


@pytest.mark.parametrize(("tier", "ranks"), [("nodes", 2), ("shared", 1)])
def test_any_number_of_ranks_reads_beside_a_job_that_lives(
    tier: str, ranks: int, tmp_path: Path
) -> None:
    local, shared = tmp_path / "nodes", tmp_path / "shared"
    options: dict[str, Any] = {"timeout_s": _S, "events": ()}
    with Checkpointer(_state(3.0), local=local, shared=shared, **options) as job:
        job.resume()
        job.step(4)
        job.save(4, shared=True)
        job.wait_until_finished()
        before = _everything(tmp_path)

        place = local if tier == "nodes" else tmp_path / "none"
        read = run_ranks(_read, ranks, place, shared if tier == "shared" else None)

        assert read == [(4, [3.0, 3.0])] * ranks
        assert _everything(tmp_path) == before


def test_nothing_is_made_where_nothing_is(tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM)
    with Checkpointer(
        _state(1.0), local=tmp_path / "nodes", shared=tmp_path / "shared", read_only=True
    ) as reader:
        assert signal.getsignal(signal.SIGTERM) is handlers
        assert reader.resume() == 0

    assert list(tmp_path.iterdir()) == []
