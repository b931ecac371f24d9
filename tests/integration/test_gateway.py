"""The orchestrator over fake instances on real sockets: what passes, and what becomes of faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.gateway_kit import Stage, stage, until

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def on() -> Iterator[Stage]:
    with stage() as made:
        yield made


def payloads(text: str) -> list[Any]:
    data = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def test_whole_answers_and_their_stages(on: Stage) -> None:
    on.orchestrate(("both", on.fake()))
    answer = on.post(max_tokens=2)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "w0 w1 "
    usage = answer.json()["usage"]
    stages = usage.pop("stages")
    assert stages["queue"] >= 0
    assert [stages[name] for name in ("prefill", "transfer", "first_decode", "ttft")] == [None] * 4
    assert usage == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    until(lambda: on.count('requests_total{outcome="ok"}') == 1)
    until(lambda: on.count('stage_seconds_count{stage="queue"}') == 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_pass_byte_by_byte(on: Stage, path: str) -> None:
    fake = on.fake()
    on.orchestrate(("both", fake))
    body = {"model": "m", "prompt": "x", "messages": [], "stream": True}
    direct = on.client.post(fake.url + path, json=body)
    through = on.client.post(on.base + path, json=body)
    assert through.content == direct.content
    assert through.headers["content-type"] == direct.headers["content-type"]
    # With the usage asked for, only its event differs, and by the stages alone.
    direct = on.client.post(fake.url + path, json=body | USAGE)
    through = on.client.post(on.base + path, json=body | USAGE)
    theirs, ours = payloads(direct.text), payloads(through.text)
    stages = ours[-2]["usage"].pop("stages")
    assert ours == theirs
    assert stages["ttft"] >= stages["queue"] >= 0


def test_answers_stay_as_they_came_where_asked(on: Stage) -> None:
    fake = on.fake()
    on.orchestrate(("both", fake), usage_stages=False)
    for more in ({}, USAGE):
        body = {"model": "m", "prompt": "x", **more}
        direct = on.client.post(fake.url + "/v1/completions", json=body)
        assert on.client.post(on.base + "/v1/completions", json=body).content == direct.content
    assert fake.seen[0] == fake.seen[1]


def test_a_pair_answers_and_tells_its_stages(on: Stage) -> None:
    prefill, decode = on.fake(), on.fake(delay=0.2)
    on.orchestrate(("prefill", prefill), ("decode", decode))
    answer = on.post(max_tokens=3, min_tokens=2, temperature=0)
    assert answer.json()["choices"][0]["text"] == "w0 w1 w2 "
    assert answer.json()["kv_transfer_params"] is None
    stages = answer.json()["usage"]["stages"]
    assert stages["transfer"] == 0.125
    assert stages["prefill"] > 0
    (asked,), (told,) = decode.seen, prefill.seen
    claim = asked.pop("kv_transfer_params")
    give = told.pop("kv_transfer_params")
    assert claim == {"do_remote_prefill": True, "transfer_id": claim["transfer_id"]}
    assert give == {
        "do_remote_decode": True,
        "transfer_id": claim["transfer_id"],
        "decode_address": "127.0.0.1:9",
        "attempt": 0,
    }
    assert asked == {
        "model": "m", "prompt": "a b", "max_tokens": 3, "min_tokens": 2, "temperature": 0,
    }  # fmt: skip
    assert told == {
        "model": "m", "prompt": "a b", "max_tokens": 1, "stream": False, "temperature": 0,
    }  # fmt: skip


def test_a_pair_streams(on: Stage) -> None:
    prefill, decode = on.fake(), on.fake(delay=0.2)
    on.orchestrate(("prefill", prefill), ("decode", decode))
    events = payloads(on.post("/v1/chat/completions", **USAGE).text)
    assert events[-1] == "[DONE]"
    stages = events[-2]["usage"]["stages"]
    assert stages["first_decode"] > 0
    assert stages["ttft"] >= stages["prefill"] > 0
    assert prefill.seen[0]["max_completion_tokens"] == 1
    assert "stream_options" not in prefill.seen[0]
    until(lambda: on.count('stage_seconds_count{stage="first_decode"}') == 1)


@pytest.mark.parametrize("status", [503, 0])
def test_a_failed_prefill_is_done_by_another(on: Stage, status: int) -> None:
    bad, good, decode = on.fake(status=status), on.fake(), on.fake()
    on.orchestrate(("prefill", bad), ("prefill", good), ("decode", decode), policy="round_robin")
    attempts = []
    for _ in range(4):
        answer = on.post()
        assert answer.json()["choices"][0]["text"] == "w0 w1 w2 "
        attempts.append(good.seen[-1]["kv_transfer_params"])
    # Each time decode was asked once, and the transfer kept its name.
    assert len(decode.seen) == 4
    ids = [one["kv_transfer_params"]["transfer_id"] for one in decode.seen]
    assert [one["transfer_id"] for one in attempts] == ids
    assert {one["attempt"] for one in attempts} == {0, 1}
    assert on.transfers.claims == {one["transfer_id"]: one["attempt"] for one in attempts}


def test_where_prefill_stands_still_decode_begins_anew(on: Stage) -> None:
    bad, good, decode = on.fake(delay=15.0), on.fake(), on.fake()
    instances = ("prefill", bad), ("prefill", good), ("decode", decode)
    on.orchestrate(*instances, policy="round_robin", hang_timeout=0.6)
    bad.frozen = True
    while not bad.seen:
        assert on.post().status_code == 200
    # What it was granted it may still write once it goes on, so decode was given up with it.
    lost, made = (one["kv_transfer_params"]["transfer_id"] for one in decode.seen[-2:])
    assert bad.seen[-1]["kv_transfer_params"]["transfer_id"] == lost
    assert good.seen[-1]["kv_transfer_params"] | {"decode_address": ""} == {
        "do_remote_decode": True, "transfer_id": made, "attempt": 0, "decode_address": "",
    }  # fmt: skip
    until(lambda: decode.cancelled == 1 and bad.inside == 0)


def test_half_a_pair_serves_nothing(on: Stage) -> None:
    prefill, decode = on.fake(), on.fake()
    on.orchestrate(("prefill", prefill), ("decode", decode))
    prefill.healthy = False
    until(lambda: on.client.get(f"{on.base}/ready").status_code == 503)
    answer = on.post()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_instance"
    assert "0 of 1 prefill" in answer.json()["error"]["message"]
    assert decode.seen == []
    assert on.client.get(f"{on.base}/v1/models").json()["data"] == []
    assert "503" in next(row["problem"] for row in on.cluster() if row["role"] == "prefill")
    prefill.healthy = True
    until(lambda: on.client.get(f"{on.base}/ready").status_code == 200)
    assert on.post().status_code == 200


def test_when_no_prefill_succeeds_decode_is_let_go(on: Stage) -> None:
    prefill, decode = on.fake(status=500), on.fake()
    on.orchestrate(("prefill", prefill), ("decode", decode))
    answer = on.post()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "told to answer 500")
    until(lambda: decode.cancelled == 1 and decode.inside == 0)
    until(lambda: on.count('requests_total{outcome="failed"}') == 1)


def test_what_prefill_refuses_is_refused(on: Stage) -> None:
    prefill, decode = on.fake(status=400), on.fake()
    on.orchestrate(("prefill", prefill), ("decode", decode))
    assert on.post(stream=True).status_code == 400
    until(lambda: decode.inside == 0)
    assert {row["breaker"] for row in on.cluster()} == {"closed"}
    until(lambda: on.count('requests_total{outcome="refused"}') == 1)


def test_a_failed_decode_ends_its_prefill_and_a_new_pair_is_tried(on: Stage) -> None:
    prefill, bad, good = on.fake(delay=0.3), on.fake(status=0), on.fake()
    on.orchestrate(("prefill", prefill), ("decode", bad), ("decode", good), policy="round_robin")
    for _ in range(2):
        assert on.post().json()["choices"][0]["text"] == "w0 w1 w2 "
    assert bad.seen
    until(lambda: prefill.inside == 0)
    failed, lasting, heard = (
        [body["kv_transfer_params"]["transfer_id"] for body in fake.seen]
        for fake in (bad, good, prefill)
    )
    # Of pairs that failed, prefill may have heard or not; each pair has a transfer of its own.
    assert set(lasting) <= set(heard) <= {*failed, *lasting}
    assert len(set(heard)) == len(heard)
    assert prefill.cancelled == len(heard) - len(lasting)


def test_what_a_pair_cannot_share_decode_does_alone(on: Stage) -> None:
    prefill, decode = on.fake(), on.fake()
    on.orchestrate(("prefill", prefill), ("decode", decode))
    for more in ({"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"prompt_logprobs": 1}):
        assert on.post(**more).status_code == 200
        assert "kv_transfer_params" not in decode.seen[-1]
    assert prefill.seen == []
    for more in ({"n": 1}, {"prompt": ["a"]}, {"prompt": [1, 2]}, {"prompt_logprobs": None}):
        assert on.post(**more).status_code == 200
    assert len(prefill.seen) == 4


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, None), (503, "draining"), (0, None), (429, None), (503, "queue_timeout")],
)
def test_a_fault_is_mended_elsewhere(on: Stage, status: int, code: str | None) -> None:
    bad, good = on.fake(status=status, code=code), on.fake()
    busy = status == 429 or code == "queue_timeout"
    on.orchestrate(("both", bad), ("both", good), policy="round_robin", breaker_faults=2)
    for _ in range(6):
        assert on.post(stream=True).status_code == 200
    assert len(good.seen) == 6
    assert len(bad.seen) > 2 if busy else len(bad.seen) == 2  # too much to do: no fault
    states = {row["url"]: row["breaker"] for row in on.cluster()}
    assert states == {bad.url: "closed" if busy else "open", good.url: "closed"}


def test_a_breaker_closes_once_a_request_succeeds(on: Stage) -> None:
    fake = on.fake(status=500)
    on.orchestrate(("both", fake), breaker_faults=1, breaker_seconds=0.2)
    assert on.post().status_code == 500
    assert on.post().json()["error"]["code"] == "no_instance"
    assert len(fake.seen) == 1
    fake.status = 200
    until(lambda: on.post().status_code == 200)
    assert on.cluster()[0]["breaker"] == "closed"


@pytest.mark.parametrize("status", [400, 404, 422])
def test_what_clients_do_wrong_trips_no_breaker(on: Stage, status: int) -> None:
    fake = on.fake(status=status)
    on.orchestrate(("both", fake), breaker_faults=1)
    for _ in range(3):
        answer = on.post()
        assert (answer.status_code, len(fake.seen) > 0) == (status, True)
    assert on.cluster()[0]["breaker"] == "closed"


@pytest.mark.parametrize(("status", "code"), [(429, "queue_full"), (503, "queue_timeout")])
def test_the_last_word_is_an_instances(on: Stage, status: int, code: str) -> None:
    instances = [("both", on.fake(status=status, code=code)) for _ in range(2)]
    on.orchestrate(*instances)
    answer = on.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["retry-after"] == "7"
    assert {row["breaker"] for row in on.cluster()} == {"closed"}


def test_a_stream_that_breaks_off_never_looks_finished(on: Stage) -> None:
    fake = on.fake(dies_after=2)
    on.orchestrate(("both", fake), breaker_faults=1)
    events = payloads(on.post(max_tokens=5, stream=True).text)
    assert [one["choices"][0]["text"] for one in events[:-1]] == ["w0 ", "w1 "]
    assert events[-1]["error"]["code"] == "instance_lost"
    assert on.cluster()[0]["breaker"] == "open"
    until(lambda: on.count('requests_total{outcome="failed"}') == 1)


def test_an_instance_that_dies_before_its_first_token_is_replaced(on: Stage) -> None:
    bad, good = on.fake(dies_after=0), on.fake()
    on.orchestrate(("both", bad), ("both", good), policy="round_robin")
    for _ in range(2):
        assert payloads(on.post(stream=True).text)[-1] == "[DONE]"
    assert len(bad.seen) >= 1


def test_requests_on_an_instance_that_stands_still_are_done_elsewhere(on: Stage) -> None:
    bad, good = on.fake(delay=15.0), on.fake()
    on.orchestrate(("both", bad), ("both", good), policy="round_robin", hang_timeout=0.6)
    bad.frozen = True
    for stream in (False, True):
        while not bad.seen:
            assert on.post(stream=stream).status_code == 200
        bad.seen.clear()
        until(lambda: bad.inside == 0)
    assert on.count('attempts_total{instance="' + bad.url) >= 2


def test_an_answer_of_one_that_stands_still_breaks_off(on: Stage) -> None:
    fake = on.fake(delay=0.3)
    on.orchestrate(("both", fake), hang_timeout=0.6)
    assert payloads(on.post(max_tokens=6, stream=True).text)[-1] == "[DONE]"  # slow is well
    fake.frozen, fake.delay = True, 0.0
    fake.stops_after = 2
    events = payloads(on.post(max_tokens=6, stream=True).text)
    assert [one["choices"][0]["text"] for one in events[:-1]] == ["w0 ", "w1 "]
    assert "stands still" in events[-1]["error"]["message"]


async def leave(on: Stage, body: dict[str, Any], reached: Callable[[], bool]) -> None:
    """Posts, and is gone once what was posted has come that far."""
    async with httpx.AsyncClient(base_url=on.base, timeout=60) as client:
        post = asyncio.create_task(client.post("/v1/completions", json=body))
        while not reached():
            assert not post.done()
            await asyncio.sleep(0.01)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage_of", ["prefill", "decode"])
def test_a_client_that_leaves_ends_both_sides(on: Stage, stream: bool, stage_of: str) -> None:
    prefill = on.fake(delay=10.0 if stage_of == "prefill" else 0.0)
    decode = on.fake(delay=10.0 if stage_of == "decode" else 0.0)
    on.orchestrate(("prefill", prefill), ("decode", decode))
    body = {"model": "m", "prompt": "x", "max_tokens": 50, "stream": stream}

    async def reached() -> bool:
        at_prefill = prefill.inside == (1 if stage_of == "prefill" else 0)
        return bool(prefill.seen) and at_prefill and decode.inside == 1

    asyncio.run(leave(on, body, lambda: on.loop.call(reached())))
    until(lambda: decode.inside == 0 and prefill.inside == 0)
    assert decode.cancelled == 1
    assert prefill.cancelled == (1 if stage_of == "prefill" else 0)
    until(lambda: on.count('requests_total{outcome="cancelled"}') == 1)
    assert {row["in_flight"] for row in on.cluster()} == {0}
    assert {row["breaker"] for row in on.cluster()} == {"closed"}
