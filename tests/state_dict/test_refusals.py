"""A load runs no code of a file; a save refuses just what a load would, and with its place."""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import operator
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch

from localckpt.errors import (
    CheckpointingException,
    CorruptShardError,
    RestoreError,
    UnsafeGlobalError,
)
from localckpt.state_dict.header import Skeleton
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.skeleton import insert_tensors, take_tensors
from localckpt.state_dict.targets import find_targets
from localckpt.state_dict.unpickler import check_skeleton
from tests.state_dict.states import (
    ALLOWED,
    IDENTITY,
    Call,
    Settings,
    assert_same,
    round_trip,
    source_of,
    with_pickle,
    written,
)


class Other:
    """A class that nobody allowed."""


def _name_of(value: Any) -> str:
    """The same name in every worker, so without an address."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:60]


@pytest.mark.parametrize(
    "callable_",
    [
        *(getattr, setattr, type, eval, exec, compile, __import__, open),
        *(functools.partial, functools.reduce, operator.attrgetter, operator.methodcaller),
        *(os.system, os.getenv, pickle.loads, torch.load, torch.jit.load, numpy.load),
        *((eval, "my.own_name"), (Settings, "builtins.eval")),
    ],
    ids=_name_of,
)
def test_what_calls_whatever_a_file_says_cannot_be_allowed(callable_: Any) -> None:
    with pytest.raises(UnsafeGlobalError, match=r"cannot allow .* would run what the file says"):
        SafeGlobals([Settings, callable_])


def test_what_torch_allows_is_not_allowed_if_it_runs_code() -> None:
    state = {"value": Call(eval, "1 + 1")}

    with (
        torch.serialization.safe_globals([eval, Settings]),
        pytest.raises(UnsafeGlobalError, match=r"builtins\.eval cannot be allowed"),
    ):
        pack(state, IDENTITY)


@pytest.mark.parametrize(
    "value",
    [
        Call(dict, [("a", 1)]),
        Call(dict, {"a": 1}),
        Call(list, (1, 2)),
        Call(tuple, [1, torch.ones(2)]),
        Call(str, "text"),
        Call(int, 5),
        Call(float, 5),
        Call(bytes, b"ab"),
        Call(frozenset, [1]),
        Call(list, range(10)),
        Call(str, 5),
        Call(bytes, 5),
        Call(dict, items=iter([("a", 1)])),
        Call(collections.Counter, range(3)),
        Call(numpy.ndarray, (3,)),
        Call(torch.Tensor, 3),
        Call(numpy.float32, 3),
        collections.defaultdict(functools.partial(collections.deque, maxlen=3)),
        collections.defaultdict(functools.partial(dict)),
        collections.defaultdict(list, a=[1]),
        collections.defaultdict(Settings),
        collections.deque([1, 2], maxlen=3),
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        Settings,
        Other,
        Other(),
        operator.attrgetter("a"),
        len,
    ],
    ids=lambda value: _name_of(getattr(value, "_reduced", value)),
)
def test_what_a_save_accepts_is_loaded_and_what_it_refuses_a_load_refuses(value: Any) -> None:
    state = {"weight": torch.ones(2), "value": value}
    planner = ImagePlanner(ALLOWED)
    skeleton, tensors, *_ = take_tensors(state)
    try:
        check_skeleton(skeleton, ALLOWED)
        insert_tensors(skeleton, tensors.__getitem__, ALLOWED)
    except CheckpointingException:
        with pytest.raises(CheckpointingException, match=r"\(at 'value"):
            pack(state, IDENTITY, planner)
    else:
        loaded = unpack(pack(state, IDENTITY, planner), allowed=ALLOWED)
        assert_same(loaded["weight"], state["weight"])


def test_types_of_dtypes_and_constants_come_back() -> None:
    state = [
        *(numpy.dtype("f4"), numpy.dtype(">f8"), numpy.dtype("V3")),
        *(numpy.dtype("M8[25s]"), numpy.dtype("U7"), numpy.float32, numpy.bool_, numpy.str_),
        *(torch.dtype, torch.float32, torch.int8, Ellipsis, NotImplemented),
        *(type(None), type(Ellipsis), int, dict, torch.Tensor),
    ]

    assert round_trip(state) == state


def test_a_generator_of_torch_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)

    loaded = round_trip({"a": generator, "b": generator})

    assert loaded["a"] is loaded["b"]
    assert_same(torch.rand(5, generator=loaded["a"]), torch.rand(5, generator=generator))


@pytest.mark.parametrize("number", [-1, 1, 2**40])
def test_a_tensor_that_the_image_does_not_have_is_refused(number: int) -> None:
    class Forging(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return number if isinstance(obj, torch.Tensor) else None

    file = io.BytesIO()
    Forging(file, protocol=5).dump({"weight": torch.ones(2)})

    with pytest.raises(CorruptShardError, match=f"refers to tensor {number} of 1"):
        check_skeleton(file.getvalue(), ALLOWED, tensors=1)


def test_a_path_that_python_3_13_saved_is_loaded() -> None:
    here = f"c{type(Path()).__module__}\nPosixPath\n".encode()
    told = pickle.dumps({"from": Path("/data")}, protocol=2)
    image = with_pickle(told.replace(here, b"cpathlib._local\nPosixPath\n"))

    assert b"pathlib._local" in image
    assert unpack(source_of(image)) == {"from": Path("/data")}


def named(module: str, name: str) -> bytes:
    """A pickle that refers to a global."""
    texts = [pickle.SHORT_BINUNICODE + bytes([len(t)]) + t.encode() for t in (module, name)]
    return b"".join([pickle.PROTO, b"\x04", *texts, pickle.STACK_GLOBAL, pickle.STOP])


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "__import__"),
        ("builtins", "type"),
        ("builtins", "object"),
        ("builtins", "dict.__class__"),
        ("builtins", "dict.fromkeys.__self__"),
        ("functools", "partial"),
        ("operator", "attrgetter"),
        ("importlib", "import_module"),
        ("copyreg", "_reconstructor"),
        ("copyreg", "__newobj__"),
        ("collections", "abc.sys"),
        ("collections", "namedtuple"),
        ("datetime", "sys"),
        ("pathlib", "os.system"),
        ("pathlib", "Path.unlink"),
        ("torch", "load"),
        ("torch", "torch.load"),
        ("torch", "os.system"),
        ("torch", "jit.load"),
        ("torch.nn.modules.linear", "Linear"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("numpy", "load"),
        ("localckpt.state_dict.basic", "torch.load"),
        ("localckpt.state_dict.skeleton", "pickle.loads"),
        ("localckpt", "LocalCheckpointManager"),
        ("localckpt.storage.directory", "DirectoryStore"),
        ("tests.state_dict.states", "Point.__new__"),
        ("tests.state_dict.states", "Settings"),
        ("", ""),
        ("no.such.module", "thing"),
    ],
)
def test_a_global_that_is_not_on_the_list_is_refused_and_named(module: str, name: str) -> None:
    image = with_pickle(named(module, name))

    with pytest.raises(UnsafeGlobalError) as refused:
        unpack(source_of(image))

    text = str(refused.value)
    assert f"{module}.{name}" in text
    # What would have a file run code cannot be allowed by anybody, so nobody is told how.
    assert ("cannot be allowed" in text) != ("safe_globals=" in text)
    assert ("add_safe_globals" in text) == ("safe_globals=" in text)


def test_a_module_that_is_not_imported_stays_so(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    (tmp_path / "localckpt_test_bomb.py").write_text(f"open({str(marker)!r}, 'w')")
    image = with_pickle(named("localckpt_test_bomb", "Thing"))
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(UnsafeGlobalError, match="localckpt_test_bomb"):
            unpack(source_of(image))
    finally:
        sys.path.remove(str(tmp_path))

    assert "localckpt_test_bomb" not in sys.modules
    assert not marker.exists()


class Loud:
    """Leaves a trace wherever an instance is made or changed."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *args: Any) -> None:
        self.made.append(args)

    def __setstate__(self, state: Any) -> None:
        self.made.append(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return Loud, (1,), {"a": 2}


@pytest.mark.fault("hostile-file")
def test_a_refused_shard_makes_no_object_and_fills_no_tensor() -> None:
    allowed = SafeGlobals([Loud])
    target = torch.zeros(4)
    state = {"weight": torch.ones(4), "loud": [Loud()], "settings": Settings(1)}
    image = pack(state, IDENTITY, ImagePlanner(SafeGlobals([Loud, Settings])))
    into = find_targets({"weight": target})
    Loud.made.clear()

    for given in (None, into):
        with pytest.raises(UnsafeGlobalError, match=r"states\.Settings"):
            ImageReader(image, allowed).restore(given)

    assert Loud.made == []
    assert target.tolist() == [0, 0, 0, 0]


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80",
        b"garbage",
        b".",
        pickle.dumps({"a": 1})[:-3],
        b"Pnot a number\n.",
        pickle.PROTO + b"\x04" + pickle.NONE + pickle.BINPERSID + pickle.STOP,
        pickle.PROTO + b"\x04" + pickle.BININT1 + b"\x07" + pickle.BINPERSID + pickle.STOP,
        pickle.PROTO + b"\x04" + pickle.BININT + b"\xff" * 4 + pickle.BINPERSID + pickle.STOP,
        pickle.PROTO + b"\x04" + pickle.NEWTRUE + pickle.BINPERSID + pickle.STOP,
        pickle.EXT1 + b"\x05" + pickle.STOP,
        pickle.BINUNICODE8 + b"\xff" * 7 + b"\x7f" + pickle.STOP,
        b"\x80\x05" + b"]" * 10,
        pickle.EMPTY_LIST + pickle.BINGET + b"\x09" + pickle.STOP,
    ],
    ids=repr,
)
def test_a_skeleton_that_is_none_is_refused(pickled: bytes) -> None:
    # Its digests are right, so it is what was saved: no file is renamed for it.
    with pytest.raises(RestoreError):
        unpack(source_of(with_pickle(pickled)))


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"{}{",
        b"5",
        b"[5]",
        b"[[]]",
        b'[["a","float32",[-1],"cpu","tensor",0,null]]',
        b'[["a","float32",[true],"cpu","tensor",0,null]]',
        b'[["a","load",[1],"cpu","tensor",0,null]]',
        b'[["a","float32",[1],"cpu","tensor",0,[0,[1,2]]]]',
        b'[["a","float32",[1],"cpu","tensor",0,[-4,[1]]]]',
        b'[["a","float32",[1],"cpu","tensor",0,[0,[-1]]]]',
        b'[["a","float32",[5],"cpu","tensor",0,null]]',
        b'[["a","float64",[4],"cpu","tensor",0,null]]',
        b'[["a","float32",[2],"cpu","tensor",0,[12,[1]]]]',
        b'[["a","float32",[3],"cpu","tensor",0,[2,[1]]]]',
        b'[["a","float32",[2],"cpu","tensor",0,[0,[4]]]]',
        b'[["a","float32",[100000000000],"cpu","tensor",0,null]]',
        b'[["no such slot","float32",[4],"cpu","tensor",0,null]]',
        b'[[5,"float32",[4],"cpu","tensor",0,null]]',
    ],
    ids=repr,
)
def test_a_table_that_reaches_outside_of_the_tensors_is_refused(table: bytes) -> None:
    capture = ImagePlanner().capture({"a": torch.ones(4)})
    framed = Skeleton.split(capture.skeleton)._replace(table=table).join()

    with pytest.raises(CorruptShardError):
        unpack(source_of(written(dataclasses.replace(capture, skeleton=framed))))


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize(
    "framed", [b"", b"\x01", b"\xff" * 16, (100).to_bytes(8, "little") + bytes(8) + b"[]"]
)
def test_a_skeleton_that_is_cut_short_is_refused(framed: bytes) -> None:
    capture = dataclasses.replace(ImagePlanner().capture({}), skeleton=framed)

    with pytest.raises(CorruptShardError):
        unpack(source_of(written(capture)))
