"""The engine as a Ray actor, under the names that researchers' scripts use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray

from ..config.cluster import ClusterConfig, ModelConfig
from ..core.errors import CloverError, EngineClosedError, RequestError
from ..core.sampling import SamplingParams
from .live import Chunk
from .llm import AsyncLLM

_FIELDS = set(SamplingParams.__struct_fields__)


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=1000)
class GlobalScheduler:
    """``GlobalScheduler.remote(ClusterConfig(...), ModelConfig(...))``, to be initialized next.

    Requests are raw completions, greedy unless a temperature is given.
    """

    def __init__(
        self, cluster: ClusterConfig | None = None, model: ModelConfig | None = None
    ) -> None:
        self._cluster = cluster or ClusterConfig()
        self._model = model or ModelConfig()
        self._llm: AsyncLLM | None = None
        self._starting = asyncio.Lock()

    async def initialize_cluster(self) -> list[dict[str, Any]]:
        """Starts all nodes and returns a row for each; a second call returns the same nodes."""
        async with self._starting:
            if self._llm is None:
                self._llm = await asyncio.to_thread(AsyncLLM, self._model, self._cluster)
            return self._llm.nodes()

    async def submit_request(
        self, prompt: str | list[int], return_metrics: bool = False, **sampling: Any
    ) -> Any:
        """The text; with ``return_metrics`` the text and its metrics.

        ``max_new_tokens`` (default 128) and the fields of ``SamplingParams`` are keywords.
        """
        chunks = [chunk async for chunk in self._stream(prompt, sampling)]
        text = "".join(chunk.text for chunk in chunks)
        return (text, chunks[-1].metrics) if return_metrics else text

    async def stream_request(
        self, prompt: str | list[int], **sampling: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Chunks as dicts: ``text``, ``token_ids``, and on the last ``finish_reason``, ``metrics``;
        ``for ref in scheduler.stream_request.remote(...): ray.get(ref)``."""
        async for chunk in self._stream(prompt, sampling):
            yield {
                "text": chunk.text,
                "token_ids": chunk.token_ids,
                "finish_reason": chunk.finish_reason,
                "metrics": chunk.metrics,
            }

    async def get_cluster_status(self) -> list[dict[str, Any]]:
        """One row per node: its place and what it did so far."""
        return self._running().nodes()

    async def shutdown_cluster(self) -> None:
        """Ends all nodes; ``initialize_cluster`` may start them anew."""
        async with self._starting:
            llm, self._llm = self._llm, None
            if llm is not None:
                await asyncio.to_thread(llm.close)

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineClosedError("the cluster is not running: call initialize_cluster first")
        return self._llm

    async def _stream(
        self, prompt: str | list[int], fields: dict[str, Any]
    ) -> AsyncIterator[Chunk]:
        async for chunk in self._running().stream(prompt, sampling_from(fields)):
            if chunk.finish_reason == "error":
                raise CloverError(chunk.error or "the request failed")
            yield chunk


def sampling_from(fields: dict[str, Any]) -> SamplingParams:
    """From keywords, ``max_new_tokens`` being ``max_tokens``; greedy by default."""
    given = {"temperature": 0.0} | fields
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        raise RequestError(
            f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}",
            unknown[0],
        )
    return SamplingParams(**given)
