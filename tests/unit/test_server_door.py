"""The front door: ids, keys, sizes, draining, logs, and what is said of endpoints not served."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.servers import refused, serving, wait

from cloverinfer.config import ServerConfig
from cloverinfer.core.errors import ConfigError
from cloverinfer.server import run
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog
from cloverinfer.server.errors import UNSERVED

COMPLETION = {"model": "m", "prompt": "a b c", "max_tokens": 2}


def client_of(engine: Any, **settings: Any) -> TestClient:
    return TestClient(build_app(Catalog.single(engine, "m"), ServerConfig(**settings)))


@pytest.fixture
def client(engine: Any) -> Iterator[TestClient]:
    with client_of(engine) as client:
        yield client


def test_a_request_id_is_taken_over_or_made(client: TestClient) -> None:
    given = client.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = {client.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for bad in ("two words", "x" * 129, ""):
        answer = client.get("/health", headers={"X-Request-Id": bad})
        assert answer.headers["x-request-id"] not in (bad, "")
    error = client.post("/v1/completions", json={}, headers={"X-Request-Id": "abc-2"})
    assert (error.status_code, error.headers["x-request-id"]) == (400, "abc-2")
    stream = client.post(
        "/v1/completions", json=COMPLETION | {"stream": True}, headers={"X-Request-Id": "abc-3"}
    )
    assert stream.headers["x-request-id"] == "abc-3"


def test_an_internal_error_says_nothing_and_has_the_id(engine: Any) -> None:
    engine.refusal = OSError("secret")
    app = build_app(Catalog.single(engine, "m"))
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "i"})
    refused(answer, 500, None, "internal error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "i"


def test_any_of_the_keys_opens(engine: Any) -> None:
    with client_of(engine, api_key=("k1", "kä")) as client:
        for path in ("/v1/models", "/v1/cluster", "/v1/nowhere"):
            refused(client.get(path), 401, None, "API key")
        refused(client.post("/tokenize", json={"prompt": "a"}), 401, None, "API key")
        for key in (b"k1", "kä".encode()):
            good = client.get("/v1/models", headers={"Authorization": b"Bearer " + key})
            assert good.status_code == 200
        for wrong in ("Bearer k", "Bearer k1 ", "k1", "Basic k1"):
            answer = client.get("/v1/models", headers={"Authorization": wrong})
            refused(answer, 401, None, "API key")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/version", "/openapi.json"):
            assert client.get(path).status_code == 200


def test_pages_of_other_origins_may_call_where_allowed(engine: Any) -> None:
    ask = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    with client_of(engine, allowed_origins="http://page", api_key="k") as client:
        preflight = client.options("/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page"
        other = client.options("/v1/completions", headers=ask | {"Origin": "http://other"})
        assert other.status_code == 400
    with client_of(engine) as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=ask).headers


def test_a_body_past_the_limit_is_refused_while_it_is_read(engine: Any) -> None:
    settings = ServerConfig(max_body_mib=0.01)
    whole = b'{"model": "m", "prompt": "' + b"a" * 20_000
    sent = []

    def pieces() -> Iterator[bytes]:
        for _ in range(20_000):
            sent.append(1)
            yield b"x" * 5_000

    headers = {"content-type": "application/json"}
    with serving(Catalog.single(engine, "m"), settings) as (base, _):
        url = f"{base}/v1/completions"
        refused(httpx.post(url, content=whole, headers=headers), 413, None, "10485 bytes")
        chunked = httpx.post(url, content=pieces(), headers=headers)
        refused(chunked, 413, None, "10485 bytes")
        assert chunked.json()["error"]["code"] == "request_too_large"
        assert len(sent) < 20_000
        assert httpx.post(url, json=COMPLETION).status_code == 200
    assert engine.asked == [([0, 1, 2], engine.asked[0][1])]


def test_a_body_that_does_not_come_is_not_waited_for(engine: Any) -> None:
    with serving(Catalog.single(engine, "m"), ServerConfig(body_timeout=0.2)) as (base, _):
        address = ("127.0.0.1", int(base.rpartition(":")[2]))
        with socket.create_connection(address, timeout=60) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
            while slow.recv(1000):
                pass  # the connection is closed after the answer
        assert httpx.get(f"{base}/health").status_code == 200


@pytest.mark.parametrize("prefix", sorted(UNSERVED))
def test_what_is_not_served_says_so(client: TestClient, prefix: str) -> None:
    for path in (prefix, f"{prefix}/generations"):
        answer = client.post(path, json={"model": "m", "input": "x"})
        refused(answer, 404, None, "does not serve")
        assert answer.json()["error"]["code"] == "unsupported_endpoint"
    refused(client.post(f"{prefix}x", json={}), 404, None, "Not Found")


def test_adapters_are_refused(client: TestClient) -> None:
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/x"})
    refused(answer, 400, None, "LoRA adapters are not supported")
    body = COMPLETION | {"lora_request": {"name": "a"}}
    refused(client.post("/v1/completions", json=body), 400, "lora_request", "not supported")


def test_ready_needs_a_live_node_of_every_role(client: TestClient, engine: Any) -> None:
    engine.alive = {"prefill": True, "dense": True}
    assert client.get("/ready").json() == {"status": "ready"}
    engine.alive = {"prefill": False, "dense": True}
    answer = client.get("/ready")
    refused(answer, 503, None, "m: no prefill node is alive")
    assert int(answer.headers["retry-after"]) >= 1
    assert client.get("/health").status_code == 200
    engine.failure = "prefill-0: gone"
    refused(client.get("/ready"), 503, None, "prefill-0: gone")
    refused(client.get("/health"), 503, None, "prefill-0: gone")


def test_each_request_is_a_line_of_the_log(
    client: TestClient, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cloverinfer.requests")
    client.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "one"})
    client.post("/v1/completions", json=COMPLETION | {"model": "x"})
    engine.fail_at = 1
    client.post("/v1/completions", json=COMPLETION | {"stream": True})
    client.get("/v1/a%0Ab")
    client.get("/health")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert lines[0].startswith("one POST /v1/completions 200 model=m prompt_tokens=3 ")
    assert "completion_tokens=2 finish=length seconds=" in lines[0]
    assert " 404 model=- prompt_tokens=0 completion_tokens=0 finish=- " in lines[1]
    assert " 200 model=m prompt_tokens=3 completion_tokens=1 finish=error " in lines[2]
    assert "/v1/a\\nb 404" in lines[3]


def test_bad_certificates_are_told(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssl_keyfile and server\.ssl_certfile go together"):
        ServerConfig(ssl_keyfile="k.pem")
    settings = ServerConfig(ssl_keyfile=str(tmp_path / "k"), ssl_certfile=str(tmp_path / "c"))
    app = build_app(Catalog.single(engine))
    with socket.socket() as sock, pytest.raises(ConfigError, match=r"server\.ssl_certfile"):
        run.serve(app, sock, settings, print)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https_is_spoken_with_a_certificate(engine: Any, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "k.pem"), str(tmp_path / "c.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out",
         certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    settings = ServerConfig(ssl_keyfile=key, ssl_certfile=certificate)
    with serving(Catalog.single(engine, "m"), settings) as (base, _):
        assert base.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{base}/v1/models", verify=context).status_code == 200


def test_a_prefix_of_a_proxy_is_taken_off(engine: Any) -> None:
    settings = ServerConfig(root_path="/llm", api_key="k")
    with serving(Catalog.single(engine, "m"), settings) as (base, _):
        assert httpx.get(f"{base}/health").status_code == 200
        refused(httpx.get(f"{base}/v1/models"), 401, None, "API key")
        key = {"Authorization": "Bearer k"}
        assert httpx.get(f"{base}/v1/models", headers=key).status_code == 200
        refused(httpx.get(f"{base}/v1/embeddings", headers=key), 404, None, "does not serve")
        server = httpx.get(f"{base}/openapi.json").json()["servers"]
        assert server == [{"url": "/llm"}]


async def _streamed(base: str, server: Any, engine: Any) -> tuple[str, list[int], str]:
    """A stream that is under way when the server is told to stop; statuses of what came later."""
    async with httpx.AsyncClient(base_url=base, timeout=20) as client:
        body = COMPLETION | {"stream": True, "max_tokens": 30}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            server.handle_exit(15, None)
            later = [
                (await client.post("/v1/completions", json=COMPLETION)).status_code,
                (await client.get("/ready")).status_code,
                (await client.get("/health")).status_code,
            ]
            engine.delay = 0.0
            rest = [line async for line in lines]
    return first + "".join(rest), later, rest[-2]


def test_draining_ends_streams_in_order_and_refuses_others(engine: Any) -> None:
    engine.delay = 0.5
    with serving(Catalog.single(engine, "m")) as (base, server):
        text, later, last = asyncio.run(_streamed(base, server, engine))
        assert later == [503, 503, 200]
        assert last == "data: [DONE]"
        assert '"text":"w29 "' in text
        wait(lambda: not server.server_state.connections)
        server._captured_signals.clear()
    assert engine.aborted == 0


def test_draining_is_bounded_and_what_it_cuts_off_ends_with_an_error(engine: Any) -> None:
    engine.delay, engine.max_model_len = 0.02, 10**6
    settings = ServerConfig(shutdown_timeout=0.3)
    with serving(Catalog.single(engine, "m"), settings) as (base, server):
        body = COMPLETION | {"stream": True, "max_tokens": 10**5}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            server.handle_exit(15, None)
            rest = [line for line in lines if line]
        server._captured_signals.clear()
    assert "the server is shutting down" in rest[-1]
    assert 'finish_reason":"' not in "".join(rest)
    assert engine.aborted == 1
