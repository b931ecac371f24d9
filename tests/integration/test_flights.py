"""Nodes that launch ahead, under the live scheduler, on a device that is the host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.device_kit import HostDevice, HostEvent, PaddedAttention
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.kvcache.layout import blocks_for
from cloverinfer.nodes import build
from cloverinfer.nodes.config import COLOCATED
from cloverinfer.nodes.device import Event
from cloverinfer.nodes.device_forward import DeviceForward
from cloverinfer.nodes.device_seats import DeviceShape
from cloverinfer.nodes.flights import Flights
from cloverinfer.nodes.local import ColocatedNode
from cloverinfer.nodes.rows import RowTable

FOLLOW_SECONDS = 2.0
"""The longest that a step waits to be followed, until one has been."""


class FollowedEvent(HostEvent):
    """Does not happen before a step was launched behind another, however slow the scheduler is."""

    def __init__(self, polls: int) -> None:
        super().__init__(polls)
        self._until = time.monotonic() + FOLLOW_SECONDS

    def ready(self) -> bool:
        due = HostFlyer.most_flights == 2 or time.monotonic() > self._until
        return due and super().ready()

    def wait(self, timeout: float = 0.0) -> None:
        """At once: nothing follows while the node waits."""


class FollowedDevice(HostDevice):
    def event(self) -> Event:
        return FollowedEvent(self.late)


class HostFlyer(ColocatedNode):
    """A colocated node as on a GPU; the host draws where a temperature is above 0."""

    most_flights = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.backend.close()
        self.backend = PaddedAttention()
        self.backend.allocate(self.layout, self.model.arch.num_heads)
        size = self.config.cache.block_size
        self.rows = RowTable(size, local_attention=True, on_device=True)
        shape = DeviceShape(self.config.max_rows, blocks_for(self.model.max_model_len + 1, size))
        forward = DeviceForward(self.half, self.backend, FollowedDevice(late=3), shape)
        forward.capture(lambda line: None)
        self.flights = Flights(forward, self.rows, self._report_done, self.report_failure)

    def step(self, timeout: float) -> None:
        super().step(timeout)
        assert self.flights is not None
        HostFlyer.most_flights = max(HostFlyer.most_flights, len(self.flights))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


def prompts() -> list[list[int]]:
    return [[(7 * i + k) % 90 + 1 for k in range(1 + 5 * i % 40)] for i in range(14)]


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.8},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 1},
        {"temperature": 0.0, "logit_bias": {7: 2.0}, "min_tokens": 4, "stop_token_ids": [3, 9]},
    ]
    return [
        SamplingParams(max_tokens=5 + 3 * i % 20, seed=i, ignore_eos=i % 5 > 0, **kinds[of])
        for i, of in enumerate([0, 4, 1, 0, 5, 2, 0, 4, 3, 0, 5, 2, 1, 0])
    ]


@pytest.mark.parametrize("blocks", [100, 9])
def test_the_same_tokens_one_ahead(
    folder: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(model_path=str(folder), dtype="float32")
    fields: dict[str, Any] = {"topology": "colocated", "num_blocks": blocks, "block_size": 8}
    fields |= {"max_num_seqs": 6, "max_num_batched_tokens": 32, "threads": 1, "max_model_len": 64}
    fields |= {"attention_backend": "torch", "device": "cpu"}
    with LLM(model, async_scheduling=False, **fields) as llm:
        wanted = llm.generate(prompts(), params())
    monkeypatch.setitem(build._CLASSES, COLOCATED, HostFlyer)
    monkeypatch.setattr(HostFlyer, "most_flights", 0)
    with LLM(model, async_scheduling=True, **fields) as llm:
        said = llm.generate(prompts(), params())
        check_idle(llm)
    assert HostFlyer.most_flights == 2
    assert [one.token_ids for one in said] == [one.token_ids for one in wanted]
    assert [one.finish_reason for one in said] == [one.finish_reason for one in wanted]
    for one, other in zip(said, wanted, strict=True):
        scores, others = one.logprobs or [], other.logprobs or []
        assert [score.token_id for score in scores] == [score.token_id for score in others]
        assert [score.logprob for score in scores] == pytest.approx(
            [score.logprob for score in others], abs=1e-4
        )
