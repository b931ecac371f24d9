"""What each node did, added up from the results that it sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..scheduler import StepRecord
from ..transport.choice import Choice
from ..wire.messages import AttentionDone, NodeInfo, StepDone, TransferDone


def transport_info(choice: Choice, checksum: str) -> dict[str, Any]:
    """Which transport connects the nodes, and why not each that would have been faster."""
    return {
        "name": choice.transport,
        "passed_over": [msgspec.structs.asdict(one) for one in choice.passed_over],
        "checksum": checksum,
    }


class NodeReports:
    """Rows for ``generate --json`` and the server: place and totals of every node."""

    def __init__(self, infos: Sequence[NodeInfo]) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        for info in infos:
            self._rows[info.peer.name] = {
                "name": info.peer.name,
                "role": info.peer.role,
                "pid": info.pid,
                "host": info.host,
                "device": info.device,
                "transport": info.transport,
                "threads": info.threads,
                "address": info.peer.address,
                "kv_blocks": info.kv_blocks,
                "weight_bytes": info.weight_bytes,
                "alive": True,
                "tokens": 0,
                "failed_transfers": 0,
                "steps": 0,
                "bytes_in": 0,
                "bytes_out": 0,
                "seconds": 0.0,
                "dense_seconds": 0.0,
                "attention_seconds": 0.0,
                "sample_seconds": 0.0,
                "barrier_seconds": 0.0,
                "push_seconds": 0.0,
                "push_wait_seconds": 0.0,
                "native_layers": 0,
            }

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._rows.values()]

    def dead(self, name: str, reason: str) -> None:
        self._rows[name] |= {"alive": False, "reason": reason}

    def step(self, record: StepRecord, done: StepDone) -> None:
        stats = done.stats
        self._add(
            done.node,
            steps=1,
            tokens=record.tokens,
            bytes_in=stats.bytes_in,
            bytes_out=stats.bytes_out,
            seconds=stats.seconds,
            dense_seconds=stats.dense,
            attention_seconds=stats.attention,
            sample_seconds=stats.sample,
            barrier_seconds=stats.barrier,
            push_seconds=stats.push,
            push_wait_seconds=stats.push_wait,
            native_layers=stats.native_layers,
        )

    def attention(self, done: AttentionDone) -> None:
        self._add(
            done.node,
            steps=1,
            tokens=done.rows,
            bytes_in=done.bytes_in,
            bytes_out=done.bytes_out,
            seconds=done.seconds,
            attention_seconds=done.seconds,
            native_layers=done.native_calls,
        )

    def transfer(self, done: TransferDone) -> None:
        self._add(done.node, bytes_in=done.nbytes, failed_transfers=bool(done.error))

    def _add(self, name: str, **amounts: float) -> None:
        row = self._rows[name]
        for key, amount in amounts.items():
            row[key] += amount
