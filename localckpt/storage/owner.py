"""Owners of files, identified so that a later process can check them, and small note files.

A process is identified by the boot ID of the machine, its pid and its start time, so neither a
reused pid nor a changed clock makes a dead owner look alive. Notes are small files: the node's
name, a folder's owner, and what ``notes.py`` says.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localckpt.memory.host_memory import PAGE_NBYTES
from localckpt.storage.files import open_owned
from localckpt.storage.names import OWNER_NAME
from localckpt.storage.write import replace_file

_NUMBER = re.compile("[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Owner:
    """Identity of a process that no later process shares."""

    boot: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """Return the live process with this pid, if there is one."""
        try:
            # Split after the last bracket: the second field, "(command)", may hold spaces.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] == "Z":
            return None
        return cls(_boot(), pid, int(fields[19]))

    @classmethod
    def me(cls) -> Owner:
        owner = cls.of(os.getpid())
        assert owner is not None
        return owner

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Parse the output of ``str()``; return ``None`` for any other text."""
        boot, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        # Numbers of more than 20 digits exceed 64 bits, so no process has them.
        if not (boot and _NUMBER.fullmatch(pid) and _NUMBER.fullmatch(started)):
            return None
        return cls(boot, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.boot}-{self.pid}-{self.started}"


class Running:
    """Set of the owners that run on this node, in this process's container or one inside of it."""

    def __init__(self) -> None:
        self._contained: frozenset[Owner] | None = None

    def __contains__(self, owner: Owner | None) -> bool:
        if owner is None or owner.boot != _boot():
            return False
        # In this process's own pid namespace.
        if Owner.of(owner.pid) == owner:
            return True
        if self._contained is None:
            self._contained = frozenset(_contained())
        return owner in self._contained


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]


def _contained() -> Iterator[Owner]:
    """Yield the processes in inner pid namespaces, with their pids there."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text(errors="replace")
            _, *inner = status.partition("\nNSpid:")[2].partition("\n")[0].split() or [""]
            process = Owner.of(int(folder.name)) if inner else None
        except OSError:
            # The process has ended meanwhile.
            continue
        if process is not None:
            yield from (Owner(process.boot, int(pid), process.started) for pid in inner)


def owner_of(folder: Path) -> Owner | None:
    """Read the process, alive or not, that has claimed a rank's folder."""
    process, _, _ = read_note(folder / OWNER_NAME).partition("\n")
    return Owner.parse(process)


def write_note(path: Path, text: str) -> None:
    """Replace a note, or a symbolic link in its place, by a new file."""
    replace_file(path, text.encode(), 0o600)


def read_note(path: Path, most_nbytes: int = PAGE_NBYTES) -> str:
    """Read the text of a note; empty if it is missing or no regular file."""
    try:
        file = open_owned(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return ""
        raise
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return ""
        return os.read(file.fileno(), most_nbytes).decode(errors="replace")
