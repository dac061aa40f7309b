"""Reader of NVRx's local checkpoints, for jobs that change from NVRx to localckpt.

Reading runs no code from a file: it uses torch's restricted unpickler with the allow-list of our
own checkpoints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from localckpt.errors import CorruptShardError, UnsafeGlobalError
from localckpt.integrations.nvrx.finder import CHECKPOINTING
from localckpt.state_dict.basic import BasicTensorAwareStateDict
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.failures import storage_errors

__all__ = ["find_nvrx_files", "read_nvrx_file"]

_FILE = re.compile(r"iter_(\d{7,})_(\d+)_local\.pt")
_BASIC = f"{CHECKPOINTING}.local.basic_state_dict.BasicTensorAwareStateDict"


def find_nvrx_files(root: str | os.PathLike[str], session_id: str, rank: int) -> dict[int, Path]:
    """Find NVRx's files of a rank on this node, by iteration, in the folders of all ranks."""
    folder = Path(root) / session_id
    found: dict[int, Path] = {}
    with storage_errors("look for NVRx's files in", folder):
        own_first = sorted(
            folder.glob("*/iter_*_local.pt"), key=lambda p: p.parent.name != f"{rank}"
        )
        for path in own_first:
            match = _FILE.fullmatch(path.name)
            if match is not None and path.parent.name.isdigit() and int(match[2]) == rank:
                found.setdefault(int(match[1]), path)
    return found


def read_nvrx_file(path: str | os.PathLike[str], safe_globals: Iterable[Any] = ()) -> Any:
    """Read the state from a file of NVRx's ``LocalCheckpointManager``.

    The tensors of a ``BasicTensorAwareStateDict`` are put on the GPU, if there is one. The tensors
    of other classes are in host memory until ``restore_tensor_device()``.

    ``safe_globals`` are allowed beyond those of our checkpoints.
    """
    with storage_errors("read", Path(path)), open(path, "rb") as file:
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            allowed = _allowed(names, SafeGlobals(safe_globals))
            file.seek(0)
            with torch.serialization.safe_globals([(value, n) for n, value in allowed.items()]):
                state = torch.load(file, map_location=_device(names), weights_only=True)
        except (MemoryError, UnsafeGlobalError):
            raise
        except Exception as error:
            raise CorruptShardError(
                f"{path} is not a local checkpoint of NVRx that can be read: {error}. It was left "
                f"as it is"
            ) from error
    if isinstance(state, BasicTensorAwareStateDict):
        # Rewrapped, since NVRx's class of this name pickles fewer attributes than ours has.
        return BasicTensorAwareStateDict(state.state_dict)
    return state


def _device(names: Iterable[str]) -> str:
    return "cuda" if _BASIC in names and torch.cuda.is_available() else "cpu"


def _allowed(names: Iterable[str], safe: SafeGlobals) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for full_name in names:
        module, _, name = full_name.rpartition(".")
        ours = full_name == _BASIC
        found[full_name] = BasicTensorAwareStateDict if ours else safe.find(module, name)
    return found
