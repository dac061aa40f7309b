"""Allow-list of the classes and functions that a shard may name: loading it runs no other code.

Allowed are the types listed here, the user's own, named tuples and TensorAwareStateDicts that the
program has imported. Never allowed is a function that calls its arguments or runs code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from localckpt.errors import UnsafeGlobalError
from localckpt.state_dict.basic import TensorAwareStateDict


class Name(NamedTuple):
    """Name of a class or function in a pickle."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_VALUES: dict[str, tuple[str, ...]] = {
    "builtins": (
        *("set", "frozenset", "complex", "slice", "range", "list", "dict", "tuple"),
        *("int", "float", "str", "bytes", "bool", "Ellipsis", "NotImplemented"),
    ),
    "collections": ("OrderedDict", "defaultdict", "Counter", "deque"),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "uuid": ("UUID",),
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "torch": ("Size", "device", "Tensor", "dtype", "Generator"),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch._utils": ("_rebuild_sparse_tensor", "_rebuild_wrapper_subclass"),
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.serialization": ("_get_layout",),
    # Part of torch's own defaults (get_safe_globals()) in torch 2.13, but not in torch 2.8.
    "torch.distributed.tensor.placement_types": ("_StridedShard",),
    "numpy": ("ndarray", "dtype"),
    "localckpt.state_dict.basic": ("_Hollow",),
    "localckpt.state_dict.foreign_values": (
        *("restore_array", "restore_number", "restore_dtype", "restore_generator"),
        *("restore_bit_generator", "restore_random", "restore_seeds", "type_of_constant"),
    ),
    "localckpt.state_dict.marks": ("set_marks",),
    "localckpt.state_dict.replicated": ("given",),
    "localckpt.state_dict.sharded": ("restore_sharded",),
    "localckpt.state_dict.skeleton": ("_itself", "_restore_subclass"),
}

# Allowed while the running program has Megatron-Core imported.
_MEGATRON = {
    "megatron.core.dist_checkpointing.tensor_aware_state_dict": ("MCoreTensorAwareStateDict",),
    "megatron.core.dist_checkpointing.mapping": (
        *("ShardedTensor", "ShardedObject", "ShardedTensorFactory", "LocalNonpersistentObject"),
    ),
    # Classes in the command-line arguments, which Megatron-LM saves with its state.
    "megatron.core.enums": ("ModelType", "Fp4Recipe", "Fp8Recipe"),
    "megatron.core.transformer.enums": (
        *("AttnBackend", "AttnMaskType", "AttnType", "CudaGraphModule", "CudaGraphScope"),
        *("InferenceCudaGraphScope", "LayerType", "ModelType"),
    ),
    "megatron.core.optimizer.optimizer_config": (
        *("AdamOptimizerConfig", "OptimizerConfig", "ParamKey", "SGDOptimizerConfig"),
    ),
    "megatron.core.rerun_state_machine": (
        *("Call", "Caller", "QuickStats", "RerunDiagnostic", "RerunMode", "RerunState"),
        "RerunValidationStatus",
    ),
    "signal": ("Signals",),
    # Class of Transformer Engine's extra state.
    "_io": ("BytesIO",),
}

# Python 3.13 moved pathlib's classes to pathlib._local, and 3.14 moved them back.
_MOVED = {"pathlib._local": "pathlib"}
# Packages of torch that add their classes to its own list once they are imported.
_LISTING = ("torch.distributed.tensor", "torch.distributed.device_mesh")
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


class SafeGlobals:
    """Allow-list of one manager, with classes and functions beyond the defaults."""

    def __init__(self, extra: Iterable[Any] = ()) -> None:
        self._extra = [_named(item) for item in extra]
        unsafe = [
            f"{name}: it {reason}"
            for name, item in self._extra
            if (reason := _why_unsafe(name, item))
        ]
        if unsafe:
            raise UnsafeGlobalError(
                f"safe_globals= cannot allow {'; nor '.join(unsafe)}. With it, reading a file "
                f"would run what the file says. Nothing was done"
            )

    def also(self, kinds: Iterable[type]) -> SafeGlobals:
        more = SafeGlobals(kinds)
        more._extra = [*self._extra, *more._extra]
        return more

    def find(self, module: str, name: str) -> Any:
        """Return the object that a shard names ``module.name``."""
        module = _MOVED.get(module, module)
        libraries = _MEGATRON if "megatron.core" in sys.modules else {}
        if name in _VALUES.get(module, ()) or name in libraries.get(module, ()):
            __import__(module)
            return _resolve(module, name)
        for package in _LISTING:
            if f"{module}.".startswith(f"{package}.") and torch.distributed.is_available():
                __import__(package)
        by_torch = map(_named, torch.serialization.get_safe_globals())
        for full_name, item in (*self._extra, *by_torch):
            if full_name == f"{module}.{name}" and not _why_unsafe(full_name, item):
                return item
        found = _resolve_if_imported(module, name)
        if isinstance(found, type) and (
            issubclass(found, TensorAwareStateDict | numpy.generic)
            or (issubclass(found, tuple) and hasattr(found, "_fields"))
        ):
            return found
        # A memory format is pickled as "torch.channels_last" in some module that imports torch.
        if module == "torch" or name.startswith("torch."):
            constant = _resolve("torch", name.removeprefix("torch."))
            if isinstance(constant, _TORCH_CONSTANTS):
                return constant
        raise self.refusal([Name(module, name)])

    def refusal(self, names: Sequence[Name], places: Sequence[str] = ()) -> UnsafeGlobalError:
        """Build the error that says why a state is refused, and what to do.

        ``places`` has for each name a text with the name and its place, where these are known.
        """
        placed = places or [str(name) for name in names]
        text = f"the state refers to {', '.join(placed)}, which may not be loaded from a file."
        reasons = {
            name: reason
            for name in names
            if (reason := _why_unsafe(str(name), _resolve_if_imported(*name)))
        }
        if trusted := [name.name for name in names if name not in reasons]:
            listed = ", ".join(trusted)
            text += (
                f" If you trust {'it' if len(trusted) == 1 else 'them'}, pass "
                f"safe_globals=[{listed}], or call "
                f"torch.serialization.add_safe_globals([{listed}]), when saving and when loading."
            )
        allowed = (*self._extra, *map(_named, torch.serialization.get_safe_globals()))
        for name in names:
            # A class of the script that was run, and of the same script where it is imported.
            last = name.name.rpartition(".")[2]
            others = (full for full, _ in allowed if full.rpartition(".")[2] == last)
            if (other := next(others, None)) is not None:
                text += (
                    f" {other} is allowed, and was saved as {name}, as where the script that "
                    f"defines it was run then and is imported now: pass "
                    f"safe_globals=[({last}, {str(name)!r})]."
                )
        for name, reason in reasons.items():
            text += f" {name} cannot be allowed: it {reason}."
        error = UnsafeGlobalError(text.removesuffix("."))
        error.names = tuple(names)
        return error


def _named(item: Any) -> tuple[str, Any]:
    """Return the name under which a pickle stores an item of an allow-list, and the item."""
    if isinstance(item, tuple):
        item, full_name = item
        return str(full_name), item
    return f"{item.__module__}.{item.__qualname__}", item


def _resolve(module: str, name: str) -> Any:
    value: Any = sys.modules[module]
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _resolve_if_imported(module: str, name: str) -> Any:
    return _resolve(module, name) if module in sys.modules else None


# Texts for names that are never allowed: an unpickler calls an object with arguments from the file,
# so with one of these the file could run any code.

_ANOTHER_VALUE = "save the plain values that your program makes the object of, and make it anew"
_REASONS = {
    "getattr": "gives any attribute of any object, to be called: save a name, and look it up "
    "after loading",
    "partial": "calls any function: save the function's name and its arguments (of a defaultdict, "
    "a plain dict), and make it anew after loading",
    "eval": "runs Python text: save the value that it gives",
    "type": "makes classes: save the name of the class, and look it up after loading",
}
_ALIKE = {
    **dict.fromkeys(("attrgetter", "itemgetter", "methodcaller", "setattr", "delattr"), "getattr"),
    **dict.fromkeys(("partialmethod", "reduce"), "partial"),
    **dict.fromkeys(("exec", "compile"), "eval"),
    **dict.fromkeys(("FunctionType", "LambdaType", "CodeType", "MethodType", "super"), "type"),
}
_UNSAFE_MODULES = frozenset(
    {
        *("functools", "operator", "_operator", "_functools", "importlib", "_frozen_importlib"),
        *("os", "posix", "nt", "sys", "subprocess", "_posixsubprocess", "shutil", "pty", "signal"),
        *("pickle", "_pickle", "marshal", "shelve", "copyreg", "cloudpickle", "dill", "joblib"),
        *("codeop", "runpy", "pdb", "bdb", "timeit", "ctypes", "_ctypes", "cffi", "inspect"),
        *("pkgutil", "types", "socket", "urllib", "http", "ftplib", "io", "_io", "tempfile"),
        *("webbrowser", "asyncio", "multiprocessing", "concurrent", "threading", "_thread"),
    }
)
_UNSAFE_PREFIXES = (
    *("torch.load.", "torch.serialization.load.", "torch.storage._load_from_bytes.", "torch.jit."),
    *("torch.hub.", "torch.package.", "torch.fx.", "torch.ops.", "torch.utils.cpp_extension."),
    *("torch._inductor.", "torch._dynamo.", "torch.multiprocessing.", "torch.distributed.rpc."),
    *("numpy.load.", "numpy.f2py.", "numpy.testing."),
)
_SAFE_OF_THOSE = frozenset(
    {
        *("types.SimpleNamespace", "types.MappingProxyType"),
        *("builtins.bytearray", "builtins.object"),
        *(f"builtins.{name}" for name in _VALUES["builtins"]),
    }
)


def _why_unsafe(full_name: str, item: Any) -> str | None:
    """Return why a file may never name an object, and what to save instead; ``None`` if it may."""
    names = [full_name]
    if callable(item) and isinstance(getattr(item, "__qualname__", None), str):
        # The object may be defined under another name than full_name.
        names.append(f"{item.__module__}.{item.__qualname__}")
    return next((reason for name in names if (reason := _reason(name))), None)


def _reason(full_name: str) -> str | None:
    module, _, name = full_name.partition(".")
    if full_name in _SAFE_OF_THOSE or not (
        module in _UNSAFE_MODULES
        or f"{full_name}.".startswith(_UNSAFE_PREFIXES)
        or (module == "builtins" and not _is_exception(name))
    ):
        return None
    last = name.rpartition(".")[2]
    reason = _REASONS.get(_ALIKE.get(last, last))
    return reason or f"runs code, or reaches beyond the checkpoint: {_ANOTHER_VALUE}"


def _is_exception(name: str) -> bool:
    found = _resolve("builtins", name)
    return isinstance(found, type) and issubclass(found, BaseException)
