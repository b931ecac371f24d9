"""Asks an instance how it is, and makes its announcement of the answers.

Two kinds are known, by the names of their metrics: vLLM and our own server. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from .instances import Announcement, Load
from .upstream import LOST, reason_of

ENGINES = {"vllm": "vllm:", "cloverinfer": "cloverinfer_"}
"""What the names of an engine's metrics begin with."""
TIMEOUT = 3.0
"""Seconds that an instance may take to answer all questions of a round: with the interval between
rounds less than an orchestrator waits for a heartbeat, so that it hears of what is silent."""
MOST_BYTES = 16 << 20


_SENSELESS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What is raised over an answer that makes no sense: no JSON, no number, one without an end."""


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


@dataclass
class Probe:
    """One instance; keeps what it was last told, so that a question that fails loses nothing."""

    url: str
    role: str
    kv_address: str | None = None
    public_url: str | None = None
    """Where requests go, if not to ``url``."""
    api_key: str | None = None
    _born: int = field(default_factory=lambda: int(time.time() * 1000))
    _models: list[dict[str, Any]] = field(default_factory=list)
    _until: float = 0.0
    """When this round of questions ends, by the monotonic clock."""

    async def ask(self, http: aiohttp.ClientSession) -> Announcement:
        """How it is now; never raises for what an instance does."""
        problem, load, engine = None, Load(), ""
        try:
            self._until = time.monotonic() + TIMEOUT
            engine, load = await self._look(http)
        except (_RefusedError, *LOST, *_SENSELESS) as error:
            problem = reason_of(error)
        return Announcement(
            url=self.public_url or self.url,
            role=self.role,
            incarnation=self._born,
            models=self._models,
            engine=engine,
            kv_address=self.kv_address,
            load=load,
            problem=problem,
        )

    async def _look(self, http: aiohttp.ClientSession) -> tuple[str, Load]:
        """Its engine and its load; models and start are kept."""
        await self._get(http, "/health")
        self._models = msgspec.json.decode(await self._get(http, "/v1/models"), type=_Models).data
        samples = dict(_samples(await self._get(http, "/metrics")))
        found = _load(samples)
        # When the instance's process began: its restart is a new incarnation.
        began = int(samples.get("process_start_time_seconds", 0) * 1000)
        self._born = max(self._born, began)
        return found

    async def _get(self, http: aiohttp.ClientSession, path: str) -> bytes:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=max(0.01, self._until - time.monotonic()))
        async with http.get(self.url + path, headers=headers, timeout=timeout) as response:
            body = b""
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > MOST_BYTES:
                    raise _RefusedError(f"{path} answers more than {MOST_BYTES} bytes")
            if response.status != 200:
                raise _RefusedError(f"{path} answers {response.status}")
            return body


class _RefusedError(Exception):
    pass


def _samples(page: bytes) -> Iterator[tuple[str, float]]:
    """Names and values of a page of metrics, those of one name with several labels added up."""
    sums: dict[str, float] = {}
    for line in page.decode("utf-8", "replace").splitlines():
        if line and line[0] != "#" and line.startswith(_WANTED):
            name = line.partition("{")[0].partition(" ")[0]
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    yield from sums.items()


_NAMES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_WANTED = (
    "process_start_time_seconds",
    *(prefix + name for prefix in ENGINES.values() for name in _NAMES),
)


def _load(samples: Mapping[str, float]) -> tuple[str, Load]:
    """The engine and its load; no name and no load where the page knows neither."""
    for engine, prefix in ENGINES.items():
        running = samples.get(f"{prefix}num_requests_running")
        if running is not None:
            waiting = samples.get(f"{prefix}num_requests_waiting", 0.0)
            usage = samples.get(f"{prefix}kv_cache_usage_perc", 0.0)
            return engine, Load(running=int(running), waiting=int(waiting), kv_usage=usage)
    return "", Load()
