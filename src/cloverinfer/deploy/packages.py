"""What hosts are given: the package as a wheel, and pins of what it needs as they are here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from ..core.errors import ConfigError

_SELF = "cloverinfer"
BUILD_SECONDS = 1800.0
"""How long the wheel may take to build, kernels for devices included."""


def pins() -> str:
    """A requirements file: every package that this one needs, at the version installed here."""
    found: dict[str, str] = {}
    waiting = [_SELF]
    while waiting:
        for requirement in importlib.metadata.requires(waiting.pop()) or []:
            need = Requirement(requirement)
            name = need.name.lower().replace("_", "-")
            if name in found or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # only of another platform or interpreter
            found[name] = version.partition("+")[0]  # a build for this host's devices
            waiting.append(name)
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def needs() -> str:
    """A requirements file: what this package itself asks for, beside packages with pins of their
    own."""
    found = [Requirement(text) for text in importlib.metadata.requires(_SELF) or []]
    wanted = [one for one in found if not one.marker or one.marker.evaluate({"extra": ""})]
    return "".join(f"{one.name}{one.specifier}\n" for one in wanted)


def wheel(given: str | None, folder: Path) -> Path:
    """The given file, or one built into ``folder`` from the source tree of this package."""
    if given is not None:
        file = Path(given).expanduser()
        if file.suffix != ".whl" or not file.is_file():
            raise ConfigError(f"wheel: {file} is no wheel: build one with pip wheel --no-deps")
        return file
    source = Path(__file__).parents[3]
    if not (source / "pyproject.toml").is_file():
        raise ConfigError(
            "this package was not installed from a source tree: name the file to push by wheel in "
            "the inventory"
        )
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    if importlib.util.find_spec("scikit_build_core") is not None:
        command.append("--no-build-isolation")
    try:
        done = subprocess.run(
            [*command, str(source)],
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the wheel was not built within {BUILD_SECONDS:g} s: build it with pip wheel "
            "--no-deps, and name the file by wheel in the inventory"
        ) from error
    if done.returncode:
        raise ConfigError(f"the wheel cannot be built: {_last_line(done.stderr or done.stdout)}")
    built = [file for file in folder.glob("*.whl") if file not in before] or list(before)
    return max(built, key=lambda file: file.stat().st_mtime)


def _last_line(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1] if lines else "pip said nothing: see what pip wheel . --no-deps says"
