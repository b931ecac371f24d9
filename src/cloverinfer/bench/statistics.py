"""From records to figures, as a function of the records alone: no clock, no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .records import Record
from .slo import meets

LATE_SECONDS = 0.01
"""A send later than this, at the 99th percentile, is a schedule that was not kept."""
LATE_RATE = 0.95
"""Share of the scheduled rate below which the schedule was not kept."""
BUSY = 0.9
"""Share of one core above which the client may have been the slower part."""


@dataclass(frozen=True)
class Distribution:
    """Seconds."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: dict[str, float]
    """By ``p99`` and so on."""
    largest: float


@dataclass(frozen=True)
class Summary:
    """The figures of a run."""

    requests: int
    """All that were begun."""
    completed: int
    failed: int
    interrupted: int
    """Under way when the run was ended early."""
    duration: float
    """Seconds from the first send to the last end."""
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    """Tokens per second."""
    total_throughput: float
    """Prompt and output tokens per second."""
    concurrency: float
    """Mean number of requests under way."""
    max_concurrency: int
    distributions: dict[str, Distribution]
    """Of ``ttft``, ``tpot``, ``itl`` and ``e2el``; one without values is left out."""
    slo: dict[str, float]
    good: int | None
    """Requests that met all objectives; None without any."""
    goodput: float | None
    """Of these, per second."""
    errors: dict[str, int]
    counted_by: dict[str, int]
    """Completed requests by who counted their tokens."""
    schedule: dict[str, Any]
    client_cpu: float | None
    """CPU seconds of the client per second of the run; None where it is not known."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to believe the figures."""


def summarize(
    records: Sequence[Record],
    percentiles: Sequence[float] = (90, 99),
    slo: Mapping[str, float] | None = None,
    client_cpu: float | None = None,
) -> Summary:
    """The figures of these records. ``client_cpu``: the client's CPU seconds per second."""
    done = [one for one in records if one.ok]
    broken = [one for one in records if not one.ok and one.error != INTERRUPTED]
    start = min((one.sent for one in records), default=0.0)
    end = max((one.ended for one in records), default=0.0)
    duration = max(end - start, 1e-9)
    prompt = sum(one.prompt_tokens or 0 for one in done)
    output = sum(one.output_tokens for one in done)
    good = sum(meets(one, slo) for one in done) if slo else None
    schedule = _schedule(records)
    return Summary(
        requests=len(records),
        completed=len(done),
        failed=len(broken),
        interrupted=len(records) - len(done) - len(broken),
        duration=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        request_throughput=len(done) / duration,
        output_throughput=output / duration,
        total_throughput=(prompt + output) / duration,
        concurrency=sum(one.ended - one.sent for one in records) / duration,
        max_concurrency=_most_at_once(records),
        distributions=_distributions(done, percentiles),
        slo=dict(slo or {}),
        good=good,
        goodput=good / duration if good is not None else None,
        errors=dict(Counter(one.error or "" for one in broken)),
        counted_by=dict(Counter(one.tokens_from for one in done)),
        schedule=schedule,
        client_cpu=client_cpu,
        notes=_notes(records, done, schedule, client_cpu),
    )


INTERRUPTED = "interrupted"
"""Error of requests that the end of the run cut off; not the server's failures."""


def distribution(values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    """Percentiles are linear between the nearest two values."""
    array = np.asarray(values, dtype=np.float64)
    at = np.percentile(array, list(percentiles))
    return Distribution(
        len(array),
        float(array.mean()),
        float(np.median(array)),
        float(array.std()),
        {f"p{p:g}": float(v) for p, v in zip(percentiles, at, strict=True)},
        float(array.max()),
    )


def _distributions(done: Sequence[Record], percentiles: Sequence[float]) -> dict[str, Distribution]:
    values = {
        "ttft": [one.ttft for one in done if one.ttft is not None],
        "tpot": [one.tpot for one in done if one.tpot is not None],
        "itl": [gap for one in done for gap in one.gaps()],
        "e2el": [one.latency for one in done],
    }
    return {name: distribution(some, percentiles) for name, some in values.items() if some}


def _most_at_once(records: Sequence[Record]) -> int:
    # An end and a beginning at one instant do not overlap: ends sort first.
    steps = sorted([(one.sent, 1) for one in records] + [(one.ended, -1) for one in records])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def _schedule(records: Sequence[Record]) -> dict[str, Any]:
    """How well the sends kept to it: lag is the client's own, held what the limit caused."""
    if not records:
        return {}
    lag = [one.ready - one.due for one in records]
    held = [one.sent - one.ready for one in records]
    span = max(one.due for one in records) - min(one.due for one in records)
    took = max(one.sent for one in records) - min(one.sent for one in records)
    return {
        "lag_mean": float(np.mean(lag)),
        "lag_p99": float(np.percentile(lag, 99)),
        "lag_max": max(lag),
        "held": sum(one > LATE_SECONDS for one in held),
        "held_mean": float(np.mean(held)),
        "scheduled_rate": (len(records) - 1) / span if span > 0 else None,
        "sent_rate": (len(records) - 1) / took if took > 0 else None,
    }


def _notes(
    records: Sequence[Record],
    done: Sequence[Record],
    schedule: Mapping[str, Any],
    client_cpu: float | None,
) -> list[str]:
    notes = []
    if schedule and schedule["lag_p99"] > LATE_SECONDS:
        late = schedule["lag_p99"] * 1e3
        notes.append(f"the client could not keep its schedule: sends were {late:.1f} ms late (p99)")
    wanted, sent = schedule.get("scheduled_rate"), schedule.get("sent_rate")
    if wanted is not None and sent is not None and sent < LATE_RATE * wanted:
        notes.append(f"sent {sent:.2f} requests/s where the schedule wanted {wanted:.2f}")
    if schedule and schedule["held"]:
        notes.append(
            f"{schedule['held']} requests waited for the limit of requests at a time, "
            f"{schedule['held_mean']:.3f} s on average; latencies count from the send"
        )
    if client_cpu is not None and client_cpu > BUSY:
        notes.append(
            f"the client used {client_cpu:.0%} of a core: it may have been the slower part"
        )
    if unknown := sum(one.prompt_tokens is None for one in done):
        notes.append(f"prompt tokens of {unknown} requests are not known and count as 0")
    return notes + _token_notes(done)


def _token_notes(done: Sequence[Record]) -> list[str]:
    notes = []
    counts = Counter(one.tokens_from for one in done)
    if counts["tokenizer"]:
        notes.append("output tokens were counted by the tokenizer: the server reports no usage")
    if counts["pieces"]:
        notes.append(
            "output tokens are pieces of the stream: the server reports no usage and no "
            "--tokenizer was given"
        )
    usage = [one for one in done if one.tokens_from == "usage" and one.times]
    pieces, tokens = sum(len(one.times) for one in usage), sum(one.output_tokens for one in usage)
    if pieces and tokens > 1.05 * pieces:
        notes.append(f"{tokens / pieces:.2f} tokens came in a piece: ITL is between pieces")
    return notes
