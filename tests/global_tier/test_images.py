"""Images on shared storage are, byte for byte, those that the nodes had."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from localckpt import CorruptShardError, MismatchError, replicated
from localckpt.global_tier.data_files import gathered, read_trailer, write_data_file
from localckpt.global_tier.folders import RECORD_NAME, CommitRecord
from localckpt.global_tier.images import envelope_name
from localckpt.global_tier.places import FilePlace
from localckpt.memory.digests import BLOCK_NBYTES
from localckpt.state_dict.source import ImageBytes
from localckpt.storage.buffers import PrivateBuffer
from localckpt.storage.files import FileSource
from tests.global_tier.models import MAX_S, checkpoints_in, fsdp_model, manager_on, states_of, step
from tests.global_tier.states import state_of as state_of_all_kinds
from tests.managers.jobs import damage, make_manager
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _drained(rank: int, root: Path, state: Any) -> bytes:
    """Drain a state, and compare each rank's image on both tiers; return this rank's."""
    with (
        make_manager("disk", root / "node", timeout=MAX_S) as nodes,
        manager_on(root / "shared", local=nodes) as shared,
    ):
        nodes.save(state, 3)
        request = nodes.promote(3, to=shared)
        request.execute_sync()
        with shared.images(3) as (images, first):
            own = first.checkpoint.shard(rank, first.session_id)
            with closing(nodes.store.open(own)) as kept, closing(images.open(own)) as source:
                assert source.nbytes == kept.nbytes
                whole = bytes(kept.read(0, kept.nbytes))
                assert bytes(source.read(0, source.nbytes)) == whole
                ImageBytes(source, own).verify()
                chance = random.Random(1)
                for _ in range(30):
                    start = chance.randrange(len(whole))
                    stop = chance.randrange(start, len(whole) + 1)
                    assert bytes(source.read(start, stop)) == whole[start:stop]
    return whole


def _envelope(root: Path) -> Path:
    (found,) = checkpoints_in(root / "shared")
    return root / "shared" / found / envelope_name(0)


def _drain_sharded(rank: int, world_size: int, root: Path) -> None:
    model, optimizer = fsdp_model(init_device_mesh("cpu", (world_size,)), 1)
    step(model, optimizer)
    equal = replicated(torch.arange(100_000.0).view(1000, 100))
    state = {**states_of(model, optimizer), "equal": equal, "own": torch.full((7,), rank)}
    state["all kinds"] = state_of_all_kinds(3)
    state["tied"] = state["columns"] = torch.arange(40_000.0).view(200, 200).t()
    state["part"] = torch.arange(30_000.0)[10:20_000:3]
    image = _drained(rank, root, state)
    dist.barrier()
    # Tensors are in the data files alone.
    assert rank or _envelope(root).stat().st_size < len(image)


def test_images_of_all_kinds_of_values_and_of_divided_tensors_are_the_same_on_both_tiers(
    tmp_path: Path,
) -> None:
    run_ranks(_drain_sharded, 3, tmp_path)


def _read(root: Path) -> None:
    with (
        manager_on(root / "shared") as shared,
        shared.images(3) as (images, first),
        closing(images.open(first)) as source,
    ):
        ImageBytes(source, first).verify()


def test_a_damaged_image_is_found_and_what_was_not_drained_has_none(tmp_path: Path) -> None:
    _drained(0, tmp_path, {"weight": torch.arange(1_000_000.0)})
    path = _envelope(tmp_path)
    (data,) = path.parent.glob("*.distcp")
    for harm in (lambda: damage(data), lambda: damage(path), path.unlink):
        before = {file: file.read_bytes() for file in (path, data)}
        harm()
        with pytest.raises(CorruptShardError):
            _read(tmp_path)
        for file, content in before.items():
            file.write_bytes(content)
    _read(tmp_path)
    with manager_on(tmp_path / "shared") as shared:
        shared.save({"weight": torch.zeros(1)}, 3)
    with pytest.raises(MismatchError, match="was not saved by a Checkpointer"):
        _read(tmp_path)


def _forged(chance: random.Random, text: bytes) -> bytes:
    """Change the text of an envelope at random, as valid JSON or not."""
    if chance.random() < 0.3:
        at = chance.randrange(len(text))
        return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
    about = json.loads(text)
    values = [0, -1, 1 << 62, 1.5, None, "../x", [], {}, "weight", True, [[[[]]]]]
    row = chance.choice([about, *about[1]])
    row[chance.randrange(len(row))] = chance.choice(values)
    return json.dumps(about).encode()


def test_a_forged_envelope_is_an_error_or_does_no_harm(tmp_path: Path) -> None:
    _drained(0, tmp_path, {"weight": torch.arange(1000.0), "bias": torch.arange(10)})
    path = _envelope(tmp_path)
    with closing(FileSource(path)) as file:
        trailer = read_trailer(file, path.name)
    assert trailer is not None
    content = path.read_bytes()[: trailer.covered_nbytes]
    length = int.from_bytes(content[:8], "little")
    text, rest = content[8 : 8 + length], content[8 + length :]
    chance, found = random.Random(1), 0

    for _ in range(150):
        forged = _forged(chance, text)
        whole = len(forged).to_bytes(8, "little") + forged + rest
        with closing(PrivateBuffer(BLOCK_NBYTES)) as buffer:
            memory = buffer.view[:BLOCK_NBYTES]
            write_data_file(FilePlace(path), trailer.save_id, lambda: gathered([whole], memory))  # noqa: B023
        # The record tells the size that the file has now.
        record = CommitRecord.read(FilePlace(path.parent, RECORD_NAME))
        assert record is not None
        record = replace(record, files={**record.files, path.name: path.stat().st_size})
        (path.parent / RECORD_NAME).write_bytes(record.to_bytes())
        try:
            _read(tmp_path)
        except CorruptShardError:
            found += 1

    assert found > 100
