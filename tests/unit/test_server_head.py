"""Heads of requests: bounded in bytes and time, before anything is known of who sends them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.servers import serving

from cloverinfer.server import head
from cloverinfer.server.catalog import Catalog


@pytest.fixture
def base(engine: Any) -> Iterator[str]:
    with serving(Catalog.single(engine, "m")) as (address, _):
        yield address


def connect(base: str) -> socket.socket:
    url = httpx.URL(base)
    return socket.create_connection((url.host, url.port), timeout=60)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("line", [b"X: " + b"a" * 50_000, b"X: a\r\n" * 5_000])
def test_a_head_without_end_is_cut_off(base: str, line: bytes) -> None:
    with connect(base) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with pytest.raises((ConnectionError, TimeoutError)):
            sock.sendall(line * (50_000_000 // len(line)))  # more than buffers on the way hold
    assert httpx.get(f"{base}/health", headers={"X": "a" * 40_000}).status_code == 200


def test_the_refusal_says_why(base: str) -> None:
    with connect(base) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * head.HEAD_BYTES)
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost:"])
def test_a_head_that_does_not_come_is_not_waited_for(
    base: str, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(head, "HEAD_SECONDS", 0.1)
    with connect(base) as sock:
        sock.sendall(begun)
        assert read_all(sock) == b""


def test_a_whole_head_has_time_for_its_body(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "HEAD_SECONDS", 0.4)
    body = b'{"model": "m", "prompt": "a b", "max_tokens": 1}'
    lines = [
        b"POST /v1/completions HTTP/1.1",
        b"Host: x",
        b"Connection: close",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
    ]
    with connect(base) as sock:
        sock.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
        for at in range(len(body)):
            sock.sendall(body[at : at + 1])
            time.sleep(0.01)
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")
