"""What a file, or a peer's memory, has already is neither written nor sent again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localckpt import CorruptShardError
from localckpt.ids import Piece
from tests.managers.jobs import KINDS
from tests.scenarios import Begin

_TENSORS, _NUMEL = 30, 1 << 19
_LAST = 8


def _state(rank: int, iteration: int, *, is_dense: bool = False) -> dict[str, Any]:
    """Thirty tensors of 2 MiB, of which all or the first are those of the iteration."""
    base = torch.arange(_NUMEL, dtype=torch.float32)
    state = {f"w{n}": base + 1000 * rank + n for n in range(_TENSORS)}
    for name in state if is_dense else ["w0"]:
        state[name] = state[name] + iteration
    return state


def _save_what_changes_little(manager: Any, kind: str) -> None:
    rank, most = manager.rank, 0.08
    for iteration in range(1, 6):
        manager.save(_state(rank, iteration), iteration)
        told = manager.last_save
        assert told.written_nbytes == 0 or kind == "disk"
        if iteration > 3:
            assert told.sent_nbytes <= most * told.nbytes
            assert told.written_nbytes <= most * told.nbytes
    # All of a state that changes as a whole.
    manager.save(_state(rank, 6, is_dense=True), 6)
    assert manager.last_save.sent_nbytes == manager.last_save.nbytes
    for iteration in (7, _LAST):
        manager.save(_state(rank, iteration), iteration)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", [0, 1])
def test_of_a_state_that_changes_little_little_is_written_and_sent(
    job: Begin, kind: str, lost: int
) -> None:
    saved = job(2, redundancy=(1, 2), kind=kind, state=_state)
    saved.call(_save_what_changes_little, kind).lose(lost)
    saved.restart().expect(_LAST, {lost: f"peer rank {1 - lost}"}).run()


def _flip_a_bit_of_what_is_held(manager: Any) -> None:
    for iteration in (1, 2, 3):
        manager.save(_state(manager.rank, iteration), iteration)
    if manager.rank == 1:
        for buffer in manager.store._pool._buffers[Piece(0)]:
            buffer.view[30 << 20] ^= 1
    with pytest.raises(CorruptShardError, match="do not match their digest"):
        manager.save(_state(manager.rank, 4), 4)
    manager.save(_state(manager.rank, 5), 5)


@pytest.mark.fault("flipped-bit")
def test_a_bit_that_flips_in_what_a_peer_has_fails_one_save_and_is_never_loaded(
    job: Begin,
) -> None:
    saved = job(2, redundancy=(1, 2), state=_state).call(_flip_a_bit_of_what_is_held)
    saved.lose(0).restart().expect(5, {0: "peer rank 1"}).run()
