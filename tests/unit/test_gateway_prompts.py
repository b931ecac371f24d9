"""What the orchestrator reads of requests and writes into answers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from cloverinfer.config import OrchestratorConfig, load_config
from cloverinfer.core.errors import ConfigError, RequestError
from cloverinfer.gateway import probe, prompts
from cloverinfer.gateway.asked import CHAT, COMPLETIONS, read
from cloverinfer.gateway.stages import Stages, UsageEvents

TEXT = "".join(f"word {i} " for i in range(200))


def asked(path: str = COMPLETIONS, **fields: Any) -> Any:
    return read(path, json.dumps(fields).encode(), "id", None)


def hashes(encode: prompts.Encode | None = None, **fields: Any) -> list[bytes]:
    return prompts.hash_prompt(asked(**fields).fields, encode)


# ---- blocks


@given(st.integers(0, 1000), st.integers(0, 300))
def test_prompts_share_the_blocks_that_they_share(cut: int, more: int) -> None:
    one = hashes(prompt=TEXT)
    other = hashes(prompt=TEXT[:cut] + "#" * more)
    same = sum(a == b for a, b in zip(one, other, strict=False))
    assert same == cut // prompts.BLOCK_BYTES
    assert len(other) == (cut + more) // prompts.BLOCK_BYTES


def test_what_is_kept_apart_shares_nothing() -> None:
    ids = list(range(128))
    sets = [
        hashes(prompt=TEXT),
        hashes(prompt=TEXT, model="x"),
        hashes(prompt=TEXT, cache_salt="s"),
        hashes(prompt=ids),
        hashes(messages=[{"role": "user", "content": TEXT}]),
        hashes(prompt=TEXT, encode=lambda text: list(text.encode())),
    ]
    assert all(sets)
    assert len({one for blocks in sets for one in blocks}) == sum(map(len, sets))


def test_token_ids_are_hashed_as_they_are_and_text_by_the_tokenizer() -> None:
    ids = list(range(100))
    assert len(hashes(prompt=ids)) == 100 // prompts.BLOCK_TOKENS
    assert hashes(prompt=ids) == hashes(prompt=[ids, [1]])
    assert hashes(prompt="x", encode=lambda text: ids) == hashes(prompt=ids)


def test_a_chat_that_goes_on_shares_what_was_said() -> None:
    said = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
    before = hashes(messages=said)
    after = hashes(messages=[*said, {"role": "user", "content": "more " * 50}])
    assert after[: len(before)] == before
    assert len(after) > len(before)


@pytest.mark.parametrize(
    "prompt", [None, 3, {}, [], [None], [-1, 2**70], [["a"]], [[-(2**80)]], [True]]
)
def test_what_is_no_prompt_has_no_blocks(prompt: Any) -> None:
    assert hashes(prompt=prompt) == []
    assert hashes() == []


def test_a_long_prompt_is_cut() -> None:
    assert len(hashes(prompt="a" * 10**6)) == prompts.MOST_BLOCKS
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return []

    hashes(prompt="a" * 10**6, encode=encode)
    assert len(seen[0]) == prompts.MOST_BLOCKS * prompts.BLOCK_BYTES


def test_a_tokenizer_is_read_from_a_folder_or_a_file(tmp_path: Any) -> None:
    model = tokenizers.models.WordLevel({"a": 5, "?": 0}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert prompts.load_encode(str(tmp_path))("a b") == [5, 0]
    assert prompts.load_encode(str(tmp_path / "tokenizer.json"))("a") == [5]
    (tmp_path / "bad.json").write_text("{}")
    for name in ("none.json", "bad.json"):
        with pytest.raises(ConfigError, match=r"orchestrator\.tokenizer"):
            prompts.load_encode(str(tmp_path / name))


# ---- requests


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"nul", b'{"a": }', b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", b"\xff"],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="not a JSON object"):
        read(COMPLETIONS, body, "id", None)


@given(st.binary(max_size=60))
def test_no_body_is_more_than_refused(body: bytes) -> None:
    for data in (body, b'{"model":"m","prompt":' + body + b"}", b'{"n":' + body + b"}"):
        try:
            one = read(COMPLETIONS, data, "id", None)
            assert isinstance(one.model, str | None)
            one.paired()
            assert isinstance(one.include_usage, bool)
            prompts.hash_prompt(one.fields, None)
        except RequestError:
            continue


def test_transfers_are_the_orchestrators_to_order() -> None:
    with pytest.raises(RequestError, match="leave it out"):
        asked(kv_transfer_params={"decode_address": "elsewhere:1"})
    with pytest.raises(RequestError, match="model must be a string"):
        _ = asked(model=3).model


def test_what_is_not_understood_is_not_changed() -> None:
    body = b'{"a":1.0e5,"b":[1,  2],"c":123456789012345678901234567890,"d":"\\u00e4"}'
    changed = read(CHAT, body, "id", None).with_fields(a=None, e=1)
    assert changed == b'{"b":[1,  2],"c":123456789012345678901234567890,"d":"\\u00e4","e":1}'


# ---- answers


def usage_events(pieces: list[bytes]) -> bytes:
    stages = Stages(lambda: 0.0, arrived=1.0, sent=1.25, first_piece=2.0)
    events = UsageEvents(stages)
    return b"".join(map(events.feed, pieces)) + events.rest()


STREAM = (
    b'data: {"choices":[{"text":"\\"usage\\""}],"usage":null}\n\n'
    b": ping\n\n"
    b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":1}}\n\n'
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_only_the_event_with_the_usage_is_touched_however_it_comes(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(ends)]
    told = b'{"queue":0.25,"prefill":null,"transfer":null,"first_decode":null,"ttft":1.0}'
    plain = b'"choices":[],"usage":{"prompt_tokens":1}'
    expected = STREAM.replace(plain, plain[:-1] + b',"stages":' + told + b"}")
    assert usage_events(pieces) == expected


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    stages = Stages(lambda: 0.0, 0.0)
    events = UsageEvents(stages)
    data = b"data: " + b"x" * (2 << 20)
    assert events.feed(data) == data
    assert events.rest() == b""


def test_events_that_end_in_another_way_pass_at_once() -> None:
    events = UsageEvents(Stages(lambda: 0.0, 0.0))
    for event in (b'data: {"choices":[]}\r\n\r\n', b"data: [DONE]\r\n\r\n"):
        assert events.feed(event) == event
    assert events.rest() == b""


@given(st.binary(max_size=80))
def test_streams_that_are_no_events_pass(data: bytes) -> None:
    assert usage_events([b'data: {"usage" ' + data]) == b'data: {"usage" ' + data


# ---- instances' metrics


def test_load_is_read_of_either_engines_metrics() -> None:
    page = (
        b"# HELP vllm:num_requests_running x\n"
        b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        b'vllm:num_requests_waiting{engine="0"} 4.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        b'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\n'
        b"process_start_time_seconds 12.5\n"
    )
    samples = dict(probe._samples(page))
    assert samples["process_start_time_seconds"] == 12.5
    engine, load = probe._load(samples)
    assert (engine, load.running, load.waiting, load.kv_usage) == ("vllm", 3, 4, 0.5)
    ours = page.replace(b"vllm:", b"cloverinfer_")
    assert probe._load(dict(probe._samples(ours)))[0] == "cloverinfer"
    assert probe._load({})[0] == ""


# ---- settings


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"policy": "best"}, "orchestrator.policy must be one of round_robin"),
        ({"instances": ["both:http://a"]}, "of the form both=URL"),
        ({"instances": ["decode=http://a:1"]}, "decode=URL#HOST:PORT"),
        ({"instances": ["both=http://a:1#b:2"]}, "of the form both=URL"),
        ({"instances": ["both=ftp://a"]}, "not 'both=ftp://a'"),
        ({"attempts": 0}, "from 1 to 16"),
        ({"heartbeat_timeout": 0}, "above 0"),
        ({"secret": ""}, "a non-empty string"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"orchestrator": fields}, environ={})
    assert part in str(caught.value)


def test_settings_come_from_variables_and_tell_no_secret() -> None:
    environ = {
        "CLOVER_ORCHESTRATOR_SECRET": "hush",
        "CLOVER_ORCHESTRATOR_INSTANCES": "both=http://a:1, prefill=http://b:2",
    }
    settings = load_config(environ=environ).orchestrator
    assert settings.instances == ("both=http://a:1", "prefill=http://b:2")
    assert settings.secret == "hush"
    assert "hush" not in repr(settings)
    assert OrchestratorConfig(instances="both=http://a:1").instances == ("both=http://a:1",)  # type: ignore[arg-type]
    assert msgspec.to_builtins(OrchestratorConfig())["secret"] is None
