"""Captured decode steps and steps launched ahead on a GPU: `make test-gpu`.

The same plans with graphs and without give the same tokens, in every size of graph; and under the
real scheduler, which launches one step ahead, tokens are those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.same_tokens import Case, check, check_idle, reference, run
from tests.tiny_models import add_tokenizer, make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.attention.cuda import CudaAttention, missing
from cloverinfer.kvcache.layout import PoolLayout, blocks_for
from cloverinfer.models import DenseHalf, load_half, resolve_model
from cloverinfer.models.device_sampling import DeviceSampler
from cloverinfer.nodes.device import CudaDevice
from cloverinfer.nodes.device_forward import DeviceForward, buckets_up_to
from cloverinfer.nodes.device_seats import DeviceShape
from cloverinfer.nodes.launched import Launched
from cloverinfer.nodes.rows import RowTable
from cloverinfer.wire.messages import Join, Sampling, StepPlan

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(300),
]
BLOCK, LONGEST, MAX_ROWS, STEPS = 16, 400, 33, 12
COLOCATED: dict[str, Any] = {"topology": "colocated", "executor": "local", "device": "cuda"}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(folder: Path, dtype: str) -> DenseHalf:
    config = ModelConfig(model_path=str(folder), dtype=dtype)
    return load_half(resolve_model(config, device="cuda"), 0, torch.device("cuda", 0))


@dataclass
class Steps:
    """Plans made by hand: all prompts in one step, then a token of each in every step."""

    half: DenseHalf
    graphs: bool
    ahead: bool
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens computed, by request."""

    def __post_init__(self) -> None:
        self.backend = CudaAttention()
        blocks = blocks_for(LONGEST, BLOCK)
        layout = PoolLayout(self.half.specs, BLOCK, blocks * MAX_ROWS)
        self.backend.allocate(layout, self.half.arch.num_heads)
        device = torch.device("cuda", 0)
        shape, sampler = DeviceShape(MAX_ROWS, blocks), DeviceSampler(device)
        self.forward = DeviceForward(self.half, self.backend, CudaDevice(device), shape, sampler)
        if self.graphs:
            self.forward.capture(lambda line: None)
        self.rows = RowTable(BLOCK, local_attention=True, on_device=True)

    def launch(self, rows: list[int], counts: list[int], joins: list[Join]) -> Launched:
        starts = [self.lengths.get(row, 0) for row in rows]
        self.lengths |= {row: a + n for row, a, n in zip(rows, starts, counts, strict=True)}
        plan = StepPlan(0, 0, rows, starts, counts, [True] * len(rows), joins, [], [])
        self.rows.apply(plan)
        return self.forward.launch(self.rows.batch(plan), self.rows.take_changes())

    def say(self, prompts: list[list[int]], temperature: float = 0.0) -> list[list[int]]:
        """What each prompt's row says in ``STEPS`` steps."""
        blocks = blocks_for(LONGEST, BLOCK)
        joins = [
            Join(
                row,
                0,
                list(prompt),
                0,
                list(range(row * blocks, (row + 1) * blocks)),
                Sampling(temperature, 0, 0.9, 100 + row),
            )
            for row, prompt in enumerate(prompts)
        ]
        rows = list(range(len(prompts)))
        flights = [self.launch(rows, [len(prompt) for prompt in prompts], joins)]
        said: list[list[int]] = []
        for _ in range(STEPS - 1):
            if not self.ahead:
                said.append(flights.pop(0).take().tokens)
            flights.append(self.launch(rows, [1] * len(rows), []))
            if self.ahead:
                said.append(flights.pop(0).take().tokens)
        said += [launched.take().tokens for launched in flights]
        return [list(row) for row in zip(*said, strict=True)]

    def close(self) -> None:
        torch.cuda.synchronize()
        self.backend.close()


def prompts_for(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = [1 + 7 * row % 50 for row in range(count)]
    lengths[0] = 300
    return [torch.randint(1, 90, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_of_every_size_say_what_eager_steps_say(
    family: str, temperature: float, tmp_path: Path
) -> None:
    half = load(make_tiny(family, tmp_path), "float32")
    for count in [*buckets_up_to(MAX_ROWS), 3, 7, 30]:
        prompts = prompts_for(count)
        said = []
        for graphs, ahead in ((False, False), (True, False), (True, True)):
            steps = Steps(half, graphs, ahead)
            said.append(steps.say(prompts, temperature))
            steps.close()
        assert said[0] == said[1] == said[2], count


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Case]]:
    folder = add_tokenizer(make_tiny("llama", tmp_path_factory.mktemp("llama")))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to("cuda")
    return str(folder), reference(peer, prompts_for(24), 40)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("rows", [24, 5])
def test_the_live_scheduler_one_ahead(
    llama: tuple[str, list[Case]], ahead: bool, rows: int
) -> None:
    model, cases = llama
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": 64, "num_blocks": 200}
    check(cases, run(model, cases, 40, async_scheduling=ahead, **limits, **COLOCATED))


def test_preempted_rows_join_anew_one_ahead(llama: tuple[str, list[Case]]) -> None:
    model, cases = llama
    cases = cases[1:]  # the others' prompts are short
    few = {"block_size": 16, "num_blocks": 14, "strict": False, "enable_prefix_caching": False}
    check(cases, run(model, cases, 40, async_scheduling=True, **few, **COLOCATED))


def test_stops_found_late_end_where_they_should(llama: tuple[str, list[Case]]) -> None:
    model, cases = llama
    params = [
        SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=[case.tokens[7]])
        for case in cases
    ]
    with LLM(ModelConfig(model_path=model, dtype="float32"), **COLOCATED) as llm:
        said = llm.generate([case.prompt for case in cases], params)
        check_idle(llm)
    for case, one in zip(cases, said, strict=True):
        stops = {0, case.tokens[7]}  # 0 ends a text
        end = next(i for i, token in enumerate(case.tokens) if token in stops)
        assert one.finish_reason == "stop"
        check([Case(case.prompt, case.tokens[: end + 1], case.margins)], [one.token_ids])
