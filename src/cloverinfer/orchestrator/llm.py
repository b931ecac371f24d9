"""The engine as users hold it: ``AsyncLLM`` for servers, ``LLM`` for scripts."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import msgspec

from ..config.cluster import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from ..config.load import check_node_counts, hint
from ..config.network import NetworkConfig
from ..core.errors import CloverError, ConfigError, RequestError
from ..core.logprobs import TokenLogprobs
from ..core.sampling import SamplingParams
from ..models import Tokenizer
from .counters import EngineStats
from .delivery import Couriers, Inbox
from .engine import Engine
from .live import Ask, Chunk, RequestOptions, Sink

LONG_TEXT = 2000
"""Characters whose tokenization takes about as long as a detour through a thread."""
_CONFIGS = (ModelConfig, ClusterConfig, CacheConfig, SchedulerConfig, NetworkConfig)


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    metrics: dict[str, Any]
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``, where asked for."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for an end of sequence."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each token of the prompt, None for the first, where asked for."""
    alternatives: tuple[Completion, ...] = ()
    """The others of the ``n`` sequences of its prompt, in order."""


class _Left:
    """How many of a request's sequences have not ended; true while there are any."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __bool__(self) -> bool:
        return self._count > 0

    def take(self, item: Chunk | CloverError) -> Chunk:
        """The chunk; raises the error, which ends one sequence. What is wrong with a request is
        wrong with all of them; a queue may be full for this one alone."""
        if isinstance(item, CloverError):
            self._count = 0 if isinstance(item, RequestError) else self._count - 1
            raise item
        self._count -= item.finish_reason is not None
        return item


class AsyncLLM:
    """A running cluster, usable from any thread and event loop; ``close`` it, or use ``with``."""

    def __init__(
        self,
        model: ModelConfig | str,
        cluster: ClusterConfig | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Blocks until all nodes are ready; raises a ``CloverError`` that says why they are not."""
        config = ModelConfig(model_path=model) if isinstance(model, str) else model
        self._engine = Engine(config, cluster or ClusterConfig(), progress or (lambda line: None))
        self._couriers = Couriers()
        self._finalizer = weakref.finalize(self, self._engine.close)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        return self._engine.cluster.model.name

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def topology(self) -> str:
        return self._engine.config.topology

    @property
    def failure(self) -> str | None:
        """Why the engine can serve no more; None while it can."""
        return self._engine.failure

    def nodes(self) -> list[dict[str, Any]]:
        """One row per node: name, role, pid, device, transport, and what it did so far."""
        return self._engine.nodes()

    def cluster_info(self) -> dict[str, Any]:
        """What the engine is made of, as plain values: ``model``, ``max_model_len``, ``topology``,
        ``executor``; ``transport``: its ``name``, ``passed_over`` (a ``transport`` and a ``reason``
        for each one that comes earlier in the order) and ``checksum``; ``nodes``: the rows of
        ``nodes()`` with ``kv_blocks_used`` of ``kv_blocks``. From any thread.
        """
        return self._engine.cluster_info()

    def stats(self) -> EngineStats:
        """Histograms and totals since the start, and how full the engine is; from any thread."""
        return self._engine.stats()

    async def stream(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks as they come, the last of each of the ``n`` sequences with ``finish_reason`` and
        metrics. A lower ``priority`` is served sooner; cached prefixes are shared with requests of
        the same ``cache_salt`` only.

        Raises ``RequestError``, ``QueueFullError`` or ``EngineClosedError``. Closing the generator
        early aborts the request.
        """
        loop = asyncio.get_running_loop()
        courier = self._couriers.of(loop)
        arrived = Inbox(loop)

        def sink(item: Chunk | CloverError) -> None:
            # Raises where the loop has been closed under us, which ends the request.
            courier.put(arrived, item)

        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            # In a thread: it must not stall the streams of others on this loop.
            prompt = await asyncio.to_thread(self._engine.tokens, prompt)
        if sampling.structured_outputs is not None:
            await asyncio.to_thread(self._engine.check, sampling)
        options = RequestOptions(request_id, priority, cache_salt)
        name = self._engine.submit(prompt, sampling, sink, options)
        left = _Left(sampling.n)
        try:
            while left:
                yield left.take(await arrived.get())
        finally:
            if left:
                self._engine.abort(name)

    def stream_sync(
        self, prompt: str | list[int], sampling: SamplingParams
    ) -> Generator[Chunk, None, None]:
        """``stream`` for scripts without an event loop."""
        arrived: queue.SimpleQueue[Chunk | CloverError] = queue.SimpleQueue()
        name = self._engine.submit(prompt, sampling, arrived.put)
        left = _Left(sampling.n)
        try:
            while left:
                yield left.take(arrived.get())
        finally:
            if left:
                self._engine.abort(name)

    def submit(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        sink: Sink,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """The way beneath: ``sink`` is called by the engine's thread with chunks or an error."""
        options = RequestOptions(request_id, priority, cache_salt)
        return self._engine.submit(prompt, sampling, sink, options)

    def submit_all(self, asks: Sequence[Ask]) -> list[str]:
        """Many at a time, which are admitted together; none where one raises."""
        return self._engine.submit_all(asks)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def close(self) -> None:
        """Ends what is under way and all nodes; calling it twice is fine."""
        self._finalizer()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LLM:
    """A cluster for scripts: ``LLM(model, topology="pda", executor="local").generate(prompts)``.

    Further keywords are fields of ``ModelConfig``, ``ClusterConfig``, ``CacheConfig``,
    ``SchedulerConfig`` and ``NetworkConfig``. Needs no Ray unless ``executor="ray"``.
    """

    def __init__(
        self,
        model: ModelConfig | str = "smollm2-135m",
        topology: str = "pda",
        executor: str = "local",
        progress: Callable[[str], None] | None = None,
        **fields: Any,
    ) -> None:
        config, cluster = _configs(model, {"topology": topology, "executor": executor} | fields)
        self._max_queue = cluster.scheduler.max_queue
        self.engine = AsyncLLM(config, cluster, progress)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: str | list[int] | Sequence[str | list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Answers in the order of the prompts; one prompt may be given bare. Lower ``priority`` is
        served sooner.

        All requests are checked as they are submitted; an error ends the rest and is raised.
        """
        listed = _as_prompts(prompts)
        params = _as_params(sampling, len(listed))
        levels = [priority] * len(listed) if isinstance(priority, int) else list(priority)
        if len(levels) != len(listed):
            raise RequestError(f"{len(levels)} priorities for {len(listed)} prompts", "priority")
        asked = [
            (prompt, one, RequestOptions(None, level, cache_salt))
            for prompt, one, level in zip(listed, params, levels, strict=True)
        ]
        return _Batch(self.engine, self._max_queue).run(asked)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_Asked = tuple[Union[str, list[int]], SamplingParams, RequestOptions]
"""A prompt, its parameters and options."""
_TOGETHER = 64
"""Requests that are admitted together: so first steps are full, and nodes do not wait long."""


class _Batch:
    """Runs many prompts, never more at a time than the queue takes."""

    def __init__(self, engine: AsyncLLM, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._ended: queue.SimpleQueue[tuple[int, Chunk | CloverError]] = queue.SimpleQueue()
        """Last chunks of sequences, and errors, by prompt. The thread that waits for them is not
        woken for others: it would take the interpreter from the engine's at every token."""
        self._heard: dict[int, dict[int, _Sequence]] = {}
        """By prompt and sequence, written by the engine's thread until the last one has ended."""
        self._names: dict[int, str] = {}
        self._left: dict[int, _Left] = {}
        self._live = 0

    def run(self, asked: Sequence[_Asked]) -> list[Completion]:
        begun = 0
        try:
            while begun < len(asked) or self._names:
                while some := self._next(asked, begun):
                    self._begin(begun, some)
                    begun += len(some)
                self._take()
        finally:
            for name in self._names.values():
                self._engine.abort(name)
        return [_grouped(self._heard[i]) for i in range(len(asked))]

    def _next(self, asked: Sequence[_Asked], begun: int) -> Sequence[_Asked]:
        """Those that the queue takes now. Alone, what it may refuse is tried."""
        live, end = self._live, begun
        for _, sampling, _ in asked[begun : begun + _TOGETHER]:
            live += sampling.n
            if live > self._limit and (self._names or end > begun):
                break
            end += 1
        return asked[begun:end]

    def _begin(self, first: int, asked: Sequence[_Asked]) -> None:
        asks = []
        for i, (prompt, sampling, options) in enumerate(asked, first):
            self._left[i] = _Left(sampling.n)
            asks.append(Ask(prompt, sampling, self._sink(i), options))
        self._names |= dict(enumerate(self._engine.submit_all(asks), first))
        self._live += sum(ask.sampling.n for ask in asks)

    def _sink(self, i: int) -> Sink:
        heard: dict[int, _Sequence] = {}
        self._heard[i] = heard

        def sink(item: Chunk | CloverError) -> None:
            if isinstance(item, CloverError):
                self._ended.put((i, item))
                return
            if item.index not in heard:
                heard[item.index] = _Sequence()
            heard[item.index].take(item)
            if item.finish_reason is not None:
                self._ended.put((i, item))

        return sink

    def _take(self) -> None:
        i, item = self._ended.get()
        chunk = self._left[i].take(item)
        if chunk.finish_reason == "error":
            raise CloverError(f"prompt {i} failed: {chunk.error}")
        self._live -= 1
        if not self._left[i]:
            del self._names[i]


@dataclass
class _Sequence:
    """What has been heard of one sequence. Nothing is kept for each token that would make Python's
    collections of garbage longer."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: Chunk | None = None

    def take(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += chunk.logprobs
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            self.last = chunk

    def completion(self) -> Completion:
        last = self.last
        assert last is not None
        assert last.finish_reason is not None
        assert last.metrics is not None
        return Completion(
            "".join(self.texts),
            self.token_ids,
            last.finish_reason,
            last.metrics,
            self.logprobs,
            last.stop_reason,
            self.prompt_logprobs,
        )


def _grouped(heard: dict[int, _Sequence]) -> Completion:
    """The first sequence, with the others of its prompt."""
    first, *others = (heard[index].completion() for index in sorted(heard))
    return dataclasses.replace(first, alternatives=tuple(others))


def _as_prompts(prompts: str | list[int] | Sequence[str | list[int]]) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        kind = type(prompts).__name__
        raise RequestError(f"prompts are a list of strings or token id lists, not {kind}", "prompt")
    return [list(prompts)] if prompts and isinstance(prompts[0], int) else list(prompts)


def _as_params(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    listed = list(sampling) if isinstance(sampling, Sequence) else [sampling]
    for one in listed:
        if not isinstance(one, SamplingParams):
            kind = type(one).__name__
            raise RequestError(f"sampling must be SamplingParams, not {kind}", "sampling")
    if len(listed) != count:
        raise RequestError(f"{len(listed)} sampling parameters for {count} prompts", "sampling")
    return listed


def _configs(model: ModelConfig | str, fields: dict[str, Any]) -> tuple[ModelConfig, ClusterConfig]:
    """Sorts flat keywords into the configs that have them."""
    base = {"model_path": model} if isinstance(model, str) else msgspec.structs.asdict(model)
    left = dict(fields)

    def take(kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {name: left.pop(name) for name in kind.__struct_fields__ if name in left}

    cluster: dict[str, Any] = take(ClusterConfig)
    for section in ("cache", "scheduler", "network"):
        kind = type(getattr(ClusterConfig(), section))
        given = take(kind)
        if given:
            whole = cluster.get(section, kind())
            cluster[section] = msgspec.structs.replace(whole, **given)
    base |= take(ModelConfig)
    if left:
        wrong = next(iter(left))
        known = [name for kind in _CONFIGS for name in kind.__struct_fields__]
        raise ConfigError(f"unknown field {wrong!r}{hint(wrong, known)}")
    config = ClusterConfig(**cluster)
    check_node_counts(config.topology, dict.fromkeys(fields, ""))
    return ModelConfig(**base), config
