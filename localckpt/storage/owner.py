"""Owners of files, in a form that a later process can check, and the notes that name them.

A process is identified by the machine's boot, its pid and its start time, so neither a reused
pid nor a changed clock takes a dead owner for a live one. Notes are small files beside the shards:
the node's name, a folder's owner, its epoch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localckpt.errors import MismatchError
from localckpt.lineage import Lineage
from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.storage.names import EPOCH_NAME, OWNER_NAME
from localckpt.storage.open_file import open_owned
from localckpt.storage.write import replace_file

__all__ = ["Owner", "Running", "epoch_note", "owner_of", "read_note", "write_note"]

_NUMBER = re.compile("[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Owner:
    """One process, for ever."""

    boot: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """The live process with this pid, if there is one."""
        try:
            # The second field, the command's name, may hold spaces and brackets.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] == "Z":
            return None
        return cls(_boot(), pid, int(fields[19]))

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        owner = cls.of(os.getpid())
        assert owner is not None
        return owner

    def is_alive(self) -> bool:
        """Return whether the process still runs, among those that share pids with this one."""
        return Owner.of(self.pid) == self

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read what ``str()`` of an owner gave; ``None`` for anything else."""
        boot, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        # No kernel counts further; what is longer is no process, nor a name in /proc.
        if not (boot and _NUMBER.fullmatch(pid) and _NUMBER.fullmatch(started)):
            return None
        return cls(boot, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.boot}-{self.pid}-{self.started}"


class Running:
    """The owners that run on this node, be it in a container with pids of its own.

    From inside a container, processes outside of it cannot be seen. Containers are looked at once,
    and only when some owner is not found outside of them.
    """

    def __init__(self) -> None:
        self._contained: frozenset[Owner] | None = None

    def __contains__(self, owner: Owner | None) -> bool:
        if owner is None or owner.boot != _boot():
            return False
        if owner.is_alive():
            return True
        if self._contained is None:
            self._contained = frozenset(_contained())
        return owner in self._contained


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]


def _contained() -> Iterator[Owner]:
    """Processes in containers of this node, as they know themselves."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text(errors="replace")
            _, *inner = status.partition("\nNSpid:")[2].partition("\n")[0].split() or [""]
            process = Owner.of(int(folder.name)) if inner else None
        except OSError:
            # It ended meanwhile.
            continue
        if process is not None:
            yield from (Owner(process.boot, int(pid), process.started) for pid in inner)


def owner_of(folder: Path) -> Owner | None:
    """The process that has taken a rank's folder, alive or not."""
    process, _, _ = read_note(folder / OWNER_NAME).partition("\n")
    return Owner.parse(process)


def epoch_note(folder: Path) -> tuple[str, Lineage | None]:
    """The number of the last epoch that began in a rank's folder, as text, and its lineage.

    Earlier versions noted the number alone. A lineage that cannot be read counts as none: headers
    tell it, too.
    """
    number, _, lineage_json = read_note(folder / EPOCH_NAME).partition("\n")
    try:
        return number, Lineage.from_json(json.loads(lineage_json)) if lineage_json else None
    except (MismatchError, ValueError, RecursionError):
        return number, None


def write_note(path: Path, text: str) -> None:
    """Replace a note; never written through a link in its place."""
    replace_file(path, text.encode(), 0o600)


def read_note(path: Path) -> str:
    """The text of a note; empty for what is no plain file, or not there."""
    try:
        file = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return ""
        raise
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return ""
        return os.read(file.fileno(), PAGE_NBYTES).decode(errors="replace")
