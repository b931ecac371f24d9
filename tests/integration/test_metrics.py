"""``/metrics`` over real nodes: values move as requests do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from tests.tiny_models import make_tiny

from cloverinfer.config.cluster import CacheConfig, ClusterConfig, ModelConfig
from cloverinfer.core.sampling import SamplingParams
from cloverinfer.orchestrator.llm import AsyncLLM
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder: Path = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    cache = CacheConfig(num_blocks=64, block_size=16)
    cluster = ClusterConfig(topology="pda", executor="local", cache=cache)
    with AsyncLLM(ModelConfig(model_path=str(folder)), cluster) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[TestClient]:
    with TestClient(build_app(Catalog.single(engine, "tiny"))) as client:
        yield client


def scrape(client: TestClient) -> dict[str, float]:
    """Sums over labels but the stage, reason or link, by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            keys = ("stage", "finished_reason", "source", "destination")
            labels = [sample.labels[key] for key in keys if key in sample.labels]
            name = ":".join([sample.name.removeprefix("cloverinfer_"), *labels])
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def complete(client: TestClient, tokens: int, prompt: int = 20) -> None:
    ids = [1 + (7 * i + prompt) % 90 for i in range(prompt)]
    body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_request_moves_the_values(client: TestClient) -> None:
    before = scrape(client)
    complete(client, tokens=5)
    after = scrape(client)

    def moved(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert moved("prompt_tokens_total") == 20
    assert moved("generation_tokens_total") == 5
    assert moved("request_success_total:length") == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert moved(f"{name}_seconds_count") == 1
        assert moved(f"{name}_seconds_sum") > 0
    assert moved("inter_token_latency_seconds_count") == 4
    assert moved("request_time_per_output_token_seconds_count") == 1
    assert moved("link_bytes_total:prefill-0:attention-0") > 0
    assert moved("link_bytes_total:dense-0:attention-0") > 0
    assert moved("link_bytes_total:attention-0:dense-0") > 0
    assert after["node_up"] == 3
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_blocks"] > 0


def test_a_cached_prefix_is_counted(client: TestClient) -> None:
    complete(client, tokens=2, prompt=48)
    before = scrape(client)
    complete(client, tokens=2, prompt=48)
    after = scrape(client)
    assert after["cached_prompt_tokens_total"] > before.get("cached_prompt_tokens_total", 0)


def test_an_abort_is_counted_by_its_stage(engine: AsyncLLM, client: TestClient) -> None:
    async def leave() -> None:
        stream = engine.stream([3] * 8, SamplingParams(max_tokens=300, ignore_eos=True))
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    deadline = time.monotonic() + 20
    while not (aborts := _aborts(scrape(client))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(aborts.values()) == 1
    assert set(aborts) <= {"transferring", "decoding"}


def _aborts(samples: dict[str, float]) -> dict[str, float]:
    name = "request_aborts_total:"
    return {key.removeprefix(name): n for key, n in samples.items() if key.startswith(name)}
