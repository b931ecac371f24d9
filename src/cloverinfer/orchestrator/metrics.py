"""What was measured over a request's life. ``docs/metrics.md`` defines every name.

Times are the scheduler process's; seconds on nodes are measured there and travel with results.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..core.request import Request, RequestState
from ..wire.messages import AttentionDone, StepStats


@dataclass
class DenseStep:
    """One step of a wavefront."""

    time: float
    batch: int
    """Decode rows."""
    joins: int
    leaves: int
    wait_seconds: float
    """Since the wavefront's previous step had ended."""
    barriers: int
    barrier_seconds: float


@dataclass
class AttentionCalls:
    """Layer calls of one step on one attention backend."""

    time: float
    calls: int
    batch: int
    seconds: float


@dataclass
class StatsLog:
    """Steps of the recent past, as far back as a live request began."""

    dense: deque[DenseStep] = field(default_factory=deque)
    attention: deque[AttentionCalls] = field(default_factory=deque)

    def add_dense(self, step: DenseStep) -> None:
        self.dense.append(step)

    def add_local_attention(self, time: float, batch: int, stats: StepStats) -> None:
        self.attention.append(AttentionCalls(time, stats.attention_calls, batch, stats.attention))

    def add_attention(self, time: float, done: AttentionDone) -> None:
        self.attention.append(AttentionCalls(time, done.calls, done.rows, done.seconds))

    def prune(self, oldest: float) -> None:
        """Forgets what ended before ``oldest``."""
        for log in (self.dense, self.attention):
            while log and log[0].time < oldest:
                log.popleft()

    def since(self, arrival: float) -> dict[str, dict[str, float]]:
        dense = [step for step in self.dense if step.time >= arrival]
        attention = [calls for calls in self.attention if calls.time >= arrival]
        batches = [step.batch for step in dense]
        layer_calls = sum(a.calls for a in attention)
        return {
            "scheduler_dense_continuous_batching": {
                "steps": len(dense),
                "mean_batch": _mean(sum(batches), len(batches)),
                "max_batch": max(batches, default=0),
                "joins": sum(step.joins for step in dense),
                "leaves": sum(step.leaves for step in dense),
            },
            "scheduler_attention_batching": {
                "layer_calls": layer_calls,
                "mean_batch": _mean(sum(a.calls * a.batch for a in attention), layer_calls),
                "max_batch": max((a.batch for a in attention), default=0),
                "seconds": sum(a.seconds for a in attention),
            },
            "scheduler_decode_step_sync": {
                "waits": sum(step.wait_seconds > 0 for step in dense),
                "seconds": sum(step.wait_seconds for step in dense),
            },
            "scheduler_attention_layer_barrier": {
                "waits": sum(step.barriers for step in dense),
                "seconds": sum(step.barrier_seconds for step in dense),
            },
        }


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0


def request_metrics(request: Request, finished: float, log: StatsLog) -> dict[str, Any]:
    """All metrics of a finished request. A stage that was not reached is None."""
    tokens, times = request.token_times, request.times
    latency = finished - request.arrival
    started = times.get(RequestState.PREFILLING)
    decoding = times.get(RequestState.DECODING)
    first = tokens[0] if tokens else None
    second = tokens[1] if len(tokens) > 1 else None
    return {
        "ttft": _between(request.arrival, first),
        "tpot": (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None,
        "latency": latency,
        "throughput": len(tokens) / latency if latency > 0 else None,
        "prompt_tokens": request.num_prompt,
        "completion_tokens": len(request.output_token_ids),
        "total_tokens": request.num_tokens,
        "cached_tokens": request.num_cached,
        "preemptions": request.incarnation,
        "stages": {
            "queue": _between(request.arrival, started),
            "prefill": _between(started, first),
            "transfer_exposed": _between(first, decoding),
            "first_decode": _between(decoding, second),
        },
        **log.since(request.arrival),
    }


def _between(begin: float | None, end: float | None) -> float | None:
    return end - begin if begin is not None and end is not None else None
