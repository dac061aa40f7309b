"""What is drained from the nodes is what a save of the same state to shared storage would be."""

from __future__ import annotations

import pickle
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh

import localckpt
from localckpt import (
    AsyncCallsQueue,
    CheckpointingException,
    CorruptShardError,
    MismatchError,
    NoReplicasAvailableError,
    PeerLostError,
)
from localckpt.events.stream import EventStream
from localckpt.global_tier import drain as drain_module
from localckpt.global_tier.folders import CommitRecord
from localckpt.global_tier.places import FilePlace
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from tests.events.sinks import Kept
from tests.global_tier.models import (
    MAX_S,
    WAIT_S,
    Job,
    await_files,
    checkpoints_in,
    fsdp_model,
    gathered,
    kept_in_image,
    leftovers_in,
    manager_on,
    run_sharded,
    small_files,
    states_of,
    step,
)
from tests.global_tier.states import blank as blank_of
from tests.managers.jobs import assert_same, damage, error_of, make_manager
from tests.ranks import await_announced, run_ranks, start_ranks
from tests.upstream.environment import import_upstream, needs

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _folder(root: Path) -> Path:
    (found,) = checkpoints_in(root)
    return root / found


def _metadata(root: Path) -> Metadata:
    metadata: Metadata = pickle.loads((_folder(root) / ".metadata").read_bytes())
    return metadata


def _loaded(root: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill a state by plain ``dcp.load``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=_folder(root))
    return state


def _save_models(rank: int, world_size: int, root: Path, counts: tuple[int, ...]) -> int:
    groups = {count: dist.new_group(range(count)) for count in counts}
    meshes = {n: DeviceMesh.from_group(g, "cpu") for n, g in groups.items() if rank < n}
    for count, mesh in meshes.items():
        here = root / f"saved by {count}"
        model, optimizer = fsdp_model(mesh, seed=count)
        state = {**states_of(model, optimizer), "iteration": 5, "schedule": [1.5, {"at": count}]}
        nodes = make_manager("disk", here / f"node{rank}", process_group=groups[count])
        shared = manager_on(here / "shared", process_group=groups[count])
        queue = AsyncCallsQueue(timeout_s=WAIT_S, process_group=groups[count])
        with nodes, shared, queue:
            nodes.save(state, 5)
            queue.schedule_async_request(nodes.promote(5, to=shared))
            # Training goes on meanwhile, in the same tensors.
            step(model, optimizer)
            nodes.save({**states_of(model, optimizer), "iteration": 6, "schedule": []}, 6)
            queue.wait_until_finished()
        model, optimizer = fsdp_model(mesh, seed=count)
        state |= states_of(model, optimizer)
        dcp.save(state, checkpoint_id=here / "by torch", process_group=groups[count])
    dist.barrier()
    done = 0
    for count, mesh in meshes.items():
        for saved in counts:
            here = root / f"saved by {saved}"
            found: list[Any] = []
            group = groups[count]
            options = {"process_group": group, "share_metadata": False}
            by_us = CachedMetadataFileSystemReader(here / "by torch", **options)
            # What we saved is read by torch and by us, and what torch saved is read by us.
            for reader in (dcp.FileSystemReader(_folder(here / "shared")), by_us, None):
                state = states_of(*fsdp_model(mesh, seed=99))
                state |= {"iteration": 0, "schedule": [0, {"at": 0}]}
                if reader is not None:
                    dcp.load(state, storage_reader=reader, process_group=group)
                else:
                    with manager_on(here / "shared", process_group=group) as shared:
                        shared.load(into=state)
                found.append(gathered(state))
            drained, by_torch, ours = found
            assert_same(drained, by_torch)
            assert_same(ours, by_torch)
            assert drained["iteration"] == 5
            assert drained["schedule"] == [1.5, {"at": saved}]
            done += 1
    return done


def test_models_sharded_by_fsdp_are_loaded_by_dcp_and_by_us_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    done = run_sharded(_save_models, 3, tmp_path, (1, 3))

    assert done[0] == 2**2


def _drain_replicas(rank: int, world_size: int, root: Path, marked: bool) -> None:
    torch.manual_seed(5)
    model = nn.Linear(300, 500)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    saved = {k: localckpt.replicated(v) for k, v in state.items()} if marked else state
    with Job(root) as job:
        job.nodes.save(saved, 5)
        job.promote(5)
    if rank == 0:
        record = CommitRecord.read(FilePlace(_folder(root / "shared"), "localckpt.json"))
        assert record is not None
        nbytes = 3 * sum(tensor.nbytes for tensor in model_state.values())
        assert nbytes < record.nbytes < 1.2 * nbytes
        # Each rank writes a part of it.
        data = {name for name in record.files if name.endswith(".distcp")}
        assert {name.split("_")[2] for name in data} == {"0", "1"}
        assert not [key for key in _metadata(root / "shared").state_dict_metadata if "rank" in key]
    fresh = nn.Linear(300, 500)
    other = torch.optim.AdamW(fresh.parameters())
    step(fresh, other)
    blank_model, blank_optimizer = get_state_dict(fresh, other)
    found = _loaded(root / "shared", {"model": blank_model, "optimizer": blank_optimizer})
    assert_same(found, state)


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "found to be equal"])
def test_what_all_ranks_have_is_written_once(marked: bool, tmp_path: Path) -> None:
    run_ranks(_drain_replicas, 2, tmp_path, marked)


def _drain_unequal(rank: int, world_size: int, root: Path) -> None:
    state = {
        "equal": {"set": {1, 2}, "list": [1, {"a": (2.5, None)}], "tensor": torch.ones(3)},
        "rng": torch.full((4 + rank,), rank, dtype=torch.uint8),
        "loader": {"position": 10 * rank, "of": "all"},
        "mixed": torch.ones(2) if rank else "text",
        f"only on {rank}": torch.full((2,), float(rank)),
    }
    with Job(root) as job:
        job.nodes.save(state, 5)
        job.promote(5)
        keys = {"rng", "loader.position", "mixed"}
        expected = {"equal.set", "equal.list.0", "equal.list.1.a", "equal.tensor", "loader.of"}
        expected |= {"only on 0", "only on 1"}
        found = _metadata(root / "shared").state_dict_metadata
        assert found.keys() == expected | keys, found.keys()
        # No rank gets another one's values unless it asks for them.
        asked = {"rng": torch.ones(4, dtype=torch.uint8), f"only on {rank}": torch.zeros(2)}
        with pytest.raises(MismatchError, match="different values of rng"):
            job.shared.load(into=asked)
        assert_same(asked["rng"], torch.ones(4, dtype=torch.uint8))
        job.shared.load(into=asked, partial=True)
        assert_same(asked["rng"], torch.zeros(4, dtype=torch.uint8))
    # Nor does who looks from outside.
    with (
        localckpt.open_checkpoint(root / "shared") as outside,
        pytest.raises(MismatchError, match="rank=0"),
    ):
        outside["rng"]
    with localckpt.open_checkpoint(root / "shared", rank=0) as outside:
        assert_same(outside["rng"], torch.zeros(4, dtype=torch.uint8))
        assert outside.value("loader.position") == 0
    with pytest.raises(MismatchError, match="first rank"):
        localckpt.open_checkpoint(root / "shared", rank=1)
    # Who asks for the plain key gets the first rank's, as from a save by DCP gets some rank's.
    plain = {"rng": torch.zeros(4, dtype=torch.uint8), "loader": {"position": -1}, "mixed": ""}
    _loaded(root / "shared", plain)
    assert_same(plain["rng"], torch.zeros(4, dtype=torch.uint8))
    assert (plain["loader"]["position"], plain["mixed"]) == (0, "text")
    assert_same(kept_in_image(_folder(root / "shared"), rank), state)


def test_private_values_that_differ_are_all_drained_in_the_images_of_their_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_drain_unequal, 2, tmp_path)

    assert "had of rng" in capfd.readouterr().out


def test_the_promoted_iteration_is_drained_whatever_is_saved_meanwhile(tmp_path: Path) -> None:
    weight = torch.zeros(600_000)
    with Job(tmp_path, keep_last=1) as job:
        job.nodes.save({"weight": weight}, 0)
        job.begin(0, rate_limit=20e6)
        for iteration in range(1, 6):
            weight += 1
            job.nodes.save({"weight": weight}, iteration)
        # It is held, though only the newest is kept.
        assert [d.iteration for d in job.nodes.status()] == [5, 0]
        job.queue.wait_until_finished()
        assert [str(d.level) for d in job.nodes.status()] == ["local", "drained"]
        job.nodes.save({"weight": weight}, 6)
        assert [d.iteration for d in job.nodes.status()] == [6]
        job.promote(6)
        assert job.nodes.status()[0].level == "drained"
        assert "Drained to shared storage, too: 6" in str(job.nodes.explain())

        found = {"weight": torch.ones(600_000)}
        job.shared.load(into=found, iteration=0)
        assert not found["weight"].any()
        job.shared.load(into=found, iteration=6)
    assert torch.equal(found["weight"], weight)
    assert not list(tmp_path.rglob("*.corrupt"))


def test_a_rate_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "_PIECE_NBYTES", 1 << 20)
    state = {"weight": torch.randn(1_500_000)}
    with Job(tmp_path) as job:
        job.nodes.save(state, 5)
        began = time.monotonic()
        job.begin(5, rate_limit=5e6)
        # Nobody has waited for it.
        assert not list(tmp_path.glob("shared/iteration*"))
        job.queue.wait_until_finished()
        seconds = time.monotonic() - began

    # All but the first piece waits for those before.
    assert (6e6 - (1 << 20)) / 5e6 < seconds
    found = {"weight": torch.zeros(1_500_000)}
    assert torch.equal(_loaded(tmp_path / "shared", found)["weight"], state["weight"])


def _refuse(rank: int, world_size: int, root: Path) -> list[str]:
    texts = []
    with Job(root, keep_last=1) as job:
        promote = lambda n, **o: lambda: job.nodes.promote(n, **{"to": job.shared} | o)  # noqa: E731
        texts.append(error_of(promote(1), NoReplicasAvailableError))
        with AsyncCallsQueue(timeout_s=MAX_S) as saves:
            request = job.nodes.save({"a": torch.ones(2)}, 1, is_async=True)
            texts.append(error_of(promote(1)))
            saves.schedule_async_request(request)
        job.nodes.save({"a": torch.ones(2)}, 2)
        texts.append(error_of(promote(1), NoReplicasAvailableError))
        texts.append(error_of(promote(2, rate_limit=0)))
        alone = [dist.new_group([r]) for r in range(world_size)][rank]
        with manager_on(root / f"other{rank}", process_group=alone) as other:
            texts.append(error_of(promote(2, to=other)))
        texts.append(error_of(promote(2, to=other)))
        job.promote(2)
    return texts


def test_what_cannot_be_promoted_is_refused_on_all_ranks_and_nothing_is_held(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(_refuse, 2, tmp_path)

    for texts in (first, second):
        missing, under_way, pruned, rate, other, closed = texts
        assert "iteration 1 cannot be promoted: it is not complete" in missing
        assert "its save is not finalized" in under_way
        assert "complete are: 2" in pruned
        assert "rate_limit is 0; it must be above 0" in rate
        assert "of 2, and the one of shared storage rank 0 of 1" in other
        assert "closed" in closed


def _save_two(rank: int, world_size: int, root: Path) -> None:
    with make_manager("disk", root / "nodes") as nodes:
        nodes.save({"a": torch.ones(2)}, 1)


def test_what_is_bad_of_another_number_of_ranks_or_not_for_dcp_is_not_promoted(
    tmp_path: Path,
) -> None:
    run_ranks(_save_two, 2, tmp_path)

    with make_manager("disk", tmp_path / "nodes") as nodes, manager_on(tmp_path / "s") as shared:
        text = error_of(lambda: nodes.promote(1, to=shared), MismatchError)
        assert "saved by 2 ranks, and this job has 1" in text
    with (
        make_manager("disk", tmp_path / "bad", check=lambda tensors: "NaN") as nodes,
        manager_on(tmp_path / "s") as shared,
    ):
        nodes.save({"a": torch.ones(2)}, 1)
        assert "is marked bad (rank 0: NaN)" in error_of(lambda: nodes.promote(1, to=shared))

    duplicated = "duplicated flatten key a.b): give one of them another key. Nothing was dr"
    for state, told in (
        ([torch.ones(3)], "the state is a list"),
        ({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, duplicated),
    ):
        with Job(tmp_path / told[:9]) as job:
            job.nodes.save(state, 5)
            assert told in error_of(lambda: job.promote(5), MismatchError)
            assert_same(job.nodes.load()[0], state)
    assert not list(tmp_path.glob("*/shared/*iteration*"))


def _promote_megatron(rank: int, world_size: int, root: Path) -> str:
    core = import_upstream("megatron.core.dist_checkpointing.mapping")
    part = core.ShardedTensor.from_rank_offsets("layers.weight", torch.ones(2))
    with Job(root) as job:
        job.nodes.save(localckpt.BasicTensorAwareStateDict({"layer": {"w": part}}), 5)
        return error_of(lambda: job.promote(5), MismatchError)


@needs("megatron.core")
def test_sharded_tensors_of_megatron_core_are_no_objects_on_shared_storage(tmp_path: Path) -> None:
    (told,) = run_ranks(_promote_megatron, 1, tmp_path)

    assert "layer.w is a ShardedTensor of Megatron-Core" in told
    assert not list(tmp_path.glob("shared/*iteration*"))


def test_what_is_on_shared_storage_already_is_not_drained_again(tmp_path: Path) -> None:
    def stamps() -> dict[Path, int]:
        paths = [p for p in tmp_path.rglob("shared/*") if not p.name.startswith(".localckpt")]
        return {path: path.stat().st_mtime_ns for path in paths}

    with Job(tmp_path) as job:
        job.nodes.save({"a": torch.ones(2)}, 5)
        job.promote(5)
        before = stamps()
        job.promote(5)
        assert stamps() == before
    with Job(tmp_path) as job:
        job.nodes.load()
        job.promote(5)
        assert stamps() == before != {}


def test_nothing_is_drained_over_or_before_what_is_newer(tmp_path: Path) -> None:
    with Job(tmp_path, keep_last=5) as job:
        for iteration in (3, 4, 5):
            job.nodes.save({"a": torch.ones(2)}, iteration)
        job.shared.save({"a": torch.zeros(2)}, 5)
        text = error_of(lambda: job.promote(5))
        assert "is on shared storage already, saved in another way" in text
        # Beside those of this start it has its place.
        job.promote(4)
        assert job.shared.all_iterations() == [5, 4]
    with Job(tmp_path, keep_last=5) as job:
        assert "is newer than iteration 3" in error_of(lambda: job.promote(3))
    with Job(tmp_path, keep_last=5) as job:
        assert job.nodes.load(iteration=4)[1].iteration == 4
        # The job went back from it.
        job.shared.load(into={"a": torch.ones(2)}, iteration=4)
        job.nodes.save({"a": torch.full((2,), 3.0)}, 5)
        job.promote(5)
        found, _ = job.shared.load(into={"a": torch.ones(2)})
        assert_same(found["a"], torch.full((2,), 3.0))


def test_a_damaged_image_is_quarantined_and_nothing_of_it_is_on_shared_storage(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job:
        job.nodes.save({"weight": torch.randn(1_000_000)}, 5)
        (path,) = tmp_path.rglob("*.safetensors")
        damage(path, 0.7)
        text = error_of(lambda: job.promote(5), CorruptShardError)

        assert "iteration 5 of rank 0" in text
        assert "was put in quarantine" in text
        assert job.shared.find_latest() == -1
        assert leftovers_in(tmp_path / "shared") == []
        job.nodes.save({"weight": torch.zeros(10)}, 6)
        job.promote(6)
    assert [p.name for p in tmp_path.rglob("*.corrupt")] == [f"{path.name}.corrupt"]


def _large(seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {f"{n}": torch.randn(250_000, generator=random) for n in range(12)} | {"at": seed}


def test_files_of_a_cut_off_drain_are_kept_only_if_every_block_is_good(tmp_path: Path) -> None:
    kept = Kept()
    with small_files(), closing(EventStream([kept])) as events:
        with Job(tmp_path) as job:
            job.nodes.save(_large(5), 5)
            job.begin(5, rate_limit=4e6)
            root = tmp_path / "shared"
            await_files(root, 5)
            job.queue.close(abort=True)
            # What it has written stays, also when the managers are closed in order.
        (half,) = leftovers_in(root)
        first, second, third, *_ = sorted((root / half).glob("*.distcp"))
        damage(first)
        second.write_bytes(second.read_bytes()[:-1])
        stamp = third.stat().st_ino

        with Job(tmp_path, events=events) as job:
            assert job.shared.find_latest() == -1
            job.nodes.load()
            job.promote(5, rate_limit=1e9)

    (drain,) = kept.named("drain")
    assert drain.nbytes is not None
    assert drain.nbytes + drain.details["kept_bytes"] > 12_000_000
    assert not drain.is_lost
    assert drain.details["kept_bytes"] >= 2_000_000
    assert drain.details["rate_limit"] == 1e9
    found = _loaded(root, blank_of(_large(0)))
    assert_same(found, _large(5))
    assert (_folder(root) / third.name).stat().st_ino == stamp


# Far more than it takes to hear of another rank, far less than a drain at this rate.
_AT_ONCE_S, _SLOW_RATE = 10.0, 2e5


def _leave(rank: int, world_size: int, root: Path, leaves: str) -> tuple[str, float]:
    """The first rank leaves a drain on which all are at work, or its queue alone does."""
    with make_manager("disk", root / f"node{rank}") as nodes:
        with manager_on(root / "shared", timeout=WAIT_S) as shared:
            nodes.save({f"of {rank}": _large(rank)}, 5)
            queue = AsyncCallsQueue(timeout_s=WAIT_S)
            queue.schedule_async_request(nodes.promote(5, to=shared, rate_limit=_SLOW_RATE))
            await_announced("leave", WAIT_S)
            began = time.monotonic()
            text = ""
            if rank > 0:
                text = error_of(queue.wait_until_finished, PeerLostError)
            elif leaves == "the queue":
                queue.close(abort=True)
            else:
                # As when the training loop raises.
                shared.__exit__(CheckpointingException, CheckpointingException(), None)
                text = error_of(queue.wait_until_finished, PeerLostError)
            seconds = time.monotonic() - began
        if leaves == "the queue":
            nodes.save({"a": torch.ones(2)}, 6)
            assert [d.iteration for d in nodes.status()] == [6, 5]
    return text, seconds


@pytest.mark.parametrize("leaves", ["the queue", "the manager"])
def test_a_drain_that_one_rank_leaves_ends_on_all_at_once(leaves: str, tmp_path: Path) -> None:
    with start_ranks(_leave, 3, tmp_path, leaves) as group:
        await_files(tmp_path / "shared", 3)
        group.announce("leave")
        (_, first_s), (text, second_s), (same, third_s) = group.join(WAIT_S)

    assert max(first_s, second_s, third_s) < _AT_ONCE_S
    assert "the drain of iteration 5 was stopped: begun again" in text or "left" in text
    assert text == same
