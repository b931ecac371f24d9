"""The same tokens where every node and the scheduler talk over rdma. Needs a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.same_tokens import check_idle

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.transport import missing

pytestmark = pytest.mark.skipif(bool(missing("rdma")), reason=missing("rdma"))
TRANSPORT = "rdma"
PROMPTS = [[1 + (7 * i + j) % 90 for j in range(5 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Two layers with random weights, made here: to import transformers takes a minute of emulation."""
FIELDS = {"executor": "local", "num_blocks": 40, "block_size": 16}


def tokens(model: ModelConfig, **fields: str) -> list[list[int]]:
    with LLM(model, **FIELDS, **fields) as llm:
        done = llm.generate(PROMPTS, GREEDY)
        check_idle(llm)
    return [one.token_ids for one in done]


def test_same_tokens_over_rdma(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = ModelConfig(model_path=str(tmp_path), dtype="float32", load_format="dummy")
    want = tokens(model, topology="colocated")
    assert [len(one) for one in want] == [8] * 4
    for topology in ("pd", "pda"):
        assert tokens(model, topology=topology, transport=TRANSPORT) == want
