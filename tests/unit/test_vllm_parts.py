"""The connector's pure parts: settings, wishes, memory, versions, and the scheduler half."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from tests.vllm_kit import FakeTensor

from cloverinfer.core.errors import ConfigError, RequestError
from cloverinfer.integrations.vllm import courier
from cloverinfer.integrations.vllm.describe import check_config, engine_of
from cloverinfer.integrations.vllm.memory import Shape, pool_of
from cloverinfer.integrations.vllm.scheduler import SchedulerHalf
from cloverinfer.integrations.vllm.settings import Load, Send, settings_from, wish_of
from cloverinfer.integrations.vllm.versions import _NEEDED, check_version
from cloverinfer.transport import Events, Peer

SEND = {"do_remote_decode": True, "transfer_id": "t", "attempt": 2, "decode_address": "[::1]:90"}


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kv_prot": 1}, "'kv_prot'; known: .*kv_port"),
        ({"kv_port": "high"}, "kv_port"),
        ({"kv_port": 70000}, "kv_port must be from 1 to 65535, not 70000"),
        ({"transport": "pigeon"}, "transport must be one of auto"),
        ({"lease": 0}, "lease must be from 0.1"),
    ],
)
def test_wrong_settings_are_named(extra, says):
    with pytest.raises(ConfigError, match=says):
        settings_from(extra)


@pytest.mark.parametrize(("named", "taken"), [("mlx5_0, mlx5_3", "mlx5_3"), ("", None)])
def test_a_rank_takes_the_rdma_device_that_its_host_names_for_it(monkeypatch, named, taken):
    monkeypatch.setenv("CLOVER_RDMA_DEVICES", named)
    assert settings_from({}).network(3).rdma_device == taken


def test_a_cache_that_others_reach_needs_a_secret(monkeypatch):
    monkeypatch.delenv("CLOVER_NETWORK_SECRET", raising=False)
    with pytest.raises(ConfigError, match="secret"):
        settings_from({"kv_host": "0.0.0.0"}).network(0)
    monkeypatch.setenv("CLOVER_NETWORK_SECRET", "s")
    network = settings_from({"kv_host": "0.0.0.0", "kv_port": 700}).network(3)
    assert (network.port, network.secret) == (703, "s")


def test_wishes():
    assert wish_of(None) is None
    assert wish_of({"do_remote_prefill": False}) is None
    assert wish_of({"do_remote_prefill": True, "transfer_id": "t"}) == Load("t")
    assert wish_of(SEND) == Send("t", 2, "::1", 90)


@pytest.mark.parametrize(
    "params",
    [
        5,
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": 7},
        {"do_remote_prefill": True, "transfer_id": "x" * 201},
        SEND | {"do_remote_prefill": True},
        SEND | {"attempt": -1},
        SEND | {"attempt": True},
        SEND | {"decode_address": "host"},
        SEND | {"decode_address": "host:99999"},
        SEND | {"decode_address": None},
    ],
)
def test_wishes_without_sense_are_refused_and_the_engine_goes_on(params, caplog):
    with pytest.raises(RequestError):
        wish_of(params)
    half = SchedulerHalf(16, sends=True, loads=True)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=40, kv_transfer_params=params)
    with caplog.at_level(logging.ERROR):
        assert half.matched(request, 0) == (0, False)
        assert half.matched(request, 0) == (0, False)
    assert len(caplog.records) == 1
    assert half.finished(request) == (False, None)


def test_roles_exclude_what_they_do_not_do(caplog):
    half = SchedulerHalf(16, sends=True, loads=False)
    params = {"do_remote_prefill": True, "transfer_id": "t"}
    request = SimpleNamespace(request_id="r", num_prompt_tokens=40, kv_transfer_params=params)
    assert half.matched(request, 0) == (0, False)
    assert "kv_role" in caplog.text


def test_requests_of_others_are_left_alone():
    half = SchedulerHalf(16, sends=True, loads=True)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=40, kv_transfer_params=None)
    assert half.matched(request, 0) == (0, False)
    half.allocated(request, [1, 2, 3], 0)
    assert half.finished(request) == (False, None)
    assert not half.pending


def test_a_load_counts_what_decode_computes_itself():
    half = SchedulerHalf(16, sends=False, loads=True)
    params = {"do_remote_prefill": True, "transfer_id": "t"}
    request = SimpleNamespace(
        request_id="r", num_prompt_tokens=40, kv_transfer_params=params, prompt_token_ids=[1] * 40
    )
    assert half.matched(request, 16) == (24, True)
    half.allocated(request, [5, 6, 7, 8], 24)
    half.allocated(request, [5, 6, 7, 8], 0)
    (load,) = half.build(_output()).loads
    assert (load.blocks, load.start, load.end) == ([6, 7], 16, 40)
    assert half.matched(request, 16) == (0, False)
    half.reported([], ["r"], {})
    half.build(_output(new=[("r", 39, 1)]))
    assert half.finished(request) == (
        False,
        {"transfer_id": "t", "computed_prompt_tokens": 1},
    )


def _output(new=()):
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name,
                num_computed_tokens=at,
                block_ids=([],),
                sampling_params=None,
                prompt_token_ids=None,
            )
            for name, at, _ in new
        ],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={name: count for name, _, count in new},
    )


def tensor(*shape):
    array = np.zeros(shape, np.float32)
    return FakeTensor(array, array)


@pytest.mark.parametrize(
    ("shape", "opaque", "parts", "heads", "groups"),
    [
        ((9, 3, 16, 8), False, 1, 3, 16),
        ((9, 3, 16, 8), True, 1, 3, 1),
        ((2, 9, 16, 3, 4), False, 2, 3, 16),
        ((2, 9, 3, 16, 4), True, 2, 3, 1),
        ((9, 2, 16, 3, 4), False, 2, 3, 16),
        ((9, 16, 8), False, 1, 1, 16),
        ((18, 3, 8, 8), False, 1, 3, 8),
    ],
)
def test_layouts_of_engines(shape, opaque, parts, heads, groups):
    made = tensor(*shape)
    pool = pool_of({"a": made, "b": made}, Shape(9, 16, 3, opaque))
    (grid,) = pool.grids
    assert pool.layers == ["a"]
    assert (grid.parts, grid.heads, grid.groups) == (parts, heads, groups)
    assert grid.end == made.array.nbytes
    assert pool.split * grid.block_size == 16


def test_layouts_that_are_not_understood_are_refused():
    for shape in ((9, 3), (7, 3, 16, 8), (3, 9, 16, 3, 4)):
        with pytest.raises(ConfigError, match="shape"):
            pool_of({"a": tensor(*shape)}, Shape(9, 16, 3, False))
    device = tensor(9, 3, 16, 8)
    device.device = SimpleNamespace(type="xpu")
    with pytest.raises(ConfigError, match="CUDA devices only"):
        pool_of({"a": device}, Shape(9, 16, 3, False))
    with pytest.raises(ConfigError, match="state of its own"):
        pool_of({"a": [device]}, Shape(9, 16, 3, False))


def config_of(**more):
    parallel = {"tensor_parallel_size": 1} | more.pop("parallel", {})
    cache = {"block_size": 16, "num_gpu_blocks": 9, "cache_dtype": "auto"} | more.pop("cache", {})
    model = {"hf_text_config": None, "hf_config": None, "get_total_num_kv_heads": lambda: 3}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(**(model | more)),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2"),
        ({"parallel": {"use_ubatching": True}}, "--enable-dbo"),
        ({"parallel": {"enable_dbo": True}}, "--enable-dbo"),
        ({"cache": {"calculate_kv_scales": True}}, "--calculate-kv-scales"),
    ],
)
def test_what_the_connector_does_not_do_is_refused(more, says):
    check_config(config_of())
    with pytest.raises(ConfigError, match=says):
        check_config(config_of(**more))


def test_memory_that_may_be_taken_away_is_refused_on_gpus():
    made = tensor(9, 3, 16, 8)
    made.device = SimpleNamespace(type="cuda", index=1)
    engine = engine_of(config_of(), None, 0, {"a": made})
    assert (engine.interior, engine.shape.opaque) == ("", False)
    assert pool_of({"a": made}, engine.shape).device == 1
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        engine_of(config_of(enable_sleep_mode=True), None, 0, {"a": made})


def test_versions(caplog):
    base = type("Base", (), {name: lambda self: None for name in _NEEDED})
    check_version("0.32.0+cpu", base, base)
    assert caplog.text == ""
    check_version("0.99", base, base)
    assert "0.99 is not known" in caplog.text
    with pytest.raises(ConfigError, match=r"older.*0\.23 to 0\.33"):
        check_version("0.9.1", base, base)
    with pytest.raises(ConfigError, match="save_kv_layer"):
        check_version("0.32", object, base)


class _Slow:
    """An endpoint whose polls take as long as they are told to."""

    capabilities = SimpleNamespace(name="slow", cross_host=False)

    def __init__(self, seconds: list[float]) -> None:
        self.now = 0.0
        self.left = seconds
        self.ended = lambda: None

    def address(self) -> str:
        return "slow://"

    def connect(self, address: str) -> Peer:
        return Peer(address)

    def poll(self, timeout: float) -> Events:
        self.now += self.left.pop(0)
        if not self.left:
            self.ended()
        return Events()


def test_a_wire_counts_no_time_in_which_it_stood_still(monkeypatch):
    endpoint = _Slow([0.5, 0.25, 60.0, 0.5])
    monkeypatch.setattr(courier, "time", SimpleNamespace(monotonic=lambda: endpoint.now))
    wire = courier.Wire(endpoint, (), None, settings_from({"lease": 2.0}))
    endpoint.ended = wire._ending.set
    wire._run()
    assert wire.listened == 0.5 + 0.25 + 0.5 + 0.5
