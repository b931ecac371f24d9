"""What a decode step costs the host: the engine's Python, and the node's tables, without a model.

The engine is the live one (scheduler, messages, delivery) over a stand-in for its cluster: one
colocated node that answers each plan at once with a token for every row. Times are processor time
of the engine's thread, in which that node works too: what it takes is taken off. All of it must
hide behind a step on a device, of which one is always in flight with ``--async-scheduling``.

    python benchmarks/host_step.py
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from _common import Row, describe_run, finish, parser
from cloverinfer import ModelConfig, SamplingParams
from cloverinfer.config import CacheConfig, ClusterConfig, SchedulerConfig
from cloverinfer.kvcache.layout import blocks_for
from cloverinfer.nodes.rows import RowTable
from cloverinfer.orchestrator import engine as engines
from cloverinfer.scheduler import SchedNode
from cloverinfer.transport.choice import Choice
from cloverinfer.wire.messages import (
    Message,
    NodeInfo,
    PeerInfo,
    StepDone,
    StepPlan,
    StepStats,
    decode,
    encode,
)

NODE = "colocated-0"
VOCAB = 32000


class NullCluster:
    """What an engine asks of its cluster; the node is a table of rows and answers at once."""

    def __init__(
        self, model: ModelConfig, cluster: ClusterConfig, progress: Callable[[str], None]
    ) -> None:
        self.model = SimpleNamespace(name="none", path="none", fingerprint="none")
        self.choice = Choice("none")
        self.tokenizer = None
        self.max_model_len = 1 << 20
        assert cluster.cache.num_blocks is not None
        self._sched = SchedNode(NODE, "colocated", cluster.cache.num_blocks)
        peer = PeerInfo(NODE, "colocated", "", {}, None, "", "", "", "")
        self.infos = [
            NodeInfo(peer, 0, "", "cpu", "none", 1, self._sched.kv_blocks, [], 1 << 20, VOCAB, 0)
        ]
        self._answers: deque[bytes] = deque()
        self._wake = threading.Event()
        self._rows = RowTable(cluster.cache.block_size, local_attention=True)
        self.node_seconds = self.batch_seconds = 0.0
        """Spent as the node, and of it in its tables and in making the step's tensors."""
        self.steps = 0
        self.first = self.last = 0.0
        """When the first and the last step with all rows was answered."""
        self.rows = 0

    def sched_nodes(self) -> list[SchedNode]:
        return [self._sched]

    def tell_deaths(self, on_death: Any) -> None:
        """Nobody dies."""

    def send(self, name: str, data: bytes) -> None:
        started = time.thread_time()
        plan = decode(data)
        assert isinstance(plan, StepPlan)
        before = time.thread_time()
        self._rows.apply(plan)
        batch = self._rows.batch(plan)
        after = time.thread_time()
        for row, position in zip(batch.sampled, batch.sample_positions, strict=True):
            row.note(7, position)
        done = StepDone(NODE, plan.lane, plan.step, [7] * len(batch.sampled), StepStats())
        self._answers.append(encode(done))
        ended = time.thread_time()
        if len(plan.rows) == self.rows and max(plan.counts) == 1:
            if not self.steps:
                self.first, self.node_seconds, self.batch_seconds = ended, 0.0, 0.0
            else:
                self.node_seconds += ended - started
                self.batch_seconds += after - before
            self.steps += 1
            self.last = ended

    def poll(self, timeout: float) -> list[Message]:
        if not self._answers:
            self._wake.wait(timeout)
        self._wake.clear()
        return [decode(self._answers.popleft())] if self._answers else []

    def wake(self) -> None:
        self._wake.set()

    def end(self, name: str, reason: str) -> None:
        raise SystemExit(f"{name} was ended: {reason}")

    def close(self) -> None:
        """Nothing is held."""


def measure(rows: int, prompt: int, tokens: int, ahead: bool) -> NullCluster:
    """A run of ``rows`` requests that decode ``tokens`` each, all but the first steps together."""
    blocks = rows * blocks_for(prompt + tokens, 32) + 1
    config = ClusterConfig(
        topology="colocated",
        executor="local",
        cache=CacheConfig(num_blocks=blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=rows * prompt, async_scheduling=ahead
        ),
    )
    engine = engines.Engine(ModelConfig(), config)
    cluster = engine.cluster
    assert isinstance(cluster, NullCluster)
    cluster.rows = rows
    left, ended = [rows], threading.Event()

    def sink(item: Any) -> None:
        if isinstance(item, Exception) or item.finish_reason is not None:
            left[0] -= 1
            if not left[0]:
                ended.set()

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i in range(rows):
        engine.submit([1 + (i + j) % 30000 for j in range(prompt)], params, sink)
    ended.wait(600)
    engine.close()
    return cluster


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    made.add_argument("--prompt", type=int, default=1024)
    made.add_argument("--tokens", type=int, default=256)
    args = made.parse_args()
    print(describe_run(1))
    engines.Cluster = NullCluster  # type: ignore[misc, assignment]
    rows = []
    for count in args.rows:
        for ahead in (False, True):
            best = [float("inf")] * 2
            for _ in range(1 if args.quick else 3):
                run = measure(count, args.prompt, args.tokens, ahead)
                steps = run.steps - 1
                engine = (run.last - run.first - run.node_seconds) / steps
                best = [min(best[0], engine), min(best[1], run.batch_seconds / steps)]
            params = {"rows": count, "ahead": ahead}
            rows.append(Row("engine", 1000 * best[0], "ms/step", params))
            rows.append(Row("RowTable", 1000 * best[1], "ms/step", params))
    finish(rows, args.json)


if __name__ == "__main__":
    main()
