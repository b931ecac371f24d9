"""The real HTTP server over an engine that computes nothing: what ``server_overhead`` measures.

The engine's thread hands every live request one token per step, as a decode step does, through the
same delivery as the real engine. Prints the ready line; ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from cloverinfer.config import ServerConfig
from cloverinfer.core.sampling import SamplingParams
from cloverinfer.orchestrator.counters import Counters, EngineStats
from cloverinfer.orchestrator.delivery import Couriers, Inbox
from cloverinfer.orchestrator.live import Chunk
from cloverinfer.server import run
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog

TEXT = " token"


class NullTokenizer:
    """As many tokens as words; only what the server asks of it."""

    has_chat_template = False
    vocab_size = 1000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * len(text.split())

    def decode(self, token_ids: list[int]) -> str:
        return TEXT * len(token_ids)


@dataclass
class Live:
    left: int
    prompt_tokens: int
    put: Any


class NullEngine:
    """One token for every live request each ``step`` seconds."""

    model_name = "null"
    max_model_len = 1 << 20
    failure: str | None = None

    def __init__(self, step: float) -> None:
        self.tokenizer = NullTokenizer()
        self._step = step
        self._couriers = Couriers()
        self._new: list[Live] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: str | list[int], sampling: SamplingParams, *_: Any, **__: Any
    ) -> AsyncGenerator[Chunk, None]:
        loop = asyncio.get_running_loop()
        courier, inbox = self._couriers.of(loop), Inbox(loop)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        left = sampling.max_tokens
        live = Live(left, len(ids), lambda chunk: courier.put(inbox, chunk))
        self._new.append(live)
        try:
            while True:
                chunk = await inbox.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            live.left = 0

    def nodes(self) -> list[dict[str, Any]]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(Counters(), 0, 0, 0, {})

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        live: list[Live] = []
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._step, time.monotonic())
            new, self._new = self._new, []
            live += new
            for one in live:
                one.left -= 1
                if one.left >= 0:
                    one.put(self._chunk(one))
            live = [one for one in live if one.left > 0]

    def _chunk(self, one: Live) -> Chunk:
        if one.left > 0:
            return Chunk(TEXT, [1])
        return Chunk(TEXT, [1], "length", metrics={"prompt_tokens": one.prompt_tokens})


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--step", type=float, required=True, help="seconds between two tokens")
    args = made.parse_args()
    engine, settings = NullEngine(args.step), ServerConfig(log_requests=False)
    app = build_app(Catalog.single(engine), settings)
    with run.bind("127.0.0.1", 0) as sock:
        run.serve(app, sock, settings, lambda line: print(line, flush=True))
    engine.close()


if __name__ == "__main__":
    main()
