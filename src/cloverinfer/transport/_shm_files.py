"""Segments under /dev/shm: making, mapping, unlinking them, and telling whose owner is dead.

Names are ``cloverinfer-<pid>-<pid namespace><random>-<what>``: whoever finds one knows which
process must live for it to be of use. What a segment holds is not known here.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets

from ..core.errors import TransportError

ROOT = "/dev/shm"
_OWNED = re.compile(r"cloverinfer-(\d+)-([0-9a-f]{8})[0-9a-f]+-\w+")
_STARTED, _STATE = 19, 0
"""Fields of /proc/<pid>/stat, counted from the one after the command."""


def new_prefix() -> str:
    """What the names of one endpoint's segments begin with."""
    return f"cloverinfer-{os.getpid()}-{_pid_namespace()}{secrets.token_hex(6)}"


def _pid_namespace() -> str:
    """Tells pids of this namespace from those of containers that share /dev/shm: 8 hex digits."""
    return f"{os.stat('/proc/self/ns/pid').st_ino & 0xFFFFFFFF:08x}"


def create_segment(name: str, nbytes: int) -> mmap.mmap:
    """A new segment of zeroes, with all its memory taken now: a full /dev/shm is a
    ``TransportError`` here rather than a bus error later.
    """
    path = os.path.join(ROOT, name)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TransportError(f"cannot make {path}: {error.strerror}") from error
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        unlink(name)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise TransportError(
                f"{ROOT} has no room for {nbytes} bytes; make it larger (docker: --shm-size) "
                "or configure smaller pools"
            ) from error
        raise TransportError(f"cannot take {nbytes} bytes of {ROOT}: {error.strerror}") from error
    finally:
        os.close(fd)


def open_segment(name: str) -> mmap.mmap:
    """Maps a segment that this user made, in whichever process."""
    path = os.path.join(ROOT, name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TransportError(f"cannot open {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_size == 0:
            raise TransportError(f"{path} is not a segment of this user")
        return mmap.mmap(fd, status.st_size)
    except OSError as error:
        raise TransportError(f"cannot map {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def publish(unfinished: str, name: str) -> None:
    """Gives a segment its final name, under which it is found whole or not at all."""
    try:
        os.rename(os.path.join(ROOT, unfinished), os.path.join(ROOT, name))
    except OSError as error:
        raise TransportError(f"cannot publish {name}: {error.strerror}") from error


def unlink(name: str) -> bool:
    """Removes the name; False where it was gone already or is another user's."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.unlink(os.path.join(ROOT, name))
        return True
    return False


def names(prefix: str) -> list[str]:
    return sorted(name for name in os.listdir(ROOT) if name.startswith(prefix))


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None if it has ended, also where it has
    not been waited for yet. Together with the pid it names one process for ever.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in (b"Z", b"X") else int(fields[_STARTED])


def lives(pid: int) -> bool:
    return start_time(pid) is not None


def remove_leftovers(pid: int | None = None) -> list[str]:
    """Unlinks the segments of a dead process, or of all dead processes; returns their names.

    A live process's segments are never touched, nor those of another pid namespace, whose
    processes cannot be seen from here.
    """
    if not os.path.isdir(ROOT):
        return []
    removed = []
    here = _pid_namespace()
    for name in names("cloverinfer-"):
        owner = _OWNED.fullmatch(name)
        if owner is None or owner[2] != here or (pid is not None and int(owner[1]) != pid):
            continue
        if start_time(int(owner[1])) is None and unlink(name):
            removed.append(name)
    return removed
