"""Real vLLM, one prefill and one decode server: the answers of one plain server, and nothing left.

``make test-vllm`` installs vLLM and runs these; they take minutes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm_servers import (
    AT_ONCE,
    PYTHON,
    TOKENS,
    Begun,
    HandOver,
    fresh,
    tokens_of,
    until,
    until_idle,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm"),
]
TRANSPORT = "auto"


def check_alike(found: dict, prompt: list[int], expected: list[int]) -> None:
    assert tokens_of(found) == expected
    told = found["kv_transfer_params"]
    assert told["computed_prompt_tokens"] == 1
    assert 1 <= told["loaded_tokens"] <= len(prompt)


def test_answers_are_those_of_one_server(prompts, plain_answers, pair):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda each: HandOver(*pair, each, TOKENS).answer(), prompts))
    for found, prompt, expected in zip(answers, prompts, plain_answers, strict=True):
        check_alike(found, prompt, expected)
    until_idle(*pair)


def test_cancelled_before_prefill(pair):
    over = HandOver(*pair, fresh("before"))
    begun = Begun(over.decode, over.decode_body())
    until(over.decode.usage, "blocks are taken")
    begun.cancel()
    until_idle(*pair)


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
def test_cancelled_while_prefill_computes(pair, who):
    over = HandOver(*pair, fresh(who))
    decode = Begun(over.decode, over.decode_body())
    until(over.decode.usage, "blocks are taken")
    prefill = Begun(over.prefill, over.prefill_body())
    until(over.prefill.usage, "it computes")
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
    over = HandOver(*pair, fresh("decoding"), tokens=900)
    decode = Begun(over.decode, over.decode_body() | {"stream": True})
    prefill = Begun(over.prefill, over.prefill_body())
    prefill.wait()
    until(decode.answers.is_set, "a first token")
    decode.cancel()
    assert decode.status is None, "it was cancelled before its end"
    until_idle(*pair)


def test_a_second_attempt_serves(pair):
    over = HandOver(*pair, fresh("second"))
    decode = Begun(over.decode, over.decode_body())
    first = Begun(over.prefill, over.prefill_body())
    first.cancel()
    assert over.prefill.ask(over.prefill_body(attempt=1)).status_code == 200
    decode.wait()
    assert decode.status == 200, decode.text
    until_idle(*pair)


def test_prefill_killed_and_started_again(prompts, plain_answers, pair):
    """Eight prompts, so that the death is in the midst of them however fast this machine is."""
    prefill, decode = pair
    overs = [HandOver(*pair, fresh(f"killed {i}")) for i in range(8)]
    waiting = [Begun(decode, over.decode_body()) for over in overs]
    begun = [Begun(prefill, over.prefill_body()) for over in overs]
    until(lambda: any(each.answers.is_set() for each in begun), "the first has its prompt")
    with prefill.standing_still():
        assert not all(each.answers.is_set() for each in begun)
        prefill.kill()
    for each in (*begun, *waiting):
        each.wait()
    # Without another prefill decode has computed by itself.
    assert [each.status for each in waiting] == [200] * len(waiting)
    until_idle(decode)
    prefill.start()
    prefill.wait()
    again = HandOver(*pair, prompts[2], TOKENS).answer()
    assert tokens_of(again) == plain_answers[2]
    until_idle(*pair)
