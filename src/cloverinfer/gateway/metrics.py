"""``/metrics`` of the orchestrator, in Prometheus's form; a registry per orchestrator.

``docs/orchestrate.md`` lists every name. Instances have metrics of their own; what stands here is
what only the orchestrator sees.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .breaker import CLOSED
from .instances import Instance, Registry
from .stages import Stages

PREFIX = "cloverinfer_orchestrator_"
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
OUTCOMES = ("ok", "refused", "failed", "cancelled")
"""Answered; refused as asked (4xx); failed (5xx, or broken off); the client left."""


class OrchestratorMetrics:
    """What was counted, and what is known of instances at the time of the scrape."""

    def __init__(self, instances: Registry) -> None:
        registry = self._registry = CollectorRegistry(auto_describe=False)
        registry.register(_Instances(instances))
        ProcessCollector(registry=registry)
        text = "Requests that have ended, by how."
        self._requests = Counter(f"{PREFIX}requests", text, ["outcome"], registry=registry)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self.inside = Gauge(
            f"{PREFIX}requests_in_progress", "Requests under way.", registry=registry
        )
        self._attempts = Counter(
            f"{PREFIX}attempts",
            "Requests sent to instances that have ended: ok, busy, fault or abandoned.",
            ["instance", "role", "result"],
            registry=registry,
        )
        self._stages = Histogram(
            f"{PREFIX}stage_seconds",
            "Stages of requests, as in the usage of their answers.",
            ["stage"],
            buckets=BOUNDS,
            registry=registry,
        )

    def page(self) -> Response:
        """What Prometheus scrapes."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def attempt(self, instance: Instance, result: str) -> None:
        self._attempts.labels(instance.url, instance.told.role, result).inc()

    def end(self, outcome: str, stages: Stages) -> None:
        """A request has ended."""
        self._requests.labels(outcome).inc()
        for stage, seconds in stages.told().items():
            if seconds is not None:
                self._stages.labels(stage).observe(seconds)


class _Instances(Collector):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        values = {
            "instance_up": ("1 while the instance takes requests.", _up),
            "instance_breaker_open": ("1 while it is left alone after faults.", _open),
            "instance_in_flight": ("Requests sent to it that have not ended.", _in_flight),
            "instance_requests": ("Requests that it told of itself.", _requests),
            "instance_kv_usage": ("Share of its KV blocks in use, as it told.", _kv_usage),
        }
        instances = self._registry.all()
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=["instance", "role"])
            for one in instances:
                family.add_metric([one.url, one.told.role], value(one))
            yield family


def _up(one: Instance) -> float:
    return float(one.told.problem is None)


def _open(one: Instance) -> float:
    return float(one.breaker.state != CLOSED)


def _in_flight(one: Instance) -> float:
    return one.in_flight


def _requests(one: Instance) -> float:
    return one.told.load.requests


def _kv_usage(one: Instance) -> float:
    return one.told.load.kv_usage
