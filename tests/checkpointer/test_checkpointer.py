"""What the front door refuses, what it does when saves fail, and which parts a state may have."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import localckpt
from localckpt import (
    Checkpointer,
    CheckpointingException,
    Every,
    MismatchError,
    PeerLostError,
    UnsafeGlobalError,
    Values,
)
from localckpt.checkpointer import life
from localckpt.cli import output
from localckpt.managers import local
from tests.checkpointer.loops import Part, resume_once, save_once
from tests.cli.commands import call
from tests.managers.jobs import error_of, everything, iterations_on, put_back, take_away
from tests.ranks import logged, node_store, on_ranks, run_ranks, same_on_all

_LAYER = torch.nn.Linear(1, 1)


def _state() -> dict[str, Any]:
    return {"value": Part(torch.zeros(1000))}


_MEMORY = {"memory": True}


@pytest.mark.parametrize(
    ("state", "options", "told"),
    [
        (_state(), {}, "memory=True"),
        (_state(), _MEMORY | {"replication_factor": 0}, "1 \\(no copies\\) or more"),
        (_state(), _MEMORY | {"on_error": "ignore"}, "'warn' or 'raise'"),
        (_state(), _MEMORY | {"max_failures": 0}, "must be above 0"),
        (_state(), _MEMORY | {"every": 1.5}, "every=1.5 is no cadence"),
        (_state(), _MEMORY | {"shared_every": Every(overhead=0.01)}, "shared_every takes steps or"),
        (_state(), {"local": "a", "shared": "a/shared"}, r"is in local=.*Give two directories"),
        (
            *(_state(), {"local": "a", "stop_signals": [signal.SIGUSR1, signal.SIGKILL]}),
            "leave it out",
        ),
        ({}, _MEMORY, "there is nothing to save"),
        ({"epoch": 3}, _MEMORY, "'epoch' of the training state is a int"),
        ({"epoch": (1, 2)}, _MEMORY, "'epoch' of the training state is a tuple"),
        ({"m": None}, _MEMORY, "'m' of the training state is None: leave it out"),
        ({"m": _LAYER.state_dict()}, _MEMORY, "give the module or the optimizer itself"),
        ({"localckpt": _LAYER}, _MEMORY, "choose another name"),
        ([_LAYER], _MEMORY, "the training state is a list: give a dict of parts by name"),
        ({3: _LAYER}, _MEMORY, "must be a name"),
        ({"rng": _LAYER}, _MEMORY, "rng=False leaves them out"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_stays_open(
    state: Any,
    options: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointingException, match=told):
        Checkpointer(state, **options)

    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    Checkpointer(_state(), local="a").close()


def test_calls_out_of_order_or_of_checkpoints_that_are_not_there_are_refused(
    tmp_path: Path,
) -> None:
    with Checkpointer(_state(), local=tmp_path, every=Every(steps=1)) as checkpointer:
        with pytest.raises(CheckpointingException, match=r"call resume\(\) before the first step"):
            checkpointer.step(0)
        with pytest.raises(CheckpointingException, match="call resume"):
            next(checkpointer.epochs(1))
        assert checkpointer.resume() == 0
        for call in (checkpointer.pin, checkpointer.unpin):
            with pytest.raises(CheckpointingException, match="there is no shared storage"):
                call(0)
        with pytest.raises(CheckpointingException, match="no checkpoint to mark as good"):
            checkpointer.mark_good()
        assert not checkpointer.step(0)
        with pytest.raises(CheckpointingException, match=r"step\(0\) was called after step\(0\)"):
            checkpointer.step(0)
    with pytest.raises(CheckpointingException, match="is closed"):
        checkpointer.step(1)
    with pytest.raises(CheckpointingException, match="is closed"):
        checkpointer.resume()
    assert iterations_on(tmp_path) == {0}


def test_what_a_manager_saved_is_told_by_whom_it_can_be_loaded(tmp_path: Path) -> None:
    with localckpt.LocalCheckpointManager(tmp_path) as manager:
        manager.save({"value": torch.nn.Linear(1, 1)}, 3)

    with pytest.raises(CheckpointingException, match=r"saved by another obj.*resume\(Elsewhere"):
        resume_once(_state(), local=tmp_path)


@pytest.mark.fault("unusable-store")
@on_ranks(2, nodes=2)
def test_training_goes_on_when_saves_fail_and_ends_when_too_many_do(rank: int) -> None:
    root, steps, warned = node_store(), list[int](), logged()
    options: dict[str, Any] = {"every": Every(steps=1), "max_failures": 3, "timeout_s": 60.0}
    with Checkpointer(_state(), local=root, **options) as checkpointer:

        def train() -> None:
            for step in range(checkpointer.resume(), 20):
                if rank == 1 and step in (2, 6):
                    take_away(root)
                if rank == 1 and step == 4:
                    put_back(root)
                checkpointer.step(step)
                checkpointer.wait_until_finished()
                steps.append(step)

        assert "rank 1" in same_on_all(error_of(train))
        if rank == 1:
            put_back(root)
        # Two fail and two go well, and then the third in a row is too many.
        assert (steps, checkpointer.failed_saves) == ([*range(8)], 5)
    if rank == 0:
        for count in (1, 2):
            told = f"a save to the nodes failed ({count} in a row; training ends at 3): "
            assert any(told in line for line in warned), warned
    assert 5 in iterations_on(root)


_NEVER = ("manager", "load()", "allow_partial_load", "<locals>", "keep_local", "timeout=")


@on_ranks(2, nodes=1)
def test_arguments_that_differ_are_named_and_a_lone_call_names_itself_and_timeout_s(
    rank: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"local": node_store(), "shared": tmp_path, "timeout_s": 1.5}
    calls: dict[str, Callable[[Checkpointer], Any]] = {
        "resume": lambda checkpointer: checkpointer.resume(),
        "save": lambda checkpointer: checkpointer.save(0, shared=True),
        "close": lambda checkpointer: checkpointer.close(),
    }
    texts = {}
    with pytest.raises(CheckpointingException, match="every is 5 on rank 0 and 6 on rank 1"):
        Checkpointer(_state(), **options, every=5 + rank)
    dist.barrier()
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            Checkpointer(_state(), **options)
        texts["Checkpointer"] = str(caught.value)
    dist.barrier()
    for name, call_it in calls.items():
        checkpointer = Checkpointer(_state(), **options, every=1000)
        if name != "resume":
            checkpointer.resume()
        if rank == 0:
            if name != "resume":
                checkpointer.step(0)
            with pytest.raises(PeerLostError) as caught:
                call_it(checkpointer)
            texts[name] = str(caught.value)
        dist.barrier()
        checkpointer.abort()
        dist.barrier()
    assert len(texts) == (0 if rank else 4)
    for name, text in texts.items():
        assert f"Is {name}() called on every rank?" in text
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

    with pytest.raises(UnsafeGlobalError) as caught:
        resume_once(state, local=tmp_path, safe_globals=[_Conf])

    assert f"{__name__}._Conf is allowed, and was saved as __main__._Conf" in str(caught.value)
    assert "pass safe_globals=[(_Conf, '__main__._Conf')]" in str(caught.value)


def test_programs_that_name_no_session_have_one_each_and_a_restart_finds_its_own(
    shm_roots: Callable[[int], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root,) = shm_roots(1)
    for user in (life, local, output):
        monkeypatch.setattr(user, "default_root", lambda: root)
    programs = [
        *(("/a/train.py", ["--lr=1"], "x"), ("/a/train.py", ["--lr=2"], "x")),
        *(("/a/train.py", ["--lr=1"], "y"), ("/b/train.py", ["--lr=1"], "x")),
        *(("/a/train.py", ["--lr", "=1"], "x"), ("/a/train/__main__.py", ["--lr=1"], "x")),
    ]
    firsts, sessions = [], []

    for script, arguments, folder in [*programs, programs[0]]:
        monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
        monkeypatch.setattr(sys, "argv", ["", *arguments])
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        with Checkpointer(_state(), memory=True, every=1) as checkpointer:
            firsts.append(checkpointer.resume())
            checkpointer.step(firsts[-1])
            sessions.append(checkpointer.manager.session_id)

    assert firsts == [0] * len(programs) + [1]
    assert sessions[-1] == sessions[0]
    assert len(set(sessions)) == len(programs)
    assert all(session.startswith("train-") for session in sessions)
    assert all(session in call("ls").out for session in sessions)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-i"])
    with pytest.raises(CheckpointingException, match="give session_id="):
        Checkpointer(_state(), memory=True)
    with pytest.raises(CheckpointingException, match="give the session_id of the job"):
        localckpt.InMemoryCheckpointManager(read_only=True)


def _filled(fill: float) -> dict[str, Any]:
    layer = torch.nn.Linear(2, 2)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, fill)
    return {"layer": layer}


def _read(rank: int, world_size: int, local: Path, shared: Path | None) -> tuple[int, list[float]]:
    state = _filled(0.0)
    with Checkpointer(state, local=local, shared=shared, read_only=True, timeout_s=20.0) as reader:
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
    options: dict[str, Any] = {"timeout_s": 20.0, "events": ()}
    with Checkpointer(_filled(3.0), local=local, shared=shared, **options) as job:
        job.resume()
        job.step(4)
        job.save(4, shared=True)
        job.wait_until_finished()
        before = everything(tmp_path)

        place = local if tier == "nodes" else tmp_path / "none"
        read = run_ranks(_read, ranks, place, shared if tier == "shared" else None)

        assert read == [(4, [3.0, 3.0])] * ranks
        assert everything(tmp_path) == before


def test_a_value_that_was_renamed_added_or_removed_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    save_once({"run": Values(epoch=5, best=1.0)}, local=tmp_path)

    for given in ({"epoch": 0, "top": 2.0}, {"epoch": 0}, {"epoch": 0, "best": 2.0, "new": 1}):
        run = Values(**given)
        with pytest.raises(MismatchError) as caught:
            resume_once({"run": run}, local=tmp_path)
        assert run.state_dict() == given
        for name in {"epoch", "best"} ^ given.keys():
            assert name in str(caught.value)
    run = Values(epoch=0, top=2.0)
    assert resume_once({"run": run}, local=tmp_path, partial=True) == 1
    assert run.state_dict() == {"epoch": 5, "top": 2.0}
    # Names are fixed, and none hides a method.
    with pytest.raises(AttributeError, match=r"no value 'epohc' \(there are epoch, top\)"):
        run.epohc = 1
    with pytest.raises(CheckpointingException, match=r"state_dict=\.\.\.\): a method"):
        Values(state_dict=1)
