"""Files that somebody made up to run code, or to take memory or time.

Each is read in a process of its own, which has little memory and little time. What comes of it is
the older checkpoint, the made-up one where there is nothing wrong with it, or an error of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localckpt import CheckpointingException
from localckpt.errors import CorruptShardError
from localckpt.state_dict.image import ImagePlanner
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import find_targets
from tests.faults.forged import ODD_ROWS, claiming, small_state
from tests.faults.images import Parts
from tests.faults.small_store import NEWEST, Growth, escapes, go_on, limit_memory, load, write_store
from tests.managers.jobs import make_manager
from tests.ranks import run_ranks
from tests.state_dict.states import source_of, written

Dirs = Callable[[int], list[Path]]

# What reading a small file may take beyond the file itself.
_ALLOWED_NBYTES = 64 << 20
_READ_S = 10.0


@pytest.fixture
def store(node_dirs: Dirs) -> tuple[Path, Path, bytes]:
    """The store, the file of its newer checkpoint, and what is in it."""
    root = node_dirs(1)[0]
    return root, *write_store(root)


def _read_alone(rank: int, world_size: int, root: Path) -> tuple[str, int]:
    limit_memory()
    growth = Growth()
    outcome = load(root)
    return outcome, growth()


def _read_in_time(root: Path) -> str:
    """What a job gets from a store that holds a small file somebody made up."""
    ((outcome, grown),) = run_ranks(_read_alone, 1, root, init_group=False, timeout_s=_READ_S)
    assert grown < _ALLOWED_NBYTES, f"{outcome}, and {grown >> 20} MiB were taken"
    return str(outcome)


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("indices", [[0, 1, 3], [0, 1, 1 << 40], [0, 1, -1]], ids=str)
def test_a_sparse_tensor_that_points_outside_of_itself_is_not_loaded(
    indices: list[int], store: tuple[Path, Path, bytes]
) -> None:
    root, path, _ = store
    with make_manager("disk", root, "job", keep_last=2) as manager:
        manager.save({"sparse": torch.eye(3).to_sparse()}, NEWEST + 1)
    path.unlink()
    path = max(root.rglob("*.safetensors"))
    parts = Parts.of(path.read_bytes())
    # Where it is not zero: rows, then columns.
    name = next(n for n, slot in parts.slots.items() if slot[0] == "I64")
    data = torch.tensor([indices, [0, 1, 2]]).numpy().tobytes()
    slots = parts.slots | {name: ("I64", [2, 3], data)}
    path.write_bytes(parts.replace(slots=slots).image())

    assert _read_in_time(root) != "the forged one"


@pytest.mark.fault("hostile-file")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_a_row_of_the_table_that_makes_no_sense_is_an_error_of_ours(
    tmp_path: Path, store: tuple[Path, Path, bytes], record_property: Any
) -> None:
    _, _, image = store
    parts = Parts.of(image)
    escaped = {}
    for what, changes in ODD_ROWS.items():
        row = [changes.get(column, value) for column, value in enumerate(parts.rows[0])]
        forged = parts.with_rows([row, *parts.rows[1:]]).image()

        if errors := escapes(forged, tmp_path / "forged"):
            escaped[what] = errors[0]

    record_property("cases", len(ODD_ROWS))
    assert escaped == {}


@pytest.mark.fault("hostile-file")
def test_a_table_nested_deeply_is_an_error_of_ours(
    tmp_path: Path, store: tuple[Path, Path, bytes]
) -> None:
    forged = Parts.of(store[2]).replace(table=b"[" * 100_000).image()

    assert escapes(forged, tmp_path / "forged") == []


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("described", [{"a": torch.ones(1000)}, {"b": torch.ones(10)}])
def test_a_header_and_a_skeleton_that_contradict_each_other_write_to_no_tensor(
    described: dict[str, torch.Tensor],
) -> None:
    claimed = ImagePlanner().capture({"a": torch.ones(10)})
    capture = ImagePlanner().capture(described)
    image = written(dataclasses.replace(capture, skeleton=claimed.skeleton))
    memory = torch.zeros(1000)

    with pytest.raises(CorruptShardError, match="of tensor 'a', the header"):
        ImageReader(source_of(image), SafeGlobals()).restore(find_targets({"a": memory[:10]}))

    assert not memory.any()


# What a header may claim.


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "claims",
    [
        *({"world_size": str(count)} for count in (2, 3_000_000, 10**18)),
        # What is no text keeps no other checkpoint from being found.
        {"session": "\ud800"},
    ],
    ids=ascii,
)
def test_what_a_header_claims_costs_no_memory_and_hides_no_other_checkpoint(
    claims: dict[str, str], store: tuple[Path, Path, bytes]
) -> None:
    root, path, image = store
    path.write_bytes(claiming(image, **claims))

    assert _read_in_time(root) == "the older one"


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("key", ["epoch", "sequence", "iteration"])
def test_what_follows_the_highest_number_that_can_be_read_is_found_or_not_saved(
    key: str, store: tuple[Path, Path, bytes]
) -> None:
    root, path, image = store
    path.write_bytes(claiming(image, **{key: "9" * 19}))

    go_on(root)


@pytest.mark.fault("hostile-file")
def test_an_iteration_that_could_not_be_read_again_is_not_saved(
    store: tuple[Path, Path, bytes],
) -> None:
    root, _, _ = store
    for digits in (18, 19, 20):
        with make_manager("disk", root, "job", keep_last=2) as manager:
            manager.find_latest()
            try:
                manager.save(small_state(9), 10**digits)
            except CheckpointingException:
                continue
        with make_manager("disk", root, "job", keep_last=2) as manager:
            assert manager.find_latest() == 10**digits


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("text", ["9" * 19, "9" * 5000, "-1"], ids=len)
def test_a_garbled_number_of_attempts_does_not_make_later_saves_unreadable(
    text: str, store: tuple[Path, Path, bytes]
) -> None:
    root, path, _ = store
    (path.parent / ".notes").write_text(f'{{"epoch": {text}}}')

    go_on(root)
