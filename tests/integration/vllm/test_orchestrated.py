"""Real vLLM, a pair behind ``cloverinfer orchestrate``: the answers of one plain server, whatever
dies, and every block back, at whatever stage clients leave.

Stages are held by an engine that stands still, so that none is met by luck.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.vllm_servers import (
    AT_ONCE,
    PYTHON,
    START_SECONDS,
    Begun,
    Entry,
    Server,
    body_of,
    fresh,
    orchestrated,
    until,
    until_idle,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm"),
]
TRANSPORT = "tcp"
Pair = tuple[Server, Server]
CLIENTS = 8


@pytest.fixture(scope="module")
def entry(pair: Pair) -> Iterator[Entry]:
    with orchestrated(*pair) as made:
        until(made.is_ready, "the pair is found")
        yield made


def test_answers_are_those_of_one_server(prompts, plain_answers, pair, entry):
    decode = pair[1]
    counter = "vllm:request_prefill_kv_computed_tokens_sum"
    before = decode.metric(counter)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [each.json() for each in pool.map(entry.ask, prompts)]
    assert [list(each["choices"][0]["token_ids"]) for each in answers] == plain_answers
    # Told by decode where prefill's blocks came to be whole.
    assert all(each["usage"]["stages"]["transfer"] is not None for each in answers)
    # Of each prompt decode computes the last token at most.
    assert decode.metric(counter) - before <= len(prompts)
    until_idle(*pair)


def begin(entry: Entry, stage: str) -> list[Begun]:
    return [Begun(entry, body_of(fresh(f"{stage} {i}"), 4)) for i in range(CLIENTS)]


def leave(entry: Entry, clients: list[Begun]) -> None:
    for each in clients:
        each.cancel()
    until(lambda: not entry.metric("requests_in_progress"), "the orchestrator lets go of them")


def test_clients_leave_before_anything_is_computed(pair, entry):
    prefill, decode = pair
    with prefill.standing_still(), decode.standing_still():
        clients = begin(entry, "queued")
        until(
            lambda: entry.metric("instance_in_flight") == 2 * CLIENTS,
            "they wait at both instances",
        )
        leave(entry, clients)
    until_idle(*pair)


def test_clients_leave_while_prefill_computes(pair, entry):
    prefill, decode = pair
    before = entry.prefilled()
    clients = begin(entry, "prefill")
    until(lambda: entry.prefilled() > before, "the first prompt is computed")
    with prefill.standing_still():
        assert entry.prefilled() < before + CLIENTS, "others are not"
        leave(entry, clients)
        decode.ask(body_of([1], 1))
        assert decode.usage(), "prefill may still write, so decode keeps these blocks"
    until_idle(*pair)


def test_clients_leave_while_blocks_are_transferred(pair, entry):
    prefill, decode = pair
    before = entry.prefilled()
    clients = begin(entry, "transfer")
    until(lambda: entry.prefilled() > before, "the first prompt is computed")
    with decode.standing_still():
        so_far = entry.prefilled()
        assert so_far < before + CLIENTS, "others are not"
        until(lambda: entry.prefilled() > so_far, "one more is computed")
        prefill.ask(body_of([1], 1))
        assert prefill.usage(), "decode has not all yet, so prefill keeps its blocks"
        leave(entry, clients)
    until_idle(*pair)


def test_clients_leave_while_decode_computes(pair, entry):
    body = body_of(fresh("decode"), 900) | {"stream": True}
    clients = [Begun(entry, body) for _ in range(4)]
    until(lambda: all(each.answers.is_set() for each in clients), "first tokens")
    leave(entry, clients)
    assert all(each.status is None for each in clients), "none had come to its end"
    until_idle(*pair)


def persistent(entry: Entry, prompt: list[int], refused: list[int]) -> list[int]:
    """The tokens of an answer, asked for until there is one."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        answer = entry.ask(prompt)
        if answer.status_code == 200:
            return list(answer.json()["choices"][0]["token_ids"])
        assert answer.status_code >= 500, answer.text
        refused.append(answer.status_code)
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.5)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_killed_and_started_again_under_load(prompts, plain_answers, pair, entry, side):
    prefill, decode = pair
    server = prefill if side == "prefill" else decode
    refused: list[int] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked: list[Future[list[int]]] = [
            pool.submit(persistent, entry, each, refused) for each in prompts
        ]
        until(lambda: sum(each.done() for each in asked) >= 4, "some are answered")
        server.kill()
        assert not all(each.done() for each in asked)
        until(lambda: refused, "others are not")
        server.start()
        server.wait()
        found = [each.result() for each in asked]
    assert found == plain_answers
    until_idle(*pair)
