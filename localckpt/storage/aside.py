"""Bad copies are renamed, never deleted, and carry along what was wrong with them.

One that is found to be good after all gets its name back.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from localckpt.storage.failures import storage_errors
from localckpt.storage.names import CORRUPT, SHARD
from localckpt.storage.write import sync_folder

__all__ = ["put_back", "set_aside", "why_set_aside"]

logger = logging.getLogger(__name__)

_WHY, _WHY_NBYTES = "user.localckpt.why", 1000
_ASIDE_AGAIN = re.compile(rf"(?<={re.escape(SHARD)})\.[0-9a-f]{{8}}$")


def set_aside(path: Path, why: str, *, stays: bool = False) -> None:
    """Rename a bad file, so that it is not found again but can be looked at.

    Args:
        path: The file.
        why: What is wrong with it.
        stays: Give it a second name instead, since a good one is about to take its name.
    """
    aside = Path(f"{path}{CORRUPT}")
    if aside.exists():
        # A shard that got a new copy, which is bad too.
        aside = Path(f"{path}.{secrets.token_hex(4)}{CORRUPT}")
    try:
        if stays:
            os.link(path, aside)
        else:
            os.rename(path, aside)
    except FileNotFoundError:
        logger.info("%s is gone: another rank set it aside, or it was removed", path)
    except OSError as error:
        # The copy is not used in any case; one rank that raised here would leave the others alone.
        logger.error("%s is bad (%s), and could not be set aside: %s", path, why, error)
    else:
        logger.warning("%s is set aside as *%s: %s", path, CORRUPT, why)
        # Not every file system has attributes, and the log has it in any case.
        with suppress(OSError):
            os.setxattr(
                aside, _WHY, why.encode(errors="replace")[:_WHY_NBYTES], follow_symlinks=False
            )


def why_set_aside(path: Path) -> str:
    """What was wrong with a file that was set aside."""
    try:
        return os.getxattr(path, _WHY, follow_symlinks=False).decode(errors="replace")
    except OSError:
        return "it was set aside as damaged"


def put_back(path: Path) -> Path:
    """Give a file that was set aside its name again, or one like it if that is taken.

    Returns:
        The name.

    Raises:
        StorageError: It cannot be renamed; it is where it was.
    """
    name = _ASIDE_AGAIN.sub("", path.name.removesuffix(CORRUPT))
    back = path.with_name(name)
    with storage_errors("put back", path):
        try:
            # Unlike a rename, this never takes the place of another shard.
            os.link(path, back)
        except FileExistsError:
            back = path.with_name(f"{name.removesuffix(SHARD)}.{secrets.token_hex(4)}{SHARD}")
            os.link(path, back)
        with suppress(OSError):
            os.removexattr(back, _WHY, follow_symlinks=False)
        path.unlink()
        sync_folder(path.parent)
    return back
