"""What errors of the front door advise are its own methods and arguments."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localckpt import (
    Checkpointer,
    CheckpointingException,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
    PeerLostError,
    UnsafeGlobalError,
)
from tests.checkpointer.loops import save_once, stores
from tests.ranks import DeadRank, node_store, run_ranks

_S = 1.5
# Long enough for the log to say who is waited for.
_LONG_S = 6.0
_NEVER = ("manager", "load()", "allow_partial_load", "<locals>", "keep_local", "timeout=")


def _state() -> dict[str, Any]:
    return {"value": torch.nn.Linear(1, 1)}


def _alone(rank: int, world_size: int, what: str, shared: Path) -> str:
    """Make one call on the first rank alone; returns the error."""
    text: str = ""
    options: dict[str, Any] = {"timeout_s": _S, "every": 1000}
    if rank == 0 and what == "Checkpointer":
        with pytest.raises(PeerLostError) as caught:
            Checkpointer(_state(), local=node_store(), **options)
        text = str(caught.value)
    if what == "Checkpointer":
        dist.barrier()
        return text
    if what == "shared save":
        options["shared"] = shared
    checkpointer = Checkpointer(_state(), local=node_store(), **options)
    if what != "resume":
        checkpointer.resume()
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            _call(checkpointer, what)
        text = str(caught.value)
    dist.barrier()
    error = RuntimeError("the test is over")
    checkpointer.__exit__(type(error), error, None)
    return text


def _call(checkpointer: Checkpointer, what: str) -> None:
    if what == "resume":
        checkpointer.resume()
        return
    checkpointer.step(0)
    if what == "close":
        checkpointer.close()
    else:
        checkpointer.save(0, shared=True)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("Checkpointer", "Checkpointer"),
        ("resume", "resume"),
        ("shared save", "save"),
        ("close", "close"),
    ],
)
def test_a_lone_call_names_itself_and_timeout_s(what: str, call: str, tmp_path: Path) -> None:
    text, _ = run_ranks(*(_alone, 2, what, tmp_path / "shared"), store_per_node=stores(tmp_path, 1))

    assert f"Is {call}() called on every rank?" in text
    assert "give the Checkpointer a longer timeout_s" in text
    assert "rank 1" in text
    assert not [word for word in _NEVER if word in text], text


class _Conf:
    pass


def test_a_class_of_the_script_that_is_imported_now_is_told_by_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"conf": (_Conf, lambda conf: None)}
    with monkeypatch.context() as script:
        script.setattr(_Conf, "__module__", "__main__")
        script.setattr(sys.modules["__main__"], "_Conf", _Conf, raising=False)
        save_once(state, local=tmp_path, safe_globals=[_Conf])

    with (
        pytest.raises(UnsafeGlobalError) as caught,
        Checkpointer(state, local=tmp_path, safe_globals=[_Conf]) as checkpointer,
    ):
        checkpointer.resume()

    assert f"{__name__}._Conf is allowed, and was saved as __main__._Conf" in str(caught.value)
    assert "pass safe_globals=[(_Conf, '__main__._Conf')]" in str(caught.value)


def test_what_a_manager_saved_is_told_by_whom_it_can_be_loaded(tmp_path: Path) -> None:
    with LocalCheckpointManager(tmp_path) as manager:
        manager.save({"value": torch.nn.Linear(1, 1)}, 3)

    with (
        pytest.raises(CheckpointingException, match=r"saved by another object.*resume\(Elsewhere"),
        Checkpointer(_state(), local=tmp_path) as checkpointer,
    ):
        checkpointer.resume()


def _make_while_another_ends(rank: int, world_size: int) -> tuple[str, float, list[str]]:
    """Make a checkpointer on rank 0, while rank 1 ends within its own; what became of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("localckpt").addHandler(handler)
    options: dict[str, Any] = {"local": node_store(), "timeout_s": _LONG_S}
    if rank == 1:
        CliqueReplicationStrategy.from_replication_params = lambda **_: os._exit(0)  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(PeerLostError) as lost:
        Checkpointer({"m": torch.nn.Linear(1, 1)}, **options)
    return str(lost.value), time.monotonic() - began, lines


def test_a_rank_that_does_not_come_is_waited_for_in_time_and_named_meanwhile(
    tmp_path: Path,
) -> None:
    ended = run_ranks(
        _make_while_another_ends, 2, expect_dead=[1], store_per_node=stores(tmp_path, 2)
    )

    assert isinstance(ended[1], DeadRank)
    error, took_s, lines = ended[0]
    assert "rank 1" in error
    assert took_s < 4 * _LONG_S
    assert any(line.startswith("rank 0 has waited") and ", for rank 1" in line for line in lines), (
        lines
    )
