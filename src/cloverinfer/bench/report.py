"""The figures for people (Markdown) and for programs (JSON, JSON lines)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core.errors import ConfigError
from .records import Record
from .statistics import Summary

TITLES = {
    "ttft": "TTFT (time to first token)",
    "tpot": "TPOT (time per output token after the first)",
    "itl": "ITL (time between pieces)",
    "e2el": "E2E (sent to complete)",
}
MOST_ERRORS = 5


def markdown(summary: Summary, setting: Mapping[str, Any]) -> str:
    """A report that stands by itself: what was run, what came of it, and what to know of it."""
    parts = ["# Benchmark", "", *_table(["setting", "value"], list(setting.items())), ""]
    parts += ["## Throughput", "", *_table(["figure", "value"], _totals(summary)), ""]
    if summary.distributions:
        parts += ["## Latency, ms", "", *_latencies(summary), ""]
    if summary.errors:
        rows = sorted(summary.errors.items(), key=lambda row: -row[1])[:MOST_ERRORS]
        flat = [(" ".join(text.split()).replace("|", "\\|"), count) for text, count in rows]
        parts += ["## Failures", "", *_table(["error", "requests"], flat), ""]
    notes = summary.notes or ["the schedule was kept; nothing else to know"]
    return "\n".join([*parts, "## Notes", "", *(f"- {note}" for note in notes), ""])


def _totals(summary: Summary) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("requests completed", f"{summary.completed} of {summary.requests}"),
        ("failed, interrupted", f"{summary.failed}, {summary.interrupted}"),
        ("duration", f"{summary.duration:.2f} s"),
        ("prompt tokens, output tokens", f"{summary.prompt_tokens}, {summary.output_tokens}"),
        ("request throughput", f"{summary.request_throughput:.2f} requests/s"),
        ("output throughput", f"{summary.output_throughput:.2f} tokens/s"),
        ("total throughput", f"{summary.total_throughput:.2f} tokens/s"),
        ("requests at a time, mean and most", f"{summary.concurrency:.1f}, "
         f"{summary.max_concurrency}"),
    ]  # fmt: skip
    if summary.goodput is not None:
        slo = ", ".join(f"{name} <= {limit * 1e3:g} ms" for name, limit in summary.slo.items())
        good = f"{summary.goodput:.2f} requests/s ({summary.good} requests)"
        rows.append((f"goodput under {slo}", good))
    if summary.schedule:
        lag = summary.schedule
        rows.append(
            ("lag of sends, p99 and most", f"{lag['lag_p99'] * 1e3:.2f} ms, "
             f"{lag['lag_max'] * 1e3:.2f} ms")
        )  # fmt: skip
    if summary.client_cpu is not None:
        rows.append(("CPU of the client", f"{summary.client_cpu:.0%} of a core"))
    return rows


def _latencies(summary: Summary) -> list[str]:
    names = list(next(iter(summary.distributions.values())).percentiles)
    rows = []
    for name, one in summary.distributions.items():
        values = [one.mean, one.median, *one.percentiles.values(), one.largest]
        rows.append((TITLES[name], *(f"{value * 1e3:.2f}" for value in values)))
    return _table(["", "mean", "median", *names, "max"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [list(heads), ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def as_json(summary: Summary, setting: Mapping[str, Any]) -> str:
    """One object; times in seconds."""
    return json.dumps({"setting": dict(setting), **dataclasses.asdict(summary)}, indent=2) + "\n"


def jsonl(records: Sequence[Record]) -> str:
    """A line per request, in the order in which they were due."""
    ordered = sorted(records, key=lambda one: one.index)
    return "".join(msgspec.json.encode(one).decode() + "\n" for one in ordered)


def write(path: Path, text: str) -> None:
    """``ConfigError`` where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
