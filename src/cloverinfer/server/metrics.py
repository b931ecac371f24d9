"""``/metrics``: what the engines counted and what came over HTTP, in Prometheus's form.

A registry per server, no global state. Engines count for themselves; their counters are read when
somebody asks, so nothing here lies on the way of a token. ``docs/metrics.md`` lists every name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..orchestrator.counters import EngineStats
from .catalog import Catalog
from .errors import own_path

PREFIX = "cloverinfer_"
HISTOGRAMS = {
    "time_to_first_token_seconds": ("ttft", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token", "Between two tokens of a request."),
    "request_time_per_output_token_seconds": (
        "tpot",
        "Mean time between the tokens of a finished request.",
    ),
    "e2e_request_latency_seconds": ("latency", "From arrival to the end of a finished request."),
    "request_queue_time_seconds": ("queue", "From arrival until the first prefill is planned."),
    "request_prefill_time_seconds": ("prefill", "From there to the first token."),
    "request_transfer_time_seconds": (
        "transfer",
        "From the first token until the KV cache is whole where it is attended over.",
    ),
    "request_decode_time_seconds": ("decode", "From the first token to the last."),
}
"""Field of ``Counters`` and help, by name."""
TOTALS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that have ended."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "cached_prompt_tokens": ("cached_tokens", "Prompt tokens that a prefix cache spared."),
}
BY_KEY = {
    "request_success": ("finished", "finished_reason", "Requests finished, by reason."),
    "request_aborts": ("aborted", "stage", "Requests aborted, by the state they were in."),
    "request_failures": ("failed", "stage", "Requests failed, by the state they were in."),
}
NODE_TOTALS = {
    "node_tokens": ("tokens", "Tokens computed (prefill, dense) or attended (attention)."),
    "node_steps": ("steps", "Steps run."),
    "node_busy_seconds": ("seconds", "Time in steps."),
}
HTTP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
OTHER = "other"
"""The route of requests that no route takes: paths are the client's text, and without bound."""


class ServerMetrics:
    """The registry of one server."""

    def __init__(self, catalog: Catalog) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Engines(catalog))
        ProcessCollector(registry=self.registry)
        labels = ["method", "route"]
        self._requests = Counter(
            f"{PREFIX}http_requests",
            "HTTP requests answered, by route and status; 499 where the client left.",
            [*labels, "status"],
            registry=self.registry,
        )
        self._inside = Gauge(
            f"{PREFIX}http_requests_in_progress",
            "HTTP requests being answered.",
            registry=self.registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "From the head of an HTTP request to the end of its answer.",
            labels,
            buckets=HTTP_BOUNDS,
            registry=self.registry,
        )

    def page(self) -> Response:
        """What Prometheus scrapes."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    def begin(self) -> None:
        self._inside.inc()

    def end(self, method: str, route: str, status: int, seconds: float) -> None:
        self._inside.dec()
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


class CountRequests:
    """ASGI middleware, outermost, so that what the front door refuses is counted as well."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499
        started = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.begin()
        try:
            await self._app(scope, receive, watch)
        finally:
            seconds = time.perf_counter() - started
            self._metrics.end(_method(scope), self._route(scope), status, seconds)

    def _route(self, scope: Scope) -> str:
        path = getattr(scope.get("route"), "path", None)
        if isinstance(path, str):
            return path
        path = own_path(scope)
        return path if path in self._routes else OTHER


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    return method if method in known else OTHER


class _Engines(Collector):
    """Reads the engines' counters when it is asked to."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterator[Metric]:
        models = self._catalog.models
        stats = [(model.name, model.engine.stats()) for model in models]
        rows = [(model.name, row) for model in models for row in model.engine.nodes()]
        yield _gauge("info", "The server's version.", [((__version__,), 1.0)], "version")
        yield from _counted(stats)
        yield from _gauges(stats)
        yield from _pools(stats)
        yield from _nodes(rows)


_Samples = list[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _total(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counted(stats: list[tuple[str, EngineStats]]) -> Iterator[Metric]:
    for name, (field, text) in HISTOGRAMS.items():
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        for model, one in stats:
            histogram = getattr(one.counters, field)
            family.add_metric([model], histogram.cumulative(), histogram.total)
        yield family
    for name, (field, text) in TOTALS.items():
        samples: _Samples = [((model,), getattr(one.counters, field)) for model, one in stats]
        yield _total(name, text, samples, "model_name")
    samples = [((model,), one.preemptions) for model, one in stats]
    yield _total("num_preemptions", "Requests prefilled anew.", samples, "model_name")
    samples = [((model,), one.dropped_rows) for model, one in stats]
    text = "Rows computed although their request had ended."
    yield _total("dropped_rows", text, samples, "model_name")
    for name, (field, label, text) in BY_KEY.items():
        samples = [
            ((model, key), count)
            for model, one in stats
            for key, count in dict(getattr(one.counters, field)).items()
        ]
        yield _total(name, text, samples, "model_name", label)
    samples = [
        ((model, *link), count)
        for model, one in stats
        for link, count in dict(one.counters.link_bytes).items()
    ]
    text = "Payload put from one node to another."
    yield _total("link_bytes", text, samples, "model_name", "source", "destination")


def _gauges(stats: list[tuple[str, EngineStats]]) -> Iterator[Metric]:
    samples: _Samples = [((model,), one.running) for model, one in stats]
    yield _gauge("num_requests_running", "Requests past the queue.", samples, "model_name")
    samples = [((model,), one.waiting) for model, one in stats]
    yield _gauge("num_requests_waiting", "Requests in the queue.", samples, "model_name")


def _pools(stats: list[tuple[str, EngineStats]]) -> Iterator[Metric]:
    pools = [((m, node), pool) for m, one in stats for node, pool in one.blocks.items()]
    labels = ("model_name", "node")
    used: _Samples = [(key, pool[0]) for key, pool in pools]
    yield _gauge("kv_cache_blocks_used", "KV blocks that requests hold.", used, *labels)
    whole: _Samples = [(key, pool[1]) for key, pool in pools]
    yield _gauge("kv_cache_blocks", "KV blocks of the pool.", whole, *labels)
    share: _Samples = [(key, pool[0] / pool[1]) for key, pool in pools]
    yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", share, *labels)


def _nodes(rows: list[tuple[str, dict[str, Any]]]) -> Iterator[Metric]:
    keys = [(model, str(row["name"]), str(row["role"])) for model, row in rows]
    labels = ("model_name", "node", "role")
    alive: _Samples = [
        (key, float(row.get("alive", True))) for key, (_, row) in zip(keys, rows, strict=True)
    ]
    yield _gauge("node_up", "1 while the node lives.", alive, *labels)
    for name, (field, text) in NODE_TOTALS.items():
        samples: _Samples = [
            (key, row.get(field, 0)) for key, (_, row) in zip(keys, rows, strict=True)
        ]
        yield _total(name, text, samples, *labels)
