"""A store with two small checkpoints of one rank, and processes with little memory to read it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy

from localckpt import CheckpointingException
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.source import read_header, read_verified_record
from localckpt.state_dict.targets import find_targets
from localckpt.storage.files import FileSource
from tests.faults.forged import small_state
from tests.managers.jobs import make_manager
from tests.state_dict.states import assert_same

__all__ = [
    "NEWEST",
    "OLDER",
    "Growth",
    "escapes",
    "go_on",
    "limit_memory",
    "load",
    "write_store",
]

OLDER, NEWEST = 7, 8
_ROOM_NBYTES = 2 << 30


def write_store(root: Path) -> tuple[Path, bytes]:
    """A store with two checkpoints; the file of the newer one, and what is in it."""
    with make_manager("disk", root, "job", keep_last=2) as manager:
        for iteration in (OLDER, NEWEST):
            manager.save(small_state(iteration), iteration)
    _, path = sorted(root.rglob("*.safetensors"))
    return path, path.read_bytes()


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM_NBYTES, resource.RLIM_INFINITY))


class Growth:
    """By how many bytes this process has grown at most since this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._peak()

    def __call__(self) -> int:
        return self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def go_on(root: Path) -> None:
    """The job saves, and if it is not told that it cannot, that is there at the next start."""
    with make_manager("disk", root, "job", keep_last=2) as manager:
        iteration = NEWEST + 1
        try:
            if manager.find_latest() != -1:
                iteration = max(iteration, manager.load()[1].iteration + 1)
            manager.save(small_state(9), iteration)
        except CheckpointingException:
            return
    with make_manager("disk", root, "job", keep_last=2) as manager:
        assert manager.find_latest() == iteration
        assert_same(manager.load()[0], small_state(9))


def load(root: Path, claims_to_be_older: bool = False) -> str:
    """Find and load as a job does that starts; what it got."""
    with make_manager("disk", root, "job", keep_last=3) as manager:
        try:
            if manager.find_latest() == -1:
                return "nothing"
            state, ckpt_id = manager.load()
        except CheckpointingException as error:
            return f"{type(error).__name__}: {error}"
        if ckpt_id.iteration == OLDER and not claims_to_be_older:
            assert_same(state, small_state(OLDER))
            return "the older one"
        if isinstance(state, numpy.ndarray) and state.size < 100:
            # Its values are looked at, as a job would.
            assert len(repr(state))
        return "the forged one"


def escapes(image: bytes, path: Path) -> list[str]:
    """Errors that are none of ours, from all the ways of reading a file."""
    path.write_bytes(image)
    given = small_state(0)

    def restore(source: FileSource, into: Any = None) -> None:
        ImageReader(source, SafeGlobals()).restore(into)

    escaped = []
    for read in (
        read_header,
        read_verified_record,
        restore,
        lambda source: restore(source, find_targets(given)),
    ):
        source = FileSource(path)
        try:
            read(source)
        except CheckpointingException:
            pass
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            escaped.append(f"{type(error).__name__}: {error}")
        finally:
            source.close()
    return escaped
