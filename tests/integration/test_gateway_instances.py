"""Instances of an orchestrator come, beat, go and come back; and whoever else comes to its door."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import processes
from tests.gateway_kit import Stage, free_port, stage, until
from tests.tiny_models import make_tiny

from cloverinfer.config import ServerConfig

COMMAND = [sys.executable, "-m", "cloverinfer.cli"]
SECRET = {"Authorization": "Bearer hush"}


@pytest.fixture
def on() -> Iterator[Stage]:
    with stage() as made:
        yield made


def announcement(url: str = "http://127.0.0.1:1", **fields: Any) -> dict[str, Any]:
    told = {"url": url, "role": "both", "incarnation": 5, "models": [{"id": "m"}]}
    return {**told, **fields}


def announce(on: Stage, headers: Any = None, method: str = "POST", **fields: Any) -> httpx.Response:
    body = announcement(**fields)
    return on.client.request(method, f"{on.base}/v1/instances", json=body, headers=headers)


def test_an_instance_announces_itself_serves_and_withdraws(on: Stage) -> None:
    on.orchestrate()
    fake = on.fake()
    assert on.client.get(f"{on.base}/ready").status_code == 503
    assert on.post().json()["error"]["code"] == "no_instance"
    load = {"running": 1, "waiting": 2, "kv_usage": 0.5}
    told = announce(on, url=fake.url, load=load, engine="vllm", later_field=1)
    assert told.json() == {"heartbeat_timeout": 1.0}
    assert on.client.get(f"{on.base}/ready").status_code == 200
    assert on.client.head(f"{on.base}/ready").status_code == 200
    (row,) = on.cluster()
    assert (row["url"], row["running"], row["waiting"]) == (fake.url, 1, 2)
    assert on.post().status_code == 200
    assert on.count("instance_up{") == 1
    cards = on.client.get(f"{on.base}/v1/models").json()["data"]
    assert cards == [{"id": "m"}]
    assert on.client.get(f"{on.base}/v1/models/m").json() == {"id": "m"}
    assert on.client.get(f"{on.base}/v1/models/x").status_code == 404
    assert on.post(model="x").json()["error"]["code"] == "model_not_found"
    assert announce(on, url=fake.url, incarnation=4).status_code == 409
    assert announce(on, url=fake.url, incarnation=4, method="DELETE").status_code == 409
    assert announce(on, url=fake.url, method="DELETE").status_code == 200
    assert on.cluster() == []


@contextlib.contextmanager
def beating(on: Stage, url: str) -> Iterator[None]:
    """Announces it again and again, however long what is done meanwhile takes."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            announce(on, url=url)

    announce(on, url=url)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def test_silence_ends_it_and_requests_under_way_go_on(on: Stage) -> None:
    fake = on.fake(delay=0.3)
    on.orchestrate(heartbeat_timeout=0.5)
    body = {"model": "m", "prompt": "x", "max_tokens": 3, "stream": True}
    with contextlib.ExitStack() as stack:
        with beating(on, fake.url):
            url = f"{on.base}/v1/completions"
            answer = stack.enter_context(on.client.stream("POST", url, json=body))
            pieces = answer.iter_text()
            first = next(pieces)
        until(lambda: on.cluster() == [])
        assert (first + "".join(pieces)).endswith("data: [DONE]\n\n")


def test_with_a_secret_only_those_that_know_it_are_heard(on: Stage) -> None:
    on.orchestrate(secret="hush", server=ServerConfig(api_key=("client",)))
    for headers in (None, {"Authorization": "Bearer client"}, {"Authorization": "hush"}):
        refused = announce(on, headers)
        assert refused.status_code == 401
        assert "hush" not in refused.text
    assert announce(on, SECRET).status_code == 200
    # And the secret opens no other door.
    assert on.client.get(f"{on.base}/v1/cluster", headers=SECRET).status_code == 401
    key = {"Authorization": "Bearer client"}
    assert len(on.client.get(f"{on.base}/v1/cluster", headers=key).json()["instances"]) == 1


def test_keys_stay_on_their_side(on: Stage) -> None:
    fake = on.fake()
    on.orchestrate(("both", fake))
    url = f"{on.base}/v1/completions"
    headers = {"Authorization": "Bearer mine", "X-Request-Id": "abc", "Cookie": "a=b"}
    answer = on.client.post(url, json={"model": "m", "prompt": "x"}, headers=headers)
    assert answer.headers["x-request-id"] == "abc"
    assert fake.heads[-1]["authorization"] == "Bearer mine"
    assert fake.heads[-1]["x-request-id"].startswith("abc-")
    assert "cookie" not in fake.heads[-1]


def test_a_key_for_the_door_is_not_told_to_instances(on: Stage) -> None:
    fake, other = on.fake(), on.fake()
    server = ServerConfig(api_key=("client",))
    on.orchestrate(server=server, instance_api_key="theirs")
    announce(on, url=fake.url)
    on.client.headers["Authorization"] = "Bearer client"
    assert on.post().status_code == 200
    assert fake.heads[-1]["authorization"] == "Bearer theirs"
    on.orchestrate(server=server)
    announce(on, url=other.url)
    assert on.post().status_code == 200
    assert "authorization" not in other.heads[-1]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field"),
        (b'{"url":' + b"[" * 10**5, "no announcement"),
        (json.dumps(announcement(role="dense")).encode(), "role must be one of"),
        (json.dumps(announcement(url="file:///etc")).encode(), "http://HOST:PORT"),
        (json.dumps(announcement(incarnation="a")).encode(), "Expected `int`"),
        (json.dumps(announcement(models=[{"id": 3}])).encode(), "an id that is a string"),
        (json.dumps(announcement(role="decode")).encode(), "kv_address is needed"),
        (b"\xff\xfe", "no announcement"),
    ],
)
def test_bad_announcements_are_told_what_is_wrong(on: Stage, body: bytes, part: str) -> None:
    on.orchestrate()
    url = f"{on.base}/v1/instances"
    refused = on.client.post(url, content=body)
    assert refused.status_code == 400
    assert part in refused.json()["error"]["message"]
    assert on.client.get(url).status_code == 405
    assert on.client.post(url, content=b" " * (2 << 20)).status_code == 413
    assert announce(on).status_code == 200


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"", 400),
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[1]", 400),
        ("/v1/completions", b'{"a":' + b"[" * 10**6, 400),
        ("/v1/completions", b'{"model": 3}', 400),
        ("/v1/completions", b'{"model": "m", "kv_transfer_params": {}}', 400),
        ("/v1/chat/completions", b'{"model": "\xff"}', 400),
        ("/v1/completions", b'{"model": "other"}', 404),
        ("/v1/embeddings", b"{}", 404),
        ("/v1/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
    ],
)
def test_bad_requests_are_answered_and_it_serves_on(
    on: Stage, path: str, content: bytes, status: int
) -> None:
    fake = on.fake()
    on.orchestrate(("both", fake), policy="prefix_aware")
    headers = {"Content-Type": "application/json"}
    answer = on.client.post(on.base + path, content=content, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert fake.seen == []
    plain = on.client.post(on.base + path, content=content)
    assert plain.status_code in (400, status)
    assert on.post().status_code == 200


def test_the_same_beginning_goes_to_the_same_instance(on: Stage) -> None:
    fakes = [on.fake() for _ in range(3)]
    on.orchestrate(*(("both", fake) for fake in fakes), policy="prefix_aware")
    for i in range(12):
        on.post(prompt=f"prompt {i % 3} " * 100)
    served = [{body["prompt"][:8] for body in fake.seen} for fake in fakes]
    assert sorted(map(len, served)) == [1, 1, 1]
    assert set().union(*served) == {"prompt 0", "prompt 1", "prompt 2"}


def test_load_that_others_bring_counts(on: Stage) -> None:
    busy, idle = on.fake(waiting=5), on.fake()
    on.orchestrate(("both", busy), ("both", idle))
    until(lambda: {row["waiting"] for row in on.cluster()} == {0, 5})
    for _ in range(4):
        assert on.post().status_code == 200
    assert (len(busy.seen), len(idle.seen)) == (0, 4)


def test_a_killed_instance_is_left_and_taken_back(on: Stage) -> None:
    port = free_port()
    first, other = on.fake(port), on.fake()
    on.orchestrate(("both", first), ("both", other), heartbeat_timeout=0.5)
    on.kill(first.url)
    for _ in range(6):
        assert on.post().status_code == 200
    until(lambda: any(row["problem"] for row in on.cluster()))
    again = on.fake(port, started=2000.0)
    assert again.url == first.url
    until(lambda: all(row["problem"] is None for row in on.cluster()))
    rows = {row["url"]: row["incarnation"] for row in on.cluster()}
    for _ in range(4):
        assert on.post().status_code == 200
    assert again.seen
    assert rows[first.url] >= 2000


def test_draining_lets_requests_finish_and_takes_no_more(on: Stage) -> None:
    fake = on.fake(delay=0.3)
    on.orchestrate(("both", fake))
    body = {"model": "m", "prompt": "x", "max_tokens": 3, "stream": True}
    with on.client.stream("POST", f"{on.base}/v1/completions", json=body) as answer:
        pieces = answer.iter_text()
        first = next(pieces)
        on.door.drain()
        assert on.post().json()["error"]["code"] == "draining"
        assert on.client.get(f"{on.base}/ready").status_code == 503
        assert announce(on).status_code == 200  # whoever comes next wants to know them
        assert (first + "".join(pieces)).endswith("data: [DONE]\n\n")


def test_what_has_not_begun_is_told_of_the_end(on: Stage) -> None:
    fake = on.fake(delay=10.0)
    on.orchestrate(("both", fake))
    on.loop.loop.call_soon_threadsafe(on.loop.loop.call_later, 0.2, on.door.cut.set)
    answer = on.post(stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    until(lambda: fake.inside == 0)


def test_what_does_not_finish_in_time_is_cut_off(on: Stage) -> None:
    fake = on.fake(delay=0.1)
    on.orchestrate(("both", fake))
    body = {"model": "m", "prompt": "x", "max_tokens": 100, "stream": True}
    with on.client.stream("POST", f"{on.base}/v1/completions", json=body) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        on.loop.loop.call_soon_threadsafe(on.door.cut.set)
        text += "".join(pieces)
    assert text.startswith('data: {"id"')
    assert "shutting down" in text
    assert "[DONE]" not in text
    until(lambda: fake.inside == 0)


# ---- processes


@contextlib.contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command, which a test ends; one that fails before leaves nothing behind."""
    pipe = subprocess.PIPE
    with processes.start([*COMMAND, *arguments], stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready: "), line
    return line.removeprefix("ready: ").strip()


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return err


def test_an_orchestrator_started_anew_is_filled_by_heartbeats(
    on: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOVER_ORCHESTRATOR_SECRET", "hush")
    fake, port = on.fake(), free_port()
    base = f"http://127.0.0.1:{port}"
    beats = ["--orchestrator", base, "--interval", "0.1"]
    with start("node", "--url", fake.url, "--role", "both", *beats) as node:
        for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            with start("orchestrate", "--port", str(port), "--quiet") as process:
                on.base = ready(process)
                until(lambda: len(on.cluster()) == 1)
                assert on.post().status_code == 200
                if number == signal.SIGINT:
                    end(node)
                    assert node.returncode == 143
                    assert on.cluster() == []
                end(process, number)
                assert process.returncode == status
    assert len(fake.seen) == 2


def test_a_server_of_our_own_stands_behind_it(on: Stage, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tiny")
    named = ["--served-model-name", "tiny", "--topology", "pd", "--threads", "1", "--quiet"]
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    with start("serve", str(folder), "--port", "0", "--dtype", "float32", *named) as server:
        url = ready(server)
        on.orchestrate(heartbeat_timeout=5.0)
        beats = ["--orchestrator", on.base, "--interval", "0.1"]
        with start("node", "--url", url, "--role", "both", *beats) as node:
            until(lambda: len(on.cluster()) == 1)
            assert on.cluster()[0]["engine"] == "cloverinfer"
            direct = on.client.post(f"{url}/v1/completions", json=body).json()
            through = on.post(**body)
            assert through.json()["choices"] == direct["choices"]
            assert "stages" in through.json()["usage"]
            more = {**body, "stream": True, "stream_options": {"include_usage": True}}
            events = [one for one in on.post(**more).text.split("\n\n") if one]
            text = "".join(
                choice["text"]
                for one in events[:-1]
                for choice in json.loads(one.removeprefix("data: "))["choices"]
            )
            assert text == direct["choices"][0]["text"]
            assert json.loads(events[-2].removeprefix("data: "))["usage"]["stages"]["ttft"] > 0
            assert on.post(**{**body, "max_tokens": "x"}).status_code == 400
            end(server)
            until(lambda: on.cluster()[0]["problem"] is not None)
            end(node)
