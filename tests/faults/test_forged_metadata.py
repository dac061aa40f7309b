"""Metadata on shared storage that somebody made up: refused, or harmless.

Each is put into a whole checkpoint, whose commit record is right for it, and loaded as a job loads
it. That must not end the process, take memory, reach out of the directory or change the process.
"""

from __future__ import annotations

import copyreg
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint import filesystem, metadata, planner

from localckpt import CheckpointingException
from localckpt.global_tier.folders import RECORD_NAME, CommitRecord
from tests.faults.forged_metadata import METADATA_BOMBS, forged, instructions
from tests.faults.small_store import Growth, limit_memory
from tests.global_tier.models import manager_on
from tests.global_tier.states import assert_same, blank, tensor_of
from tests.ranks import RanksFailedError, run_ranks

_ALLOWED_NBYTES = 64 << 20


def _state() -> dict[str, Any]:
    return {
        "w": tensor_of(torch.float32, (30, 20), 1),
        "views": {"columns": tensor_of(torch.int16, (8, 9), 2).t(), "none": torch.empty(0)},
        "big": tensor_of(torch.float64, (40_000,), 3),
        "notes": {"text": "as it was", "numbers": [1, 2.5, None]},
    }


def _save(root: Path) -> Path:
    with manager_on(root) as manager:
        manager.save(_state(), 1, is_async=False)
    (folder,) = root.glob("iteration_*")
    return folder


def _put(folder: Path, told: bytes) -> None:
    """Replace the metadata, and let the record speak of it."""
    (folder / ".metadata").write_bytes(told)
    record = CommitRecord.read(folder)
    assert record is not None
    digest = xxhash.xxh3_64_intdigest(told)
    record = dataclasses.replace(record, metadata_digest=digest)
    (folder / RECORD_NAME).write_bytes(record.to_bytes())


def _process() -> dict[str, Any]:
    """What a pickle could change of a process that reads it."""
    modules = (metadata, filesystem, planner)
    kinds = [value for module in modules for value in vars(module).values()]
    classes = {
        f"{kind.__module__}.{kind.__qualname__}": dict(vars(kind))
        for kind in (*kinds, torch.Size, Path, dict)
        if isinstance(kind, type)
    }
    members = {member.name: dict(vars(member)) for member in metadata._MEM_FORMAT_ENCODING}
    tables = [dict(getattr(copyreg, name)) for name in ("dispatch_table", "_extension_registry")]
    return classes | members | {"tables": tables}


def _load(folder: Path, root: Path) -> str:
    state = blank(_state())
    with manager_on(root) as manager:
        try:
            manager.load(into=state, iteration=1)
        except CheckpointingException as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


def _load_each(rank: int, world_size: int, root: Path, seeds: range) -> dict[str, int]:
    folder = _save(root)
    whole = (folder / ".metadata").read_bytes()
    parts = instructions(whole)
    assert pickle.loads(b"\x80\x04" + b"".join(parts) + b".") == pickle.loads(whole)
    _put(folder, whole)
    assert _load(folder, root) == "loaded"
    before = _process()
    outcomes: dict[str, int] = {}
    limit_memory()
    for seed in seeds:
        what, told = forged(parts, seed)
        # A case that ends the process is found here.
        (root / "last").write_text(f"seed {seed}: {what}", errors="backslashreplace")
        _put(folder, told)
        growth = Growth()
        outcome = _load(folder, root).partition(":")[0]
        assert growth() < _ALLOWED_NBYTES + len(told), what
        assert _process() == before, what
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


@pytest.mark.fault("hostile-file")
@pytest.mark.timeout(1800)
def test_metadata_that_is_forged_at_random_is_an_error_or_does_no_harm(
    tmp_path: Path, long_form: bool, record_property: Callable[[str, object], None]
) -> None:
    seeds = range(10_000 if long_form else 200)

    try:
        (outcomes,) = run_ranks(_load_each, 1, tmp_path, seeds, init_group=False, timeout_s=1700.0)
    except RanksFailedError as error:
        pytest.fail(f"{error}\nthe last case: {(tmp_path / 'last').read_text()}")

    record_property("cases", len(seeds))
    # Most are refused for what they are, and some say what was said before.
    assert set(outcomes) <= {
        *("loaded", "CorruptShardError", "UnsafeGlobalError", "MismatchError"),
        *("StorageError", "CheckpointingException"),
    }
    assert outcomes["CorruptShardError"] > len(seeds) / 4
    assert outcomes["UnsafeGlobalError"] > 0
    assert outcomes["loaded"] > 0


def _load_the_bombs(rank: int, world_size: int, root: Path) -> dict[str, str]:
    folder = _save(root)
    whole = (folder / ".metadata").read_bytes()
    limit_memory()
    before = _process()
    told = {}
    for what, bomb in METADATA_BOMBS.items():
        (root / "last").write_text(what)
        # In planner_data, which nobody looks at.
        parts = instructions(whole)
        place = next(i for i, part in enumerate(parts) if b"planner_data" in part)
        parts[place + 2 : place + 2] = [bomb, b"0"] if bomb[-1:] != b"0" else [bomb]
        _put(folder, b"\x80\x04" + b"".join(parts) + b".")
        growth = Growth()
        told[what] = _load(folder, root)
        assert growth() < _ALLOWED_NBYTES, what
        assert _process() == before, what
    _put(folder, whole)
    assert _load(folder, root) == "loaded"
    return told


@pytest.mark.fault("hostile-file")
def test_metadata_that_is_a_bomb_is_refused(tmp_path: Path) -> None:
    try:
        (told,) = run_ranks(_load_the_bombs, 1, tmp_path, init_group=False)
    except RanksFailedError as error:
        pytest.fail(f"{error}\nthe last case: {(tmp_path / 'last').read_text()}")

    for what, outcome in told.items():
        assert outcome.startswith(("CorruptShardError", "UnsafeGlobalError")), (what, outcome)


def _rewritten(
    change: Callable[[metadata.Metadata], None], folder: Path, protocol: int = 4
) -> None:
    described = pickle.loads((folder / ".metadata").read_bytes())
    change(described)
    _put(folder, pickle.dumps(described, protocol))


def _leads_out(described: metadata.Metadata) -> None:
    for info in described.storage_data.values():
        info.relative_path = f"../{info.relative_path}"


def _absolute(described: metadata.Metadata) -> None:
    for info in described.storage_data.values():
        info.relative_path = "/etc/passwd"


def _is_15_gb(described: metadata.Metadata) -> None:
    for info in described.storage_data.values():
        info.length = 15_000_000_000


def _in_the_trailer(described: metadata.Metadata) -> None:
    for info in described.storage_data.values():
        info.offset += 300_000


def _without_places(described: metadata.Metadata) -> None:
    described.storage_data.clear()


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "change", [_leads_out, _absolute, _is_15_gb, _in_the_trailer, _without_places]
)
def test_metadata_that_points_where_nothing_lies_is_refused_before_memory_is_made(
    change: Callable[[metadata.Metadata], None], tmp_path: Path
) -> None:
    folder = _save(tmp_path)
    _rewritten(change, folder)
    growth = Growth()

    outcome = _load(folder, tmp_path)

    assert outcome.startswith("CorruptShardError"), outcome
    assert growth() < _ALLOWED_NBYTES


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_with_more_than_torch_puts_there_is_read(protocol: int, tmp_path: Path) -> None:
    def add(described: metadata.Metadata) -> None:
        more = [{4}, frozenset((5,))] if protocol > 3 else None
        described.planner_data = {"a": ("b", 1), ("c", 2): {3: [None, 2.5, 10**30, more]}}
        described.mcore_data = {"w": {"shape": (3, 4)}}  # type: ignore[attr-defined]
        for info in described.storage_data.values():
            # As a later release of torch may.
            info.checksum = "none"

    folder = _save(tmp_path)
    _rewritten(add, folder, protocol)
    state = blank(_state())

    with manager_on(tmp_path) as manager:
        assert manager.load(into=state)[1].iteration == 1

    assert_same(state, _state())
