"""llama-cpp-python's HTTP server over a stub that computes nothing, for ``server_overhead``.

It answers one stream at a time, and its stub yields without a pause. Run by the Python of an
environment that has ``llama_cpp`` with its server's requirements; nothing of ours is imported.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Iterator
from typing import Any

import llama_cpp
import uvicorn
from llama_cpp.server import app as server
from llama_cpp.server.settings import ModelSettings, ServerSettings


def chunk(finish: str | None = None) -> dict[str, Any]:
    choice = {"text": " token", "index": 0, "logprobs": None, "finish_reason": finish}
    made = {"id": "cmpl-0", "object": "text_completion", "created": int(time.time())}
    return {**made, "model": "null", "choices": [choice]}


def complete(self: Any, prompt: Any, max_tokens: int = 16, stream: bool = False, **_: Any) -> Any:
    if not stream:
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
        return {**chunk("length"), "usage": usage}
    return chunks(max_tokens)


def chunks(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield chunk("length" if i == count - 1 else None)


class Stub(llama_cpp.Llama):
    """A model that was never loaded."""

    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass

    def close(self) -> None:
        pass


class Proxy:
    def __call__(self, model: str | None = None) -> llama_cpp.Llama:
        return Stub()


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--step", type=float, help="taken and left aside: there is no pause")
    made.parse_args()
    llama_cpp.Llama.__call__ = complete
    server.set_llama_proxy = lambda model_settings: setattr(server, "_llama_proxy", Proxy())
    settings = ServerSettings(interrupt_requests=False)
    app = server.create_app(server_settings=settings, model_settings=[ModelSettings(model="null")])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(256)
        print(f"ready: http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[sock])


if __name__ == "__main__":
    main()
