"""The same load on an engine in this process: no HTTP, no server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from ..core.errors import CloverError
from ..core.sampling import SamplingParams
from .records import Prompt, Record, Sample
from .runner import Clock


class Engine(Protocol):
    """What of ``AsyncLLM`` is used."""

    def stream(self, prompt: Prompt, sampling: SamplingParams) -> AsyncGenerator[Any, None]: ...


class EngineSender:
    """Streams from an engine; a piece is what came of one step."""

    def __init__(self, engine: Engine, temperature: float, ignore_eos: bool) -> None:
        self._engine = engine
        self._temperature = temperature
        self._ignore_eos = ignore_eos

    async def send(self, sample: Sample, record: Record, now: Clock) -> None:
        sampling = SamplingParams(
            max_tokens=sample.output_tokens,
            temperature=self._temperature,
            ignore_eos=self._ignore_eos,
        )
        record.tokens_from = "engine"
        try:
            async for chunk in self._engine.stream(sample.prompt, sampling):
                if chunk.token_ids:
                    record.times.append(now())
                    record.output_tokens += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    record.finish_reason = chunk.finish_reason
                    record.prompt_tokens = (chunk.metrics or {}).get("prompt_tokens")
                    if chunk.finish_reason in ("error", "abort"):
                        record.error = chunk.error or "aborted"
        except CloverError as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended = now()
