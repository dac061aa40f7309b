"""Skeletons that somebody forged from true ones: instruction by instruction, and call by call.

Each is read in a process of its own. It is an error of ours, or a state that can be used; nothing
else of the process is changed, and it takes little memory.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import decimal
import hashlib
import pickle
import pickletools
import random
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from localckpt.errors import CheckpointingException
from localckpt.state_dict.header import Skeleton
from localckpt.state_dict.image import ImagePlanner
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import _VALUES, SafeGlobals
from localckpt.state_dict.skeleton import take_tensors
from localckpt.state_dict.targets import find_targets
from tests.faults.small_store import Growth, limit_memory
from tests.ranks import RanksFailedError, run_ranks
from tests.state_dict.states import Point, source_of, written

_ALLOWED_NBYTES = 64 << 20
_BATCH = 25

# Errors of a program that uses what makes no sense, such as an object without its attributes.
_OF_ODD_VALUES = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
_Step = tuple[str, bytes]
"""An instruction: its name, and its bytes."""


def _true_states() -> list[Any]:
    marked = torch.nn.Parameter(torch.arange(4.0))
    marked.partition_dim = 1  # type: ignore[attr-defined]
    generator = numpy.random.Generator(numpy.random.MT19937(3))
    return [
        [numpy.arange(6, dtype=">i4").reshape(2, 3), numpy.arange(600.0), numpy.float32(2)],
        [numpy.array(["ab"]), numpy.zeros(3, "V5"), numpy.zeros(2, ">c8")],
        [numpy.zeros(2, "M8[25s]"), numpy.dtype("<i2"), numpy.float64],
        [generator, numpy.random.RandomState(4), numpy.random.PCG64(1)],
        [numpy.random.Philox(2), numpy.random.SFC64(5), numpy.random.SeedSequence(3)],
        [marked, torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.Generator()],
        [torch.eye(4).to_sparse_csc(), torch.Size([1]), Point(1, 2)],
        [
            collections.OrderedDict(a=1),
            collections.defaultdict(list, b=[1]),
            collections.deque([1], maxlen=4),
            collections.Counter("aab"),
        ],
        [
            datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
            decimal.Decimal("1.5"),
            uuid.UUID(int=5),
            Path("/a/b"),
            types.SimpleNamespace(a=1),
            argparse.Namespace(b=2),
            {1, 2},
            frozenset([3]),
            slice(1, 2),
            range(3),
            1 + 2j,
            torch.float32,
            Ellipsis,
        ],
    ]


def _true_pickles(states: list[Any]) -> list[list[_Step]]:
    return [_steps(take_tensors(state).skeleton) for state in states]


def _steps(pickled: bytes) -> list[_Step]:
    found = [(code.name, position) for code, _, position in pickletools.genops(pickled)]
    ends = [position for _, position in found[1:]] + [len(pickled)]
    return [
        (name, pickled[start:end])
        for (name, start), end in zip(found, ends, strict=True)
        if name not in ("FRAME", "PROTO", "STOP")
    ]


_NUMBERS = (0, 1, 3, 4, 5, 8, 255, 624, 625, 65_535)
_WORDS = (
    *(
        "O8",
        "V8",
        "V2000000000",
        "U7",
        "f8",
        "i1",
        "M8",
        "<",
        ">",
        "|",
        "=",
        "",
        "a",
        "b",
        "C",
        "F",
    ),
    *(
        "pos",
        "buffer_pos",
        "state",
        "key",
        "has_gauss",
        "MT19937",
        "Philox",
        "cpu",
        "meta",
        "cuda:9",
    ),
    *("data", "__class__", "requires_grad", "__dict__", "1e9999", "ns"),
)
_INSERTED = (
    *(b"N", b")", b"]", b"}", b"(", b"\x8f", b"\x88", b"0", b"1", b"2", b"t", b"l", b"d", b"e"),
    *(b"a", b"s", b"u", b"\x90", b"\x91", b"\x85", b"\x86", b"\x87", b"R", b"b", b"\x81", b"\x92"),
    *(
        b"\x93",
        b"\x94",
        b"o",
        b"K\x00Q",
        b"K\x01Q",
        b"K\x63Q",
        b"J\xff\xff\xff\xff",
        b"C\x08AAAAAAAA",
    ),
    *(
        b"r\x00\x00\x00\x04",
        b"q\x00",
        b"\x97",
        b"\x98",
        b"\x82\x01",
        b"\x96\xff\xff\xff\x7f\0\0\0\0",
    ),
)
_NAMES = [(module, name) for module, names in sorted(_VALUES.items()) for name in names]


def _text(word: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode()


def _changed(chance: random.Random, bases: list[list[_Step]]) -> bytes:
    """A true pickle with other values, or with other instructions."""
    steps = list(chance.choice(bases))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        values = [place for place, (name, _) in enumerate(steps) if name in _VALUE_STEPS]
        if values and chance.random() < 0.6:
            place = chance.choice(values)
            steps[place] = (steps[place][0], _other_value(chance, steps[place][0]))
        else:
            _change_steps(chance, steps, bases)
    return b"\x80\x05" + b"".join(code for _, code in steps) + b"."


_VALUE_STEPS = {
    *("BININT1", "BININT", "BININT2", "LONG1", "NEWTRUE", "NEWFALSE", "NONE"),
    *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
}


def _other_value(chance: random.Random, name: str) -> bytes:
    if "UNICODE" in name:
        return _text(chance.choice(_WORDS))
    if "BYTES" in name:
        data = chance.randbytes(chance.choice((0, 1, 8, 24, 200)))
        return pickle.BINBYTES + len(data).to_bytes(4, "little") + data
    number = chance.choice(_NUMBERS) * chance.choice((1, 1, -1, 1 << 10, 1 << 20))
    return pickle.dumps(number, 2)[2:-1]


def _change_steps(chance: random.Random, steps: list[_Step], bases: list[list[_Step]]) -> None:
    place = chance.randrange(len(steps))
    how = chance.choice(("name", "name", "drop", "splice", "repeat", "insert", "insert"))
    if how == "name":
        names = [place for place, (name, _) in enumerate(steps) if "GLOBAL" in name]
        module, word = chance.choice(_NAMES)
        named = ("GLOBAL", _text(module) + _text(word) + b"\x93")
        if names:
            # In place of another: what that was made of is dropped from the stack.
            at = chance.choice(names)
            steps[at] = ("GLOBAL", (steps[at][1] + b"0" + named[1]))
        else:
            steps.insert(place, named)
    elif how == "drop" and len(steps) > 1:
        del steps[place]
    elif how == "splice":
        other = chance.choice(bases)
        start = chance.randrange(len(other))
        steps[place:place] = other[start : start + chance.randrange(1, 12)]
    elif how == "repeat":
        steps[place:place] = steps[place : place + chance.randrange(1, 8)]
    else:
        steps.insert(place, ("inserted", chance.choice(_INSERTED)))


def _use(value: Any, depth: int = 0) -> None:
    """Look at what was loaded as a program would: what is forged is not to end it now."""
    if depth > 8:
        return
    if isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
        items = list(value.items()) if isinstance(value, dict) else list(value)[:50]
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


def _process() -> str:
    """Digest of what a pickle must not change: classes, constants and modules."""
    allowed = SafeGlobals()
    # Looked up as a load does, which imports what is allowed.
    kinds = [allowed.find(module, name) for module, name in _NAMES]
    told = [repr(sorted(vars(kind))) for kind in kinds if isinstance(kind, type)]
    dtypes = [numpy.dtype(code) for code in "?bBhHiIlLqQefdgFDGOSUVMm"]
    told += [repr((d, d.itemsize, d.fields, d.byteorder, d.flags)) for d in dtypes]
    told.append(repr([name for name in sys.modules if name.split(".")[0] in ("os", "subprocess")]))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _read_many(rank: int, world_size: int, base: Path, first: int, count: int) -> int:
    states = _true_states()
    bases = _true_pickles(states)
    capture = ImagePlanner().capture([torch.arange(6.0), torch.ones(3, dtype=torch.int64)])
    skeleton = Skeleton.split(capture.skeleton)
    for state in states:
        _use(state)
    limit_memory()
    loaded = 0
    for start in range(first, first + count, _BATCH):
        before, growth = _process(), Growth()
        for number in range(start, min(start + _BATCH, first + count)):
            pickled = _changed(random.Random(number), bases)
            # One that ends this process is found here.
            (base / "last").write_text(f"seed {number}: {pickled!r}")
            loaded += sum(_read(capture, skeleton._replace(pickle=pickled).join()))
        assert growth() < _ALLOWED_NBYTES, f"seeds {start} to {start + _BATCH}"
        assert _process() == before, f"seeds {start} to {start + _BATCH}"
    return loaded


def _read(capture: Any, skeleton: bytes) -> Iterator[bool]:
    source = source_of(written(dataclasses.replace(capture, skeleton=skeleton)))
    given = [torch.zeros(6), torch.zeros(3, dtype=torch.int64)]
    for into in (None, find_targets(given)):
        try:
            state = ImageReader(source, SafeGlobals()).restore(into)
        except CheckpointingException:
            yield False
            continue
        # Odd values may be of no use.
        with contextlib.suppress(*_OF_ODD_VALUES):
            _use(state)
        yield True
    # Whatever was read, tensors that were given hold what they had, or what was saved.
    assert given[0].tolist() in ([0.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert given[1].tolist() in ([0] * 3, [1] * 3)


@pytest.mark.fault("hostile-file")
@pytest.mark.timeout(1800)
def test_a_skeleton_forged_from_true_ones_is_an_error_of_ours_or_does_no_harm(
    tmp_path: Path, long_form: bool, record_property: Any
) -> None:
    cases = 10_000 if long_form else 200

    try:
        (loaded,) = run_ranks(_read_many, 1, tmp_path, 0, cases, init_group=False, timeout_s=1700.0)
    except RanksFailedError as error:
        last = tmp_path / "last"
        pytest.fail(f"{error}\nthe last case: {last.read_text() if last.exists() else 'none'}")

    record_property("cases", cases)
    # Else the forger only writes what is no pickle at all.
    assert loaded > cases // 20
