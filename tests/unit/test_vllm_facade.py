"""The facade that vLLM loads, on stand-ins of vLLM's own class as its versions have it: what each
calls is there and takes what it is given, and what cannot work is refused with the reason."""

from __future__ import annotations

import enum
import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from tests.vllm_interfaces import VERSIONS, base_of
from tests.vllm_kit import FakeTensor, free_port

from cloverinfer.core.errors import ConfigError

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
FACADE = "cloverinfer.integrations.vllm.connector"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class WithoutCacheConfig(base_of("0.23.0")):
    """As connectors could be made when that came to be."""

    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role, None)


Newest = base_of("0.33.0")


class OtherCall(Newest):
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, slot_mapping, **kwargs): ...


class OtherKeyword(Newest):
    def get_finished(self, finished_req_ids, *, step): ...


@pytest.fixture
def load(monkeypatch):
    """The facade's class on ``base``, as vLLM of ``version`` would load it."""

    def load(base, version="0.32.0"):
        parts = V1.split(".")
        modules = {".".join(parts[: i + 1]): ModuleType(parts[i]) for i in range(len(parts))}
        modules[f"{V1}.base"] = ModuleType("base")
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        vars(modules["vllm"])["__version__"] = version
        vars(modules[V1])["base"] = modules[f"{V1}.base"]
        vars(modules[f"{V1}.base"]).update(
            KVConnectorBase_V1=base, KVConnectorMetadata=object, KVConnectorRole=Role
        )
        monkeypatch.delitem(sys.modules, FACADE, raising=False)
        made = importlib.import_module(FACADE).RDMAConnector
        monkeypatch.delitem(sys.modules, FACADE)
        return made

    return load


def config_of(port):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=9, cache_dtype="auto"),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(), hf_config=None, get_total_num_kv_heads=lambda: 3
        ),
        kv_transfer_config=SimpleNamespace(
            engine_id="e",
            kv_connector_extra_config={"kv_port": port, "transport": "tcp"},
            is_kv_producer=True,
            is_kv_consumer=True,
        ),
    )


def step(counts):
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens=counts
    )


@pytest.mark.parametrize(
    ("base", "version"),
    [
        *((base_of(version), version) for version in VERSIONS),
        (WithoutCacheConfig, "0.23.1"),
        (Newest, "0.33.0rc1"),
    ],
)
def test_each_version_finds_what_it_calls(load, base, version):
    facade, config = load(base, version), config_of(free_port())
    assert facade.requires_piecewise_for_cudagraph({})
    planner, worker = (facade(config, role, None) for role in (Role.SCHEDULER, Role.WORKER))
    params = {"do_remote_prefill": True, "transfer_id": "t"}
    request = SimpleNamespace(
        request_id="r", num_prompt_tokens=40, prompt_token_ids=[1] * 40, kv_transfer_params=params
    )
    blocks = SimpleNamespace(get_block_ids=lambda: ([5, 6, 7],))
    assert planner.get_num_new_matched_tokens(request, 0) == (40, True)
    planner.update_state_after_alloc(request, blocks, 40)
    array = np.zeros((9, 3, 16, 8), np.float32)
    worker.register_kv_caches({"a": FakeTensor(array, array)})
    try:
        meta = planner.build_connector_meta(step({}))
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None, scheduler_output=None)
        worker.wait_for_layer_load("a")
        worker.save_kv_layer("a", None, None)
        worker.wait_for_save()
        # The client leaves: its blocks come back once nobody may write into them.
        assert planner.request_finished(request, [5, 6, 7])[0]
        worker.bind_connector_metadata(planner.build_connector_meta(step({})))
        worker.wait_for_save()
        if hasattr(base, "get_transfer_results"):
            received = worker.get_transfer_results(set()).finished_recving
        else:
            received = worker.get_finished(set())[1]
        assert received == {"r"}
        assert worker.get_block_ids_with_load_errors() == set()
        output = SimpleNamespace(finished_sending=None, finished_recving=received)
        planner.update_connector_output(output)
        assert planner.get_num_new_matched_tokens(request, 0) == (40, True)  # all is forgotten
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("base", "says"),
    [
        (OtherCall, r"save_kv_layer\(.*slot_mapping\): too many positional"),
        (OtherKeyword, r"get_finished\(.*step\): got an unexpected keyword"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(load, base, says):
    facade = load(base, "0.34.0")
    with pytest.raises(ConfigError, match=says):
        facade(config_of(1), Role.SCHEDULER)
