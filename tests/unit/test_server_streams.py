"""Chunks of several streams reach one reader together; the end of each way is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from cloverinfer.server.streams import ClientGoneError, fan_in


async def never() -> dict[str, Any]:
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


async def stream(name: str, count: int, ended: list[str]) -> AsyncGenerator[Any, None]:
    try:
        for i in range(count):
            yield f"{name}{i}"
    finally:
        ended.append(name)


def test_what_is_ready_comes_in_one_batch() -> None:
    async def run() -> list[list[tuple[int, Any]]]:
        ended: list[str] = []
        batches = [
            one async for one in fan_in(never, [stream(n, 3, ended) for n in "ab"], asyncio.Event())
        ]
        assert sorted(ended) == ["a", "b"]
        return batches

    batches = asyncio.run(asyncio.wait_for(run(), 20))
    assert len(batches) == 1
    assert [one for one in batches[0] if one[0] == 0] == [(0, "a0"), (0, "a1"), (0, "a2")]
    assert [one for one in batches[0] if one[0] == 1] == [(1, "b0"), (1, "b1"), (1, "b2")]


def test_an_error_comes_after_what_came_before_it() -> None:
    async def failing() -> AsyncGenerator[Any, None]:
        yield "x"
        raise KeyError("broken")

    async def run() -> list[Any]:
        chunks = fan_in(never, [failing()], asyncio.Event())
        first = await anext(chunks)
        with pytest.raises(KeyError, match="broken"):
            await anext(chunks)
        return first

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [(0, "x")]


def test_a_client_that_leaves_ends_the_streams() -> None:
    ended: list[str] = []

    async def endless() -> AsyncGenerator[Any, None]:
        try:
            yield "x"
            await asyncio.sleep(60)
        finally:
            ended.append("endless")

    async def run() -> None:
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        chunks = fan_in(receive, [endless()], asyncio.Event())
        await anext(chunks)
        gone.set()
        with pytest.raises(ClientGoneError):
            await anext(chunks)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert ended == ["endless"]
