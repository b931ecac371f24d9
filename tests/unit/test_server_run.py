"""The server on a real socket: readiness, the openai client, disconnects, shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.servers import serving, wait

from cloverinfer.core.errors import ConfigError
from cloverinfer.server import run
from cloverinfer.server.catalog import Catalog


@pytest.fixture
def base(engine: Any) -> Iterator[str]:
    """Address of a server in a thread over the fake engine."""
    with serving(Catalog.single(engine, "m")) as (address, _):
        yield address


def test_the_openai_client_works(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="m", messages=messages, max_tokens=3)
        assert answer.choices[0].message.content == "w0 w1 w2 "
        messages.append(answer.choices[0].message)
        with client.chat.completions.create(
            model="m", messages=messages, max_tokens=2, stream=True
        ) as stream:
            assert "".join(part.choices[0].delta.content or "" for part in stream) == "w0 w1 "
        whole = client.completions.create(model="m", prompt="a b", extra_body={"top_k": 3})
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 2
        assert [model.id for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="x", prompt="a")


def test_the_async_openai_client_works(base: str) -> None:
    async def talk() -> tuple[Any, str, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any") as client:
            messages: Any = [{"role": "user", "content": "hi"}]
            fields: Any = {"model": "m", "messages": messages, "max_tokens": 3}
            whole, several = await asyncio.gather(
                client.chat.completions.create(**fields, logprobs=True, top_logprobs=1),
                client.completions.create(model="m", prompt=["a", "b"], n=2, max_tokens=1),
            )
            text = ""
            async with await client.chat.completions.create(**fields, stream=True) as stream:
                async for part in stream:
                    text += part.choices[0].delta.content or ""
            return whole, text, several.choices

    whole, text, several = asyncio.run(talk())
    assert whole.choices[0].message.content == text == "w0 w1 w2 "
    assert [one.token for one in whole.choices[0].logprobs.content] == ["w0 ", "w1 ", "w2 "]
    assert [one.index for one in several] == [0, 1, 2, 3]


def test_the_openai_client_sees_a_failure_in_a_stream(base: str, engine: Any) -> None:
    engine.fail_at = 1
    with openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as client:
        with client.completions.create(model="m", prompt="a", stream=True) as stream:
            with pytest.raises(openai.APIError, match="a node died"):
                list(stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay", [0.02, 60.0])
def test_a_client_that_leaves_aborts_its_request(
    base: str, engine: Any, stream: bool, delay: float
) -> None:
    engine.delay, engine.max_model_len = delay, 100_000
    body = {"model": "m", "prompt": "a", "max_tokens": 90_000, "stream": stream}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=base) as client:
            post = asyncio.create_task(_read(client, body))
            while not engine.asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    asyncio.run(leave())
    wait(lambda: engine.aborted == 1)
    engine.delay = 0.0
    body |= {"max_tokens": 1, "stream": False}
    assert httpx.post(f"{base}/v1/completions", json=body).status_code == 200


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/completions", json=body, timeout=None) as response:
        async for _ in response.aiter_bytes():
            pass


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use; give another"
        ):
            run.bind("127.0.0.1", port)


def test_addresses_are_told_as_urls() -> None:
    sock = run.bind("127.0.0.1", 0)
    assert run.url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    sock.close()
