"""Installing and pushing: what makes a bare host one that can run nodes."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import ConfigError
from . import services
from .fleet import Fleet
from .inventory import Inventory
from .packages import needs, pins, wheel
from .remote import HostError, Remote

PYTHON = "venv/bin/python"
PLAN = "run/plan"
"""File with what runs. push takes it away, so that run does not take an older version for its own.
"""
LEAST_FREE_MIB = 500
"""Free space in the folder below which nothing is begun."""
INSTALL_SECONDS = 3600.0
_OLDER = "the version before still runs, until deploy stop and run"
MOST_SKEW = 1.0
"""Seconds that a host's clock may differ from this one's before it is told."""


def in_folder(inventory: Inventory, script: str) -> str:
    """The script, run in the installation's folder; fails where there is none."""
    folder = shlex.quote(inventory.folder)
    return f'cd {folder} 2>/dev/null || fail "nothing is installed: run deploy install"\n{script}'


def install(fleet: Fleet) -> None:
    """A virtual environment with all that the package needs, on every host, and in mode vllm with
    vLLM, which pins what both need."""
    given = fleet.inventory.vllm.packages if fleet.inventory.mode == "vllm" else ()
    requirements = "".join(f"{name}\n" for name in given) + needs() if given else pins()

    def one(remote: Remote) -> str:
        inventory = fleet.inventory
        version = remote.run(_prepare(inventory))
        remote.put(requirements.encode(), f"{inventory.folder}/requirements.txt")
        options = " ".join(map(shlex.quote, inventory.pip_options))
        pip = f"{PYTHON} -m pip --disable-pip-version-check install --quiet {options}"
        remote.run(in_folder(inventory, f"{pip} -r requirements.txt\n"), INSTALL_SECONDS)
        extra = f", {', '.join(given)}" if given else ""
        return f"Python {version.strip()}, {requirements.count(chr(10))} requirements{extra}"

    fleet.on_all("install", one)


def _prepare(inventory: Inventory) -> str:
    """Checks Python and space, and makes folder and environment where they are missing."""
    python, folder = shlex.quote(inventory.python), shlex.quote(inventory.folder)
    return f"""
command -v {python} > /dev/null || fail "there is no {python}: install Python 3.10 or newer, \\
or set python in the inventory"
version=$({python} -c 'import platform; print(platform.python_version())')
{python} -c 'import sys; sys.exit(sys.version_info < (3, 10))' \\
  || fail "{python} is Python $version: 3.10 or newer is needed, set python in the inventory"
mkdir -p {folder}
cd {folder}
free=$(df -Pm . | tail -n 1 | tr -s ' ' | cut -d' ' -f4)
[ "$free" -ge {LEAST_FREE_MIB} ] || fail "only $free MiB are free in $PWD: {LEAST_FREE_MIB} are \\
needed at least; make room, or set folder to another disk"
if [ -x {PYTHON} ]; then
  minor=${{version%.*}}
  had=$({PYTHON} -c 'import platform; print(platform.python_version().rpartition(".")[0])') || had=
  [ "$had" = "$minor" ] || fail "the environment in $PWD has Python ${{had:-that does not run}}, \
not $minor: run deploy stop, remove $PWD/venv, and install again"
fi
# pip comes last: one that is not there was left by an install that was broken off.
{PYTHON} -c 'import pip' 2> /dev/null || {python} -m venv venv
echo "$version"
"""


def push(fleet: Fleet, work: Path) -> None:
    """This version of the package, on every host. ``ConfigError`` while another push of this folder
    is under way; one from elsewhere is refused by the hosts that it is at."""
    if fleet.dry_run:
        fleet.say("# the wheel is built here, or taken from the inventory's wheel")
        _put_wheel(fleet, Path(fleet.inventory.wheel or work / "cloverinfer.whl"), b"")
        return
    work.mkdir(parents=True, exist_ok=True)
    with _alone(work):
        fleet.say("== build the wheel")
        file = wheel(fleet.inventory.wheel, work)
        _put_wheel(fleet, file, file.read_bytes())


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Nobody else pushes from this folder meanwhile: all build the wheel into it."""
    with (work / "push.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another deploy push from {work} is under way: wait for its end, then push again"
            ) from error
        yield


def _put_wheel(fleet: Fleet, file: Path, data: bytes) -> None:
    inventory = fleet.inventory
    place = f"incoming/{secrets.token_hex(6)}"  # a push from elsewhere has another

    def one(remote: Remote) -> str:
        begin = f"[ -x {PYTHON} ] || fail 'run deploy install'\nmkdir -p {place}\n"
        remote.run(in_folder(inventory, begin))
        remote.put(data, f"{inventory.folder}/{place}/{file.name}")
        script = _install_wheel(f"{place}/{shlex.quote(file.name)}") + services.running()
        said = remote.run(in_folder(inventory, f"trap 'rm -rf {place}' EXIT\n{script}"), 600.0)
        version, _, listing = said.partition("\n")
        runs = ", ".join(services.names_of(listing))
        return f"cloverinfer {version}" + (f"; {runs}: {_OLDER}" if runs else "")

    fleet.on_all("push", one)


def _install_wheel(path: str) -> str:
    """One at a time: the lock is that of the shell's open file, which Python inherits."""
    take = "import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    pip = f"{PYTHON} -m pip --disable-pip-version-check install --quiet --no-deps"
    return f"""exec 9> incoming/lock
{PYTHON} -c '{take}' 2> /dev/null \\
  || fail "another deploy push to this host is under way: wait for its end, then push again"
rm -f {PLAN}
{pip} --force-reinstall ./{path}
{PYTHON} -c 'import cloverinfer; print(cloverinfer.__version__)'
"""


def skew(remote: Remote) -> str:
    """A warning where the host's clock is off; empty where it is not."""
    begun = time.time()
    answer = remote.run("date +%s.%N\n").strip()
    ended = time.time()
    if not answer:
        return ""
    try:
        off = float(answer) - (begun + ended) / 2
    except ValueError as error:
        raise HostError(f"date says {answer!r}") from error
    allowed = MOST_SKEW + (ended - begun) / 2
    return f", its clock is {off:+.1f} s off: run chrony or ntpd" if abs(off) > allowed else ""
