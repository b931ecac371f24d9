"""Services of a host as shell scripts: started in sessions of their own, found again by a mark in
their environment, ended with all that they have started.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

STOP_SECONDS = 30
"""How long a service may take to end by itself."""
ENV_FILE = "run/env"
"""What every service's environment is read from; it may hold secrets."""

_FIND = r"""
pids() { # of a service and all that it has started
  grep -lzxF "CLOVER_SERVICE=$PWD/$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true
}
"""
_STOP = f"""{_FIND}
end() {{
  found=$(pids "$1")
  [ -n "$found" ] || return 0
  for signal in TERM KILL; do
    kill -s "$signal" $found 2>/dev/null || true
    turn=0
    while [ $turn -lt {STOP_SECONDS * 5} ]; do
      found=$(pids "$1")
      [ -n "$found" ] || {{ echo "$1 ended"; return 0; }}
      turn=$((turn + 1))
      sleep 0.2
    done
  done
  fail "$1 does not end: processes" $found
}}
"""


def start(name: str, command: Sequence[str], before: str = "") -> str:
    """Starts the service unless it runs. ``before`` is run first, only where it does not run."""
    return f"""{_FIND}
if [ -n "$(pids {name})" ]; then
  echo "{name} runs already"
else
  mkdir -p log run
  [ -e {ENV_FILE} ] || : > {ENV_FILE}
  {before or ":"}
  CLOVER_SERVICE="$PWD/{name}" setsid nohup sh -c 'set -a; . ./{ENV_FILE}; exec "$@"' sh \\
    {shlex.join(command)} > log/{name}.log 2>&1 < /dev/null &
  echo "{name} started"
fi
"""


def stop(names: Sequence[str], after: str = "") -> str:
    """Ends the services, in this order, and then runs ``after``."""
    ends = "\n".join(f"end {name}" for name in names)
    return f"{_STOP}\n{ends}\n{after}\n"


def running(names: Sequence[str]) -> str:
    """Prints a line for each: its name and how many processes it has."""
    lines = "\n".join(f'echo "{name} $(pids {name} | wc -l)"' for name in names)
    return f"{_FIND}\n{lines}\n"


def must_run(name: str) -> str:
    """Fails with the end of its log where the service has ended."""
    return f"""{_FIND}
sleep 1
[ -n "$(pids {name})" ] || fail "{name} ended: $(grep -v '^$' log/{name}.log | tail -n 1)"
"""
