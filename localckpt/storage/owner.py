"""Which process owns a file, in a form that a later process can check.

A process is told by the machine's boot, its pid and its start time together, so neither a reused
pid nor a changed clock takes a dead owner for a live one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Owner"]


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
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        return cls(boot[:12], pid, int(fields[19]))

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        owner = cls.of(os.getpid())
        assert owner is not None
        return owner

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return Owner.of(self.pid) == self

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read what ``str()`` of an owner gave; ``None`` for anything else."""
        boot, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        if not (boot and pid.isdecimal() and started.isdecimal()):
            return None
        return cls(boot, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.boot}-{self.pid}-{self.started}"
