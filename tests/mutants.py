"""Lines of the product that hold a guarantee, each broken on purpose: some test fails for each.

``python -m tests.mutants`` breaks one after the other in a copy of the package, runs the tests that
should notice with the choice of rows of a plain run, and prints those that nobody noticed. Numbers
choose some of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant"]

_ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A change of one place in a module, and the tests that notice it."""

    module: str
    line: str
    broken: str
    tests: str


_FAULTS, _HEADERS = "tests/faults/", "tests/faults/test_hostile.py tests/state_dict"

MUTANTS = [
    # What was complete survives a loss of power, and a kill.
    Mutant(
        "storage/write.py",
        "os.fsync(fd)\n            os.rename(write.dirty",
        "os.rename(write.dirty",
        _FAULTS + "test_power_cut.py",
    ),
    Mutant(
        "storage/write.py", "sync_folder(write.final.parent)", "pass", _FAULTS + "test_power_cut.py"
    ),
    Mutant(
        "storage/write.py",
        "sync_folder(write.dirty.parent)",
        "pass",
        _FAULTS + "test_power_cut.py tests/storage",
    ),
    Mutant(
        "storage/write.py",
        "os.rename(write.dirty, write.final)\n            sync_folder",
        "sync_folder",
        "tests/storage",
    ),
    Mutant(
        "global_tier/data_files.py",
        "if sync:\n",
        "if False:\n",
        _FAULTS + "test_global_killed.py tests/global_tier/test_writer.py",
    ),
    # No byte is wrong without a word.
    Mutant(
        "memory/digests.py",
        "if found != wanted:",
        "if False:",
        _FAULTS + "test_damage_everywhere.py",
    ),
    Mutant(
        "memory/digests.py",
        "return (self._seed + index) &",
        "return self._seed &",
        _FAULTS + "test_damage_everywhere.py",
    ),
    Mutant(
        "memory/digests.py",
        "xxhash.xxh3_64_intdigest(identity.seed.encode())",
        "0",
        _FAULTS + "test_damage_everywhere.py tests/state_dict",
    ),
    Mutant("state_dict/header.py", "if start + end != image_nbytes:", "if False:", _HEADERS),
    Mutant("state_dict/header.py", "if slot.offset != end:", "if False:", _HEADERS),
    Mutant(
        "state_dict/header.py", "if not rank < world_size <= MOST_RANKS:", "if False:", _HEADERS
    ),
    Mutant(
        "state_dict/header.py", "if lineage.epoch != generation.epoch_id:", "if False:", _HEADERS
    ),
    Mutant("state_dict/header.py", "if found == FORMAT_VERSION:", "if found:", _HEADERS),
    Mutant(
        "storage/directory.py",
        'if file.problem.kind == "damaged":',
        "if False:",
        "tests/managers/test_damage.py tests/storage",
    ),
    # Reading runs nothing of a file, and writes into nothing of others.
    Mutant(
        "state_dict/safe_globals.py",
        "raise self.refusal([Name(module, name)])",
        "return _resolve(module, name)",
        _FAULTS + "test_hostile.py tests/state_dict",
    ),
    Mutant(
        "state_dict/unpickler.py",
        "if tensors is not None and not 0 <= number < tensors:",
        "if False:",
        _HEADERS,
    ),
    Mutant(
        "own_folders.py",
        "if stat.S_ISLNK(status.st_mode) and status.st_uid",
        "if False and status.st_uid",
        _FAULTS + "test_other_users.py",
    ),
    Mutant(
        "storage/files.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECT",
        "os.O_RDONLY | os.O_DIRECT",
        _FAULTS + "test_hostile_folder.py tests/storage",
    ),
    # Which checkpoint a restart takes.
    Mutant(
        "availability/coverage.py",
        "dead = overruled(left, lineages)",
        "dead = set[Checkpoint]()",
        "tests/availability",
    ),
    Mutant(
        "availability/coverage.py",
        "and not _lacking(checkpoint, shards)",
        "",
        "tests/availability tests/managers/test_node_loss.py",
    ),
    Mutant(
        "availability/coverage.py",
        "if epoch.number >= later.number:",
        "if False:",
        "tests/availability",
    ),
    Mutant(
        "availability/coverage.py",
        "if complete and complete[0].world_size != world_size",
        "if False",
        "tests/availability tests/managers/test_worlds.py",
    ),
    Mutant(
        "availability/coverage.py",
        "if world_size < least_nodes:",
        "if False:",
        "tests/availability",
    ),
    Mutant(
        "lineage.py",
        "return self.resumed_at < iteration and any(",
        "return any(",
        "tests/availability",
    ),
    Mutant("trust.py", 'if trust.mark == "quarantined":', "if False:", "tests/availability"),
    Mutant(
        "trust.py",
        "elif most is not None and trust.failed",
        "elif False and trust.failed",
        "tests/availability",
    ),
    Mutant("trust.py", 'trusts[checkpoint].mark == "bad"', "True", "tests/availability"),
    Mutant(
        "availability/retention.py",
        'sign = 1.0 if self.mode == "min" else -1.0',
        "sign = 1.0",
        "tests/availability",
    ),
    Mutant(
        "availability/retention.py",
        "checkpoint not in self.but and is_over",
        "is_over",
        "tests/availability tests/managers/test_kept_best.py",
    ),
    # Ranks act together.
    Mutant(
        "availability/coverage.py",
        "if outcome.error is None and outcome.missing:",
        "if False:",
        "tests/availability",
    ),
    Mutant(
        "availability/coverage.py",
        "for rank, o in enumerate(outcomes) if o.error is not None}",
        "for rank, o in enumerate(outcomes) if False}",
        "tests/availability tests/managers/test_failed_saves.py",
    ),
    Mutant(
        "availability/coverage.py",
        "if any(other != reports[0] for other in reports):",
        "if False:",
        "tests/availability tests/managers/test_disagreement.py tests/managers/test_epoch.py",
    ),
    Mutant(
        "ranks/failure.py",
        "if kind not in errors.__all__ or type(text) is not str:",
        "if False:",
        _FAULTS + "test_hostile_store.py tests/test_failure_texts.py",
    ),
    Mutant(
        "ranks/store_part.py",
        "Standing.of(group.process_group)) != group.made_for:",
        "None) is None:",
        "tests/test_changed_groups.py",
    ),
    Mutant(
        "ranks/store_part.py",
        "if default_store() is not group.store:",
        "if False:",
        "tests/test_changed_groups.py",
    ),
    Mutant(
        "managers/elastic_judge.py",
        "for packed in packs) != self._asked:",
        "for packed in packs) is None:",
        _FAULTS + "test_hostile_store.py",
    ),
    Mutant(
        "managers/save.py",
        "if isinstance(error, PeerLostError) and error.outcome_unknown:",
        "if False:",
        "tests/managers/test_failed_saves.py tests/managers/test_behind_training.py",
    ),
    # Who writes where.
    Mutant(
        "storage/owner.py",
        "if Owner.of(owner.pid) == owner:",
        "if Owner.of(owner.pid) is not None:",
        "tests/storage tests/managers/test_leftovers.py",
    ),
    Mutant(
        "storage/rank_folder.py",
        "if found != self.token:",
        "if False:",
        "tests/storage tests/managers/test_wiped_folders.py",
    ),
    Mutant(
        "global_tier/root.py",
        "if self._was_there and not (is_there and is_kept):",
        "if False:",
        "tests/global_tier/test_manager_roots.py",
    ),
    # Nothing is resumed in part without a word.
    Mutant(
        "state_dict/targets.py",
        "            if differ.lines:\n",
        "            if False:\n",
        "tests/state_dict tests/checkpointer/test_changed_programs.py",
    ),
    Mutant(
        "state_dict/targets.py",
        "        if lines or differ.lines:\n",
        "        if False:\n",
        "tests/state_dict tests/checkpointer/test_changed_programs.py",
    ),
    Mutant(
        "availability/private_values.py",
        "        if len(set(those)) > 1\n        or len(those)",
        "        if len(those)",
        "tests/availability tests/managers/test_elastic_values.py",
    ),
    Mutant(
        "availability/private_values.py",
        "if digests.setdefault(key, digest) != digest:",
        "if False:",
        "tests/availability tests/managers/test_elastic_values.py",
    ),
    # Nothing waits for ever.
    Mutant(
        "replication/host_transport.py",
        "receiver.over.wait(None, self._cut)",
        "receiver.over.wait()",
        "tests/replication/test_transport.py",
    ),
    Mutant(
        "threads.py",
        "self._started = _Started()",
        "self._started = Latch()",
        "tests/test_threads.py",
    ),
]


def _is_noticed(mutant: Mutant, tree: Path) -> bool:
    module = tree / "localckpt" / mutant.module
    text = module.read_text()
    module.write_text(text.replace(mutant.line, mutant.broken))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            timeout=900,
            check=False,
        )
    finally:
        module.write_text(text)
    return ended.returncode == 1


def main() -> int:
    """Try all mutants, or those of some numbers; the exit status says whether all were noticed."""
    chosen = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        leave_out = shutil.ignore_patterns(".venv*", ".git", "build", "__pycache__")
        shutil.copytree(_ROOT, tree, ignore=leave_out)
        for number in chosen:
            began, mutant = time.monotonic(), MUTANTS[number]
            is_noticed = _is_noticed(mutant, tree)
            survivors += not is_noticed
            took_s, told = time.monotonic() - began, ("SURVIVES", "noticed")[is_noticed]
            line = " ".join(mutant.line.split())
            print(f"{number:3} {told:8} {took_s:4.0f} s  {mutant.module}: {line:.90}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
