"""Checkpoints of the nodes and of shared storage are one lineage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from localckpt.errors import CorruptShardError
from localckpt.global_tier.folders import CommitRecord
from localckpt.lineage import EpochId, Lineage, Point
from localckpt.state_dict.source import read_header
from localckpt.storage.files import FileSource
from tests.global_tier.models import blank, checkpoints_in, manager_on, state_of
from tests.managers.jobs import make_manager
from tests.ranks import node_store, run_ranks


def _recorded(root: Path, iteration: int) -> Lineage:
    """The lineage of a shared checkpoint."""
    (folder,) = root.glob(f"iteration_{iteration:08d}.*")
    record = CommitRecord.read(folder)
    assert record is not None
    assert record.lineage is not None
    return record.lineage


def _kept(rank: int, iteration: int) -> Lineage:
    """The lineage of a rank's shard."""
    (path,) = node_store().rglob(f"{iteration:012d}.{rank}.*.safetensors")
    source = FileSource(path)
    try:
        identity = read_header(source).identity
    finally:
        source.close()
    assert identity.lineage is not None
    assert identity.lineage.epoch == identity.generation.epoch_id
    return identity.lineage


def _go_on(rank: int, world_size: int, root: Path) -> None:
    def local(keep_last: int = 9) -> Any:
        return make_manager("disk", node_store(), "job", keep_last=keep_last)

    # The first job saves to both.
    with local() as nodes, manager_on(root, local=nodes) as shared:
        shared.save(state_of(1, rank), 1, is_async=False)
        nodes.save({"iteration": 2}, 2)
        nodes.save({"iteration": 9}, 9)
    first = _kept(rank, 2)
    assert _recorded(root, 1) == first == Lineage(first.epoch)

    # The second goes back to shared storage, and saves to both.
    with local() as nodes, manager_on(root, local=nodes) as shared:
        assert nodes.find_latest() == 9
        assert shared.load(into=blank(state_of(1, rank)))[1].iteration == 1
        nodes.save({"iteration": 3}, 3)
        shared.save(state_of(4, rank), 4, is_async=False)
    second = _kept(rank, 3)
    assert (second.origin, second.resumed_at) == ("shared", 1)
    assert second.ancestors == (Point(first.epoch, 1),)
    assert second.given_up == (Point(first.epoch, 9),)
    assert _recorded(root, 4) == second

    # The third goes on from the nodes.
    with local() as nodes, manager_on(root, local=nodes) as shared:
        assert nodes.find_latest() == 3
        nodes.load()
        shared.save(state_of(5, rank), 5, is_async=False)
    third = _recorded(root, 5)
    assert (third.origin, third.resumed_at) == ("local", 3)
    assert third.ancestors == (Point(second.epoch, 3), Point(first.epoch, 1))

    # The fourth knows shared storage alone.
    with manager_on(root) as shared:
        assert shared.load(into=blank(state_of(5, rank)))[1].iteration == 5
        shared.save(state_of(6, rank), 6, is_async=False)
        shared.save(state_of(7, rank), 7, is_async=False)
    fourth = _recorded(root, 6)
    assert (fourth.origin, fourth.ancestors[0]) == ("shared", Point(third.epoch, 5))
    assert _recorded(root, 7) == fourth
    assert len({first.epoch, second.epoch, third.epoch, fourth.epoch}) == 4


def test_what_one_tier_loads_the_other_descends_from(tmp_path: Path, node_dirs: Any) -> None:
    run_ranks(_go_on, 2, tmp_path / "shared", store_per_node=node_dirs(2))


def _save_behind_another(rank: int, world_size: int, root: Path) -> None:
    with manager_on(root, keep_last=1) as manager:
        manager.save(state_of(10, rank), 10, is_async=False)
    with manager_on(root, keep_last=1) as manager:
        manager.save(state_of(3, rank), 3, is_async=False)
        manager.save(state_of(4, rank), 4, is_async=False)
        # The first rank removes what is older, which no other waits for.
        manager.save(state_of(5, rank), 5, is_async=False)
        there = [name for name in checkpoints_in(root) if not name.endswith("5.0002")]
        assert set(there) <= {"iteration_00000004.0002", "iteration_00000010.0001"}
        assert "iteration_00000010.0001" in there
        manager.save(state_of(11, rank), 11, is_async=False)


def test_what_is_ahead_of_a_job_that_did_not_go_back_from_it_stays_until_it_is_passed(
    tmp_path: Path,
) -> None:
    run_ranks(_save_behind_another, 2, tmp_path)

    assert checkpoints_in(tmp_path) == ["iteration_00000011.0002"]


def test_a_record_may_have_no_lineage_and_one_without_the_key_or_of_nonsense_is_refused(
    tmp_path: Path,
) -> None:
    lineage = Lineage(EpochId(3, 7), "shared", 5, (Point(EpochId(2, 9), 5),))
    record = CommitRecord("run", 6, 3, "0" * 32, 2, {"__0_0.distcp": 1}, 5, lineage)
    path = tmp_path / "localckpt.json"

    def read(change: dict[str, Any]) -> CommitRecord | None:
        fields = json.loads(record.to_bytes().partition(b"\n")[0]) | change
        text = json.dumps({k: v for k, v in fields.items() if v != "gone"}).encode()
        path.write_bytes(b"%s\n%016x\n" % (text, xxhash.xxh3_64_intdigest(text)))
        return CommitRecord.read(tmp_path)

    assert read({}) == record
    assert read({"lineage": None}) == replace(record, lineage=None)
    with pytest.raises(CorruptShardError, match="'lineage'"):
        read({"lineage": "gone"})
    with pytest.raises(CorruptShardError, match="is no lineage"):
        read({"lineage": [1, 2]})
