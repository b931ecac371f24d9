"""The vLLM connector's worker half with caches on real GPUs: PyTorch's tensors and streams, the
driver's own sharing of memory between processes. vLLM itself is not needed: a fake engine does
around the connector what it does (tests/vllm_kit.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm_child import RemoteEngine
from tests.vllm_gpu_kit import SPOILT, TorchGpu
from tests.vllm_kit import FakeEngine, until

from cloverinfer.core.errors import ConfigError
from cloverinfer.integrations.vllm.describe import engine_of
from cloverinfer.integrations.vllm.memory import pool_of
from cloverinfer.transport.cuda_ipc import missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(180),
]
Make = Callable[..., FakeEngine]
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"order": "NH"}, {"order": "HN"}),
    ({"order": "NH", "size": 32}, {"order": "NH", "size": 16}),
    ({"ranks": 2}, {"ranks": 1}),
]
"""Of prefill and decode: how heads and tokens lie, tokens of a block, tensor parallelism."""


@pytest.fixture
def engines() -> Iterator[Make]:
    made: list[Any] = []

    def make(role: str, device: int = 0, **options: Any) -> FakeEngine:
        options = {"transport": "auto"} | options
        made.append(FakeEngine(role, memory=TorchGpu(device), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def remote() -> Iterator[Callable[..., RemoteEngine]]:
    made: list[RemoteEngine] = []

    def make(role: str, device: int = 0, **options: Any) -> RemoteEngine:
        made.append(RemoteEngine(role, device, **({"transport": "auto"} | options)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def until_granted(prefill: FakeEngine) -> None:
    outbox = prefill.workers[0].half._outbox
    outs = list(outbox._transfers.values())
    until(lambda: all(out.routed and not out.waits for out in outs), "blocks granted")


def params(decode: Any, transfer: str = "t", attempt: int = 0) -> dict[str, Any]:
    return {"transfer_id": transfer, "attempt": attempt, "decode_address": decode.address}


@pytest.mark.parametrize(("sender", "receiver"), LAYOUTS)
@pytest.mark.parametrize("chunk", [24, 1000])
def test_a_prompt_arrives_whole_in_one_process(
    engines: Make, sender: dict[str, Any], receiver: dict[str, Any], chunk: int
) -> None:
    prefill, decode = engines("prefill", **sender), engines("decode", **receiver)
    decode.wait_for_remote("d", 75, "t")
    prefill.prefill("p", 75, params(decode), chunk=chunk)
    prefill.finish("p")
    decode.until_loaded("d")
    assert decode.holds("d", 0, 75)
    prefill.until_sent("p")
    assert decode.bad == set()


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize(("sender", "receiver"), LAYOUTS)
def test_a_prompt_arrives_whole_in_another_process(
    engines: Make,
    remote: Callable[..., RemoteEngine],
    device: int,
    sender: dict[str, Any],
    receiver: dict[str, Any],
) -> None:
    """``device``: decode's; prefill's is 0."""
    if device >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    prefill, decode = engines("prefill", **sender), remote("decode", device, **receiver)
    for i in range(3):
        decode.ask("wait_for_remote", f"d{i}", 75 + i, f"t{i}")
        prefill.prefill(f"p{i}", 75 + i, params(decode, f"t{i}"), chunk=30)
        prefill.finish(f"p{i}")
    for i in range(3):
        decode.ask("until_loaded", f"d{i}")
        assert decode.ask("holds", f"d{i}", 0, 75 + i)
        prefill.until_sent(f"p{i}")
    assert decode.ask("bad") == set()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(("sender", "receiver"), LAYOUTS)
def test_a_prompt_arrives_whole_through_host_memory(
    engines: Make,
    remote: Callable[..., RemoteEngine],
    transport: str,
    sender: dict[str, Any],
    receiver: dict[str, Any],
) -> None:
    prefill = engines("prefill", transport=transport, **sender)
    decode = remote("decode", transport=transport, **receiver)
    prefill.prefill("early", 75, params(decode, "early"), chunk=30)
    prefill.finish("early")
    decode.ask("wait_for_remote", "early", 75, "early")
    for i in range(3):
        decode.ask("wait_for_remote", f"d{i}", 75 + i, f"t{i}")
        prefill.prefill(f"p{i}", 75 + i, params(decode, f"t{i}"), chunk=30)
        prefill.finish(f"p{i}")
    for name, tokens in (("early", 75), ("d0", 75), ("d1", 76), ("d2", 77)):
        decode.ask("until_loaded", name)
        assert decode.ask("holds", name, 0, tokens)
    for name in ("early", "p0", "p1", "p2"):
        prefill.until_sent(name)
    assert decode.ask("bad") == set()


def test_copies_through_host_memory_wait_for_what_computes(engines: Make) -> None:
    """Decode computes into blocks that were another request's until just before."""
    prefill, decode = engines("prefill", transport="tcp"), engines("decode", transport="tcp")
    worker = decode.workers[0]
    worker.memory.later(lambda: worker.storage.fill_(SPOILT))
    decode.wait_for_remote("d", 50, "t")
    prefill.prefill("p", 50, params(decode))
    decode.until_loaded("d")
    worker.memory.stream.synchronize()
    assert decode.holds("d", 0, 50)


def test_what_is_pushed_after_its_step_waits_for_the_step(
    engines: Make, remote: Callable[..., RemoteEngine]
) -> None:
    prefill, decode = engines("prefill"), remote("decode")
    prefill.prefill("p", 50, params(decode))
    decode.ask("wait_for_remote", "d", 50, "t")
    decode.ask("until_loaded", "d")
    assert decode.ask("holds", "d", 0, 50)


def test_blocks_are_granted_once_decode_computes_nothing_into_them_any_more(
    engines: Make,
) -> None:
    prefill, decode = engines("prefill"), engines("decode")
    worker = decode.workers[0]
    decode.wait_for_remote("c", 20, "warm")  # the two have met
    prefill.prefill("o", 20, params(decode, "warm"))
    decode.until_loaded("c")
    worker.memory.later(lambda: worker.storage.fill_(SPOILT))
    decode.wait_for_remote("d", 50, "t")
    prefill.prefill("p", 50, params(decode))
    decode.until_loaded("d")
    worker.memory.stream.synchronize()
    assert decode.holds("d", 0, 50)


def test_an_abort_at_decode_frees_both(engines: Make) -> None:
    prefill, decode = engines("prefill"), engines("decode")
    decode.wait_for_remote("d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    decode.finish("d")
    decode.until_loaded("d")
    prefill.finish("p")
    prefill.until_sent("p")


def test_a_decode_that_is_killed_frees_prefill(
    engines: Make, remote: Callable[..., RemoteEngine]
) -> None:
    prefill, decode = engines("prefill", lease=60.0), remote("decode")
    decode.ask("wait_for_remote", "d", 64, "t")
    prefill.begin("p", 64, params(decode))
    prefill.compute("p", chunk=32, upto=32)
    until_granted(prefill)  # of one that it never met it would hear nothing
    decode.kill()
    prefill.step("p", 32, 32)
    prefill.finish("p")
    prefill.until_sent("p")


def test_a_prefill_that_is_killed_fails_the_load_and_another_serves(
    engines: Make, remote: Callable[..., RemoteEngine]
) -> None:
    decode = engines("decode", retry_timeout=60.0, lease=60.0)
    first, other = remote("prefill", lease=60.0), engines("prefill")
    decode.wait_for_remote("d", 64, "t")
    first.ask("begin", "p", 64, params(decode))
    first.ask("step", "p", 0, 32, True)
    deadline = time.monotonic() + 20
    while not decode.workers[0].half._inbox._slots and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    other.prefill("q", 64, params(decode, attempt=1))
    decode.until_loaded("d")
    assert decode.bad == set()
    assert decode.holds("d", 0, 64)


def test_expandable_segments_go_through_the_host_or_are_refused_with_what_to_do(
    remote: Callable[..., RemoteEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="without expandable segments"):
        remote("decode", blocks=4096, transport="cuda_ipc")
    prefill, decode = remote("prefill", blocks=4096), remote("decode", blocks=4096)
    decode.ask("wait_for_remote", "d", 75, "t")
    prefill.ask("prefill", "p", 75, params(decode))
    decode.ask("until_loaded", "d")
    assert decode.ask("holds", "d", 0, 75)


def test_a_cache_as_vllm_has_it_on_a_gpu_is_described() -> None:
    """Keys and values apart, in vLLM's two orders of heads and tokens, and in fp8."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=9, cache_dtype="fp8"),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(), hf_config=None, get_total_num_kv_heads=lambda: 3
        ),
    )
    spec = SimpleNamespace(block_size=16, num_kv_heads=3)
    cache = SimpleNamespace(num_blocks=9, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    nhd = torch.zeros(2, 9, 16, 3, 64, dtype=torch.uint8, device="cuda")
    hnd = torch.zeros(9, 2, 3, 16, 64, dtype=torch.uint8, device="cuda").permute(0, 1, 3, 2, 4)
    for tensor in (nhd, hnd):
        engine = engine_of(config, cache, 0, {"a": tensor})
        pool = pool_of({"a": tensor}, engine.shape)
        (grid,) = pool.grids
        assert (engine.dtype, engine.interior, pool.device) == ("fp8", "", 0)
        assert (grid.blocks, grid.parts, grid.heads, grid.groups) == (9, 2, 3, 16)
        assert grid.end == tensor.untyped_storage().nbytes()
