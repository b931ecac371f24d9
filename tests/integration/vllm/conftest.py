"""What the tests between real vLLM servers share: the prompts, a plain server's answers, a pair."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.vllm_kit import free_port
from tests.vllm_servers import (
    AT_ONCE,
    BLOCK,
    TOKENS,
    Server,
    body_of,
    fresh,
    model_folder,
    running,
    tokens_of,
)

from cloverinfer.config.cluster import ModelConfig
from cloverinfer.models import resolve_model

OPTIONS = ["--max-num-batched-tokens", "384", "--max-num-seqs", "16"]
"""So that the long prompt, and what comes beside it, is computed in chunks."""
SETTINGS = {"lease": 600.0, "retry_timeout": 5.0}
"""No lease ends because this machine is busy; who dies is found by its connections."""


def made_prompts() -> list[list[int]]:
    """Fifty: around block boundaries, with shared beginnings, and one that is long."""
    draw = random.Random(5)

    def words(count: int) -> list[int]:
        return [draw.randrange(1000, 30000) for _ in range(count)]

    sizes = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]
    made = [words(size) for size in sizes]
    shared = words(2 * BLOCK + 40)
    made += [shared[: BLOCK + 10 * i] + words(5) for i in range(12)]
    made += [shared + words(1 + i) for i in range(9)]
    made += [words(3 + 4 * i) for i in range(20)]
    return [*made, fresh("long")]


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return made_prompts()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = resolve_model(ModelConfig(dtype="float32")).path
    return model_folder(made, tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="session")
def plain_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Of a server without the connector, which has ended before others start: it takes 4 GiB."""
    plain = Server(folder, folder.parent / "plain.log", free_port(1), options=OPTIONS)
    with running(plain), ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda each: plain.ask(body_of(each, TOKENS)).json(), prompts)
        return [tokens_of(each) for each in answers]


@pytest.fixture(scope="module")
def pair(
    folder: Path, plain_answers: list[list[int]], request: pytest.FixtureRequest
) -> Iterator[tuple[Server, Server]]:
    """Prefill and decode, over the wire that the module names."""
    first = free_port(4)
    name = request.module.TRANSPORT

    def server(role: str, port: int) -> Server:
        log = folder.parent / f"{name}-{role}.log"
        settings = SETTINGS | {"transport": name}
        return Server(folder, log, port, f"kv_{role}", port + 1, OPTIONS, settings)

    made = server("producer", first), server("consumer", first + 2)
    with running(*made):
        yield made
