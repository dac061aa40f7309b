"""Headers, tables and skeletons of shards, and metadata of shared checkpoints, all made up.

It is an error of ours, or a state that can be used; nothing else of the process is changed, and it
takes little memory and time.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copyreg
import dataclasses
import datetime
import decimal
import hashlib
import json
import pickle
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from torch.distributed.checkpoint import filesystem, metadata, planner

from localckpt.errors import CheckpointingException
from localckpt.global_tier.folders import RECORD_NAME, CommitRecord
from localckpt.global_tier.places import FilePlace
from localckpt.state_dict.header import Skeleton
from localckpt.state_dict.image import ImagePlanner
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import take_tensors
from localckpt.state_dict.source import read_header, read_verified_record
from localckpt.state_dict.targets import find_targets
from tests.faults.forged_pickles import ALLOWED_NAMES, BOMBS, forged, instructions, whole
from tests.faults.images import Parts, identity_in, sealed
from tests.faults.small_store import NEWEST, OLDER, Growth, limit_memory, small_state, write_store
from tests.global_tier.models import manager_on
from tests.global_tier.states import blank, tensor_of
from tests.managers.jobs import make_manager
from tests.ranks import RanksFailedError, run_ranks
from tests.state_dict.states import Point, source_of, written
from tests.state_dict.states import assert_same as assert_same_state

pytestmark = pytest.mark.fault("hostile-file")

# What reading a small file may take beyond the file itself.
_ALLOWED_NBYTES = 64 << 20
_READ_S = 10.0
# Errors of a program that uses what makes no sense, such as an object without its attributes.
_OF_ODD_VALUES = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)


class _Skeletons:
    """Reads skeletons of an image of two tensors, as new and into tensors that are given."""

    def __init__(self, base: Path) -> None:
        self._capture = ImagePlanner().capture(
            [torch.arange(6.0), torch.ones(3, dtype=torch.int64)]
        )
        self._true = Skeleton.split(self._capture.skeleton)
        for state in _true_states():
            _use(state)

    def bases(self) -> list[list[bytes]]:
        return [instructions(take_tensors(state).skeleton) for state in _true_states()]

    def with_bomb(self, bomb: bytes) -> bytes:
        return whole([bomb])

    def read(self, pickled: bytes) -> str:
        skeleton = self._true._replace(pickle=pickled).join()
        capture = dataclasses.replace(self._capture, skeleton=skeleton)
        source = source_of(written(capture))
        given = [torch.zeros(6), torch.zeros(3, dtype=torch.int64)]
        outcome = "loaded"
        for into in (None, find_targets(given)):
            try:
                state = ImageReader(source, SafeGlobals()).restore(into)
            except CheckpointingException as error:
                outcome = type(error).__name__
                continue
            # Odd values may be of no use.
            with contextlib.suppress(*_OF_ODD_VALUES):
                _use(state)
        # Whatever was read, tensors that were given hold what they had, or what was saved.
        assert given[0].tolist() in ([0.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        assert given[1].tolist() in ([0] * 3, [1] * 3)
        return outcome


def _true_states() -> list[Any]:
    marked = torch.nn.Parameter(torch.arange(4.0))
    marked.partition_dim = 1  # type: ignore[attr-defined]
    generator = numpy.random.Generator(numpy.random.MT19937(3))
    containers = [collections.OrderedDict(a=1), collections.defaultdict(list, b=[1])]
    plain = [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), decimal.Decimal("1.5")]
    return [
        [numpy.arange(6, dtype=">i4").reshape(2, 3), numpy.arange(600.0), numpy.float32(2)],
        [numpy.array(["ab"]), numpy.zeros(3, "V5"), numpy.zeros(2, ">c8")],
        [numpy.zeros(2, "M8[25s]"), numpy.dtype("<i2"), numpy.float64],
        [generator, numpy.random.RandomState(4), numpy.random.PCG64(1)],
        [numpy.random.Philox(2), numpy.random.SFC64(5), numpy.random.SeedSequence(3)],
        [marked, torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.Generator()],
        [torch.eye(4).to_sparse_csc(), torch.Size([1]), Point(1, 2)],
        [*containers, collections.deque([1], maxlen=4), collections.Counter("aab")],
        [*plain, uuid.UUID(int=5), Path("/a/b"), types.SimpleNamespace(a=1), {1, 2}, slice(1, 2)],
        [argparse.Namespace(b=2), frozenset([3]), range(3), 1 + 2j, torch.float32, Ellipsis],
    ]


def _use(value: Any, depth: int = 0) -> None:
    """Look at what was loaded as a program would: what is forged is not to end it now."""
    if depth > 8:
        return
    if isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
        items = list(value.items()) if isinstance(value, dict) else list(value)
        for item in items[:50]:
            _use(item, depth + 1)
    elif isinstance(value, numpy.ndarray):
        value.tobytes()
        repr(value.ravel()[:5])
    elif isinstance(value, numpy.random.Generator):
        value.random(3)
    elif isinstance(value, numpy.random.RandomState):
        value.rand(3)
    elif isinstance(value, numpy.random.BitGenerator):
        value.random_raw(700)
    elif isinstance(value, torch.Tensor) and not value.is_meta:
        (value if value.layout is torch.strided else value.to_dense()).detach().sum()
    elif isinstance(value, torch.Generator):
        torch.rand(2, generator=value)
    else:
        repr(value)


class _Metadata:
    """Reads metadata of a whole checkpoint, whose commit record is right for it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        with manager_on(root) as manager:
            manager.save(_shared_state(), 1, is_async=False)
        (self._folder,) = root.glob("iteration_*")
        self.true = (self._folder / ".metadata").read_bytes()
        parts = instructions(self.true)
        assert pickle.loads(whole(parts)) == pickle.loads(self.true)
        assert self.read(self.true) == "loaded"

    def bases(self) -> list[list[bytes]]:
        return [instructions(self.true)]

    def with_bomb(self, bomb: bytes) -> bytes:
        """In planner_data, which nobody looks at."""
        parts = instructions(self.true)
        place = next(i for i, part in enumerate(parts) if b"planner_data" in part)
        return whole([*parts[: place + 2], bomb, b"0", *parts[place + 2 :]])

    def read(self, told: bytes) -> str:
        (self._folder / ".metadata").write_bytes(told)
        record = CommitRecord.read(FilePlace(self._folder, "localckpt.json"))
        assert record is not None
        digest = xxhash.xxh3_64_intdigest(told)
        record = dataclasses.replace(record, metadata_digest=digest)
        (self._folder / RECORD_NAME).write_bytes(record.to_bytes())
        self.state = blank(_shared_state())
        try:
            with manager_on(self._root) as manager:
                manager.load(into=self.state, iteration=1)
        except CheckpointingException as error:
            return type(error).__name__
        return "loaded"


def _shared_state() -> dict[str, Any]:
    return {
        "w": tensor_of(torch.float32, (30, 20), 1),
        "views": {"columns": tensor_of(torch.int16, (8, 9), 2).t(), "none": torch.empty(0)},
        "big": tensor_of(torch.float64, (40_000,), 3),
        "notes": {"text": "as it was", "numbers": [1, 2.5, None]},
    }


def _process() -> str:
    """Digest of what a pickle must not change: classes, constants and modules."""
    allowed = SafeGlobals()
    # Looked up as a load does, which imports what is allowed.
    kinds = [allowed.find(module, name) for module, name in ALLOWED_NAMES]
    told = [repr(sorted(vars(kind))) for kind in kinds if isinstance(kind, type)]
    dtypes = [numpy.dtype(code) for code in "?bBhHiIlLqQefdgFDGOSUVMm"]
    told += [repr((d, d.itemsize, d.fields, d.byteorder, d.flags)) for d in dtypes]
    told.append(repr([name for name in sys.modules if name.split(".")[0] in ("os", "subprocess")]))
    modules = (metadata, filesystem, planner)
    ours = [value for module in modules for value in vars(module).values()]
    told += [repr(vars(k)) for k in (*ours, torch.Size, Path, dict) if isinstance(k, type)]
    told += [repr(vars(member)) for member in metadata._MEM_FORMAT_ENCODING]
    told += [repr(getattr(copyreg, name)) for name in ("dispatch_table", "_extension_registry")]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


_READERS: dict[str, Callable[[Path], Any]] = {"skeleton": _Skeletons, "metadata": _Metadata}


def _read(rank: int, world_size: int, what: str, base: Path, seeds: range) -> dict[str, str]:
    """What comes of each bomb, and of pickles forged at random."""
    reader, outcomes = _READERS[what](base), {}
    bases = reader.bases()
    limit_memory()
    before = _process()
    for case in (*BOMBS, *seeds):
        is_bomb = isinstance(case, str)
        told = reader.with_bomb(BOMBS[case]) if is_bomb else forged(bases, case)
        # One that ends this process is found here.
        (base / "last").write_text(f"{case}: {told!r:.2000}")
        growth = Growth()
        outcomes[str(case)] = reader.read(told)
        assert growth() < _ALLOWED_NBYTES + len(told), case
        assert (not is_bomb and case % 25) or _process() == before, case
    assert _process() == before
    return outcomes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", _READERS)
def test_a_bomb_and_what_is_forged_at_random_is_an_error_of_ours_or_does_no_harm(
    what: str, tmp_path: Path, long_form: bool, record_property: Callable[[str, object], None]
) -> None:
    seeds = range(10_000 if long_form else 200)

    try:
        (told,) = run_ranks(_read, 1, what, tmp_path, seeds, init_group=False, timeout_s=1700.0)
    except RanksFailedError as error:
        pytest.fail(f"{error}\nthe last case: {(tmp_path / 'last').read_text()}")

    record_property("cases", len(told))
    of_bombs = {bomb: told.pop(bomb) for bomb in BOMBS}
    assert of_bombs["a command"] == of_bombs["an attribute"] == "UnsafeGlobalError"
    outcomes = collections.Counter(told.values())
    print(outcomes)
    # Else the forger only writes what is no pickle at all, or changes nothing.
    assert len(seeds) // 40 < outcomes["loaded"] < len(seeds)
    if what == "metadata":
        assert set(of_bombs.values()) == {"CorruptShardError", "UnsafeGlobalError"}, of_bombs
        assert outcomes["CorruptShardError"] > len(seeds) // 4
        assert outcomes["UnsafeGlobalError"] > 0


def test_metadata_that_points_where_nothing_lies_is_refused_before_memory_is_made(
    tmp_path: Path,
) -> None:
    reader = _Metadata(tmp_path)
    for change in (
        lambda info: {"relative_path": f"../{info.relative_path}"},
        lambda info: {"relative_path": "/etc/passwd"},
        lambda info: {"length": 15_000_000_000},
        # In the trailer of the file, and before its beginning.
        lambda info: {"offset": info.offset + 300_000},
        lambda info: {"offset": -8},
        None,
    ):
        described = pickle.loads(reader.true)
        if change is None:
            described.storage_data.clear()
        for info in described.storage_data.values():
            vars(info).update(change(info))  # type: ignore[misc]
        growth = Growth()

        outcome = reader.read(pickle.dumps(described, 4))

        assert outcome == "CorruptShardError"
        assert growth() < _ALLOWED_NBYTES


_ODD_ROWS: dict[str, Any] = {
    "slot in a list": {0: ["weight"]},
    "dtype a number": {1: 5},
    "dtype of a dunder": {1: "__name__"},
    "dtype that cannot be made": {1: "quint8"},
    "shape a number": {2: 5},
    "shape a text": {2: "20"},
    "shape beyond 64 bits": {2: [1 << 70]},
    "shape whose product overflows": {2: [1 << 40, 1 << 40], 6: [0, [0, 0]]},
    "shape of many dimensions": {2: [1] * 5000, 6: [0, [0] * 5000]},
    "empty, and beyond 64 bits": {2: [0, 1 << 70]},
    "device a number": {3: 5},
    "device a list": {3: []},
    "device that is none": {3: "nowhere"},
    "device with a huge number": {3: f"cuda:{1 << 70}"},
    "device null": {3: None},
    "kind a list": {4: []},
    "gradients for integers": {1: "int32", 5: 1},
    "view a number": {6: 5},
    "view with a huge offset": {6: [1 << 70, [30, 1]]},
    "view with huge strides": {2: [1, 1], 6: [0, [1 << 70, 1]]},
    "view of nothing with a huge offset": {2: [0], 6: [4 << 60, [1]]},
    "no data, beyond 64 bits": {0: None, 2: [1 << 70], 6: [0, [1]]},
    "no data, and no view": {0: None, 6: None},
}
"""What a row of a table of tensors says instead, by column."""


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_a_row_of_the_table_that_makes_no_sense_is_an_error_of_ours(
    tmp_path: Path, record_property: Any
) -> None:
    parts = Parts.of(write_store(tmp_path)[1])
    images = {"nested deeply": parts.replace(table=b"[" * 100_000).image()}
    for what, changes in _ODD_ROWS.items():
        row = [changes.get(column, value) for column, value in enumerate(parts.rows[0])]
        images[what] = parts.with_rows([row, *parts.rows[1:]]).image()

    escaped = {what: errors for what, image in images.items() if (errors := _escapes(image))}

    record_property("cases", len(images))
    assert escaped == {}


def _escapes(image: bytes) -> list[str]:
    """Errors that are none of ours, from all the ways of reading a file."""
    escaped = []
    for read in (
        read_header,
        read_verified_record,
        lambda source: ImageReader(source, SafeGlobals()).restore(None),
        lambda source: ImageReader(source, SafeGlobals()).restore(find_targets(small_state(0))),
    ):
        try:
            read(source_of(image))
        except CheckpointingException:
            pass
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            escaped.append(f"{type(error).__name__}: {error}")
    return escaped


def _claiming(image: bytes, **claims: str) -> bytes:
    """The image with other things said in its metadata, whether they make sense or not."""
    start = 8 + int.from_bytes(image[:8], "little")
    entries = json.loads(image[8:start])
    entries["__metadata__"] |= claims
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(len(text) + 8) // 4096) * 4096
    changed = (length - 8).to_bytes(8, "little") + text.ljust(length - 8) + image[start:]
    try:
        return sealed(changed, identity_in(changed))
    except Exception:  # noqa: BLE001 - then it is only a file that is refused
        return sealed(changed, identity_in(image))


def _load_alone(rank: int, world_size: int, root: Path) -> int:
    limit_memory()
    growth = Growth()
    with make_manager("disk", root, "job", keep_last=3) as manager:
        manager.find_latest()
        state, ckpt_id = manager.load()
    assert_same_state(state, small_state(OLDER))
    assert growth() < _ALLOWED_NBYTES, growth() >> 20
    return int(ckpt_id.iteration)


def test_what_a_header_claims_costs_no_memory_and_hides_no_other_checkpoint(tmp_path: Path) -> None:
    path, image = write_store(tmp_path)
    # What is no text keeps no other checkpoint from being found, either.
    claims = [*({"world_size": f"{n}"} for n in (2, 3_000_000, 10**18)), {"session": "\ud800"}]
    for claim in claims:
        path.write_bytes(_claiming(image, **claim))

        found = run_ranks(_load_alone, 1, tmp_path, init_group=False, timeout_s=_READ_S)

        assert found == [OLDER], claim


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *((key, "9" * 19) for key in ("epoch", "sequence", "iteration")),
        *((".notes", text) for text in ("9" * 19, "9" * 5000, "-1")),
    ],
    ids=lambda given: given[:9],
)
def test_what_follows_the_highest_number_that_can_be_read_is_found_or_not_saved(
    key: str, text: str, tmp_path: Path
) -> None:
    path, image = write_store(tmp_path)
    if key == ".notes":
        (path.parent / key).write_text(f'{{"epoch": {text}}}')
    else:
        path.write_bytes(_claiming(image, **{key: text}))

    with make_manager("disk", tmp_path, "job", keep_last=2) as manager:
        iteration = NEWEST + 1
        try:
            if manager.find_latest() != -1:
                iteration = max(iteration, manager.load()[1].iteration + 1)
            manager.save(small_state(9), iteration)
        except CheckpointingException:
            return
    with make_manager("disk", tmp_path, "job", keep_last=2) as manager:
        assert manager.find_latest() == iteration
        assert_same_state(manager.load()[0], small_state(9))
