"""Checkpoints of the nodes and of shared storage are one lineage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localckpt.global_tier.folders import CommitRecord
from localckpt.global_tier.places import FilePlace
from localckpt.lineage import Lineage, Point
from localckpt.state_dict.source import read_header
from localckpt.storage.files import FileSource
from tests.global_tier.models import blank, manager_on, state_of
from tests.managers.jobs import make_manager
from tests.ranks import node_store, run_ranks


def _recorded(root: Path, iteration: int) -> Lineage:
    (folder,) = root.glob(f"iteration_{iteration:08d}.*")
    record = CommitRecord.read(FilePlace(folder, "localckpt.json"))
    assert record is not None
    assert record.lineage is not None
    return record.lineage


def _kept(rank: int, iteration: int) -> Lineage:
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
