"""Real vLLM, one prefill and one decode server: the answers of one plain server, and nothing left.

``make test-vllm`` installs vLLM and runs these; they take minutes.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm_kit import free_port
from tests.vllm_servers import (
    PYTHON,
    Begun,
    HandOver,
    Server,
    body_of,
    model_folder,
    running,
    tokens_of,
)

from cloverinfer.config.cluster import ModelConfig
from cloverinfer.models import resolve_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm"),
]
BLOCK = 128
"""vLLM's block size on CPUs."""
TOKENS = 12
AT_ONCE = 16
LONG = 1024
OPTIONS = ["--max-num-batched-tokens", "384", "--max-num-seqs", "16"]
"""So that the long prompt, and what comes beside it, is computed in chunks."""


def prompts() -> list[list[int]]:
    """Fifty: around block boundaries, with shared beginnings, and one that is long."""
    draw = random.Random(5)

    def words(count: int) -> list[int]:
        return [draw.randrange(1000, 30000) for _ in range(count)]

    sizes = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]
    made = [words(size) for size in sizes]
    shared = words(2 * BLOCK + 40)
    made += [shared[: BLOCK + 10 * i] + words(5) for i in range(12)]
    made += [shared + words(1 + i) for i in range(9)]
    made += [words(3 + 4 * i) for i in range(20)]
    return [*made, words(LONG)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = resolve_model(ModelConfig(dtype="float32")).path
    return model_folder(made, tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def servers(folder):
    """A plain one, without the connector; prefill; decode."""
    first = free_port(5)

    def server(name, port, *how):
        made = Server(folder, folder.parent / f"{name}.log", port, *how, options=OPTIONS)
        made.settings = {"lease": 3.0, "retry_timeout": 3.0}
        return made

    plain = server("plain", first)
    prefill = server("prefill", first + 1, "kv_producer", first + 2)
    decode = server("decode", first + 3, "kv_consumer", first + 4)
    with running(plain, prefill, decode):
        yield plain, prefill, decode


@pytest.fixture(scope="module")
def plain_answers(servers):
    """Of the plain server, which then ends."""
    plain = servers[0]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda each: plain.ask(body_of(each, TOKENS)).json(), prompts())
        found = [tokens_of(each) for each in answers]
    plain.kill()
    return found


@pytest.fixture(scope="module")
def pair(servers):
    return servers[1:]


def until_idle(*servers: Server) -> None:
    """All blocks are free. vLLM counts, and gives back some of them, with its next step only."""
    deadline = time.monotonic() + 60
    for server in servers:
        while server.ask(body_of([1], 1)) and server.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline, "blocks stay taken"
            time.sleep(0.2)


def check_alike(found: dict, prompt: list[int], expected: list[int]) -> None:
    assert tokens_of(found) == expected
    told = found["kv_transfer_params"]
    assert told["computed_prompt_tokens"] == 1
    assert 1 <= told["loaded_tokens"] <= len(prompt)


def test_answers_are_those_of_one_server(plain_answers, pair):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda each: HandOver(*pair, each, TOKENS).answer(), prompts()))
    for found, prompt, expected in zip(answers, prompts(), plain_answers, strict=True):
        check_alike(found, prompt, expected)
    until_idle(*pair)


def test_cancelled_before_prefill(pair):
    over = HandOver(*pair, prompts()[7])
    begun = Begun(over.decode, over.decode_body())
    until_taken(over.decode)
    begun.cancel()
    until_idle(*pair)


def until_taken(server: Server) -> None:
    deadline = time.monotonic() + 60
    while not server.metric("vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline, "no blocks are taken"
        time.sleep(0.05)


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
def test_cancelled_while_prefill_computes(pair, who):
    words = random.Random(who)
    over = HandOver(*pair, [words.randrange(1000, 30000) for _ in range(LONG)])
    decode = Begun(over.decode, over.decode_body())
    prefill = Begun(over.prefill, over.prefill_body())
    until_taken(over.prefill)
    if who in ("decode", "both"):
        decode.cancel()
    if who in ("prefill", "both"):
        prefill.cancel()
    prefill.wait()
    decode.wait()
    if who == "prefill":
        assert decode.status == 200, "decode computes by itself"
    until_idle(*pair)


def test_cancelled_while_decoding(pair):
    over = HandOver(*pair, prompts()[8], tokens=1500)
    decode = Begun(over.decode, over.decode_body())
    prefill = Begun(over.prefill, over.prefill_body())
    prefill.wait()
    until_taken(over.decode)
    time.sleep(0.5)
    decode.cancel()
    until_idle(*pair)


def test_a_second_attempt_serves(plain_answers, pair):
    over = HandOver(*pair, prompts()[6])
    decode = Begun(over.decode, over.decode_body())
    first = Begun(over.prefill, over.prefill_body())
    first.cancel()
    assert over.prefill.ask(over.prefill_body(attempt=1)).status_code == 200
    decode.wait()
    assert decode.status == 200, decode.text
    until_idle(*pair)


def test_prefill_killed_and_started_again(plain_answers, pair):
    prefill, decode = pair
    over = HandOver(*pair, prompts()[-1], TOKENS)
    waiting = Begun(decode, over.decode_body())
    begun = Begun(prefill, over.prefill_body())
    until_taken(prefill)
    prefill.kill()
    begun.wait()
    prefill.start()
    waiting.wait()
    assert waiting.status == 200, waiting.text  # it has computed the prompt itself
    prefill.wait()
    check_alike(HandOver(*pair, prompts()[2], TOKENS).answer(), prompts()[2], plain_answers[2])
    until_idle(*pair)


def test_decode_killed_and_started_again(plain_answers, pair):
    prefill, decode = pair
    over = HandOver(*pair, prompts()[-1], TOKENS)
    waiting = Begun(decode, over.decode_body())
    begun = Begun(prefill, over.prefill_body())
    until_taken(decode)
    decode.kill()
    waiting.wait()
    begun.wait()
    decode.start()
    decode.wait()
    until_idle(*pair)
    answer = HandOver(*pair, prompts()[2], TOKENS).answer()
    check_alike(answer, prompts()[2], plain_answers[2])
    until_idle(*pair)
