"""Figures of recorded events whose right values are known by hand."""

from __future__ import annotations

import json

import pytest

from cloverinfer.bench import report, slo
from cloverinfer.bench.records import Record
from cloverinfer.bench.statistics import INTERRUPTED, distribution, summarize
from cloverinfer.core.errors import ConfigError


def record(index: int, sent: float, times: list[float], tokens: int, **fields: object) -> Record:
    ended = times[-1] if times else sent
    base = {"due": sent, "ready": sent, "ended": ended, "prompt_tokens": 10}
    return Record(index, sent=sent, times=times, output_tokens=tokens, **(base | fields))  # type: ignore[arg-type]


def test_times_of_one_request() -> None:
    one = record(0, 2.0, [2.5, 2.75, 3.5], 3)
    assert (one.ttft, one.tpot, one.latency) == (0.5, 0.5, 1.5)
    assert one.gaps() == [0.25, 0.75]
    # Four tokens in two pieces: TPOT is by tokens, ITL by pieces.
    two = record(0, 0.0, [1.0, 2.5], 4)
    assert two.tpot == 0.5
    assert two.gaps() == [1.5]
    assert record(0, 0.0, [1.0], 1).tpot is None
    assert record(0, 0.0, [], 0).ttft is None


def test_figures_of_a_run() -> None:
    records = [
        record(0, 0.0, [1.0, 2.0], 2),
        record(1, 1.0, [1.5, 2.5, 3.5], 3),
        record(2, 4.0, [], 0, ended=5.0, error="HTTP 500: no"),
        record(3, 6.0, [8.0], 1, ended=10.0, error=INTERRUPTED),
    ]
    summary = summarize(records, percentiles=(50,))
    assert (summary.requests, summary.completed, summary.failed, summary.interrupted) == (
        4,
        2,
        1,
        1,
    )
    assert summary.duration == 10.0
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 5)
    assert summary.request_throughput == pytest.approx(0.2)
    assert summary.output_throughput == pytest.approx(0.5)
    assert summary.total_throughput == pytest.approx(2.5)
    assert summary.concurrency == pytest.approx((2 + 2.5 + 1 + 4) / 10)
    assert summary.max_concurrency == 2
    assert summary.errors == {"HTTP 500: no": 1}
    ttft, tpot = summary.distributions["ttft"], summary.distributions["tpot"]
    assert (ttft.count, ttft.mean, ttft.largest) == (2, 0.75, 1.0)
    assert tpot.mean == 1.0
    assert summary.distributions["itl"].count == 3
    assert summary.distributions["e2el"].percentiles == {"p50": 2.25}


def test_percentiles_are_linear_between_values() -> None:
    one = distribution([4.0, 1.0, 3.0, 2.0], (0, 25, 50, 99, 100))
    assert one.percentiles == pytest.approx(
        {"p0": 1.0, "p25": 1.75, "p50": 2.5, "p99": 3.97, "p100": 4.0}
    )


def test_goodput_counts_what_meets_every_objective() -> None:
    records = [
        record(0, 0.0, [1.0, 1.0625], 2),
        record(1, 0.0, [0.5, 2.5], 2),
        record(2, 0.0, [0.9], 1),
        record(3, 0.0, [0.1, 0.2], 2, error="HTTP 500: no"),
        record(4, 0.0, [1.0, 4.0], 49),
    ]
    good = summarize(records, slo=slo.parse(["ttft=1s,tpot=62.5ms"]))
    # 0: just so; 1: TPOT of 2 s; 2: a single token has no TPOT; 3: failed; 4: 3 s over 48 tokens.
    assert good.good == 3
    assert good.goodput == pytest.approx(3 / 4.0)
    assert summarize(records, slo={"e2el": 0.95}).good == 1
    assert summarize(records).goodput is None


@pytest.mark.parametrize(
    ("texts", "limits"),
    [
        (["ttft=1s,tpot=50ms"], {"ttft": 1.0, "tpot": 0.05}),
        (["ttft=1s", "e2el=2.5s"], {"ttft": 1.0, "e2el": 2.5}),
        (["tpot=200us"], {"tpot": 0.0002}),
    ],
)
def test_objectives_are_read(texts: list[str], limits: dict[str, float]) -> None:
    assert slo.parse(texts) == pytest.approx(limits)


def test_objectives_as_vllm_writes_them() -> None:
    assert slo.parse(["ttft:1000", "tpot:50"], bare_unit=1e-3) == {"ttft": 1.0, "tpot": 0.05}


@pytest.mark.parametrize("text", ["ttft", "latency=1s", "ttft=1h", "ttft=1", "ttft=1.2.3s", ""])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        slo.parse([text])


def test_a_schedule_that_was_not_kept_is_told() -> None:
    on_time = [record(i, i / 10, [i / 10 + 0.05], 1) for i in range(20)]
    assert summarize(on_time).notes == []
    late = [record(i, i / 10, [i + 1.0], 1, ready=i / 10 + i * 0.02) for i in range(20)]
    assert "could not keep its schedule" in summarize(late).notes[0]
    slow = [record(i, i / 5, [i + 1.0], 1, due=i / 10, ready=i / 10) for i in range(20)]
    notes = summarize(slow).notes
    assert any("sent 5.00 requests/s where the schedule wanted 10.00" in one for one in notes)
    assert any("waited for the limit" in one for one in notes)
    assert any("99% of a core" in one for one in summarize(on_time, client_cpu=0.99).notes)


def test_who_counted_the_tokens_is_told() -> None:
    assert "tokenizer" in summarize([record(0, 0.0, [1.0], 1, tokens_from="tokenizer")]).notes[0]
    assert "pieces" in summarize([record(0, 0.0, [1.0], 1, tokens_from="pieces")]).notes[0]
    assert "2.00 tokens came in a piece" in summarize([record(0, 0.0, [1.0, 2.0], 4)]).notes[0]
    unknown = summarize([record(0, 0.0, [1.0], 1, prompt_tokens=None)])
    assert "prompt tokens of 1 requests are not known" in unknown.notes[0]


def test_reports_say_the_same() -> None:
    records = [record(1, 1.0, [1.5], 1), record(0, 0.0, [0.5, 1.0], 2, error="a|b\nc")]
    summary = summarize(records, slo={"ttft": 1.0})
    text = report.markdown(summary, {"model": "m"})
    assert "| requests completed | 1 of 2 |" in text
    assert "| model | m |" in text
    assert "| a\\|b c | 1 |" in text
    assert "CPU of the client" not in text
    busy = summarize(records, client_cpu=0.5)
    assert "| CPU of the client | 50% of a core |" in report.markdown(busy, {})
    assert "goodput under ttft <= 1000 ms" in text
    data = json.loads(report.as_json(summary, {"model": "m"}))
    assert (data["completed"], data["setting"]) == (1, {"model": "m"})
    lines = [json.loads(line) for line in report.jsonl(records).splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert lines[0]["times"] == [0.5, 1.0]


def test_no_requests_make_a_report_all_the_same() -> None:
    assert "0 of 0" in report.markdown(summarize([]), {})
