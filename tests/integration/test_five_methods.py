"""The reference path: the five methods that researchers' scripts call, layer by layer.

Prompts go through decode one token at a time, so that nothing but these five runs the model.
"""

import pytest
import torch
from tests.same_tokens import check, reference
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer.config import CacheConfig, ModelConfig
from cloverinfer.kvcache.manager import KVCacheManager
from cloverinfer.nodes.build import build_node
from cloverinfer.nodes.config import NodeConfig
from cloverinfer.wire.messages import Sampling

GREEDY = Sampling(0.0, 0, 1.0, 0)
BLOCK = 16


def node(role, model, backend):
    return build_node(
        NodeConfig(
            name=f"{role}-0",
            role=role,
            model=model,
            cache=CacheConfig(block_size=BLOCK, num_blocks=64),
            transport="inproc",
            attention_backend=backend,
            threads=1,
            lanes=1,
            max_rows=8,
            dense_nodes=("dense-0",),
            attention_nodes=("attention-0",),
        )
    )


def drive(dense, attention, prompts, max_tokens):
    """All sequences in one batch; each feeds its prompt first and then its own output."""
    manager = KVCacheManager(64, BLOCK, False)
    tokens = [list(prompt) for prompt in prompts]
    tables = [
        manager.allocate(i, prompt, len(prompt) + max_tokens)[0] for i, prompt in enumerate(prompts)
    ]
    for step in range(max(map(len, prompts)) + max_tokens - 1):
        alive = [i for i, prompt in enumerate(prompts) if step < len(prompt) + max_tokens - 1]
        batch = dense.start_token_batch([tokens[i][step] for i in alive], [step] * len(alive))
        for layer in range(dense.half.num_layers):
            q, k, v = dense.prepare_attention_batch(batch, layer)
            out = attention.decode_layer_batch(
                layer, q, k, v, [tables[i] for i in alive], [step + 1] * len(alive)
            )
            dense.finish_layer_batch(batch, layer, out)
        chosen = dense.sample_next_token_batch(batch, [GREEDY] * len(alive))
        for i, token in zip(alive, chosen, strict=True):
            if len(tokens[i]) == step + 1:
                tokens[i].append(token)
    return [row[len(prompt) :] for row, prompt in zip(tokens, prompts, strict=True)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "opt"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_five_methods_give_the_same_tokens(tmp_path, family, backend):
    folder = make_tiny(family, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in (1, 7, 16, 17)]
    cases = reference(peer, prompts, 12)
    model = ModelConfig(model_path=str(folder), dtype="float32")
    dense, attention = node("dense", model, backend), node("attention", model, backend)
    try:
        outputs = drive(dense, attention, prompts, 12)
    finally:
        dense.close()
        attention.close()
    assert all(len(tokens) == 12 for tokens in outputs)
    check(cases, outputs)
