"""The interface of researchers' scripts, on a local Ray."""

import os

import pytest
import ray

from cloverinfer import CacheConfig, ClusterConfig, GlobalScheduler, ModelConfig
from cloverinfer.orchestrator.executors.ray import ALL_GPUS

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def scheduler():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # as in older versions of Ray
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    made = GlobalScheduler.remote(
        ClusterConfig(
            num_prefill_workers=1,
            num_attention_nodes=1,
            num_decode_dense_nodes=1,
            cache=CacheConfig(num_blocks=128),
        ),
        ModelConfig(model_path="smollm2-135m"),
    )
    rows = ray.get(made.initialize_cluster.remote())
    assert {row["role"] for row in rows} == {"prefill", "dense", "attention"}
    assert len({row["pid"] for row in rows}) == 3
    yield made
    ray.get(made.shutdown_cluster.remote())
    ray.shutdown()


def test_nodes_see_the_gpus_of_their_host(scheduler):
    """Ray hides them from actors that ask for none."""

    @ray.remote(num_cpus=0)
    class Actor:
        def visible(self):
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    node = Actor.options(runtime_env={"env_vars": ALL_GPUS}).remote()
    assert ray.get([Actor.remote().visible.remote(), node.visible.remote()]) == ["", "0,1"]


def test_text_and_metrics(scheduler):
    text = ray.get(scheduler.submit_request.remote("The capital of France is", max_new_tokens=8))
    assert "Paris" in text
    again, metrics = ray.get(
        scheduler.submit_request.remote(
            "The capital of France is", return_metrics=True, max_new_tokens=8
        )
    )
    assert again == text
    assert metrics["total_tokens"] == metrics["prompt_tokens"] + 8


def test_streaming(scheduler):
    refs = scheduler.stream_request.remote("The capital of France is", max_new_tokens=8)
    chunks = [ray.get(ref) for ref in refs]
    assert "Paris" in "".join(chunk["text"] for chunk in chunks)
    assert chunks[-1]["finish_reason"] == "length"
    assert len(chunks) > 2


def test_bad_parameters_are_named(scheduler):
    with pytest.raises(ray.exceptions.RayTaskError, match="max_new_token"):
        ray.get(scheduler.submit_request.remote("Hello", max_new_token=8))
    with pytest.raises(ray.exceptions.RayTaskError, match="prompt is empty"):
        ray.get(scheduler.submit_request.remote(""))
    assert ray.get(scheduler.submit_request.remote("Hello", max_new_tokens=2))
