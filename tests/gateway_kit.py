"""Fake instances that speak vLLM's surface, and an orchestrator in a thread on a real socket.

A fake answers ``w0 w1 w2 ...``. A decode instance waits until a prefill instance has claimed its
transfer, as the connector does, and tells the attempt that succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cloverinfer.config import OrchestratorConfig, ServerConfig
from cloverinfer.gateway.app import build_gateway
from cloverinfer.server import run

MODEL = "m"
WAIT = 20.0


class Transfers:
    """What the connectors of all fakes know of each other."""

    def __init__(self) -> None:
        self.claims: dict[str, int] = {}
        """Attempt by transfer."""
        self.changed = asyncio.Condition()

    async def push(self, transfer: str, attempt: int) -> None:
        async with self.changed:
            self.claims[transfer] = attempt
            self.changed.notify_all()

    async def wait(self, transfer: str) -> int:
        async with self.changed:
            claimed = self.changed.wait_for(lambda: transfer in self.claims)
            await asyncio.wait_for(claimed, WAIT)
            return self.claims[transfer]


@dataclass
class Fake:
    """An instance; its fields are turned while it runs."""

    transfers: Transfers
    name: str = MODEL
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of requests."""
    heads: list[dict[str, str]] = field(default_factory=list)
    cancelled: int = 0
    """Requests whose client left."""
    inside: int = 0
    status: int = 200
    """Of answers; 0 closes the connection without one."""
    code: str | None = None
    """Of the error, where the status is one."""
    delay: float = 0.0
    """Seconds before an answer and between tokens."""
    dies_after: int | None = None
    """Tokens of a stream after which the connection is lost."""
    healthy: bool = True
    frozen: bool = False
    """Whether it lives is not answered."""
    stops_after: int | None = None
    """Tokens of a stream after which nothing more comes."""
    waiting: int = 0
    started: float = 1000.0
    url: str = ""

    def app(self) -> Any:
        post = ["POST"]
        app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/v1/completions", self.generate, methods=post),
                Route("/v1/chat/completions", self.generate, methods=post),
            ]
        )
        return _with_transport(app)

    async def health(self, request: Request) -> Response:
        if self.frozen:
            await asyncio.sleep(WAIT)
        return PlainTextResponse("", 200 if self.healthy else 503)

    async def models(self, request: Request) -> Response:
        card = {"id": self.name, "object": "model", "max_model_len": 64}
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# HELP vllm:num_requests_running x\n"
            f'vllm:num_requests_running{{engine="0"}} {self.inside}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} 0.25\n'
            f"process_start_time_seconds {self.started}\n"
        )

    async def generate(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.seen.append(body)
        self.heads.append(dict(request.headers))
        if self.status == 0:
            _transport(request).abort()
        if self.status != 200:
            error = {"error": {"message": f"told to answer {self.status}", "code": self.code}}
            return JSONResponse(error, self.status or 500, {"Retry-After": "7"})
        if body.get("stream"):
            events = self._counted(self._events(body, request))
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await self._left(request, self._whole(body)))

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        told = await self._kv(body)
        count = body.get("max_tokens", 3)
        await asyncio.sleep(self.delay)
        text = "".join(f"w{i} " for i in range(count))
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        return {
            "id": "fake",
            "choices": [choice],
            "usage": {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count},
            "kv_transfer_params": told,
        }

    async def _kv(self, body: dict[str, Any]) -> dict[str, Any] | None:
        params = body.get("kv_transfer_params")
        if params is None:
            return None
        transfer = params["transfer_id"]
        if params.get("do_remote_decode"):
            assert params["decode_address"]
            await asyncio.sleep(self.delay)
            await self.transfers.push(transfer, params["attempt"])
            told = {"prompt_tokens": 2, "pushed_tokens": 2}
            return {"transfer_id": transfer, "attempt": params["attempt"], **told}
        attempt = await self.transfers.wait(transfer)
        told = {"loaded_tokens": 1, "computed_prompt_tokens": 1, "transfer_seconds": 0.125}
        return {"transfer_id": transfer, "attempt": attempt, **told}

    async def _events(self, body: dict[str, Any], request: Request) -> AsyncIterator[bytes]:
        await self._kv(body)
        count = body.get("max_tokens", 3)
        for i in range(count):
            await asyncio.sleep(self.delay)
            if i == self.stops_after:
                await asyncio.sleep(WAIT)
            if i == self.dies_after:
                _transport(request).abort()
                await asyncio.sleep(WAIT)
            choice = {"index": 0, "text": f"w{i} ", "finish_reason": None}
            yield _event({"id": "fake", "choices": [choice], "usage": None})
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 2, "completion_tokens": count}
            yield _event({"id": "fake", "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def _counted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.inside += 1
        try:
            async for event in events:
                yield event
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1

    async def _left(self, request: Request, work: Any) -> Any:
        """The work's outcome, unless the client leaves before."""
        self.inside += 1
        task = asyncio.ensure_future(work)
        end = time.monotonic() + WAIT
        try:
            while not task.done() and time.monotonic() < end:
                await asyncio.wait({task}, timeout=0.02)
                if await request.is_disconnected():
                    self.cancelled += 1
                    break
            return await task if task.done() else {}
        finally:
            task.cancel()
            self.inside -= 1


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _transport(request: Request) -> Any:
    """Of the connection."""
    return request.scope["transport"]


def _with_transport(app: Any) -> Any:
    """uvicorn's cycle knows the connection, and a method of it is what ASGI hands over."""

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "transport": send.__self__.transport}, receive, send)

    return outer


class Loop:
    """An event loop in a thread, on which servers run until it ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT)
        self.loop.close()


class Served:
    """A server on a loop, which can be ended as if its process were killed."""

    def __init__(self, loop: Loop, app: Any, port: int = 0, lifespan: str = "off") -> None:
        self._loop = loop
        self.sock = run.bind("127.0.0.1", port)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan=lifespan,
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._task = loop.call(self._start())
        self.url = run.url(self.sock)

    async def _start(self) -> Any:
        task = asyncio.ensure_future(self.server.serve(sockets=[self.sock]))
        while not self.server.started:
            assert not task.done()
            await asyncio.sleep(0.005)
        return task

    def close(self) -> None:
        self._loop.call(self.ended())

    async def ended(self) -> None:
        self.server.should_exit = True
        await asyncio.wait_for(self._task, WAIT)

    def kill(self) -> None:
        """Every connection is lost, and no new one is taken."""

        async def cut() -> None:
            for one in self.server.servers:
                one.close()
            for connection in list(self.server.server_state.connections):
                connection.transport.abort()
            self.sock.close()

        self._loop.call(cut())
        self.close()


class Stage:
    """Everything of one test."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.transfers = Transfers()
        self._served: list[Served] = []
        self.by_url: dict[str, Served] = {}
        self.base = ""
        self.client = httpx.Client(timeout=WAIT)

    def fake(self, port: int = 0, **fields: Any) -> Fake:
        fake = Fake(self.transfers, **fields)
        served = Served(self.loop, fake.app(), port)
        self._served.append(served)
        fake.url, self.by_url[served.url] = served.url, served
        return fake

    def orchestrate(
        self, *instances: tuple[str, Fake], server: ServerConfig | None = None, **fields: Any
    ) -> None:
        """Starts it with these instances, each a role and a fake; waits until it is ready."""
        named = tuple(
            f"{role}={fake.url}" + ("#127.0.0.1:9" if role == "decode" else "")
            for role, fake in instances
        )
        settings = OrchestratorConfig(instances=named, **{"heartbeat_timeout": 1.0, **fields})
        app = build_gateway(settings, server or ServerConfig())
        served = Served(self.loop, app, lifespan="on")
        self._served.append(served)
        self.base, self.by_url[served.url] = served.url, served
        self.registry = app.state.registry
        self.door = app.state.door
        if instances:
            until(lambda: len(self.cluster()) == len(named))

    def kill(self, url: str) -> None:
        served = self.by_url.pop(url)
        self._served.remove(served)
        served.kill()

    def cluster(self) -> list[dict[str, Any]]:
        return self.client.get(f"{self.base}/v1/cluster").json()["instances"]

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "a b", **fields}
        if "chat" in path:
            body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]}
        return self.client.post(self.base + path, json=body)

    def count(self, name: str) -> float:
        """The sum of the samples of a name in the orchestrator's metrics, labels included."""
        page = self.client.get(f"{self.base}/metrics").text
        prefix = f"cloverinfer_orchestrator_{name}"
        lines = [line for line in page.splitlines() if line.startswith(prefix)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def close(self) -> None:
        self.client.close()
        self.loop.call(self._close())
        self.loop.close()

    async def _close(self) -> None:
        await asyncio.gather(*(served.ended() for served in self._served))


def until(done: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    made = Stage()
    try:
        yield made
    finally:
        made.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
