"""A request's metrics and the nodes' counters as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

NODE_COLUMNS = {
    "name": "node",
    "pid": "pid",
    "device": "device",
    "transport": "transport",
    "tokens": "tokens",
    "steps": "steps",
    "bytes_in": "MiB in",
    "bytes_out": "MiB out",
}
"""Keys of a node's row, with their headings."""
PLAIN_WIDTH = 100
"""Columns where the output is not a terminal."""
SECONDS = {"ttft", "tpot", "latency", "queue", "prefill", "transfer_exposed", "first_decode"}


def show(metrics: dict[str, Any] | None, nodes: list[dict[str, Any]], out: TextIO) -> None:
    """Writes both tables to ``out``; plain text where it is not a terminal."""
    console = Console(file=out, highlight=False, width=None if out.isatty() else PLAIN_WIDTH)
    if metrics:
        table = Table("metric", "value", title="request", title_justify="left")
        table.columns[1].justify = "right"
        for name, value in _flat(metrics):
            table.add_row(name, value)
        console.print(table)
    if nodes:
        table = Table(*NODE_COLUMNS.values(), title="nodes", title_justify="left")
        for node in nodes:
            table.add_row(*(_value(name, node.get(name)) for name in NODE_COLUMNS))
        console.print(table)


def _flat(metrics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in metrics.items():
        if isinstance(value, dict):
            for inner, one in value.items():
                yield f"{name}.{inner}", _value(inner, one)
        else:
            yield name, _value(name, value)


def _value(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "throughput":
        return f"{value:.2f} tokens/s"
    if name in SECONDS or name.endswith("seconds"):
        return f"{value * 1000:.2f} ms"
    if name.startswith("bytes"):
        return f"{value / 2**20:.2f}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
