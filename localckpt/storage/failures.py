"""Turns what the operating system refuses into an error that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localckpt.errors import StorageError

__all__ = ["storage_errors"]

_ADVICE = {
    errno.ENOSPC: "it is full: free space, lower keep_last, or choose a larger directory",
    errno.EDQUOT: "the quota is used up: free space, lower keep_last, or raise the quota",
    errno.EROFS: "it is mounted read-only: choose a directory that can be written",
    errno.EACCES: "permission denied: give this user a directory of its own",
    errno.EPERM: "permission denied: give this user a directory of its own",
    errno.EIO: "the device reports an I/O error: replace it, or choose another directory",
    errno.ENOENT: "it is not there: was the directory removed while the job ran?",
    errno.ELOOP: "it is a symbolic link, which the store does not follow",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter session_id",
}


@contextmanager
def storage_errors(what: str, path: str | Path) -> Iterator[None]:
    """Raise :class:`StorageError` for any OSError inside.

    Args:
        what: What is being done, as in "could not <what> <path>".
        path: On which file or directory.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "see the system's error above")
        raise StorageError(
            f"could not {what} {path}: {error.strerror or error} - {advice}. "
            f"Checkpoints saved before are as they were"
        ) from error
