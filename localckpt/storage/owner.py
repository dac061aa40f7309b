"""Which process owns a file, in a form that a later process can check.

A process is told by the machine's boot, its pid and its start time together, so neither a reused
pid nor a changed clock takes a dead owner for a live one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Owner", "Running"]


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
        """Whether the process still runs, among those that share pids with this one."""
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
