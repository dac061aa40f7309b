"""A scheme of an installed package is found by the kind of its pieces; nobody imports it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import localckpt
from tests.programs import run_python

_MIRROR = """
class Mirror:
    def fits(self, group):
        return len(group.ranks) == 2 and group.tolerated == 1

    def rebuilds(self, group, rank, images, pieces):
        return rank in pieces

    def losses(self, group, rank, holders, pieces):
        yield frozenset(holders.get(rank, ())) | frozenset(pieces.get(rank, ()))
"""

# Node a held rank 0's shard and is lost; node b has rank 1's, and what mirrors rank 0's.
_LOOK = """
import sys
from localckpt.availability.coverage import complete_checkpoints
from localckpt.availability.inventory import Inventory
from localckpt.availability.recoverable import computable
from localckpt.ids import Checkpoint, Generation, Group, ShardRecord
from localckpt.replication.schemes import SCHEMES

checkpoint = Checkpoint(Generation(1, 0), 5, 2)
group = Group((0, 1), 1, "mirror")
records = [
    ShardRecord(checkpoint.shard(1, "run"), 100),
    ShardRecord(checkpoint.shard(0, "run").of_kind("mirror"), 100, group),
]
print("mirrors" in sys.modules, sorted(SCHEMES), "mirrors" in sys.modules)
inventory = Inventory.found({"b": records}, codes=SCHEMES)
found = {rank: group.kind for rank, group in computable(checkpoint, inventory).items()}
print(found, len(complete_checkpoints(inventory)))
"""


def _run(site: Path, module: str) -> subprocess.CompletedProcess[str]:
    """Look where a package is installed that has a scheme."""
    (site / "mirrors.py").write_text(_MIRROR)
    info = site / "mirrors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mirrors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[localckpt.schemes]\nmirror = {module}:Mirror\n")
    path = os.pathsep.join([str(site), str(Path(localckpt.__file__).parents[1])])
    return run_python(_LOOK, env=os.environ | {"PYTHONPATH": path})


def test_pieces_of_another_packages_scheme_make_a_checkpoint_complete(tmp_path: Path) -> None:
    found = _run(tmp_path, "mirrors")

    assert found.stdout.splitlines() == [
        "False ['mirror', 'parity'] False",
        "{0: 'mirror'} 1",
    ], found.stderr


def test_a_scheme_that_cannot_be_imported_is_an_error_that_names_it(tmp_path: Path) -> None:
    found = _run(tmp_path, "mirrors_of_another_version")

    assert "MismatchError: pieces of the kind 'mirror' are computed by" in found.stderr
    assert "mirrors_of_another_version:Mirror, which cannot be imported" in found.stderr
