"""The cache folder: where it is, who may write, and whether what it holds is still whole.

Files are written beside their name and renamed, under a lock between processes. A *stamp* records
each finished file's size and time of change, so that a later start sees damage without reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.errors import ModelError

Progress = Callable[[str], None]

STAMP = "clover-stamp.json"
LOCK_TIMEOUT = 1800.0
"""Seconds to wait for another process that prepares the same model."""


def silent(message: str) -> None:
    """A ``Progress`` that says nothing."""


def cache_root() -> Path:
    """``$CLOVER_CACHE``, else ``$XDG_CACHE_HOME/cloverinfer``, else ``~/.cache/cloverinfer``."""
    own = os.environ.get("CLOVER_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cloverinfer"


@contextlib.contextmanager
def locked(folder: Path, progress: Progress = silent) -> Iterator[None]:
    """Keeps other processes out of ``folder`` (made if need be); ``ModelError`` if they stay in."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache folder {folder} ({error}); set CLOVER_CACHE to another"
        ) from error
    with lock:
        deadline, told = time.monotonic() + LOCK_TIMEOUT, False
        while True:
            try:
                # The system gives the lock back when its holder dies, so it cannot be left behind.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {folder}/.lock too long") from None
                if not told:
                    progress(f"waiting for another process that prepares {folder.name}")
                    told = True
                time.sleep(0.05)
        yield


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder inside ``parent`` for what is not finished; it does not outlive the block.

    Needs ``parent`` locked: what a process that died left in such folders is removed.
    """
    for stale in parent.glob(".tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_stamp(folder: Path) -> dict[str, list[int]]:
    """Size and time of change (ns) by file name; empty where there is no usable stamp."""
    try:
        files = json.loads((folder / STAMP).read_text(encoding="utf-8"))["files"]
        return {str(name): [int(n) for n in marks] for name, marks in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_stamp(folder: Path, names: list[str]) -> None:
    """Records ``names``, beside those already recorded, as finished and whole."""
    files = read_stamp(folder) | {name: _marks(folder / name) for name in names}
    part = folder / (STAMP + ".part")
    part.write_text(json.dumps({"files": files}), encoding="utf-8")
    part.replace(folder / STAMP)


def is_whole(folder: Path, names: list[str]) -> bool:
    """Whether all of ``names`` were finished and have not changed since."""
    stamp = read_stamp(folder)
    return all(
        name in stamp and (folder / name).is_file() and stamp[name] == _marks(folder / name)
        for name in names
    )


def sha256_of(path: Path) -> str:
    """Of the whole file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def check_space(folder: Path, nbytes: int) -> None:
    """``ModelError`` where ``folder``'s disk has not that much left."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ModelError(
            f"{folder}: {nbytes / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free; "
            "set CLOVER_CACHE to a folder on another disk"
        )


def _marks(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
