"""What an engine counts over its life, for whoever watches it: histograms, totals, and gauges.

Only the engine's thread writes. Others read a snapshot, which may be a token or two behind itself:
the token path takes no lock. It knows requests and names of nodes, not HTTP or Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.request import Request, RequestState

REQUEST_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
"""Upper bounds of buckets for what a request waits for, seconds."""
TOKEN_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
"""Upper bounds of buckets for the time between tokens, seconds."""


class Histogram:
    """Counts by bucket; a value is in the first bucket whose bound it does not pass."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """The last one holds what is above all bounds."""
        self.total = 0.0

    def observe(self, value: float | None) -> None:
        """None, a stage that was not reached, is not counted."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """``(bound, values up to it)``, the last bound being ``+Inf``."""
        rows, below = [], 0
        names = [*map(str, self.bounds), "+Inf"]
        for name, count in zip(names, list(self.counts), strict=True):
            below += count
            rows.append((name, float(below)))
        return rows


def _per_request() -> Histogram:
    return Histogram(REQUEST_BOUNDS)


@dataclass
class Counters:
    """Everything since the engine started."""

    ttft: Histogram = field(default_factory=_per_request)
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    tpot: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    latency: Histogram = field(default_factory=_per_request)
    queue: Histogram = field(default_factory=_per_request)
    prefill: Histogram = field(default_factory=_per_request)
    transfer: Histogram = field(default_factory=_per_request)
    decode: Histogram = field(default_factory=_per_request)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Requests that ended well, by finish reason."""
    aborted: dict[str, int] = field(default_factory=dict)
    """By the state that they were in."""
    failed: dict[str, int] = field(default_factory=dict)
    link_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    """Payload by (source, destination)."""

    def token(self, request: Request) -> None:
        """A token has come; its time is the last of the request's."""
        self.generation_tokens += 1
        times = request.token_times
        if len(times) > 1:
            self.inter_token.observe(times[-1] - times[-2])
        else:
            self.ttft.observe(times[0] - request.arrival)

    def end(self, request: Request, now: float) -> None:
        """A request has reached a terminal state."""
        self._stages(request, now)
        self.prompt_tokens += request.num_prompt
        self.cached_tokens += request.num_cached
        if request.state is RequestState.FINISHED:
            _add(self.finished, request.finish_reason or "stop")
            return
        stage = request.ended_in.value if request.ended_in is not None else "waiting"
        _add(self.aborted if request.state is RequestState.ABORTED else self.failed, stage)

    def link(self, source: str, destination: str, nbytes: int) -> None:
        if nbytes:
            key = (source, destination)
            self.link_bytes[key] = self.link_bytes.get(key, 0) + nbytes

    def _stages(self, request: Request, now: float) -> None:
        times, tokens = request.times, request.token_times
        started, decoding = times.get(RequestState.PREFILLING), times.get(RequestState.DECODING)
        if started is not None:
            self.queue.observe(started - request.arrival)
        if request.state is not RequestState.FINISHED:
            return  # how long it took says when it was given up, not how fast it was
        self.latency.observe(now - request.arrival)
        if tokens and started is not None:
            self.prefill.observe(tokens[0] - started)
        if tokens and decoding is not None:
            self.transfer.observe(decoding - tokens[0])
        if len(tokens) > 1:
            self.decode.observe(tokens[-1] - tokens[0])
            self.tpot.observe((tokens[-1] - tokens[0]) / (len(tokens) - 1))


def _add(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


@dataclass(frozen=True)
class EngineStats:
    """A snapshot: what is so now, beside the counters, which go on."""

    counters: Counters
    running: int
    """Requests past the queue."""
    waiting: int
    preemptions: int
    blocks: dict[str, tuple[int, int]]
    """Used and all blocks of each pool, by node."""
    dropped_rows: int = 0
    """Rows of steps whose request had ended before they were computed."""
