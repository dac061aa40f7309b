"""The one reader of pickles, and the check of a pickle before any object of it is made.

A pickle may change any class or shared object of the process, so a check first reads it with
stand-ins. Arguments of our own functions these check themselves.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import numpy
import torch

from localckpt.errors import CheckpointingException, CorruptShardError, UnsafeGlobalError
from localckpt.state_dict.containers import children_of, joined
from localckpt.state_dict.pickles import check_opcodes, unframed
from localckpt.state_dict.safe_globals import Name, SafeGlobals


class Unpickler(pickle.Unpickler):
    """Reader of one pickle, with ``find`` for names and ``tensor`` for tensors' numbers."""

    def __init__(
        self, file: io.BytesIO, find: Callable[[str, str], Any], tensor: Callable[[int], Any]
    ) -> None:
        super().__init__(file)
        self._find = find
        self._tensor = tensor

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int:
            raise CorruptShardError(f"the pickle refers to a tensor by {pid!r:.100}")
        return self._tensor(pid)


class Contents(NamedTuple):
    """Contents of a checked skeleton: names, and tensors of meshes and of composed ones."""

    names: frozenset[Name]
    of_meshes: frozenset[int]
    composed: frozenset[int]


def check_skeleton(
    skeleton: bytes | memoryview,
    allowed: SafeGlobals,
    tensors: int | None = None,
    *,
    depth_is_limited: bool = False,
) -> Contents:
    """Check a skeleton without making any object in it; a save runs the same check.

    ``depth_is_limited``: it is of a pickler that fails before an unpickler's limit.
    """
    pickled = bytes(skeleton)
    check_opcodes(pickled, depth_is_limited=depth_is_limited)
    named: set[Name] = set()
    refused: dict[Name, None] = {}
    of_meshes: set[int] = set()
    composed: set[int] = set()

    class Mesh(Ignored):
        def __setstate__(self, state: Any) -> None:
            of_meshes.update(_numbers_in(state.values() if type(state) is dict else ()))

    class Composed(_Fixed):
        def __init__(self, *args: Any) -> None:
            for arg in args:
                composed.update(_numbers_in(arg if isinstance(arg, tuple) else (arg,)))

    own = {_MESH: Mesh, "torch._utils._rebuild_sparse_tensor": Composed}

    def find(module: str, name: str) -> Any:
        named.add(item := Name(module, name))
        try:
            found = allowed.find(module, name)
        except UnsafeGlobalError:
            refused[item] = None
            return Ignored
        return own.get(str(item)) or _stand_in_of(str(item), found)

    def tensor(number: int) -> _Tensor:
        if tensors is not None and not 0 <= number < tensors:
            raise CorruptShardError(f"the pickle refers to tensor {number} of {tensors}")
        return _Tensor(number)

    try:
        Unpickler(io.BytesIO(pickled), find, tensor).load()
    except Exception as error:
        if refused:
            raise allowed.refusal(list(refused)) from None
        if isinstance(error, CheckpointingException | MemoryError):
            raise
        # A damaged pickle can raise any exception; callers expect one for all of them.
        raise CorruptShardError(f"the pickle cannot be read: {error!r}") from error
    if refused:
        raise allowed.refusal(list(refused))
    return Contents(frozenset(named), frozenset(of_meshes), frozenset(composed))


class Ignored:
    """Stand-in for an object, or a class, that takes any call, state and items."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    # A pickle that changes a class itself calls this with one argument too few.
    def _take(self, _: Any, *__: Any) -> None:
        pass

    _taken: Any = _take
    __setstate__ = __setitem__ = append = extend = add = _taken


def place_of(
    error: Exception, skeleton: bytes, load: Callable[[io.BytesIO], Any]
) -> tuple[str, str] | None:
    """Find the object that raised an error in a load, by the same load and one with stand-ins.

    Returns the name of its class, and its keys, indices and attributes in the state, with dots.
    """
    touched: list[_Made] = []

    def find(module: str, name: str) -> Any:
        def note(made: _Made) -> None:
            if file.tell() == end:
                touched.append(made)

        return type(name, (_Made,), {"class_name": f"{module}.{name}", "note": note})

    try:
        # An unpickler tells no position, but then reads one instruction at a time from the file.
        pickled = unframed(skeleton)
        file = io.BytesIO(pickled)
        with suppress(type(error)):
            load(file)
        end, file = file.tell(), io.BytesIO(pickled)
        root = Unpickler(file, find, lambda _: None).load()
        keys = _keys_of(touched[0], root, (), set())
    except Exception:  # noqa: BLE001 - the caller raises the error, with or without a place
        return None
    if keys is None:
        return None
    # The attribute of localckpt's wrapper that holds a plain state.
    keys = keys[1:] if keys[:1] == ("state_dict",) else keys
    return touched[0].class_name, joined(keys)


class _Made(Ignored):
    """Stand-in that keeps its arguments, and what fills it, by keys; ``None`` adds no key."""

    class_name: str
    note: Callable[[], None]
    held: list[tuple[Any, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        made.held = [(None, (*args, *kwargs.values()))]
        made.note()
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        self.held.append((key, value))
        self.note()

    def __setstate__(self, state: Any) -> None:
        # Its members become attributes, so the dict around them adds no key to paths.
        self[None] = state

    def append(self, item: Any) -> None:
        self[len(self.held) - 1] = item

    def extend(self, items: Any) -> None:
        self[None] = items

    add = append

    def __hash__(self) -> int:
        self.note()
        return id(self)


def _keys_of(wanted: _Made, value: Any, keys: tuple[Any, ...], seen: set[int]) -> Any:
    """Return the keys that lead from a value to a stand-in in it; ``None`` if it is not there."""
    if value is wanted:
        return keys
    held: Any = value.held if isinstance(value, _Made) else children_of(value)
    if isinstance(value, dict):
        held = [*((None, key) for key in value), *value.items()]
    elif isinstance(value, set | frozenset):
        held = enumerate(value)
    if held is None or id(value) in seen:
        return None
    seen.add(id(value))
    found = (_keys_of(wanted, p, keys if k is None else (*keys, k), seen) for k, p in held)
    return next((place for place in found if place is not None), None)


class _Fixed(Ignored):
    """Stand-in for an object that a pickle never changes after making it."""

    def _change(self, *_: Any) -> Any:
        _refuse("changes a value that is made")

    _unchanged: Any = _change
    __setstate__ = __setitem__ = append = extend = add = _unchanged


class _Result(Ignored):
    """Stand-in for a function or an enumeration, whose results are never changed."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return _FIXED


class _Tensor(_Fixed):
    def __init__(self, number: int) -> None:
        self.number = number


class _Named(_Fixed):
    """Stand-in for a class that a pickle uses as a value and never calls."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        _refuse("calls a class that is not called")


class _Passed(Ignored):
    """Stand-in for a function that returns its argument."""

    def __new__(cls, value: Any) -> Any:
        return value


class _OfLiterals(Ignored):
    """Stand-in for a class that a pickle calls with plain containers and texts only."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        if any(isinstance(value, Ignored) for value in args):
            _refuse("makes a value of another")
        return object.__new__(cls)


def _conversion(*kinds: type) -> type[Ignored]:
    """Make a stand-in for a class that is called with one value of these types, or none."""

    class Conversion(Ignored):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 or kwargs or any(type(value) not in kinds for value in args):
                _refuse("converts a value")
            return object.__new__(cls)

    return Conversion


def _stand_in_of(full_name: str, found: Any) -> type[Ignored]:
    if full_name in _STAND_INS:
        return _STAND_INS[full_name]
    if isinstance(found, type):
        if found in _NEVER_CALLED or issubclass(found, numpy.generic):
            return _Named
        # Its members are shared by all of the process.
        return _Result if issubclass(found, enum.Enum) else Ignored
    home = getattr(found, "__module__", "").partition(".")[0]
    return _Result if home in ("torch", "localckpt") else Ignored


_FIXED = _Fixed()
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_NEVER_CALLED = (
    *(torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.Generator, torch.dtype),
    *(numpy.ndarray, numpy.dtype),
)
_CONTAINERS = list, tuple, set, frozenset, dict
_STAND_INS: dict[str, type[Ignored]] = {
    **{
        f"builtins.{name}": _conversion(*_CONTAINERS)
        for name in ("list", "tuple", "set", "frozenset")
    },
    "builtins.dict": _conversion(dict, list, tuple),
    "builtins.str": _conversion(str),
    "builtins.bytes": _conversion(bytes),
    "builtins.int": _conversion(int, bool),
    "builtins.bool": _conversion(int, bool),
    "builtins.float": _conversion(float, int),
    **{
        f"collections.{name}": _OfLiterals
        for name in ("OrderedDict", "defaultdict", "Counter", "deque")
    },
    "torch.Size": _OfLiterals,
    "decimal.Decimal": _OfLiterals,
    "localckpt.state_dict.replicated.given": _Passed,
    "localckpt.state_dict.skeleton._itself": _Passed,
}


def _numbers_in(values: Iterable[Any]) -> set[int]:
    return {value.number for value in values if isinstance(value, _Tensor)}


def _refuse(what: str) -> NoReturn:
    raise CorruptShardError(f"the pickle {what}, in a way that no pickle does")
