"""What a run will send, and when; decided before the first request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from . import arrivals, workloads
from .names import TRACES
from .records import Sample
from .workloads import Lengths, Limits, Tokenizer, Writer


@dataclass(frozen=True)
class Load:
    """A workload and its arrivals, as the flags of ``bench`` name them."""

    workload: str = "random"
    path: Path | None = None
    count: int = 1000
    lengths: Lengths = field(default_factory=Lengths)
    limits: Limits = field(default_factory=Limits)
    time_scale: float = 1.0
    """Seconds of the run per second of the trace."""
    arrival: str | None = None
    """None: a trace's own times where there is one and no rate is given, else ``poisson``."""
    rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--num-prompts must be at least 1, not {self.count}")
        if not self.time_scale > 0:
            raise ConfigError(f"--time-scale must be above 0, not {self.time_scale}")
        if self.workload != "random" and self.path is None:
            raise ConfigError(f"--dataset-name {self.workload} needs --dataset-path")
        if self.workload == "random" and self.path is not None:
            raise ConfigError(
                "--dataset-path needs --dataset-name sharegpt, mooncake or azure: random reads none"
            )

    @property
    def arrives(self) -> str:
        if self.arrival is not None:
            return self.arrival
        return "trace" if self.workload in TRACES and math.isinf(self.rate) else "poisson"


@dataclass(frozen=True)
class Plan:
    """Samples and when each is due, seconds after the start."""

    samples: list[Sample]
    offsets: list[float]


def make(load: Load, writer: Writer) -> Plan:
    """The same load makes the same plan."""
    samples = _MAKERS[load.workload](load, writer)
    rng = np.random.default_rng((4, load.seed))
    times = arrivals.offsets(samples, load.arrives, load.rate, load.burstiness, rng)
    return Plan(samples, times)


def _random(load: Load, writer: Writer) -> list[Sample]:
    return workloads.random(load.count, load.lengths, writer, load.seed)


def _sharegpt(load: Load, writer: Writer) -> list[Sample]:
    assert load.path is not None
    return workloads.sharegpt(load.path, load.count, writer, load.limits, load.seed)


def _mooncake(load: Load, writer: Writer) -> list[Sample]:
    assert load.path is not None
    return workloads.mooncake(load.path, load.count, writer, load.limits, load.time_scale)


def _azure(load: Load, writer: Writer) -> list[Sample]:
    assert load.path is not None
    return workloads.azure(load.path, load.count, writer, load.limits, load.time_scale)


_MAKERS: dict[str, Callable[[Load, Writer], list[Sample]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "mooncake": _mooncake,
    "azure": _azure,
}


def describe(load: Load, plan: Plan) -> dict[str, Any]:
    """The load's part of a report's settings; a file may have fewer requests than asked for."""
    count = len(plan.samples)
    shown: dict[str, Any] = {"workload": load.workload, "requests": count, "seed": load.seed}
    if load.workload == "random":
        lengths = load.lengths
        shown["tokens, prompt and output"] = f"{lengths.prompt}, {lengths.output}"
        if lengths.spread:
            shown["range ratio"] = lengths.spread
        if lengths.prefix:
            shown["common prefix"] = lengths.prefix
    else:
        shown["file"] = load.path.name if load.path is not None else ""
        if load.limits != Limits():
            shown["cut to (prompt, output)"] = f"{load.limits.prompt}, {load.limits.output}"
    shown["arrivals"] = load.arrives
    if load.arrives == "trace":
        shown["time scale"] = load.time_scale
    else:
        shown["request rate"] = "inf" if math.isinf(load.rate) else load.rate
        if load.arrives == "poisson" and not math.isinf(load.rate):
            shown["burstiness"] = load.burstiness
    return shown


def load_tokenizer(name: str) -> Tokenizer:
    """Of a known model, a Hugging Face directory or a GGUF file; a ``CloverError`` if there is
    none."""
    from ..config.cluster import ModelConfig  # late: only who counts tokens loads PyTorch
    from ..models import load_tokenizer as load
    from ..models import resolve_model

    return load(resolve_model(ModelConfig(model_path=name)))
