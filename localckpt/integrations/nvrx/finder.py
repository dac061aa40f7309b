"""Import hook that replaces NVRx's checkpointing modules.

Only ``nvidia_resiliency_ext.checkpointing`` and its submodules are replaced. If NVRx is installed,
the rest of it (in-process restart, straggler detection) is imported as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from localckpt.errors import CheckpointingException
from localckpt.integrations.versions import require

__all__ = ["CHECKPOINTING", "MODULES", "PACKAGE", "VERSION", "install", "is_installed"]

PACKAGE = "nvidia_resiliency_ext"
CHECKPOINTING = f"{PACKAGE}.checkpointing"

VERSION = "0.6.0"
"""NVRx release with these names, as ``__version__`` for Megatron-Core."""

_OURS = "localckpt.integrations.nvrx"
_ERRORS = "localckpt.errors"
_PLAN = "localckpt.replication.exchange"
_STRATEGIES = "localckpt.replication.strategies"
_CALLERS = "localckpt.async_save.callers"

_BASE_MANAGER = {
    "BaseCheckpointManager": "localckpt.managers.local",
    "CheckpointingException": _ERRORS,
    "CkptID": "localckpt.ids",
    "SameMachineReplicationException": _ERRORS,
}
_GROUPS = {
    "ExchangePlan": _PLAN,
    "ExchangePlanEntry": _PLAN,
    "GroupWrapper": f"{_OURS}.groups",
    "ProcessGroupLike": f"{_OURS}.groups",
    "parse_group_sequence": "localckpt.replication.groups",
}
_STATE = {"TensorAwareStateDict": "localckpt.state_dict.basic"}

MODULES: dict[str, dict[str, str]] = {
    CHECKPOINTING: {},
    f"{CHECKPOINTING}.local": {},
    f"{CHECKPOINTING}.local.base_state_dict": _STATE,
    f"{CHECKPOINTING}.local.basic_state_dict": {
        "BasicTensorAwareStateDict": "localckpt.state_dict.basic",
        **_STATE,
    },
    f"{CHECKPOINTING}.local.ckpt_managers": {},
    f"{CHECKPOINTING}.local.ckpt_managers.base_manager": _BASE_MANAGER,
    f"{CHECKPOINTING}.local.ckpt_managers.local_manager": {
        "LocalCheckpointManager": f"{_OURS}.manager",
        **_BASE_MANAGER,
    },
    f"{CHECKPOINTING}.local.replication": {},
    f"{CHECKPOINTING}.local.replication.group_utils": _GROUPS,
    f"{CHECKPOINTING}.local.replication.strategies": {
        "CliqueReplicationStrategy": _STRATEGIES,
        "LazyCliqueReplicationStrategy": _STRATEGIES,
        "NoReplicasAvailableError": _ERRORS,
        "ReplicationStrategy": _STRATEGIES,
        **_GROUPS,
    },
    f"{CHECKPOINTING}.local.replication.utils": {"zip_strict": f"{_OURS}.groups"},
    f"{CHECKPOINTING}.async_ckpt": {},
    f"{CHECKPOINTING}.async_ckpt.core": {
        "AsyncCaller": _CALLERS,
        "AsyncCallsQueue": f"{_OURS}.queue",
        "AsyncRequest": "localckpt.async_save.request",
        "PersistentAsyncCaller": _CALLERS,
        "TemporalAsyncCaller": _CALLERS,
        "abort_nvrx_checkpoint": f"{_OURS}.queue",
    },
    f"{CHECKPOINTING}.async_ckpt.filesystem_async": {
        "FileSystemWriterAsync": f"{_OURS}.global_save",
        "_get_write_results_queue": f"{_OURS}.global_save",
        "_results_queue": f"{_OURS}.global_save",
        "get_write_results_queue": f"{_OURS}.global_save",
    },
    f"{CHECKPOINTING}.async_ckpt.state_dict_saver": {
        "CheckpointMetadataCache": f"{_OURS}.global_save",
        "save_state_dict_async_finalize": f"{_OURS}.global_save",
        "save_state_dict_async_plan": f"{_OURS}.global_save",
    },
    f"{CHECKPOINTING}.async_ckpt.cached_metadata_filesystem_reader": {
        "CachedMetadataFileSystemReader": f"{_OURS}.global_save",
    },
}
"""For each module of NVRx its names, and the module of localckpt that defines each."""

# Modules of an installed NVRx that work with our queue, and make no object that would not fit ours.
_KEPT = {f"{CHECKPOINTING}.utils", f"{CHECKPOINTING}.async_ckpt.torch_ckpt"}

# A module of Megatron-Core whose class takes NVRx's class as its base, if the import finds it.
_MEGATRON_STATE = "megatron.core.dist_checkpointing.tensor_aware_state_dict"


def install() -> None:
    """Install the import hook. May be called twice.

    Raises:
        CheckpointingException: NVRx's own modules are imported already, or Megatron-Core has tried
            to import them. Nothing was changed.
        UnsupportedVersionError: Megatron-Core is older than what is supported. Nothing was changed.
    """
    if is_installed():
        return
    require("megatron-core")
    if there := sorted(name for name in sys.modules if _is_below(name, CHECKPOINTING)):
        raise CheckpointingException(
            f"{there[-1]} is imported already, and objects made by it would not fit ours. Call "
            f"localckpt.integrations.nvrx.install() before the first import of NVRx or Megatron, "
            f"or start the program by: python -m localckpt.integrations.nvrx run"
        )
    if _MEGATRON_STATE in sys.modules:
        raise CheckpointingException(
            f"{_MEGATRON_STATE} is imported already, and has not found NVRx. Call "
            f"localckpt.integrations.nvrx.install() before Megatron-Core is imported, or start the "
            f"program by: python -m localckpt.integrations.nvrx run"
        )
    sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Return whether the import hook is installed in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == PACKAGE:
            return _package_spec(_true_spec(fullname, path))
        if not _is_below(fullname, CHECKPOINTING):
            return None
        if fullname in MODULES:
            return _spec(fullname)
        if fullname in _KEPT:
            folders = fullname.split(".")[1:-1]
            path = ["/".join([root, *folders]) for root in sys.modules[PACKAGE].__path__]
            if true := _true_spec(fullname, path):
                return true
        raise ModuleNotFoundError(
            f"{fullname}: localckpt answers for {CHECKPOINTING} and has no such module; it has "
            f"{', '.join(sorted(MODULES))}",
            name=fullname,
        )


def _package_spec(true: ModuleSpec | None) -> ModuleSpec:
    """Return the spec of the installed NVRx, which has more than checkpointing, or one of ours."""
    if true is not None and true.origin is not None:
        return true
    spec = _spec(PACKAGE)
    if true is not None and spec.submodule_search_locations is not None:
        # A namespace package, a folder without __init__.py, lacks the version that Megatron-Core
        # reads, so use our module with the folder in its search path.
        spec.submodule_search_locations.extend(true.submodule_search_locations or ())
    return spec


def _true_spec(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
    specs = (finder.find_spec(fullname, path) for finder in others)
    return next((spec for spec in specs if spec is not None), None)


def _spec(fullname: str) -> ModuleSpec:
    is_package = fullname == PACKAGE or any(
        name != fullname and _is_below(name, fullname) for name in MODULES
    )
    return ModuleSpec(fullname, _Loader(), origin="localckpt", is_package=is_package)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"localckpt in place of NVRx's {name}."
        if name == PACKAGE:
            module.__version__ = VERSION  # type: ignore[attr-defined]
        for public, home in MODULES.get(name, {}).items():
            setattr(module, public, getattr(import_module(home), public))
