"""Installing and pushing: what makes a bare host one that can run nodes."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

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
    """This version of the package, on every host."""
    if fleet.dry_run:
        fleet.say("# the wheel is built here, or taken from the inventory's wheel")
        file = Path(fleet.inventory.wheel or work / "cloverinfer.whl")
    else:
        fleet.say("== build the wheel")
        work.mkdir(parents=True, exist_ok=True)
        file = wheel(fleet.inventory.wheel, work)

    def one(remote: Remote) -> str:
        folder = fleet.inventory.folder
        remote.run(in_folder(fleet.inventory, f"[ -x {PYTHON} ] || fail 'run deploy install'\n"))
        data = b"" if fleet.dry_run else file.read_bytes()
        remote.put(data, f"{folder}/{file.name}")
        name = shlex.quote(file.name)
        pip = f"{PYTHON} -m pip --disable-pip-version-check install --quiet --no-deps"
        script = f"rm -f {PLAN}\n{pip} --force-reinstall ./{name}\nrm -f ./{name}\n"
        script += f"{PYTHON} -c 'import cloverinfer; print(cloverinfer.__version__)'\n"
        script += services.running()
        said = remote.run(in_folder(fleet.inventory, script), 600.0)
        version, _, listing = said.partition("\n")
        runs = ", ".join(services.names_of(listing))
        return f"cloverinfer {version}" + (f"; {runs}: {_OLDER}" if runs else "")

    fleet.on_all("push", one)


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
