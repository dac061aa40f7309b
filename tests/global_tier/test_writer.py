"""What one rank has written is there bit for bit, for torch and for us, or not at all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from localckpt import (
    CheckpointingException,
    SaveFailedError,
    StorageError,
    UnsafeGlobalError,
)
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.global_tier.storage_writer import (
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from tests.global_tier.states import (
    Settings,
    Zipped,
    assert_same,
    blank,
    data_files,
    load_with_ours,
    load_with_torch,
    registry,
    save,
    state_of,
    tensor_of,
    write,
)

MakeWriter = Callable[..., FileSystemWriterAsync]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def make_writer() -> Iterator[MakeWriter]:
    made: list[FileSystemWriterAsync] = []

    def make(path: Path, **options: Any) -> FileSystemWriterAsync:
        made.append(FileSystemWriterAsync(path, **options))
        return made[-1]

    yield make

    for writer in made:
        writer.close()


def everything_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize(
    "options",
    [{"thread_count": 1, "sync_files": False}, {"thread_count": 7, "staging_threads": 1}],
    ids=str,
)
def test_a_state_comes_back_bit_for_bit_in_torch_and_here(
    tmp_path: Path, make_writer: MakeWriter, options: dict[str, Any]
) -> None:
    path, state = tmp_path / "checkpoint", state_of(3)

    save(make_writer(path, **options), state)

    assert_same(load_with_torch(path, state), state)
    assert_same(load_with_ours(path, state), state)
    names = {file.name for file in path.iterdir()}
    assert names == {".metadata", *(file.name for file in data_files(path))}


def test_values_go_into_tensors_of_any_strides_and_another_dtype(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    values = torch.arange(24.0).view(4, 6)
    save(make_writer(tmp_path), dict.fromkeys(("strided", "converted", "grown"), values))
    state = {
        "strided": torch.zeros(6, 4).t(),
        "converted": torch.zeros(4, 6, dtype=torch.float64),
        "grown": torch.zeros(8, 12)[::2, ::2],
    }
    reader = CachedMetadataFileSystemReader(tmp_path)

    dcp.load(dict(state), storage_reader=reader)

    assert_same(state["strided"].contiguous(), values)
    assert_same(state["converted"], values.double())
    assert_same(state["grown"].contiguous(), values)
    assert reader.nbytes_read > 3 * 24 * 4


def test_all_that_differs_from_a_checkpoint_of_torch_is_where_things_are(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    state = state_of(4)
    save(make_writer(tmp_path / "ours"), state)
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)

    ours, theirs = (
        pickle.loads((tmp_path / who / ".metadata").read_bytes()) for who in ("ours", "torch")
    )

    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    # torch 2.8 writes none.
    assert getattr(theirs, "version", ours.version) == ours.version
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for index, info in ours.storage_data.items():
        assert info.length == theirs.storage_data[index].length
        assert info.transform_descriptors is None


_NESTED = [torch.ones(2, 3), torch.ones(1, 3)]


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.nested.nested_tensor(_NESTED), r"is a nested tensor.*unbind\(\)"),
        (
            torch.nested.nested_tensor(_NESTED, layout=torch.jagged),
            r"is a nested tensor.*unbind\(\)",
        ),
        (torch.eye(3).to_sparse(), "is a torch.sparse_coo tensor"),
    ],
    ids=["nested", "jagged", "sparse"],
)
def test_a_tensor_that_has_no_form_in_a_file_is_refused(
    tensor: torch.Tensor, told: str, tmp_path: Path, make_writer: MakeWriter
) -> None:
    with pytest.raises(CheckpointingException, match=rf"inner\.x {told}"):
        save(make_writer(tmp_path), {"inner": {"x": tensor}, "dense": torch.ones(2)})

    assert not (tmp_path / ".metadata").exists()


def test_an_object_of_an_allowed_class_comes_back(tmp_path: Path, make_writer: MakeWriter) -> None:
    state = {"settings": Settings("adam", 0.5), "w": torch.ones(3)}

    save(make_writer(tmp_path, safe_globals=[Settings]), state)

    assert_same(load_with_ours(tmp_path, state, safe_globals=[Settings]), state)
    assert_same(load_with_torch(tmp_path, state), state)
    with pytest.raises(UnsafeGlobalError, match=r"settings refers to .*states\.Settings"):
        load_with_ours(tmp_path, state)


def test_objects_that_grow_and_shrink_push_nothing_out_of_its_place(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    writer = make_writer(tmp_path / "0", thread_count=1)
    texts = ["", "x" * 5_000_000, "y", "z" * 4097]

    for number, text in enumerate(texts):
        state = {"text": text, "w": tensor_of(torch.float32, (9000,), number), "more": number}
        writer.reset(tmp_path / str(number))
        save(writer, state)

        assert_same(load_with_ours(tmp_path / str(number), state), state)
        assert_same(load_with_torch(tmp_path / str(number), state), state)


def test_minus_zero_after_zero_and_one_after_true_are_not_taken_for_the_same(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    writer = make_writer(tmp_path / "0")

    for number, value in enumerate([0.0, -0.0, 0, False, True, 1, 1.0, "1", None, "None"]):
        writer.reset(tmp_path / str(number))
        save(writer, {"value": value})

        assert_same(load_with_ours(tmp_path / str(number), {"value": 0})["value"], value)


@pytest.mark.parametrize(
    "options",
    [{"single_file_per_rank": False}, {"thread_count": 0}],
    ids=str,
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointingException, match=next(iter(options))):
        FileSystemWriterAsync(tmp_path / "checkpoint", **options)

    assert not (tmp_path / "checkpoint").exists()


def test_a_rank_that_has_nothing_to_write_has_no_function(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    writer = make_writer(tmp_path)

    planned = save_state_dict_async_plan({}, writer)
    found = writer.get_save_function_and_args()
    save_state_dict_async_finalize(*planned)

    assert found == (None, None, [])
    assert everything_in(tmp_path).keys() == {".metadata"}
    assert load_with_torch(tmp_path, {}) == {}


def test_an_outcome_that_is_missing_is_an_error(tmp_path: Path, make_writer: MakeWriter) -> None:
    planned = save_state_dict_async_plan({"w": torch.ones(3)}, make_writer(tmp_path))

    with pytest.raises(SaveFailedError, match="nobody has written this rank's part"):
        save_state_dict_async_finalize(*planned)

    assert not (tmp_path / ".metadata").exists()


def test_what_is_a_file_where_a_directory_should_be_is_named(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    (tmp_path / "a file").write_bytes(b"")

    with pytest.raises(StorageError, match=r"a file.*not a directory"):
        save(make_writer(tmp_path / "a file" / "checkpoint"), {"w": torch.ones(3)})


def test_a_checkpoint_is_replaced_only_if_asked_and_can_be_loaded_until_the_new_one_is_complete(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    old, new = state_of(1), state_of(2)
    save(make_writer(tmp_path), old)
    before, files = everything_in(tmp_path), data_files(tmp_path)
    with pytest.raises(StorageError, match=r"holds a checkpoint.*overwrite=True"):
        save(make_writer(tmp_path), new)
    assert everything_in(tmp_path) == before
    writer = make_writer(tmp_path, overwrite=True)

    def require_old() -> None:
        assert_same(load_with_torch(tmp_path, old), old)
        assert_same(load_with_ours(tmp_path, old), old)

    planned = save_state_dict_async_plan(new, writer)
    require_old()
    write(writer)
    require_old()
    save_state_dict_async_finalize(*planned)

    assert_same(load_with_torch(tmp_path, new), new)
    assert_same(load_with_ours(tmp_path, new), new)
    assert set(files).isdisjoint(data_files(tmp_path))


def test_what_torch_wrote_through_an_extension_is_read_by_who_knows_it(tmp_path: Path) -> None:
    state = state_of(1)
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Zipped()]), no_dist=True
    )

    assert_same(load_with_ours(tmp_path, state, _extension_registry=registry()), state)
    with pytest.raises(Exception, match=r"tests\.zipped"):
        load_with_ours(tmp_path, state)


class _Doubling(DefaultSavePlanner):
    """A user's planner, which changes what is saved."""

    def transform_tensor(self, write_item: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
        return super().transform_object(write_item, object * 2)


def test_a_planner_of_the_user_decides_what_is_saved(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    writer, state = make_writer(tmp_path / "0"), {"w": torch.ones(3), "n": 4}

    for number in range(2):
        writer.reset(tmp_path / str(number))
        save(writer, {"w": torch.ones(3) + number, "n": 4 + number}, planner=_Doubling())

    for number in range(2):
        wanted = {"w": 2 * (torch.ones(3) + number), "n": 2 * (4 + number)}
        assert_same(load_with_ours(tmp_path / str(number), state), wanted)


def test_a_planner_that_keeps_plans_itself_is_refused_when_it_sends_none(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    writer, state = make_writer(tmp_path / "0"), {"w": torch.ones(3)}

    save(writer, state, planner=DefaultSavePlanner(enable_plan_caching=True))
    writer.reset(tmp_path / "1")
    with pytest.raises(CheckpointingException, match="enable_plan_caching=False"):
        save(writer, state, planner=DefaultSavePlanner(enable_plan_caching=True))

    writer.reset(tmp_path / "2")
    save(writer, state)
    assert_same(load_with_ours(tmp_path / "2", state), state)


def test_blanks_of_these_tests_hold_nothing_of_the_state() -> None:
    state = state_of(1)

    with pytest.raises(AssertionError):
        assert_same(blank(state), state)
    for part in ("dtypes", "views", "objects"):
        for value in state[part].values():
            with pytest.raises(AssertionError):
                assert_same(blank(value), value)
