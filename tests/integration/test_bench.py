"""The benchmark client over a real socket: a server of a few lines whose every send is known.

Times are compared by order alone: what the client noted lies between what the server did.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cloverinfer import cli
from cloverinfer.bench import client, plan, session
from cloverinfer.bench.records import Record, Sample

Handler = Callable[["Server", web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Listens on a free port; remembers bodies and when it sent what."""

    def __init__(self, handler: Handler) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.sent: list[float] = []
        self._handler = handler

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{rest:.*}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await self._handler(self, request)

    async def stream(self, request: web.Request, *parts: bytes) -> web.StreamResponse:
        """Sends the parts, each once the one before it has had time to arrive alone."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await asyncio.sleep(0.02)
            for _ in range(10):  # what is there is read before a late timer's time is noted
                await asyncio.sleep(0)
            self.sent.append(time.perf_counter())
            await response.write(part)
        await response.write_eof()
        return response


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


async def ask(server: Server, **target: Any) -> Record:
    tokenizer = target.pop("tokenizer", None)
    record = Record(0)
    async with client.session() as http:
        where = client.Target(server.url, "fake", **target)
        sender = client.HttpSender(http, where, tokenizer)
        await asyncio.wait_for(sender.send(Sample("a b", 3), record, time.perf_counter), 30)
    return record


def run(handler: Handler, **target: Any) -> tuple[Server, Record]:
    async def main() -> tuple[Server, Record]:
        async with Server(handler) as server:
            return server, await ask(server, **target)

    return asyncio.run(main())


def test_pieces_are_noted_as_they_come() -> None:
    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        parts = [token("x"), token("y"), token("z", "length"), USAGE + DONE]
        return await server.stream(request, b": ping\n\n", *parts)

    server, record = run(answer, extra_body={"seed": 1})
    body = server.bodies[0]
    asked = {"model": "fake", "prompt": "a b", "max_tokens": 3, "seed": 1, "stream": True}
    assert {name: body[name] for name in asked} == asked
    assert body["stream_options"] == {"include_usage": True}
    assert (record.ok, record.finish_reason, record.status) == (True, "length", 200)
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (7, 3, "usage")
    assert len(record.times) == 3
    sent = server.sent[1:4]  # after the ping
    for before, noted, after in zip(sent, record.times, server.sent[2:], strict=True):
        assert before <= noted <= after
    assert record.ended == record.times[-1]  # the usage after it is not the answer


def test_events_cut_anywhere_are_put_together() -> None:
    whole = token("x") + token("\u00e9\u4e16", "stop").replace(b"\n\n", b"\r\n\r\n") + USAGE + DONE

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        return await server.stream(request, whole[:9], whole[9:70], whole[70:95], whole[95:])

    _, record = run(answer)
    assert record.ok, record.error
    assert (len(record.times), record.finish_reason, record.output_tokens) == (2, "stop", 3)


def test_chats_and_their_opening() -> None:
    def delta(**fields: Any) -> bytes:
        return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        opening = delta(role="assistant", content="")
        end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        return await server.stream(request, opening, delta(content="x"), end + DONE)

    server, record = run(answer, backend="openai-chat")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "a b"}]
    assert len(record.times) == 1
    assert record.times[0] > server.sent[1]  # the opening has no text: it is no first token
    assert (record.tokens_from, record.output_tokens) == ("pieces", 1)


def test_tokens_are_counted_by_a_tokenizer_where_the_server_does_not() -> None:
    class Letters:
        vocab_size = 26

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(one) for one in text]

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, ids))

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        return await server.stream(request, token("xyz"), token("zy", "stop"), DONE)

    _, record = run(answer, tokenizer=Letters())
    assert (record.output_tokens, record.tokens_from) == (5, "tokenizer")


def test_a_whole_answer_has_no_first_token() -> None:
    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        choice = {"index": 0, "text": "xyz", "finish_reason": "stop"}
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        return web.json_response({"choices": [choice], "usage": usage})

    server, record = run(answer, stream=False)
    assert "stream" not in server.bodies[0]
    assert (record.ok, record.output_tokens, record.ttft, record.tpot) == (True, 3, None, None)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([token("x")], "ended before the answer"),
        ([token("x"), event(error={"message": "a node died"}), DONE], "a node died"),
        ([b"data: nonsense\n\n"], "DecodeError"),
    ],
)
def test_answers_that_break_are_failures(parts: list[bytes], error: str) -> None:
    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        return await server.stream(request, *parts)

    _, record = run(answer)
    assert record.error is not None
    assert error in record.error
    assert record.ended > 0


def test_refusals_and_silence_are_failures() -> None:
    async def refuse(server: Server, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "queue is full"}}, status=429)

    async def silent(server: Server, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    _, record = run(refuse)
    assert (record.status, record.error) == (429, "HTTP 429: queue is full")
    _, record = run(silent, timeout=0.2)
    assert record.error == "no answer within 0.2 s"

    async def nobody() -> Record:
        server = Server(refuse)
        server.url = "http://127.0.0.1:9"
        return await ask(server)

    assert "ClientConnector" in (asyncio.run(nobody()).error or "")


def test_all_requests_are_sent_with_at_most_so_many_at_a_time() -> None:
    inside, most = 0, 0

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return await server.stream(request, token("x", "stop") + USAGE + DONE)
        finally:
            inside -= 1

    async def main() -> tuple[int, session.Outcome]:
        async with Server(answer) as server, client.session() as http:
            sender = client.HttpSender(http, client.Target(server.url, "fake"))
            what = plan.Plan([Sample("x", 3)] * 12, [0.0] * 12)
            outcome = await session.measure(sender, what, limit=3, warmups=2, quiet=True)
            return len(server.bodies), outcome

    bodies, outcome = asyncio.run(asyncio.wait_for(main(), 30))
    assert bodies == 14  # two of them to warm up
    assert [one.ok for one in outcome.records] == [True] * 12
    assert most == 3


def test_the_command_reports_and_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        return await server.stream(request, token("x"), token("y", "stop") + USAGE + DONE)

    async def main() -> None:
        async with Server(answer) as server:
            common = [sys.executable, "-m", "cloverinfer.cli", "bench", "serve", "--quiet"]
            common += ["--base-url", server.url, "--input-len", "4", "--output-len", "3"]
            files = ["--json", "r.json", "--markdown", "r.md", "--requests-jsonl", "r.jsonl"]
            more = ["--num-prompts", "5", "--slo", "ttft=30s", *files]
            done = await _run([*common, *more], tmp_path)
            assert done[0] == 0, done
            assert "| requests completed | 5 of 5 |" in done[1]
            assert (tmp_path / "r.md").read_text() == done[1]
            figures = json.loads((tmp_path / "r.json").read_text())
            assert (figures["output_tokens"], figures["good"]) == (15, 5)
            lines = (tmp_path / "r.jsonl").read_text().splitlines()
            assert [len(json.loads(line)["times"]) for line in lines] == [2] * 5

            endless = ["--num-prompts", "2000", "--request-rate", "20", "--json", "-"]
            done = await _run([*common, *endless], tmp_path, server)
            assert done[0] == 130, done
            figures = json.loads(done[1])
            assert figures["notes"][0].startswith("interrupted")
            assert 0 < figures["completed"] < 2000
            assert figures["failed"] == 0

    asyncio.run(asyncio.wait_for(main(), 120))


async def _run(
    command: list[str], folder: Path, interrupted_by: Server | None = None
) -> tuple[int | None, str, str]:
    """Runs a command; interrupts it once the server has had ten more requests."""
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=folder)
    try:
        if interrupted_by is not None:
            enough = len(interrupted_by.bodies) + 10
            while len(interrupted_by.bodies) < enough:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("given", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_addresses_as_people_write_them(given: str) -> None:
    assert client.address(given.format("127.0.0.1:80")) == "http://127.0.0.1:80"
    assert client.address(given.format("https://a.b/llm")) == "https://a.b/llm"


def test_the_key_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert client.authorization() == {}
    monkeypatch.setenv("OPENAI_API_KEY", "a")
    assert client.authorization() == {"Authorization": "Bearer a"}
    assert client.authorization("b") == {"Authorization": "Bearer b"}


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--slo", "ttft=1"], "no unit"),
        (["--dataset-name", "azure"], "--dataset-path"),
        (["--dataset-path", "chats.json"], "--dataset-name sharegpt"),
        (["--header", "x"], "NAME=VALUE"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--request-rate", "0"], "--request-rate"),
        (["--base-url", "http://127.0.0.1:9"], "does not answer"),
        (["--base-url", "http://"], "no address of a server"),
    ],
)
def test_wrong_flags_say_what_is_wrong(flags: list[str], part: str, capsys: Any) -> None:
    base = ["--ready-check-timeout-sec", "0.1", "--num-prompts", "2"]
    assert cli.main(["bench", "serve", *base, *flags]) == 2
    assert part in capsys.readouterr().err
