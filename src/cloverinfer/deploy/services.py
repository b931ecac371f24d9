"""Services of a host as shell scripts: started in sessions of their own, found again by a mark in
their environment, ended with all that they have started.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

STOP_SECONDS = 30
"""How long a service may take to end by itself."""
FIND_SECONDS = 10
"""How long starting waits for a service to be found."""
ENV_FILE = "run/env"
"""What every service's environment is read from; it may hold secrets."""

_KEEP = "SPT_NOENV=1"
"""Keeps programs that give themselves a title (vLLM's engine) from writing it over the mark."""

_FIND = r"""
pids() { # of services and all that they have started
  for service in "$@"; do
    grep -lzxF "CLOVER_SERVICE=$PWD/$service" /proc/[0-9]*/environ 2>/dev/null || true
  done | cut -d/ -f3
}
services() { # a line for each that runs: how many processes, and its name
  grep -zhF "CLOVER_SERVICE=$PWD/" /proc/[0-9]*/environ 2>/dev/null | tr '\0' '\n' \
    | sed 's|.*/||' | sort | uniq -c
}
named() { # of the services that run, those with such names
  services | while read -r _ name; do
    case $name in $1) echo "$name";; esac
  done
}
"""
_STOP = f"""{_FIND}
end() {{ # all services with such names, side by side
  ending=$(named "$1" | tr '\\n' ' ')
  found=$(pids $ending)
  [ -n "$found" ] || return 0
  for signal in TERM KILL; do
    kill -s "$signal" $found 2>/dev/null || true
    turn=0
    while [ $turn -lt {STOP_SECONDS * 5} ]; do
      found=$(pids $ending)
      [ -n "$found" ] || {{ for name in $ending; do echo "$name ended"; done; return 0; }}
      turn=$((turn + 1))
      sleep 0.2
    done
  done
  fail "$ending do not end: processes" $found
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
  {_KEEP} CLOVER_SERVICE="$PWD/{name}" setsid nohup \\
    sh -c 'set -a; . ./{ENV_FILE}; exec "$@"' sh {shlex.join(command)} \\
    > log/{name}.log 2>&1 < /dev/null &
  turn=0 # it has its mark, by which it is found, once it is a program of its own
  while [ -z "$(pids {name})" ] && kill -0 $! 2>/dev/null && [ $turn -lt {FIND_SECONDS * 20} ]; do
    turn=$((turn + 1))
    sleep 0.05
  done
  echo "{name} started"
fi
"""


def stop(patterns: Sequence[str], after: str = "") -> str:
    """Ends the services with names of each pattern (``vllm-*``) in turn, then runs ``after``."""
    ends = "\n".join(f"end {shlex.quote(pattern)}" for pattern in patterns)
    return f"{_STOP}\n{ends}\n{after}\n"


def running() -> str:
    """Prints a line for each service that runs: how many processes it has, and its name."""
    return f"{_FIND}\nservices\n"


def names_of(listing: str) -> list[str]:
    """Of the services in what ``running`` printed."""
    return [line.split()[1] for line in listing.splitlines() if line.strip()]


def must_run(name: str) -> str:
    """Fails with the end of its log where the service has ended."""
    return f"""{_FIND}
sleep 1
[ -n "$(pids {name})" ] || fail "{name} ended: $(grep -v '^$' log/{name}.log | tail -n 1)"
"""
