"""``/metrics`` as Prometheus reads it: names, labels, and what HTTP requests move."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from cloverinfer.config import ServerConfig
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(client: TestClient) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"cloverinfer_{name}", frozenset(labels.items())), 0.0)


@pytest.fixture
def client(engine: Any) -> Any:
    settings = ServerConfig(api_key=("k",), log_requests=False)
    headers = {"Authorization": "Bearer k"}
    with TestClient(build_app(Catalog.single(engine, "m"), settings), headers=headers) as client:
        yield client


def test_http_requests_are_counted_by_route_and_status(client: TestClient, engine: Any) -> None:
    body = {"model": "m", "prompt": "a", "max_tokens": 2}
    completions = {"method": "POST", "route": "/v1/completions"}
    before = scrape(client)
    client.post("/v1/completions", json=body)
    client.post("/v1/completions", json={**body, "stream": True})
    client.post("/v1/completions", json={**body, "top_p": 5})
    client.post("/v1/completions", json=body, headers={"Authorization": "Bearer no"})
    client.get("/v1/models/m")
    client.get("/some/where")
    client.get("/else/where")
    after = scrape(client)

    def moved(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert moved("http_requests_total", status="200", **completions) == 2
    assert moved("http_requests_total", status="400", **completions) == 1
    assert moved("http_requests_total", status="401", **completions) == 1
    assert moved("http_request_duration_seconds_count", **completions) == 4
    model = {"method": "GET", "route": "/v1/models/{name:path}"}
    assert moved("http_requests_total", status="200", **model) == 1
    assert moved("http_requests_total", method="GET", route="other", status="404") == 2
    # The scrape itself is under way while it is answered.
    assert value(after, "http_requests_in_progress") == 1


def test_what_the_engine_counted_is_told(client: TestClient, engine: Any) -> None:
    counters = engine.counters
    counters.ttft.observe(0.03)
    counters.prompt_tokens, counters.generation_tokens = 7, 9
    counters.failed["decoding"] = 2
    counters.link("prefill-0", "attention-0", 512)
    samples = scrape(client)
    model = {"model_name": "m"}
    assert value(samples, "time_to_first_token_seconds_bucket", le="0.025", **model) == 0
    assert value(samples, "time_to_first_token_seconds_bucket", le="0.05", **model) == 1
    assert value(samples, "time_to_first_token_seconds_sum", **model) == pytest.approx(0.03)
    assert value(samples, "prompt_tokens_total", **model) == 7
    assert value(samples, "generation_tokens_total", **model) == 9
    assert value(samples, "request_failures_total", stage="decoding", **model) == 2
    link = {"source": "prefill-0", "destination": "attention-0"}
    assert value(samples, "link_bytes_total", **link, **model) == 512
    assert value(samples, "kv_cache_blocks_used", node="attention-0", **model) == 3
    assert value(samples, "kv_cache_blocks", node="attention-0", **model) == 12
    assert value(samples, "kv_cache_usage_perc", node="attention-0", **model) == 0.25
    assert value(samples, "num_requests_waiting", **model) == 2
    up = {"node": "dense-0", "role": "dense"}
    assert value(samples, "node_up", **up, **model) == 1


def test_every_family_has_help_and_a_unit_in_its_name(client: TestClient) -> None:
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    ours = [one for one in families if one.name.startswith("cloverinfer_")]
    assert len(ours) > 20
    for family in ours:
        assert family.documentation, family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


def test_two_servers_share_nothing(engine: Any) -> None:
    apps = [build_app(Catalog.single(engine, "m")) for _ in range(2)]
    with TestClient(apps[0]) as one, TestClient(apps[1]) as two:
        one.get("/version")
        route = {"method": "GET", "route": "/version", "status": "200"}
        assert value(scrape(one), "http_requests_total", **route) == 1
        assert value(scrape(two), "http_requests_total", **route) == 0
