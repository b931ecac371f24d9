"""When requests are sent: seconds after the start, known before the run begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..core.errors import ConfigError
from .records import Sample


def offsets(
    samples: Sequence[Sample],
    arrival: str,
    rate: float = math.inf,
    burstiness: float = 1.0,
    rng: np.random.Generator | None = None,
) -> list[float]:
    """One per sample, ascending.

    ``poisson``: gaps are gamma-distributed with mean ``1 / rate``, of shape ``burstiness`` (1: a
    Poisson process; less: burstier). ``constant``: every ``1 / rate`` seconds. An infinite rate
    sends all at once. ``trace``: the samples' own times. ``ConfigError`` for what is out of range.
    """
    if arrival == "trace":
        return _traced(samples)
    if not rate > 0:
        raise ConfigError(f"--request-rate must be above 0, or inf, not {rate}")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0, not {burstiness}")
    if math.isinf(rate):
        return [0.0] * len(samples)
    if arrival == "constant":
        return [i / rate for i in range(len(samples))]
    assert arrival == "poisson", arrival
    rng = rng or np.random.default_rng(0)
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=len(samples))
    times = np.cumsum(gaps)
    # The sum of the gaps drawn is brought to its mean, so that the rate is the one asked for.
    if len(samples) > 1 and times[-1] > 0:
        times *= len(samples) / rate / times[-1]
    return [float(one) for one in times - times[0]] if len(samples) else []


def _traced(samples: Sequence[Sample]) -> list[float]:
    times = [one.at for one in samples]
    if any(one is None for one in times):
        raise ConfigError("--arrival trace needs a workload with times: mooncake or azure")
    known = [one for one in times if one is not None]
    return [one - known[0] for one in known]
