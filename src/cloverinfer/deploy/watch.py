"""Looking at hosts: the ends of their logs, and what ``cloverinfer verify`` finds there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import msgspec

from ..verify.report import FAIL, NOTE, Finding
from .fleet import Fleet
from .remote import HostError, Remote
from .setup import PYTHON, in_folder

VERIFY_SECONDS = 900.0


def logs(fleet: Fleet, lines: int) -> None:
    script = f"""for file in log/*.log; do
  [ -e "$file" ] || continue
  echo "-- $file"
  tail -n {lines} "$file"
done
"""
    fleet.on_all("logs", lambda remote: "\n" + remote.run(in_folder(fleet.inventory, script)))


def verify(fleet: Fleet, transports: Sequence[str]) -> None:
    """One line a host, and its findings that are not in order."""
    words = ["verify", "--json", "--quiet"]
    for name in transports:
        words += ["--transport", name]
    command = f"{PYTHON} -m cloverinfer.cli {shlex.join(words)}"
    # Its exit status is the verdict, which is in what it prints as well.
    script = f"{command} > run/verify.json || true\ncat run/verify.json\n"

    def one(remote: Remote) -> str:
        said = remote.run(in_folder(fleet.inventory, f"mkdir -p run\n{script}"), VERIFY_SECONDS)
        return "" if fleet.dry_run else _summary(said)

    fleet.on_all("verify", one)


def _summary(said: str) -> str:
    try:
        answer = json.loads(said)
    except json.JSONDecodeError as error:
        raise HostError("cloverinfer verify printed no findings: see its log") from error
    findings = msgspec.convert(answer["findings"], list[Finding])
    bad = [one.line() for one in findings if one.verdict == FAIL]
    if bad:
        raise HostError("; ".join(bad))
    notes = [f"\n       {one.line()}" for one in findings if one.verdict == NOTE]
    return f"{len(findings)} findings in order{''.join(notes)}"
