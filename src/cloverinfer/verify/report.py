"""What a check found, line by line, and what it means."""

from __future__ import annotations

import msgspec

OK, NOTE, FAIL = "ok", "note", "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line. A note is worth knowing but no failure: something optional is not there."""

    verdict: str
    """ok, note or fail."""
    subject: str
    """What was looked at: a transport, or a part of the host."""
    text: str
    fix: str = ""
    """What to do about it, where there is something."""
    host: str = ""
    """Of which side; empty where there is one."""
    figures: dict[str, float] = {}
    """Seconds, bytes per second and the like, by name with the unit in it."""

    def line(self) -> str:
        where = f" on {self.host}" if self.host else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.verdict:4}  {self.subject}{where}: {self.text}{fix}"


def good(findings: list[Finding]) -> bool:
    return all(finding.verdict != FAIL for finding in findings)


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
