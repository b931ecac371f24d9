"""Which device a node gets, and how a GPU's memory is shared: arithmetic, on any host."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import weakref
from itertools import chain

import msgspec
import pytest
import torch
from tests.tiny_models import make_tiny

from cloverinfer.attention import create_backend
from cloverinfer.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from cloverinfer.config.cluster import CPU_ROWS, GPU_ROWS
from cloverinfer.core.errors import ConfigError
from cloverinfer.kvcache.layout import PoolLayout
from cloverinfer.models import estimated_weights, kv_specs, load_half, resolve, resolve_model
from cloverinfer.models.cache import silent
from cloverinfer.models.weights import DummySource
from cloverinfer.nodes import largest_step
from cloverinfer.nodes.batch_copy import ALIGNMENT, BatchCopier, offsets_of
from cloverinfer.nodes.config import NodeConfig
from cloverinfer.nodes.gpu import NodeDevice, release_memory
from cloverinfer.nodes.largest_step import blocks_of, lengths_of, run_largest_step
from cloverinfer.nodes.memory import MemoryUse, graph_reserve, out_of_memory, pool_budget
from cloverinfer.nodes.rows import RowTable
from cloverinfer.nodes.stored import stored_dtype
from cloverinfer.orchestrator import devices as choice
from cloverinfer.orchestrator.devices import device_hint, node_devices, with_dtype, with_rows
from cloverinfer.orchestrator.layout import node_configs, node_names
from cloverinfer.orchestrator.placement import Place, Placement
from cloverinfer.transport.choice import offer

GIB = 2**30
MODEL = ModelConfig()


def placed(cluster: ClusterConfig, gpus: int = 0, hosts: int = 1) -> Placement:
    """Nodes on hosts in turn, each with so many GPUs."""
    places = {}
    for i, name in enumerate(chain(*node_names(cluster).values())):
        there = msgspec.structs.replace(offer(name), host=f"host-{i % hosts}")
        places[name] = Place(there, 2, gpus=gpus, no_gpu="" if gpus else "torch finds no GPU")
    return Placement(Place(offer("scheduler"), 2), places)


def given(cluster: ClusterConfig, gpus: int = 0, hosts: int = 1) -> dict[str, str]:
    return node_devices(cluster, MODEL, node_names(cluster), placed(cluster, gpus, hosts))


@pytest.fixture
def every_role(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"prefill", "dense", "attention", "decode", "colocated"}
    monkeypatch.setattr(choice, "GPU_ROLES", roles)


@pytest.mark.parametrize("topology", ["colocated", "pd", "pda"])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_all_is_on_the_cpu(topology: str, device: str) -> None:
    assert set(given(ClusterConfig(topology=topology, device=device)).values()) == {"cpu"}


def test_gpus_of_a_host_are_given_in_turn(every_role: None) -> None:
    cluster = ClusterConfig(topology="pda", num_attention_nodes=2)
    assert list(given(cluster, 1).values()) == ["cuda:0"] * 4
    assert list(given(cluster, 3).values()) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert list(given(cluster, 3, hosts=2).values()) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_a_named_gpu_holds_all_nodes_or_is_refused(every_role: None) -> None:
    cluster = ClusterConfig(topology="pd", device="cuda:1")
    assert set(given(cluster, 2).values()) == {"cuda:1"}
    with pytest.raises(ConfigError, match="prefill-0 has 1 GPUs, cuda:0 to cuda:0"):
        given(cluster, 1)
    with pytest.raises(ConfigError, match="none for prefill-0: torch finds no GPU"):
        given(cluster)


def test_attention_on_the_host_leaves_the_rest_on_gpus(every_role: None) -> None:
    on_host = {"attention_backend": "cpu"}
    pda = given(ClusterConfig(topology="pda", **on_host), 1)
    assert pda == {"prefill-0": "cuda:0", "dense-0": "cuda:0", "attention-0": "cpu"}
    pd = given(ClusterConfig(topology="pd", **on_host), 1)
    assert pd == {"prefill-0": "cuda:0", "decode-0": "cpu"}
    assert set(given(ClusterConfig(topology="colocated", **on_host), 1).values()) == {"cpu"}
    with pytest.raises(ConfigError, match="no node of topology colocated with attention_backend"):
        given(ClusterConfig(topology="colocated", device="cuda", **on_host), 1)


def test_a_cuda_backend_needs_gpus() -> None:
    cluster = ClusterConfig(topology="colocated", attention_backend="cuda")
    assert given(cluster, 1) == {"colocated-0": "cuda:0"}
    with pytest.raises(ConfigError, match="cuda cannot be used: torch finds no GPU"):
        given(cluster)
    with pytest.raises(ConfigError, match=r"cluster.device is cpu"):
        given(msgspec.structs.replace(cluster, device="cpu"), 1)


def test_an_fp8_cache_needs_every_pool_on_a_gpu(every_role: None) -> None:
    cluster = ClusterConfig(topology="pda", cache=CacheConfig(kv_cache_dtype="fp8"))
    assert set(given(cluster, 1).values()) == {"cuda:0"}
    with pytest.raises(ConfigError, match="fp8 needs nodes on GPUs, and prefill-0 is on the CPU"):
        given(cluster)
    on_host = msgspec.structs.replace(cluster, attention_backend="cpu")
    with pytest.raises(ConfigError, match="and attention-0 is on the CPU"):
        given(on_host, 1)


def test_quantised_weights_stay_on_the_cpu() -> None:
    cluster, model = ClusterConfig(topology="colocated"), ModelConfig(quantization="int8")
    names, placement = node_names(cluster), placed(cluster, 1)
    assert node_devices(cluster, model, names, placement) == {"colocated-0": "cpu"}
    assert device_hint(cluster, model, 1) == "cpu"
    on_gpu = msgspec.structs.replace(cluster, device="cuda")
    with pytest.raises(ConfigError, match="quantization int8 is for CPUs"):
        node_devices(on_gpu, model, names, placement)


def test_float8_weights_go_where_other_weights_go() -> None:
    cluster, model = ClusterConfig(topology="colocated"), ModelConfig(quantization="fp8")
    placement = placed(cluster, 1)
    devices = node_devices(cluster, model, node_names(cluster), placement)
    assert devices == {"colocated-0": "cuda:0"}


def test_nodes_are_told_their_device_and_its_other_nodes(every_role: None) -> None:
    cluster = ClusterConfig(topology="pda", transport="tcp", attention_backend="torch")
    configs = {one.role: one for one in node_configs(cluster, MODEL, placed(cluster, 1))}
    assert [configs[role].device for role in ("prefill", "attention")] == ["cuda:0", "cpu"]
    prefill = configs["prefill"]
    assert prefill.attention_backend == "cuda"
    assert (prefill.device_nodes, prefill.device_halves) == (2, 2)
    assert configs["attention"].attention_backend == "torch"
    everywhere = msgspec.structs.replace(cluster, attention_backend="auto")
    for one in node_configs(everywhere, MODEL, placed(cluster, 1)):
        assert (one.device_nodes, one.device_halves) == (3, 2)
    assert configs["dense"].max_tokens == 2048


def test_more_requests_are_decoded_at_a_time_where_that_is_on_gpus(every_role: None) -> None:
    asked = SchedulerConfig()
    assert asked.rows == CPU_ROWS
    for topology in ("colocated", "pd", "pda"):
        cluster = ClusterConfig(topology=topology, num_decode_dense_nodes=2)
        names = node_names(cluster)
        devices = node_devices(cluster, MODEL, names, placed(cluster, 1))
        assert with_rows(asked, names, devices).rows == GPU_ROWS
        (decoding,) = (names[role] for role in names if role in ("colocated", "decode", "dense"))
        assert with_rows(asked, names, devices | {decoding[-1]: "cpu"}).rows == CPU_ROWS
        assert with_rows(SchedulerConfig(max_num_seqs=3), names, devices).rows == 3


def test_type_auto_is_settled_for_all_where_some_are_on_gpus() -> None:
    cluster = ClusterConfig(topology="colocated")
    assert device_hint(cluster, MODEL, 1) == "cuda"
    assert device_hint(cluster, MODEL, 0) == "cpu"
    assert with_dtype(MODEL, "bfloat16", {"a": "cpu", "b": "cuda:0"}).dtype == "bfloat16"
    assert with_dtype(MODEL, "bfloat16", {"a": "cpu"}).dtype == "auto"


def test_type_auto_is_bfloat16_on_gpus(tmp_path) -> None:
    model = ModelConfig(model_path=str(make_tiny("llama", tmp_path)))
    assert resolve_model(model, device="cuda").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("family", "isa", "dtype"),
    [
        ("llama", "portable", "float32"),
        ("llama", "avx2", "bfloat16"),
        ("qwen3", "avx2", "bfloat16"),
        ("opt", "avx2", "float32"),
        ("llama", "avx512", "float32"),
    ],
)
def test_type_auto_is_bfloat16_where_our_kernels_are_faster(
    tmp_path, monkeypatch: pytest.MonkeyPatch, family: str, isa: str, dtype: str
) -> None:
    """On a processor that does not multiply it natively."""
    monkeypatch.setattr(resolve, "_native_dtype", lambda device: "float32")
    monkeypatch.setattr(resolve._native, "dense_isas", lambda: ["portable", isa])
    model = ModelConfig(model_path=str(make_tiny(family, tmp_path)))
    assert resolve_model(model).dtype == dtype
    assert resolve.source_of(model, silent)["dtype"] == "float32"  # to be compiled


def config(device: str, stored: str) -> NodeConfig:
    return NodeConfig(
        name="n",
        role="colocated",
        model=MODEL,
        cache=CacheConfig(kv_cache_dtype=stored),
        transport="inproc",
        attention_backend="auto",
        threads=1,
        lanes=1,
        max_rows=4,
        device=device,
    )


def test_what_a_device_stores() -> None:
    assert stored_dtype(config("cpu", "int8"), "float32") == "int8"
    assert stored_dtype(config("cuda:0", "auto"), "float16") == "float16"
    assert stored_dtype(config("cuda:0", "fp8"), "bfloat16") == "float8_e4m3"
    for device, stored, dtype, reason in [
        ("cpu", "fp8", "bfloat16", "fp8 needs nodes on GPUs"),
        ("cuda:0", "fp8", "float32", "not float32"),
        ("cuda:0", "int8", "bfloat16", "kv_cache_dtype int8: on GPUs"),
        ("cuda:0", "float16", "bfloat16", "kv_cache_dtype float16: on GPUs"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            stored_dtype(config(device, stored), dtype)


# -- memory


def test_a_pool_gets_what_is_left_of_its_nodes_part() -> None:
    use = MemoryUse(80 * GIB, 0.9, 1, 16 * GIB, 2 * GIB, GIB)
    assert pool_budget(use, 4096) == 72 * GIB - 19 * GIB
    two = MemoryUse(80 * GIB, 0.9, 2, 32 * GIB, 2 * GIB, GIB)
    assert pool_budget(two, 4096) == 20 * GIB - 3 * GIB


def test_too_little_is_said_with_the_numbers() -> None:
    use = MemoryUse(24 * GIB, 0.5, 2, 10 * GIB, GIB, graph_reserve(24 * GIB))
    with pytest.raises(ConfigError) as caught:
        pool_budget(use, 4 * 2**20)
    for part in [
        "0.5 of 24.00 GiB are 12.00 GiB, of which weights take 10.00 and leave 1.00 GiB for each",
        "of 2 nodes; a step takes 1.00, the reserve for graphs 0.48 GiB",
        "a block 4.00 MiB",
        "raise gpu_memory_utilization, or lower scheduler.max_num_batched_tokens",
    ]:
        assert part in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_weights_are_estimated_from_the_shape(family: str, tmp_path) -> None:
    config = ModelConfig(model_path=str(make_tiny(family, tmp_path)), dtype="float32")
    model = resolve_model(config)
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert estimated_weights(model) == pytest.approx(stored, rel=0.3)


def test_an_exhausted_device_says_who_holds_what() -> None:
    text = out_of_memory("cuda:0", "the weights", 2 * GIB, 80 * GIB, 30 * GIB)
    assert "cuda:0 has too little memory for the weights: 2.00 of 80.00 GiB are free" in text
    assert "30.00 GiB are this process's, 48.00 GiB others'" in text


@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "lengths"),
    [
        (20, 4, 100, [17, 1, 1, 1]),
        (20, 4, 8, [8, 8, 3, 1]),
        (3, 8, 100, [1, 1, 1]),
        (100, 2, 8, [8, 8]),
    ],
)
def test_the_largest_step(tokens: int, rows: int, longest: int, lengths: list[int]) -> None:
    assert lengths_of(tokens, rows, longest) == lengths


def test_the_largest_step_runs_as_a_step(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = largest_step.LocalForward.run

    def run(self, batch, stats, on_layer=None):
        made.append(batch)
        return real(self, batch, stats, on_layer)

    monkeypatch.setattr(largest_step.LocalForward, "run", run)
    config = ModelConfig(model_path=str(make_tiny("llama", tmp_path)), dtype="float32")
    model = resolve_model(config)
    lengths = lengths_of(40, 5, model.max_model_len)
    backend = create_backend("cpu")
    layout = PoolLayout(kv_specs(model.arch, "float32"), 16, blocks_of(lengths, 16))
    backend.allocate(layout, model.arch.num_heads)
    sampled = run_largest_step(load_half(model), backend, lengths, 16)
    backend.close()
    assert len(sampled.tokens) == 5
    assert not sampled.errors
    assert made[0].token_ids_t.shape == (40,)


# -- what is moved and made


def test_a_batch_is_moved_in_one_piece() -> None:
    assert offsets_of([8, 1, 32]) == ([0, ALIGNMENT, 2 * ALIGNMENT], 4 * ALIGNMENT)
    rows = RowTable(4, local_attention=True)
    plan = largest_step._plan([9, 1, 5], 4)
    rows.apply(plan)
    batch = rows.batch(plan)
    copier = BatchCopier(torch.device("cpu"))
    first, second = copier.move(batch), copier.move(batch)
    copier.move(dataclasses.replace(batch, token_ids_t=batch.token_ids_t + 1))
    for moved in (first, second):  # which later moves do not write over
        for name in ("token_ids_t", "positions_t", "query_starts", "lengths_r", "slots_t"):
            mine, other = getattr(batch, name), getattr(moved, name)
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)
            assert mine.data_ptr() != other.data_ptr()
        assert torch.equal(batch.block_tables_rb, moved.block_tables_rb)
        assert moved.block_tables_rb.is_contiguous()
        assert moved.rows is batch.rows


def test_dummy_weights_do_not_depend_on_how_they_are_drawn(monkeypatch) -> None:
    """As on a GPU, which draws in other pieces; and tensors are not parts of one another."""
    first = DummySource(3).load("a.weight", (300, 64))
    monkeypatch.setattr("cloverinfer.models.weights._DRAWN", {True: 1000, False: 7})
    again = DummySource(3, torch.device("cpu")).load("a.weight", (300, 64))
    assert torch.equal(first, again)
    assert first.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert not torch.equal(DummySource(4).load("a.weight", (300, 64)), first)
    other = DummySource(3).load("b.weight", (300, 64))
    assert abs(torch.corrcoef(torch.stack((first.flatten(), other.flatten())))[0, 1]) < 0.05


# -- a device that is not there


class FakeCuda:
    """What ``NodeDevice`` asks of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = False
        self.emptied = 0
        for name, fake in {
            "Stream": lambda device: "stream",
            "device": lambda device: contextlib.nullcontext(),
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "mem_get_info": lambda device: (2 * GIB, 80 * GIB),
            "memory_reserved": lambda device: 30 * GIB,
            "memory_allocated": lambda device: 29 * GIB,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def synchronize(self, device: object = None) -> None:
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_on_the_cpu_there_is_nothing_to_explain() -> None:
    device = NodeDevice("cpu")
    problem = ValueError("a row")
    assert device.explained(problem) is problem
    with device.computing(), device.starting():
        assert device.allocated() == 0


def test_a_step_out_of_memory_is_explained_and_a_broken_device_is_an_end(cuda: FakeCuda) -> None:
    device = NodeDevice("cuda:0")
    told = device.explained(torch.cuda.OutOfMemoryError("out of memory"))
    assert "cuda:0 has too little memory for a step: 2.00 of 80.00 GiB are free" in str(told)
    assert cuda.emptied == 1
    problem = ValueError("a row")
    assert device.explained(problem) is problem
    cuda.fails = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.explained(problem)


def test_loading_that_finds_too_little_is_a_matter_of_configuration(cuda: FakeCuda) -> None:
    device = NodeDevice("cuda:0")
    with (
        pytest.raises(ConfigError, match=r"too little memory for the weights: .*48.00 GiB others'"),
        device.taking_memory("the weights"),
    ):
        raise torch.cuda.OutOfMemoryError("out of memory")


def test_nodes_of_a_process_load_one_after_the_other(cuda: FakeCuda, monkeypatch) -> None:
    entered = threading.Event()

    def start() -> None:
        with NodeDevice("cuda:0").starting():
            entered.set()

    with NodeDevice("cuda:0").starting():
        other = threading.Thread(target=start)
        other.start()
        assert not entered.wait(0.05)
    other.join(10)
    assert entered.is_set()


def test_ended_nodes_let_go_of_what_is_set_aside_from_collections() -> None:
    class Ended:
        def __init__(self) -> None:
            self.itself, self.weights = self, torch.zeros(1)

    node = Ended()
    weights = weakref.ref(node.weights)
    gc.freeze()
    try:
        release_memory([node])
        assert weights() is None
    finally:
        gc.unfreeze()
