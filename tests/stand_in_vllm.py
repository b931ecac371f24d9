"""vLLM's server on a host in tests: as much of vLLM's surface as deploy, nodes and the
orchestrator meet. A decode instance answers once a prefill instance has called at its connector's
place, which costs no model.

It writes its command line to ``stand-in-PORT.json`` in the current folder.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WAIT = 30.0


class Connector:
    """Transfers that were announced at a decode instance's place."""

    def __init__(self, host: str, port: int) -> None:
        self._seen: set[str] = set()
        self._changed = threading.Condition()
        self._socket = socket.create_server((host, port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            with peer, peer.makefile() as lines:
                transfer = lines.readline().strip()
            with self._changed:
                self._seen.add(transfer)
                self._changed.notify_all()

    def claimed(self, transfer: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: transfer in self._seen, WAIT)


class Instance(ThreadingHTTPServer):
    answered = 0

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__((args.host, args.port), Handler)
        self.args = args
        extra = json.loads(args.kv_transfer_config)["kv_connector_extra_config"]
        self.connector = Connector(extra["kv_host"], extra["kv_port"])

    def hand_over(self, params: dict[str, Any] | None) -> dict[str, Any] | None:
        if params is None:
            return None
        transfer = params["transfer_id"]
        told = {"transfer_id": transfer, "attempt": params.get("attempt", 0)}
        if params.get("do_remote_decode"):
            host, _, port = params["decode_address"].rpartition(":")
            with socket.create_connection((host, int(port)), WAIT) as peer:
                peer.sendall(f"{transfer}\n".encode())
            return {**told, "prompt_tokens": 5}
        if not self.connector.claimed(transfer):
            return {"transfer_id": transfer, "error": "nobody came"}
        return {**told, "loaded_tokens": 4, "computed_prompt_tokens": 1, "transfer_seconds": 0.1}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Instance

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(b"")
        elif self.path == "/metrics":
            rows = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            page = "".join(f'vllm:{row}{{engine="0"}} 0.0\n' for row in rows)
            page += f'vllm:request_success_total{{engine="0"}} {self.server.answered}.0\n'
            self._answer(page.encode())
        elif self._may():
            name = self.server.args.served_model_name or self.server.args.model
            card = {"id": name, "object": "model", "max_model_len": 64}
            self._answer(json.dumps({"object": "list", "data": [card]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        told = self.server.hand_over(body.get("kv_transfer_params"))
        self.server.answered += 1
        count = body.get("max_tokens", 1)
        usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        choice = {"index": 0, "text": "w " * count, "finish_reason": "length"}
        answer = {"id": "x", "choices": [choice], "usage": usage, "kv_transfer_params": told}
        self._answer(json.dumps(answer).encode())

    def _may(self) -> bool:
        """Whether it brings the key that vLLM reads from its environment."""
        key = os.environ["VLLM_API_KEY"]
        if self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._answer(b'{"error": "Unauthorized"}', 401)
        return False

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: the log is for what fails."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--dtype")
    parser.add_argument("--fails", action="store_true")
    args = parser.parse_args()
    if args.fails:
        raise SystemExit("RuntimeError: Engine core initialization failed")
    Path(f"stand-in-{args.port}.json").write_text(json.dumps(vars(args)))
    Instance(args).serve_forever()


if __name__ == "__main__":
    main()
