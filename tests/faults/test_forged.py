"""Headers, tables and skeletons of shards, and metadata of shared checkpoints, all made up.

Each is read in a process of its own. It is an error of ours, or a state that can be used; nothing
else of the process is changed, and it takes little memory.
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
import pickle
import shutil
import sys
import types
import uuid
from collections.abc import Callable
from functools import partial
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
from localckpt.state_dict.targets import find_targets
from tests.faults.forged import forged_header, forged_table
from tests.faults.forged_pickles import ALLOWED_NAMES, BOMBS, Forger, instructions, whole
from tests.faults.images import identity_in
from tests.faults.small_store import OLDER, Growth, escapes, go_on, limit_memory, load, write_store
from tests.global_tier.models import manager_on
from tests.global_tier.states import assert_same, blank, tensor_of
from tests.ranks import RanksFailedError, run_ranks
from tests.state_dict.states import Point, source_of, written

_ALLOWED_NBYTES = 64 << 20
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
    elif isinstance(value, numpy.random.SeedSequence):
        value.generate_state(3)
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
        self.put(told)
        try:
            with manager_on(self._root) as manager:
                manager.load(into=blank(_shared_state()), iteration=1)
        except CheckpointingException as error:
            return type(error).__name__
        return "loaded"

    def put(self, told: bytes) -> None:
        (self._folder / ".metadata").write_bytes(told)
        record = CommitRecord.read(FilePlace(self._folder, "localckpt.json"))
        assert record is not None
        digest = xxhash.xxh3_64_intdigest(told)
        record = dataclasses.replace(record, metadata_digest=digest)
        (self._folder / RECORD_NAME).write_bytes(record.to_bytes())


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


class _Stores:
    """Reads images in the place of the newest of a store, in all ways, and as a job that starts."""

    def __init__(self, base: Path, forge: Callable[[bytes, int], bytes]) -> None:
        self._whole, self._root = base / "whole", base / "node"
        path, self._image = write_store(self._whole)
        self._path = self._root / path.relative_to(self._whole)
        self._forge = forge

    def forge(self, seed: int) -> bytes:
        return self._forge(self._image, seed)

    def read(self, image: bytes) -> str:
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._whole, self._root)
        self._path.write_bytes(image)
        assert escapes(image, self._root.with_name("forged")) == []
        outcome = load(self._root, self._claims_to_be_older(image))
        if outcome in ("the older one", "the forged one", "nothing"):
            go_on(self._root)
        return outcome.partition(":")[0]

    @staticmethod
    def _claims_to_be_older(image: bytes) -> bool:
        try:
            return identity_in(image).iteration == OLDER
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return False


_READERS: dict[str, Callable[[Path], Any]] = {"skeleton": _Skeletons, "metadata": _Metadata}
_FORGED = _READERS | {
    "header": partial(_Stores, forge=forged_header),
    "table": partial(_Stores, forge=forged_table),
}


def _read_forged(
    rank: int, world_size: int, what: str, base: Path, seeds: range
) -> collections.Counter[str]:
    reader, outcomes = _FORGED[what](base), collections.Counter[str]()
    forge = reader.forge if isinstance(reader, _Stores) else Forger(reader.bases()).forge
    limit_memory()
    before = _process()
    for seed in seeds:
        forged = forge(seed)
        # One that ends this process is found here.
        (base / "last").write_text(f"seed {seed}: {forged!r:.2000}")
        growth = Growth()
        outcomes[reader.read(forged)] += 1
        assert growth() < _ALLOWED_NBYTES + len(forged), seed
        assert seed % 25 or _process() == before, seed
    assert _process() == before
    return outcomes


def _read_bombs(rank: int, world_size: int, what: str, base: Path, bombs: list[str]) -> Any:
    reader, outcomes = _READERS[what](base), {}
    limit_memory()
    before = _process()
    for bomb in bombs:
        (base / "last").write_text(bomb)
        growth = Growth()
        outcomes[bomb] = reader.read(reader.with_bomb(BOMBS[bomb]))
        assert growth() < _ALLOWED_NBYTES, bomb
        assert _process() == before, bomb
    return outcomes


def _run(read: Callable[..., Any], what: str, base: Path, cases: Any) -> Any:
    try:
        (outcomes,) = run_ranks(read, 1, what, base, cases, init_group=False, timeout_s=1700.0)
    except RanksFailedError as error:
        pytest.fail(f"{error}\nthe last case: {(base / 'last').read_text()}")
    return outcomes


@pytest.mark.fault("hostile-file")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", _FORGED)
def test_what_is_forged_at_random_is_an_error_of_ours_or_does_no_harm(
    what: str, tmp_path: Path, long_form: bool, record_property: Callable[[str, object], None]
) -> None:
    seeds = range((10_000 if long_form else 200) // (1 if what in _READERS else 10))

    outcomes = _run(_read_forged, what, tmp_path, seeds)

    record_property("cases", len(seeds))
    print(outcomes)
    # Else the forger only writes what is no pickle or JSON at all, or changes nothing.
    whole = outcomes["loaded"] + outcomes["the forged one"] + outcomes["the older one"]
    assert len(seeds) // 40 < whole < len(seeds) + (what == "header")
    if what == "metadata":
        assert outcomes["CorruptShardError"] > len(seeds) // 4
        assert outcomes["UnsafeGlobalError"] > 0


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("what", _READERS)
def test_a_bomb_is_refused_or_does_no_harm(what: str, tmp_path: Path) -> None:
    outcomes = _run(_read_bombs, what, tmp_path, list(BOMBS))

    assert outcomes["a command"] == outcomes["an attribute"] == "UnsafeGlobalError"
    if what == "metadata":
        assert set(outcomes.values()) == {"CorruptShardError", "UnsafeGlobalError"}, outcomes


# Metadata that points where nothing lies.


def _leads_out(info: Any) -> None:
    info.relative_path = f"../{info.relative_path}"


def _is_absolute(info: Any) -> None:
    info.relative_path = "/etc/passwd"


def _is_15_gb(info: Any) -> None:
    info.length = 15_000_000_000


def _is_in_the_trailer(info: Any) -> None:
    info.offset += 300_000


def _is_before_the_file(info: Any) -> None:
    info.offset = -8


@pytest.mark.fault("hostile-file")
def test_metadata_that_points_where_nothing_lies_is_refused_before_memory_is_made(
    tmp_path: Path,
) -> None:
    reader = _Metadata(tmp_path)
    changes = _leads_out, _is_absolute, _is_15_gb, _is_in_the_trailer, _is_before_the_file, None
    for change in changes:
        described = pickle.loads(reader.true)
        if change is None:
            described.storage_data.clear()
        for info in described.storage_data.values():
            change(info)
        growth = Growth()

        outcome = reader.read(pickle.dumps(described, 4))

        assert outcome == "CorruptShardError", change
        assert growth() < _ALLOWED_NBYTES


@pytest.mark.parametrize("protocol", [2, 5])
def test_metadata_with_more_than_torch_puts_there_is_read(protocol: int, tmp_path: Path) -> None:
    reader = _Metadata(tmp_path)
    described = pickle.loads(reader.true)
    more = [{4}, frozenset((5,))] if protocol > 3 else None
    described.planner_data = {"a": ("b", 1), ("c", 2): {3: [None, 2.5, 10**30, more]}}
    described.mcore_data = {"w": {"shape": (3, 4)}}
    for info in described.storage_data.values():
        # As a later release of torch may.
        info.checksum = "none"
    reader.put(pickle.dumps(described, protocol))
    state = blank(_shared_state())

    with manager_on(tmp_path) as manager:
        assert manager.load(into=state)[1].iteration == 1

    assert_same(state, _shared_state())
