"""What one rank has written is there bit for bit, for torch and for us, or not at all."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from localckpt import CheckpointingException, SaveFailedError, StorageError
from localckpt.global_tier.storage_reader import CachedMetadataFileSystemReader
from localckpt.global_tier.storage_writer import (
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from tests.global_tier.models import manager_on
from tests.global_tier.states import (
    blank,
    data_files,
    load_with_ours,
    load_with_torch,
    save,
    state_of,
    write,
)
from tests.state_dict.states import assert_same

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


def test_a_state_comes_back_bit_for_bit_in_torch_and_here(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    state, kinds = state_of(3), [{"sync_files": False}, {"staging_threads": 1}]
    for threads, options in zip((1, 7), kinds, strict=True):
        path = tmp_path / str(threads)

        save(make_writer(path, thread_count=threads, **options), state)

        assert_same(load_with_torch(path, state), state)
        assert_same(load_with_ours(path, state), state)
        assert {*path.iterdir()} == {path / ".metadata", *data_files(path)}


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


def test_a_tensor_that_has_no_form_in_a_file_is_refused(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    parts, is_nested = [torch.ones(2, 3), torch.ones(1, 3)], r"is a nested tensor.*unbind\(\)"
    for tensor, told in (
        (torch.nested.nested_tensor(parts), is_nested),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), is_nested),
        (torch.eye(3).to_sparse(), "is a torch.sparse_coo tensor"),
    ):
        with pytest.raises(CheckpointingException, match=rf"inner\.x {told}"):
            save(make_writer(tmp_path), {"inner": {"x": tensor}, "dense": torch.ones(2)})

    assert not (tmp_path / ".metadata").exists()


def test_options_that_cannot_be_and_an_outcome_that_is_missing_are_errors(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    for options in ({"single_file_per_rank": False}, {"thread_count": 0}):
        with pytest.raises(CheckpointingException, match=next(iter(options))):
            FileSystemWriterAsync(tmp_path, **options)
    planned = save_state_dict_async_plan({"w": torch.ones(3)}, make_writer(tmp_path))
    with pytest.raises(SaveFailedError, match="nobody has written this rank's part"):
        save_state_dict_async_finalize(*planned)

    assert not (tmp_path / ".metadata").exists()


def test_a_checkpoint_is_replaced_only_if_asked_and_can_be_loaded_until_the_new_one_is_complete(
    tmp_path: Path, make_writer: MakeWriter
) -> None:
    old, new = state_of(1), state_of(2)
    save(make_writer(tmp_path), old)
    before, files = {p: p.read_bytes() for p in tmp_path.iterdir()}, data_files(tmp_path)
    with pytest.raises(StorageError, match=r"holds a checkpoint.*overwrite=True"):
        save(make_writer(tmp_path), new)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
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


class OwnTensor(torch.Tensor):
    """A tensor of a class of the user's."""


class Fails:
    """Allowed, and cannot be rebuilt."""

    def __setstate__(self, state: object) -> None:
        raise KeyError("a field that was renamed")

    def __getstate__(self) -> dict[str, int]:
        return {"old": 1}


_OF_OWN_CLASS = torch.ones(3).as_subclass(OwnTensor)


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(lambda: collections.deque([1, 2]), "deque", id="deque"),
        pytest.param(lambda: 1 << 3000, "more than 255 bytes", id="integer"),
        pytest.param(lambda: (1, 1 << 3000), "more than 255 bytes", id="integer in a tuple"),
        pytest.param(Fails, "a field that was renamed", id="object that cannot be rebuilt"),
        pytest.param(_quantized, "dequantize", id="quantized tensor"),
        pytest.param(lambda: _OF_OWN_CLASS, "OwnTensor", id="tensor of a class"),
    ],
)
def test_what_load_would_refuse_is_refused_when_it_is_saved(
    make: Callable[[], object], told: str, tmp_path: Path
) -> None:
    allowed = [collections.deque, Fails]
    with manager_on(tmp_path, safe_globals=allowed) as manager:
        manager.save({"w": torch.ones(2)}, 1, is_async=False)

        with pytest.raises(CheckpointingException, match=told):
            manager.save({"w": torch.ones(2), "it": make()}, 2, is_async=False)

        assert manager.find_latest() == 1
        manager.save({"w": torch.ones(2)}, 2, is_async=False)
        assert manager.find_latest() == 2


def test_values_under_keys_that_are_no_text_come_back_under_them(tmp_path: Path) -> None:
    def state() -> dict[Any, Any]:
        return {
            "steps": {5: 1.5, 0: "first", -3: None, True: 7, 2.5: [1], (1, 2): (3, 4)},
            "state": {12: {"step": 3, "moment": torch.arange(4.0)}, 7: {"step": 4}},
            "list": [{3: {4: "deep"}}, torch.ones(1)],
            9: "at the top",
        }

    with manager_on(tmp_path) as manager:
        manager.save(state(), 1, is_async=False)
        found = blank(state())
        manager.load(into=found)

    assert_same(found, state())


def test_a_tensor_of_an_allowed_class_comes_back_and_the_program_has_allowed_no_more_by_that(
    tmp_path: Path,
) -> None:
    with torch.serialization.safe_globals([Path, collections.deque]):
        before = set(torch.serialization.get_safe_globals())
        with manager_on(tmp_path, safe_globals=[collections.deque, OwnTensor]) as manager:
            manager.save({"it": _OF_OWN_CLASS, "pair": (1, 2)}, 1, is_async=False)
            state = {"it": torch.zeros(3).as_subclass(OwnTensor), "pair": None}
            manager.load(into=state)

        assert torch.equal(state["it"].as_subclass(torch.Tensor), torch.ones(3))
        assert state["pair"] == (1, 2)
        assert set(torch.serialization.get_safe_globals()) == before
