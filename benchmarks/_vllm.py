"""Pairs of vLLM servers for ``vllm_pd``: how connectors are set up and how requests reach them."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.vllm_kit import free_port
from tests.vllm_servers import (
    PYTHON,
    HandOver,
    Server,
    body_of,
    model_folder,
    running,
    tokens_of,
)

__all__ = [
    "PYTHON",
    "Clover",
    "HandOver",
    "Nixl",
    "Server",
    "Times",
    "body_of",
    "first_token",
    "free_port",
    "model_folder",
    "running",
    "tokens_of",
]

MEETINGS = 5
"""Tries until a pair has met."""


@dataclass
class Times:
    """Of one request, in seconds."""

    first: float
    """From the request to decode's first token at the client."""
    prefill: float
    """Prefill's own answer, with one token."""
    transfer: float | None = None
    """From the first grant to the last byte, where the connector tells."""


def first_token(server: Server, body: dict[str, Any]) -> float:
    """Seconds to the first token of a streamed answer, which is read to its end."""
    started = time.perf_counter()
    first = 0.0
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - started
                if "error" in json.loads(line[6:]):
                    raise SystemExit(f"{server.url}: {line}")
    return first


class Pair:
    """A prefill and a decode server of one connector."""

    name: str

    def __init__(self, folder: Path, port: int) -> None:
        log = folder.parent
        self.prefill = Server(folder, log / f"{self.name}-prefill.log", port, "kv_producer")
        self.decode = Server(folder, log / f"{self.name}-decode.log", port + 1, "kv_consumer")
        self.prefill.kv_port, self.decode.kv_port = port + 2, port + 3

    def ask(self, prompt: list[int]) -> Times:
        raise NotImplementedError

    def meet(self, prompt: list[int]) -> None:
        """Before anything is measured."""
        self.ask(prompt)


class Clover(Pair):
    """Ours: decode first, prefill at the same time."""

    def __init__(self, folder: Path, port: int, transport: str) -> None:
        self.name = self.transport = transport
        super().__init__(folder, port)
        for server in (self.prefill, self.decode):
            server.settings = {"transport": transport}
        self.decode.environment = {"VLLM_SERVER_DEV_MODE": "1"}  # for resetting its cache

    def ask(self, prompt: list[int]) -> Times:
        over = HandOver(self.prefill, self.decode, prompt, tokens=1)
        with ThreadPoolExecutor(1) as pool:
            prefill: Future[float] = pool.submit(_answer, self.prefill, over.prefill_body())
            first = first_token(self.decode, over.decode_body())
            return Times(first, prefill.result())

    def forget(self) -> None:
        """Decode has no prompt cached any more."""
        httpx.post(f"{self.decode.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def transfer(self, prompt: list[int]) -> float:
        """Seconds of the transfer alone: prefill has computed all when decode, which has forgotten
        the prompt, comes."""
        self.forget()
        over = HandOver(self.prefill, self.decode, prompt, tokens=1)
        _answer(self.prefill, over.prefill_body())
        told = self.decode.ask(over.decode_body()).json()["kv_transfer_params"]
        if told.get("loaded_tokens") != len(prompt):
            raise SystemExit(f"the prompt of {len(prompt)} tokens was not transferred: {told}")
        return float(told["transfer_seconds"])


class Nixl(Pair):
    """vLLM's own: prefill first, decode with what it answers."""

    name = "NixlConnector"

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, port)
        for server in (self.prefill, self.decode):
            server.connector = {
                "kv_connector": "NixlConnector",
                "kv_role": server.role,
                "kv_buffer_device": "cpu",
            }
            # By address: where localhost is another one, the two do not meet.
            server.environment = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(server.kv_port),
            }

    def meet(self, prompt: list[int]) -> None:
        """Its handshake waits for 5 s; where that was too short, the next request tries again."""
        for left in reversed(range(MEETINGS)):
            try:
                self.ask(prompt)
                return
            except SystemExit as problem:
                print(f"{self.name} did not meet: {problem}")
                if not left:
                    raise

    def ask(self, prompt: list[int]) -> Times:
        started = time.perf_counter()
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = body_of(prompt, 1) | {"kv_transfer_params": params}
        answer = self.prefill.ask(body).json()
        prefill = time.perf_counter() - started
        first = first_token(
            self.decode, body_of(prompt, 1) | {"kv_transfer_params": answer["kv_transfer_params"]}
        )
        return Times(prefill + first, prefill)


def _answer(server: Server, body: dict[str, Any]) -> float:
    started = time.perf_counter()
    answer = server.ask(body)
    if answer.status_code != 200:
        raise SystemExit(f"{server.url}: {answer.text}")
    return time.perf_counter() - started
