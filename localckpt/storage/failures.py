"""Conversion of errors of the operating system into errors that say what to do."""

from __future__ import annotations

import errno

from localckpt.errors import StorageError

KEPT = "Checkpoints saved before are as they were"
"""Advice on the topic ``kept``, on what a failure has not changed."""

_ADVICE = {
    errno.ENOSPC: "it is full: free space, keep fewer checkpoints, or choose a larger directory",
    errno.EDQUOT: "the quota is used up: free space, keep fewer checkpoints, or raise the quota",
    errno.EROFS: "it is mounted read-only: choose a directory that can be written",
    errno.EACCES: "permission denied: give this user a directory of its own",
    errno.EPERM: "permission denied: give this user a directory of its own",
    errno.EIO: "the device reports an I/O error: replace it, or choose another directory",
    errno.ENOENT: "it is not there: was the directory removed while the job ran?",
    errno.ELOOP: "it is a symbolic link, which the store does not follow",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter session_id",
}


class storage_errors:
    """Context that raises :class:`StorageError`, "could not <what> <path>", for any OSError inside.

    Not a generator with ``contextmanager``: since Python 3.12, an error that passes through one is
    part of a reference cycle, which keeps the variables of all frames in its traceback, and with
    them memory of the store, until the garbage collector runs. ``full`` is what to do if the
    file system is full.
    """

    __slots__ = ("_full", "_path", "_what")

    def __init__(self, what: str, path: object, full: str = _ADVICE[errno.ENOSPC]) -> None:
        self._what = what
        self._path = path
        self._full = full

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, OSError):
            advices = _ADVICE | {errno.ENOSPC: self._full}
            advice = advices.get(error.errno or 0, "see the system's error above")
            raise StorageError(
                f"could not {self._what} {self._path}: {error.strerror or error} - {advice}"
            ).advised("kept", KEPT) from error
