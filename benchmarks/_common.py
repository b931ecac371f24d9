"""What every benchmark shares: its flags, its rows, and the floor measured in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cloverinfer.core.memory import private_memory
from cloverinfer.models.resolve import cpu_multiplies_bfloat16


@dataclass
class Row:
    """One figure. ``floor`` and ``peer`` are in the row's unit."""

    name: str
    value: float
    unit: str
    params: dict[str, Any] = field(default_factory=dict)
    floor: float | None = None
    peer: str | None = None
    peer_value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": self.name,
            **self.params,
            "value": self.value,
            "unit": self.unit,
        }
        if self.floor is not None:
            row |= {"floor": self.floor, "ratio_to_floor": self.value / self.floor}
        if self.peer is not None and self.peer_value:
            row |= {"peer": self.peer, "ratio_to_peer": self.value / self.peer_value}
        return row


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="smaller and fewer measurements")
    made.add_argument("--json", type=Path, metavar="PATH", help="also write the rows to this file")
    return made


def model_parser(description: str) -> argparse.ArgumentParser:
    """``parser`` with what benchmarks of whole models share."""
    made = parser(description)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--quantization", choices=["int8", "gguf"], help="of our weights")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="a peer (vllm, llama.cpp) and the Python that has it installed",
    )
    made.add_argument(
        "--peer-dtype",
        metavar="TYPE",
        help="of peers' weights (llama.cpp takes the file's), where they are quicker with another",
    )
    return made


def finish(rows: list[Row], json_path: Path | None) -> None:
    """Prints the rows as a Markdown table and writes them where asked."""
    dicts = [row.as_dict() for row in rows]
    columns = list(dict.fromkeys(key for row in dicts for key in row))
    table = [columns, ["---"] * len(columns)]
    table += [[_cell(row.get(column, "")) for column in columns] for row in dicts]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    print()
    for line in table:
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            + " |"
        )
    write(rows, json_path)


def write(rows: list[Row], json_path: Path | None) -> None:
    """Writes the rows to a file where one is asked for."""
    if json_path is not None:
        json_path.write_text(json.dumps([row.as_dict() for row in rows], indent=2) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_run(threads: int) -> str:
    """Where the figures come from: processor, threads, versions, commit; and whether other work
    disturbs them."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    load = os.getloadavg()[0]
    busy = load > threads / 2
    warning = f"\nwarning: load average {load:.1f}: ratios are not reliable" if busy else ""
    return (
        f"{model}, {threads} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}, commit {git.stdout.strip() or 'unknown'}{warning}"
    )


def best_of(times: int, run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    run()
    return min(_seconds(run) for _ in range(times))


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def read_bandwidth(threads: int) -> float:
    """Bytes per second that ``threads`` threads read from memory (a dot product over 1 GiB,
    in huge pages where the system has them, as weights and pools are)."""
    torch.set_num_threads(threads)
    data = torch.frombuffer(private_memory(1 << 30), dtype=torch.float32).fill_(1)
    return data.nbytes / best_of(5, lambda: torch.dot(data, data))


def peak_flops(threads: int, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product (2 per multiply-add).

    Of float32 where numbers are widened to be multiplied: float16, and bfloat16 where processors
    have no products of it.
    """
    torch.set_num_threads(threads)
    paired = dtype == torch.bfloat16 and cpu_multiplies_bfloat16()
    size = 2048
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16 if paired else torch.float32)
    return 2 * size**3 / best_of(5, lambda: a @ b)
