"""Prompts by libraries of the user's: which rows they get, and that they read our pool as it is.

The libraries are stand-ins that read what they are given by its strides.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch
from tests import stand_in_prompts

from cloverinfer.attention import create_backend, cuda
from cloverinfer.attention.cuda import CudaAttention
from cloverinfer.attention.prompts import find_prompt_attention, prompt_attention_names
from cloverinfer.attention.prompts.base import (
    DeviceRows,
    PromptAttention,
    PromptPool,
    plan_spans,
)
from cloverinfer.attention.torch import TorchAttention
from cloverinfer.config import ClusterConfig
from cloverinfer.config.cluster import PROMPT_ATTENTIONS
from cloverinfer.core.errors import ConfigError
from cloverinfer.kvcache.layout import KVSpec, PoolLayout

LIBRARIES = {
    "flash-attn 3": ("flash-attn", stand_in_prompts.flash_attn_3, 16),
    "flash-attn 2": ("flash-attn", stand_in_prompts.flash_attn_2, 256),
    "flashinfer": ("flashinfer", stand_in_prompts.flashinfer, 16),
}
HEADS = 4
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)


def make_spec(size: int = 64, **fields: Any) -> KVSpec:
    sizes = {"kv_heads": 2, "k_dim": size, "v_dim": size, "dtype": "bfloat16"}
    return KVSpec(scale=size**-0.5, **(sizes | fields))


def no_gather(*_: object) -> Any:
    raise AssertionError("a library reads the pool as it is")


class Rows:
    """Two layers of a pool on the host, rows in it with blocks in random order, and a way."""

    def __init__(self, name: str, block_size: int, spec: KVSpec, counts: list[int]) -> None:
        torch.manual_seed(0)
        lengths = [50 + 7 * row + count for row, count in enumerate(counts)]
        needed = [-(-length // block_size) for length in lengths]
        layout = PoolLayout((make_spec(), spec), block_size, sum(needed) + 2)
        self.memory = torch.zeros(layout.total_bytes + 256, dtype=torch.uint8)
        self.memory = self.memory[-self.memory.data_ptr() % 256 :][: layout.total_bytes]
        self.reference = TorchAttention()
        self.reference.allocate(layout, HEADS, memoryview(self.memory.numpy()))
        self.tables = torch.full((len(counts), max(needed) + 1), -(2**31), dtype=torch.int32)
        free = torch.randperm(layout.num_blocks).to(torch.int32)
        for row, count in enumerate(needed):
            self.tables[row, :count], free = free[:count], free[count:]
            self.fill(row, lengths[row], block_size, spec)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        self.q_thd = self.normal(sum(counts), HEADS, spec.k_dim)
        way = find_prompt_attention(name)
        assert way is not None
        self.layout = layout
        self.way: PromptAttention = way(PromptPool(layout, HEADS, self.memory, no_gather))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    def fill(self, row: int, length: int, block_size: int, spec: KVSpec) -> None:
        at = torch.arange(length)
        slots = self.tables[row].long()[at // block_size] * block_size + at % block_size
        k, v = (self.normal(length, spec.kv_heads, spec.k_dim) for _ in range(2))
        self.reference.append(1, k, v, slots)

    def check(self) -> None:
        planned = plan_spans(self.way, self.starts.tolist(), self.lengths.tolist(), self.lengths)
        assert planned is not None
        (span,) = planned.spans
        rows = DeviceRows(self.starts, self.tables, self.lengths)
        expected = self.reference.attend(1, self.q_thd, self.starts, self.tables, self.lengths)
        for _ in range(2):  # the second call finds its rows prepared
            o, lse = self.way.attend(1, span, self.q_thd[span.tokens], rows)
            torch.testing.assert_close(o, expected[0][span.tokens], atol=2e-2, rtol=0)
            torch.testing.assert_close(lse, expected[1][span.tokens], atol=1e-4, rtol=1e-5)


def install(monkeypatch: pytest.MonkeyPatch, library: str) -> tuple[str, int]:
    name, modules, block_size = LIBRARIES[library]
    for module, stand_in in modules().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    return name, block_size


@pytest.mark.parametrize("library", list(LIBRARIES))
@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 30}, {"softcap": 1.5}, {"sinks": (0.5, -1.0, 6.0, 0.0)}, {"size": 128}],
    ids=lambda fields: next(iter(fields), "plain"),
)
def test_a_library_gives_the_reference_of_our_pool(
    library: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, block_size = install(monkeypatch, library)
    rows = Rows(name, block_size, make_spec(**fields), [1, 70, 1, 64, 2])
    assert rows.way.serves(make_spec(**fields))
    rows.check()


def test_a_library_gets_the_rows_from_the_first_long_one_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, block_size = install(monkeypatch, "flash-attn 3")
    way = Rows(name, block_size, make_spec(), [70]).way
    starts, lengths = [0, 1, 65, 68, 168, 231], [9, 64, 50, 900, 63]
    planned = plan_spans(way, starts, lengths, torch.tensor(lengths))
    assert planned is not None
    (span,) = planned.spans
    assert (span.row, span.start) == (1, 1)
    assert span.counts == (64, 3, 100)
    assert span.lengths == (64, 50, 900)
    assert planned.rest_r.tolist() == [9, 0, 0, 0, 63]
    assert not planned.all_rows
    assert plan_spans(way, [0, 63], [63], torch.tensor([63])) is None


class NativeRows:
    """Our kernels: what lengths they were called with, on the host."""

    def __init__(self, **_: object) -> None:
        self.lengths: list[list[int]] = []

    def attend(self, *args: Any) -> None:
        address, rows = args[8:10]
        self.lengths.append(list((ctypes.c_int32 * rows).from_address(address)))

    def nothing(self, *_: object, **__: object) -> None: ...

    add_layer = rows_changed = take_bad = nothing


@pytest.mark.parametrize("planned", [True, False])
def test_the_backend_gives_each_row_to_one_of_both(
    planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, block_size = install(monkeypatch, "flashinfer")
    rows = Rows(name, block_size, make_spec(), [1, 70, 1, 64, 2])
    monkeypatch.setattr(cuda, "missing", lambda: "")
    monkeypatch.setattr(cuda, "borrow_bytes", lambda *_: rows.memory)
    monkeypatch.setattr(cuda._native, "CudaAttentionPool", NativeRows, raising=False)
    monkeypatch.setattr(CudaAttention, "_stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        CudaAttention, "_take_memory", lambda *_: (rows.memory.device, rows.memory.data_ptr())
    )
    backend = CudaAttention(prompt_attention=name)
    backend.allocate(rows.layout, HEADS)
    if planned:
        backend.plan((rows.starts, rows.lengths), rows.lengths)
    o, lse = backend.attend(1, rows.q_thd, rows.starts, rows.tables, rows.lengths)
    native = backend._native
    assert isinstance(native, NativeRows)
    first, *_, last = rows.lengths.tolist()
    assert native.lengths == [[first, 0, 0, 0, last]]
    expected = rows.reference.attend(1, rows.q_thd, rows.starts, rows.tables, rows.lengths)
    torch.testing.assert_close(o[1:-2], expected[0][1:-2], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse[1:-2], expected[1][1:-2], atol=1e-4, rtol=1e-5)
    backend.plan((rows.starts, rows.lengths), None)
    backend.attend(1, rows.q_thd[:5], torch.arange(6).int(), rows.tables, rows.lengths)
    assert native.lengths[1] == rows.lengths.tolist(), "a step without long rows is all ours"


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_layers_that_no_library_serves_are_left_to_our_kernels(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, block_size = install(monkeypatch, library)
    way = Rows(name, block_size, make_spec(), [70]).way
    for fields in (
        {"alibi_slopes": (0.5,) * 4},
        {"dtype": "float32"},
        {"dtype": "float8_e4m3"},
        {"v_dim": 128},
        {"size": 48},
    ):
        assert not way.serves(make_spec(**fields)), fields
    assert way.serves(make_spec(dtype="float16"))


def test_flashinfer_loads_with_the_pool_and_plans_once_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "flashinfer")
    rows = Rows("flashinfer", 16, make_spec(window=30), [70, 80])
    wrapper = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    assert wrapper.made == 2, "one for each kind of layer"
    planned: list[object] = []
    plan = wrapper.plan
    monkeypatch.setattr(
        wrapper, "plan", lambda self, *args, **kw: (planned.append(self), plan(self, *args, **kw))
    )
    rows.check()
    assert len(planned) == 1
    rows.check()
    assert len(planned) == 2


@pytest.mark.parametrize(
    ("name", "package"), [("flash-attn", "flash-attn"), ("flashinfer", "flashinfer-python")]
)
def test_a_library_that_is_asked_for_and_missing_is_refused_with_its_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"cloverinfer.attention.prompts.{name.replace('-', '_')}.there", no_module)
    with pytest.raises(ConfigError, match=f"prompt_attention {name}: .*pip install {package}"):
        create_backend("cuda", prompt_attention=name)


def no_module(_: str) -> bool:
    return False


def test_flash_attention_2_reads_blocks_of_256_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "flash-attn 2")
    with pytest.raises(ConfigError, match=r"these have 32: set cache\.block_size to 256"):
        Rows("flash-attn", 32, make_spec(), [70])


def test_a_library_that_does_not_load_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in_prompts.module("flash_attn"))
    with pytest.raises(ConfigError, match=r"flash_attn\.flash_attn_interface does not load: "):
        Rows("flash-attn", 256, make_spec(), [70])


def test_names_are_those_of_the_configuration() -> None:
    assert tuple(prompt_attention_names()) == PROMPT_ATTENTIONS
    assert find_prompt_attention("own") is None
    with pytest.raises(ConfigError, match="unknown prompt attention 'sdpa'; known: auto, own"):
        find_prompt_attention("sdpa")
    with pytest.raises(ConfigError, match="prompt_attention must be auto or own with batch_inv"):
        ClusterConfig(batch_invariant=True, prompt_attention="flashinfer")
