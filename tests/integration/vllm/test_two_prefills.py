"""Two real vLLM servers that prefill and one that decodes, behind ``cloverinfer orchestrate``: who
is chosen by a prompt's beginning, and what becomes of a request whose prefill dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.vllm_kit import free_port
from tests.vllm_servers import (
    PYTHON,
    TOKENS,
    Entry,
    Server,
    body_of,
    fresh,
    orchestrated,
    running,
    tokens_of,
    until,
    until_idle,
)

from cloverinfer.transport.shm import remove_leftovers

from .conftest import OPTIONS, SETTINGS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm"),
]
SHARED = 512
"""Tokens of a beginning: four of vLLM's blocks."""


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Server]]:
    """Two prefills and a decode."""
    first = free_port(6)

    def server(name: str, role: str, port: int) -> Server:
        log = folder.parent / f"{name}.log"
        return Server(folder, log, port, role, port + 1, OPTIONS, dict(SETTINGS))

    made = [server(f"prefill-{i}", "kv_producer", first + 2 * i) for i in range(2)]
    made.append(server("decode-2", "kv_consumer", first + 4))
    with running(*made):
        yield made
    remove_leftovers()  # of the one that was killed, should nobody have swept in time


def prefilled_by(entry: Entry, servers: list[Server]) -> list[float]:
    return [entry.metric("attempts_total", instance=one.url, result="ok") for one in servers[:2]]


def ask_and_see(entry: Entry, servers: list[Server], prompt: list[int]) -> int:
    """Which of the two prefilled it."""
    before = prefilled_by(entry, servers)
    assert entry.ask(prompt).status_code == 200
    # Prefill's own answer may end after decode's.
    until(lambda: prefilled_by(entry, servers) != before, "a prefill has answered")
    counts = zip(prefilled_by(entry, servers), before, strict=True)
    return [now - then for now, then in counts].index(1.0)


def test_prompts_that_begin_alike_are_prefilled_by_one(servers):
    beginnings = [fresh(f"beginning {i}")[:SHARED] for i in range(2)]
    with orchestrated(*servers, policy="prefix_aware") as entry:
        until(entry.is_ready, "all are found")
        chosen = [
            [ask_and_see(entry, servers, beginning + fresh(f"{turn}")[:9]) for turn in range(3)]
            for beginning in beginnings
        ]
    assert all(len(set(each)) == 1 for each in chosen)
    assert chosen[0][0] != chosen[1][0]
    # Each read its beginning once, and found it in its cache twice.
    assert [one.metric("vllm:prefix_cache_hits_total") for one in servers[:2]] == [2 * SHARED] * 2


def test_a_prompt_whose_prefill_dies_is_prefilled_by_the_other(servers):
    decode, prompt = servers[2], fresh("dies")
    with orchestrated(*servers) as entry, ThreadPoolExecutor(1) as pool:
        until(entry.is_ready, "all are found")
        with servers[0].standing_still(), servers[1].standing_still():
            answer = pool.submit(entry.ask, prompt)

            def sent() -> list[float]:
                return [entry.metric("instance_in_flight", instance=one.url) for one in servers[:2]]

            until(lambda: sum(sent()) == 1, "one of them has it")
            victim = servers[sent().index(1.0)]
            victim.kill()
        assert answer.result().status_code == 200
        assert entry.metric("attempts_total", role="prefill", result="fault") == 1
        assert entry.metric("attempts_total", role="decode") == 1, "decode was asked once"
    assert tokens_of(answer.result().json()) == tokens_of(
        decode.ask(body_of(prompt, TOKENS)).json()
    )
    until_idle(*(one for one in servers if one is not victim))
