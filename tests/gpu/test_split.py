"""`pd` and `pda` with nodes on GPUs, over every wire: the same tokens as transformers on the GPU.

What is late or fails on the way is tested without a GPU (tests/integration/test_split_devices.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.same_tokens import Case, check, check_idle, reference, run
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.attention.cuda import missing
from cloverinfer.config import CacheConfig
from cloverinfer.nodes.build import build_node
from cloverinfer.nodes.config import NodeConfig
from cloverinfer.wire.messages import Sampling

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(300),
]
MAX_TOKENS = 12
LENGTHS = [1, 2, 15, 16, 17, 33, 47, 300, 9, 120]
FIELDS: dict[str, Any] = {
    "device": "cuda",
    "num_blocks": 96,
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
}
WIRES = [
    ("local", "inproc"),
    ("local", "shm"),
    ("process", "shm"),
    ("process", "tcp"),
    ("process", "cuda_ipc"),
]
Tiny = Callable[[str], tuple[str, list[Case]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Folder and reference cases of a family, made once."""
    made: dict[str, tuple[str, list[Case]]] = {}

    def make(family: str) -> tuple[str, list[Case]]:
        if family not in made:
            folder = make_tiny(family, tmp_path_factory.mktemp(family))
            peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            generator = torch.Generator().manual_seed(5)
            prompts = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in LENGTHS]
            made[family] = str(folder), reference(peer.eval().to("cuda"), prompts, MAX_TOKENS)
        return made[family]

    return make


def devices_of(llm: LLM) -> dict[str, str]:
    return {row["role"]: row["device"] for row in llm.engine.nodes()}


@pytest.mark.parametrize(("executor", "transport"), WIRES)
def test_pd(tiny: Tiny, executor: str, transport: str) -> None:
    path, cases = tiny("llama")
    fields = {"topology": "pd", "executor": executor, "transport": transport}
    check(cases, run(path, cases, MAX_TOKENS, **(FIELDS | fields)))


@pytest.mark.parametrize(("executor", "transport"), WIRES)
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_pda(tiny: Tiny, executor: str, transport: str, backend: str) -> None:
    path, cases = tiny("llama")
    fields = {"topology": "pda", "executor": executor, "transport": transport}
    check(cases, run(path, cases, MAX_TOKENS, attention_backend=backend, **(FIELDS | fields)))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_lanes_and_several_attention_nodes(tiny: Tiny, family: str, backend: str) -> None:
    path, cases = tiny(family)
    fields = {"topology": "pda", "num_wavefronts": 2, "num_attention_nodes": 2}
    check(cases, run(path, cases, MAX_TOKENS, attention_backend=backend, **(FIELDS | fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_block_size": 8},
        {"prefill_block_size": 32, "executor": "process", "transport": "cuda_ipc"},
        {"checksum": "crc32c", "executor": "process", "transport": "cuda_ipc"},
        {"checksum": "crc32c", "transport": "tcp", "staging_mib": 1},
        {"num_prefill_workers": 2, "num_decode_dense_nodes": 2, "transport": "shm"},
    ],
)
def test_blocks_that_are_converted_checked_or_shared_out(
    tiny: Tiny, fields: dict[str, Any]
) -> None:
    path, cases = tiny("llama")
    check(cases, run(path, cases, MAX_TOKENS, **(FIELDS | {"topology": "pd"} | fields)))


def test_auto_takes_cuda_ipc_between_processes_and_says_where_nodes_are(tiny: Tiny) -> None:
    path, cases = tiny("llama")
    fields = {"topology": "pda", "executor": "process", "attention_backend": "cpu"}
    model = ModelConfig(model_path=path, dtype="float32")
    with LLM(model, **(FIELDS | {"device": "auto"} | fields)) as llm:
        info = llm.engine.cluster_info()["transport"]
        assert info["name"] == "cuda_ipc"
        assert [one["transport"] for one in info["passed_over"]] == ["inproc"]
        devices = devices_of(llm)
        assert devices.pop("attention") == "cpu"
        assert all(device.startswith("cuda:") for device in devices.values())
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        done = llm.generate([case.prompt for case in cases], params)
        again = llm.generate([case.prompt for case in cases], params)  # prefixes are held by now
        check_idle(llm)
    check(cases, [one.token_ids for one in done])
    check(cases, [one.token_ids for one in again])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_nodes_on_two_gpus(tiny: Tiny, transport: str) -> None:
    path, cases = tiny("llama")
    fields = {"topology": "pd", "executor": "process", "transport": transport, "device": "auto"}
    model = ModelConfig(model_path=path, dtype="float32")
    with LLM(model, **(FIELDS | fields)) as llm:
        assert devices_of(llm) == {"prefill": "cuda:0", "decode": "cuda:1"}
        wanted = "cuda_ipc" if transport == "auto" else transport
        assert llm.engine.cluster_info()["transport"]["name"] == wanted
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        done = llm.generate([case.prompt for case in cases], params)
    check(cases, [one.token_ids for one in done])


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_reference_path_layer_by_layer(tiny: Tiny, backend: str) -> None:
    """Prompts token by token, so that nothing but the five methods runs the model."""
    path, cases = tiny("llama")
    dense, attention = (node(role, path, backend) for role in ("dense", "attention"))
    try:
        with dense.device.computing():
            for case in cases[:4]:
                tokens = list(case.prompt)
                while len(tokens) < len(case.prompt) + 6:
                    tokens += step_from(dense, attention, tokens)
                check([case], [tokens[len(case.prompt) :]])
    finally:
        dense.close()
        attention.close()


def step_from(dense: Any, attention: Any, tokens: list[int]) -> list[int]:
    """The token after these, all of which are computed again."""
    chosen: list[int] = []
    for position, token in enumerate(tokens):
        batch = dense.start_token_batch([token], [position])
        for layer in range(dense.half.num_layers):
            q, k, v = dense.prepare_attention_batch(batch, layer)
            out = attention.decode_layer_batch(layer, q, k, v, [[0, 1, 2]], [position + 1])
            dense.finish_layer_batch(batch, layer, out)
        chosen = dense.sample_next_token_batch(batch, [Sampling(0.0, 0, 1.0, 0)])
    return chosen


def node(role: str, path: str, backend: str) -> Any:
    on_gpu = role == "dense" or backend == "cuda"
    return build_node(
        NodeConfig(
            name=f"{role}-0",
            role=role,
            model=ModelConfig(model_path=path, dtype="float32"),
            cache=CacheConfig(block_size=16, num_blocks=8),
            transport="inproc",
            attention_backend=backend,
            threads=1,
            lanes=1,
            max_rows=8,
            dense_nodes=("dense-0",),
            attention_nodes=("attention-0",),
            device="cuda:0" if on_gpu else "cpu",
        )
    )
