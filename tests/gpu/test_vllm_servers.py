"""The connector between real vLLM servers, with vLLM's build for GPUs, both on one GPU.

Runs where ``GPU_VLLM_PYTHON`` names the Python of an environment that has it and CloverInfer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import add_tokenizer, make_tiny
from tests.vllm_kit import free_port
from tests.vllm_servers import (
    Begun,
    HandOver,
    Server,
    body_of,
    running,
    tokens_of,
    until,
    until_idle,
)

PYTHON = os.environ.get("GPU_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="GPU_VLLM_PYTHON names no Python with vLLM for GPUs"),
    pytest.mark.timeout(600),
]
BLOCK, TOKENS = 16, 24
Pair = tuple[Server, Server]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
    }
    return add_tokenizer(make_tiny("llama", tmp_path_factory.mktemp("vllm"), **shape))


@pytest.fixture(scope="module", params=["cuda_ipc", "tcp"])
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    first = free_port(4)

    def server(role: str, port: int) -> Server:
        return Server(
            folder,
            folder / f"{request.param}-{role}.log",
            port,
            f"kv_{role}",
            port + 1,
            ["--gpu-memory-utilization", "0.2"],
            {"transport": request.param},
            dtype="bfloat16",
            python=Path(PYTHON),
        )

    servers = server("producer", first), server("consumer", first + 2)
    with running(*servers):
        yield servers


def prompt_of(length: int, seed: str) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 96) for _ in range(length)]


def said(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    return tokens_of(answer), answer["choices"][0]["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("blocks", [1, 2, 7, 40, 100])
def test_answers_are_those_of_one_server_with_the_prompt_cached(pair: Pair, blocks: int) -> None:
    """To the bit: either way the last token alone is computed, over the same blocks."""
    prefill, _ = pair
    prompt = prompt_of(blocks * BLOCK + 1, f"{prefill.log} {blocks}")
    more = {"logprobs": 0}
    prefill.ask(body_of(prompt, TOKENS) | more)
    cached = prefill.ask(body_of(prompt, TOKENS) | more).json()
    found = HandOver(*pair, prompt, TOKENS, more=more).answer()
    assert said(found) == said(cached)
    told = found["kv_transfer_params"]
    assert (told["computed_prompt_tokens"], told["loaded_tokens"]) == (1, len(prompt))


def test_many_at_once_are_loaded_and_leave_nothing(pair: Pair) -> None:
    prompts = [prompt_of(1 + 37 * i, f"{pair[0].log} {i}") for i in range(32)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda each: HandOver(*pair, each, TOKENS).answer(), prompts))
    for answer in answers:
        assert len(tokens_of(answer)) == TOKENS or answer["choices"][0]["finish_reason"] == "stop"
        assert answer["kv_transfer_params"]["computed_prompt_tokens"] == 1
    until_idle(*pair)


def test_cancelled_before_prefill(pair: Pair) -> None:
    over = HandOver(*pair, prompt_of(1500, "cancelled"))
    begun = Begun(over.decode, over.decode_body())
    until(over.decode.usage, "blocks are taken")
    begun.cancel()
    until_idle(*pair)
