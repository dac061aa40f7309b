"""Folders in which no other user can replace a file, made and checked by descriptor.

A folder is refused if another user owns it, or can write to it. The folder that a user names may
have the sticky bit, as ``/tmp``: nobody can then replace what others have made there. Where a team
shares its storage, the set-group-ID bit of a folder says so: its group owns what is in it.
"""

from __future__ import annotations

import logging
import os
import pwd
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from localckpt.errors import StorageError

logger = logging.getLogger(__name__)

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_own_folders(
    named: Path, *below: str, shares: bool = False, may_be_sticky: bool = True
) -> None:
    """Make the folder that a user named, and one in the other below it, and check them all.

    A symbolic link to the named one is followed if it is this user's, or root's. ``shares``: this
    user's groups may write there. ``may_be_sticky``: others may make files in the named folder.
    Raises OSError, and StorageError if another user can replace what is in a folder.
    """
    for path in (named, *named.parents):
        if path.is_symlink() and not path.exists():
            raise StorageError(
                f"{path} is a link to {os.readlink(path)}, which is not there: make that, or "
                f"remove the link. Nothing was changed"
            )
    for missing in reversed([p for p in (named, *named.parents) if not os.path.lexists(p)]):
        above = os.open(missing.parent, _OPEN)
        try:
            _make(missing, 0o700 if missing == named else 0o755, above)
        finally:
            os.close(above)
    _check_way_to(named)
    folder, path = os.open(named, _OPEN), named
    try:
        _check(path, folder, is_named=True, shares=shares, may_be_sticky=may_be_sticky)
        for name in below:
            path /= name
            _make(path, folder_mode(folder) if shares else 0o700, folder)
            inner = _open_below(path, folder)
            os.close(folder)
            folder = inner
            _check(path, folder, is_named=False, shares=shares, may_be_sticky=False)
    finally:
        os.close(folder)


def folder_mode(parent: Path | int) -> int:
    """Return the mode of a folder to make in another one, whose group may own it, too."""
    mode = os.stat(parent).st_mode
    return 0o700 | (mode & 0o070 if mode & stat.S_ISGID else 0)


def file_mode(folder: Path) -> int:
    """Return the mode of a file to make in a folder, by the rule of :func:`folder_mode`."""
    return folder_mode(folder) & 0o666


def open_below(folder: Path, *names: str) -> int:
    """Open a folder below another one; StorageError if a link is in the place of a folder."""
    opened = os.open(folder, _OPEN)
    for name in names:
        folder /= name
        try:
            inner = _open_below(folder, opened)
        finally:
            os.close(opened)
        opened = inner
    return opened


def require_own_file(path: Path) -> None:
    """Raise StorageError if a file in a checked folder is another user's regular file.

    The folder's owner counts as this user: root cleans up in stores of others, and some file
    systems give all files one owner. So does the group of a folder with the set-group-ID bit.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    folder = path.parent.stat()
    mine = (os.geteuid(), 0, folder.st_uid)
    is_teams = bool(folder.st_mode & stat.S_ISGID) and status.st_gid == folder.st_gid
    if stat.S_ISREG(status.st_mode) and status.st_uid not in mine and not is_teams:
        raise StorageError(
            f"{path} is a file of user {_user(status.st_uid)}, and this is user "
            f"{_user(os.geteuid())}: give this job a directory of its own. Nothing was changed"
        )


def lock_holder(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        return f"who holds it is not known: {error.strerror}"
    owner = f"the file is of user {_user(status.st_uid)}"
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            *device, inode = fields[-3].split(":")
            major, minor = (int(part, 16) for part in device)
            if (os.makedev(major, minor), int(inode)) == (status.st_dev, status.st_ino):
                pid = int(fields[-4])
                if pid < 1:
                    return f"{owner}, and a process of another host or container holds its lock"
                holder = _user(os.stat(f"/proc/{pid}").st_uid)
                return f"{owner}, and process {pid} of user {holder} holds its lock"
    return f"{owner}, and no process that can be seen from here holds its lock"


def _make(path: Path, mode: int, within: int) -> None:
    """Make a folder durably, by its name in the folder that holds it, if it is not there."""
    try:
        os.mkdir(path.name, mode, dir_fd=within)
        os.fsync(within)
    except FileExistsError:
        pass
    except OSError as error:
        error.filename = str(path)
        raise


def _open_below(path: Path, within: int) -> int:
    if stat.S_ISLNK(os.stat(path.name, dir_fd=within, follow_symlinks=False).st_mode):
        raise StorageError(f"{path} is a symbolic link: remove it. Nothing was changed")
    return os.open(path.name, _OPEN | os.O_NOFOLLOW, dir_fd=within)


def _check_way_to(path: Path) -> None:
    """Check the links that lead to a folder, and warn of parents that all users may change."""
    mine = (os.geteuid(), 0)
    for link in (path, *path.parents):
        status = link.lstat()
        # On the way to it a link may be an administrator's, where not all users can make one.
        may_be_anybodys = link == path or link.parent.stat().st_mode & stat.S_IWOTH
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in mine and may_be_anybodys:
            raise StorageError(
                f"{link} is a symbolic link of user {_user(status.st_uid)}, who may change where "
                f"it leads: choose another directory. Nothing was changed"
            )
    for parent in path.resolve().parents:
        above = parent.stat()
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            logger.warning(
                "any user may rename %s, or what leads to it, since %s can be written by all: run "
                "chmod +t %s, or choose another directory",
                *(path, parent, parent),
            )


def _check(path: Path, folder: int, *, is_named: bool, shares: bool, may_be_sticky: bool) -> None:
    status, mine = os.fstat(folder), os.geteuid()
    mode, is_in_group = status.st_mode, shares and status.st_gid in (os.getegid(), *os.getgroups())
    writers = mode & (stat.S_IWOTH if is_in_group else stat.S_IWOTH | stat.S_IWGRP)
    is_teams = is_in_group and bool(mode & stat.S_ISGID)
    is_ours = status.st_uid == mine or (is_named and status.st_uid == 0) or is_teams
    if not writers and (is_ours or _makes_files_of(status.st_uid, folder)):
        return
    if may_be_sticky and is_ours and mode & stat.S_ISVTX:
        return
    remedy = "remove it, make it yours (chown, chmod 700)"
    if status.st_uid == mine:
        less = "o-w" if is_in_group else "go-w"
        remedy = f"make it so (chmod 700 or chmod {less}) if all that is in it is yours"
    elif status.st_uid == 0:
        remedy = "give a new directory below it"
    raise StorageError(
        f"{path} is not this user's alone (owner {_user(status.st_uid)}, mode "
        f"{stat.S_IMODE(mode):o}; this is user {_user(mine)}), so another user can replace what "
        f"is in it: {remedy}, or choose another directory. Nothing was changed"
    )


def _makes_files_of(uid: int, folder: int) -> bool:
    """Return whether what this user makes belongs to ``uid``, as file systems may have it."""
    name = f".localckpt-{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        probe = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.fstat(probe).st_uid == uid
    finally:
        os.close(probe)
        os.unlink(name, dir_fd=folder)


def _user(uid: int) -> str:
    with suppress(KeyError):
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    return str(uid)
