"""Stands for vLLM around the connector's two halves: tensors, requests, block tables and steps.

No model: a layer's "keys and values" of a position are bytes that follow from the layer, the
position and the head, so that whatever arrives can be checked to the byte.
"""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cloverinfer.integrations.vllm.courier import Courier
from cloverinfer.integrations.vllm.memory import Shape
from cloverinfer.integrations.vllm.scheduler import SchedulerHalf
from cloverinfer.integrations.vllm.settings import settings_from
from cloverinfer.integrations.vllm.worker import Engine, WorkerHalf
from cloverinfer.nodes.copies import copies_of

LAYERS, ALL_HEADS, DIM = 3, 4, 4
PATIENCE = 20.0
_DRAWS = random.SystemRandom()


class FakeTensor:
    """What the connector asks of a torch tensor, of a numpy array."""

    def __init__(self, array: np.ndarray, storage: np.ndarray, device: int | None = None) -> None:
        self.array = array
        self.device = SimpleNamespace(type="cpu" if device is None else "cuda", index=device)
        self.dtype = "torch.float32"
        self._storage = storage

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(each // self.array.itemsize for each in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> Any:
        return torch.from_numpy(self._storage.reshape(-1)).untyped_storage()


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports in a row, below those that the system gives away by itself.
    Drawn, so that processes that look at once hardly ever find the same."""
    for _ in range(1000):
        first = _DRAWS.randrange(20000, 32000)
        try:
            for port in range(first, first + count):
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def until(condition: Any, what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.002)


def value(layer: int, position: int, head: int) -> np.ndarray:
    """Keys and values of a token's head."""
    return (layer * 1e6 + position * 100 + head + np.arange(2 * DIM) / 16).astype(np.float32)


class HostMemory:
    """Where a worker's cache is, and what computes there: this process, at once."""

    copies = staticmethod(copies_of)

    def make(self, shape: tuple[int, ...]) -> Any:
        """Of float32, all -1."""
        return np.full(shape, -1.0, np.float32)

    def layer(self, storage: Any, i: int, axes: tuple[int, ...]) -> Any:
        return storage[i].transpose(axes)

    def tensor(self, layer: Any, storage: Any) -> Any:
        """As the connector is given it."""
        return FakeTensor(layer, storage)

    def write(
        self, view: Any, layer: int, places: list[tuple[int, int, int]], heads: range
    ) -> None:
        """Keys and values of ``places``: position, block, offset there."""
        for at, block, offset in places:
            for i, head in enumerate(heads):
                view[block, i, offset] = value(layer, at, head)

    def read(self, view: Any) -> np.ndarray:
        return np.asarray(view)


class FakeWorker:
    """One tensor-parallel worker's memory and its worker half."""

    def __init__(self, rank: int, ranks: int, options: Any, settings: dict[str, Any]) -> None:
        self.heads = range(rank * ALL_HEADS // ranks, (rank + 1) * ALL_HEADS // ranks)
        blocks, size, count = options.blocks, options.size, len(self.heads)
        sizes = {"H": count, "N": size}
        inner = [sizes[axis] for axis in options.order]
        shape = (LAYERS, blocks, *inner, 2 * DIM)
        self.memory = options.memory or HostMemory()
        self.storage = self.memory.make(shape)
        axes = (0, 1, 2, 3) if options.order == "HN" else (0, 2, 1, 3)
        self.layers = [self.memory.layer(self.storage, i, axes) for i in range(LAYERS)]
        engine = Engine(
            options.name, rank, ranks, options.model, options.dtype, "", ALL_HEADS,
            Shape(blocks, size, count, options.opaque),
        )  # fmt: skip
        self.half = WorkerHalf(settings_from(settings), engine, self.memory.copies)
        layers = enumerate(self.layers)
        self.half.register(
            {f"layer.{i}": self.memory.tensor(each, self.storage) for i, each in layers}
        )

    def compute(self, layer: int, table: list[int], size: int, begin: int, end: int) -> None:
        places = [(at, table[at // size], at % size) for at in range(begin, end)]
        self.memory.write(self.layers[layer], layer, places, self.heads)

    def holds(self, table: list[int], size: int, begin: int, end: int) -> bool:
        held = [self.memory.read(each) for each in self.layers]
        return all(
            (held[layer][table[at // size], i, at % size] == value(layer, at, head)).all()
            for layer in range(LAYERS)
            for at in range(begin, end)
            for i, head in enumerate(self.heads)
        )


class FakeEngine:
    """An engine with a bump allocator; ``step`` does what vLLM does around the connector."""

    _names = itertools.count()

    def __init__(self, role: str, ranks: int = 1, **options: Any) -> None:
        defaults = {
            "blocks": 64, "size": 16, "order": "HN", "opaque": False,
            "model": "tiny", "dtype": "float32", "name": f"{role}-{next(self._names)}",
            "memory": None,
        }  # fmt: skip
        self.options = SimpleNamespace(**{k: options.pop(k, v) for k, v in defaults.items()})
        self.port = options.pop("kv_port", None) or free_port(ranks)
        settings = {"kv_port": self.port, "lease": 2.0, "transport": "tcp"} | options
        self.size = self.options.size
        self.workers = [FakeWorker(rank, ranks, self.options, settings) for rank in range(ranks)]
        self.scheduler = SchedulerHalf(self.size, role == "prefill", role == "decode")
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}
        self.sent: set[str] = set()
        self.loaded: set[str] = set()
        self.bad: set[int] = set()
        self._free = list(range(self.options.blocks - 1, 0, -1))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def request(self, name: str, tokens: int, params: dict[str, Any]) -> Any:
        made = SimpleNamespace(
            request_id=name,
            prompt_token_ids=[(7 * i) % 91 for i in range(tokens)],
            num_prompt_tokens=tokens,
            kv_transfer_params=params,
        )
        self.requests[name] = made
        self.tables[name] = [self._free.pop() for _ in range(-(-tokens // self.size))]
        return made

    # -- decode

    def wait_for_remote(self, name: str, tokens: int, transfer: str, held: int = 0) -> Any:
        """A request whose first ``held`` tokens are in this engine's prefix cache."""
        params = {"do_remote_prefill": True, "transfer_id": transfer}
        request = self.request(name, tokens, params)
        count, waits = self.scheduler.matched(request, held)
        assert (count, waits) == (tokens - held, True)
        assert self.scheduler.matched(request, held) == (count, True)
        self.scheduler.allocated(request, self.tables[name], count)
        self.step()
        return request

    # -- prefill

    def prefill(self, name: str, tokens: int, params: dict[str, Any], **how: Any) -> None:
        """Runs a prompt in chunks; ``cached`` tokens were computed before."""
        self.begin(name, tokens, params)
        self.compute(name, **how)

    def begin(self, name: str, tokens: int, params: dict[str, Any]) -> None:
        self.request(name, tokens, {"do_remote_decode": True} | params)

    def compute(self, name: str, chunk: int = 1000, cached: int = 0, upto: int = 1 << 30) -> None:
        request, table = self.requests[name], self.tables[name]
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.compute(layer, table, self.size, 0, cached)
        at, first = cached, True
        while at < min(request.num_prompt_tokens, upto):
            count = min(chunk, request.num_prompt_tokens - at)
            self.step(name, at, count, first)
            at, first = at + count, False

    def step(self, name: str = "", at: int = 0, count: int = 0, first: bool = False) -> None:
        table = self.tables.get(name, [])
        new = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[])
        new.num_computed_tokens = []
        output = SimpleNamespace(
            scheduled_new_reqs=[], scheduled_cached_reqs=new, preempted_req_ids=None,
            num_scheduled_tokens={name: count} if name else {},
        )  # fmt: skip
        if first:
            request = self.requests[name]
            extra = SimpleNamespace(extra_args={"kv_transfer_params": request.kv_transfer_params})
            output.scheduled_new_reqs.append(
                SimpleNamespace(
                    req_id=name,
                    prompt_token_ids=request.prompt_token_ids,
                    block_ids=(table,),
                    num_computed_tokens=at,
                    sampling_params=extra,
                )
            )
        elif name:
            new.req_ids, new.new_block_ids, new.num_computed_tokens = [name], [None], [at]
        self._run(self.scheduler.build(output), table, at, count)

    def _run(self, plan: Any, table: list[int], at: int, count: int) -> None:
        finished = []
        for worker in self.workers:
            worker.half.preempt(plan.preempted)
            worker.half.begin_step(plan)
            for layer in range(LAYERS if count else 0):
                worker.compute(layer, table, self.size, at, at + count)
                worker.half.save_layer(f"layer.{layer}")
            worker.half.end_step()
            sent, loaded = worker.half.take_finished()
            self.bad |= worker.half.take_bad_blocks()
            finished.append((sent, loaded, worker.half.take_results()))
        for sent, loaded, results in finished:
            self._count(self.sent, sent, "sent")
            self._count(self.loaded, loaded, "loaded")
            self.scheduler.reported(sent, loaded, results)

    def _count(self, into: set[str], names: set[str], what: str) -> None:
        """A request counts once every worker has told of it, and none may twice."""
        told = self.__dict__.setdefault(f"_{what}", {})
        for name in names:
            told[name] = told.get(name, 0) + 1
            assert told[name] <= len(self.workers), f"{name} was {what} twice"
            if told[name] == len(self.workers):
                into.add(name)

    def finish(self, name: str) -> Any:
        """The request ends; what the answer says."""
        stays, answer = self.scheduler.finished(self.requests[name])
        self.stays = stays
        self.step()
        return answer

    def until_sent(self, name: str) -> None:
        until(lambda: self.step() or name in self.sent, f"{name} free at prefill")

    def until_loaded(self, name: str) -> None:
        until(lambda: self.step() or name in self.loaded, f"{name} loaded")

    def holds(self, name: str, begin: int, end: int) -> bool:
        table = self.tables[name]
        return all(worker.holds(table, self.size, begin, end) for worker in self.workers)

    def fall_silent(self) -> None:
        """It goes on, and says no more that it lives."""
        for courier in self._couriers():
            courier._ticker.close()

    def stand_still(self, seconds: float) -> None:
        """It hears nothing for so long. Returns before that is over."""
        for courier in self._couriers():
            for wire in courier.wires.values():
                wire.call(lambda: time.sleep(seconds))

    def greet_again(self, decode: FakeEngine) -> None:
        """Returns once it is done."""
        done = threading.Event()
        for worker in self.workers:
            targets = worker.half._outbox._targets
            targets._greet(targets.at("127.0.0.1", decode.port))
            worker.half._courier.door.call(done.set)
        assert done.wait(PATIENCE)

    def _couriers(self) -> list[Courier]:
        return [worker.half._courier for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.half.close()
