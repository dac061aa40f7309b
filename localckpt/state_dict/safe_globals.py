"""Which classes and functions a shard may name: reading one never runs other code.

Allowed are the value types of Python, numpy and torch listed here, whatever the user passes as
``safe_globals=`` or to ``torch.serialization.add_safe_globals``, what ``library_globals.py`` lists
for libraries that are imported, and two kinds of class that the running program has already
imported: named tuples, and subclasses of TensorAwareStateDict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from localckpt.errors import UnsafeGlobalError
from localckpt.state_dict.base import TensorAwareStateDict
from localckpt.state_dict.library_globals import is_library_value

__all__ = ["SafeGlobals"]

_VALUES: dict[str, tuple[str, ...]] = {
    "builtins": (
        *("set", "frozenset", "complex", "slice", "range", "list", "dict", "tuple"),
        *("int", "float", "str", "bytes", "bool"),
    ),
    "collections": ("OrderedDict", "defaultdict", "Counter", "deque"),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "uuid": ("UUID",),
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "torch": ("Size", "device", "Tensor"),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch._utils": (
        "_rebuild_sparse_tensor",
        "_rebuild_nested_tensor",
        "_rebuild_wrapper_subclass",
    ),
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.serialization": ("_get_layout",),
    # torch 2.13 allows these by itself, torch 2.15 no longer does.
    "torch.nested._internal.nested_tensor": ("NestedTensor", "_rebuild_njt"),
    "numpy": ("ndarray", "dtype"),
    "numpy.random._pickle": (
        "__bit_generator_ctor",
        "__generator_ctor",
        "__randomstate_ctor",
    ),
    "numpy.random._mt19937": ("MT19937",),
    "numpy.random._pcg64": ("PCG64", "PCG64DXSM"),
    "numpy.random._philox": ("Philox",),
    "numpy.random._sfc64": ("SFC64",),
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
    # numpy 1 and 2 keep the same functions in different modules.
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "localckpt.state_dict.basic": ("_Hollow",),
    "localckpt.state_dict.marks": ("set_marks",),
    "localckpt.state_dict.sharded": ("restore_sharded",),
    "localckpt.state_dict.skeleton": ("_itself", "_restore_subclass"),
}

# Python 3.13 moved the classes, and 3.14 moved them back.
_MOVED = {"pathlib._local": "pathlib"}
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


class SafeGlobals:
    """The allow-list of one manager.

    Args:
        extra: Classes and functions allowed beyond the defaults.
    """

    def __init__(self, extra: Iterable[Any] = ()) -> None:
        self._extra = tuple(extra)

    def find(self, module: str, name: str) -> Any:
        """The object that a shard calls ``module.name``.

        Raises:
            UnsafeGlobalError: It is not allowed; the message says how to allow it.
        """
        module = _MOVED.get(module, module)
        if name in _VALUES.get(module, ()) or is_library_value(module, name):
            __import__(module)
            return _resolve(module, name)
        if (added := self.added(module, name)) is not None:
            return added
        found = _resolve(module, name) if module in sys.modules else None
        if isinstance(found, type) and (
            issubclass(found, TensorAwareStateDict)
            or (issubclass(found, tuple) and hasattr(found, "_fields"))
        ):
            return found
        # A memory format is pickled as "torch.channels_last" of some module that imports torch.
        if module == "torch" or name.startswith("torch."):
            constant = _resolve("torch", name.removeprefix("torch."))
            if isinstance(constant, _TORCH_CONSTANTS):
                return constant
        raise UnsafeGlobalError(
            f"the state refers to {module}.{name}, which may not be loaded from a file. If you "
            f"trust it, pass safe_globals=[{name}] to the manager or call "
            f"torch.serialization.add_safe_globals([{name}]), when saving and when loading"
        )

    def added(self, module: str, name: str) -> Any | None:
        """The object that the user allows by this name; ``None`` if there is none."""
        for item in (*self._extra, *torch.serialization.get_safe_globals()):
            allowed, full_name = item if isinstance(item, tuple) else (item, _full_name(item))
            if full_name == f"{module}.{name}":
                return allowed
        return None


def _resolve(module: str, name: str) -> Any:
    value: Any = sys.modules[module]
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _full_name(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"
