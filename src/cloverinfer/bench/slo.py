"""Objectives that a request meets or not: ``ttft=1s,tpot=50ms``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..core.errors import ConfigError
from .records import Record

NAMES = ("ttft", "tpot", "e2el")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": None}
_PART = re.compile(r"(?P<name>\w+)[=:](?P<value>[0-9.]+)(?P<unit>[a-z]*)")


def parse(texts: Sequence[str], bare_unit: float | None = None) -> dict[str, float]:
    """Seconds by name, of ``name=value`` parts with units ``us``, ``ms`` or ``s``.

    ``bare_unit``: seconds of one where no unit is given; None refuses that (``ConfigError``).
    """
    slo: dict[str, float] = {}
    for part in ",".join(texts).split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or match["name"] not in NAMES or match["unit"] not in UNITS:
            known = ", ".join(NAMES)
            raise ConfigError(f"{part!r} is no objective: write ttft=1s,tpot=50ms ({known})")
        scale = UNITS[match["unit"]] if match["unit"] else bare_unit
        if scale is None:
            raise ConfigError(f"{part!r} has no unit: write {part}ms or {part}s")
        try:
            slo[match["name"]] = float(match["value"]) * scale
        except ValueError as error:
            raise ConfigError(f"{match['value']!r} in {part!r} is not a number") from error
    return slo


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether a request was good. One that failed is not; a time that it has none of (the
    TPOT of a single token) is met."""
    if not record.ok:
        return False
    values = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
    return all((values[name] or 0.0) <= limit for name, limit in slo.items())
