"""What an engine counts: each value once, in its bucket, under the right stage."""

from __future__ import annotations

import pytest

from cloverinfer.core.request import Request, RequestState
from cloverinfer.core.sampling import SamplingParams
from cloverinfer.orchestrator.counters import Counters, Histogram


def request(arrival: float = 10.0) -> Request:
    return Request(1, "r", [1, 2, 3], SamplingParams(), arrival)


def run(counters: Counters, one: Request, token_times: list[float]) -> None:
    for time in token_times:
        one.token_times.append(time)
        counters.token(one)


def test_a_value_is_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 3.0, None):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 8.0


def test_a_finished_request_is_in_every_histogram_once() -> None:
    counters, one = Counters(), request()
    one.advance(RequestState.PREFILLING, 10.5)
    run(counters, one, [12.0])
    one.advance(RequestState.TRANSFERRING, 12.0)
    one.advance(RequestState.DECODING, 12.25)
    run(counters, one, [12.5, 14.0])
    one.num_cached, one.finish_reason = 2, "length"
    one.advance(RequestState.FINISHED, 14.0)
    counters.end(one, 14.0)
    sums = {
        "ttft": 2.0, "inter_token": 2.0, "tpot": 1.0, "latency": 4.0, "queue": 0.5,
        "prefill": 1.5, "transfer": 0.25, "decode": 2.0,
    }  # fmt: skip
    assert {name: getattr(counters, name).total for name in sums} == sums
    counts = {name: sum(getattr(counters, name).counts) for name in sums}
    assert counts == dict.fromkeys(sums, 1) | {"inter_token": 2}
    assert (counters.prompt_tokens, counters.generation_tokens, counters.cached_tokens) == (3, 3, 2)
    assert counters.finished == {"length": 1}
    assert counters.aborted == counters.failed == {}


@pytest.mark.parametrize(
    ("states", "end", "stage"),
    [
        ([], RequestState.ABORTED, "waiting"),
        ([RequestState.PREFILLING], RequestState.FAILED, "prefilling"),
        ([RequestState.PREFILLING, RequestState.TRANSFERRING], RequestState.FAILED, "transferring"),
        ([RequestState.PREFILLING, RequestState.DECODING], RequestState.ABORTED, "decoding"),
        (
            [RequestState.PREFILLING, RequestState.PREEMPTED, RequestState.PREFILLING],
            RequestState.FAILED,
            "prefilling",
        ),
    ],
)
def test_what_ends_early_is_counted_by_stage(
    states: list[RequestState], end: RequestState, stage: str
) -> None:
    counters, one = Counters(), request()
    for state in [*states, end]:
        one.advance(state, 11.0)
    counters.end(one, 12.0)
    ended = counters.aborted if end is RequestState.ABORTED else counters.failed
    assert ended == {stage: 1}
    assert counters.finished == {}
    assert sum(counters.latency.counts) == 0
    assert sum(counters.queue.counts) == bool(states)


def test_links_add_up_by_direction() -> None:
    counters = Counters()
    counters.link("a", "b", 3)
    counters.link("a", "b", 4)
    counters.link("b", "a", 5)
    counters.link("a", "c", 0)
    assert counters.link_bytes == {("a", "b"): 7, ("b", "a"): 5}
