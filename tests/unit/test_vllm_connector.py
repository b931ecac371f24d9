"""Prefill's blocks become decode's, whole or not at all, and both sides get theirs back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm_child import RemoteEngine
from tests.vllm_kit import FakeEngine, until

from cloverinfer.core.errors import TransportError
from cloverinfer.integrations.vllm import worker as worker_module
from cloverinfer.integrations.vllm.courier import BEAT_SECONDS, Wire
from cloverinfer.integrations.vllm.wire import Dropped
from cloverinfer.transport import shm
from cloverinfer.transport._shm_files import names


@pytest.fixture
def engines():
    made = []

    def make(role, ranks=1, **options):
        made.append(FakeEngine(role, ranks, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def params(decode, transfer="t", attempt=0):
    return {"transfer_id": transfer, "attempt": attempt, "decode_address": decode.address}


@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
@pytest.mark.parametrize("chunk", [24, 1000])
def test_a_prompt_arrives_whole(engines, transport, tokens, chunk):
    prefill = engines("prefill", transport=transport)
    decode = engines("decode", transport=transport)
    decode.wait_for_remote("d", tokens, "t")
    prefill.prefill("p", tokens, params(decode), chunk=chunk)
    answer = prefill.finish("p")
    assert answer == {"transfer_id": "t", "attempt": 0, "prompt_tokens": tokens}
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.holds("d", 0, tokens)
    assert decode.bad == set()


def test_where_memory_cannot_be_reached_another_wire_serves(engines, monkeypatch):
    def denied(page, pid):
        raise TransportError("the kernel says no")

    monkeypatch.setattr(shm._native, "may_write", denied)
    prefill, decode = engines("prefill", transport="auto"), engines("decode", transport="auto")
    decode.wait_for_remote("d", 50, "t")
    prefill.prefill("p", 50, params(decode))
    decode.until_loaded("d")
    assert decode.holds("d", 0, 50)
    assert decode.bad == set()


def test_prefill_may_come_first(engines):
    prefill, decode = engines("prefill"), engines("decode")
    prefill.prefill("p", 50, params(decode), chunk=20)
    prefill.finish("p")
    assert prefill.sent == set()
    decode.wait_for_remote("d", 50, "t")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.holds("d", 0, 50)


def test_decode_may_start_later_than_prefill(engines):
    prefill = engines("prefill")
    ahead = engines("decode")
    ahead.close()
    prefill.prefill("p", 50, params(ahead))
    decode = engines("decode", kv_port=ahead.port)
    decode.wait_for_remote("d", 50, "t")
    decode.until_loaded("d")
    assert decode.holds("d", 0, 50)


def test_what_decode_holds_is_not_sent_and_what_prefill_cached_is(engines):
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 100, "t", held=32)
    prefill.prefill("p", 100, params(decode), cached=64, chunk=10)
    prefill.finish("p")
    decode.until_loaded("d")
    assert decode.holds("d", 32, 100)
    assert not decode.holds("d", 31, 32)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ({"size": 16}, {"size": 32}),
        ({"size": 32}, {"size": 16}),
        ({"size": 24}, {"size": 16}),
        ({"order": "NH"}, {"order": "HN"}),
        ({"order": "NH", "size": 32}, {"order": "NH", "size": 16}),
        ({"ranks": 2}, {"ranks": 1}),
        ({"ranks": 1}, {"ranks": 2}),
        ({"ranks": 4, "size": 32}, {"ranks": 2, "order": "NH"}),
    ],
)
def test_blocks_and_heads_are_cut_anew(engines, sender, receiver):
    prefill, decode = engines("prefill", **sender), engines("decode", **receiver)
    decode.wait_for_remote("d", 75, "t")
    prefill.prefill("p", 75, params(decode), chunk=30)
    prefill.finish("p")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.holds("d", 0, 75)


@pytest.mark.parametrize(
    ("sender", "receiver", "field", "values"),
    [
        ({"size": 16, "opaque": True}, {"size": 32, "opaque": True}, "block size", ("16", "32")),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "type", ("float32", "bfloat16")),
        ({"model": "a"}, {"model": "b"}, "model", ("a", "b")),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    engines, caplog, sender, receiver, field, values
):
    prefill, decode = engines("prefill", **sender), engines("decode", **receiver)
    decode.wait_for_remote("d", 40, "t")
    prefill.prefill("p", 40, params(decode))
    prefill.finish("p")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.bad == set(decode.tables["d"])
    answer = decode.finish("d")
    assert field in answer["error"]
    assert all(each in answer["error"] for each in values)


def test_another_secret_is_refused_and_frees_prefill_at_once(engines, caplog):
    prefill, decode = engines("prefill", secret="a"), engines("decode", secret="b")
    decode.wait_for_remote("d", 40, "t")
    prefill.prefill("p", 40, params(decode))
    prefill.finish("p")
    prefill.until_sent("p")  # where it went on knocking it would keep them for claim_timeout
    (told,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "takes no blocks" in told.getMessage()
    assert "another network.secret" in told.getMessage()


def test_other_prompts_are_refused(engines):
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 40, "t")
    prefill.begin("p", 40, params(decode))
    prefill.requests["p"].prompt_token_ids[3] += 1
    prefill.compute("p")
    prefill.finish("p")
    prefill.until_sent("p")
    assert decode.loaded == set()
    prefill.prefill("q", 40, params(decode, attempt=1))
    decode.until_loaded("d")
    assert decode.holds("d", 0, 40)


def test_an_abort_at_decode_frees_both(engines):
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    decode.finish("d")
    assert decode.stays
    decode.until_loaded("d")
    assert decode.bad == set()
    prefill.finish("p")
    prefill.until_sent("p")


def test_who_is_asked_to_leave_is_asked_until_it_has(engines, monkeypatch):
    prefill, decode = engines("prefill"), engines("decode")
    begin(prefill, decode)
    reply, lost = Wire.reply, []

    def loses_the_first(wire, peer, message):
        if isinstance(message, Dropped) and not lost:
            lost.append(message)
            return True
        return reply(wire, peer, message)

    monkeypatch.setattr(Wire, "reply", loses_the_first)
    decode.finish("d")
    decode.until_loaded("d")
    assert lost


def test_an_abort_at_decode_before_any_prefill(engines):
    decode = engines("decode")
    decode.wait_for_remote("d", 64, "t")
    decode.finish("d")
    assert decode.stays
    decode.until_loaded("d")


def test_an_abort_at_prefill_leaves_decode_for_the_next(engines):
    prefill, other, decode = engines("prefill"), engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    prefill.finish("p")
    prefill.until_sent("p")
    other.prefill("q", 64, params(decode, attempt=1))
    other.finish("q")
    decode.until_loaded("d")
    other.until_sent("q")
    assert decode.holds("d", 0, 64)
    assert decode.finish("d")["attempt"] == 1


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_abort_at_prefill_leaves_its_other_transfers_alone(engines, transport):
    prefill = engines("prefill", transport=transport)
    decode = engines("decode", transport=transport)
    begin(prefill, decode)
    decode.wait_for_remote("e", 64, "u")
    prefill.begin("q", 64, params(decode, "u"))
    prefill.compute("q", chunk=32, upto=32)
    prefill.finish("q")
    prefill.until_sent("q")
    other = engines("prefill", transport=transport)
    other.prefill("r", 64, params(decode, "u", attempt=1))
    decode.until_loaded("e")  # so it has heard of the abort
    prefill.step("p", 32, 32)
    prefill.finish("p")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.bad == set()
    assert decode.holds("d", 0, 64)


def test_a_second_greeting_leaves_transfers_alone(engines):
    """It is sent where the first was not answered at once, and may be late itself."""
    prefill, decode = engines("prefill"), engines("decode")
    begin(prefill, decode)
    prefill.greet_again(decode)
    prefill.step("p", 32, 32)
    prefill.finish("p")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.bad == set()
    assert decode.holds("d", 0, 64)


def test_a_newer_attempt_takes_the_place_of_one_that_lives(engines):
    prefill, other, decode = engines("prefill"), engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    other.prefill("q", 64, params(decode, attempt=1))
    decode.until_loaded("d")
    assert decode.finish("d")["attempt"] == 1
    prefill.step("p", 32, 32)
    prefill.finish("p")
    prefill.until_sent("p")


def test_a_claim_that_comes_when_all_is_over_is_denied(engines):
    late, prefill, decode = engines("prefill"), engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 40, "t")
    prefill.prefill("p", 40, params(decode))
    decode.until_loaded("d")
    late.prefill("q", 40, params(decode, attempt=1))
    late.finish("q")
    late.until_sent("q")
    assert decode.holds("d", 0, 40)


def begin(prefill, decode):
    """Half of a prompt is there."""
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    until(lambda: decode.holds("d", 0, 32))


LONG = 1000.0
"""Seconds: a lease that ends in no test."""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_prefill_that_dies_is_cut_off_and_loading_fails(engines, transport):
    prefill = engines("prefill", transport=transport)
    decode = engines("decode", transport=transport, lease=LONG, retry_timeout=0.2)
    begin(prefill, decode)
    prefill.close()
    decode.until_loaded("d")
    assert decode.bad == set(decode.tables["d"])
    assert "no prefill" in decode.finish("d")["error"]


def test_a_prefill_that_is_silent_is_cut_off_and_loading_fails(engines):
    prefill, decode = engines("prefill"), engines("decode", lease=0.5, retry_timeout=0.2)
    begin(prefill, decode)
    prefill.fall_silent()
    decode.until_loaded("d")
    assert decode.bad == set(decode.tables["d"])


def test_who_stood_still_takes_nobody_for_silent(engines):
    prefill, decode = engines("prefill", lease=0.5), engines("decode", lease=0.5)
    begin(prefill, decode)
    for engine in (prefill, decode):
        engine.stand_still(1.2)
    prefill.step("p", 32, 32)
    prefill.finish("p")
    decode.until_loaded("d")
    prefill.until_sent("p")
    assert decode.bad == set()
    assert decode.holds("d", 0, 64)


def test_links_outlive_a_process_that_stands_still(engines):
    """For less than the lease: what was said to it meanwhile is late, and no more."""
    prefill, decode = engines("prefill", lease=60.0), RemoteEngine("decode", lease=60.0)
    try:
        decode.ask("wait_for_remote", "d", 64, "t")
        prefill.begin("p", 64, params(decode))
        prefill.compute("p", chunk=32, upto=32)
        until(lambda: decode.ask("holds", "d", 0, 32))
        with decode.stopped(BEAT_SECONDS + 2.5):
            prefill.step("p", 32, 32)
            prefill.finish("p")
        decode.ask("until_loaded", "d")
        prefill.until_sent("p")
        assert decode.ask("bad") == set()
        assert decode.ask("holds", "d", 0, 64)
    finally:
        decode.close()


def test_what_an_engine_that_was_killed_left_is_swept(engines, monkeypatch):
    killed = RemoteEngine("prefill", transport="shm")
    try:
        left = f"cloverinfer-{killed._process.pid}-"
        assert len(names(left)) > 1, "a mailbox and the page of a region"
    finally:
        killed.kill()
    monkeypatch.setattr(worker_module, "SWEEP_SECONDS", 0.01)
    engines("decode", transport="tcp")
    until(lambda: not names(left), "the sweep")


def test_after_a_prefill_died_another_may_serve(engines):
    prefill, other = engines("prefill"), engines("prefill")
    decode = engines("decode", lease=LONG, retry_timeout=60.0)
    begin(prefill, decode)
    prefill.close()
    other.prefill("q", 64, params(decode, attempt=1))
    decode.until_loaded("d")
    assert decode.bad == set()
    assert decode.holds("d", 0, 64)


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_decode_that_is_gone_frees_prefill(engines, how):
    prefill = engines("prefill", lease=LONG if how == "dies" else 0.5)
    decode = engines("decode")
    begin(prefill, decode)
    # Decode has no blocks for it yet, and until it has prefill keeps its own.
    prefill.prefill("q", 64, params(decode, "u"))
    prefill.finish("q")
    if how == "dies":
        decode.close()
    else:
        decode.fall_silent()
    prefill.until_sent("q")


def test_a_restarted_decode_is_met_anew(engines):
    prefill, decode = engines("prefill", lease=0.5), engines("decode")
    decode.wait_for_remote("d", 40, "t")
    prefill.prefill("p", 40, params(decode))
    decode.until_loaded("d")
    decode.close()
    again = engines("decode", kv_port=decode.port)
    again.wait_for_remote("e", 40, "u")
    prefill.prefill("q", 40, params(again, "u"))
    prefill.finish("q")
    again.until_loaded("e")
    prefill.until_sent("q")
    assert again.bad == set()
    assert again.holds("e", 0, 40)


def test_nobody_claims_in_time(engines):
    decode = engines("decode", claim_timeout=0.3)
    decode.wait_for_remote("d", 40, "t")
    decode.until_loaded("d")
    assert decode.bad == set(decode.tables["d"])


def test_no_decode_grants_in_time(engines):
    prefill, decode = engines("prefill", claim_timeout=0.3), engines("decode")
    prefill.prefill("p", 40, params(decode))
    prefill.finish("p")
    prefill.until_sent("p")


def test_preempted_blocks_are_left_alone(engines):
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    for worker in prefill.workers:
        worker.half.preempt(["p"])
        worker.storage[:] = -7.0  # another request's
    prefill.tables["p"] = [prefill._free.pop() for _ in range(4)]
    prefill.step("p", 0, 48, first=True)
    prefill.step("p", 48, 16)
    prefill.finish("p")
    decode.until_loaded("d")
    assert decode.holds("d", 0, 64)


def test_many_at_once(engines):
    prefill, decode = engines("prefill", blocks=512), engines("decode", blocks=512)
    for i in range(24):
        decode.wait_for_remote(f"d{i}", 30 + i, f"t{i}")
    for i in range(24):
        prefill.prefill(f"p{i}", 30 + i, params(decode, f"t{i}"), chunk=17)
        prefill.finish(f"p{i}")
    for i in range(24):
        decode.until_loaded(f"d{i}")
        assert decode.holds(f"d{i}", 0, 30 + i)
    until(lambda: prefill.step() or len(prefill.sent) == 24)


def test_the_same_transfer_twice_fails_the_second(engines):
    decode = engines("decode")
    decode.wait_for_remote("d", 40, "t")
    decode.wait_for_remote("e", 40, "t")
    decode.until_loaded("e")
    assert decode.bad == set(decode.tables["e"])
    assert "in use" in decode.finish("e")["error"]


def test_a_process_that_does_not_close_its_worker_ends_as_it_would_have():
    script = "from tests.vllm_kit import FakeEngine; engine = FakeEngine('decode'); exit(3)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (3, "")
