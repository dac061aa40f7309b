"""Arrays, numbers, dtypes and generators of numpy are data, as tensors are."""

from __future__ import annotations

import pickle
from typing import Any

import numpy
import pytest
import torch

from localckpt.errors import CheckpointingException
from localckpt.state_dict.foreign_values import (
    restore_array,
    restore_bit_generator,
    restore_dtype,
    restore_generator,
    restore_number,
    restore_random,
    restore_seeds,
)
from localckpt.state_dict.image import ImagePlanner, pack, unpack
from localckpt.state_dict.safe_globals import SafeGlobals
from tests.state_dict.states import (
    IDENTITY,
    Call,
    assert_same,
    round_trip,
    source_of,
    with_pickle,
)

DTYPES = [
    *("?", "i1", "u2", "<i4", ">i4", "u8", "f2", ">f4", "f8", "c8", "c16", "g", "G"),
    *("U7", ">U2", "S5", "V3", "M8[ns]", "M8[25s]", "M8", ">m8[D]", "m8"),
]


def _values(dtype: Any, count: int) -> numpy.ndarray[Any, Any]:
    kind = numpy.dtype(dtype)
    data = numpy.random.default_rng(3).integers(0, 2, count * kind.itemsize, dtype=numpy.uint8)
    return data.view(kind)


@pytest.mark.parametrize("count", [0, 1, 24, 3000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_numpy_comes_back_bit_for_bit(dtype: Any, count: int) -> None:
    flat = _values(dtype, count)
    arrays = [flat, flat[::-1], flat[:count:2], flat.reshape(-1, 1)]
    if count == 24:
        arrays += [flat.reshape(2, 3, 4), flat.reshape(4, 6).T, flat.reshape(4, 6)[:, ::2]]
    if count == 3000:
        arrays += [flat.reshape(3, 1000).T, numpy.broadcast_to(flat, (2, 3000))]
    if count == 1:
        arrays += [flat.reshape(())]
    read_only = flat.copy()
    read_only.flags.writeable = False

    for array in (*arrays, read_only):
        assert_same(round_trip([array])[0], array)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_generators_of_numpy_go_on_where_they_were(kind: str) -> None:
    generator = numpy.random.Generator(getattr(numpy.random, kind)(7))
    generator.random(11, dtype=numpy.float32)
    state = [generator, numpy.random.RandomState(3), numpy.random.SeedSequence(5)]
    state[1].normal()
    bits = generator.bit_generator

    loaded = round_trip([*state, bits])

    assert loaded[0].bit_generator is loaded[3]
    assert loaded[0].random() == generator.random()
    assert loaded[1].normal() == state[1].normal()
    assert loaded[2].generate_state(4).tolist() == state[2].generate_state(4).tolist()
    assert loaded[2].spawn(1)[0].spawn_key == state[2].spawn(1)[0].spawn_key


class Labelled(numpy.ndarray):  # type: ignore[type-arg]
    """A class of arrays without behaviour of its own."""


@pytest.mark.parametrize(
    "value",
    [
        numpy.asarray(numpy.rec.array([(1, 2)], dtype="i4,i4")),
        numpy.array(["a"], "T"),
        numpy.array([1, "a", None], dtype=object),
        numpy.zeros(5000, dtype=object),
        numpy.array([(1, "a")], dtype=[("a", "i4"), ("b", "O")]),
        numpy.zeros((2, 3), [("a", [("b", "O"), ("c", "u1")], (2,)), ("d", ">f4")]),
        numpy.zeros(5000, [("a", "<i4"), ("b", "<f8")]),
        numpy.zeros(1, [("a", "<i4")])[0],
        numpy.zeros(2, numpy.dtype("f4", metadata={"unit": "s"})),
        numpy.dtype([("a", "<i4")]),
        numpy.dtype(("<f8", (2,))),
        numpy.dtype((numpy.record, 8)),
        numpy.arange(5).view(Labelled),
        numpy.arange(5000).view(Labelled),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_save_refuses_arrays_and_dtypes_that_are_not_plain(value: Any) -> None:
    with pytest.raises(CheckpointingException) as refused:
        pack({"a": [value]}, IDENTITY, ImagePlanner(SafeGlobals([Labelled])))

    told = (
        ["test_numpy_arrays.Labelled is a class of arrays", "save numpy.asarray(array)"]
        if isinstance(value, Labelled)
        else ["is not one of numpy's plain ones", "save an array of a plain dtype for each field"]
    )
    assert all(words in str(refused.value) for words in told)
    assert "(at 'a.0')" in str(refused.value)


_MT = numpy.random.MT19937(1).state
_PHILOX = numpy.random.Philox(1).state
# Arrays in these pickles go through numpy's own, which are refused; a list serves as well.
_MT["state"]["key"] = _MT["state"]["key"].tolist()
_PHILOX["state"] = {name: part.tolist() for name, part in _PHILOX["state"].items()}
_PHILOX["buffer"] = _PHILOX["buffer"].tolist()
_RECONSTRUCT, _OWN, _STATE = numpy.zeros(1).__reduce__()


def _array(data: Any, shape: Any, dtype: Any, *more: Any) -> Call:
    return Call(restore_array, data, dtype, shape, *(more or ("C", True)))


def _fields(dtype: str, offset: int, itemsize: int) -> dict[str, Any]:
    return {
        "names": ["a"],
        "formats": [(dtype,)],
        "offsets": [offset],
        "titles": [None],
        "itemsize": itemsize,
        "aligned": False,
    }


_OBJECT, _F8 = ("|O",), ("<f8",)
FORGED = {
    "objects out of bytes": _array(b"A" * 8, (1,), _OBJECT),
    "objects in a record out of bytes": _array(b"A" * 8, (1,), (_fields("|O", 0, 8),)),
    "an array that is too long": _array(b"A" * 8, (1 << 20,), _F8),
    "an array of 2 GB": _array(b"", (1 << 28,), _F8),
    "an array of a number": _array(1 << 30, (1 << 27,), _F8),
    "a list that is too short": _array([1], (1 << 28,), _OBJECT),
    "a field that is too short": _array({"a": [1]}, (1 << 28,), (_fields("|O", 0, 1 << 28),)),
    "a negative shape": _array(b"A" * 64, (-1, -8), _F8),
    "an array of a class that is none": _array(b"A" * 8, (1,), _F8, "C", True, list),
    "an array with a state": Call(restore_array, bytes(8), _F8, (1,), "C", True, state=_STATE),
    "numpy's own array": Call(_RECONSTRUCT, *_OWN, state=_STATE),
    "a number of a pointer": Call(restore_number, b"A" * 8, _OBJECT, (), "C", True),
    "a number of 2 GB": Call(restore_number, b"", ("V2000000000",), (), "C", True),
    "a dtype of a name": Call(restore_dtype, "float64, object"),
    "a dtype with a field outside": _array(b"A" * 8, (1,), (_fields("<f8", 1 << 20, 8),)),
    "a dtype of another size": _array(b"A" * 8, (1,), (_fields("<f8", 0, 1 << 20),)),
    "a dtype with a subarray outside": _array(b"A" * 8, (1,), ((_F8, (1 << 20,)),)),
    "a dtype of dtypes without end": Call(restore_dtype, [1]),
    "seeds with a pool outside": Call(restore_seeds, 0, (3, 0, [0] * 4, 1 << 30, ())),
    "a generator that goes on outside": Call(
        restore_bit_generator, "MT19937", _MT | {"state": _MT["state"] | {"pos": 1 << 20}}
    ),
    "a generator that goes on before": Call(
        restore_bit_generator, "Philox", _PHILOX | {"buffer_pos": -1 << 20}
    ),
    "a generator with a state": Call(restore_bit_generator, "MT19937", _MT, state=_MT),
    "a generator of another function": Call(restore_random, bytes),
    "a generator by another name": Call(restore_bit_generator, "seed", _MT),
    "an array made by its class": Call(numpy.ndarray, (1 << 40,)),
    "a generator of torch out of a number": Call(restore_generator, "cpu", 1 << 40),
    "a number made by its class": Call(numpy.void, 1 << 40),
    "a tensor rebuilt by another function": Call(
        torch._tensor._rebuild_from_type_v2, bytes, torch.Tensor, (1 << 40,), {}
    ),
}


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("forged", FORGED.values(), ids=list(FORGED))
def test_what_numpy_would_take_for_granted_is_refused(forged: Any) -> None:
    image = with_pickle(pickle.dumps(forged, 5))

    with pytest.raises(CheckpointingException, match=r"no pickle|read|rebuilt|may"):
        unpack(source_of(image))
