"""Ranks that stay alive keep their step, and those that lack it get it from a live one."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import localckpt
from localckpt import replicated
from localckpt.checkpointer.live import LiveReport, judge_live, why_private
from localckpt.checkpointer.parts import ModulePart
from localckpt.managers.capture import tensors_of
from localckpt.state_dict.replicated import Replicated
from tests.checkpointer.loops import stores
from tests.checkpointer.survivors import begin, connect, survive
from tests.ranks import DeadRank, node_store, on_ranks, run_ranks

_STEPS = 16
# Of who replaces a rank, until the lives before are over, on a machine that is busy.
_PATIENCE_S = 60.0

# (process, step, where in the step, whether it is killed or gets an error)
_Cut = tuple[int, int, str, str]


class _Job:
    """State of one process, which it makes once, and the loop of one life over it."""

    def __init__(self, home: int, cuts: list[_Cut]) -> None:
        self.home, self.cuts = home, cuts
        torch.manual_seed(1)
        layers = [torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1)]
        self.model = torch.nn.Sequential(layers[0], layers[1], torch.nn.Dropout(0.0), layers[2])
        self.optimizers = [
            torch.optim.AdamW(layers[0].parameters(), lr=0.01),
            torch.optim.SGD([*layers[1].parameters(), *layers[2].parameters()], 0.01, 0.9),
        ]
        self.schedule = StepLR(self.optimizers[0], 3, 0.7)
        self.ends: dict[int, list[bytes]] = {}

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "a": self.optimizers[0], "b": self.optimizers[1]}
        return {key: replicated(part) for key, part in (parts | {"lr": self.schedule}).items()}

    def now(self) -> list[bytes]:
        """Values that a step changes before its optimizers do, and that are of this rank alone."""
        return [t.numpy().tobytes() for t in (*self.model.buffers(), torch.get_rng_state())]

    def may_be_cut(self, step: int, where: str) -> None:
        for cut in self.cuts:
            if cut[:3] == (self.home, step, where):
                self.cuts.remove(cut)
                if cut[3] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("cut off")

    def step(self, ddp: torch.nn.Module, batch: torch.Tensor, step: int) -> None:
        loss = ddp(batch).square().mean() + 0.0 * torch.rand(())
        self.may_be_cut(step, "before the exchange")
        loss.backward()
        self.may_be_cut(step, "before the optimizers")
        self.optimizers[0].step()
        self.may_be_cut(step, "between the optimizers")
        self.optimizers[1].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.schedule.step()

    def digest(self) -> str:
        hasher = hashlib.sha256(repr(self.schedule.get_last_lr()).encode())
        for tensor in (t for optimizer in self.optimizers for t in tensors_of(optimizer)):
            hasher.update(tensor.detach().numpy().tobytes())
        return hasher.hexdigest()


def _batches(in_epochs: bool, checkpointer: localckpt.Checkpointer, first: int) -> Any:
    if not in_epochs:
        for step in range(first, _STEPS):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            yield torch.randn(16, 8, generator=generator)
        return
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(5)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    for _ in checkpointer.epochs(4):
        for (batch,) in checkpointer.batches(loader):
            yield batch


def _train(
    home: int, world_size: int, worlds: list[list[int]], cuts: list[_Cut], in_epochs: bool
) -> tuple[str, list[Any]]:
    job, checkpointer, seen = _Job(home, cuts), None, list[Any]()
    for number, world in enumerate(worlds):
        if home not in world:
            continue
        store, limit = connect(f"life{number}"), timedelta(seconds=20)
        if number == 0 or checkpointer is not None:
            store.set("begins", "")
        store.wait(["begins"], timedelta(seconds=_PATIENCE_S))
        ranks = world.index(home), len(world)
        dist.init_process_group("gloo", None, limit, ranks[1], ranks[0], store)
        job.may_be_cut(-number, "before it joins")
        if checkpointer is None:
            how: dict[str, Any] = {"every": 4, "replication_factor": 2, "timeout_s": 8.0}
            checkpointer = localckpt.Checkpointer(job.state(), local=node_store(), **how)
            checkpointer.whole_step(*job.optimizers)
            step = checkpointer.resume()
        else:
            try:
                rejoined = checkpointer.rejoin(keep="live")
            except localckpt.PeerLostError:
                seen.append("a rank did not come")
                dist.destroy_process_group()
                continue
            step = rejoined.step
            seen.append((rejoined, job.now() == job.ends.get(step - 1)))
        # Without buckets that are made anew, whose sums are rounded otherwise.
        options = {"find_unused_parameters": True, "init_sync": False}
        ddp = DistributedDataParallel(job.model, **options)
        try:
            for batch in _batches(in_epochs, checkpointer, step):
                job.step(ddp, batch, step)
                checkpointer.step(step)
                job.ends[step] = job.now()
                step += 1
            break
        except (RuntimeError, localckpt.PeerLostError) as error:
            print(error)
        # DDP first, which the traceback had too: as the last that has the group it would wait, with
        # Python's lock, for a thread of gloo that needs the lock.
        checkpointer.abort()
        del ddp
        gc.collect()
        dist.destroy_process_group()
    end = job.digest()
    checkpointer.close()
    dist.destroy_process_group()
    return end, seen


def _run(
    worlds: list[list[int]], cuts: list[_Cut], folder: Path, *, in_epochs: bool = False
) -> list[Any]:
    homes = 1 + max(home for world in worlds for home in world)
    lost = [home for home, *_, how in cuts if how == "killed"]
    return run_ranks(
        *(_train, homes, worlds, cuts, in_epochs),
        init_group=False,
        store_per_node=stores(folder, homes),
        expect_dead=lost,
        timeout_s=_PATIENCE_S + 20,
    )


@cache
def _undisturbed(ranks: int, in_epochs: bool) -> str:
    with TemporaryDirectory() as folder:
        ends = {end for end, _ in _run([[*range(ranks)]], [], Path(folder), in_epochs=in_epochs)}
    (end,) = ends
    return end


# The processes of each life by rank, who is lost where, and whether the loop has epochs.
_LOSSES: dict[str, tuple[list[list[int]], list[_Cut], bool]] = {
    "the first, in its optimizers": (
        *([[0, 1], [2, 1]], [(0, 6, "between the optimizers", "killed")]),
        True,
    ),
    "of three": ([[0, 1, 2], [0, 3, 2]], [(1, 9, "before the optimizers", "killed")], False),
    "before a checkpoint": ([[0, 1], [0, 2]], [(1, 2, "before the exchange", "killed")], True),
    "twice in a row": (
        [[0, 1], [0, 2], [3, 2]],
        [(1, 6, "before the exchange", "killed"), (0, 7, "before the exchange", "killed")],
        False,
    ),
    "and its replacement as it joins": (
        [[0, 1], [0, 2], [0, 3]],
        [(1, 6, "before the exchange", "killed"), (2, -1, "before it joins", "killed")],
        False,
    ),
}


@pytest.mark.fault("survivors")
@pytest.mark.parametrize("name", _LOSSES)
def test_no_step_is_lost_with_a_rank(name: str, tmp_path: Path) -> None:
    worlds, cuts, in_epochs = _LOSSES[name]

    outcomes = _run(worlds, cuts, tmp_path, in_epochs=in_epochs)

    alive = [seen for seen in outcomes if not isinstance(seen, DeadRank)]
    assert {end for end, _ in alive} == {_undisturbed(len(worlds[0]), in_epochs)}
    kept = [one for _, seen in alive for one in seen if not isinstance(one, str)]
    assert kept
    for rejoined, is_as_it_was in kept:
        assert (rejoined.source, rejoined.nbytes, rejoined.why) == ("own live state", 0, "")
        assert (rejoined.lost_steps, is_as_it_was) == (0, True)


@pytest.mark.fault("survivors")
@pytest.mark.parametrize("where", ["before the optimizers", "between the optimizers"])
def test_a_rank_behind_or_not_whole_gets_the_step_of_another(where: str, tmp_path: Path) -> None:
    outcomes = _run([[0, 1], [0, 1]], [(1, 6, where, "error")], tmp_path)

    assert {end for end, _ in outcomes} == {_undisturbed(2, False)}
    (ahead, _), (behind, _) = (seen[0] for _, seen in outcomes)
    assert (ahead.step, ahead.source, ahead.nbytes) == (7, "own live state", 0)
    assert (behind.step, behind.source, behind.lost_steps) == (7, "live rank 0", 0)
    assert behind.nbytes > 1000


@on_ranks(1)
def test_a_plain_parameter_beside_dtensors_is_taken_for_each_ranks_own(
    rank: int, world_size: int
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mesh = DeviceMesh("cpu", [0])
    why = []
    for layer in model:
        distribute_module(layer, mesh)
        parts = {"model": ModulePart(model), "optimizer": torch.optim.AdamW(model.parameters())}
        why.append(why_private(parts, {}, world_size))
    one_is_plain, none_is = why
    assert "nothing says that 'model' is equal" in one_is_plain
    assert none_is == ""


# For each life of a sharded job its processes, the shape of its mesh, and why it goes back.
_SHARDED: dict[str, tuple[list[list[int]], tuple[int, ...], str]] = {
    "a replica of each shard is alive": ([[0, 1, 2, 3], [0, 4, 2, 3]], (2, 2), ""),
    "one of two shards is lost": (
        *([[0, 1], [0, 2]], (2,)),
        "model.0.weight: elements [32:64, 0:8] are in no shard",
    ),
}


@pytest.mark.fault("survivors")
@pytest.mark.parametrize("name", _SHARDED)
def test_a_sharded_step_is_kept_if_each_shard_has_a_live_holder(name: str, tmp_path: Path) -> None:
    worlds, shape, why = _SHARDED[name]

    survivors = survive(worlds, tmp_path, shape=shape, keep="live")

    lives = [life for seen in survivors.values() for life in seen]
    assert all(life.is_as_saved for life in lives)
    kept = [life.rejoined for life in lives if life.rejoined is not None]
    assert len(kept) == len(worlds[0]) - 1
    for one in kept:
        assert why in one.why
        assert bool(one.why) == bool(why)
        assert (one.step, one.lost_steps) == ((6, 1) if why else (7, 0))
        assert ("live" in one.source) == (not why)


_FALLS_BACK = {
    "unmarked": "nothing says that 'lr' is equal",
    "marked for other ranks": "'b' is marked as equal on ranks 0 to 2",
    "changed by DDP": "without init_sync=False",
    "trained by no watched optimizer": "no optimizer given to whole_step",
    "within a step": "no rank has a whole state",
}


def _values(state: dict[str, Any]) -> list[bytes]:
    parts = [getattr(part, "value", part) for part in state.values()]
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    tensors = [t for optimizer in optimizers for t in tensors_of(optimizer)]
    return [getattr(t, "_local_tensor", t).detach().numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("how", [*_FALLS_BACK, "made anew"])
@on_ranks(2, nodes=2, init_group=False)
def test_all_go_back_and_say_why_if_no_live_rank_has_all(rank: int, how: str) -> None:
    begin(0, [0, 1], rank)
    job, ends = _Job(rank, []), dict[int, list[bytes]]()
    state = job.state()
    if how == "unmarked":
        state["lr"] = job.schedule
    elif how == "trained by no watched optimizer":
        state["head"] = replicated(torch.nn.Linear(3, 3))
    checkpointer = localckpt.Checkpointer(state, local=node_store(), every=4, timeout_s=20.0)
    checkpointer.whole_step(*job.optimizers)
    for step in range(checkpointer.resume(), 6):
        batch = torch.randn(9, 8, generator=torch.Generator().manual_seed(step))
        job.step(job.model, batch, step)
        checkpointer.step(step)
        ends[step] = _values(state)
    checkpointer.wait_until_finished()
    checkpointer.abort()
    dist.destroy_process_group()
    begin(1, [1, 0], rank)
    if how == "changed by DDP":
        DistributedDataParallel(job.model)
    elif how == "made anew":
        job = _Job(rank, [])
        checkpointer.whole_step(*job.optimizers)
        state = job.state()
    elif how == "marked for other ranks":
        state["b"] = Replicated(job.optimizers[1], (0, 1, 2))
    elif how == "within a step":
        job.optimizers[0].step()
    rejoined = checkpointer.rejoin(state, keep="live")
    assert _values(state) == ends[rejoined.step - 1]
    checkpointer.close()
    dist.destroy_process_group()
    if how == "made anew":
        # Its parts get the step of those before.
        assert (rejoined.step, rejoined.source, rejoined.why) == (6, "own live state", "")
    else:
        assert _FALLS_BACK[how] in rejoined.why
        assert (rejoined.step, rejoined.lost_steps) == (4, 2)
        assert "live" not in rejoined.source


def test_keeping_what_is_not_known_to_be_whole_is_refused(tmp_path: Path) -> None:
    job = _Job(0, [])
    checkpointer = localckpt.Checkpointer(job.state(), local=tmp_path)
    checkpointer.resume()
    for match, arguments in {
        "whole_step.. the optimizer of 'a', 'b'": {"keep": "live"},
        "keep='alive'": {"keep": "alive"},
        "keep='live' with partial=": {"keep": "live", "partial": True},
        "a function": {"keep": "live", "state": job.state},
    }.items():
        with pytest.raises(localckpt.CheckpointingException, match=match):
            checkpointer.rejoin(**arguments)  # type: ignore[arg-type]
    with pytest.raises(localckpt.CheckpointingException, match="was given a StepLR"):
        checkpointer.whole_step(job.schedule)  # type: ignore[arg-type]
    checkpointer.whole_step(*job.optimizers)
    with pytest.raises(localckpt.CheckpointingException, match="the optimizer of 'a', 'b'"):
        checkpointer.rejoin(_Job(0, []).state(), keep="live")
    # Nothing was aborted.
    checkpointer.step(0)
    checkpointer.close()


_REPORTS = st.tuples(
    *(st.sampled_from([None, True]), st.integers(-1, 3)),
    *(st.sampled_from(["", "alone"]), st.sampled_from(["run", "another run"])),
)


@given(st.lists(_REPORTS, min_size=1, max_size=5))
def test_only_a_step_that_a_live_rank_has_whole_is_kept(ranks: list[Any]) -> None:
    reports = [
        LiveReport(keeps, step if keeps else -1, "", private, (n, len(ranks), run), {"of": n})
        for n, (keeps, step, private, run) in enumerate(ranks)
    ]
    whole = max(report.step for report in reports)

    kept = judge_live(reports)

    if not any(report.keeps for report in reports):
        assert kept is None
    elif kept is not None and kept.step >= 0:
        ((holder, _),) = kept.holders
        assert kept.step == whole == reports[holder].step
        has = [(r.step, r.was[2]) for r in reports]
        assert [*kept.lacking] == [n for n, of in enumerate(has) if of != has[holder]]
        assert not (kept.lacking and any(report.private for report in reports))
        assert kept.place == {"of": holder}
    else:
        assert kept is not None
        assert kept.why
    if any(report.keeps for report in reports):
        with pytest.raises(localckpt.MismatchError, match="the same keep="):
            judge_live([*reports, LiveReport(keeps=False)])
